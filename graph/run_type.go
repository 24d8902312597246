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

// A runType describes one type of the engine's own runs. Its handler, its locks and its action are declared in one
// place, so that a run changes only instances that about has named, and that are therefore locked.
type runType struct {
	// handler executes a run. It only reads, and its decision takes effect when the run is settled. The exception is the
	// handler of signals, which delivers the signal.
	handler func(*Engine) hook.Handler
	// about adds the tokens and instances that a run concerns. They are locked before the run is settled. Nil: none.
	about func(*subjects, leasing.Settlement) error
	// act decides what a settled run changes. Nil: nothing. It is not called for a run that has a token: see decide.
	act func(context.Context, *writer, leasing.Settlement) error
	// failed: about and act are also called for runs that have failed.
	failed bool
}

// subjects are the tokens and instances that a batch concerns. created are ids that starts name: such an instance is
// locked only if a user inserted it and it is not started yet.
type subjects struct{ tokens, instances, created []uuid.UUID }

// runTypes has an entry for each type of the engine's own runs.
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
	signalType: { // the handler has delivered the signal
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
				return struct{}{}, p.late(e.undecided(ctx, p.Instance))
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
	// Runs of tokens: settling them moves the token, see scene.move.
	arriveType: {handler: func(e *Engine) hook.Handler { return typed(e.arrive) }},
	timerType:  {handler: func(*Engine) hook.Handler { return typed(nothing[position]) }},
	undoType:   {handler: func(*Engine) hook.Handler { return typed(nothing[position]) }},
	// Nobody enqueues this one: see broadcastType.
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

// add adds the tokens and instances that a run concerns which is about to be settled. For an outcome that does not end
// the run (a retry, for example) it adds none.
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

// decide lets the core decide what a settled run changes.
func (w *writer) decide(ctx context.Context, settled leasing.Settlement) error {
	switch t := runTypes[settled.Type]; {
	case settled.Verdict != settling.Succeed && settled.Verdict != settling.Fail:
		return nil // the run is not over: its token stays where it is
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

// start adds the subjects of a start: the calling token and its instance, the row that a user may have inserted with
// this id, and the instance that had the key before.
func (of *subjects) start(settled leasing.Settlement) error {
	p, err := payload[startPayload](settled)
	if err == nil && p.Parent != nil {
		of.tokens, of.instances = append(of.tokens, p.Parent.Token), append(of.instances, p.Parent.Instance)
	}
	if settled.Verdict == settling.Fail {
		return nil // ignore err: the run may have failed because its payload is malformed
	}
	if p.ID != uuid.Nil {
		of.created = append(of.created, p.ID)
	}
	if p.Again {
		r, problem := result[Started](settled)
		err = errors.Join(err, problem)
		if r.After != uuid.Nil { // locked, so that retention does not remove it now
			of.instances = append(of.instances, r.After)
		}
	}
	return err
}

// start notes a run that starts an instance. If the run has failed, the token that waits for the instance fails: see
// notStarted.
func (w *writer) start(settled leasing.Settlement) {
	if settled.Verdict == settling.Fail {
		w.scene.notStarted(settled)
	} else {
		w.starts = append(w.starts, settled)
	}
}

// payload decodes the payload of a run.
func payload[T any](settled leasing.Settlement) (p T, err error) {
	err = json.Unmarshal(settled.Payload, &p)
	return p, err
}

// result decodes the result of a run.
func result[T any](settled leasing.Settlement) (r T, err error) {
	err = json.Unmarshal(settled.Result, &r)
	return r, err
}
