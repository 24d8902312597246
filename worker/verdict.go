package worker

import (
	"cmp"
	"encoding/json"
	"errors"
	"fmt"
	"runtime/debug"

	"github.com/simple-workflow/simple-workflow/internal/jsondoc"
	"github.com/simple-workflow/simple-workflow/internal/settling"
	"github.com/simple-workflow/simple-workflow/internal/shipped"
	"github.com/simple-workflow/simple-workflow/run"
)

// judge turns what a handler returned into an outcome. cause is why its context ended, nil
// if it did not. An error that cannot be asked (a nil pointer, often) counts as a panic.
func (w *Worker) judge(j *job, result json.RawMessage, err, cause error) (o settling.Outcome) {
	defer func() {
		if p := recover(); p != nil {
			o = w.decide(j, nil, &run.PanicError{Value: p, Stack: debug.Stack()}, cause)
		}
	}()
	return w.decide(j, result, err, cause)
}

func (w *Worker) decide(j *job, result json.RawMessage, err, cause error) settling.Outcome {
	if err == nil && result != nil {
		if err = jsondoc.CheckResult(result); err != nil {
			err = rejected(err)
		}
	}
	delay, free, delayed := run.Delay(err)
	within, elsewhere := run.IsElsewhere(err)
	switch {
	case err == nil:
		return settling.Outcome{ID: j.ID, Token: j.Token, Verdict: settling.Succeed, Result: result}
	case elsewhere: // whatever ended the context: it is under way there
		return settling.Outcome{ID: j.ID, Token: j.Token, Verdict: settling.HandOn, Delay: cmp.Or(within, min(j.limit(), shipped.MaxElsewhere), shipped.MaxElsewhere)}
	case run.IsPermanent(err):
		return w.failed(j, err)
	case free && j.Postponed < w.config.MaxPostponed:
		if left, lasting := w.left(j); !lasting {
			delay = min(delay, left) // then it fails
		}
		return settling.Outcome{ID: j.ID, Token: j.Token, Verdict: settling.Postpone, Delay: delay}
	case errors.Is(cause, run.ErrShutdown) && !isPanic(err):
		return settling.Outcome{ID: j.ID, Token: j.Token, Verdict: settling.Release}
	case free:
		err = fmt.Errorf("put off %d times, which is the most that is allowed", j.Postponed)
	case errors.Is(cause, run.ErrDeadline):
		err = run.WithCode(settling.CodeTimeLimit, fmt.Errorf("%w of %s: %w", run.ErrDeadline, j.limit(), err))
	}
	if w.meetsOutage(j, err, cause) {
		w.outages.met(j.Type, j.ID, cmp.Or(run.Code(err), settling.CodeUnavailable))
		if w.spared(j) {
			return w.givenBack(j, err, delay, delayed)
		}
	}
	most, written := w.most(j)
	if j.Attempt >= most {
		o := w.failed(j, err)
		o.Most = written
		return o
	}
	if !delayed || free {
		delay = w.backoff(j).Delay(j.Attempt - 1)
	}
	if left, lasting := w.left(j); !lasting && delay >= left {
		return w.failed(j, fmt.Errorf("%w; it would be due again after the policy's deadline, %s after it was enqueued", err, w.policy(j.Type).Deadline))
	}
	return settling.Outcome{ID: j.ID, Token: j.Token, Verdict: settling.TryAgain, Failure: settling.NewFailure(err, j.Info), Delay: delay, Most: written}
}

func (w *Worker) failed(j *job, err error) settling.Outcome {
	return settling.Outcome{ID: j.ID, Token: j.Token, Verdict: settling.Fail, Failure: settling.NewFailure(err, j.Info)}
}

func isPanic(err error) bool {
	var p *run.PanicError
	return errors.As(err, &p)
}
