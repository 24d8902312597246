package worker

import (
	"context"
	"errors"
	"sync"
	"time"

	"github.com/google/uuid"
	"github.com/simple-workflow/simple-workflow/internal/fault"
	"github.com/simple-workflow/simple-workflow/internal/leasing"
	"github.com/simple-workflow/simple-workflow/internal/settling"
	"github.com/simple-workflow/simple-workflow/run"
)

// suspectHold is how long a suspect is watched: what kills its process mostly does so at once.
const suspectHold = 2 * time.Second

// stuckGrace is how long a handler may go on after its context has ended before its slot is
// given to another run.
const stuckGrace = 5 * time.Second

// fewLate is how many outcomes may be late whatever the number of slots: no more than are being recorded.
const fewLate = soloSettlers + batchSettlers

// A job is a lease that this process holds, from the moment it is taken until its outcome
// is recorded or it is lost.
type job struct {
	leasing.Lease
	entry   *entry // nil: no handler
	row     int    // max_attempts as it stands in the row; MaxAttempts is what the run has
	ctx     context.Context
	cancel  context.CancelCauseFunc
	extras  extras
	kept    *leasing.Kept    // its outcome is one that is kept; else nil
	outcome settling.Outcome // once the handler has returned
	took    time.Duration    // the handler; of an outcome that is kept 0
	trouble fault.Series     // tries to settle it that have failed
	unsure  bool             // an earlier try to settle may have been recorded
	lasting bool             // for so long that any error may be its own
	plainly bool             // its failure is told in words of our own
	offered *offer           // what it was before that, or before the database refused its result

	// Guarded by jobs.mu.
	confirmed   time.Time  // start of the last request that is known to have extended the lease
	extended    time.Time  // the same, or when it was last believed to be ours without asking
	ended       time.Time  // when ctx was made to end; zero: not yet
	done        bool       // the handler has returned
	doneAt      time.Time  // when it did
	locked      bool       // done, and somebody has its row locked
	answered    bool       // done, and the last try to settle it failed with an answer of the database's
	gone        bool       // the lease is somebody else's, or nobody's
	left        bool       // the slot was taken away from the running handler
	beatRefused bool       // its row refuses to have the lease extended
	parked      bool       // done, but its outcome is refused: it needs no slot
	hooked      *hookError // what the last try to settle it was refused by; nil: by no hook
	received    time.Time  // when it was added: its request may have taken a while
	begun       bool       // the handler of a suspect was called
	proven      bool       // a suspect that has not killed this process
}

// jobs are the leases that this process holds.
type jobs struct {
	mu     sync.Mutex
	byID   map[uuid.UUID]*job
	byType map[*entry]int
	stuck  int             // handlers still running whose slots were taken away
	strays int             // those of them that are suspects
	proven int             // suspects that this process has outlived
	behind map[*entry]bool // whose outcomes are recorded too slowly, as room has found it last; nil: not many are
	freed  chan struct{}   // signalled when a slot becomes free
}

func (s *jobs) add(j *job) {
	s.mu.Lock()
	defer s.mu.Unlock()
	j.received = time.Now()
	if s.byID == nil {
		s.byID, s.byType = map[uuid.UUID]*job{}, map[*entry]int{}
	}
	// The same run can be here twice: lost, its old handler still running. The newer lease
	// takes the place; the older one is only waited for as stuck.
	if old := s.byID[j.ID]; old != nil {
		s.endLocked(old, run.ErrLost)
		if !old.done {
			s.stray(old)
		}
		s.drop(old)
	}
	s.byID[j.ID] = j
	s.byType[j.entry]++
}

// remove frees the job's slot. It may be called more than once.
func (s *jobs) remove(j *job) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.byID[j.ID] == j {
		s.drop(j)
	}
}

func (s *jobs) drop(j *job) {
	delete(s.byID, j.ID)
	s.byType[j.entry]--
	if j.done {
		s.prove(j)
	}
	s.signal()
}

func (s *jobs) signal() {
	select {
	case s.freed <- struct{}{}:
	default:
	}
}

func (s *jobs) count() int {
	s.mu.Lock()
	defer s.mu.Unlock()
	return len(s.byID)
}

func (s *jobs) countOf(e *entry) int {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.byType[e]
}

