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

// ErrElsewhere hands the run on to another system when a handler returns it. The handler passes that system the token
// that worker.Token returns. The system completes the run with Complete or the SQL function workflow_complete. Until
// then the run stays leased, takes no slot and needs no worker. Effects and events of the handler are dropped, as
// after a failure.
//
// If the run is not completed within the type's time limit, the lease is taken back as after a crash, and the attempt
// is charged. The time counts from the return of the handler, and is a day if the type has no limit. ErrElsewhere may
// be wrapped.
var ErrElsewhere error = &elsewhereError{}

type elsewhereError struct{ within time.Duration }

func (e *elsewhereError) Error() string { return "goes on elsewhere" }

func (e *elsewhereError) Is(target error) bool { return target == ErrElsewhere }

// Elsewhere returns an ErrElsewhere with a time limit of its own: the run is taken back after d. d is clamped to
// between a second and a day.
func Elsewhere(d time.Duration) error {
	return &elsewhereError{min(max(d, time.Second), shipped.MaxElsewhere)}
}

// IsElsewhere reports whether err, or an error that it wraps, hands a run on, and for how long. 0 means for the type's
// time limit.
func IsElsewhere(err error) (within time.Duration, ok bool) {
	var e *elsewhereError
	if !errors.As(err, &e) {
		return 0, false
	}
	return e.within, true
}

// Complete reports the outcome of a run that was handed on: a result as a handler would return it (nil is stored as
// null), or, if failure is not nil, an error. The error means what it means when a handler returns it: Permanent,
// RetryAfter, Again and WithCode apply. token is what worker.Token returned.
//
// The outcome is stored at once, and a worker records it within two seconds. Repeating the same call is not an error.
// Reporting another outcome is an error. So is an unknown run, a wrong token, and a run that was not handed on or has
// been started again. The error says which it is, and what to do.
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

// tell encodes an error as workflow_complete takes it.
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
