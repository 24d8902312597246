// Package clock passes the database's clock on to whom a time has to be reported, as a signature does.
package clock

import (
	"context"
	"time"
)

type key struct{}

// With returns a context that carries how far the database's clock is ahead of this machine's.
func With(ctx context.Context, ahead time.Duration) context.Context {
	return context.WithValue(ctx, key{}, ahead)
}

// Now returns the time by the clock that With has put into ctx, which all dispatchers of a database share, and else by this
// machine's.
func Now(ctx context.Context) time.Time {
	ahead, _ := ctx.Value(key{}).(time.Duration)
	return time.Now().Add(ahead)
}
