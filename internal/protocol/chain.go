package protocol

import "fmt"

// Model C: carrying on. The transaction that settles a step stores the next steps as leased by the worker that
// settles. The answer to its commit may be lost. Then the worker settles again with the same token, and if that is
// refused, asks settled_token whether an earlier try was recorded.
//
// A try whose answer was lost either never happened, or was committed, or is still about to commit. In the last case
// it holds the lock on the row of its step, so an update of that row waits, a take-back skips it, and a plain SELECT
// sees the state before.

const cSteps = 3

type cRun struct {
	status  byte // '-': not stored yet
	lease   uint8
	holder  int8
	settled uint8 // the lease that settled it
	direct  bool  // stored as leased by the settling of the previous step
	expired bool
	begun   uint8 // known to the model only: the leases (as bits) under which a handler has begun
	died    bool  // known to the model only: left by a process that died, not begun
}

// cJob.at: 0 none, 'g' to begin, 'r' runs, 'o' returned, 's' settling is sent, 'y' recorded, 'n' refused (these two:
// the answer is under way), 'd' its next steps are in doubt
type cJob struct {
	at     byte
	lease  uint8
	unsure bool
	carry  bool // this try to settle stores the next steps as leased
	tried  bool // an earlier try whose answer was lost stored them so
}

type cLate struct {
	lease uint8 // a commit of this lease is still under way
	carry bool
	by    int8
}

type cProcess struct {
	up, stopping, sees bool // sees: it knows about the pause
	job                [cSteps]cJob
}

type cState struct {
	run                                   [cSteps]cRun
	late                                  [cSteps]cLate
	process                               [2]cProcess
	paused                                bool
	pauses, kills, freezes, losses, stops uint8
	fault                                 string
}

type cDesign struct {
	doubt                                 string // what is done about steps in doubt: "start", "release", "ignore", "at once"
	fork                                  bool   // step 0 is followed by steps 1 and 2; otherwise each step by the next one
	slots                                 int
	pauses, kills, freezes, losses, stops uint8
	// Planted faults.
	optimistic, looksOnlyAtSettle, byName, forgetAtStop, noFence, dropWhenGone, noRoom, unreserved bool
}

func (d cDesign) design() design[cState] {
	var s cState
	for i := range s.run {
		s.run[i] = cRun{status: '-', holder: -1}
	}
	s.run[0].status = 'p'
	for p := range s.process {
		s.process[p].up = true
	}
	s.pauses, s.kills, s.freezes, s.losses, s.stops = d.pauses, d.kills, d.freezes, d.losses, d.stops
	return design[cState]{start: s, next: d.next, wrong: d.wrong, done: func(s cState) bool {
		for _, r := range s.run {
			if r.status != 's' {
				return false
			}
		}
		return true
	}}
}

func (d cDesign) after(i int) []int {
	switch {
	case d.fork && i == 0:
		return []int{1, 2}
	case d.fork || i == cSteps-1:
		return nil
	}
	return []int{i + 1}
}

func (d cDesign) before(i int) int {
	if d.fork {
		return 0
	}
	return i - 1
}

func (d cDesign) wrong(s cState) string {
	if s.fault != "" {
		return s.fault
	}
	wasted := 0
	for i, r := range s.run {
		if r.lease > 7 {
			return "the model needs more leases"
		}
		if r.died && r.status == 'l' {
			wasted++
		}
		if r.status != 'l' || r.holder < 0 || r.expired {
			continue
		}
		w := s.process[r.holder]
		known := w.job[i].at != 0 && w.job[i].lease == r.lease
		if i > 0 && r.direct {
			b := w.job[d.before(i)]
			known = known || b.at == 'y' || b.at == 'd' || b.tried || b.at == 's'
		}
		if w.up && !known {
			return unknown
		}
	}
	if wasted > d.slots {
		return tooMany
	}
	return ""
}

// busy counts the slots that are taken, and those that are reserved for the next steps that settling a step other than i
// may bring.
func (w *cProcess) busy(i int, unreserved bool) (n int) {
	for k, j := range w.job {
		if j.at == 'g' || j.at == 'r' || !unreserved && k != i && (j.carry || j.tried) {
			n++
		}
	}
	return n
}

// apply commits the settling of step i and stores the next steps.
func (d cDesign) apply(s *cState, p int8, i int, lease uint8, carry bool) bool {
	r := &s.run[i]
	if r.status != 'l' || r.lease != lease {
		if !d.noFence {
			return false
		}
	}
	r.status, r.settled, r.holder, r.expired = 's', lease, -1, false
	room := d.slots - s.process[p].busy(i, d.unreserved)
	for _, n := range d.after(i) {
		if s.run[n].status != '-' {
			s.fault = "a step was stored twice"
			return true
		}
		s.run[n] = cRun{status: 'p', holder: -1}
		if carry && (room > 0 || d.noRoom) {
			room--
			s.run[n] = cRun{status: 'l', lease: 1, holder: p, direct: true}
		}
	}
	return true
}

