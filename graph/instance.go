package graph

import (
	"encoding/json"
	"time"

	"github.com/google/uuid"
	"github.com/simple-workflow/simple-workflow/internal/leasing"
)

// A status is the state of an instance.
type status string

// The states of an instance. A WAITING one has no step to execute: all its tokens wait for a message, a signal, a
// person, a time, another instance, other tokens or an operator.
const (
	statusCreated    status = "CREATED"
	statusInProgress status = "IN_PROGRESS"
	statusWaiting    status = "WAITING"
	statusCompleted  status = "COMPLETED"
	statusFailed     status = "FAILED"
	statusCancelled  status = "CANCELLED"
)

// final reports whether the instance is over. Then its status never changes again.
func (s status) final() bool {
	return s == statusCompleted || s == statusFailed || s == statusCancelled
}

// An instance is the part of a process instance that the decisions of a batch need, and what they have changed. Its
// four counts (live, ready, joining, incidents) are columns of its row and include the tokens that are not loaded. They
// let the core see that a token is the last one, or that all others wait at joins, without reading the other tokens.
type instance struct {
	id       uuid.UUID
	process  *Process
	status   status
	priority int
	tenant   string          // empty: none
	key      string          // the business key; empty: none
	chain    leasing.Chain   // the longest that a run of the batch belongs to
	version  int64           // of the row as it was read; 0: this batch has inserted it
	read     columns         // of the row as it was read or inserted
	trace    json.RawMessage // metadata for its runs, which continues the trace of its start; nil: no trace
	paused   bool
	input    json.RawMessage
	facts    facts            // of the nodes that expressions may read
	unfit    map[string]error // nodes whose latest result their mapping (Out) refuses, with the error

	depth  int        // of calls: 0 for an instance that was not called
	parent *parentRef // nil: it was not called
	lends  bool       // when it completes, its compensation records become its caller's

	live, ready, joining, incidents int // live tokens, those that are Ready, those that wait at joins, open incidents

	corrected bool // an operator has corrected a fact of it

	from *legacy // what it takes over from a failed instance while it begins; nil: nothing

	ending       status               // the status that it gets once everything is undone; empty: it is not ending
	endingReason string               // goes with ending
	debts        map[*token]uuid.UUID // by undoing token of the batch: the record that it undoes next; none: nothing is left to undo
	undoing      bool                 // an undo step is under way, or a called instance has not lent its records yet

	moves  int         // nodes entered in this decision, see maxMoves
	eaches []*progress // lists that the batch may change
	drains []*group    // scopes' groups that have run out of live tokens in this decision, see drain

	joins       map[joinKey]*joining // activations where tokens may arrive, see askJoins
	activations int                  // number of activations known so far, for joining.nth
	loaded      []*token             // if process.survey: all tokens that were live, and those of the batch

	failure string          // the failure reason of a FAILED instance
	output  json.RawMessage // of a COMPLETED instance

	changes changes
}

func newInstance() *instance {
	return &instance{facts: facts{steps: map[string]any{}, spent: new(uint64)}, unfit: map[string]error{}, joins: map[joinKey]*joining{}, debts: map[*token]uuid.UUID{}}
}

// columns are those of an instance's row that decisions change. The others go with a status.
type columns struct {
	status, ending                  status
	endingReason                    string
	live, ready, joining, incidents int
}

func (i *instance) columns() columns {
	return columns{i.status, i.ending, i.endingReason, i.live, i.ready, i.joining, i.incidents}
}

// inserted returns the columns with which an instance that has begun is inserted. If it is over already, or has begun to
// undo, it is inserted as it was before, because its row needs the columns that go with that as well.
func (i *instance) inserted() columns {
	if i.status.final() || i.ending != "" {
		return columns{status: statusCreated}
	}
	return i.columns()
}

