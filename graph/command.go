package graph

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"time"

	"github.com/google/uuid"

	"github.com/simple-workflow/simple-workflow/run"
)

// The functions below send requests to process instances. Each enqueues a run of one of the engine's own types and
// returns the id of that run. If db is a transaction, the run becomes visible when the transaction commits. A worker
// with an [Engine] executes the run, and run.Read returns its outcome. A request that cannot be met makes the run fail,
// with the reason as its error. A malformed request is refused here: the function returns an error and stores nothing.
//
// In SQL, INSERT the run into workflow_run: see docs/processes.md.

// NewInstance describes an instance to start. Process is required.
type NewInstance struct {
	Process string // its name
	Version int    // 0: the highest version deployed when the run is executed
	Input   any    // a JSON object, encoded with encoding/json; json.RawMessage and []byte are used unchanged; nil: {}

	// Key is the business key; use 1 to 200 characters. At most one open instance of a process and tenant has a given
	// key. A second start with the same process, tenant and key makes no instance until retention removes the first one:
	// it succeeds, with the existing instance as its result, if it has the same input, and the same version or none;
	// otherwise its run fails with the code conflict. Empty: no key.
	Key string
	// Again, with Key, changes this: if the instance that has the key is over, the start makes a new one with the key.
	Again bool

	// ID is the id of the instance. It must be zero if there is a Key. Zero: derived from process, key and tenant, or,
	// without a key, the id of the run. A start with an id that is taken succeeds under the same conditions as one with
	// a key that is taken, if process and tenant are the same, too.
	ID       uuid.UUID
	Priority int    // of all its runs, -100 to 100, higher first
	Tenant   string // of all its runs, at most 200 characters; empty: the tenant of the run that starts it, if it has one
}

// Run returns the run that starts the instance, for callers that enqueue it together with others (run.EnqueueMany),
// through database/sql (run.EnqueueSQL), or with a delay (run.New.Delay).
func (n NewInstance) Run() (run.New, error) {
	input, err := document("input", n.Input)
	p := startPayload{Process: n.Process, Version: n.Version, Input: input, Key: n.Key, Again: n.Again, ID: n.ID, Priority: n.Priority, Tenant: n.Tenant}
	if err = errors.Join(err, p.check()); err != nil {
		return run.New{}, fmt.Errorf("graph: start %q: %w", n.Process, err)
	}
	return run.New{Type: startType, Payload: p}, nil
}

// Start starts an instance. The result of the run is a [Started]. If n has neither a key nor an id, the id of the run
// is also the id of the instance.
func Start(ctx context.Context, db run.DB, n NewInstance) (uuid.UUID, error) {
	r, err := n.Run()
	if err != nil {
		return uuid.Nil, err
	}
	return enqueue(ctx, db, r)
}

// A Message is delivered to one token that waits for its name and key. If several wait, the one that has waited longest
// gets it. If none waits, the message is kept until TTL has passed, and the first token that waits for it gets it. Name
// and Key are required.
type Message struct {
	Name    string
	Key     string        // correlates the message with an instance: equals the key of its await node; at most 200 bytes
	Payload any           // a JSON object, encoded like NewInstance.Input; nil: {}
	ID      string        // an idempotency key chosen by the sender, at most 200 bytes; a repetition changes nothing; empty: the id of the run
	TTL     time.Duration // how long the message is kept while no token waits for it; 0: 24 h
}

// Run returns the run that sends the message, see [NewInstance.Run].
func (m Message) Run() (run.New, error) {
	payload, err := document("payload", m.Payload)
	p := messagePayload{Name: m.Name, Key: m.Key, Payload: payload, ID: m.ID, TTL: Duration(m.TTL)}
	if err = errors.Join(err, p.check()); err != nil {
		return run.New{}, fmt.Errorf("graph: message %q: %w", m.Name, err)
	}
	return run.New{Type: messageType, Payload: p}, nil
}

// Send sends a message. It does not wait for the message to be delivered.
func Send(ctx context.Context, db run.DB, m Message) (uuid.UUID, error) {
	r, err := m.Run()
	if err != nil {
		return uuid.Nil, err
	}
	return enqueue(ctx, db, r)
}

// Signal sends a signal to all tokens that wait for its name when a worker begins to execute the run. The name has 1 to
// 200 bytes. The payload is a JSON object, encoded like NewInstance.Input; nil: {}. The result of the run is a
// [Signalled].
func Signal(ctx context.Context, db run.DB, name string, payload any) (uuid.UUID, error) {
	data, err := document("payload", payload)
	if err = errors.Join(err, named(name)); err != nil {
		return uuid.Nil, fmt.Errorf("graph: signal %q: %w", name, err)
	}
	return enqueue(ctx, db, run.New{Type: signalType, Payload: signalPayload{Name: name, Payload: data}})
}

