package protocol

import (
	"cmp"
	"fmt"
	"maps"
	"slices"
	"time"

	"github.com/google/uuid"
)

// hiddenSteps is the maximum number of invisible steps between two visible ones.
const hiddenSteps = 3

// A Replay reads a trace, run by run, and checks it against model A. Its zero value is ready for use.
type Replay struct {
	Most  int           // the most leases that a worker may hold at once whose attempts are charged if it dies; 0: not checked
	Watch time.Duration // how long a suspect at its last attempt has to be alone at least; 0: not checked
	// LeaveOut reports whether a run was changed where the trace does not look. Such runs are only counted. Nil:
	// none.
	LeaveOut func(run uuid.UUID) bool

	broken  func(*aDesign) // for tests: plants a fault; nil: none
	seen    automaton
	run     *replayed
	workers map[string][]interval
	faults  []span // when settling failed for every run
	verdict Verdicts
}

// Verdicts are the results of a replay.
type Verdicts struct {
	Runs, Events int
	Edits        int // changes by hand, and other changes that no function of the engine made
	LeftOut      int // runs
	Removed      int // runs
	Wrong        []Wrong
}

// Wrong is a run, or a worker, whose history the model does not allow.
type Wrong struct {
	Kind   Kind
	Run    uuid.UUID
	What   string
	Events []Event // of the run, up to the one that was refused
}

// A Kind is a property of histories that is checked.
type Kind byte

// The kinds of violations.
const (
	Step     Kind = iota // a change that is no step of the model
	Crowded              // a worker held more leases than it may
	Together             // suspects were leased together that must not be
)

// A replayed is the run that is being replayed.
type replayed struct {
	id     uuid.UUID
	states int // the set of states that the model may be in
	events []Event
	token  map[uuid.UUID]uint16 // the lease of each token
	names  [2]string            // the workers that stand for the model's two processes
	holder string               // who leased it last
	leaves bool                 // it is left out
	over   bool                 // its history was refused: the rest is skipped
	kept   uint16               // the lease under which an outcome is kept; 0: none
	begun  uuid.UUID            // the token of the lease ahead that may begin
	keeps  Verdict
	spared bool     // it is a suspect whose last attempt was given back
	held   interval // its current lease
}

// Add reads the next event. Events of one run follow each other, in their order; faults may come at any time.
func (r *Replay) Add(e Event) {
	if e.Op == "fault" {
		r.faults = append(r.faults, span{e.At.Add(-lately), e.At.Add(lately)})
		return
	}
	if r.run == nil || r.run.id != e.Run {
		if r.run != nil {
			r.ended(endless)
		}
		r.run = &replayed{id: e.Run, token: map[uuid.UUID]uint16{}}
		r.verdict.Runs++
		if r.LeaveOut != nil && r.LeaveOut(e.Run) {
			r.run.leaves = true
			r.verdict.LeftOut++
		}
	}
	run := r.run
	if (e.ofKept() || e.Op == "begin") && len(run.events) > 0 { // the event does not change the run
		e.Was = run.events[len(run.events)-1].Became
		e.Became, e.Over = e.Was, !e.Was.LeaseUntil.IsZero() && e.Was.LeaseUntil.Before(e.At)
	}
	r.verdict.Events++
	if e.Op == "edit" {
		r.verdict.Edits++
	}
	r.lease(e)
	if run.leaves || run.over {
		return
	}
	problem := r.follow(run, e)
	run.events = append(run.events, e)
	if e.Became.LeasedBy != "" {
		run.holder = e.Became.LeasedBy
	}
	if problem != "" {
		run.over = true
		r.verdict.Wrong = append(r.verdict.Wrong, Wrong{Step, run.id, problem, run.events})
	}
	if e.Op == "remove" {
		r.verdict.Removed++
	}
}

