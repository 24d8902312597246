package model

import (
	"cmp"
	"fmt"
	"strings"

	"github.com/simple-workflow/simple-workflow/internal/settling"
	"github.com/simple-workflow/simple-workflow/internal/shipped"
	"github.com/simple-workflow/simple-workflow/run"
)

// A state is what the model knows about a run. Times are counted in remaining hours, rounded up; 0 means passed. All
// stored times are half an hour off the full hours, so that the time which a test takes never changes a count.
type state struct {
	Status    run.Status
	Attempt   int
	Max       int
	Written   int  // the policy's attempts when it was last settled or reclaimed; 0: never
	Policy    int  // the policy's attempts now; 0: as shipped
	Granted   bool // a person has given it attempts of its own
	Postponed int
	LeaseNo   int
	Token     int // the number of the held lease, which stands for its token; 0: none
	Settled   int // the lease whose outcome was recorded last
	Uncharged bool
	Suspect   bool
	Held      bool
	Deleted   bool
	Priority  int
	Timeout   int // of its type; 0: none
	Due       int
	Left      int // of the lease
	Limit     int // until deadline_at; also 0 if there is none
}

// String describes how the state differs from that of a new run.
func (s state) String() string {
	text := fmt.Sprintf("%s, attempt %d of %d", s.Status, s.Attempt, s.Max)
	add := func(tell bool, format string, value any) {
		if tell {
			text += fmt.Sprintf(", "+format, value)
		}
	}
	add(s.Status == run.Leased, "lease %d", s.LeaseNo)
	add(s.Status == run.Leased, "for %d h", s.Left)
	add(s.Limit > 0, "at most %d h", s.Limit)
	add(s.Uncharged, "not charged%s", "")
	add(s.Status != run.Leased && s.LeaseNo > 0, "%d leases", s.LeaseNo)
	add(s.Settled != 0, "lease %d settled it", s.Settled)
	add(s.Due > 0, "due in %d h", s.Due)
	add(s.Postponed > 0, "postponed %d times", s.Postponed)
	add(s.Written != 0, "written by its policy: %d", s.Written)
	add(s.Policy != 0, "its policy says %d", s.Policy)
	add(s.Priority != 0, "priority %d", s.Priority)
	add(s.Suspect, "suspect%s", "")
	add(s.Held, "held%s", "")
	add(s.Deleted, "deleted%s", "")
	add(s.Status == run.Leased && s.Token != s.LeaseNo, "token of lease %d", s.Token)
	return text
}

// A command is something that the worker By, or someone else, does to a run.
type command struct {
	Do      string
	By      string
	Token   int              // heartbeat and settle: the lease that the worker believes it holds
	Verdict settling.Verdict // settle
	N       int              // hours, attempts or a priority
	Most    int              // settle: the attempts that the worker believes the policy allows; 0: it writes none
}

// String leaves out who executes the command.
func (c command) String() string {
	switch {
	case c.Do == "settle" && c.Most > 0:
		return fmt.Sprintf("lease %d %s for %d h, of %d", c.Token, c.Verdict, c.N, c.Most)
	case c.Do == "settle" && c.N > 0:
		return fmt.Sprintf("lease %d %s for %d h", c.Token, c.Verdict, c.N)
	case c.Do == "settle":
		return fmt.Sprintf("lease %d %s", c.Token, c.Verdict)
	case c.Do == "heartbeat":
		return fmt.Sprintf("heartbeat of lease %d", c.Token)
	case c.Do == "wait" || c.Do == "retry" || strings.HasPrefix(c.Do, "set") && c.Do != "set pending":
		return fmt.Sprintf("%s %d", c.Do, c.N)
	}
	return c.Do
}

// GoString is what rapid prints.
func (c command) GoString() string { return strings.TrimSpace(c.By + " " + c.String()) }

// An event is one row of workflow_event.
type event struct {
	Type    string
	Attempt int
	LeaseNo int
	Actor   string
}

const (
	someone = "someone"
	length  = 2 // of each lease, in hours
)

