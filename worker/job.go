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

// suspectHold is how long a suspect is watched. A run that kills its process mostly does so at once.
const suspectHold = 2 * time.Second

// stuckGrace is how long a handler may continue after its context has ended. Then its slot is given to another
// run.
const stuckGrace = 5 * time.Second

// fewLate is how many outcomes may be late before types are stopped, however few slots there are. So many
// outcomes and batches are settled at a time.
const fewLate = soloSettlers + batchSettlers

// A job is a lease that this process holds. It exists from the moment the lease is taken until the outcome is recorded
// or the lease is lost. At first it waits in line for a slot, see line.
type job struct {
	leasing.Lease
	entry   *entry // nil: the type has no handler
	row     int    // max_attempts in the row; Lease.MaxAttempts is the effective limit
	ctx     context.Context
	cancel  context.CancelCauseFunc
	extras  extras
	kept    *leasing.Kept    // for an outcome read from workflow_kept, else nil
	outcome settling.Outcome // set once the handler has returned
	took    time.Duration    // by the handler; 0 for a kept outcome
	trouble fault.Series     // failed tries to settle it
	unsure  bool             // an earlier try may have been recorded
	lasting bool             // tries have failed for longer than fault.Patience: any error may be this row's
	plainly bool             // its failure was replaced by one with our own text
	offered *offer           // the outcome before the worker replaced it, see blame; nil: not replaced

	// Guarded by jobs.mu.
	confirmed   time.Time  // when the last request was sent that is known to have extended the lease
	extended    time.Time  // confirmed, or a later time at which the lease was believed to be ours without an answer
	ended       time.Time  // when ctx was ended; zero: not yet
	done        bool       // the handler has returned
	doneAt      time.Time  // when the handler returned
	locked      bool       // done, and another session has the row locked
	answered    bool       // done, and the last try to settle it failed with an SQLSTATE
	gone        bool       // the lease was taken back, revoked or settled
	left        bool       // the slot was taken from the running handler
	beatRefused bool       // the row refuses an extension of the lease
	unsettled   bool       // done, but the outcome is refused
	stage       stage      // where in the line it is
	slotted     bool       // it holds a slot
	place       int        // in line.working, if it holds a slot
	began       time.Time  // when it got its slot
	hooked      *hookError // the hook that refused the last try to settle it, or nil
	received    time.Time  // when the job was added, later than Taken if the request took a while
	begun       bool       // the handler was called; set for suspects only
	proven      bool       // a suspect that did not kill this process
}

// jobs holds the leases of this process.
type jobs struct {
	line
	mu     sync.Mutex
	byID   map[uuid.UUID]*job
	kinds  map[*entry]*kind
	parked int             // jobs that are unsettled
	stuck  int             // running handlers whose slots were taken away, and abandoned effects
	strays int             // those of the handlers that run suspects
	proven int             // suspects that this process has survived
	behind map[*entry]bool // entries whose outcomes are recorded too slowly, by the last call of suspects; nil: not too many are late
	freed  chan struct{}   // signalled when a slot becomes free, or a lease ends
}

func (s *jobs) add(j *job) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.addLocked(j)
}

func (s *jobs) addLocked(j *job) {
	j.received = time.Now()
	if s.byID == nil {
		s.byID, s.kinds = map[uuid.UUID]*job{}, map[*entry]*kind{}
	}
	// The same run may be here already: its lease was lost, but the old handler is still running. The newer
	// lease replaces the old one, whose handler counts as stuck until it returns.
	if old := s.byID[j.ID]; old != nil {
		s.endLocked(old, run.ErrLost)
		if !old.done {
			s.stray(old)
		}
		if s.byID[j.ID] == old {
			s.drop(old)
		}
	}
	s.byID[j.ID] = j
	s.kindOf(j.entry).held++
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
	s.kindOf(j.entry).held--
	if j.unsettled {
		s.parked--
	}
	if j.done {
		s.prove(j)
	}
	s.signal()
}

func (s *jobs) signal() { poke(s.freed) }

func (s *jobs) count() int {
	s.mu.Lock()
	defer s.mu.Unlock()
	return len(s.byID)
}

