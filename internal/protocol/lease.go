package protocol

import (
	"fmt"
	"strings"
)

// Model A, leases: the protocol as it is. A lease is charged when it is taken. A token fences every later statement.
// Expired leases are taken back, suspects are watched, and answers may be lost.
//
// Each statement is one step of the model. That is enough, because under READ COMMITTED a statement that locks a row
// sees its newest version, and each decision of a statement needs one row only. The effect of a statement on a row is in
// row.go. This file says which process sends a statement when, and what may go wrong on the way to the database and
// back. The replay of a trace uses the same steps.

const aMost = 3 // runs

type aRun struct {
	Row
	// What the model knows and the database does not.
	starts, back, results uint8
	started               bool  // under the current lease
	holder                int8  // the holder of the lease; -1: nobody, or a process that died
	company               bool  // when its process died, it held other suspects
	spared                uint8 // how often its last attempt was given back
	stored                bool  // the outcome of this lease is kept, with no lost effects
	byHand                bool  // a person fails it
}

type aJob struct {
	at      byte   // 0 none, 'g' granted and the answer is under way, 'r' the handler runs, 'o' has an outcome
	lease   uint16 // its token
	verdict Verdict
	unsure  bool // an earlier try to settle may have been recorded

	suspect, last, spared, exhausted bool
	proven                           bool
}

type aKept struct {
	lease   uint16
	verdict Verdict
}

type aProcess struct {
	up, stopping bool
	job          [aMost]aJob
	proven       uint8
	doubt        [aMost]uint16 // leases whose answer was lost
	late         byte          // a request for leases whose answer was given up: 'k' it may still be executed, and the process remembers it, 'f' the process has forgotten it
	lateSettle   [aMost]aJob   // the same for outcomes
	read         [aMost]aKept  // with readsFirst: what was kept when it was read
	saw          uint8         // with looksFirst: the expired leases without a kept outcome when it looked
}

type aState struct {
	run     [aMost]aRun
	process [2]aProcess
	aBudget // what may still happen
	fault   string
}

// aBudget is how often each thing may happen.
type aBudget struct {
	kills, freezes, losses, cancels, retries, stops, holds, releases, refusals, fails uint8
}

// A care is a way to keep suspects from making each other fail.
type care byte

const (
	watched  care = iota // at its last attempt a suspect is alone among suspects while it is watched
	toTheEnd             // it is alone until it ends
	once                 // like watched; if its process dies and it was not alone, its attempt is given back, once, and from then on it is alone until it ends
)

type aDesign struct {
	Rules
	care
	aBudget
	runs, most, slots uint16
	processes         int
	poisons           int  // this many runs, from the first on, kill their process when their handlers run
	slow              bool // poison may kill after suspects are no longer watched
	failing           bool // handlers may also fail
	long              bool // handlers may run longer than suspects are watched
	effects           bool // outcomes may have effects

	// Planted faults of processes.
	noWatch, notAlone, forgetful, stopForgets, takeBackForgets, chargedInCompany, looksTooLate, retriesTheLast, doubtsAny, looksFirst, readsFirst, staleReads bool

	company  *bool  // in a replay: whether it had company at its last attempt, if known
	replayed bool   // a trace is replayed: steps that make no visible difference are left out
	granted  uint16 // attempts that a retry grants; 0 means one
}

func (d aDesign) design() design[aState] {
	var s aState
	for i := range s.run {
		s.run[i].holder = -1
		if i < int(d.runs) {
			s.run[i].Row = Enqueued(d.most)
		}
	}
	for p := range d.processes {
		s.process[p].up = true
	}
	s.aBudget = d.aBudget
	return design[aState]{
		start: s,
		next:  func(s aState, do func(string, aState)) { d.steps(s, func(_ step, t aState) { do("", t) }) },
		told:  func(s aState, do func(string, aState)) { d.steps(s, func(w step, t aState) { do(w.String(), t) }) },
		wrong: d.wrong,
		done: func(s aState) bool {
			for _, r := range s.run {
				if r.Status != 0 && !r.Status.Over() && !(r.Hidden && r.Status == Pending) {
					return false
				}
			}
			return true
		},
	}
}

// A step is one thing that happens. seen names the statement as in the trace; "" means that it is not visible.
type step struct {
	seen string
	by   int // the process that does it; -1: somebody else
	what string
	n    int // the argument of what
}

func (w step) String() string {
	text := w.what
	if strings.Contains(text, "%") {
		text = fmt.Sprintf(text, w.n)
	}
	if w.by >= 0 {
		text = fmt.Sprintf("W%d %s", w.by+1, text)
	}
	return text
}

