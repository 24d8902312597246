// Package unsent has the errors of events that a sink could not send at all.
package unsent

import (
	"context"
	"slices"

	"github.com/simple-workflow/simple-workflow/dispatcher"
)

// Errors returns the errors for n events, none of which was sent because of err. Each is dispatcher.ErrNotTried if ctx
// has ended, else dispatcher.Unavailable.
func Errors(ctx context.Context, n int, err error) []error {
	if ctx.Err() != nil {
		return slices.Repeat([]error{dispatcher.ErrNotTried}, n)
	}
	return slices.Repeat([]error{dispatcher.Unavailable(err, 0)}, n)
}