// atWork returns how many slots have a handler.
func (s *jobs) atWork() int {
	s.mu.Lock()
	defer s.mu.Unlock()
	return len(s.working)
}

func (s *jobs) countOf(e *entry) int {
	s.mu.Lock()
	defer s.mu.Unlock()
	if k := s.kinds[e]; k != nil {
		return k.held
	}
	return 0
}

// suspects returns how many suspects may be leased, and which are held.
//
// A process starts with one suspect at a time, and may watch one more for each suspect that it has survived. So
// after a crash that no run caused, the many suspects of the dead worker get through in doubling steps. While a
// suspect at its last attempt is watched, no other is added.
//
// suspects also notes which types may not be leased because their outcomes are recorded too slowly, see isBehind.
// It does so while more than an eighth of the slots, and more than fewLate, have an outcome that has waited for
// a third of its lease. Outcomes that wait for a locked row, or that the database refuses, do not count. A
// worker that continued to lease would hold, and extend, more leases than it can settle, and lose some. Their
// runs would be executed again, which loads the slow database even more.
func (s *jobs) suspects() (n int, held leasing.Suspects) {
	s.mu.Lock()
	defer s.mu.Unlock()
	watched, late, alone := 0, 0, false
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
			// The handler of an unsettled suspect has returned: it cannot harm others any more, but others can harm
			// it.
			held.Running = held.Running || !j.unsettled
			held.Alone = held.Alone || j.Alone && !j.unsettled
			if last {
				held.Last = append(held.Last, leasing.Held{ID: j.ID, Token: j.Token})
			}
		}
		if j.done && !j.unsettled && !j.locked && !j.answered && time.Since(j.doneAt) > j.Length/3 {
			if late++; behind == nil {
				behind = map[*entry]bool{}
			}
			behind[j.entry] = true
		}
	}
	held.Watched = watched > 0
	if !alone {
		n = max(min(1+s.proven, s.slots)-watched, 0)
	}
	if s.behind = nil; late > max(s.slots/8, fewLate) {
		s.behind = behind
	}
	return n, held
}

// isBehind reports whether no more runs of an entry are leased because their outcomes are recorded too slowly.
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

// prove counts a suspect that the process has survived. A suspect whose handler was never called proves
// nothing.
func (s *jobs) prove(j *job) {
	if j.suspicious() && j.begun {
		j.proven = true
		s.proven++
	}
}

// lock notes whether another session has the job's row locked.
func (s *jobs) lock(j *job, locked bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	j.locked = locked
}

// park frees the slot of a job whose outcome cannot be recorded for now.
func (s *jobs) park(j *job) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.byID[j.ID] == j && !j.unsettled {
		j.unsettled = true
		s.parked++
		s.signal()
	}
}

// failed notes the error of a failed try to settle.
func (s *jobs) failed(batch []*job, err error) {
	var hook *hookError
	_ = errors.As(err, &hook)
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, j := range batch {
		j.hooked, j.answered = hook, code(err) != "" && !tooLong(err)
	}
}

// othersRefusedBy reports whether a hook refuses another job as well.
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

// refuseBeat notes whether the job's row refuses an extension of the lease.
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

// returned notes that the handler has returned. It reports whether the slot was taken away before; then the
// outcome is dropped.
func (s *jobs) returned(j *job) (left bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	j.done, j.doneAt = true, time.Now()
	if j.slotted {
		s.pace.n, s.pace.returned = s.pace.n+1, j.doneAt
		s.kindOf(j.entry).took(j.doneAt.Sub(j.began))
		s.vacate(j)
	}
	if j.left {
		s.stuck--
		if j.Suspect {
			s.strays--
		}
	}
	return j.left
}

// abandon counts a goroutine as stuck until it ends.
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

// leave takes the slot from a handler that continues although its context has ended. It reports false if the
// handler has returned.
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

// stray counts a handler without a slot until it returns.
func (s *jobs) stray(j *job) {
	j.left = true
	s.vacate(j)
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

// end ends the job's context with the given cause. Only the first cause counts. Once the handler has returned,
// end does nothing: effects may use the context until the outcome is recorded.
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
	if j.stage != inSlot { // it has not begun
		s.withdrawLocked(j)
		s.drop(j)
	}
}
