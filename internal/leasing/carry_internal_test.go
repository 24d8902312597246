package leasing

import (
	"testing"
	"time"

	"github.com/google/uuid"
)

// Steps are leased to begin at once while there is room, and then ahead of their handlers. Those ahead share a token in
// groups. A chain ends after a second, and after mostInChain steps.
func TestCarrierTakes(t *testing.T) {
	room, asked := 2, 0
	c := &Carrier{Group: 3, Worker: "w", Terms: func(typ string, _ int) (Terms, bool) {
		asked++
		return Terms{Length: time.Minute, Quick: typ == "quick"}, typ != "none"
	},
		Keep: func(_ int, quick bool) (ahead, ok bool) {
			room--
			return room < 0, room >= 0 || quick
		}}
	take := func(typ string, chain Chain) bool { return c.Take(Step{Token: uuid.New(), Type: typ, Chain: chain}) }
	if take("none", Chain{}) || room != 2 {
		t.Error("a step without terms is taken")
	}
	if take("quick", Chain{mostInChain, time.Now()}) || take("quick", Chain{1, time.Now().Add(-longestChain - time.Millisecond)}) {
		t.Error("a chain does not end")
	}
	for range 2 {
		if !take("slow", Chain{mostInChain - 1, time.Now()}) {
			t.Error("a step with room is not taken")
		}
	}
	for range 7 {
		if !take("quick", Chain{}) {
			t.Error("a quick step is not taken")
		}
	}
	if asked != 3 {
		t.Errorf("terms were asked for %d times, want once for each of three types", asked)
	}
	if take("slow", Chain{}) {
		t.Error("a slow step is taken without room")
	}
	var got []int
	var last uuid.UUID
	for i, step := range c.taken {
		if step.token != last {
			got, last = append(got, 0), step.token
		}
		got[len(got)-1]++
		if ahead := (&Lease{Token: step.token}).Ahead(); ahead != (i >= 2) {
			t.Errorf("lease %d is ahead: %v", i, ahead)
		}
	}
	if len(got) != 4 || got[0] != 2 || got[1] != 3 || got[2] != 3 || got[3] != 1 {
		t.Errorf("the tokens have %v leases, want 2 to begin at once and then 3, 3 and 1", got)
	}
}
