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

// The functions below ask something of instances. Each enqueues a run of one of the engine's own types and returns its id; in a transaction,
// the run becomes visible when that commits, with everything else in it. A worker with an [Engine] executes it, and run.Read tells what became of
// it: a request that cannot be met fails, and says why. What is wrong with a request by itself is an error here, before anything is stored.
//
// By SQL the same is an INSERT into workflow_run: see docs/processes.md.

// NewInstance is an instance to be started. Process is required.
type NewInstance struct {
	Process string // its name
	Version int    // 0: the highest that is deployed when the run is executed
	Input   any    // a JSON object, encoded with encoding/json; json.RawMessage and []byte are taken as they are; nil: {}

	// Key is the business key, of 1 to 200 characters. At most one instance of a process and tenant has it, until retention removes that one:
	// another start with the same key succeeds, and its result is the instance that there is, if it asks for the same; otherwise it fails, with the
	// code conflict. Empty: none.
	Key   string
	Again bool // with Key: once the instance that has it is over, another one gets it

	ID       uuid.UUID // of the instance, and not together with Key; zero: made of process, key and tenant, or without a key the run's own
	Priority int       // of all its steps, -100 to 100, higher first
	Tenant   string    // of all that it does, at most 200 characters; empty: nobody's in particular
}

// Run returns the run that starts the instance: to be enqueued together with others (run.EnqueueMany), with database/sql (run.EnqueueSQL), or later
// (run.New.Delay).
func (n NewInstance) Run() (run.New, error) {
	input, err := document("input", n.Input)
	p := startPayload{Process: n.Process, Version: n.Version, Input: input, Key: n.Key, Again: n.Again, ID: n.ID, Priority: n.Priority, Tenant: n.Tenant}
	if err = errors.Join(err, p.check()); err != nil {
		return run.New{}, fmt.Errorf("graph: start %q: %w", n.Process, err)
	}
	return run.New{Type: startType, Payload: p}, nil
}

// Start starts an instance. The result of its run is a [Started]; without a key and an id, the instance has the id of the run.
func Start(ctx context.Context, db run.DB, n NewInstance) (uuid.UUID, error) {
	r, err := n.Run()
	if err != nil {
		return uuid.Nil, err
	}
	return enqueue(ctx, db, r)
}

// A Message is for the one token that waits for its name and key: the one that has waited longest, or the first that comes before the message's time is over.
// Name and Key are required.
type Message struct {
	Name    string
	Key     string        // says which instance is meant, as its await node does; at most 200 bytes
	Payload any           // a JSON object, encoded like NewInstance.Input; nil: {}
	ID      string        // the sender's, at most 200 bytes: the same again changes nothing; empty: the run's
	TTL     time.Duration // for how long it is kept if nobody waits for it; 0: a day
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

// Send sends a message.
func Send(ctx context.Context, db run.DB, m Message) (uuid.UUID, error) {
	r, err := m.Run()
	if err != nil {
		return uuid.Nil, err
	}
	return enqueue(ctx, db, r)
}

// Signal sends a signal to all tokens that wait for its name when it is taken up. The payload is a JSON object, encoded like NewInstance.Input; nil: {}.
// The result of the run is a [Signalled].
func Signal(ctx context.Context, db run.DB, name string, payload any) (uuid.UUID, error) {
	data, err := document("payload", payload)
	if err = errors.Join(err, named(name)); err != nil {
		return uuid.Nil, fmt.Errorf("graph: signal %q: %w", name, err)
	}
	return enqueue(ctx, db, run.New{Type: signalType, Payload: signalPayload{Name: name, Payload: data}})
}

// A Completion completes a task of a person. Task and By are required.
type Completion struct {
	Task    uuid.UUID
	By      string // who has done it
	Output  any    // a JSON object, encoded like NewInstance.Input; nil: {}
	Version int64  // of the task as it was seen: if it is another one, the run fails with the code conflict; 0: any
}

// Complete completes a task of a person.
func Complete(ctx context.Context, db run.DB, c Completion) (uuid.UUID, error) {
	output, err := document("output", c.Output)
	p := completeTaskPayload{Task: c.Task, By: c.By, Output: output, Version: c.Version}
	if err = errors.Join(err, p.check()); err != nil {
		return uuid.Nil, fmt.Errorf("graph: complete task %s: %w", c.Task, err)
	}
	return enqueue(ctx, db, run.New{Type: completeTaskType, Payload: p})
}

// A Cancellation cancels an instance for good. Instance is required.
type Cancellation struct {
	Instance   uuid.UUID
	Reason     string // becomes the instance's failure_reason
	By         string // who asks for it; empty: the role that has enqueued the run
	Compensate bool   // what was done is undone before
}

// Cancel cancels an instance. It is for operators.
func Cancel(ctx context.Context, db run.DB, c Cancellation) (uuid.UUID, error) {
	if c.Instance == uuid.Nil {
		return uuid.Nil, errNoInstance
	}
	return enqueue(ctx, db, run.New{Type: cancelType, Payload: cancelPayload(c)})
}

// Fail fails an instance for good: it undoes what it has done, and is FAILED. The reason becomes its failure_reason; empty: the error of its latest
// open incident. By is who asks for it; empty: the role that has enqueued the run. It is for operators.
func Fail(ctx context.Context, db run.DB, instance uuid.UUID, reason, by string) (uuid.UUID, error) {
	if instance == uuid.Nil {
		return uuid.Nil, errNoInstance
	}
	return enqueue(ctx, db, run.New{Type: failType, Payload: failPayload{Instance: instance, Reason: reason, By: by}})
}

// Restart starts a FAILED instance again from where it failed, as another instance, which has its key, too. That takes what is done for done, with what it
// has returned; what was undone, and all that lies behind, is done anew. What cannot be taken over for certain is refused, with the code conflict.
// The result of the run is a [Started]. By is who asks for it; empty: the role that has enqueued the run. It is for operators.
func Restart(ctx context.Context, db run.DB, instance uuid.UUID, by string) (uuid.UUID, error) {
	if instance == uuid.Nil {
		return uuid.Nil, errNoInstance
	}
	return enqueue(ctx, db, run.New{Type: restartType, Payload: restartPayload{Instance: instance, By: by}})
}

// A Retrial has what an incident stopped tried again. Incident or Instance is required.
type Retrial struct {
	Incident uuid.UUID
	Instance uuid.UUID // without an incident: the oldest open one of this instance; with one, it must be the instance's
	By       string    // who asks for it; empty: the role that has enqueued the run
	Force    bool      // a join that cannot be satisfied goes on with the tokens that have come
}

// Retry has what an incident stopped tried again. It is for operators.
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

// document encodes what is to be a JSON object; nil stays nil.
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
