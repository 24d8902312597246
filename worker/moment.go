package worker

import (
	"sync/atomic"
	"time"
)

// born is the time that moments are measured from.
var born = time.Now()

// A moment is a time that several goroutines use. It is measured by the monotonic clock, so changes of the wall
// clock do not affect it. The zero moment is long ago.
type moment struct{ after atomic.Int64 }

func (m *moment) now() { m.after.Store(int64(max(time.Since(born), 1))) }

// ago returns how long ago the moment was.
func (m *moment) ago() time.Duration {
	if m.after.Load() == 0 {
		return 1<<63 - 1
	}
	return time.Since(born) - time.Duration(m.after.Load())
}

// time returns the moment as a time. The zero moment is the zero time.
func (m *moment) time() time.Time {
	if m.after.Load() == 0 {
		return time.Time{}
	}
	return born.Add(time.Duration(m.after.Load()))
}