// follow makes the model follow an event, and returns why it cannot, or "".
func (r *Replay) follow(run *replayed, e Event) string {
	if len(run.events) == 0 {
		if e.Op != "enqueue" {
			return "the trace does not begin with its enqueuing"
		}
		row, problem := run.row(e)
		want := Enqueued(row.Most)
		want.Hidden, want.Deleted = row.Hidden, row.Deleted
		if problem == "" && row != want {
			problem = "it was not enqueued as a new run"
		}
		run.states = r.seen.begin(row)
		return problem
	}
	if last := run.events[len(run.events)-1].Became; !e.Was.same(last) {
		return fmt.Sprintf("before the %s it is not as it was left, but %s: something changed it where the trace does not look", e.Op, e.Was)
	}
	if e.Op == "begin" {
		run.begun = e.Kept
		return ""
	}
	if problem := run.keep(e); problem != "" {
		return problem
	}
	row, problem := run.row(e)
	if problem != "" {
		return problem
	}
	o := observation{op: e.Op, over: e.Over, row: row, by: -1}
	if e.Became.Most != e.Was.Most && (e.Op == "policy" || e.Op == "take back") {
		if problem := r.followPolicy(run, e); problem != "" || e.Op == "policy" {
			return problem
		}
	}
	if e.Op == "take back" && e.Was.isAhead() && run.begun != e.Was.Token {
		return r.followUnbegun(run, e, row)
	}
	switch e.Op {
	case "lease":
		o.by, o.fresh = run.process(e.Was, e.Became.LeasedBy)
	case "settle":
		o.by, o.fresh = run.process(e.Was, e.Became.SettledBy)
	case "take back": // the trace does not say whose lease it was, unless the worker that took it back has it now
		o.by, o.fresh = run.process(e.Was, cmp.Or(e.Became.LeasedBy, "somebody"))
		if e.Was.Company != nil {
			o.alone = map[bool]byte{true: 'n', false: 'y'}[*e.Was.Company]
		}
	case "keep":
		o.by, o.fresh = run.process(e.Was, e.Worker)
	case "extend", "give back":
		o.by, o.fresh = run.process(e.Was, run.holder)
	case "retry":
		o.granted = uint16(min(max(e.Became.Most-e.Was.Attempt, 1), 1000))
	case "edit":
		o.granted = uint16(min(max(e.Became.Most-e.Was.Attempt, 1), 1000))
		if e.Was.Status == e.Became.Status && e.Was.LeaseNo == e.Became.LeaseNo && e.Was.Token == e.Became.Token {
			run.states = r.seen.set(run.states, row)
			return ""
		}
		if e.Became.LeaseNo > e.Was.LeaseNo {
			o.by, o.fresh = run.process(e.Was, e.Became.LeasedBy)
		}
	}
	next := r.seen.move(r.broken, run.states, o)
	if next == none {
		return fmt.Sprintf("the model has no %s by which it, having been %s, becomes %s", e.Op, run.told(e.Was), e.Became)
	}
	run.states = next
	return ""
}

// followUnbegun follows the take-back of a lease ahead that was not begun: the run is as it was before the lease.
func (r *Replay) followUnbegun(run *replayed, e Event, row Row) string {
	want := e.Was
	want.Status, want.Attempt, want.Token, want.LeasedBy, want.Most = "pending", e.Was.Attempt-1, uuid.UUID{}, "", e.Became.Most
	if !e.Over || !e.Became.same(want) {
		return fmt.Sprintf("it was leased ahead and had not begun, and the take-back made of it, having been %s, %s", run.told(e.Was), e.Became)
	}
	run.states = r.seen.set(run.states, row)
	return ""
}

// followPolicy gives the row the attempts of its policy, which are written when the run is settled or taken back:
// never fewer than were charged.
func (r *Replay) followPolicy(run *replayed, e Event) string {
	with := e
	with.Became = e.Was
	with.Became.Most = e.Became.Most
	row, problem := run.row(with)
	switch {
	case problem != "":
		return problem
	case !e.Was.Follows || e.Became.Most < e.Was.Attempt || e.Op == "policy" && !e.Became.same(with.Became):
		return fmt.Sprintf("no policy makes it, having been %s, become %s", e.Was, e.Became)
	}
	run.states = r.seen.follow(run.states, row)
	return ""
}

// keep records what an event says about a kept outcome.
func (run *replayed) keep(e Event) string {
	lease, known := run.token[e.Kept]
	switch {
	case !e.ofKept():
	case !known:
		return "an outcome is kept under a token that it never had"
	case e.Op == "keep":
		run.kept, run.keeps = lease, keeps[e.Keeps]
	case lease != run.kept:
		return fmt.Sprintf("under lease %d nothing is kept", lease)
	case e.Op == "fail":
		run.keeps = Fail
	default:
		run.kept, run.keeps = 0, 0
	}
	return ""
}

