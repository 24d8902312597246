package graph_test

import (
	"context"
	"errors"
	"net"
	"sync"
	"testing"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/simple-workflow/simple-workflow/worker"
)

// A mortal is a worker that can be cut off from the database at once, as by kill -9.
type mortal struct {
	worker *worker.Worker
	stop   context.CancelFunc
	ended  chan struct{}

	mu    sync.Mutex
	dead  bool
	conns map[net.Conn]bool
}

func (m *mortal) dial(ctx context.Context, network, address string) (net.Conn, error) {
	m.mu.Lock()
	dead := m.dead
	m.mu.Unlock()
	if dead {
		return nil, errors.New("this worker is dead")
	}
	conn, err := (&net.Dialer{}).DialContext(ctx, network, address)
	if err == nil {
		m.mu.Lock()
		defer m.mu.Unlock()
		if m.dead {
			_ = conn.Close()
			return nil, errors.New("this worker is dead")
		}
		m.conns[conn] = true
	}
	return conn, err
}

func (m *mortal) kill() {
	m.mu.Lock()
	m.dead = true
	for conn := range m.conns {
		_ = conn.Close()
	}
	m.mu.Unlock()
	m.stop()
	m.worker.StopNow()
}

// release has it end by itself, and waits.
func (m *mortal) release() {
	m.stop()
	m.worker.StopNow()
	<-m.ended
}

// employ starts a worker, which ends with the test at the latest. A tracer sees its statements.
func employ(t *testing.T, base *pgxpool.Pool, config func(*pgxpool.Pool) worker.Config, tracers ...func(*mortal) pgx.QueryTracer) *mortal {
	t.Helper()
	m := &mortal{conns: map[net.Conn]bool{}, ended: make(chan struct{})}
	c := base.Config()
	c.ConnConfig.DialFunc = m.dial
	c.ConnConfig.RuntimeParams["application_name"] = "mortal"
	for _, tracer := range tracers {
		c.ConnConfig.Tracer = tracer(m)
	}
	pool, err := pgxpool.NewWithConfig(context.Background(), c)
	if err != nil {
		t.Fatal(err)
	}
	if m.worker, err = worker.New(config(pool)); err != nil {
		t.Fatal(err)
	}
	var ctx context.Context
	ctx, m.stop = context.WithCancel(context.Background())
	go func() {
		defer close(m.ended)
		defer pool.Close()
		_ = m.worker.Run(ctx) // it may have been killed
	}()
	t.Cleanup(m.release)
	return m
}
