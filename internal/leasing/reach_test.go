package leasing

import (
	"testing"
	"time"
)

// A lease that is committed late, up to lag after its statement started, is found by a later search for expired leases,
// at whatever times the searches come. In this test the oldest lease that is held is always a new one, so it makes no
// search reach further back, and no search starts from the beginning.
func TestReach(t *testing.T) {
	base := time.Date(2026, 1, 1, 0, 0, 0, 0, time.UTC)
	for late := 100 * time.Millisecond; late <= lag; late += 300 * time.Millisecond {
		for offset := time.Duration(0); offset < 10*time.Second; offset += 130 * time.Millisecond {
			r := &Reclaimer{whole: budget{cost: time.Hour, end: base.Add(time.Hour)}} // never again
			r.looked(base, -1, oldest{base, true})
			started := base.Add(20*time.Second + offset)
			found := time.Duration(-1)
			for now := base; now.Before(base.Add(60 * time.Second)); now = now.Add(450 * time.Millisecond) {
				from, reaching := r.next(now)
				if found < 0 && !now.Before(started.Add(late)) && !started.Before(from) {
					found = now.Sub(started.Add(late))
				}
				r.looked(now, reaching, oldest{now, true})
			}
			limit := 10 * time.Second
			if late < time.Second {
				limit = time.Second
			} else if late < 4*time.Second {
				limit = 4 * time.Second
			}
			if found < 0 || found > limit {
				t.Fatalf("committed %v late at %v: found after %v, want at most %v", late, offset, found, limit)
			}
		}
	}
}

// The next search from the beginning comes within a minute, however long the last one took.
func TestWholeLooks(t *testing.T) {
	now := time.Now()
	r := &Reclaimer{whole: budget{cost: 10 * time.Second, end: now}}
	r.looked(now, -1, oldest{now, true})
	if _, reaching := r.next(now.Add(maxWholePause - time.Second)); reaching < 0 {
		t.Error("looked from the beginning at once")
	}
	if _, reaching := r.next(now.Add(maxWholePause)); reaching >= 0 {
		t.Error("put it off for longer than a minute")
	}
}
