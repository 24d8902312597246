package graph_test

import (
	"context"
	"errors"
	"net"
	"sync"
	"testing"

	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/simple-workflow/simple-workflow/worker"
)

// A mortal is a worker that can be cut off from the database at once, as if by kill -9.
type mortal struct {
	worker *worker.Worker
	stop   context.CancelFunc
	ended  chan struct{}
	died   chan struct{}

	mu    sync.Mutex
	dead  bool
	conns map[net.Conn]bool
	heir  *mortal // the worker that took its place when it died by its fate
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

// kill cuts the worker off, and also the workers that took its place.
func (m *mortal) kill() {
	m.die()
	if heir := m.successor(); heir != nil {
		heir.kill()
	}
}

func (m *mortal) die() {
	m.mu.Lock()
	if !m.dead {
		m.dead = true
		close(m.died)
	}
	for conn := range m.conns {
		_ = conn.Close()
	}
	m.mu.Unlock()
	m.stop()
	m.worker.StopNow()
}

// leave makes the worker die and heir take its place. If the worker has been killed, heir is killed, too.
func (m *mortal) leave(heir *mortal) {
	m.mu.Lock()
	dead := m.dead
	m.heir = heir
	m.mu.Unlock()
	if dead {
		heir.kill()
	}
	m.die()
}

func (m *mortal) successor() *mortal {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.heir
}

// release stops the worker and those that took its place, and waits until they have ended. It does not wait for a
// worker that died, which may go on without a connection for a while.
func (m *mortal) release() {
	m.stop()
	m.worker.StopNow()
	select {
	case <-m.ended:
	case <-m.died:
	}
	if heir := m.successor(); heir != nil {
		heir.release()
	}
}

// employ starts a worker, which is released at the end of the test at the latest. Each function in look may change the
// config of its pool, for example to trace its statements.
func employ(t *testing.T, base *pgxpool.Pool, config func(*pgxpool.Pool) worker.Config, look ...func(*mortal, *pgxpool.Config)) *mortal {
	t.Helper()
	m := &mortal{conns: map[net.Conn]bool{}, ended: make(chan struct{}), died: make(chan struct{})}
	c := base.Config()
	c.ConnConfig.DialFunc = m.dial
	c.ConnConfig.RuntimeParams["application_name"] = "mortal"
	for _, l := range look {
		l(m, c)
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
