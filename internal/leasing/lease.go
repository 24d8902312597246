// Package lease takes, extends and takes back leases on runs.
//
// A lease is a time-bound claim: the row's status is leased until lease_until, and its
// lease_token, random and new each time, is the fence that every later statement about the
// run must present. Only the database's clock decides when a lease has expired.
package leasing

import (
	"encoding/json"
	"time"

	"github.com/google/uuid"
	"github.com/simple-workflow/simple-workflow/internal/settling"
	"github.com/simple-workflow/simple-workflow/run"
)

// A Lease is a run that this process has leased, with the terms it got.
type Lease struct {
	run.Info
	Token     uuid.UUID
	Step      uuid.UUID // the token of a process graph that the run moves; zero: a plain run
	Payload   json.RawMessage
	Priority  int
	Postponed int           // how often the handler has put it off
	Suspect   bool          // its last lease expired: its process may have died of it
	Exhausted bool          // no attempt is left: to be failed, not to be started
	Follows   bool          // MaxAttempts is that of the policy of its type as it was written last, or the default, which means the policy
	Alone     bool          // a suspect at its last attempt, which it has been given back once: no other suspect is leased until it has ended
	Length    time.Duration // how long the lease lasts from Taken
	Timeout   time.Duration // the most this attempt may take from Taken; 0: no limit
	Taken     time.Time     // by this process's clock, before the request was sent
	Enqueued  time.Time     // from when a policy's deadline counts, by the database's clock as StartedAt; zero: it has none, since a person has had the run tried again

	runAt time.Time
}

// Waited returns how long the run had been due when it was leased.
func (l *Lease) Waited() time.Duration { return l.StartedAt.Sub(l.runAt) }

// A Settlement is a leased run together with what is to be recorded about it.
type Settlement struct {
	Lease
	settling.Outcome
}

// A SettleError is trouble that one run of a batch is the cause of. A hook that returns one has it settled by itself,
// and the others without it. If Err is marked with run.Permanent, a success of the run becomes a failure with it.
type SettleError struct {
	Run    uuid.UUID
	Others []uuid.UUID // of the batch, which are to be settled by themselves, too
	Err    error       // of Run; never nil
}

func (e *SettleError) Error() string { return e.Err.Error() }
func (e *SettleError) Unwrap() error { return e.Err }

// Terms are the conditions under which runs of a type are leased.
type Terms struct {
	Length  time.Duration // of the lease
	Timeout time.Duration // deadline_at = now + Timeout; 0: none
	Limit   int           // attempts that runs get, if they do not say less themselves; 0: what they say
	Room    int           // how many more of the Group may be leased; negative: any number
	Group   string        // types with the same Group share their Room
	Grace   time.Duration // leave runs alone until they have been due this long, with no pause and no open breaker of their type meanwhile
}

// Suspects are those that a process holds, exhausted runs left out.
type Suspects struct {
	Watched bool   // some have yet to show that they do not kill the process; meanwhile none is leased whose last attempt it would be
	Running bool   // some run, watched or not: whoever is leased is not alone
	Strays  bool   // handlers of some go on although their leases are over: likewise, but who is to be kept alone is not kept waiting for them
	Alone   bool   // one is kept alone: no other is leased
	Last    []Held // those at their last attempt, which are not alone any more when another is leased
}
