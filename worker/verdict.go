package worker

import (
	"encoding/json"
	"errors"
	"fmt"

	"github.com/simple-workflow/simple-workflow/run"
)

// judge turns what a handler returned into an outcome. cause is why its context ended, nil
// if it did not.
func (w *Worker) judge(j *job, result json.RawMessage, err, cause error) run.Outcome {
	if err == nil {
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
	case errors.Is(cause, run.ErrShutdown):
		return run.Outcome{ID: j.ID, Token: j.Token, Verdict: run.Release}
	case free:
		err = fmt.Errorf("put off %d times, which is the most that is allowed", j.Postponed)
	case errors.Is(cause, run.ErrDeadline):
		err = run.WithCode(run.CodeTimeLimit, fmt.Errorf("%w of %s: %w", run.ErrDeadline, j.Timeout, err))
	}
	if j.Attempt >= j.attempts() {
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

// attempts is the run's max_attempts, lowered by the type's.
func (j *job) attempts() int {
	if j.entry != nil && j.entry.options.MaxAttempts > 0 {
		return min(j.MaxAttempts, j.entry.options.MaxAttempts)
	}
	return j.MaxAttempts
}

func (w *Worker) backoff(j *job) run.Backoff {
	if j.entry != nil && j.entry.options.Backoff != (run.Backoff{}) {
		return j.entry.options.Backoff
	}
	return w.config.Backoff
}