func (d aDesign) wrong(s aState) string {
	if s.fault != "" {
		return s.fault
	}
	quiet := d.aBudget == aBudget{}
	for i, r := range s.run {
		poison := i < d.poisons
		most := uint8(r.Most) + r.back + r.spared
		if poison {
			most = min(most, uint8(r.Most)+r.back+1)
		}
		switch {
		case r.results > 1:
			return twoResults
		case r.starts > most:
			return tooManyStarts
		case poison && quiet && r.Status == Failed && r.starts < uint8(r.Most):
			return "the poison run failed before max_attempts starts"
		case d.poisons > 0 && !poison && quiet && r.Status == Failed:
			return innocent
		}
		if r.Status == Leased && r.holder >= 0 && d.processes > int(r.holder) {
			p := s.process[r.holder]
			known := p.late != 0 && p.late != 'f' || p.doubt[i] == r.Lease || p.job[i].at != 0 && p.job[i].lease == r.Lease
			if !known && !r.Expired {
				return unknown
			}
		}
	}
	return ""
}

// settle is the settle statement for one run.
func (d aDesign) settle(s *aState, i int, j aJob) {
	r := &s.run[i]
	row, ok := d.Settle(r.Row, j.lease, j.verdict)
	switch {
	case !ok:
		return
	case r.Lease != j.lease:
		s.fault = lostLease
	case r.Status == Cancelled:
		s.fault = "a cancelled run was changed"
	}
	r.settled(row, j.verdict)
}

// settled updates what the model knows about a run whose outcome was recorded.
func (r *aRun) settled(row Row, v Verdict) {
	if (v == GiveBack || v == Postpone) && row.Attempt < r.Attempt && r.started {
		r.back++
	}
	if v == Succeed {
		r.results++
	}
	r.Row, r.holder, r.stored, r.byHand = row, -1, false, false
}

// die ends a process without notice.
func (s *aState) die(p int) {
	for i := range s.run {
		if r := &s.run[i]; r.holder == int8(p) {
			r.company = s.process[p].othersThan(i)
			r.holder = -1
		}
	}
	s.process[p] = aProcess{}
}

// othersThan reports whether the process has leases on other suspects than run i.
func (p *aProcess) othersThan(i int) bool {
	for k, j := range p.job {
		if k != i && j.at != 0 && j.suspect && !j.exhausted {
			return true
		}
	}
	return false
}

// prove counts a suspect that its process has outlived.
func (p *aProcess) prove(i int) {
	if j := &p.job[i]; j.suspect && !j.exhausted && !j.proven {
		j.proven = true
		p.proven = min(p.proven+1, 2)
	}
}

// mayLease reports whether one poll of p may take these runs together.
func (d aDesign) mayLease(s *aState, p *aProcess, set int) bool {
	held, watching, suspicious, alone := 0, 0, 0, false
	for _, j := range p.job {
		if j.at == 0 {
			continue
		}
		held++
		if !j.suspect || j.exhausted {
			continue
		}
		suspicious++
		if !j.proven {
			watching++
			alone = alone || j.last
		}
		alone = alone || j.last && (d.care == toTheEnd || d.care == once && j.spared)
	}
	n, suspects, last, spared := 0, 0, 0, 0
	for i, r := range s.run {
		if set&(1<<i) == 0 {
			continue
		}
		if _, ok := d.Lease(r.Row); !ok {
			return false
		}
		n++
		if r.Suspect && r.Attempt < r.Most {
			suspects++
			if r.Attempt+1 == r.Most {
				last++
			}
			if r.Attempt+1 == r.Most && (d.care == toTheEnd || r.Spared) {
				spared++
			}
		}
	}
	if held+n > int(d.slots) || n == 0 {
		return false
	}
	switch {
	case d.noWatch || suspects == 0:
		return true
	case d.notAlone:
	case alone || spared > 0 && suspicious > 0:
		return false
	case last > 0:
		return suspects == 1 && watching == 0
	}
	return watching+suspects <= min(1+int(p.proven), int(d.slots))
}

// grant is the lease statement for one run.
func (d aDesign) grant(s *aState, p, i int) {
	r := &s.run[i]
	row, _ := d.Lease(r.Row)
	switch {
	case r.Hidden:
		s.fault = "a run that is held or deleted was leased"
	case r.Status == Cancelled:
		s.fault = "a cancelled run was leased"
	}
	last := r.Attempt+1 == r.Most
	r.Row, r.started, r.company, r.holder = row, false, false, int8(p)
	s.process[p].job[i] = aJob{at: 'g', lease: r.Lease, suspect: r.Suspect, last: last, spared: r.Spared, exhausted: r.Uncharged}
}