// changes collects what the decisions of a batch have changed. The writer writes all of it at the end of the batch, so
// a later decision may still drop what an earlier one has added.
type changes struct {
	touched   bool // there is something to write
	tokens    []*token
	groups    []*group
	joins     []*joining
	arrivals  []arrival
	steps     []step
	waits     []subscription
	tasks     []task
	children  []child
	detached  []*token // their attached runs, waits, tasks and children are removed
	records   []record // completed steps that may have to be undone
	undo      []undo   // undo steps to enqueue
	undone    []runRef // undo steps that have succeeded
	notUndone []*token // their undo steps have failed
	undoAgain bool     // each failed undo step gets a new record, so that it is executed again
	incidents []incident
	failures  []failed // failures that no run records
	facts     []known  // facts that no run of the instance records
	restart   runRef   // the run that restarted the failed instance after as this one; zero: none did
	after     uuid.UUID
	events    []event
	stored    []event   // those of events that no run reports, and unheeded ones: see unreported
	successes []success // runs of do nodes that this batch has settled as succeeded
	history   []transition
	ended     bool     // all live tokens that are not in tokens end, with their runs
	endedBut  *token   // the same, except for this token
	throws    []*token // tokens that begin to undo at a throw node; steps that were cut off are undone, too
	unknown   bool     // the instance begins to undo all; steps that may have taken effect unheard are undone, too
}

// runRef is the id of a run.
type runRef = uuid.UUID

// A parentRef is the token that waits for an instance, and the version that the token had when it called.
type parentRef struct {
	token uuid.UUID
	visit int64
}

// A group is one execution of a fork, scope or each. Groups nest. The tokens that belong together, at a join or at the
// end of a scope, are those of one group. So the passes of a loop and nested forks cannot be mistaken for each other.
//
// The group of a fork has no host: its token ends at the fork. The token that enters a scope or each becomes the host
// of the group: it waits at the node, stands for the tokens within, and leads on when they have ended.
type group struct {
	id          uuid.UUID // zero: new, and not written yet
	parent      *group
	node        string // the fork, scope or each
	live        int    // live tokens directly in it, plus live groups directly in it
	host        *token // nil: the group is of a fork
	leadsNobody bool   // its end does not lead the host on: the host has left already, or somebody else moves it
	restOfList  bool   // a list that has enough results and whose host has left; its last elements are still under way
	fresh       bool   // new, and to be inserted
	listed      bool   // it is in changes.groups
}

// within reports whether g is outer or is nested in it. Everything is within nil.
func (g *group) within(outer *group) bool {
	for ; g != nil; g = g.parent {
		if g == outer {
			return true
		}
	}
	return outer == nil
}

// A joinKey identifies the current activation of a join: there is one for each group, see home.
type joinKey struct {
	node  string
	group *group
}

// A joining is one activation of a join: one time that it waits, and fires.
type joining struct {
	id       uuid.UUID // zero: new, and not written yet
	nth      int       // its number among the instance's known activations, by which pendingTaken orders those of one join
	node     *node
	group    *group // whose tokens meet here; nil: the join belongs to no fork
	round    int    // 1, and one more for each time that the join has fired for this group
	expected int
	joined   int // arrivals that count
	fired    bool
	has      map[string]bool // the edges by which a token has arrived; of these only those that are read, see askJoins
	waiting  map[*group]int  // arrivals of earlier batches that count, by the groups of their tokens, if the tokens are not loaded
	surplus  []*token        // arrivals by an edge that has one already: they count for the next round
	fires    bool            // it fires in this batch
	forced   bool            // an operator has made it fire with those that have arrived
	listed   bool            // it is in changes.joins
}

type arrival struct {
	join    *joining
	token   *token
	edge    string
	surplus bool
}

// A step is a run of a token that is to be enqueued: a step of the process, a timer, or a look for what to undo next.
type step struct {
	token       *token
	node        string // workflow_run.node, under which expressions find the result; a suffix such as /item keeps it from being a fact of the node
	typ         string
	payload     json.RawMessage
	attempts    int // maximum number of starts; 0: as the policy of the type says
	due         due
	afterLeases bool   // not due before the leases that were cut off have expired
	entry       *entry // of a step of the process; nil: of another run
}

