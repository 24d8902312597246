package settling

// Codes in the error column, which has the form {"code": …, "message": …}. Handlers may set their
// own with run.WithCode.
const (
	CodeHandler     = "handler_error"         // the handler returned an error
	CodePanic       = "panic"                 // the handler panicked
	CodeTimeLimit   = "time_limit"            // the type's time limit was over
	CodePayload     = "payload_invalid"       // the payload does not decode into the handler's input
	CodeResult      = "result_rejected"       // the result cannot be stored; the handler is not started again
	CodeNoHandler   = "no_handler_registered" // the worker has no handler for the type
	CodeExpired     = "lease_expired"         // the lease expired: the worker did not report back
	CodeRefused     = "refused"               // a URL's status, or a program's exit code, says that no attempt can help, without an error object
	CodeUnavailable = "unavailable"           // what the type needs is out of reach, see run.Unavailable
	CodeTooLate     = "too_late"              // the deadline of its policy was over before it was started
)

type technicalError struct{ err error }

func (e *technicalError) Error() string { return e.err.Error() }
func (e *technicalError) Unwrap() error { return e.err }

// Technical marks err as an error that says nothing about the work itself: the handler did not understand the run, or
// something between worker and handler refused it. The worker marks its own errors as Technical. Technical(nil) is
// nil.
//
// The mark matters for steps of processes, if no edge takes the error. Then a permanent error (run.Permanent) fails
// the instance, but an error that is also Technical opens an incident.
func Technical(err error) error {
	if err == nil {
		return nil
	}
	return &technicalError{err}
}
