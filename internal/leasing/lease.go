// Package leasing leases runs, extends leases, and reclaims leases that have expired.
//
// A lease is a worker's time-limited ownership of a run. While it lasts, the row's status is
// leased. It expires at lease_until, by the database's clock alone. Each lease has a new random
// lease_token, the fence: every later statement about the run must present it, and changes
// nothing once the run has another token.
package leasing

import (
	"encoding/json"
	"time"

	"github.com/google/uuid"
	"github.com/simple-workflow/simple-workflow/internal/settling"
	"github.com/simple-workflow/simple-workflow/run"
)

// A Lease is a run that this process has leased, with the terms of the lease.
type Lease struct {
	run.Info
	Token     uuid.UUID
	Step      uuid.UUID // the process token that the run moves, if it is a step of a process; zero: a plain run
	Payload   json.RawMessage
	Priority  int
	Postponed int           // how often the handler has postponed it with run.Again
	Suspect   bool          // its last lease expired: perhaps it killed its worker
	Exhausted bool          // no attempt is left: the worker fails it without calling a handler
	Follows   bool          // max_attempts in the row is the default, or was set by a policy: then the present policy of the type decides
	Alone     bool          // a suspect at its last attempt, after that was given back once: no other suspect is leased until it has ended
	Length    time.Duration // how long the lease lasts, counted from Taken
	Timeout   time.Duration // the time limit of this attempt, counted from Taken; 0: none
	Taken     time.Time     // when the request for the lease was about to be sent, by this process's clock
	Chain     Chain         // of the steps that were carried on to this one
	Enqueued  time.Time     // when a policy's deadline begins to count, by the database's clock; zero: no deadline applies, because a person has retried it

	runAt time.Time
}

// Ahead reports whether the run was leased ahead of its handler, which may begin only after Begin has said so. Such a
// lease has a token of UUID version 8 (RFC 9562), and every other lease one of version 4, so that its row says it too.
func (l *Lease) Ahead() bool { return l.Token.Version() == aheadVersion }

// Waited returns how long the run was due before it was leased.
func (l *Lease) Waited() time.Duration { return l.StartedAt.Sub(l.runAt) }

// A Settlement is a leased run with the outcome to be recorded.
type Settlement struct {
	Lease
	settling.Outcome
}

// A SettleError names the run of a batch that made a hook fail. After a hook has returned one, the worker settles that
// run alone, and the rest of the batch without it. If Err is marked with run.Permanent, a success of the run becomes a
// failure with Err.
type SettleError struct {
	Run    uuid.UUID
	Others []uuid.UUID // other runs of the batch that must be settled alone too
	Err    error       // why Run cannot be settled; never nil
}

func (e *SettleError) Error() string { return e.Err.Error() }
func (e *SettleError) Unwrap() error { return e.Err }

// Terms are the conditions under which one poll of a worker leases runs of a type. The worker computes them from its
// handler's options and from its free slots (Worker.terms in package worker), and a Poller asks for them at each poll.
type Terms struct {
	Length  time.Duration // length of the lease
	Timeout time.Duration // time limit of an attempt: deadline_at is set this far ahead; 0: none
	Limit   int           // a run has at most this many attempts, even if its max_attempts is higher; 0: max_attempts alone counts
	Room    int           // how many more runs of the Group may be leased; negative: any number
	Group   string        // types with the same Group share one Room
	Quick   bool          // runs may be leased ahead of their handlers; ignored if Room is not negative

	// Grace is how long runs are left to other workers. A run is leased only once it has been due for this long. After a
	// pause of its type has ended, or its breaker has closed, it waits for this long again.
	Grace time.Duration
}

// Suspects describes the suspects that a worker process holds. Exhausted runs do not count, since no handler is called
// for them. A suspect is watched for its first two seconds. It is kept alone once its last attempt was given back.
type Suspects struct {
	Watched bool   // some are still watched, because they may kill the process: no suspect is leased that would be at its last attempt
	Running bool   // handlers of some may be executing, watched or not: a suspect that is leased now is not alone
	Strays  bool   // handlers of some still execute although their leases are over. This counts as Running, but a suspect to be kept alone is leased all the same
	Alone   bool   // one is kept alone: no other suspect is leased
	Last    []Held // those at their last attempt: before another suspect is leased, their rows are marked as not alone
}
