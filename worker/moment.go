package worker

import (
	"sync/atomic"
	"time"
)

// born is the origin of moments.
var born = time.Now()

// A moment is a time that several goroutines use. It goes by the monotonic clock: changes of
// the wall clock do not move it. The zero moment is long ago.
type moment struct{ after atomic.Int64 }

func (m *moment) now() { m.after.Store(int64(max(time.Since(born), 1))) }

// ago returns how long ago the moment was.
func (m *moment) ago() time.Duration {
	if m.after.Load() == 0 {
		return 1<<63 - 1
	}
	return time.Since(born) - time.Duration(m.after.Load())
}

// time returns the moment as a time, and the zero time for the zero moment.
func (m *moment) time() time.Time {
	if m.after.Load() == 0 {
		return time.Time{}
	}
	return born.Add(time.Duration(m.after.Load()))
}
