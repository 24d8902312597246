package protocol

import "fmt"

// Model F: a breaker for a type. Errors that mean "what I need is down" open it. While it is open, one run at a time
// is leased, as a probe; one success closes it. Attempts that met the outage are given back. With bad, run 0 always
// reports an outage, even if the others do not (such as a 503 for its payload alone).
//
// This is built: workflow_probe_v1 checks whether the run that was last leased as a probe is still leased. The real
// rule of five outages of three runs is reduced to two of two here, without pauses.

const fRuns = 3

type fState struct {
	status            [fRuns]byte // pending, leased, succeeded
	holder            [fRuns]int8
	order             [fRuns]uint8 // lowest first
	said              [fRuns]bool  // it has met the outage since the last success
	attempt           [fRuns]uint8
	up                [2]bool
	knows             [2]bool // whether each worker has last read that it is open
	last              int8    // the run last leased as a probe; -1: none
	down, open, probe bool    // probe: the flag, in the design that has one
	everDown          bool
	outages, kills    uint8
	fault             string
}

type fDesign struct {
	bad            bool
	outages, kills uint8
	// Planted faults and inferior designs.
	flag      bool // a flag says that a probe is under way, instead of the lease
	sameFirst bool // a run that is given back keeps its place
	any       bool // outages of one run are enough to open it
	charged   bool // attempts that met the outage are charged
}

func (d fDesign) design() design[fState] {
	s := fState{last: -1, up: [2]bool{true, true}, outages: d.outages, kills: d.kills}
	for i := range s.status {
		s.status[i], s.holder[i], s.order[i] = 'p', -1, uint8(i)
	}
	return design[fState]{start: s, next: d.next, wrong: func(s fState) string {
		if s.open && !s.everDown && d.bad {
			return "one run has opened the breaker for all"
		}
		for _, a := range s.attempt {
			if a > 2 {
				return "an outage has used up attempts"
			}
		}
		return s.fault
	}, done: func(s fState) bool { // nothing is required of the bad run: its deadline ends it
		return (d.bad || s.status[0] == 's') && s.status[1] == 's' && s.status[2] == 's'
	}}
}

func (d fDesign) next(s fState, do func(string, fState)) {
	for p := range s.up {
		name := fmt.Sprintf("W%d", p+1)
		if !s.up[p] {
			t := s
			t.up[p] = true
			do(name+" starts anew", t)
			continue
		}
		if s.knows[p] != s.open {
			t := s
			t.knows[p] = s.open
			do(name+" looks for lanes and breakers", t)
		}
		first := -1
		for i, c := range s.status {
			if c == 'p' && (first < 0 || s.order[i] < s.order[first]) {
				first = i
			}
		}
		free := !s.knows[p] || s.last < 0 || s.status[s.last] != 'l'
		if d.flag {
			free = !s.knows[p] || !s.probe
		}
		if first >= 0 && free {
			t := s
			t.status[first], t.holder[first] = 'l', int8(p)
			t.attempt[first]++
			if s.knows[p] {
				t.last, t.probe = int8(first), true
			}
			do(fmt.Sprintf("%s leases run %d", name, first), t)
		}
		for i, c := range s.status {
			if c != 'l' || s.holder[i] != int8(p) {
				continue
			}
			t := s
			t.holder[i] = -1
			if s.down || d.bad && i == 0 {
				t.status[i], t.said[i] = 'p', true
				if !d.charged {
					t.attempt[i]--
				}
				if !d.sameFirst {
					for k := range t.order { // behind all others
						if t.order[k] > t.order[i] {
							t.order[k]--
						}
					}
					t.order[i] = fRuns - 1
				}
				sayers := 0
				for _, said := range t.said {
					if said {
						sayers++
					}
				}
				if t.open = s.open || sayers > 1 || d.any; !s.open {
					t.last = -1
				}
				t.probe = false
				do(fmt.Sprintf("%s: run %d meets the outage and is given back", name, i), t)
				continue
			}
			t.status[i] = 's'
			t.open, t.probe, t.last, t.said = false, false, -1, [fRuns]bool{}
			do(fmt.Sprintf("%s: run %d succeeds", name, i), t)
		}
		if s.kills > 0 {
			t := s
			t.kills--
			t.up[p], t.knows[p] = false, false
			for i := range t.holder {
				if t.holder[i] == int8(p) {
					t.status[i], t.holder[i] = 'p', -1 // its lease expires and is taken back; charged, see model A
					t.attempt[i] = 0
				}
			}
			do(name+" is killed, its leases are taken back", t)
		}
	}
	if s.down {
		t := s
		t.down = false
		do("what they need is back", t)
	} else if s.outages > 0 {
		t := s
		t.outages--
		t.down, t.everDown = true, true
		do("what they need goes down", t)
	}
}
