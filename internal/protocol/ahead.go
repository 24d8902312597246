package protocol

import "fmt"

// Model B: leases ahead of handlers. A run is either leased with a slot, and charged from the lease on, or leased
// ahead, and charged once a committed mark says that its handler may begin. The handler begins after the answer to
// the mark. A take-back of an expired lease looks for the mark. If there is a mark, the attempt stays charged and the
// run is a suspect; if not, the attempt is given back and the run is as it was before.
//
// Polls, settling, doubts and cancels are those of model A, with less detail. A frozen process is one whose leases
// expire while it lives. It continues later without knowing that they have expired.

const (
	bRuns   = 3 // run 0 kills its process as soon as it begins, if poison is set
	bBirths = 6 // new processes and renewed identities
)

type bRun struct {
	status                  byte // pending, leased, succeeded, failed
	attempt, lease          uint8
	holder                  int8 // leased_by: the birth of its holder
	ahead, suspect, expired bool
	begun                   bool  // the mark, in designs where it is a column of the run
	started                 bool  // known to the model only: its handler has begun under this lease
	died                    int8  // known to the model only: the death that left it leased; 0: none
	freed                   uint8 // known to the model only: the leases (as bits) that were given back as not begun
}

// bJob.at: 0 none, 'd' granted with a slot, 'g' granted ahead, 'x' granted to a former identity (these three: the
// answer is under way), 'q' waits, 'm' mark under way, 'u' the answer to its mark was lost, 'b' may begin, 'c' may
// begin and the clock was checked, 'r' runs, 'o' returned
type bJob struct {
	at    byte
	lease uint8
}

type bMark struct {
	exists, retired bool
	begun           [bRuns]uint8 // the lease of each run that may begin
	soft            [bRuns]bool  // not yet on disk
}

// bKey is one row of a table of marks, keyed by the token of a lease. Two processes may want to store it: the worker, to
// say that the run may begin, and the process that takes the lease back, to say that the run was not begun. The first
// one decides. The second one finds the row there.
type bKey struct {
	lease uint8
	begun bool
}

type bProcess struct {
	birth    int8 // -1: not up
	stopping bool
	deleted  bool // its row, by its own stop
	marking  byte // 's' sent, 'y' executed, 'n' refused
	late     byte // 'l': a mark whose answer was given up may still be executed
	lateSet  [bRuns]uint8
	look     int8 // the run whose lease it takes back, with a snapshot; -1: none
	saw      bool // whether the mark was in that snapshot
	sawLease uint8
	job      [bRuns]bJob
}

type bState struct {
	run                                       [bRuns]bRun
	mark                                      [bBirths]bMark
	process                                   [2]bProcess
	births                                    int8
	key                                       [bRuns]bKey
	deaths                                    int8
	wasted                                    [bBirths + 1]uint8 // for each death, the runs not begun that it was charged to
	kills, freezes, losses, stops, breakdowns uint8
	fault                                     string
}

type bDesign struct {
	mark  string // where the mark is: "lease", "none", "run", "worker", "token"
	fence string // how a mark is fenced; in the worker's row: "snapshot", "lock", "retire", "time"; by token: "first", "looks"

	most, slots                               uint8
	runs                                      int
	poison                                    bool
	kills, freezes, losses, stops, breakdowns uint8

	// Planted faults and inferior designs.
	early, unfenced, byName, absolute, missingIsUnbegun, deleteAtTakeBack, deleteAtStop                 bool
	exhaustedFirst, wholeBatch, position, forgetUnknown, clockLies, async, keepOld, cleanEarly, noCheck bool
}

func (d bDesign) design() design[bState] {
	var s bState
	for i := range s.run {
		s.run[i] = bRun{status: 's', holder: -1}
		if i < d.runs {
			s.run[i].status = 'p'
		}
	}
	for p := range s.process {
		s.process[p] = bProcess{birth: -1, look: -1}
		d.bear(&s, p)
	}
	s.kills, s.freezes, s.losses, s.stops, s.breakdowns = d.kills, d.freezes, d.losses, d.stops, d.breakdowns
	return design[bState]{start: s, next: d.next, wrong: d.wrong, done: func(s bState) bool {
		for _, r := range s.run {
			if r.status == 'p' || r.status == 'l' {
				return false
			}
		}
		return true
	}}
}

