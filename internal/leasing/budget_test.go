package leasing

import (
	"testing"
	"time"
)

// Looks from the start take at most a twentieth of the time. While idle, a cheap look is always
// allowed. While busy, even a cheap look comes only every tenth of a second. A look that stalled
// delays the next one by ten seconds at most.
func TestBudget(t *testing.T) {
	now := time.Now()
	for _, c := range []struct {
		cost, ago time.Duration
		busy      bool
		want      time.Duration
	}{
		{time.Millisecond, 0, false, 0},
		{time.Millisecond, 0, true, busyPause},
		{time.Millisecond, 20 * time.Millisecond, true, busyPause - 20*time.Millisecond},
		{time.Millisecond, time.Second, true, 0},
		{10 * time.Millisecond, 0, false, 190 * time.Millisecond},
		{20 * time.Millisecond, 0, true, 380 * time.Millisecond},
		{500 * time.Millisecond, 4 * time.Second, true, 5500 * time.Millisecond},
		{time.Second, 10 * time.Second, false, 0},
		{time.Minute, 0, false, longest},
	} {
		if got := (budget{c.cost, now.Add(-c.ago)}).wait(now, c.busy); got != c.want {
			t.Errorf("cost %v, %v ago, busy %v: wait %v, want %v", c.cost, c.ago, c.busy, got, c.want)
		}
	}
	if got := (budget{}).wait(now, true); got != 0 {
		t.Errorf("never looked: wait %v", got)
	}
}