// An entry is one time that a token has entered a do node. Its step and its event share the pointer. If the step gets
// its run, that run reports the entry, and the event is not stored: see writer.events.
type entry struct{ token *token }

// A success is the run of a do node that has succeeded, with the token and the node that it was for.
type success struct {
	token *token
	node  *node
	run   runRef
}

// A due says when a run may be leased; zero: at once.
type due struct {
	after time.Duration
	until time.Time // zero: after the duration
	tick  *tick     // of a repeating timer; nil: it fires once
}

// A tick is one firing of a repeating timer. It is due one interval after the time at which the tick before was due, so
// delays do not add up. Ticks that were missed meanwhile are skipped.
type tick struct {
	number int    // from 1
	after  runRef // the run of the tick before; zero: this is the first
}

// count returns the number of the tick; 0 for nil.
func (t *tick) count() int {
	if t == nil {
		return 0
	}
	return t.number
}

// A position is the payload of the engine's own runs that belong to a token. It says at which place of the node
// something happens, and what.
type position struct {
	At      string    `json:"at,omitzero"`      // the place, see mainPlace
	Tick    int       `json:"tick,omitzero"`    // of a repeating timer: the number of the tick; of undoType: how often the token has waited
	Visit   int64     `json:"visit,omitzero"`   // the token's version: the run has no effect at another one; 0: not checked, the run is cancelled when the token leaves
	Message uuid.UUID `json:"message,omitzero"` // the message that has arrived
	Signal  uuid.UUID `json:"signal,omitzero"`  // the run that has sent the signal
	Child   uuid.UUID `json:"child,omitzero"`   // the called instance that is over
}

func (p position) json() json.RawMessage {
	text, err := json.Marshal(p)
	if err != nil {
		panic(err) // cannot happen: all fields are texts, numbers and ids
	}
	return text
}

// An incident is one that is to be opened.
type incident struct {
	token         *token // nil: of the instance as a whole
	node          string
	code, message string
}

// A failed is a failure that no run of the token records, as expressions read it.
type failed struct {
	node    string
	code    string
	message string
}

// An event is something that has happened. It becomes a row of process_event, unless a run reports it: see
// writer.events.
type event struct {
	token *token // nil: of the instance as a whole
	name  string
	node  string
	data  map[string]any
	entry *entry // of a do node that was entered; nil: of anything else
	run   runRef // the run that has completed the node; zero: none, or the event is another one
}

// A transition is a row of process_state_history to be written.
type transition struct {
	from, to status
	reason   string
}

// ref returns the group's id as a nullable column; nil becomes null.
func (g *group) ref() uuid.NullUUID {
	if g == nil {
		return uuid.NullUUID{}
	}
	return uuid.NullUUID{UUID: g.id, Valid: true}
}

// gone returns the tokens that were ended early or have left their node. The runs, waits, tasks and children that
// belonged to them there are removed. New tokens (version 0) have none in the database.
func (c *changes) gone() (ids []uuid.UUID) {
	for _, t := range c.tokens {
		if (t.state == tokenTerminated || t.state == tokenFailed) && t.version > 0 {
			ids = append(ids, t.id)
		}
	}
	for _, t := range c.detached {
		ids = append(ids, t.id)
	}
	return ids
}

// home returns the group whose activation of a join is the one where a token of g arrives: the innermost group around
// the token that an execution of the join's fork opened. A token of a nested group thereby arrives at the outer fork's
// join. It returns nil if the join belongs to no fork; then all tokens of the instance share one activation.
func (g *group) home(join *node) *group {
	for ; g != nil; g = g.parent {
		if join.fork != nil && g.node == join.fork.name {
			return g
		}
	}
	return nil
}