// bear gives a process an identity: a row of its own, or, with byName, the row of its name.
func (d bDesign) bear(s *bState, p int) {
	birth := s.births
	if d.byName {
		birth = int8(p)
	}
	if int(birth) >= bBirths {
		s.fault = "the model needs more births"
		return
	}
	s.births++
	s.process[p].birth = birth
	s.mark[birth] = bMark{exists: true}
}

func (d bDesign) wrong(s bState) string {
	if s.fault != "" {
		return s.fault
	}
	for _, r := range s.run {
		if r.lease > 7 {
			return "the model needs more leases"
		}
	}
	for _, n := range s.wasted {
		if n > d.slots {
			return "a crash has charged more unbegun runs than there are slots"
		}
	}
	return ""
}

func (d bDesign) next(s bState, do func(string, bState)) {
	for p := range s.process {
		name := fmt.Sprintf("W%d", p+1)
		w := s.process[p]
		if w.late != 0 {
			t := s
			t.process[p].late = 0
			d.execute(&t, w.birth, w.lateSet)
			if w.birth >= 0 {
				do("the late mark of "+name+" is executed", t)
			}
		}
		if w.birth < 0 {
			if int(s.births) < bBirths {
				t := s
				d.bear(&t, p)
				do(name+" starts anew", t)
			}
			continue
		}
		d.lease(s, p, name, do)
		d.marks(s, p, name, do)
		d.work(s, p, name, do)
		d.takeBack(s, p, name, do)
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
		if w.stopping {
			d.stop(s, p, name, do)
		}
	}
	for i, r := range s.run {
		if r.status != 'l' || r.expired {
			continue
		}
		t := s
		t.run[i].expired = true
		alive := false
		for p := range s.process {
			alive = alive || s.process[p].job[i].at != 0 && s.process[p].job[i].lease == r.lease
		}
		if !alive {
			do(fmt.Sprintf("the lease of run %d expires", i), t)
		} else if s.freezes > 0 {
			t.freezes--
			do(fmt.Sprintf("the holder of run %d is frozen and the lease expires", i), t)
		}
	}
	// A row of the table of marks is removed once nobody holds its lease and no statement that could name the row
	// is still under way.
	underWay := false
	for _, w := range s.process {
		underWay = underWay || w.marking == 's' || w.late != 0
	}
	for i, k := range s.key {
		held := s.run[i].status == 'l' && s.run[i].lease == k.lease
		if k.lease != 0 && (!held && !underWay || d.cleanEarly) {
			t := s
			t.key[i] = bKey{}
			do(fmt.Sprintf("the mark of run %d is cleaned away", i), t)
		}
	}
	if d.async {
		t := s
		for m := range t.mark {
			t.mark[m].soft = [bRuns]bool{}
		}
		do("what was committed reaches the disk", t)
		if s.breakdowns > 0 { // the whole machine fails
			t := s
			t.breakdowns--
			for m := range t.mark {
				for i, soft := range t.mark[m].soft {
					if soft {
						t.mark[m].begun[i], t.mark[m].soft[i] = 0, false
					}
				}
			}
			for p := range t.process {
				t.die(p)
			}
			do("server and workers break down together", t)
		}
	}
}

// die ends a process without notice.
func (s *bState) die(p int) {
	s.deaths++
	w := &s.process[p]
	for i, j := range w.job {
		if r := &s.run[i]; j.at != 0 && r.status == 'l' && r.lease == j.lease {
			r.died = s.deaths
		}
	}
	*w = bProcess{birth: -1, look: -1}
}