func (d aDesign) steps(s aState, do func(step, aState)) {
	for p := range d.processes {
		w := &s.process[p]
		if !w.up {
			if !d.replayed { // in a trace each process has a name of its own
				t := s
				t.process[p].up = true
				do(step{"", p, "starts anew", 0}, t)
			}
			continue
		}
		d.polls(s, p, do)
		d.work(s, p, do)
		if s.kills > 0 {
			t := s
			t.kills--
			t.die(p)
			do(step{"", p, "is killed", 0}, t)
		}
		if s.stops > 0 && !w.stopping {
			t := s
			t.stops--
			t.process[p].stopping = true
			do(step{"", p, "is told to stop", 0}, t)
		}
		if w.stopping {
			d.stop(s, p, do)
		}
	}
	for i := range s.run {
		d.others(s, i, do)
	}
}

// others are the steps of the clock and of people.
func (d aDesign) others(s aState, i int, do func(step, aState)) {
	r := s.run[i]
	if row, ok := d.Over(r.Row); ok && !(r.kept() && r.Keeps != Effects && !d.replayed) && !(r.kept() && d.readsFirst) { // keeping has the other cases
		t := s
		t.run[i].Row = row
		do(step{"over", -1, "what is kept of run %d is forgotten", i}, t)
	}
	if r.Status == 0 {
		return
	}
	if r.Status == Leased && !r.Expired {
		t := s
		t.run[i].Expired = true
		if r.holder < 0 {
			do(step{"", -1, "the lease of run %d expires", i}, t)
		} else if s.freezes > 0 {
			t.freezes--
			do(step{"", -1, "the holder of run %d is frozen, and the lease expires", i}, t)
		}
	}
	person := func(budget func(*aState) *uint8, seen, what string, row Row, ok bool) {
		t := s
		if left := budget(&t); *left > 0 && ok {
			*left--
			if r.stored && row.Status == Pending {
				t.fault = againThoughKept
			}
			t.run[i].Row, t.run[i].stored = row, row.kept() && row.Keeps != Effects
			t.run[i].byHand = row.kept() && (r.byHand || seen == "fail")
			if row.Status != Leased {
				t.run[i].holder = -1
			}
			do(step{seen, -1, what, i}, t)
		}
	}
	row, ok := d.Cancel(r.Row)
	person(func(t *aState) *uint8 { return &t.cancels }, "cancel", "somebody cancels run %d", row, ok)
	row, ok = d.Retry(r.Row, max(d.granted, 1))
	person(func(t *aState) *uint8 { return &t.retries }, "retry", "somebody retries run %d", row, ok)
	row, ok = d.Rules.Release(r.Row)
	person(func(t *aState) *uint8 { return &t.releases }, "release", "somebody takes the lease of run %d away", row, ok)
	row, ok = d.FailKept(r.Row)
	person(func(t *aState) *uint8 { return &t.fails }, "fail", "somebody has run %d fail, whose outcome is kept", row, ok)
	row, ok = d.Hide(r.Row, !r.Hidden)
	person(func(t *aState) *uint8 { return &t.holds }, "hold", "somebody holds run %d, or resumes it", row, ok)
	if d.replayed { // for leases, a combination of the steps above
		row, ok = d.Delete(r.Row)
		person(func(t *aState) *uint8 { return &t.holds }, "delete", "somebody deletes run %d", row, ok)
		row, ok = d.Remove(r.Row)
		person(func(t *aState) *uint8 { return &t.holds }, "remove", "run %d is removed", row, ok)
	}
}

