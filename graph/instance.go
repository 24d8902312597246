package graph

import (
	"encoding/json"
	"time"

	"github.com/google/uuid"
)

// A Status is what has become of an instance so far.
type status string

// The states of an instance. WAITING means that nothing of it is due or runs.
const (
	statusCreated    status = "CREATED"
	statusInProgress status = "IN_PROGRESS"
	statusWaiting    status = "WAITING"
	statusCompleted  status = "COMPLETED"
	statusFailed     status = "FAILED"
	statusCancelled  status = "CANCELLED"
)

// Final reports whether the instance is over.
func (s status) final() bool {
	return s == statusCompleted || s == statusFailed || s == statusCancelled
}

// An instance is as much of a process instance as a decision needs, and what it has changed.
type instance struct {
	id       uuid.UUID
	process  *Process
	status   status
	priority int
	tenant   string          // empty: none
	version  int64           // when it was read
	trace    json.RawMessage // the metadata of its runs: where the trace of its start goes on; nil: it has none
	paused   bool
	input    json.RawMessage
	facts    facts            // of the nodes that may be read
	unfit    map[string]error // nodes whose latest results are not what their mappings expect, and why

	depth  int // of calls: 0 for one that nobody has called
	parent *parentRef
	lends  bool // what it has done is undone with its caller

	live, ready, joining, incidents int

	corrected bool // an operator has corrected a fact of it

	from *legacy // it begins, and takes over what another one has done

	ending       status // what it becomes once everything is undone; empty: it is not ending
	endingReason string
	debts        map[*token]uuid.UUID // the record that each undoing token undoes next; none: it is owed nothing, as far as was asked
	undoing      bool                 // an undo step is under way

	moves  int // nodes entered in this decision
	eaches []*progress
	drains []*group // groups whose last token has ended, in this decision

	joins       map[joinKey]*joining // those that may be arrived at
	activations int                  // how many of them there have been
	loaded      []*token             // all tokens that were live before, and those of the batch; only if the process needs them

	failure string
	output  json.RawMessage

	changes changes
}

func newInstance() *instance {
	return &instance{facts: facts{steps: map[string]any{}, spent: new(uint64)}, unfit: map[string]error{}, joins: map[joinKey]*joining{}, debts: map[*token]uuid.UUID{}}
}

// changes are what is to be written.
type changes struct {
	touched   bool // anything at all
	tokens    []*token
	groups    []*group
	joins     []*joining
	arrivals  []arrival
	steps     []step
	waits     []subscription
	tasks     []task
	children  []child
	detached  []*token // whose attached runs, waits, tasks and children go
	records   []record
	undo      []undo
	undone    []runRef
	notUndone []*token // whose undo steps have failed
	undoAgain bool     // records of undo steps that have failed are renewed
	incidents []incident
	failures  []failed // that are in no run
	facts     []known  // likewise
	restart   runRef   // has had it take the place of after; zero: none
	after     uuid.UUID
	events    []event
	history   []transition
	ended     bool     // all live tokens that are not among tokens end, and their runs
	endedBut  *token   // the same, but this one stays
	throws    []*token // have what was done undone, without an end; steps that were cut off are, too
	unknown   bool     // steps whose outcome nobody knows are to be undone, too
}

// runRef refers to a run.
type runRef = uuid.UUID

// A parentRef is the token that waits for an instance.
type parentRef struct {
	token uuid.UUID
	visit int64
}

// A group is what one execution of a fork opened.
type group struct {
	id          uuid.UUID // zero: new
	parent      *group
	node        string
	live        int    // its live tokens, and groups in it that have any
	host        *token // the token that stands for it at a scope or each; nil: it is of a fork
	leadsNobody bool   // its end leads nobody on
	restOfList  bool   // a visit of a list of which enough is done; the rest is under way
	fresh       bool
	listed      bool
}

func (g *group) within(outer *group) bool {
	for ; g != nil; g = g.parent {
		if g == outer {
			return true
		}
	}
	return outer == nil
}

type joinKey struct {
	node  string
	group *group
}

// A joining is one activation of a join.
type joining struct {
	id       uuid.UUID // zero: new
	nth      int       // among the activations of the instance, as far as they are known
	node     *node
	group    *group
	round    int
	expected int
	joined   int
	fired    bool
	has      map[string]bool // edges over which one has come, as far as they matter now
	waiting  map[*group]int  // arrivals of before that count, by their tokens' groups: where these are not known one by one
	surplus  []*token        // for the next round
	fires    bool            // in this decision
	forced   bool            // by an operator, with those that have come
	listed   bool
}

type arrival struct {
	join    *joining
	token   *token
	edge    string
	surplus bool
}

// A step is a run of a token, to be enqueued.
type step struct {
	token       *token
	node        string
	typ         string
	payload     json.RawMessage
	attempts    int
	due         due
	afterLeases bool // not before leases that were cut off have run out
}

// A due is when a run may be leased; zero: at once.
type due struct {
	after time.Duration
	until time.Time // zero: after the duration
	tick  *tick     // of a timer that fires time and again
}

// A tick is one firing of a timer that fires time and again.
type tick struct {
	number int
	after  runRef // the run of the tick before; zero: this is the first
}

func (t *tick) count() int {
	if t == nil {
		return 0
	}
	return t.number
}

// A position is the payload of the engine's own runs that belong to a token: where at its node
// they happen.
type position struct {
	At      string    `json:"at,omitzero"`
	Tick    int       `json:"tick,omitzero"`
	Visit   int64     `json:"visit,omitzero"`   // of the token's, if nothing else keeps it from being late
	Message uuid.UUID `json:"message,omitzero"` // that has come
	Signal  uuid.UUID `json:"signal,omitzero"`  // the run that has sent it
	Child   uuid.UUID `json:"child,omitzero"`   // the instance that is over
}

func (p position) json() json.RawMessage {
	text, err := json.Marshal(p)
	if err != nil {
		panic(err) // words and numbers
	}
	return text
}

type incident struct {
	token         *token
	node          string
	code, message string
}

// A failed is what expressions read of a failure that no run tells of.
type failed struct {
	node    string
	code    string
	message string
}

type event struct {
	token *token // nil: of the instance as a whole
	name  string
	node  string
	data  map[string]any
}

type transition struct {
	from, to status
	reason   string
}

// ref is the group's id as a column that may be null.
func (g *group) ref() uuid.NullUUID {
	if g == nil {
		return uuid.NullUUID{}
	}
	return uuid.NullUUID{UUID: g.id, Valid: true}
}

// gone are tokens that were ended before they were done, or have left their node: what belongs to them there ends.
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

// home returns the group, among g and those around it, to whose activation of a join a token of g comes; nil if
// the join belongs to no fork.
func (g *group) home(join *node) *group {
	for ; g != nil; g = g.parent {
		if join.fork != nil && g.node == join.fork.name {
			return g
		}
	}
	return nil
}