// lease leases with a slot while slots are free, and ahead beyond that. Suspects are leased with slots only, one at a
// time.
func (d bDesign) lease(s bState, p int, name string, do func(string, bState)) {
	w := s.process[p]
	taken, suspects := 0, 0
	for i, j := range w.job {
		switch j.at {
		case 'd', 'g', 'x':
			t := s
			d.answer(&t, p)
			do(name+" gets its leases", t)
			return // one poll at a time
		case 'm', 'u', 'b', 'c', 'r':
			taken++
		}
		if j.at != 0 && s.run[i].suspect {
			suspects++
		}
	}
	if w.stopping {
		return
	}
	for set := 1; set < 1<<bRuns; set++ {
		t := s
		free, guarded, ok := int(d.slots)-taken, suspects, true
		how := ""
		for i := range t.run {
			r := &t.run[i]
			if set&(1<<i) == 0 {
				continue
			}
			direct := free > 0
			if r.suspect {
				guarded++
				ok = ok && direct && guarded == 1
			}
			if r.status != 'p' {
				ok = false
			}
			job := bJob{at: 'g', lease: r.lease + 1}
			if direct {
				free--
				job.at = 'd'
			}
			r.status, r.lease, r.holder, r.attempt = 'l', r.lease+1, w.birth, r.attempt+1
			r.ahead, r.begun, r.started, r.expired, r.died = !direct, false, false, false, 0
			t.process[p].job[i] = job
			how += fmt.Sprintf(" %d", i)
			if !direct {
				how += " (ahead)"
			}
		}
		if ok {
			do(name+" leases runs"+how, t)
		}
	}
}

func (d bDesign) answer(s *bState, p int) {
	for i := range s.process[p].job {
		switch j := &s.process[p].job[i]; j.at {
		case 'd':
			d.begin(s, p, i)
		case 'g':
			j.at = 'q'
		case 'x':
			s.release(i, j.lease)
			*j = bJob{}
		}
	}
}

// begin calls the handler.
func (d bDesign) begin(s *bState, p, i int) {
	j := &s.process[p].job[i]
	j.at = 'r'
	r := &s.run[i]
	if r.freed&(1<<j.lease) != 0 {
		s.fault = "a handler began and was not charged"
	}
	if r.lease == j.lease {
		r.started = true
	}
}

// marks sends, executes and answers marks for runs that may begin. Answers may be lost, and statements may be late.
func (d bDesign) marks(s bState, p int, name string, do func(string, bState)) {
	w := s.process[p]
	running, window := 0, 0
	for _, j := range w.job {
		switch j.at {
		case 'r':
			running++
		case 'd', 'm', 'b', 'c':
			window++
		case 'u':
			if !d.forgetUnknown {
				window++
			}
		}
	}
	for i, j := range w.job {
		may := j.at == 'b' || j.at == 'c' || j.at == 'q' && (d.mark == "lease" || d.mark == "none") || d.early && j.at == 'm'
		if !may || running >= int(d.slots) {
			continue
		}
		t := s
		if d.fence == "time" && j.at == 'b' {
			r := s.run[i]
			if d.clockLies || r.status == 'l' && r.lease == j.lease && !r.expired {
				t.process[p].job[i].at = 'c'
				do(fmt.Sprintf("%s finds time left for run %d", name, i), t)
			}
			continue
		}
		d.begin(&t, p, i)
		do(fmt.Sprintf("%s begins run %d", name, i), t)
	}
	switch {
	case d.mark == "lease" || d.mark == "none":
	case w.marking == 0:
		for set := 1; set < 1<<bRuns && !w.stopping; set++ {
			t := s
			n, ok := 0, true
			for i, j := range w.job {
				if set&(1<<i) == 0 {
					continue
				}
				ok = ok && (j.at == 'q' || j.at == 'u')
				if j.at == 'q' || d.forgetUnknown {
					n++
				}
				t.process[p].job[i].at = 'm'
			}
			if !ok || window+n > int(d.slots) && !d.wholeBatch {
				continue
			}
			t.process[p].marking = 's'
			do(fmt.Sprintf("%s sends a mark for runs %03b", name, set), t)
		}
	case w.marking == 's':
		t := s
		t.process[p].marking = 'n'
		if d.execute(&t, w.birth, w.set()) {
			t.process[p].marking = 'y'
		}
		do("the mark of "+name+" is executed", t)
		if s.losses > 0 {
			t := s
			t.losses--
			t.process[p].unknown()
			do("the mark of "+name+" is lost", t)
			t.process[p].late, t.process[p].lateSet = 'l', w.set()
			do(name+" gives its mark up; it is still under way", t)
		}
	default:
		t := s
		t.process[p].marking = 0
		for i := range w.job {
			if j := &t.process[p].job[i]; j.at == 'm' {
				mine := d.mark == "worker" || d.mark == "run" && t.run[i].status == 'l' && t.run[i].lease == j.lease && t.run[i].begun ||
					t.key[i].lease == j.lease && t.key[i].begun
				if w.marking == 'y' && mine {
					j.at = 'b'
				} else {
					*j = bJob{}
				}
			}
		}
		if w.marking == 'y' {
			do(name+" is told that its mark is recorded", t)
		} else {
			// Retired: it gives back what waits, and gets a new identity. What runs continues.
			for i := range w.job {
				if a := w.job[i].at; a == 'q' || a == 'u' || a == 'm' {
					t.release(i, w.job[i].lease)
					t.process[p].job[i] = bJob{}
				}
			}
			// Leases that a poll under way brings name the old row of the process, so a mark in its new row would not
			// be found for them.
			for i := range w.job {
				if j := &t.process[p].job[i]; j.at == 'g' && !d.keepOld {
					j.at = 'x'
				}
			}
			t.process[p].late = 0
			d.bear(&t, p)
			do(name+" is told that it was retired, gives back what waits, and renews itself", t)
		}
		if s.losses > 0 && w.marking == 'y' {
			t := s
			t.losses--
			t.process[p].unknown()
			do(name+" loses the answer to its mark", t)
		}
	}
}

