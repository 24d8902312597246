package run

import (
	"math/rand/v2"
	"time"

	"github.com/simple-workflow/simple-workflow/internal/shipped"
)

// A Curve is how the pause grows from one failure to the next. The zero value is Exponential.
type Curve string

// The curves, as in the column workflow_policy.curve.
const (
	Exponential Curve = "exponential" // doubles each time
	Linear      Curve = "linear"      // grows by Base each time
	Constant    Curve = "constant"    // always Base
)

// A Backoff says how long a failed run waits before its next attempt. The pause grows up to a cap,
// and has jitter. The zero value uses the defaults.
type Backoff struct {
	Base  time.Duration // pause before the second attempt; 0: 1 s
	Cap   time.Duration // longest pause, jitter aside; 0: 5 min
	Curve Curve         // empty: Exponential
}

// Delay returns the pause after a failure. n is the number of failures before this one:
//
//	raw = min(cap, base·2^n), plus random(0, raw/2)
//
// With Linear, raw is min(cap, base·(n+1)); with Constant, it is min(cap, base). Delay is never
// negative, for any n, Base and Cap.
func (b Backoff) Delay(n int) time.Duration {
	raw := b.Raw(n)
	return raw + time.Duration(rand.Int64N(int64(raw/2)+1))
}

// longestPause is the upper limit of any pause. It is far below the point where the jitter could overflow.
const longestPause = 365 * 24 * time.Hour

// Raw returns what Delay returns, without the jitter.
func (b Backoff) Raw(n int) time.Duration {
	base, limit := b.Base, b.Cap
	if base <= 0 {
		base = shipped.BackoffBase
	}
	if limit <= 0 {
		limit = shipped.BackoffCap
	}
	limit = min(limit, longestPause)
	base = min(base, limit)
	switch b.Curve {
	case Constant:
	case Linear:
		if n > 0 && time.Duration(n) >= limit/base {
			return limit
		}
		base *= time.Duration(max(n, 0) + 1)
	default:
		for ; n > 0 && base < limit; n-- {
			base *= 2 // cannot overflow: it was below a year
		}
	}
	return min(base, limit)
}
