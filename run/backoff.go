package run

import (
	"math/rand/v2"
	"time"

	"github.com/simple-workflow/simple-workflow/internal/shipped"
)

// A Curve says how the pause grows from one failure to the next. The zero value is Exponential.
type Curve string

// The curves, as workflow_policy.curve has them.
const (
	Exponential Curve = "exponential" // twice as long each time
	Linear      Curve = "linear"      // longer by Base each time
	Constant    Curve = "constant"    // always Base
)

// Backoff is how long a failed run waits: it grows, up to a cap, and has jitter. The zero
// value uses the defaults.
type Backoff struct {
	Base  time.Duration // before the second attempt; 0: 1 s
	Cap   time.Duration // the most, jitter aside; 0: 5 min
	Curve Curve         // empty: Exponential
}

// Delay returns the pause after a failure that n failures came before:
//
//	raw = min(cap, base·2^n), plus random(0, raw/2)
//
// With Linear it is base·(n+1), with Constant base. It is never negative, whatever n, Base and Cap are.
func (b Backoff) Delay(n int) time.Duration {
	raw := b.Raw(n)
	return raw + time.Duration(rand.Int64N(int64(raw/2)+1))
}

// longestPause is such that the jitter on top cannot overflow.
const longestPause = 365 * 24 * time.Hour

// Raw returns the pause without jitter.
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
			base *= 2 // below a year before, so it cannot overflow
		}
	}
	return min(base, limit)
}