func (w *bProcess) set() (set [bRuns]uint8) {
	for i, j := range w.job {
		if j.at == 'm' {
			set[i] = j.lease
		}
	}
	return set
}

func (w *bProcess) unknown() {
	w.marking = 0
	for i := range w.job {
		if w.job[i].at == 'm' {
			w.job[i].at = 'u'
		}
	}
}

// execute is the statement that stores marks. It returns false if the database refuses them.
func (d bDesign) execute(s *bState, birth int8, set [bRuns]uint8) bool {
	if birth < 0 {
		return false
	}
	if d.mark == "run" {
		for i, lease := range set {
			if r := &s.run[i]; lease != 0 && (d.unfenced || r.status == 'l' && r.lease == lease) {
				r.begun = true
			}
		}
		return true
	}
	if d.mark == "token" {
		for i, lease := range set {
			r := &s.run[i]
			if k := &s.key[i]; lease > k.lease && (d.noCheck || r.status == 'l' && r.lease == lease) {
				*k = bKey{lease: lease, begun: true}
			}
		}
		return true
	}
	m := &s.mark[birth]
	if !m.exists || m.retired {
		return false
	}
	for i := range s.run {
		switch {
		case set[i] != 0:
			m.begun[i], m.soft[i] = max(m.begun[i], set[i]), d.async
		case d.absolute:
			m.begun[i] = 0
		case d.position && s.run[i].status == 'l' && s.run[i].holder == birth:
			m.begun[i] = s.run[i].lease
		}
	}
	return true
}

// release gives back a lease that was not begun.
func (s *bState) release(i int, lease uint8) {
	r := &s.run[i]
	if r.status != 'l' || r.lease != lease {
		return
	}
	r.status, r.holder, r.expired = 'p', -1, false
	r.attempt--
	r.freed |= 1 << lease
	if r.started {
		s.fault = "a handler began and was not charged"
	}
}

// work lets handlers return and settles them. Heartbeats extend leases, and report those that are gone.
func (d bDesign) work(s bState, p int, name string, do func(string, bState)) {
	for i, j := range s.process[p].job {
		r := s.run[i]
		mine := r.status == 'l' && r.lease == j.lease
		switch {
		case j.at == 0 || j.at == 'd' || j.at == 'g' || j.at == 'x':
			continue
		case j.at == 'r' && d.poison && i == 0:
			t := s
			t.die(p)
			do("run 0 kills "+name, t)
			continue
		case j.at == 'r':
			t := s
			t.process[p].job[i].at = 'o'
			do(fmt.Sprintf("%s: the handler of run %d returns", name, i), t)
		case j.at == 'o':
			t := s
			t.process[p].job[i] = bJob{}
			if mine {
				t.run[i].status, t.run[i].holder, t.run[i].expired = 's', -1, false
			}
			do(fmt.Sprintf("%s settles run %d", name, i), t)
			continue
		}
		t := s
		switch {
		case mine && r.expired:
			t.run[i].expired = false
			for q := range t.process { // a statement does not outlast a lease: its check of the newest row fails
				if v := &t.process[q]; v.look == int8(i) {
					v.look, v.saw, v.sawLease = -1, false, 0
				}
			}
			do(fmt.Sprintf("%s extends its lease of run %d", name, i), t)
		case !mine && j.at != 'm':
			t.process[p].job[i] = bJob{}
			do(fmt.Sprintf("%s hears that its lease of run %d is gone", name, i), t)
		}
	}
}