// A Completion completes a user task. Task and By are required.
type Completion struct {
	Task    uuid.UUID
	By      string // who has done the task
	Output  any    // a JSON object, encoded like NewInstance.Input; nil: {}
	Version int64  // the version of the task that the person saw: if the task has another one, the run fails with the code conflict; 0: any
}

// Complete completes a user task. The run fails with the code conflict if the task is not open, or is assigned to
// another person.
func Complete(ctx context.Context, db run.DB, c Completion) (uuid.UUID, error) {
	output, err := document("output", c.Output)
	p := completeTaskPayload{Task: c.Task, By: c.By, Output: output, Version: c.Version}
	if err = errors.Join(err, p.check()); err != nil {
		return uuid.Nil, fmt.Errorf("graph: complete task %s: %w", c.Task, err)
	}
	return enqueue(ctx, db, run.New{Type: completeTaskType, Payload: p})
}

// A Cancellation cancels an instance. Instance is required.
type Cancellation struct {
	Instance   uuid.UUID
	Reason     string // becomes the instance's failure_reason
	By         string // who asks for it; empty: the database role that enqueues the run
	Compensate bool   // undo completed steps first, then cancel
}

// Cancel cancels an instance. This cannot be undone. Cancelling an instance that is over changes nothing. The run fails
// with the code conflict if the instance is already compensating. Only operators may enqueue the run.
func Cancel(ctx context.Context, db run.DB, c Cancellation) (uuid.UUID, error) {
	if c.Instance == uuid.Nil {
		return uuid.Nil, errNoInstance
	}
	return enqueue(ctx, db, run.New{Type: cancelType, Payload: cancelPayload(c)})
}

// Fail makes an instance compensate its completed steps and end as FAILED. The reason becomes its failure_reason;
// empty: the error of its latest open incident. By is who asks for it; empty: the database role that enqueues the run.
// Failing an instance that is over changes nothing. The run fails with the code conflict if the instance is already
// compensating. Only operators may enqueue the run.
func Fail(ctx context.Context, db run.DB, instance uuid.UUID, reason, by string) (uuid.UUID, error) {
	if instance == uuid.Nil {
		return uuid.Nil, errNoInstance
	}
	return enqueue(ctx, db, run.New{Type: failType, Payload: failPayload{Instance: instance, Reason: reason, By: by}})
}

// Restart starts a new instance that continues a FAILED one from the node where it failed. The new instance has the key
// of the failed one. It does not repeat nodes that are done, but takes over their results. Nodes that were undone, and
// all nodes behind them, are done again. If it is not certain what was done, the run fails with the code conflict. The
// result of the run is a [Started]. By is who asks for it; empty: the database role that enqueues the run. Only
// operators may enqueue the run.
func Restart(ctx context.Context, db run.DB, instance uuid.UUID, by string) (uuid.UUID, error) {
	if instance == uuid.Nil {
		return uuid.Nil, errNoInstance
	}
	return enqueue(ctx, db, run.New{Type: restartType, Payload: restartPayload{Instance: instance, By: by}})
}

// A Retrial names an incident to retry. Incident or Instance is required.
type Retrial struct {
	Incident uuid.UUID
	Instance uuid.UUID // without Incident: retry the oldest open incident of this instance; with Incident: the incident must belong to it
	By       string    // who asks for it; empty: the database role that enqueues the run
	Force    bool      // fire a join that cannot be satisfied with the tokens that have arrived
}

// Retry resolves an incident and tries again what it stopped. The run fails if there is no such open incident. Only
// operators may enqueue the run.
func Retry(ctx context.Context, db run.DB, r Retrial) (uuid.UUID, error) {
	p := retryPayload(r)
	if err := p.check(); err != nil {
		return uuid.Nil, fmt.Errorf("graph: retry: %w", err)
	}
	return enqueue(ctx, db, run.New{Type: retryType, Payload: p})
}

var errNoInstance = errors.New("graph: instance: it is missing; give the id of an instance")

func enqueue(ctx context.Context, db run.DB, n run.New) (uuid.UUID, error) {
	e, err := run.Enqueue(ctx, db, n)
	return e.ID, err
}

// document encodes v, which must be a JSON object. A nil v returns nil. Errors begin with field.
func document(field string, v any) (data json.RawMessage, err error) {
	switch v := v.(type) {
	case nil:
		return nil, nil
	case json.RawMessage:
		data = v
	case []byte:
		data = v
	default:
		if data, err = json.Marshal(v); err != nil {
			return nil, fmt.Errorf("%s: %w", field, err)
		}
	}
	if data = bytes.TrimSpace(data); len(data) == 0 || data[0] != '{' {
		return nil, fmt.Errorf("%s: use a JSON object", field)
	}
	return data, nil
}
