package run

import (
	"math/rand/v2"
	"time"
)

// Defaults of Backoff.
const (
	DefaultBackoffBase = time.Second
	DefaultBackoffCap  = 5 * time.Minute
)

// Backoff is how long a failed run waits: exponential, with a cap and jitter. The zero
// value uses the defaults.
type Backoff struct {
	Base time.Duration // before the second attempt; 0: DefaultBackoffBase
	Cap  time.Duration // the most, jitter aside; 0: DefaultBackoffCap
}

// Delay returns the pause after a failure that n failures came before:
//
//	raw = min(cap, base·2^n), plus random(0, raw/2)
//
// It is never negative, whatever n, Base and Cap are.
func (b Backoff) Delay(n int) time.Duration {
	raw := b.Raw(n)
	return raw + time.Duration(rand.Int64N(int64(raw/2)+1))
}

// Raw returns the pause without jitter: min(cap, base·2^n).
func (b Backoff) Raw(n int) time.Duration {
	base, limit := b.Base, b.Cap
	if base <= 0 {
		base = DefaultBackoffBase
	}
	if limit <= 0 {
		limit = DefaultBackoffCap
	}
	// Never so long that the jitter on top could overflow.
	limit = min(limit, 365*24*time.Hour)
	for ; n > 0 && base < limit; n-- {
		base *= 2 // below a year before, so it cannot overflow
	}
	return min(base, limit)
}
