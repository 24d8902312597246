package session_test

import (
	"context"
	"errors"
	"net"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/simple-workflow/simple-workflow/internal/pgtest"
	"github.com/simple-workflow/simple-workflow/internal/session"
)

// giveUp runs a statement that takes the given time, and cancels it after 100 ms.
func giveUp(t *testing.T, pool *pgxpool.Pool, seconds float64) error {
	t.Helper()
	ctx, done := context.WithTimeout(t.Context(), 100*time.Millisecond)
	defer done()
	_, err := pool.Exec(ctx, `SELECT pg_sleep($1)`, seconds)
	return err
}

// A cancelled statement ends on the server, and its connection is used again.
func TestSpare(t *testing.T) {
	t.Parallel()
	pool, _ := prepared(t, pgtest.URL(t), func(c *pgxpool.Config) { session.Spare(c.ConnConfig) })
	repeat(t, pool, 1)
	for range 5 {
		if err := giveUp(t, pool, 60); sqlState(err) != "57014" {
			t.Fatalf("it ends with %v, want SQLSTATE 57014", err)
		}
		repeat(t, pool, 1)
	}
	if n := pool.Stat().NewConnsCount(); n != 1 {
		t.Errorf("%d connections were opened, want one", n)
	}
}

// If the server does not cancel the statement in time, the connection is closed, as any cancelled connection is without
// Spare.
func TestSpareIsNotForEver(t *testing.T) {
	t.Parallel()
	var cut atomic.Bool
	pool, _ := prepared(t, pgtest.URL(t), func(c *pgxpool.Config) {
		session.Spare(c.ConnConfig)
		c.ConnConfig.DialFunc = unless(&cut)
	})
	repeat(t, pool, 1)
	cut.Store(true)
	start := time.Now()
	if err := giveUp(t, pool, 60); err == nil || time.Since(start) > 30*time.Second {
		t.Errorf("it ends with %v after %s", err, time.Since(start))
	}
	cut.Store(false)
	repeat(t, pool, 1)
	if n := pool.Stat().NewConnsCount(); n != 2 {
		t.Errorf("%d connections were opened, want two", n)
	}
}

// A connection is not used again while a cancellation may still reach it, since that would cancel the next user's
// statement.
func TestLateCancellation(t *testing.T) {
	t.Parallel()
	var cut atomic.Bool
	pool, _ := prepared(t, pgtest.URL(t), func(c *pgxpool.Config) {
		session.Spare(c.ConnConfig)
		c.ConnConfig.DialFunc = unless(&cut)
	})
	repeat(t, pool, 1)
	cut.Store(true)
	_ = giveUp(t, pool, 0.3) // it may also end before it is cancelled
	cut.Store(false)
	repeat(t, pool, 1)
	if n := pool.Stat().NewConnsCount(); n != 2 {
		t.Errorf("%d connections were opened, want two", n)
	}
}

// unless returns a dial function that connects or gets no answer.
func unless(cut *atomic.Bool) func(context.Context, string, string) (net.Conn, error) {
	return func(ctx context.Context, network, address string) (net.Conn, error) {
		if cut.Load() {
			<-ctx.Done()
			return nil, errors.Join(ctx.Err(), errors.New("no answer"))
		}
		return new(net.Dialer).DialContext(ctx, network, address)
	}
}