var keeps = map[string]Verdict{"succeeded": Succeed, "failed": Fail, "retried": Retry, "postponed": Postpone, "released": GiveBack, "effects": Effects}

// told describes a row, and what is kept.
func (run *replayed) told(t Traced) string {
	if run.kept == 0 {
		return t.String()
	}
	return fmt.Sprintf("%s, and what it has come to under lease %d kept", t, run.kept)
}

// same reports whether two are the same row as far as the model knows, except for times.
func (t Traced) same(u Traced) bool {
	t.LeaseUntil, u.LeaseUntil, t.Company, u.Company, t.Follows, u.Follows = time.Time{}, time.Time{}, nil, nil, false, false
	return t == u
}

// row is the row after the event, with leases instead of tokens.
func (run *replayed) row(e Event) (Row, string) {
	t := e.Became
	if t.Status == "" {
		return Row{Kept: run.kept, Keeps: run.keeps}, ""
	}
	if t.LeaseNo < 0 || t.LeaseNo > 60_000 || t.Attempt < 0 || t.Attempt > 1000 || t.Most < 1 || t.Most > 1000 {
		return Row{}, fmt.Sprintf("lease %d, attempt %d of %d: the model has no such numbers", t.LeaseNo, t.Attempt, t.Most)
	}
	row := Row{Status: Status(t.Status[0]), Suspect: t.Suspect, Hidden: t.Hidden, Deleted: t.Deleted, Uncharged: t.Uncharged && t.Status == "leased",
		Attempt: uint16(t.Attempt), Most: uint16(t.Most), Lease: uint16(t.LeaseNo), Kept: run.kept, Keeps: run.keeps}
	if row.Status == Leased {
		of, known := run.token[t.Token]
		if !known && t.LeaseNo > e.Was.LeaseNo {
			run.token[t.Token] = row.Lease
		} else if of != row.Lease {
			return row, fmt.Sprintf("lease %d has the token of lease %d", row.Lease, of)
		}
	}
	if t.Settled != uuid.Nil {
		of, known := run.token[t.Settled]
		if !known {
			return row, "it was settled with a token that it never had"
		}
		row.Settled = of
	}
	return row, ""
}

// process returns which of the model's two processes a worker is. A new worker replaces the process that does not
// hold the lease: what that process still believes can change nothing.
func (run *replayed) process(was Traced, name string) (by int8, fresh bool) {
	for i, known := range run.names {
		if known == name && name != "somebody" {
			return int8(i), false
		}
	}
	if run.names[0] == was.LeasedBy && was.LeasedBy != "" || run.names[0] != "" && (run.names[1] == "" || run.names[1] == "somebody") && run.names[1] != was.LeasedBy {
		by = 1
	}
	run.names[by] = name
	return by, true
}

// An observation is what the automaton reads from an event.
type observation struct {
	op      string
	by      int8 // the process that did it; -1: none
	fresh   bool // the process is new
	over    bool // its previous lease had expired
	row     Row  // the row afterwards, as far as it is visible
	granted uint16
	alone   byte // 'y', 'n'; 0: unknown
}

// An automaton has the states that model A may be in after the observations so far, and remembers where each
// observation leads, because most runs are similar.
type automaton struct {
	ids   map[aState]int32
	sets  [][]aState
	known map[string]int // the sets, by the ids of their states
	moves map[move]int
}

type move struct {
	from int
	observation
}

const none = -1

// begin returns the set of states of a new run.
func (a *automaton) begin(r Row) int {
	s := aState{}
	for i := range s.run {
		s.run[i].holder = -1
	}
	s.run[0].Row = r
	return a.add(map[aState]bool{s: true})
}

