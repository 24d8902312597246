package protocol

import (
	"hash/maphash"
	"slices"
)

// A design is one variant of a protocol: its start, what can happen in a state, what must never be true of a state,
// and when the work is done.
type design[S comparable] struct {
	start S
	// next calls do for each thing that can happen in s. Each is one atomic step.
	next func(s S, do func(what string, to S))
	// told does the same with a description of each step; if it is nil, next is used.
	told func(s S, do func(what string, to S))
	// wrong names the rule that s breaks, "" if none.
	wrong func(s S) string
	// done reports whether nothing is left to do in s. Such a state must be reachable from every state: otherwise
	// something was lost or is stuck.
	done func(s S) bool
}

// A Finding is the result of exploring a variant.
type Finding struct {
	States, Depth int
	Wrong         string   // the rule that was broken; "" if none
	Story         []string // the steps that led there
	Full          bool     // gave up: more states than the limit
}

const stuck = "stuck: the work can no longer be finished"

// explore visits every state that can be reached from the start, nearest first, so the first story that ends badly is
// a shortest one. It gives up after most states.
func explore[S comparable](d design[S], most int) (f Finding) {
	var (
		states = []S{d.start}
		from   = []int32{-1} // the state from which each was first reached
		first  = []int32{0}  // where the edges of each state begin in to
		to     []int32       // the edges of one state after those of another
		index  = newIndex[S]()
	)
	index.find(&states, d.start, 0)
	for i := int32(0); int(i) < len(states); i++ {
		s := states[i]
		if f.Wrong = d.wrong(s); f.Wrong != "" {
			f.States, f.Story = len(states), tell(d, states, from, i)
			f.Depth = len(f.Story)
			return f
		}
		d.next(s, func(_ string, t S) {
			if t == s {
				return
			}
			at := index.find(&states, t, int32(len(states)))
			if int(at) == len(states) {
				states, from = append(states, t), append(from, i)
			}
			to = append(to, at)
		})
		first = append(first, int32(len(to)))
		if len(states) > most {
			f.States, f.Full = len(states), true
			return f
		}
	}
	f.States = len(states)
	for i := f.States - 1; i > 0; i = int(from[i]) {
		f.Depth++
	}
	// Find the states from which a done state can be reached, backwards until nothing changes.
	good := make([]bool, len(states))
	for changed := true; changed; {
		changed = false
		for i := len(states) - 1; i >= 0; i-- {
			if !good[i] && (d.done(states[i]) || slices.ContainsFunc(to[first[i]:first[i+1]], func(t int32) bool { return good[t] })) {
				good[i], changed = true, true
			}
		}
	}
	if i := slices.Index(good, false); i >= 0 {
		f.Wrong, f.Story = stuck, tell(d, states, from, int32(i))
		f.Depth = len(f.Story)
	}
	return f
}

// tell repeats the steps from the start to a state and returns their descriptions.
func tell[S comparable](d design[S], states []S, from []int32, i int32) (story []string) {
	if d.told == nil {
		d.told = d.next
	}
	for ; from[i] >= 0; i = from[i] {
		var step string
		d.told(states[from[i]], func(what string, t S) {
			if step == "" && t == states[i] {
				step = what
			}
		})
		story = append(story, step)
	}
	slices.Reverse(story)
	return story
}

// An index finds states by their value, and stores only their places.
type index[S comparable] struct {
	seed  maphash.Seed
	slots []int32 // place + 1; 0: free. Their number is a power of two.
	used  int
}

func newIndex[S comparable]() *index[S] {
	return &index[S]{seed: maphash.MakeSeed(), slots: make([]int32, 1<<10)}
}

// find returns the place of s among the states. If s is new, it records next as its place and returns it.
func (x *index[S]) find(states *[]S, s S, next int32) int32 {
	at := x.slot(states, s)
	if x.slots[at] != 0 {
		return x.slots[at] - 1
	}
	x.slots[at] = next + 1
	if x.used++; 2*x.used > len(x.slots) {
		old := x.slots
		x.slots = make([]int32, 2*len(old))
		for _, place := range old {
			if place != 0 && place != next+1 { // that one is not among the states yet
				x.slots[x.slot(states, (*states)[place-1])] = place
			}
		}
		x.slots[x.slot(states, s)] = next + 1
	}
	return next
}

func (x *index[S]) slot(states *[]S, s S) int {
	mask := len(x.slots) - 1
	at := int(maphash.Comparable(x.seed, s)) & mask
	for x.slots[at] != 0 && (int(x.slots[at]) > len(*states) || (*states)[x.slots[at]-1] != s) {
		at = (at + 1) & mask
	}
	return at
}
