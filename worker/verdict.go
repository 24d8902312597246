package worker

import (
	"encoding/json"
	"errors"
	"fmt"
	"runtime/debug"

	"github.com/simple-workflow/simple-workflow/run"
)

// judge turns what a handler returned into an outcome. cause is why its context ended, nil
// if it did not. An error that cannot be asked (a nil pointer, often) counts as a panic.
func (w *Worker) judge(j *job, result json.RawMessage, err, cause error) (o run.Outcome) {
	defer func() {
		if p := recover(); p != nil {
			o = w.decide(j, nil, &run.PanicError{Value: p, Stack: debug.Stack()}, cause)
		}
	}()
	return w.decide(j, result, err, cause)
}

func (w *Worker) decide(j *job, result json.RawMessage, err, cause error) run.Outcome {
	if err == nil && result != nil {
		if err = run.CheckResult(result); err != nil {
			err = rejected(err)
		}
	}
	delay, free, delayed := run.Delay(err)
	switch {
	case err == nil:
		return run.Outcome{ID: j.ID, Token: j.Token, Verdict: run.Succeed, Result: result}
	case run.IsPermanent(err):
		return w.failed(j, err)
	case free && j.Postponed < w.config.MaxPostponed:
		return run.Outcome{ID: j.ID, Token: j.Token, Verdict: run.Postpone, Delay: delay}
	case errors.Is(cause, run.ErrShutdown) && !isPanic(err):
		return run.Outcome{ID: j.ID, Token: j.Token, Verdict: run.Release}
	case free:
		err = fmt.Errorf("put off %d times, which is the most that is allowed", j.Postponed)
	case errors.Is(cause, run.ErrDeadline):
		err = run.WithCode(run.CodeTimeLimit, fmt.Errorf("%w of %s: %w", run.ErrDeadline, j.limit(), err))
	}
	if j.Attempt >= j.MaxAttempts {
		return w.failed(j, err)
	}
	if !delayed || free {
		delay = w.backoff(j).Delay(j.Attempt - 1)
	}
	return run.Outcome{ID: j.ID, Token: j.Token, Verdict: run.TryAgain, Failure: run.NewFailure(err, j.Info), Delay: delay}
}

func (w *Worker) failed(j *job, err error) run.Outcome {
	return run.Outcome{ID: j.ID, Token: j.Token, Verdict: run.Fail, Failure: run.NewFailure(err, j.Info)}
}

func (w *Worker) backoff(j *job) run.Backoff {
	if j.entry != nil && j.entry.options.Backoff != (run.Backoff{}) {
		return j.entry.options.Backoff
	}
	return w.config.Backoff
}

func isPanic(err error) bool {
	var p *run.PanicError
	return errors.As(err, &p)
}