// step is the model: it returns the run's state after the command, the answer ("" if the command does not concern the
// run), and the events added to the history.
func step(was state, c command) (s state, answer string, told []event) {
	s = was
	tell := func(kind string) { told = append(told, event{kind, was.Attempt, was.LeaseNo, c.By}) }
	switch c.Do {
	case "wait":
		s.Due, s.Left, s.Limit = max(s.Due-c.N, 0), max(s.Left-c.N, 0), max(s.Limit-c.N, 0)
	case "lease":
		if s.Status != run.Pending || s.Held || s.Deleted || s.Due > 0 {
			return was, "", nil
		}
		return s.leased(c.By, s.Attempt == s.Max, s.Timeout)
	case "heartbeat":
		switch {
		case c.Token == s.Token && s.Timeout > 0 && !s.Uncharged:
			s.Left, answer = min(length, s.Limit), "kept"
		case c.Token == s.Token:
			s.Left, answer = length, "kept"
		case s.Status == run.Cancelled:
			answer = "cancelled"
		default:
			answer = "lost"
		}
	case "settle":
		if c.Token != s.Token {
			return was, "refused", nil
		}
		tell(string(c.Verdict))
		if c.Most > 0 && s.follows() {
			s.Max, s.Written = c.Most, c.Most
		}
		switch c.Verdict {
		case settling.Succeed, settling.Fail:
			s = s.free(run.Status(c.Verdict))
		default:
			if c.Verdict != settling.TryAgain && !s.Uncharged {
				s.Attempt--
			}
			if c.Verdict == settling.Postpone {
				s.Postponed++
			}
			s = s.free(run.Pending)
			s.Due = c.N
		}
		s.Suspect = s.Suspect && c.Verdict == settling.Release
		s.Settled, answer = c.Token, "recorded"
	case "reclaim":
		if s.Status != run.Leased || s.Left > 0 {
			return was, "", nil
		}
		s.Suspect = true
		tell("expired")
		if s.follows() {
			most, again := s.Attempt+2, s.Attempt
			if was.Suspect {
				most = s.Max
			}
			if was.Suspect && s.Attempt < s.Max {
				again++
			}
			s.Max = max(min(cmp.Or(s.Policy, attempts), most), again)
			s.Written = s.Max
		}
		if s.Attempt == s.Max {
			s, answer, again := s.leased(c.By, true, 0)
			return s, answer, append(told, again...)
		}
		s = s.free(run.Pending)
		s.Due, answer = min(s.Attempt, 2), "due again"
	case "cancel":
		if s.Status.Finished() {
			return was, "too late: " + string(s.Status), nil
		}
		tell("cancelled")
		s = s.free(run.Cancelled)
		s.Suspect, answer = false, "cancelled"
	case "delete":
		if s.Deleted {
			return was, "already deleted", nil
		}
		if s.Status == run.Leased {
			tell("cancelled")
			s = s.free(run.Cancelled)
		}
		tell("deleted")
		s.Deleted, answer = true, "deleted"
	case "undelete":
		if s.Deleted {
			tell("undeleted")
		}
		s.Deleted, answer = false, "UPDATE 1"
	case "retry":
		switch {
		case s.Deleted:
			return was, "not failed: deleted", nil
		case s.Status != run.Failed:
			return was, "not failed: " + string(s.Status), nil
		}
		tell("requeued")
		s = s.free(run.Pending)
		s.Postponed, s.Suspect, s.Due, s.Max, answer = 0, false, 0, max(s.Max, s.Attempt+c.N), "pending"
		s.Written, s.Granted = 0, true
	case "hold", "resume":
		if s.Held != (c.Do == "hold") {
			tell(map[string]string{"hold": "held", "resume": "resumed"}[c.Do])
		}
		s.Held, answer = c.Do == "hold", "UPDATE 1"
	case "set policy":
		s.Policy = c.N
	case "set priority":
		s.Priority, answer = c.N, "UPDATE 1"
	case "set run_at":
		s.Due, answer = c.N, "UPDATE 1"
	case "set pending": // by a bare UPDATE, without a function
		if s.Status.Finished() {
			return was, "refused", nil
		}
		if s.Status == run.Leased {
			tell("released")
		}
		s, answer = s.free(run.Pending), "UPDATE 1"
	default:
		panic(fmt.Sprintf("unknown command %q", c.Do))
	}
	return s, answer, told
}

// shipped is the number of attempts without a policy of the user's.
const attempts = 25

// follows reports whether the policy determines the attempts of the run.
func (s state) follows() bool {
	return s.Max == s.Written || s.Written == 0 && s.Max == shipped.MaxAttempts && !s.Granted
}

// leased is s with a new lease. The lease of an exhausted run is not charged.
func (s state) leased(by string, exhausted bool, timeout int) (state, string, []event) {
	s.Status, s.LeaseNo, s.Uncharged = run.Leased, s.LeaseNo+1, exhausted
	s.Token, s.Left, s.Limit = s.LeaseNo, length, timeout
	if timeout > 0 {
		s.Left = min(length, timeout)
	}
	if exhausted {
		s.Limit = 0
	} else {
		s.Attempt++
	}
	return s, "leased", []event{{"leased", s.Attempt, s.LeaseNo, by}}
}

// free is s without its lease.
func (s state) free(status run.Status) state {
	s.Status, s.Token, s.Uncharged, s.Left, s.Limit = status, 0, false, 0, 0
	return s
}
