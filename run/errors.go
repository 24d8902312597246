package run

import (
	"errors"
	"fmt"
	"time"
)

// Causes with which a handler's context ends; read them with context.Cause.
var (
	// ErrLost: the lease is gone, another worker may have the run. What the handler returns
	// is dropped.
	ErrLost = errors.New("run: lease lost")
	// ErrCancelled: the run was cancelled. What the handler returns is dropped.
	ErrCancelled = errors.New("run: cancelled")
	// ErrDeadline: the type's time limit has passed. The attempt counts as a failure.
	ErrDeadline = errors.New("run: time limit exceeded")
	// ErrShutdown: the worker stops. Returning an error now hands the run back, no attempt
	// charged; returning a result still records it.
	ErrShutdown = errors.New("run: worker is shutting down")
)

type permanentError struct{ err error }

func (e *permanentError) Error() string { return e.err.Error() }
func (e *permanentError) Unwrap() error { return e.err }

// Permanent marks err as one that no further attempt can cure: the run fails at once,
// whatever attempts are left. Permanent(nil) is nil. It may be wrapped further.
func Permanent(err error) error {
	if err == nil {
		return nil
	}
	return &permanentError{err}
}

// IsPermanent reports whether err, or one it wraps, was marked by Permanent.
func IsPermanent(err error) bool {
	var p *permanentError
	return errors.As(err, &p)
}

type unavailableError struct{ err error }

func (e *unavailableError) Error() string { return e.err.Error() }
func (e *unavailableError) Unwrap() error { return e.err }

// Unavailable marks err as one that says nothing about the run: what its type needs is out of reach, and other runs of the type
// would meet the same. After five of these in a row, of three different runs, the breaker of the type opens. Then one run at a
// time is started, as a probe, and an attempt that meets the outage is given back, until one succeeds. While the breaker is
// closed, the error is a failure like any other.
//
// Nothing else counts as an outage, not even a refused connection: only the handler knows whose connection it was. An error
// that is Permanent as well, or that comes after the time limit, does not count. Unavailable(nil) is nil.
func Unavailable(err error) error {
	if err == nil {
		return nil
	}
	return &unavailableError{err}
}

// IsUnavailable reports whether err, or one it wraps, was marked by Unavailable.
func IsUnavailable(err error) bool {
	var u *unavailableError
	return errors.As(err, &u)
}

type delayError struct {
	err   error
	delay time.Duration
	free  bool
}

func (e *delayError) Error() string {
	if e.err == nil {
		return fmt.Sprintf("try again in %s", e.delay)
	}
	return e.err.Error()
}
func (e *delayError) Unwrap() error { return e.err }

// Again asks, when a handler returns it, for the run to be started again after d. It spends no attempt: it is not a failure,
// there is just nothing to do yet. A negative d counts as 0, a d of more than a year as a year. After
// worker.Config.MaxPostponed such answers, the run is charged as for a failure.
func Again(d time.Duration) error {
	return &delayError{delay: d, free: true}
}

// RetryAfter is a failure that spends an attempt, with its own delay instead of the one of
// the type's retry policy, as a Retry-After header asks for. d is clamped as in Again.
// RetryAfter(nil, d) is nil.
func RetryAfter(err error, d time.Duration) error {
	if err == nil {
		return nil
	}
	return &delayError{err: err, delay: d}
}

// Delay returns the delay that err asks for, if it came from Again (free: no attempt is
// spent) or RetryAfter. It is clamped to between 0 and a year.
func Delay(err error) (d time.Duration, free, ok bool) {
	var e *delayError
	if !errors.As(err, &e) {
		return 0, false, false
	}
	return min(max(e.delay, 0), 365*24*time.Hour), e.free, true
}

// A PanicError is a panic of a handler, turned into an ordinary failure.
type PanicError struct {
	Value any    // what was passed to panic
	Stack []byte // as debug.Stack gives it; stored in the run's error column, not logged
}

func (e *PanicError) Error() string { return fmt.Sprintf("panic: %v", e.Value) }

type codedError struct {
	code string
	err  error
}

func (e *codedError) Error() string { return e.err.Error() }
func (e *codedError) Unwrap() error { return e.err }

// WithCode gives err a code of its own in the run's error column, for queries and alerts.
// WithCode(code, nil) is nil.
func WithCode(code string, err error) error {
	if err == nil {
		return nil
	}
	return &codedError{code, err}
}

// Code returns the code that WithCode gave err or one it wraps, and "" without one.
func Code(err error) string {
	var c *codedError
	if errors.As(err, &c) {
		return c.code
	}
	return ""
}
