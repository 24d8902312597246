package graph

import (
	"encoding/json"
	"errors"
	"fmt"

	"github.com/google/uuid"

	"github.com/simple-workflow/simple-workflow/run"
)

// Prefix is that of the engine's own run types.
const Prefix = "graph."

// The engine's run types, with their payloads. Whoever may enqueue may enqueue these, by SQL or from Go.
const (
	StartType        = "graph.start.v1"         // StartPayload
	MessageType      = "graph.message.v1"       // MessagePayload
	SignalType       = "graph.signal.v1"        // SignalPayload
	CompleteTaskType = "graph.complete_task.v1" // CompleteTaskPayload
)

// These are for operators.
const (
	CancelType = "graph.cancel.v1" // CancelPayload
	RetryType  = "graph.retry.v1"  // RetryPayload
)

// Runs that the engine enqueues for itself. The database refuses them from anybody else, and so it does
// runs with a token or a node, and StartPayload.Parent.
const (
	arriveType = "graph.arrive.v1"  // something that a token waits for has come
	matchType  = "graph.match.v1"   // a message is free again
	cutOffType = "graph.cut_off.v1" // somebody has cancelled or deleted a step

	// Nobody enqueues this: that a worker has a handler for it, which its row says, tells that it takes a signal whose
	// run is not over yet.
	broadcastType = "graph.broadcast.v1"
)

// StartPayload starts an instance of a process.
type StartPayload struct {
	Process  string          `json:"process"`
	Version  int             `json:"version,omitzero"`  // 0: the highest there is
	Input    json.RawMessage `json:"input,omitzero"`    // an object; none: {}
	Key      string          `json:"key,omitzero"`      // at most one instance of the process and tenant has it, until that is purged; not together with ID
	ID       uuid.UUID       `json:"id,omitzero"`       // of the instance; zero: made of process, key and tenant, or the run's own; one of another process is a conflict
	Priority int             `json:"priority,omitzero"` // of all its steps: -100 to 100, 0 is usual
	Tenant   string          `json:"tenant,omitzero"`   // of all its steps, and of what it calls; none: the run's own

	Parent *parentPayload `json:"parent,omitzero"` // set by call nodes only: the database refuses it from anybody else
}

// A parentPayload says which token waits for the instance, and at which of its visits.
type parentPayload struct {
	Instance uuid.UUID `json:"instance"`
	Token    uuid.UUID `json:"token"`
	Visit    int64     `json:"visit"`
	Depth    int       `json:"depth"`
	Undo     bool      `json:"undo,omitzero"` // what the instance does is undone with its caller
}

// Started is the result of a run that starts an instance. It is the same if the instance had
// been started before.
type Started struct {
	Instance   uuid.UUID `json:"instance"`
	Definition uuid.UUID `json:"definition"`
	Version    int       `json:"version"`
}

// CancelPayload cancels an instance, for good.
type CancelPayload struct {
	Instance uuid.UUID `json:"instance"`
	Reason   string    `json:"reason,omitzero"`
	By       string    `json:"by,omitzero"` // who asks for it; none: the role that has enqueued the run

	// Compensate undoes what was done before the instance is cancelled.
	Compensate bool `json:"compensate,omitzero"`
}

// MessagePayload is a message to the one token that waits for its name and key: the one that has
// waited longest, or the first that comes before the message's time is over.
type MessagePayload struct {
	Name    string          `json:"name"`
	Key     string          `json:"key"`
	Payload json.RawMessage `json:"payload,omitzero"` // none: {}
	ID      string          `json:"id,omitzero"`      // the sender's: the same again changes nothing; none: the run's
	TTL     Duration        `json:"ttl,omitzero"`     // zero: a day
}

// SignalPayload is a signal to all tokens that wait for it when it is taken up.
type SignalPayload struct {
	Name    string          `json:"name"`
	Payload json.RawMessage `json:"payload,omitzero"` // none: {}
}

// CompleteTaskPayload completes a person's task.
type CompleteTaskPayload struct {
	Task    uuid.UUID       `json:"task"`
	By      string          `json:"by"`
	Output  json.RawMessage `json:"output,omitzero"`  // none: {}
	Version int64           `json:"version,omitzero"` // the one that was seen; 0: any
}

// A cutOff tells that the step of a token, or the start of what it calls, was cancelled or deleted, at a visit of the token's.
type cutOff struct {
	Token  uuid.UUID `json:"token"`
	Visit  int64     `json:"visit"`
	Reason string    `json:"reason,omitzero"`
	Code   string    `json:"code,omitzero"` // none: cancelled
}

// codeForeign is the code of a run that names something which is not its own: another's token, say.
const codeForeign = "not_its_own"

// foreign is the failure of such a run.
func foreign(format string, args ...any) error {
	return run.Permanent(run.WithCode(codeForeign, fmt.Errorf(format, args...)))
}

// taskRef is the result of a run that completes a task.
type taskRef struct {
	Task     uuid.UUID `json:"task"`
	Instance uuid.UUID `json:"instance"`
	Token    uuid.UUID `json:"token"`
}

// RetryPayload has what an incident stopped tried again: this one, or the oldest open one of an
// instance. If both are given, the incident is one of the instance.
type RetryPayload struct {
	Incident uuid.UUID `json:"incident,omitzero"`
	Instance uuid.UUID `json:"instance,omitzero"`

	By string `json:"by,omitzero"` // who asks for it; none: the role that has enqueued the run

	// Force has a join that cannot be satisfied go on with the tokens that have come.
	Force bool `json:"force,omitzero"`
}

// retried is the result of a run that retries an incident.
type retried struct {
	Instance uuid.UUID `json:"instance"`
	Incident uuid.UUID `json:"incident"`
	Token    uuid.UUID `json:"token"`
	Kept     bool      `json:"kept,omitzero"` // something is refused and set aside: it is tried again, and nothing else
}

func (p MessagePayload) check() error {
	if len(p.Key) > 200 || len(p.ID) > 200 {
		return run.Permanent(errors.New("key and id: use at most 200 bytes"))
	}
	if p.Key == "" {
		return run.Permanent(errors.New("key: it is missing; say which instance is meant, as its await node does"))
	}
	if p.TTL < 0 {
		return run.Permanent(errors.New("ttl: it is negative"))
	}
	return named(p.Name)
}

// maxSubject is the most bytes of the name of a message or signal.
const maxSubject = 200

func named(name string) error {
	if name == "" || len(name) > maxSubject {
		return run.Permanent(errors.New("name: use 1 to 200 bytes"))
	}
	return nil
}
