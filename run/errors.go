package run

import (
	"errors"
	"fmt"
	"time"
)

// Causes with which a handler's context ends; read them with context.Cause.
var (
	// ErrLost means that the lease is lost, and that another worker may have the run. What the
	// handler returns is dropped.
	ErrLost = errors.New("run: lease lost")
	// ErrCancelled means that the run was cancelled. What the handler returns is dropped.
	ErrCancelled = errors.New("run: cancelled")
	// ErrDeadline means that the type's time limit is over. The attempt counts as a failure.
	ErrDeadline = errors.New("run: time limit exceeded")
	// ErrShutdown means that the worker stops. If the handler returns an error, the run is
	// released, and no attempt is charged. If it returns a result, that is recorded.
	ErrShutdown = errors.New("run: worker is shutting down")
)

type permanentError struct{ err error }

func (e *permanentError) Error() string { return e.err.Error() }
func (e *permanentError) Unwrap() error { return e.err }

// Permanent marks err as an error that no further attempt can cure: the run fails at once, even
// if attempts are left. Permanent(nil) is nil. The returned error may be wrapped.
func Permanent(err error) error {
	if err == nil {
		return nil
	}
	return &permanentError{err}
}

// IsPermanent reports whether err, or an error that it wraps, was marked by Permanent.
func IsPermanent(err error) bool {
	var p *permanentError
	return errors.As(err, &p)
}

type unavailableError struct{ err error }

func (e *unavailableError) Error() string { return e.err.Error() }
func (e *unavailableError) Unwrap() error { return e.err }

// Unavailable marks err as an outage: something that all runs of the type need is out of reach, so the error says
// nothing about this run. After five outages in a row, of three different runs, the circuit breaker of the type opens.
// Then one run at a time is started, as a probe, and an attempt that meets the outage is given back. The first success
// closes the breaker. While the breaker is closed, the error is a failure like any other.
//
// No other error counts as an outage, not even a refused connection, because only the handler knows what the
// connection is for. An error that is Permanent too, or that comes after the time limit, does not count either.
// Unavailable(nil) is nil.
func Unavailable(err error) error {
	if err == nil {
		return nil
	}
	return &unavailableError{err}
}

// IsUnavailable reports whether err, or an error that it wraps, was marked by Unavailable.
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

// Again returns an error with which a handler postpones its run (a snooze): the run is started again after d, and no
// attempt is charged. It means that there is nothing to do yet, and is not a failure. d is clamped to between 0 and a
// year. After worker.Config.MaxPostponed such answers, each further one counts as a failure.
func Again(d time.Duration) error {
	return &delayError{delay: d, free: true}
}

// RetryAfter marks err as a failure that is retried after d instead of after the backoff of the
// type's policy, as a Retry-After header asks for. The attempt is charged. d is clamped as in
// Again. RetryAfter(nil, d) is nil.
func RetryAfter(err error, d time.Duration) error {
	if err == nil {
		return nil
	}
	return &delayError{err: err, delay: d}
}

// Delay returns the delay that err asks for, if it or an error that it wraps came from Again or
// RetryAfter, clamped to between 0 and a year. free reports that it came from Again, which charges
// no attempt. ok reports whether err asks for a delay.
func Delay(err error) (d time.Duration, free, ok bool) {
	var e *delayError
	if !errors.As(err, &e) {
		return 0, false, false
	}
	return min(max(e.delay, 0), 365*24*time.Hour), e.free, true
}

// A PanicError is a panic of a handler, which counts as an ordinary failure.
type PanicError struct {
	Value any    // what was passed to panic
	Stack []byte // from debug.Stack; stored in the run's error column, not logged
}

func (e *PanicError) Error() string { return fmt.Sprintf("panic: %v", e.Value) }

type codedError struct {
	code string
	err  error
}

func (e *codedError) Error() string { return e.err.Error() }
func (e *codedError) Unwrap() error { return e.err }

// WithCode sets the code that err has in the run's error column, for queries and alerts.
// WithCode(code, nil) is nil.
func WithCode(code string, err error) error {
	if err == nil {
		return nil
	}
	return &codedError{code, err}
}

// Code returns the code that WithCode set for err or an error that it wraps, or "" if there is none.
func Code(err error) string {
	var c *codedError
	if errors.As(err, &c) {
		return c.code
	}
	return ""
}
