package graph

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/simple-workflow/simple-workflow/internal/leasing"
	"github.com/simple-workflow/simple-workflow/internal/pgtest"
	"github.com/simple-workflow/simple-workflow/internal/settling"
	"github.com/simple-workflow/simple-workflow/run"
)

// A process that was found by name is remembered for starts that were leased before it was found. A start that is leased after a new version was deployed finds the new
// version.
func TestFoundByName(t *testing.T) {
	pool := pgtest.New(t)
	e := New(pool)
	deploy := func(version int) {
		t.Helper()
		d, err := Parse([]byte(fmt.Sprintf(`{"process": "p", "version": %d, "start": "a", "nodes": {"a": {"end": true}}}`, version)))
		if err == nil {
			_, err = Deploy(t.Context(), pool, d)
		}
		if err != nil {
			t.Fatal(err)
		}
	}
	clock := func() (at time.Time) {
		t.Helper()
		if err := pool.QueryRow(t.Context(), `SELECT clock_timestamp()`).Scan(&at); err != nil {
			t.Fatal(err)
		}
		return at
	}
	expect := func(version int, since time.Time, want int) {
		t.Helper()
		p, err := e.find(t.Context(), "p", version, since)
		if err != nil || p.Definition.Version != want {
			t.Errorf("version %d since %s: %v, %v; want version %d", version, since, p, err, want)
		}
	}
	deploy(1)
	first := clock()
	expect(0, first, 1)
	deploy(2)
	expect(0, first, 1)
	expect(0, clock(), 2)
	expect(0, first, 2)
	expect(1, clock(), 1)
	if _, err := e.find(t.Context(), "q", 0, first); !run.IsPermanent(err) {
		t.Errorf("a process that is not deployed: %v, want a permanent error", err)
	}
}

// Of starts that look for a process at the same moment, one asks the database. Whoever waits for his answer can give up,
// and asks himself if there is none.
func TestFoundByNameOnce(t *testing.T) {
	config, err := pgxpool.ParseConfig(pgtest.URL(t))
	if err != nil {
		t.Fatal(err)
	}
	asked := &lookups{}
	config.ConnConfig.Tracer, config.MaxConns = asked, 20
	pool, err := pgxpool.NewWithConfig(t.Context(), config)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(pool.Close)
	e := New(pool)
	d, err := Parse([]byte(`{"process": "p", "version": 1, "start": "a", "nodes": {"a": {"end": true}}}`))
	if err == nil {
		_, err = Deploy(t.Context(), pool, d)
	}
	if err != nil {
		t.Fatal(err)
	}
	var since time.Time
	if err := pool.QueryRow(t.Context(), `SELECT clock_timestamp()`).Scan(&since); err != nil {
		t.Fatal(err)
	}
	all := func(name string) {
		var looking sync.WaitGroup
		for range 20 {
			looking.Go(func() {
				if p, err := e.find(t.Context(), name, 0, since); (p == nil) != (name == "q") || name == "q" && !run.IsPermanent(err) {
					t.Errorf("%s: %v, %v", name, p, err)
				}
			})
		}
		looking.Wait()
	}
	all("p")
	if n := asked.n.Load(); n > 2 { // a second one if the machine stops for a second
		t.Errorf("the database was asked %d times, want once", n)
	}
	before := asked.n.Load()
	all("q")
	if n := asked.n.Load() - before; n != 20 {
		t.Errorf("%d of 20 asked for what is not deployed, want all", n)
	}
	e.asking[processName{"r", 0}] = make(chan struct{})
	ctx, cancel := context.WithTimeout(t.Context(), 10*time.Millisecond)
	defer cancel()
	if _, err := e.find(ctx, "r", 0, since); !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("whoever gives up has %v", err)
	}

	// No answer comes within a second: they do not ask one after the other.
	if err := pool.QueryRow(t.Context(), `SELECT clock_timestamp()`).Scan(&since); err != nil {
		t.Fatal(err)
	}
	asked.slow.Store(true)
	start := time.Now()
	all("p")
	if took := time.Since(start); took > 10*time.Second {
		t.Errorf("with answers that take 1.2 s, 20 took %s", took)
	}
}

// lookups counts how often the database is asked for a process by name, and lets it take its time.
type lookups struct {
	n    atomic.Int32
	slow atomic.Bool
}

func (l *lookups) TraceQueryStart(ctx context.Context, _ *pgx.Conn, q pgx.TraceQueryStartData) context.Context {
	if strings.Contains(q.SQL, "FROM process_definition\n\t\tWHERE name = $1") {
		l.n.Add(1)
		if l.slow.Load() {
			time.Sleep(1200 * time.Millisecond)
		}
	}
	return ctx
}

func (l *lookups) TraceQueryEnd(context.Context, *pgx.Conn, pgx.TraceQueryEndData) {}

// A start whose definition is deleted before the start is settled is refused, with a reason, and no other run is blamed.
func TestStartOfADeletedDefinition(t *testing.T) {
	pool := pgtest.New(t)
	tx, err := pool.Begin(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	defer tx.Rollback(t.Context())
	within, err := in(t.Context(), tx)
	if err != nil {
		t.Fatal(err)
	}
	id := uuid.New()
	result := fmt.Sprintf(`{"instance": %q, "definition": %q, "version": 1}`, uuid.New(), uuid.New())
	err = newScene().start(t.Context(), within, New(pool), []leasing.Settlement{{
		Lease:   leasing.Lease{Payload: []byte(`{"process": "p"}`)},
		Outcome: settling.Outcome{ID: id, Result: []byte(result)},
	}}, nil)
	var refused *leasing.SettleError
	if !errors.As(err, &refused) || refused.Run != id || len(refused.Others) > 0 || !run.IsPermanent(refused.Err) || !strings.Contains(err.Error(), "was deleted") {
		t.Errorf("the start has %v", err)
	}
}