// add returns the index of a set of states.
func (a *automaton) add(states map[aState]bool) int {
	if a.ids == nil {
		a.ids, a.known, a.moves = map[aState]int32{}, map[string]int{}, map[move]int{}
	}
	ids := make([]int32, 0, len(states))
	for s := range states {
		id, ok := a.ids[s]
		if !ok {
			id = int32(len(a.ids))
			a.ids[s] = id
		}
		ids = append(ids, id)
	}
	slices.Sort(ids)
	key := fmt.Sprint(ids)
	at, ok := a.known[key]
	if !ok {
		at = len(a.sets)
		a.known[key] = at
		a.sets = append(a.sets, slices.Collect(maps.Keys(states)))
	}
	return at
}

// set returns the states with another row, changed by hand; no process knows of it.
func (a *automaton) set(from int, row Row) int { return a.turn(from, row, "set") }

// follow returns the states with another row, changed by the policy; the process that has the run knows of it.
func (a *automaton) follow(from int, row Row) int { return a.turn(from, row, "follow") }

func (a *automaton) turn(from int, row Row, op string) int {
	key := move{from, observation{op: op, row: row}}
	if to, ok := a.moves[key]; ok {
		return to
	}
	next := map[aState]bool{}
	for _, s := range a.sets[from] {
		was := s.run[0].Row
		s.run[0].Row = row
		s.run[0].Expired, s.run[0].Spared, s.run[0].Uncharged = was.Expired, was.Spared, was.Uncharged
		for p := range s.process {
			if j := &s.process[p].job[0]; op == "follow" && j.lease == row.Lease {
				j.last = row.Attempt >= row.Most
			}
		}
		next[s] = true
	}
	a.moves[key] = a.add(next)
	return a.moves[key]
}

// move returns the set of states that an observation leads to, which is empty if the model does not allow it.
func (a *automaton) move(broken func(*aDesign), from int, o observation) int {
	key := move{from, o}
	if to, ok := a.moves[key]; ok {
		return to
	}
	// Properties of several runs are not checked here, so everything may happen often.
	d := aDesign{care: once, runs: 1, slots: 2, processes: 2, failing: true, effects: true, noWatch: true, replayed: true, granted: o.granted}
	if o.alone != 0 {
		company := o.alone == 'n'
		d.company = &company
	}
	if broken != nil {
		broken(&d)
	}
	often := aBudget{kills: 3, freezes: 3, losses: 3, cancels: 1, retries: 1, stops: 1, holds: 1, releases: 1, refusals: 1, fails: 1}
	here, next := map[aState]bool{}, map[aState]bool{}
	for _, s := range a.sets[from] {
		if o.fresh {
			s.process[o.by] = aProcess{up: true}
		}
		here[s.plain()] = true
	}
	known := maps.Clone(here)
	for hidden := 0; hidden <= hiddenSteps; hidden++ {
		after := map[aState]bool{}
		for s := range here {
			s.aBudget = often
			d.steps(s, func(w step, t aState) {
				t = t.plain()
				switch r := t.run[0].Row; {
				case w.seen == "" && r.Status == Leased && r.Expired && !o.over: // its time was not over
				case w.seen == "" && !known[t]:
					known[t], after[t] = true, true
				case w.seen != "" && (w.seen == o.op || o.op == "edit") && (w.by == int(o.by) || w.by < 0) && r.looks(o.row):
					next[t] = true
				}
			})
		}
		here = after
	}
	to := none
	if len(next) > 0 {
		to = a.add(next)
	}
	a.moves[key] = to
	return to
}

// looks reports whether a row of the model looks like an observed row. Whether a lease has expired depends on the
// clock, and whether an attempt was given back shows at the next take-back.
func (r Row) looks(seen Row) bool {
	r.Expired, r.Spared = false, false
	if r.Status == Cancelled { // a person who cancels may leave this as it was
		r.Suspect = seen.Suspect
	}
	return r == seen
}

// plain leaves out what distinguishes two stories without affecting what can happen next.
func (s aState) plain() aState {
	r := &s.run[0]
	r.starts, r.back, r.results, r.spared, r.started, r.company, r.stored, r.byHand = 0, 0, 0, 0, false, false, false, false
	for i := range s.process {
		s.process[i].proven = 0
	}
	s.aBudget, s.fault = aBudget{}, ""
	return s
}

// String returns the story.
func (w Wrong) String() string {
	text := fmt.Sprintf("run %s: %s", w.Run, w.What)
	for _, e := range w.Events {
		text += "\n    " + e.String()
	}
	return text
}