// polls are the steps by which a process gets leases.
func (d aDesign) polls(s aState, p int, do func(step, aState)) {
	w := &s.process[p]
	waiting, granted := false, false
	for i := range w.job {
		granted = granted || w.job[i].at == 'g'
		waiting = waiting || w.doubt[i] != 0
	}
	if !w.stopping && !granted && w.late == 0 {
		for set := 1; set < 1<<d.runs; set++ {
			if !d.mayLease(&s, w, set) {
				continue
			}
			t := s
			for i := range t.run {
				if set&(1<<i) != 0 {
					d.grant(&t, p, i)
				}
			}
			do(step{"lease", p, "leases runs %03b", set}, t)
		}
		if s.losses > 0 && !d.replayed {
			t := s
			t.losses--
			t.process[p].late = 'k'
			do(step{"", p, "asks for leases and gives up; the request is still under way", 0}, t)
		}
	}
	if w.late != 0 { // one run, to keep the model small
		for i := range s.run[:d.runs] {
			if d.mayLease(&s, w, 1<<i) {
				t := s
				d.grant(&t, p, i)
				t.process[p].job[i] = w.job[i]
				if w.late == 'k' {
					t.process[p].remember(i, t.run[i].Lease)
				}
				t.process[p].late = 0
				do(step{"lease", p, "has a late request executed by the server: run %d", i}, t)
			}
		}
		t := s
		t.process[p].late = 0
		do(step{"", p, "has a late request dropped by the server", 0}, t)
	}
	if granted {
		d.answer(s, p, do)
	} else if d.doubtsAny {
		d.lose(s, p, do)
	}
	if (waiting || w.late != 0) && !w.stopping {
		t := s
		d.giveBack(&t, p)
		if d.forgetful && w.late == 'k' {
			t.process[p].late = 'f'
		}
		do(step{"give back", p, "gives back leases in doubt", 0}, t)
	}
}

// answer is the step in which a process receives the answer to its poll.
func (d aDesign) answer(s aState, p int, do func(step, aState)) {
	w := &s.process[p]
	t, late := s, s
	for i := range w.job {
		j := &t.process[p].job[i]
		if j.at != 'g' {
			continue
		}
		if j.exhausted {
			j.at, j.verdict = 'o', Fail
			late.process[p].job[i] = *j
			continue
		}
		j.at = 'r'
		t.run[i].starts++
		if t.run[i].Lease == j.lease {
			t.run[i].started = true
		}
		late.process[p].job[i].at, late.process[p].job[i].verdict = 'o', GiveBack
	}
	do(step{"", p, "gets the answer and starts the handlers", 0}, t)
	if s.freezes > 0 {
		late.freezes--
		do(step{"", p, "gets the answer when the leases have run out: it starts nothing", 0}, late)
	}
	d.lose(s, p, do)
}

// lose is the step in which the answer to a poll is lost. The leases it may have brought are in doubt.
func (d aDesign) lose(s aState, p int, do func(step, aState)) {
	if s.losses == 0 {
		return
	}
	s.losses--
	w := &s.process[p]
	for i, j := range w.job {
		if j.at == 'g' || j.at == 'r' && d.doubtsAny {
			w.remember(i, j.lease)
			w.job[i] = aJob{}
		}
	}
	do(step{"", p, "loses the answer to its poll", 0}, s)
}

// remember keeps a lease in doubt. An older lease of the same run has ended by then.
func (p *aProcess) remember(i int, lease uint16) { p.doubt[i] = max(p.doubt[i], lease) }

func (d aDesign) giveBack(s *aState, p int) {
	w := &s.process[p]
	for i, lease := range w.doubt {
		if r := &s.run[i]; lease != 0 {
			if row, ok := d.Rules.GiveBack(r.Row, lease); ok {
				r.Row = row
				if row.Status != Leased {
					r.holder = -1
				}
			}
		}
		w.doubt[i] = 0
	}
}

// work is what a process does with its leases, and with expired leases of others.
func (d aDesign) work(s aState, p int, do func(step, aState)) {
	w := &s.process[p]
	for i := range s.run[:d.runs] {
		j, r := w.job[i], s.run[i]
		switch j.at {
		case 'r':
			d.handler(s, p, i, do)
		case 'o':
			t := s
			t.process[p].prove(i)
			t.process[p].job[i] = aJob{} // recorded, refused, or recorded by an earlier try, as settled_token says
			d.settle(&t, i, j)
			do(step{"settle", p, "settles run %d", i}, t)
			if s.losses > 0 && !d.replayed {
				t := s
				t.losses--
				t.process[p].job[i].unsure = true
				do(step{"", p, "tries to settle run %d; nothing arrives", i}, t)
				t.process[p].lateSettle[i] = j
				do(step{"", p, "tries to settle run %d; it is still under way", i}, t)
				t.process[p].lateSettle[i] = aJob{}
				d.settle(&t, i, j)
				do(step{"settle", p, "settles run %d and loses the answer", i}, t)
			}
		}
		d.keeping(s, p, i, do)
		if j.at == 'r' || j.at == 'o' {
			if row, ok := d.Extend(r.Row, j.lease); ok {
				t := s
				t.run[i].Row = row
				do(step{"extend", p, "extends its lease of run %d", i}, t)
			}
		}
		if late := w.lateSettle[i]; late.at != 0 {
			t := s
			t.process[p].lateSettle[i] = aJob{}
			d.settle(&t, i, late)
			do(step{"settle", p, "has a late settling executed by the server: run %d", i}, t)
		}
		if !w.stopping {
			d.takeBack(s, p, i, do)
		}
	}
}

