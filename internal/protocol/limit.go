package protocol

import "fmt"

// Model D: a limit on how many runs of a type are leased at the same time. A row represents the limit. Statements of
// a transaction are separate steps: each has a snapshot from its start (READ COMMITTED), and waits for the row of the
// limit if another transaction holds it. Uncommitted changes are invisible to others.

const dRuns = 3

// dTx is a transaction of a worker that leases, or that settles a run and carries on. at: 0 none, 'w' its lock
// statement has a snapshot and waits, 'l' it holds the lock, 'c' it has counted, 'x' it has written
type dTx struct {
	at      byte
	carries bool  // it settles run `of` and stores the next as leased
	of      int8  // the run that it settles
	takes   int8  // the run that it leases; -1: none
	seen    uint8 // how many are leased, in the snapshot that counts
	locks   uint8 // the limits (as bits) whose rows it holds
}

type dRun struct {
	status, lease uint8
	holder        int8
	expired       bool
	locked        bool // by a transaction
}

type dState struct {
	run                             [dRuns]dRun
	believes                        [2][dRuns]uint8 // leases that workers believe in
	tx                              [2]dTx
	up                              [2]bool
	held                            [2]int8 // who holds the row of each limit; -1: nobody
	most, counter                   int8
	kills, freezes, lowers, cancels uint8
	fault                           string
}

type dDesign struct {
	count                           string // "after the lock", "with the lock", "first statement", "no lock", "counter"
	carry                           string // whether and how steps are carried on: "" not at all, "obeys", "ignores", "counts first"
	skip                            bool   // a lock that is held is not waited for
	twoLimits, crossed              bool   // a second limit; carrying on locks in the other order
	most                            int8
	kills, freezes, lowers, cancels uint8
	lateToo                         bool // with counter: an outcome that is refused also counts down
}

func (d dDesign) design() design[dState] {
	var s dState
	for i := range s.run {
		s.run[i] = dRun{status: 'p', holder: -1}
	}
	if d.carry != "" {
		s.run[dRuns-1].status = '-' // stored by the settling of run 0
	}
	s.up, s.held, s.most = [2]bool{true, true}, [2]int8{-1, -1}, d.most
	s.kills, s.freezes, s.lowers, s.cancels = d.kills, d.freezes, d.lowers, d.cancels
	for i := range s.tx {
		s.tx[i] = dTx{takes: -1, of: -1}
	}
	return design[dState]{start: s, next: d.next, wrong: func(s dState) string { return s.fault }, done: func(s dState) bool {
		for _, r := range s.run {
			if r.status == 'p' || r.status == 'l' || r.status == '-' && d.carry != "" {
				return false
			}
		}
		return true
	}}
}

// free reports whether run i has no limit: the step that is settled is of another type than the one carried on.
func (d dDesign) free(i int) bool { return d.carry != "" && i == 0 }

func (d dDesign) leased(s *dState) (n uint8) {
	for i, r := range s.run {
		if r.status == 'l' && !d.free(i) {
			n++
		}
	}
	return n
}

// end releases the locks of a transaction.
func (s *dState) end(p int) {
	tx := &s.tx[p]
	for i := range s.held {
		if s.held[i] == int8(p) {
			s.held[i] = -1
		}
	}
	for _, i := range []int8{tx.of, tx.takes} {
		if i >= 0 {
			s.run[i].locked = false
		}
	}
	*tx = dTx{takes: -1, of: -1}
}

