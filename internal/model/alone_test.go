package model

import (
	"cmp"
	"testing"

	"pgregory.net/rapid"

	"github.com/simple-workflow/simple-workflow/internal/settling"
	"github.com/simple-workflow/simple-workflow/run"
)

var (
	workers  = []string{"w1", "w2", "w3"}
	verdicts = []settling.Verdict{settling.Succeed, settling.Fail, settling.TryAgain, settling.Postpone, settling.Release}
	// people are the commands of people, each with the values of N that it may have.
	people = []command{
		{Do: "cancel"}, {Do: "delete"}, {Do: "undelete"}, {Do: "retry", N: 1}, {Do: "retry", N: 2}, {Do: "hold"}, {Do: "resume"},
		{Do: "set priority", N: 1}, {Do: "set priority", N: -1}, {Do: "set run_at", N: 0}, {Do: "set run_at", N: 2}, {Do: "set pending"},
	}
)

// aSteps is the minimum number of steps that TestModelAlone takes.
const aSteps = 100_000

// For any commands in any order with any tokens, the model keeps these rules: a finished run stays finished unless it
// is retried, a lease records at most one outcome, a stale token changes nothing, no more starts are charged than
// max_attempts, and the history determines the status.
func TestModelAlone(t *testing.T) {
	for steps := 0; steps < aSteps && !t.Failed(); {
		rapid.Check(t, func(t *rapid.T) {
			s := state{Status: run.Pending, Max: rapid.IntRange(1, 4).Draw(t, "max_attempts"), Timeout: rapid.IntRange(0, 3).Draw(t, "timeout")}
			history := []event{{Type: "created"}}
			outcomes := map[int]int{}
			t.Repeat(map[string]func(*rapid.T){"step": func(t *rapid.T) {
				c := anyCommand(s).Draw(t, "command")
				next, answer, told := step(s, c)
				t.Logf("    %s: %s → %s", answer, s, next)
				if answer == "recorded" {
					outcomes[c.Token]++
				}
				history = append(history, told...)
				check(t, s, next, c, told)
				if outcomes[c.Token] > 1 {
					t.Errorf("lease %d has recorded %d outcomes", c.Token, outcomes[c.Token])
				}
				if got := replay(history); got != next.Status {
					t.Errorf("the history tells that the run is %s: %v", got, history)
				}
				s = next
				steps++
			}})
		})
	}
}

// anyCommand draws a command, with a current, an old or an invalid token.
func anyCommand(s state) *rapid.Generator[command] {
	return rapid.Custom(func(t *rapid.T) command {
		c := command{
			Do: rapid.SampledFrom([]string{"lease", "heartbeat", "settle", "reclaim", "wait", "set policy", someone}).Draw(t, "do"),
			By: rapid.SampledFrom(workers).Draw(t, "by"),
		}
		switch c.Do {
		case someone:
			c = rapid.SampledFrom(people).Draw(t, "what")
			c.By = someone
		case "set policy":
			c.N = rapid.IntRange(1, 5).Draw(t, "attempts")
		case "wait":
			c.N = rapid.IntRange(1, 2).Draw(t, "hours")
		case "heartbeat":
			c.Token = rapid.IntRange(1, s.LeaseNo+1).Draw(t, "token")
		case "settle":
			c.Token = rapid.IntRange(1, s.LeaseNo+1).Draw(t, "token")
			c.Verdict = rapid.SampledFrom(verdicts).Draw(t, "verdict")
			c.N = 2 * rapid.IntRange(0, 1).Draw(t, "delay")
			if c.Verdict == settling.Fail || c.Verdict == settling.TryAgain {
				c.Most = rapid.SampledFrom([]int{0, max(cmp.Or(s.Policy, attempts), s.Attempt)}).Draw(t, "most")
			}
		}
		return c
	})
}

// check compares a run before and after a command.
func check(t *rapid.T, was, is state, c command, told []event) {
	claim := func(holds bool, what string) {
		if !holds {
			t.Errorf("%s:\nwas  %s\nis   %s\ntold %v", what, was, is, told)
		}
	}
	retried := c.Do == "retry" && was.Status == run.Failed && is.Status == run.Pending
	claim(!was.Status.Finished() || is.Status == was.Status || retried, "a finished run stays finished")
	claim(c.Token == 0 || c.Token == was.Token || is == was && len(told) == 0, "a stale token changes nothing")
	claim(is.Attempt >= 0 && is.Attempt <= is.Max, "no more than max_attempts are charged")
	claim(is.LeaseNo == was.LeaseNo || is.LeaseNo == was.LeaseNo+1 && is.Token == is.LeaseNo, "lease_no grows with each lease")
	claim((is.Token != 0) == (is.Status == run.Leased), "there is a token while the run is leased")
	claim(is.Token == 0 || is.Token == is.LeaseNo, "the token is that of the last lease")
	claim(is.Status == was.Status || len(told) > 0, "each change of status is told")
}

// replay returns the status that results from the history.
func replay(history []event) (status run.Status) {
	for _, e := range history {
		switch e.Type {
		case "created", "retried", "postponed", "released", "expired", "requeued":
			status = run.Pending
		case "leased", "succeeded", "failed", "cancelled":
			status = run.Status(e.Type)
		}
	}
	return status
}
