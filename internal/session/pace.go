package session

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"net"
	"sync"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/multitracer"
	"github.com/jackc/pgx/v5/pgconn"
)

const (
	firstPause = 50 * time.Millisecond
	// awayPause is the longest pause while no server answers, or one that takes no changes: when it is
	// back, leases are taken back two seconds later, and their owners have to be there before.
	awayPause = time.Second
	// refusedPause is the longest pause where a server is there and lets nobody in: somebody has to act.
	refusedPause = 5 * time.Second
	// forgetAfter is how long nothing must have failed for the pauses to begin anew.
	forgetAfter = 2 * refusedPause
)

// Pace has attempts at connecting be made ever less often while they fail: after 50 ms at first, then
// after pauses that double, with jitter, up to 1 s while no server answers and up to 5 s where one refuses.
// An attempt that comes too early fails at once, with the reason of the last one. A success lets
// everybody through. All copies of the config are paced together: pools, and connections beside them.
//
// A session in which a change was refused because it is read-only is closed: it may have been opened
// while the role or the server was, and would be so for ever. That counts as a failed attempt.
//
// Tracers of the config are called as before. To pace a config twice is to pace it once.
func Pace(config *pgx.ConnConfig) {
	if _, paced := config.Tracer.(interface{ paced() }); paced {
		return
	}
	p := &pacer{}
	if config.Tracer == nil {
		config.Tracer = p
	} else {
		config.Tracer = tracers{multitracer.New(config.Tracer, p)}
	}
	dial := config.DialFunc
	config.DialFunc = func(ctx context.Context, network, address string) (net.Conn, error) {
		if a, _ := ctx.Value(attemptKey{}).(attempt); a.refused != nil {
			return nil, a.refused
		}
		return dial(ctx, network, address)
	}
	onError := config.OnPgError
	config.OnPgError = func(conn *pgconn.PgConn, err *pgconn.PgError) bool {
		if err.Code == readOnly {
			p.failed(time.Now(), err)
			return false
		}
		return onError == nil || onError(conn, err)
	}
}

const readOnly = "25006" // read_only_sql_transaction

// A pacer remembers how attempts at connecting have ended.
type pacer struct {
	mu    sync.Mutex
	err   error         // why the last attempt has failed; nil: it has not
	at    time.Time     // when an attempt last failed
	pause time.Duration // after the last failure, jitter aside
	next  time.Time     // no attempt is made before
}

// An attempt at connecting.
type attempt struct {
	begun   time.Time
	refused error // not nil: it is not made
}

type attemptKey struct{}

// errTooSoon says that an attempt was not made.
type errTooSoon struct {
	ago   time.Duration
	cause error
}

func (e *errTooSoon) Error() string {
	return fmt.Sprintf("not tried again yet, %s after: %v", e.ago.Round(time.Millisecond), e.cause)
}
func (e *errTooSoon) Unwrap() error { return e.cause }

// begin lets an attempt through, or says why not. While attempts fail, one at a time is let through.
func (p *pacer) begin() attempt {
	now := time.Now()
	p.mu.Lock()
	defer p.mu.Unlock()
	switch {
	case p.err == nil:
	case now.Before(p.next):
		return attempt{now, &errTooSoon{now.Sub(p.at), p.err}}
	default:
		p.next = now.Add(jittered(p.pause))
	}
	return attempt{begun: now}
}

func (p *pacer) succeeded() {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.err = nil
}

// failed notes that an attempt which was begun then has failed. Those that were under way together count once.
func (p *pacer) failed(begun time.Time, err error) {
	now := time.Now()
	p.mu.Lock()
	defer p.mu.Unlock()
	if together := begun.Before(p.at); !together || p.err == nil {
		if p.pause *= 2; p.pause == 0 || now.Sub(p.at) > forgetAfter {
			p.pause = firstPause
		}
		p.pause = min(p.pause, longest(err))
		p.at, p.next = now, now.Add(jittered(p.pause))
	}
	p.err = err
}

// longest returns how long a pause after such an error may be.
func longest(err error) time.Duration {
	var refused *pgconn.PgError
	if errors.As(err, &refused) && len(refused.Code) == 5 {
		switch refused.Code[:2] {
		case "28", "3D", "42", "53", "55": // authorization, no such database, no right, no room, not accepting connections
			return refusedPause
		}
	}
	return awayPause
}

func jittered(d time.Duration) time.Duration { return d/2 + rand.N(d/2+1) }

// TraceConnectStart is called by pgx before it connects.
func (p *pacer) TraceConnectStart(ctx context.Context, _ pgx.TraceConnectStartData) context.Context {
	return context.WithValue(ctx, attemptKey{}, p.begin())
}

// TraceConnectEnd is called by pgx when it has connected, or has not.
func (p *pacer) TraceConnectEnd(ctx context.Context, data pgx.TraceConnectEndData) {
	a, _ := ctx.Value(attemptKey{}).(attempt)
	switch {
	case a.refused != nil:
	case data.Err == nil:
		p.succeeded()
	case !errors.Is(data.Err, context.Canceled): // else nobody wants it any more
		cause := data.Err
		if connect := (*pgconn.ConnectError)(nil); errors.As(cause, &connect) { // whose words are said again around it
			cause = connect.Unwrap()
		}
		p.failed(a.begun, cause)
	}
}

// TraceQueryStart and TraceQueryEnd are what makes a tracer.
func (p *pacer) TraceQueryStart(ctx context.Context, _ *pgx.Conn, _ pgx.TraceQueryStartData) context.Context {
	return ctx
}
func (p *pacer) TraceQueryEnd(context.Context, *pgx.Conn, pgx.TraceQueryEndData) {}

func (p *pacer) paced() {}

// tracers are a user's tracer and a pacer.
type tracers struct{ *multitracer.Tracer }

func (tracers) paced() {}