func (s *cState) die(p int) {
	for i, j := range s.process[p].job {
		if r := &s.run[i]; r.status == 'l' && r.holder == int8(p) {
			r.died = r.begun&(1<<r.lease) == 0
			r.holder = -1
		}
		if s.late[i].lease != 0 && s.late[i].by == int8(p) && j.at != 0 {
			s.late[i].by = -1 // nobody waits for it any more
		}
	}
	s.process[p] = cProcess{}
}

func (d cDesign) begin(s *cState, p, i int) {
	j := &s.process[p].job[i]
	r := &s.run[i]
	switch {
	case s.process[p].sees:
		s.fault = "a handler of a paused type began after its worker had looked"
	case r.status == '-' || r.lease < j.lease:
		s.fault = "a handler began that nobody has leased"
	case r.begun&(1<<j.lease) != 0:
		s.fault = "two handlers under one lease"
	}
	r.begun |= 1 << j.lease
	j.at = 'r'
}

// release gives back a lease that was not begun.
func (s *cState) release(i int, lease uint8) {
	if r := &s.run[i]; r.status == 'l' && r.lease == lease {
		r.status, r.holder, r.expired, r.direct = 'p', -1, false, false
	}
}

func (d cDesign) next(s cState, do func(string, cState)) {
	for i, l := range s.late {
		if l.lease == 0 {
			continue
		}
		t := s
		t.late[i] = cLate{}
		do(fmt.Sprintf("the server rolls the late settling of step %d back", i), t)
		if l.by >= 0 {
			d.apply(&t, l.by, i, l.lease, l.carry)
		} else if r := &t.run[i]; r.status == 'l' && r.lease == l.lease {
			d.apply(&t, 0, i, l.lease, false) // by a dead process: nobody holds its leases
			for _, n := range d.after(i) {
				if l.carry {
					t.run[n] = cRun{status: 'l', lease: 1, holder: -1, direct: true}
				}
			}
		}
		do(fmt.Sprintf("the late settling of step %d is committed", i), t)
	}
	for p := range s.process {
		name := fmt.Sprintf("W%d", p+1)
		w := s.process[p]
		if !w.up {
			t := s
			t.process[p].up = true
			do(name+" starts anew", t)
			continue
		}
		for i, j := range w.job {
			r := s.run[i]
			if j.at == 0 && r.status == 'p' && !w.stopping && !w.sees && w.busy(-1, d.unreserved) < d.slots {
				t := s
				t.run[i].status, t.run[i].lease, t.run[i].holder, t.run[i].direct, t.run[i].died = 'l', r.lease+1, int8(p), false, false
				t.process[p].job[i] = cJob{at: 'g', lease: r.lease + 1}
				do(fmt.Sprintf("%s leases step %d", name, i), t)
			}
			d.work(s, p, i, name, do)
			if r.status == 'l' && r.expired && s.late[i].lease == 0 && !w.stopping {
				t := s
				t.run[i].status, t.run[i].holder, t.run[i].expired = 'p', -1, false
				do(fmt.Sprintf("%s takes step %d back", name, i), t)
			}
		}
		if w.sees != s.paused {
			t := s
			t.process[p].sees = s.paused
			do(name+" looks for lanes and pauses", t)
		}
		if s.kills > 0 {
			t := s
			t.kills--
			t.die(p)
			do(name+" is killed", t)
		}
		if s.stops > 0 && !w.stopping {
			t := s
			t.stops--
			t.process[p].stopping = true
			do(name+" is told to stop", t)
		}
		if w.stopping && (w.job == [cSteps]cJob{}) {
			t := s
			for i := range t.run {
				if r := t.run[i]; r.status == 'l' && r.holder == int8(p) && !r.expired {
					t.fault = leftAtStop
				}
			}
			t.process[p] = cProcess{}
			do(name+" has stopped", t)
		}
	}
	for i, r := range s.run {
		if r.status == 'l' && !r.expired && (r.holder < 0 || s.freezes > 0) {
			t := s
			t.run[i].expired = true
			if r.holder >= 0 {
				t.freezes--
			}
			do(fmt.Sprintf("the lease of step %d expires", i), t)
		}
	}
	if s.pauses > 0 {
		t := s
		t.pauses--
		t.paused = true
		do("somebody pauses the type", t)
	}
	if s.paused {
		t := s
		t.paused = false
		do("somebody resumes the type", t)
	}
}

