package graph

import (
	"encoding/json"
	"errors"
	"fmt"
	"unicode/utf8"

	"github.com/google/uuid"

	"github.com/simple-workflow/simple-workflow/internal/jsondoc"
	"github.com/simple-workflow/simple-workflow/run"
)

// startPayload starts an instance of a process. If there is one with its key or id already, the start succeeds and answers that one,
// as long as process, tenant and, as JSON values, input are the same, and the version is, too, or none is given.
// Otherwise the run fails, with the code conflict. The priority does not matter. Of several instances that have had a key the newest is meant.
type startPayload struct {
	Process  string          `json:"process"`
	Version  int             `json:"version,omitzero"`  // 0: the highest there is
	Input    json.RawMessage `json:"input,omitzero"`    // an object; none: {}
	Key      string          `json:"key,omitzero"`      // at most one instance of the process and tenant has it, until that is purged; not together with ID
	Again    bool            `json:"again,omitzero"`    // with Key: once the instance that has it is over, another one gets it
	ID       uuid.UUID       `json:"id,omitzero"`       // of the instance; zero: made of process, key and tenant, or the run's own
	Priority int             `json:"priority,omitzero"` // of all its steps: -100 to 100, 0 is usual
	Tenant   string          `json:"tenant,omitzero"`   // of all its steps, and of what it calls; none: the run's own

	Parent *parentPayload `json:"parent,omitzero"` // set by call nodes only: the database refuses it from anybody else
}

// check returns what is wrong with it, whatever the database has.
func (p startPayload) check() error {
	if p.Process == "" {
		return errors.New("process: it is missing; name the process to start")
	}
	if len(p.Input) > 0 && p.Input[0] != '{' {
		return errors.New("input: use a JSON object")
	}
	if p.Again && p.Key == "" {
		return errors.New("again: it says that a key is used again, and there is no key; give one, or leave it out")
	}
	if p.ID != uuid.Nil && p.Key != "" {
		return errors.New("id, key: give one of them; with a key the id is made of it, so that there is one instance of it")
	}
	if len(p.Input) > 0 {
		if err := jsondoc.CheckPayload(p.Input); err != nil {
			return fmt.Errorf("input: %w", err)
		}
	}
	if p.Priority < -100 || p.Priority > 100 {
		return fmt.Errorf("priority: %d is outside -100 to 100", p.Priority)
	}
	if utf8.RuneCountInString(p.Tenant) > 200 {
		return errors.New("tenant: use at most 200 characters")
	}
	return nil
}

// input returns the input; none: {}.
func (p startPayload) input() json.RawMessage {
	if len(p.Input) == 0 {
		return json.RawMessage("{}")
	}
	return p.Input
}

// A parentPayload says which token waits for the instance, and at which of its visits.
type parentPayload struct {
	Instance uuid.UUID `json:"instance"`
	Token    uuid.UUID `json:"token"`
	Visit    int64     `json:"visit"`
	Depth    int       `json:"depth"`
	Undo     bool      `json:"undo,omitzero"` // what the instance does is undone with its caller
}

// Started is the result of a run that starts an instance. If that had been started before, it is what the
// instance is.
type Started struct {
	Instance   uuid.UUID `json:"instance"`
	Definition uuid.UUID `json:"definition"`
	Version    int       `json:"version"`

	After uuid.UUID `json:"after,omitzero"` // of one that has got its key again, or goes on where another one has failed: that instance
}

// cancelPayload cancels an instance, for good.
type cancelPayload struct {
	Instance uuid.UUID `json:"instance"`
	Reason   string    `json:"reason,omitzero"`
	By       string    `json:"by,omitzero"` // who asks for it; none: the role that has enqueued the run

	// Compensate undoes what was done before the instance is cancelled.
	Compensate bool `json:"compensate,omitzero"`
}

// failPayload fails an instance, for good: it undoes what it has done, and is FAILED.
type failPayload struct {
	Instance uuid.UUID `json:"instance"`
	Reason   string    `json:"reason,omitzero"` // none: the error of its latest open incident
	By       string    `json:"by,omitzero"`     // who asks for it; none: the role that has enqueued the run
}

// restartPayload starts a FAILED instance again from where it failed, as another instance, which has its key, too. That takes what is done for done, with what it
// has returned; what was undone, and all that lies behind, is done anew. What cannot be taken over for certain is refused, with the code conflict.
// The result is a Started.
type restartPayload struct {
	Instance uuid.UUID `json:"instance"`
	By       string    `json:"by,omitzero"` // who asks for it; none: the role that has enqueued the run
}

// messagePayload is a message to the one token that waits for its name and key: the one that has
// waited longest, or the first that comes before the message's time is over.
type messagePayload struct {
	Name    string          `json:"name"`
	Key     string          `json:"key"`
	Payload json.RawMessage `json:"payload,omitzero"` // none: {}
	ID      string          `json:"id,omitzero"`      // the sender's: the same again changes nothing; none: the run's
	TTL     Duration        `json:"ttl,omitzero"`     // zero: a day
}

// signalPayload is a signal to all tokens that wait for it when it is taken up.
type signalPayload struct {
	Name    string          `json:"name"`
	Payload json.RawMessage `json:"payload,omitzero"` // none: {}
}

// completeTaskPayload completes a person's task.
type completeTaskPayload struct {
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

// retryPayload has what an incident stopped tried again: this one, or the oldest open one of an
// instance. If both are given, the incident is one of the instance.
type retryPayload struct {
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

func (p retryPayload) check() error {
	if p.Incident == uuid.Nil && p.Instance == uuid.Nil {
		return errors.New("incident, instance: name one of them")
	}
	return nil
}

func (p completeTaskPayload) check() error {
	if p.Task == uuid.Nil {
		return errors.New("task: it is missing; give the id of a task")
	}
	if p.By == "" {
		return errors.New("by: it is missing; say who completes the task")
	}
	return nil
}

func (p messagePayload) check() error {
	if len(p.Key) > 200 || len(p.ID) > 200 {
		return errors.New("key and id: use at most 200 bytes")
	}
	if p.Key == "" {
		return errors.New("key: it is missing; say which instance is meant, as its await node does")
	}
	if p.TTL < 0 {
		return errors.New("ttl: it is negative")
	}
	return named(p.Name)
}

func named(name string) error {
	if name == "" || len(name) > maxSubject {
		return errors.New("name: use 1 to 200 bytes")
	}
	return nil
}