// keeping are the steps for an outcome that is refused alone, again and again: its worker keeps it, and then any
// worker settles it.
func (d aDesign) keeping(s aState, p, i int, do func(step, aState)) {
	w := &s.process[p]
	j, r := w.job[i], s.run[i]
	if j.at == 'o' && r.Kept == j.lease && (s.refusals > 0 || r.kept()) {
		t := s
		t.process[p].prove(i)
		t.process[p].job[i] = aJob{}
		do(step{"", p, "hears that the outcome of run %d is kept", i}, t)
	}
	for _, v := range []Verdict{j.verdict, Effects} {
		row, ok := d.Keep(r.Row, j.lease, v)
		if j.at != 'o' || s.refusals == 0 || !ok || v == Effects && !d.effects {
			continue
		}
		t := s
		t.refusals--
		t.run[i].Row = row
		if row.kept() {
			t.run[i].company = w.othersThan(i)
			t.run[i].holder, t.run[i].stored = -1, v != Effects
		}
		if s.losses > 0 {
			t := t
			t.losses--
			do(step{"keep", p, "has the outcome of run %d kept, which is refused, and loses the answer", i}, t)
		}
		t.process[p].prove(i)
		t.process[p].job[i] = aJob{}
		do(step{"keep", p, "has the outcome of run %d kept, which is refused", i}, t)
	}
	if d.readsFirst {
		d.readsKept(s, p, i, do)
		return
	}
	if r.Kept == 0 || w.stopping && !d.replayed {
		return
	}
	for _, v := range []Verdict{Succeed, Fail, Retry, Postpone, GiveBack} {
		row, ok := d.SettleKept(r.Row, v)
		if !ok {
			continue
		}
		t := s
		if r.Kept != r.Lease {
			t.fault = lostLease
		}
		t.run[i].settled(row, v)
		if over, ok := d.Over(row); ok && !d.replayed { // in a trace this is an event of its own
			t.run[i].Row = over
		}
		do(step{"settle", p, "settles run %d, whose outcome is kept", i}, t)
	}
	if d.ForgetsKept && r.kept() && j.at == 0 && !d.replayed {
		t := s
		t.run[i].Row, _ = d.Over(r.Row)
		t.process[p].job[i] = aJob{at: 'o', lease: r.Lease, verdict: r.Keeps}
		do(step{"over", p, "forgets what is kept of run %d, and is about to settle it", i}, t)
	}
}

// readsKept settles what is kept in two steps: a statement of its own reads it, and it is settled if it is still as
// it was read.
func (d aDesign) readsKept(s aState, p, i int, do func(step, aState)) {
	r, read := s.run[i], s.process[p].read[i]
	if now := (aKept{r.Kept, r.Keeps}); r.kept() && now != read {
		t := s
		t.process[p].read[i] = now
		do(step{"", p, "reads what is kept of run %d", i}, t)
	}
	if read.lease == 0 || read.lease != r.Kept || !r.kept() || read.verdict != r.Keeps && !d.staleReads {
		return
	}
	t := s
	t.process[p].read[i] = aKept{}
	if r.byHand && read.verdict != Fail {
		t.fault = notFailed
	}
	if read.verdict == Effects {
		d.ForgetsKept = true // it cannot see that these are not the effects that it has read
		t.run[i].Row, _ = d.Over(r.Row)
		do(step{"over", p, "forgets what is kept of run %d, whose effects are lost", i}, t)
		return
	}
	d.SettlesOther = true
	if row, ok := d.SettleKept(r.Row, read.verdict); ok {
		t.run[i].settled(row, read.verdict)
		t.run[i].Row, _ = d.Over(row)
		do(step{"settle", p, "settles run %d, whose outcome is kept", i}, t)
	}
}

