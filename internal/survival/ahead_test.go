package survival

import (
	"encoding/json"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/simple-workflow/simple-workflow/internal/pgtest"
	"github.com/simple-workflow/simple-workflow/run"
)

// quickly starts a worker whose handler of chaos.quick writes down that it has begun, and takes a millisecond.
func quickly(t *testing.T, url, name, starts string) *process {
	t.Helper()
	self, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	return launch(t, self, name, "DATABASE_URL="+url, deathEnv+"="+never, "HEARTBEAT="+(lease/3).String(), "LEASE="+lease.String(), "STARTS="+starts)
}

// begun returns how often each run has begun, as its handlers have written it down.
func begun(t *testing.T, starts string) map[uuid.UUID]int {
	t.Helper()
	text, err := os.ReadFile(starts)
	if err != nil {
		t.Fatal(err)
	}
	times := map[uuid.UUID]int{}
	for line := range strings.Lines(string(text)) {
		times[uuid.MustParse(strings.TrimSpace(line))]++
	}
	return times
}

// quickHeld is mostHeld for a handler that takes a millisecond: in 50 ms, 50 of them return in each slot.
const quickHeld = 2*slots + 2*50*slots

func enqueueQuick(t *testing.T, pool *pgxpool.Pool, n int, payload string) {
	t.Helper()
	if _, err := pool.Exec(t.Context(), `CREATE TABLE IF NOT EXISTS chaos_effect (run_id uuid NOT NULL, lease_no bigint NOT NULL)`); err != nil {
		t.Fatal(err) // for the invariants
	}
	runs := make([]run.New, n)
	for i := range runs {
		runs[i] = run.New{Type: "chaos.quick", Payload: json.RawMessage(payload)}
	}
	if _, err := run.EnqueueMany(t.Context(), pool, runs); err != nil {
		t.Fatal(err)
	}
}

// If a worker is killed while it holds many leases ahead of its handlers, a charge of an attempt falls on at most as many runs that
// had not begun as it has slots. All others run elsewhere once the lease is over, at their first attempt, without a backoff.
func TestKilledWithLeasesAhead(t *testing.T) {
	awaitServer(t)
	t.Parallel()
	url := pgtest.URL(t)
	pool := connect(t, url)
	starts := filepath.Join(t.TempDir(), "starts")
	enqueueQuick(t, pool, 3000, `{}`)
	a := quickly(t, url, "a", starts)
	ahead := func() bool {
		return number(t, pool, `SELECT count(*) FROM workflow_run WHERE status = 'leased' AND workflow_leased_ahead(lease_token)`) > 3*slots
	}
	for {
		pgtest.Await(t, "the worker to hold leases ahead", func() bool {
			if number(t, pool, `SELECT count(*) FROM workflow_run WHERE status = 'pending'`) < 1000 {
				enqueueQuick(t, pool, 1000, `{}`) // or a slow machine is through with them before it knows how quick they are
			}
			return ahead()
		})
		// All slots get a handler that has written its start, and stays. What else has not begun is charged or not.
		if err := os.WriteFile(starts+hold, nil, 0o600); err != nil {
			t.Fatal(err)
		}
		for was := -1; ; {
			time.Sleep(50 * time.Millisecond)
			now := len(begun(t, starts))
			if now == was {
				break
			}
			was = now
		}
		if ahead() {
			break
		}
		if err := os.Remove(starts + hold); err != nil { // what was leased ahead has begun meanwhile
			t.Fatal(err)
		}
	}
	a.signal(syscall.SIGKILL)
	_ = <-a.ended
	killed := time.Now()
	if err := os.Remove(starts + hold); err != nil {
		t.Fatal(err)
	}
	rows, _ := pool.Query(t.Context(), `SELECT id FROM workflow_run WHERE status = 'leased'`)
	left, err := pgx.CollectRows(rows, pgx.RowTo[uuid.UUID])
	if err != nil {
		t.Fatal(err)
	}
	before := begun(t, starts)
	quickly(t, url, "b", starts)
	pgtest.Await(t, "what was left to be done", func() bool {
		return number(t, pool, `SELECT count(*) FROM workflow_run WHERE id = ANY ($1) AND status <> 'succeeded' AND NOT suspect`, left) == 0
	})
	took := time.Since(killed)
	settled(t, pool)
	charged, free := 0, 0
	for _, id := range left {
		if number(t, pool, `SELECT lease_no FROM workflow_run WHERE id = $1`, id) == 1 {
			continue // its outcome was under way, and recorded a moment later
		}
		switch attempt := number(t, pool, `SELECT attempt FROM workflow_run WHERE id = $1`, id); {
		case before[id] > 0 && attempt < 2:
			t.Errorf("run %s had begun, and was not charged", id)
		case before[id] == 0 && attempt > 1:
			charged++
		case before[id] == 0:
			free++
		}
	}
	if charged > slots || free == 0 {
		t.Errorf("of %d leases left, %d that had not begun are charged, %d are not; want at most %d charged", len(left), charged, free, slots)
	}
	if limit := lease + 2*time.Second + patience; took > limit {
		t.Errorf("the last of them took %s, want %s at most", took, limit)
	}
	t.Logf("%d leases were left, %d had begun; of the others %d were charged; the last began %s after the end", len(left), len(left)-charged-free, charged, took)
	invariant(t, pool)
	replay(t, pool, quickHeld)
}

// A run that kills its process as soon as it begins fails after its attempts, and starts no more often than that and once, although it
// is of a quick type among many others that are leased ahead. No other run fails.
func TestPoisonAmongLeasesAhead(t *testing.T) {
	awaitServer(t)
	t.Parallel()
	url := pgtest.URL(t)
	pool := connect(t, url)
	starts := filepath.Join(t.TempDir(), "starts")
	enqueueQuick(t, pool, 2000, `{}`)
	enqueueQuick(t, pool, 1, `{"poison": true}`)
	enqueueQuick(t, pool, 2000, `{}`)
	done := make(chan struct{})
	go func() { // as a supervisor does
		defer close(done)
		for i := 0; t.Context().Err() == nil && i < 20; i++ {
			p := quickly(t, url, "w", starts)
			select {
			case _ = <-p.ended:
			case <-t.Context().Done():
				return
			}
		}
	}()
	settled(t, pool)
	poison := uuid.UUID{}
	var attempts int
	if err := pool.QueryRow(t.Context(), `SELECT id, attempt FROM workflow_run WHERE payload ? 'poison' AND status = 'failed'`).Scan(&poison, &attempts); err != nil {
		t.Fatal("the poison has not failed: ", err)
	}
	if n := begun(t, starts)[poison]; n < 3 || n > 4 || attempts != 3 {
		t.Errorf("it began %d times, and was charged %d attempts; want 3, and one more start at most", n, attempts)
	}
	if n := number(t, pool, `SELECT count(*) FROM workflow_run WHERE status <> 'succeeded'`); n != 1 {
		t.Errorf("%d runs have not succeeded, want the poison alone", n)
	}
	invariant(t, pool)
	replay(t, pool, quickHeld)
}
