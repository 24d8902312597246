// Package clock passes the database's clock to code that reports a time to others, such as the signature of a webhook.
package clock

import (
	"context"
	"time"
)

type key struct{}

// With returns a context that carries how far the database's clock is ahead of this machine's. ahead may be negative.
func With(ctx context.Context, ahead time.Duration) context.Context {
	return context.WithValue(ctx, key{}, ahead)
}

// Now returns the time by the database's clock, if With has put it into ctx, or otherwise by this machine's. All
// dispatchers of a database share the database's clock.
func Now(ctx context.Context) time.Time {
	ahead, _ := ctx.Value(key{}).(time.Duration)
	return time.Now().Add(ahead)
}