func (d dDesign) next(s dState, do func(string, dState)) {
	for p := range s.tx {
		name := fmt.Sprintf("W%d", p+1)
		if !s.up[p] {
			t := s
			t.up[p] = true
			do(name+" starts anew", t)
			continue
		}
		d.transact(s, p, name, do)
		if s.kills > 0 {
			t := s
			t.kills--
			t.end(p)
			t.up[p], t.believes[p] = false, [dRuns]uint8{}
			do(name+" is killed", t)
		}
		for i, r := range s.run {
			lease := s.believes[p][i]
			mine := r.status == 'l' && r.lease == lease
			if lease != 0 && !r.locked && s.tx[p].at == 0 && !d.free(i) {
				t := s
				t.believes[p][i] = 0
				if mine {
					t.run[i].status, t.run[i].holder, t.run[i].expired = 's', -1, false
				}
				if mine || d.lateToo {
					t.counter--
				}
				do(fmt.Sprintf("%s settles run %d (still its own: %v)", name, i, mine), t)
			}
			if r.status == 'l' && r.expired && !r.locked {
				t := s
				t.run[i].status, t.run[i].holder, t.run[i].expired = 'p', -1, false
				t.counter--
				do(fmt.Sprintf("%s takes run %d back", name, i), t)
			}
		}
	}
	for i, r := range s.run {
		if r.status != 'l' {
			continue
		}
		alive := r.holder >= 0 && s.believes[r.holder][i] == r.lease
		if !r.expired && (!alive || s.freezes > 0) {
			t := s
			t.run[i].expired = true
			if alive {
				t.freezes--
			}
			do(fmt.Sprintf("the lease of run %d expires", i), t)
		}
		if s.cancels > 0 && !r.locked {
			t := s
			t.cancels--
			t.run[i].status, t.run[i].holder, t.run[i].expired = 'c', -1, false
			do(fmt.Sprintf("somebody sets run %d to cancelled by UPDATE", i), t)
		}
	}
	if s.lowers > 0 && s.held[0] < 0 && s.most > 1 {
		t := s
		t.lowers--
		t.most--
		do(fmt.Sprintf("somebody lowers the limit to %d", t.most), t)
	}
}

func (d dDesign) transact(s dState, p int, name string, do func(string, dState)) {
	tx := s.tx[p]
	t := s
	my := &t.tx[p]
	switch tx.at {
	case 0:
		my.at, my.seen = 'w', d.leased(&s)
		do(name+" begins to lease", t)
		if lease := s.believes[p][0]; d.carry != "" && lease != 0 && s.run[0].status == 'l' && s.run[0].lease == lease && !s.run[0].locked {
			my.carries, my.of, t.run[0].locked = true, 0, true
			do(name+" settles run 0 and goes on to carry on", t)
		} else if d.carry != "" && lease != 0 {
			t = s
			t.believes[p][0] = 0
			do(name+" settles run 0: refused", t)
		}
	case 'w':
		order := []int{0}
		if d.twoLimits {
			order = []int{0, 1}
			if tx.carries && d.crossed {
				order = []int{1, 0}
			}
		}
		if d.count == "no lock" || tx.carries && d.carry == "ignores" {
			order = nil
		}
		for _, l := range order {
			if tx.locks&(1<<l) != 0 {
				continue
			}
			if s.held[l] >= 0 && d.skip {
				d.finish(t, p, name+" finds the limit locked", do)
				return
			}
			if s.held[l] >= 0 {
				return // it waits
			}
			t.held[l] = int8(p)
			my.locks |= 1 << l
			do(fmt.Sprintf("%s locks limit %d", name, l+1), t)
			return
		}
		my.at = 'c'
		switch early := tx.carries && d.carry == "counts first"; {
		case d.count == "counter":
			my.seen = uint8(max(s.counter, 0))
		case d.count == "with the lock" || d.count == "first statement" || early:
		default:
			my.seen = d.leased(&s) // the snapshot of a later statement
		}
		do(fmt.Sprintf("%s counts %d", name, my.seen), t)
	case 'c':
		if int8(tx.seen) >= s.most && !(tx.carries && d.carry == "ignores") {
			d.finish(t, p, name+" finds no room", do)
			return
		}
		for i, r := range s.run {
			if tx.carries && i == dRuns-1 || !tx.carries && r.status == 'p' && !r.locked {
				t := s
				t.tx[p].takes, t.tx[p].at, t.run[i].locked = int8(i), 'x', true
				do(fmt.Sprintf("%s writes the lease of run %d", name, i), t)
			}
		}
		if !tx.carries {
			t.end(p)
			do(name+" finds nothing to lease", t)
		}
	case 'x':
		i := tx.takes
		r := &t.run[i]
		r.status, r.lease, r.holder = 'l', r.lease+1, int8(p)
		t.believes[p][i] = r.lease
		t.counter++
		d.finish(t, p, fmt.Sprintf("%s commits the lease of run %d", name, i), do)
	}
}

// finish commits.
func (d dDesign) finish(t dState, p int, what string, do func(string, dState)) {
	tx := t.tx[p]
	if tx.carries {
		t.run[0].status, t.run[0].holder, t.run[0].expired = 's', -1, false
		t.believes[p][0] = 0
		if tx.takes < 0 {
			t.run[dRuns-1].status = 'p'
		}
	}
	t.end(p)
	if int8(d.leased(&t)) > t.most && tx.takes >= 0 {
		t.fault = "more leased than the limit allows"
	}
	do(what, t)
}
