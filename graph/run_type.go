package graph

import (
	"context"
	"encoding/json"
	"errors"

	"github.com/google/uuid"

	"github.com/simple-workflow/simple-workflow/internal/hook"
	"github.com/simple-workflow/simple-workflow/internal/leasing"
	"github.com/simple-workflow/simple-workflow/internal/settling"
)

// A runType is a type of the engine's own runs. All that the engine knows of one stands in one place, so that no instance is
// moved by a run that does not name it here, and is not locked for that.
type runType struct {
	// handler answers a run. It only looks: what it decides takes effect when the run is settled.
	handler func(*Engine) hook.Handler
	// about adds what a run that is to be settled is about: it is locked before. Nil: nothing.
	about func(*subjects, leasing.Settlement) error
	// act decides what a run means that is settled. Nil: nothing, or its step is moved, whatever its type.
	act func(context.Context, *writer, leasing.Settlement) error
	// failed says that about and act are asked about runs that have failed, too.
	failed bool
}

// subjects are what a batch is about: tokens and instances, and instances that it starts if they were inserted.
type subjects struct{ tokens, instances, created []uuid.UUID }

var runTypes = map[string]runType{
	startType: {
		handler: func(e *Engine) hook.Handler { return typed(e.start) },
		about:   (*subjects).start,
		act:     func(_ context.Context, w *writer, settled leasing.Settlement) error { w.start(settled); return nil },
		failed:  true,
	},
	restartType: {
		handler: func(e *Engine) hook.Handler { return typed(e.restart) },
		about: func(of *subjects, settled leasing.Settlement) error {
			p, err := payload[restartPayload](settled)
			of.instances = append(of.instances, p.Instance)
			return err
		},
		act: func(_ context.Context, w *writer, settled leasing.Settlement) error {
			w.again = append(w.again, settled)
			return nil
		},
	},
	messageType: {
		handler: func(*Engine) hook.Handler { return typed(checked[messagePayload]) },
		act:     func(_ context.Context, w *writer, settled leasing.Settlement) error { return w.message(settled) },
	},
	signalType: { // it has gone out already, from its handler
		handler: func(e *Engine) hook.Handler { return typed(e.signal) },
		act:     func(_ context.Context, w *writer, settled leasing.Settlement) error { return w.sent(settled) },
	},
	completeTaskType: {
		handler: func(e *Engine) hook.Handler { return typed(e.completeTask) },
		about: func(of *subjects, settled leasing.Settlement) error {
			r, err := result[taskRef](settled)
			of.tokens, of.instances = append(of.tokens, r.Token), append(of.instances, r.Instance)
			return err
		},
		act: func(ctx context.Context, w *writer, settled leasing.Settlement) error {
			return w.scene.completeTask(ctx, w.tx, settled)
		},
	},
	cancelType: {
		handler: func(e *Engine) hook.Handler {
			return typed(func(ctx context.Context, p cancelPayload) (struct{}, error) {
				return struct{}{}, e.undecided(ctx, p.Instance)
			})
		},
		about: func(of *subjects, settled leasing.Settlement) error {
			p, err := payload[cancelPayload](settled)
			of.instances = append(of.instances, p.Instance)
			return err
		},
		act: func(_ context.Context, w *writer, settled leasing.Settlement) error { return w.scene.cancel(settled) },
	},
	failType: {
		handler: func(e *Engine) hook.Handler {
			return typed(func(ctx context.Context, p failPayload) (struct{}, error) {
				return struct{}{}, e.undecided(ctx, p.Instance)
			})
		},
		about: func(of *subjects, settled leasing.Settlement) error {
			p, err := payload[failPayload](settled)
			of.instances = append(of.instances, p.Instance)
			return err
		},
		act: func(ctx context.Context, w *writer, settled leasing.Settlement) error {
			return w.scene.fail(ctx, w.tx, settled)
		},
	},
	retryType: {
		handler: func(e *Engine) hook.Handler { return typed(e.retry) },
		about: func(of *subjects, settled leasing.Settlement) error {
			r, err := result[retried](settled)
			of.instances = append(of.instances, r.Instance)
			if r.Token != uuid.Nil {
				of.tokens = append(of.tokens, r.Token)
			}
			return err
		},
		act: func(ctx context.Context, w *writer, settled leasing.Settlement) error { return w.retry(ctx, settled) },
	},
	cutOffType: {
		handler: func(e *Engine) hook.Handler { return typed(e.cutOff) },
		about: func(of *subjects, settled leasing.Settlement) error {
			c, err := payload[cutOff](settled)
			of.tokens = append(of.tokens, c.Token)
			return err
		},
		act: func(_ context.Context, w *writer, settled leasing.Settlement) error { return w.scene.cutOff(settled) },
	},
	matchType: {
		handler: func(*Engine) hook.Handler { return typed(nothing[slot]) },
		act:     func(_ context.Context, w *writer, settled leasing.Settlement) error { return w.match(settled) },
	},
	// Runs of tokens: what they do is what their token's node does.
	arriveType: {handler: func(e *Engine) hook.Handler { return typed(e.arrive) }},
	timerType:  {handler: func(*Engine) hook.Handler { return typed(nothing[position]) }},
	undoType:   {handler: func(*Engine) hook.Handler { return typed(nothing[position]) }},
	// Nobody enqueues this one.
	broadcastType: {handler: func(*Engine) hook.Handler { return typed(nothing[struct{}]) }},
}

