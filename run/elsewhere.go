package run

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"time"

	"github.com/google/uuid"
	"github.com/simple-workflow/simple-workflow/internal/clean"
	"github.com/simple-workflow/simple-workflow/internal/jsondoc"
	"github.com/simple-workflow/simple-workflow/internal/shipped"
)

// ErrElsewhere hands a run on, when a handler returns it. The work goes on in another system, which has the token that the
// handler got from worker.Token, and completes the run with Complete or the SQL function workflow_complete. Until then the run
// stays leased, takes no slot and needs no worker. If nobody completes it within the type's time limit, counted from here, or
// within a day if the type has none, the lease is taken back as after a crash, and the attempt is charged. Effects and events
// of the handler are dropped, as after a failure. ErrElsewhere may be wrapped.
var ErrElsewhere error = &elsewhereError{}

type elsewhereError struct{ within time.Duration }

func (e *elsewhereError) Error() string { return "goes on elsewhere" }

func (e *elsewhereError) Is(target error) bool { return target == ErrElsewhere }

// Elsewhere is ErrElsewhere with a time of its own: the run is taken back after d. A d over a day counts as a day, one below a second as a second.
func Elsewhere(d time.Duration) error {
	return &elsewhereError{min(max(d, time.Second), shipped.MaxElsewhere)}
}

// IsElsewhere reports whether err, or one it wraps, hands a run on, and for how long. 0 means as long as the type's time limit.
func IsElsewhere(err error) (within time.Duration, ok bool) {
	var e *elsewhereError
	if !errors.As(err, &e) {
		return 0, false
	}
	return e.within, true
}

// Complete reports the outcome of a run that was handed on: its result, as a handler would return it (nil is stored as null),
// or an error. The error counts as a handler's does: Permanent, RetryAfter, Again and WithCode apply. token is what
// worker.Token returned.
//
// The outcome is stored at once, and a worker records it within two seconds. Repeating the same call is no error. Reporting
// another outcome is one; so is an unknown run, a wrong token, and a run that was not handed on or has been started again. The
// database's error says which, and what to do.
func Complete(ctx context.Context, db DB, id uuid.UUID, token string, result json.RawMessage, failure error) error {
	var told json.RawMessage
	if failure != nil {
		var err error
		if told, err = tell(failure); err != nil {
			return fmt.Errorf("complete run %s: %w", id, err)
		}
		result = nil
	} else if result != nil {
		if err := jsondoc.CheckResult(result); err != nil {
			return fmt.Errorf("complete run %s: %w", id, err)
		}
	}
	given, err := uuid.Parse(token)
	if err != nil {
		return fmt.Errorf("complete run %s: token is not one: it has %d characters; pass on what the handler got", id, len(token)) // it is a secret
	}
	if _, err := call(ctx, db, `SELECT workflow_complete($1, $2, $3, $4)`, id, given, result, told); err != nil {
		return fmt.Errorf("complete run %s: %w", id, err)
	}
	return nil
}

// tell is an error as workflow_complete takes it.
func tell(err error) (json.RawMessage, error) {
	said := map[string]any{"message": clean.Text(err.Error(), clean.MaxMessage)}
	if code := clean.Code(Code(err)); code != "" {
		said["code"] = code
	}
	if IsPermanent(err) {
		said["permanent"] = true
	}
	if delay, free, delayed := Delay(err); free {
		said["again_after"] = delay.Seconds()
	} else if delayed {
		said["retry_after"] = delay.Seconds()
	}
	return json.Marshal(said)
}
