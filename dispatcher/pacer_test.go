package dispatcher

import (
	"testing"
	"time"
)

// A turn that is slow alone costs no rest. Slow turns, one after the other, take a tenth of the time, or half of it if
// they take longer than ten seconds.
func TestPacer(t *testing.T) {
	var p pacer
	for n, c := range []struct{ took, rest time.Duration }{
		{2 * time.Second, 0},
		{time.Millisecond, 10 * time.Millisecond},
		{2 * time.Second, 10 * time.Millisecond},
		{500 * time.Millisecond, 5 * time.Second},
		{3 * time.Second, 5 * time.Second},
		{4 * time.Second, 10 * time.Second},
		{time.Minute, 10 * time.Second},
		{time.Minute, time.Minute},
		{0, 0},
	} {
		if rest := p.rest(c.took); rest != c.rest {
			t.Errorf("turn %d: %v after %v, want %v", n, rest, c.took, c.rest)
		}
	}
}