// room returns how many more runs may be leased, how many of these may be suspects, and which are held.
//
// A process begins with one suspect at a time, and may watch one more for each that it has
// outlived: after a crash that was nobody's fault the many runs of the dead worker get through
// in doubling steps. No other is added while one at its last attempt is watched.
//
// Where outcomes are recorded too slowly, no more runs of their types are leased: while more than an eighth of the slots have one that
// has waited for a third of its lease, and not for a row that is locked or refused. A worker that took more would hold, and extend, more
// leases than it can settle, and lose some: their runs would be done again, which is more to do for whatever is slow.
func (s *jobs) room(concurrency int) (n, suspects int, held leasing.Suspects) {
	s.mu.Lock()
	defer s.mu.Unlock()
	parked, watched, late, alone := 0, 0, 0, false
	var behind map[*entry]bool
	held.Strays = s.strays > 0
	for _, j := range s.byID {
		last := j.Attempt >= min(j.row, j.MaxAttempts)
		if j.suspicious() && time.Since(j.received) < suspectHold {
			watched++
			alone = alone || last
		} else {
			s.prove(j)
		}
		if j.Suspect && !j.Exhausted {
			// The handler of one that is parked has returned: it does no harm any more, but is harmed.
			held.Running = held.Running || !j.parked
			held.Alone = held.Alone || j.Alone && !j.parked
			if last {
				held.Last = append(held.Last, leasing.Held{ID: j.ID, Token: j.Token})
			}
		}
		switch {
		case j.parked:
			parked++
		case j.done && !j.locked && !j.answered && time.Since(j.doneAt) > j.Length/3:
			if late++; behind == nil {
				behind = map[*entry]bool{}
			}
			behind[j.entry] = true
		}
	}
	held.Watched = watched > 0
	if !alone {
		suspects = max(min(1+s.proven, concurrency)-watched, 0)
	}
	if s.behind = nil; late > max(concurrency/8, fewLate) {
		s.behind = behind
	}
	// The outcomes that wait are bounded too.
	taken := len(s.byID) - min(parked, concurrency)
	return max(concurrency-taken, 0), suspects, held
}

// isBehind reports whether outcomes of an entry's runs are recorded too slowly for more of them to be leased.
func (s *jobs) isBehind(e *entry) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.behind[e]
}

func (j *job) suspicious() bool { return j.Suspect && !j.Exhausted && !j.proven }

// begin notes that the handler of a suspect is called.
func (s *jobs) begin(j *job) {
	s.mu.Lock()
	defer s.mu.Unlock()
	j.begun = true
}

// prove counts a suspect that the process has outlived. One that never ran proves nothing.
func (s *jobs) prove(j *job) {
	if j.suspicious() && j.begun {
		j.proven = true
		s.proven++
	}
}

// lock notes whether somebody has the job's row locked.
func (s *jobs) lock(j *job, locked bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	j.locked = locked
}

// park frees the slot of a job whose outcome cannot be recorded for the time being.
func (s *jobs) park(j *job) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.byID[j.ID] == j && !j.parked {
		j.parked = true
		s.signal()
	}
}

// failed notes what a try to settle has failed with.
func (s *jobs) failed(batch []*job, err error) {
	var hook *hookError
	_ = errors.As(err, &hook)
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, j := range batch {
		j.hooked, j.answered = hook, code(err) != "" && !tooLong(err)
	}
}

// othersRefusedBy reports whether a hook refuses another job than this one, too.
func (s *jobs) othersRefusedBy(hook *hookError, than *job) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, j := range s.byID {
		if j != than && j.hooked != nil && j.hooked.hook == hook.hook {
			return true
		}
	}
	return false
}

// refuseBeat notes whether the job's row refuses to have its lease extended.
func (s *jobs) refuseBeat(j *job, refused bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	j.beatRefused = refused
}

func (s *jobs) all() []*job {
	s.mu.Lock()
	defer s.mu.Unlock()
	list := make([]*job, 0, len(s.byID))
	for _, j := range s.byID {
		list = append(list, j)
	}
	return list
}

// returned notes that the handler has returned. It reports whether it had been left behind:
// then its outcome is not wanted any more.
func (s *jobs) returned(j *job) (left bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	j.done, j.doneAt = true, time.Now()
	if j.left {
		s.stuck--
		if j.Suspect {
			s.strays--
		}
	}
	return j.left
}

// abandon counts a goroutine as stuck until it is done.
func (s *jobs) abandon(done <-chan error) {
	s.mu.Lock()
	s.stuck++
	s.mu.Unlock()
	go func() {
		_ = <-done
		s.mu.Lock()
		s.stuck--
		s.mu.Unlock()
	}()
}

// leave takes the slot away from a handler that goes on although its context has ended. It
// reports false if the handler has returned by now.
func (s *jobs) leave(j *job) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	if j.done || j.left {
		return false
	}
	s.stray(j)
	if s.byID[j.ID] == j {
		s.drop(j)
	}
	return true
}

// stray counts a handler that goes on without a slot until it has returned.
func (s *jobs) stray(j *job) {
	j.left = true
	s.stuck++
	if j.Suspect {
		s.strays++
	}
}

func (s *jobs) stuckCount() int {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.stuck
}

// end ends the job's context with the given cause, once, unless the handler has returned:
// effects may use the context until the outcome is recorded.
func (s *jobs) end(j *job, cause error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.endLocked(j, cause)
}

func (s *jobs) endLocked(j *job, cause error) {
	if j.done {
		return
	}
	if j.ended.IsZero() {
		j.ended = time.Now()
	}
	j.cancel(cause)
}
