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

// startPayload starts an instance of a process. If an instance with its key or id exists, the start succeeds and
// returns that instance, provided that process, tenant and input (compared as JSON values) are the same, and the
// version is the same or not given. Otherwise the run fails with the code conflict. The priority is not compared. If
// several instances have had the key, the newest is compared.
type startPayload struct {
	Process  string          `json:"process"`
	Version  int             `json:"version,omitzero"`  // 0: the highest that is deployed
	Input    json.RawMessage `json:"input,omitzero"`    // an object; none: {}
	Key      string          `json:"key,omitzero"`      // at most one instance of the process and tenant has it, until that one is removed; not together with ID
	Again    bool            `json:"again,omitzero"`    // with Key: if the instance that has the key is over, start a new one with the key
	ID       uuid.UUID       `json:"id,omitzero"`       // of the instance; zero: derived from process, key and tenant, or without a key, the run's id
	Priority int             `json:"priority,omitzero"` // of all its steps: -100 to 100, default 0
	Tenant   string          `json:"tenant,omitzero"`   // of all its runs, and of the instances it calls; none: the tenant of the run

	Parent *parentPayload `json:"parent,omitzero"` // set by call nodes only: the database refuses it from anybody else
}

// check returns an error if the payload is malformed. It does not ask the database.
func (p startPayload) check() error {
	if p.Process == "" {
		return errors.New("process: it is missing; name the process to start")
	}
	if len(p.Input) > 0 && p.Input[0] != '{' {
		return errors.New("input: use a JSON object")
	}
	if p.Again && p.Key == "" {
		return errors.New("again: there is no key to use again; give a key, or leave again out")
	}
	if p.ID != uuid.Nil && p.Key != "" {
		return errors.New("id, key: give one of them; with a key, the id is derived from the key")
	}
	if len(p.Input) > 0 {
		if err := jsondoc.CheckPayload(p.Input); err != nil {
			return fmt.Errorf("input: %w", err)
		}
	}
	if utf8.RuneCountInString(p.Key) > 200 {
		return errors.New("key: use 1 to 200 characters")
	}
	if p.Priority < -100 || p.Priority > 100 {
		return fmt.Errorf("priority: %d is outside -100 to 100", p.Priority)
	}
	if utf8.RuneCountInString(p.Tenant) > 200 {
		return errors.New("tenant: use at most 200 characters")
	}
	return nil
}

// input returns the input, or {} if there is none.
func (p startPayload) input() json.RawMessage {
	if len(p.Input) == 0 {
		return json.RawMessage("{}")
	}
	return p.Input
}

// A parentPayload names the token that waits for the instance, and the visit in which it waits.
type parentPayload struct {
	Instance uuid.UUID `json:"instance"`
	Token    uuid.UUID `json:"token"`
	Visit    int64     `json:"visit"`         // the version of the token
	Depth    int       `json:"depth"`         // of the called instance: one more than the caller's
	Undo     bool      `json:"undo,omitzero"` // the steps of the called instance are undone with those of its caller
}

// Started is the result of a run that starts an instance. If the start found an existing instance, it describes that
// one.
type Started struct {
	Instance   uuid.UUID `json:"instance"`
	Definition uuid.UUID `json:"definition"`
	Version    int       `json:"version"`

	After uuid.UUID `json:"after,omitzero"` // the instance that had the key before (Again), or the failed one that a restart continues
}

// cancelPayload cancels an instance: see [Cancel].
type cancelPayload struct {
	Instance uuid.UUID `json:"instance"`
	Reason   string    `json:"reason,omitzero"`
	By       string    `json:"by,omitzero"` // who asks for it; none: the database role that enqueued the run

	// Compensate undoes completed steps before the instance is cancelled.
	Compensate bool `json:"compensate,omitzero"`
}

// abandoned is the reason with which the engine cancels an instance whose caller has gone on or ended without it. It is
// stored, and workers of other versions read it.
const abandoned = "nobody waits for it any more"

// late returns the error of a cancellation that comes too late: err, but nil if the engine asked for it. The instance
// then ends, or has ended, by other means, and retention may have removed it: nobody needs to be told.
func (p cancelPayload) late(err error) error {
	if p.Reason == abandoned && run.IsPermanent(err) {
		return nil
	}
	return err
}

// failPayload makes an instance compensate its completed steps and end as FAILED: see [Fail].
type failPayload struct {
	Instance uuid.UUID `json:"instance"`
	Reason   string    `json:"reason,omitzero"` // none: the error of its latest open incident
	By       string    `json:"by,omitzero"`     // who asks for it; none: the database role that enqueued the run
}

// restartPayload starts a new instance that continues a FAILED one: see [Restart]. The result is a Started.
type restartPayload struct {
	Instance uuid.UUID `json:"instance"`
	By       string    `json:"by,omitzero"` // who asks for it; none: the database role that enqueued the run
}

// messagePayload sends a message: see [Message].
type messagePayload struct {
	Name    string          `json:"name"`
	Key     string          `json:"key"`
	Payload json.RawMessage `json:"payload,omitzero"` // none: {}
	ID      string          `json:"id,omitzero"`      // an idempotency key chosen by the sender; none: the id of the run
	TTL     Duration        `json:"ttl,omitzero"`     // 0: defaultTTL
}

// signalPayload sends a signal: see [Signal].
type signalPayload struct {
	Name    string          `json:"name"`
	Payload json.RawMessage `json:"payload,omitzero"` // none: {}
}

// completeTaskPayload completes a user task: see [Completion].
type completeTaskPayload struct {
	Task    uuid.UUID       `json:"task"`
	By      string          `json:"by"`
	Output  json.RawMessage `json:"output,omitzero"`  // none: {}
	Version int64           `json:"version,omitzero"` // the version that the person saw; 0: any
}

// A cutOff is the payload of the run that reports to a token that somebody has cancelled or deleted its step, or the
// start of the instance that it calls. Visit is the visit of the token in which that happened.
type cutOff struct {
	Token  uuid.UUID `json:"token"`
	Visit  int64     `json:"visit"`
	Reason string    `json:"reason,omitzero"`
	Code   string    `json:"code,omitzero"` // none: cancelled
}

// codeForeign is the error code of a run that names a row that does not belong to it, for example the token of another
// instance.
const codeForeign = "not_its_own"

// foreign returns a permanent error with codeForeign.
func foreign(format string, args ...any) error {
	return run.Permanent(run.WithCode(codeForeign, fmt.Errorf(format, args...)))
}

// taskRef is the result of a run that completes a task.
type taskRef struct {
	Task     uuid.UUID `json:"task"`
	Instance uuid.UUID `json:"instance"`
	Token    uuid.UUID `json:"token"`
}

// retryPayload retries an incident: see [Retrial].
type retryPayload struct {
	Incident uuid.UUID `json:"incident,omitzero"`
	Instance uuid.UUID `json:"instance,omitzero"`

	By string `json:"by,omitzero"` // who asks for it; none: the database role that enqueued the run

	// Force fires a join that cannot be satisfied with the tokens that have arrived.
	Force bool `json:"force,omitzero"`
}

// retried is the result of a run that retries an incident.
type retried struct {
	Instance uuid.UUID `json:"instance"`
	Incident uuid.UUID `json:"incident"`
	Token    uuid.UUID `json:"token"`
	Kept     bool      `json:"kept,omitzero"` // the incident reports a row that is set aside: the retry only tries that row again
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
