package model

import (
	"fmt"

	"github.com/anishathalye/porcupine"

	"github.com/simple-workflow/simple-workflow/internal/settling"
	"github.com/simple-workflow/simple-workflow/run"
)

// A register is what concurrent clients can observe of a run: a status, and the lease that may write to it. Its
// lease_no stands for the token.
type register struct {
	Status       run.Status
	LeaseNo      int
	Attempt, Max int
	Charged      bool // whether the lease was charged
	Brief        bool // the lease may expire during the test
	Lost         int  // the request that took the lease and whose answer was lost; 0: the answer arrived
	Settled      int  // the lease whose outcome was recorded last
}

// A call is a request about a run.
type call struct {
	id      int // of the call
	run     int
	do      string
	lease   int // heartbeat, settle and recorded: the lease in question
	verdict settling.Verdict
	brief   bool // lease
	lost    int  // give back: the request whose answer was lost
}

// A reply is the answer to a call. Without an answer the call may have taken effect, at any time, or not.
type reply struct {
	none           bool
	answer         string // of a heartbeat and similar calls; the status for a read
	lease, attempt int    // of a lease, a read, and a reclaim that leases an exhausted run
}

var registers = (&porcupine.NondeterministicModel{
	Init: func() []any { return []any{register{Status: run.Pending, Max: 2}} },
	Step: func(state, input, output any) []any {
		next := state.(register).after(input.(call), output.(reply))
		states := make([]any, len(next))
		for i, r := range next {
			states[i] = r
		}
		return states
	},
	Partition: func(history []porcupine.Operation) [][]porcupine.Operation {
		parts := make([][]porcupine.Operation, runsEach)
		for _, o := range history {
			i := o.Input.(call).run
			parts[i] = append(parts[i], o)
		}
		return parts
	},
	DescribeOperation: func(input, output any) string { return fmt.Sprintf("%v: %v", input, output) },
}).ToModel()

// after returns the possible states of the register after the call was answered with a. It returns none if the call
// cannot be answered like this.
func (r register) after(c call, a reply) []register {
	holds := r.Status == run.Leased && r.LeaseNo == c.lease
	next, works, right := r, false, false // works: the call turns r into next; right: a is the answer to it
	switch c.do {
	case "lease":
		works, next = r.Status == run.Pending, r.leased(c.brief)
		right = works && a.lease == next.LeaseNo && a.attempt == next.Attempt
		if a.none {
			next.Lost = c.id
		}
	case "give back":
		works, next = r.Status == run.Leased && r.Lost == c.lost, r.freed(run.Pending, true)
	case "heartbeat":
		works, next.Brief = holds && (a.none || a.answer == "kept"), false
		gone := map[bool]string{true: "cancelled", false: "lost"}[r.Status == run.Cancelled]
		right = holds && (a.answer == "kept" || a.answer == "locked") || !holds && a.answer == gone
	case "settle":
		works, next = holds, r.settled(c)
		right = holds == (a.answer == "recorded")
	case "recorded":
		right = a.answer == fmt.Sprint(r.Settled == c.lease)
	case "cancel":
		works, next = !r.Status.Finished(), r.freed(run.Cancelled, false)
		right = works && a.answer == "cancelled" || !works && a.answer == "too late: "+string(r.Status)
	case "retry":
		works, next = r.Status == run.Failed, r.freed(run.Pending, false)
		next.Max = max(r.Max, r.Attempt+1)
		right = works && a.answer == "pending" || !works && a.answer == "not failed: "+string(r.Status)
	case "read":
		right = a == reply{answer: string(r.Status), lease: r.LeaseNo, attempt: r.Attempt}
	case "reclaim":
		works, next = r.Status == run.Leased && r.Brief, r.freed(run.Pending, false)
		again := r.Attempt < r.Max
		if !again {
			next = r.leased(true)
		}
		switch {
		case a.none:
		case works && again && a.lease == 0: // the answer does not name the runs that are due again
			return []register{r, next}
		case a.lease == 0:
			works, right = false, true
		default:
			right = works && !again && a.lease == next.LeaseNo
		}
	}
	switch {
	case !a.none && !right:
		return nil
	case works:
		return []register{next}
	}
	return []register{r}
}

func (r register) leased(brief bool) register {
	r.Status, r.LeaseNo, r.Brief, r.Lost, r.Charged = run.Leased, r.LeaseNo+1, brief, 0, r.Attempt < r.Max
	if r.Charged {
		r.Attempt++
	}
	return r
}

// freed is r without its lease. If free is set, a charged attempt is given back.
func (r register) freed(status run.Status, free bool) register {
	if free && r.Charged {
		r.Attempt--
	}
	r.Status, r.Brief, r.Lost, r.Charged = status, false, 0, false
	return r
}

func (r register) settled(c call) register {
	switch c.verdict {
	case settling.Succeed, settling.Fail:
		r = r.freed(run.Status(c.verdict), false)
	default:
		r = r.freed(run.Pending, c.verdict != settling.TryAgain)
	}
	r.Settled = c.lease
	return r
}

func (c call) String() string {
	switch c.do {
	case "settle":
		return fmt.Sprintf("settle lease %d as %s", c.lease, c.verdict)
	case "heartbeat", "recorded":
		return fmt.Sprintf("%s, lease %d", c.do, c.lease)
	case "lease":
		return map[bool]string{true: "lease for a moment", false: "lease for long"}[c.brief]
	}
	return c.do
}

func (a reply) String() string {
	switch {
	case a.none:
		return "no answer"
	case a.answer == "":
		return fmt.Sprintf("lease %d, attempt %d", a.lease, a.attempt)
	case a.lease > 0:
		return fmt.Sprintf("%s, lease %d, attempt %d", a.answer, a.lease, a.attempt)
	}
	return a.answer
}