// takeBack takes back an expired lease. If the mark is looked up in a snapshot, the look-up and the change are two
// steps.
func (d bDesign) takeBack(s bState, p int, name string, do func(string, bState)) {
	w := s.process[p]
	if w.look >= 0 {
		i := int(w.look)
		t := s
		t.process[p].look, t.process[p].saw, t.process[p].sawLease = -1, false, 0
		if r := s.run[i]; r.status == 'l' && r.expired && r.lease == w.sawLease {
			d.take(&t, i, w.saw)
		}
		do(fmt.Sprintf("%s takes run %d back (mark seen: %v)", name, i, w.saw), t)
		return
	}
	for i, r := range s.run {
		if r.status != 'l' || !r.expired {
			continue
		}
		m := s.mark[max(r.holder, 0)]
		saw := m.begun[i] == r.lease
		if !m.exists {
			saw = !d.missingIsUnbegun
		}
		t := s
		switch {
		case !r.ahead || d.mark == "lease":
			d.take(&t, i, true)
		case d.mark == "none":
			d.take(&t, i, false)
		case d.mark == "run":
			d.take(&t, i, r.begun)
		case d.mark == "token":
			k := &t.key[i]
			if d.fence == "looks" {
				t.process[p].look, t.process[p].saw, t.process[p].sawLease = int8(i), k.lease == r.lease && k.begun, r.lease
				do(fmt.Sprintf("%s looks at expired run %d", name, i), t)
				continue
			}
			if k.lease < r.lease {
				*k = bKey{lease: r.lease}
			}
			d.take(&t, i, k.lease == r.lease && k.begun)
		case d.fence == "snapshot" || d.fence == "time":
			t.process[p].look, t.process[p].saw, t.process[p].sawLease = int8(i), saw, r.lease
			do(fmt.Sprintf("%s looks at expired run %d", name, i), t)
			continue
		default: // locks the mark's row, and reads its newest version
			d.take(&t, i, saw)
			t.mark[r.holder].retired = t.mark[r.holder].retired || d.fence == "retire"
			if d.deleteAtTakeBack {
				t.mark[r.holder] = bMark{}
			}
		}
		do(fmt.Sprintf("%s takes run %d back", name, i), t)
	}
}

func (d bDesign) take(s *bState, i int, begun bool) {
	r := &s.run[i]
	if begun && !r.started && r.died > 0 {
		s.wasted[r.died]++
	}
	if !begun && !(d.exhaustedFirst && r.attempt >= d.most) {
		s.release(i, r.lease)
		return
	}
	if !begun {
		s.fault = "a run was failed that nobody was allowed to begin"
	}
	r.suspect, r.status, r.holder, r.expired = true, 'p', -1, false
	if r.attempt >= d.most {
		r.status = 'f' // in the usual way, see model A
	}
}

// stop gives back what waits and what runs. Then the process ends, and its row is removed.
func (d bDesign) stop(s bState, p int, name string, do func(string, bState)) {
	w := s.process[p]
	if w.marking != 0 || w.look >= 0 {
		return
	}
	if d.deleteAtStop && !w.deleted {
		t := s
		t.process[p].deleted = true
		t.mark[w.birth] = bMark{}
		do(name+" deletes its row", t)
		return
	}
	for i, j := range w.job {
		switch {
		case j.at == 'q' || j.at == 'u' || j.at == 'b' || j.at == 'c':
			t := s
			t.release(i, j.lease)
			t.process[p].job[i] = bJob{}
			do(fmt.Sprintf("%s gives back run %d", name, i), t)
			return
		case j.at != 0:
			return // handlers return, or are given back, as in model A
		}
	}
	t := s
	t.process[p] = bProcess{birth: -1, look: -1}
	do(name+" has stopped", t)
}
