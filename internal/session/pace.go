package session

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"net"
	"sync"
	"time"

	"github.com/jackc/pgerrcode"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/multitracer"
	"github.com/jackc/pgx/v5/pgconn"
)

const (
	firstPause = 50 * time.Millisecond
	// longestPause is short, because a shortage of connections may end at any time, and leases cannot be
	// extended before there is a connection.
	longestPause = time.Second
	// forgetAfter is how long after a refusal the pauses start from firstPause again.
	forgetAfter = 10 * time.Second
)

// Pace makes attempts to connect less frequent while the server refuses them. The first pause is 50 ms. Pauses
// double, with jitter, up to 1 s. An attempt during a pause fails at once, with the reason of the last refusal.
// A successful attempt ends the pauses. All copies of the config are paced together: those in pools and others.
//
// An attempt that gets no answer neither starts nor extends a pause. Otherwise one connection dropped by the
// network could cost a worker the leases that it must extend meanwhile.
//
// A session in which a change was refused as read-only is closed. It may have been opened while the role or the
// server was read-only, and would stay so. This counts as a refused attempt.
//
// Tracers of the config are called as before. Calling Pace twice is the same as once.
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
			p.refused(time.Now(), err)
			return false
		}
		return onError == nil || onError(conn, err)
	}
}

const readOnly = pgerrcode.ReadOnlySQLTransaction

// A pacer remembers whether attempts to connect are refused.
type pacer struct {
	mu    sync.Mutex
	err   error         // why the last attempt was refused, or nil
	at    time.Time     // when an attempt was last refused
	pause time.Duration // after the last refusal, without jitter
	next  time.Time     // no attempt is made before that
}

// An attempt is one attempt to connect.
type attempt struct {
	begun   time.Time
	refused error // if not nil, the attempt is not made
}

type attemptKey struct{}

// errTooSoon is the error of an attempt that was not made.
type errTooSoon struct {
	ago   time.Duration
	cause error
}

func (e *errTooSoon) Error() string {
	return fmt.Sprintf("not tried again yet, %s after: %v", e.ago.Round(time.Millisecond), e.cause)
}
func (e *errTooSoon) Unwrap() error { return e.cause }

// begin permits an attempt, or returns it with the reason why not. While attempts are refused, one at a time is
// permitted.
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

// lift ends the pauses.
func (p *pacer) lift() {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.err = nil
}

// refused notes that an attempt was refused. Attempts that were made at the same time count once.
func (p *pacer) refused(begun time.Time, err error) {
	now := time.Now()
	p.mu.Lock()
	defer p.mu.Unlock()
	if together := begun.Before(p.at); !together || p.err == nil {
		if p.pause *= 2; p.pause == 0 || now.Sub(p.at) > forgetAfter {
			p.pause = firstPause
		}
		p.pause = min(p.pause, longestPause)
		p.at, p.next = now, now.Add(jittered(p.pause))
	}
	p.err = err
}

// refusal returns the error of a server that refuses connections, or nil.
func refusal(err error) *pgconn.PgError {
	var said *pgconn.PgError
	if errors.As(err, &said) && len(said.Code) == 5 {
		switch said.Code[:2] {
		case "28", "3D", "42", "53", "55": // authorization, no such database, no right, no room, not accepting connections
			return said
		}
	}
	return nil
}

func jittered(d time.Duration) time.Duration { return d/2 + rand.N(d/2+1) }

// TraceConnectStart is called by pgx before it connects.
func (p *pacer) TraceConnectStart(ctx context.Context, _ pgx.TraceConnectStartData) context.Context {
	return context.WithValue(ctx, attemptKey{}, p.begin())
}

// TraceConnectEnd is called by pgx when an attempt to connect has ended.
func (p *pacer) TraceConnectEnd(ctx context.Context, data pgx.TraceConnectEndData) {
	a, _ := ctx.Value(attemptKey{}).(attempt)
	switch said := refusal(data.Err); {
	case a.refused != nil, errors.Is(data.Err, context.Canceled): // it was not made, or given up
	case said != nil:
		p.refused(a.begun, said)
	default:
		p.lift()
	}
}

// TraceQueryStart and TraceQueryEnd do nothing. pgx requires them of a tracer.
func (p *pacer) TraceQueryStart(ctx context.Context, _ *pgx.Conn, _ pgx.TraceQueryStartData) context.Context {
	return ctx
}
func (p *pacer) TraceQueryEnd(context.Context, *pgx.Conn, pgx.TraceQueryEndData) {}

func (p *pacer) paced() {}

// tracers combines a user's tracer with a pacer.
type tracers struct{ *multitracer.Tracer }

func (tracers) paced() {}