func (d cDesign) work(s cState, p, i int, name string, do func(string, cState)) {
	w := s.process[p]
	j, r := w.job[i], s.run[i]
	mine := r.status == 'l' && r.lease == j.lease
	t := s
	at := &t.process[p].job[i]
	running := 0
	for _, j := range w.job {
		if j.at == 'r' {
			running++
		}
	}
	switch j.at {
	case 'g':
		switch {
		case w.stopping || w.sees && !d.looksOnlyAtSettle:
			*at = cJob{}
			t.release(i, j.lease)
			do(fmt.Sprintf("%s gives step %d back", name, i), t)
		case running < d.slots:
			d.begin(&t, p, i)
			do(fmt.Sprintf("%s begins step %d", name, i), t)
		}
	case 'r':
		at.at = 'o'
		do(fmt.Sprintf("%s: the handler of step %d returns", name, i), t)
	case 'o':
		if w.stopping && j.unsure && d.forgetAtStop {
			t := t
			t.process[p].job[i] = cJob{}
			do(fmt.Sprintf("%s gives up settling step %d", name, i), t)
		}
		at.at, at.carry = 's', !w.sees && !w.stopping
		do(fmt.Sprintf("%s settles step %d", name, i), t)
		if d.dropWhenGone && !mine {
			t := s
			t.process[p].job[i] = cJob{}
			do(fmt.Sprintf("%s hears that its lease of step %d is gone", name, i), t)
		}
	case 's':
		if s.late[i].lease != 0 {
			return // it waits for the lock
		}
		lost := j
		lost.at, lost.unsure, lost.tried, lost.carry = 'o', true, j.tried || j.carry, false
		if d.doubt == "at once" && j.carry {
			lost.at = 'd'
		}
		at.at = 'n'
		if d.apply(&t, int8(p), i, j.lease, j.carry) {
			at.at = 'y'
		}
		do(fmt.Sprintf("the settling of step %d by %s is executed (%c)", i, name, at.at), t)
		if s.losses == 0 {
			return
		}
		t.losses--
		if at.at == 'y' {
			*at = lost
			if d.optimistic {
				d.children(&t, p, i)
			}
			do(fmt.Sprintf("the settling of step %d by %s is committed, and the answer lost", i, name), t)
		}
		t = s
		t.losses--
		*at = lost
		if d.optimistic && j.carry {
			for _, n := range d.after(i) {
				t.process[p].job[n] = cJob{at: 'g', lease: 1}
			}
		}
		do(fmt.Sprintf("the settling of step %d by %s is rolled back, and the answer lost", i, name), t)
		if mine {
			t.late[i] = cLate{lease: j.lease, carry: j.carry, by: int8(p)}
			do(fmt.Sprintf("%s has sent the commit of step %d and hears nothing", name, i), t)
		}
	case 'y':
		*at = cJob{}
		if j.carry {
			d.children(&t, p, i)
		}
		do(fmt.Sprintf("%s hears that step %d is settled", name, i), t)
	case 'n':
		*at = cJob{}
		if j.tried && r.settled == j.lease && d.doubt != "ignore" {
			at.at, at.lease, at.tried = 'd', j.lease, true
		}
		if d.byName && j.unsure && r.status == 's' {
			at.at, at.lease = 'd', j.lease
		}
		do(fmt.Sprintf("%s hears that settling step %d is refused", name, i), t)
	case 'd':
		*at = cJob{}
		for _, n := range d.after(i) {
			c := t.run[n]
			if c.status != 'l' || c.lease != 1 && !d.byName || c.holder != int8(p) || !c.direct && !d.byName {
				continue
			}
			if d.doubt == "start" {
				t.process[p].job[n] = cJob{at: 'g', lease: c.lease}
			} else {
				t.release(n, c.lease)
			}
		}
		if d.doubt == "at once" {
			at.at, at.lease, at.unsure = 'o', j.lease, true
		}
		do(fmt.Sprintf("%s looks after the steps that followed step %d: %s", name, i, d.doubt), t)
	}
	if mine && r.expired && s.late[i].lease == 0 && j.at != 0 {
		t := s
		t.run[i].expired = false
		do(fmt.Sprintf("%s extends its lease of step %d", name, i), t)
	}
	if !mine && j.at == 'r' {
		t := s
		t.process[p].job[i] = cJob{}
		do(fmt.Sprintf("%s hears that its lease of step %d is gone", name, i), t)
	}
}

// children makes the next steps jobs of the worker that has stored them as leased.
func (d cDesign) children(s *cState, p, i int) {
	for _, n := range d.after(i) {
		if r := s.run[n]; r.lease == 1 && r.direct && r.holder == int8(p) && r.status == 'l' {
			s.process[p].job[n] = cJob{at: 'g', lease: 1}
		}
	}
}