// handlers returns the handlers of the engine's own run types.
func (e *Engine) handlers() map[string]hook.Handler {
	all := map[string]hook.Handler{}
	for name, t := range runTypes {
		all[name] = t.handler(e)
	}
	return all
}

// add adds what a run that is to be settled is about.
func (of *subjects) add(settled leasing.Settlement) error {
	switch t := runTypes[settled.Type]; {
	case settled.Verdict != settling.Succeed && settled.Verdict != settling.Fail:
		return nil
	case settled.Step != uuid.Nil:
		of.tokens = append(of.tokens, settled.Step)
		return nil
	case t.about == nil || settled.Verdict == settling.Fail && !t.failed:
		return nil
	default:
		return t.about(of, settled)
	}
}

// decide decides what a run means that is settled.
func (w *writer) decide(ctx context.Context, settled leasing.Settlement) error {
	switch t := runTypes[settled.Type]; {
	case settled.Verdict != settling.Succeed && settled.Verdict != settling.Fail:
		return nil // it will be tried again: its token stays where it is
	case settled.Step != uuid.Nil:
		if err := w.scene.move(w, settled); err != nil || settled.Verdict != settling.Succeed {
			return err
		}
		return w.sent(settled)
	case t.act == nil || settled.Verdict == settling.Fail && !t.failed:
		return nil
	default:
		return t.act(ctx, w, settled)
	}
}

// start adds whom a start is about: who calls the instance, the row that it may have, and the one that had its key.
func (of *subjects) start(settled leasing.Settlement) error {
	p, err := payload[startPayload](settled)
	if err == nil && p.Parent != nil {
		of.tokens, of.instances = append(of.tokens, p.Parent.Token), append(of.instances, p.Parent.Instance)
	}
	if settled.Verdict == settling.Fail {
		return nil // it may have failed for its payload
	}
	if p.ID != uuid.Nil {
		of.created = append(of.created, p.ID)
	}
	if p.Again {
		r, problem := result[Started](settled)
		err = errors.Join(err, problem)
		if r.After != uuid.Nil { // retention does not remove it now
			of.instances = append(of.instances, r.After)
		}
	}
	return err
}

// start has an instance be started, or its caller told that it will not be.
func (w *writer) start(settled leasing.Settlement) {
	if settled.Verdict == settling.Fail {
		w.scene.notStarted(settled)
	} else {
		w.starts = append(w.starts, settled)
	}
}

func payload[T any](settled leasing.Settlement) (p T, err error) {
	err = json.Unmarshal(settled.Payload, &p)
	return p, err
}

func result[T any](settled leasing.Settlement) (r T, err error) {
	err = json.Unmarshal(settled.Result, &r)
	return r, err
}
