// Package unsent has the errors of events that a sink could not send at all.
package unsent

import (
	"context"

	"github.com/simple-workflow/simple-workflow/dispatcher"
)

// Errors returns the errors for n events, none of which was sent because of err. Each is dispatcher.ErrNotTried if ctx
// has ended, else dispatcher.Unavailable.
func Errors(ctx context.Context, n int, err error) []error {
	if ctx.Err() != nil {
		return all(n, dispatcher.ErrNotTried)
	}
	return all(n, dispatcher.Unavailable(err, 0))
}

func all(n int, err error) []error {
	errs := make([]error, n)
	for k := range errs {
		errs[k] = err
	}
	return errs
}