// handler is what may happen to a handler that runs.
func (d aDesign) handler(s aState, p, i int, do func(step, aState)) {
	j, r := s.process[p].job[i], s.run[i]
	if i < d.poisons {
		t := s
		t.die(p)
		do(step{"", p, "is killed by run %d", i}, t)
	} else {
		for _, verdict := range []Verdict{Succeed, Retry, Fail, Postpone} {
			switch { // a permanent error may come at any attempt, but trying that adds nothing to the model
			case verdict != Succeed && !d.failing,
				verdict == Retry && j.last && !d.retriesTheLast,
				verdict == Fail && !j.last && !d.replayed,
				verdict == Postpone && !d.replayed:
				continue
			}
			t := s
			t.process[p].job[i].at, t.process[p].job[i].verdict = 'o', verdict
			do(step{"", p, "has a handler that returns: run %d", i}, t)
		}
	}
	if r.Lease != j.lease || r.Status != Leased {
		t := s
		t.process[p].job[i] = aJob{}
		do(step{"", p, "hears that its lease of run %d is gone", i}, t)
	}
	if j.suspect && !j.proven && d.long && (i >= d.poisons || d.slow) {
		t := s
		t.process[p].prove(i)
		do(step{"", p, "has watched run %d for two seconds", i}, t)
	}
}

func (d aDesign) takeBack(s aState, p, i int, do func(step, aState)) {
	r := s.run[i]
	last := r.Attempt == r.Most
	spare := d.care == once && last && !d.chargedInCompany && (r.company || r.holder >= 0 && s.process[r.holder].othersThan(i))
	if d.looksTooLate { // looks only at what is still leased
		spare = false
		for k, other := range s.run {
			spare = spare || last && k != i && other.Status == Leased && other.Suspect && other.holder == r.holder && other.company
		}
	}
	spares := []bool{spare}
	switch { // whether it was alone is not a property of the run alone
	case d.replayed && d.company == nil:
		spares = []bool{false, last}
	case d.replayed:
		spares = []bool{*d.company && !d.chargedInCompany}
	}
	rules, saw := d.Rules, uint8(1)<<i
	if d.looksFirst {
		if s.process[p].saw&saw == 0 {
			if _, ok := rules.TakeBack(r.Row, false); ok {
				s.process[p].saw |= saw
				do(step{"", p, "looks at the lease of run %d, which has expired", i}, s)
			}
			return
		}
		rules.TakesKept = true
		s.process[p].saw &^= saw
	}
	for _, spare := range spares {
		row, ok := rules.TakeBack(r.Row, spare)
		if !ok {
			return
		}
		t := s
		if r.stored {
			t.fault = againThoughKept
		}
		t.run[i].Row, t.run[i].company = row, false
		if spare && row.Attempt < r.Attempt && !d.FreeCrash {
			t.run[i].spared = min(r.spared+1, 9)
		}
		if !r.Expired {
			t.fault = "a lease that had not expired was taken back"
		}
		if row.Status == Pending {
			t.run[i].holder = -1
			do(step{"take back", p, "takes run %d back", i}, t)
			continue
		}
		t.run[i].started, t.run[i].holder = false, int8(p)
		if s.losses > 0 {
			t := t
			t.losses--
			if !d.takeBackForgets {
				t.process[p].remember(i, row.Lease)
			}
			do(step{"take back", p, "takes exhausted run %d over and loses the answer", i}, t)
		}
		t.process[p].job[i] = aJob{at: 'o', verdict: Fail, lease: row.Lease, suspect: true, exhausted: true}
		do(step{"take back", p, "takes exhausted run %d over", i}, t)
	}
}

// stop releases handlers, settles outcomes and doubts, and then ends the process.
func (d aDesign) stop(s aState, p int, do func(step, aState)) {
	w := &s.process[p]
	busy := false
	for i, j := range w.job {
		if j.at == 'r' && i >= d.poisons || j.at == 'o' && j.verdict == Succeed && d.replayed {
			t := s
			t.process[p].job[i].at, t.process[p].job[i].verdict = 'o', GiveBack
			do(step{"", p, "hands run %d back", i}, t)
		}
		busy = busy || j.at != 0
	}
	if d.replayed { // their order makes no visible difference
		t := s
		d.giveBack(&t, p)
		do(step{"give back", p, "gives back leases in doubt", 0}, t)
		return
	}
	if busy || !d.stopForgets && w.late == 'k' {
		return // the doubts stay until the server has certainly finished the request
	}
	t := s
	if !d.stopForgets {
		d.giveBack(&t, p)
	}
	for i := range t.run {
		if r := &t.run[i]; r.Status == Leased && r.holder == int8(p) && !r.Expired {
			t.fault = leftAtStop
		}
	}
	if w.late != 0 {
		return
	}
	t.die(p)
	do(step{"give back", p, "has stopped", 0}, t)
}
