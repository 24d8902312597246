package settling

// Codes in the error column: {"code": …, "message": …}. Handlers may add their own with
// run.WithCode.
const (
	CodeHandler     = "handler_error"         // the handler returned an error
	CodePanic       = "panic"                 // the handler panicked
	CodeTimeLimit   = "time_limit"            // the type's time limit passed
	CodePayload     = "payload_invalid"       // the payload does not decode into the handler's input
	CodeResult      = "result_rejected"       // the result cannot be stored; the handler is not started again
	CodeNoHandler   = "no_handler_registered" // nobody here knows the type
	CodeExpired     = "lease_expired"         // the worker did not report back
	CodeRefused     = "refused"               // a URL's status, or a program's exit code, says that no attempt can help, and nothing says why
	CodeUnavailable = "unavailable"           // what the type needs is out of reach, see run.Unavailable
	CodeTooLate     = "too_late"              // the deadline of its policy was over before it was started
)

type technicalError struct{ err error }

func (e *technicalError) Error() string { return e.err.Error() }
func (e *technicalError) Unwrap() error { return e.err }

// Technical marks err as one that says nothing about the work itself: the run was not understood, or something in between has
// refused it. It matters for steps of processes. If no edge takes an error, a permanent one (run.Permanent) fails the instance, and one that is
// Technical as well opens an incident. The worker marks its own errors so. Technical(nil) is nil.
func Technical(err error) error {
	if err == nil {
		return nil
	}
	return &technicalError{err}
}
