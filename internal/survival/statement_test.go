package survival

import (
	"errors"
	"os"
	"os/exec"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/simple-workflow/simple-workflow/internal/pgtest"
	"github.com/simple-workflow/simple-workflow/run"
)

// A story is a run that makes the engine issue certain statements.
type story struct {
	name      string
	typ       string
	ends      string        // as returned by ending
	attempts  int           // max_attempts; 0: the default
	heartbeat time.Duration // 0: none during the run
	abandoned bool          // its first lease belongs to a worker that died long ago
	whole     bool          // also die before the first lease, where all stories are the same
}

var stories = []story{
	{name: "succeeds", typ: "chaos.succeed", ends: succeeded, whole: true},
	{name: "is tried again", typ: "chaos.retry", ends: succeeded},
	{name: "fails for good", typ: "chaos.permanent", ends: failed},
	{name: "fails at its last attempt", typ: "chaos.fail", ends: failed, attempts: 2},
	{name: "is put off", typ: "chaos.postpone", ends: succeeded},
	{name: "is handed back", typ: "chaos.release", ends: succeeded},
	{name: "is extended", typ: "chaos.beat", ends: succeeded, heartbeat: 50 * time.Millisecond},
	{name: "cancels itself", typ: "chaos.cancel", ends: "cancelled, no result, 0 effects, 0 events", heartbeat: 50 * time.Millisecond},
	{name: "has an effect", typ: "chaos.effect", ends: `succeeded, result "done", 1 effects, 1 events`},
	{name: "has an event", typ: "chaos.event", ends: `succeeded, result "done", 0 effects, 1 events`},
	{name: "is taken back", typ: "chaos.succeed", ends: succeeded, abandoned: true, whole: true},
	{name: "is taken back for the last time", typ: "chaos.succeed", ends: failed, attempts: 1, abandoned: true, whole: true},
}

const (
	succeeded = `succeeded, result "done", 0 effects, 0 events`
	failed    = "failed, no result, 0 effects, 0 events"
)

// If a worker is killed before or after any statement, another one finishes its run, and the result is the same as
// that of an undisturbed worker.
func TestKilledAtEachStatement(t *testing.T) {
	awaitServer(t)
	var deaths sync.Map // the names of statements at which a worker died
	all := t.Run("a run that", func(t *testing.T) {
		for _, s := range stories {
			t.Run(s.name, func(t *testing.T) {
				t.Parallel()
				for _, place := range s.places(t, s.play(t, never)) {
					t.Run(place, func(t *testing.T) {
						t.Parallel()
						s.play(t, place)
						deaths.Store(strings.Fields(place)[1], true)
					})
				}
			})
		}
	})
	for name := range names {
		if _, ok := deaths.Load(name); all && !ok {
			t.Errorf("no worker died at %s: it is not issued any more, or no story of this run of the tests has it", name)
		}
	}
}

// awaitServer waits until leases may be reclaimed: after a start of the server, their owners have some time.
func awaitServer(t *testing.T) {
	t.Helper()
	pool := pgtest.New(t)
	pgtest.Await(t, "the server is old enough", func() bool {
		return number(t, pool, `SELECT count(*) WHERE pg_postmaster_start_time() < now() - interval '2 seconds'`) == 1
	})
}

// looks are statements that check whether there is something to do. Their number depends on timing, so only the first
// of each kind counts.
var looks = []string{"policies", "discover", "lease", "extend", "look", "reclaim"}

// telling are statements after which something happens before the next statement: a handler is called, or a result is
// known.
var telling = []string{"lease", "settle", "commit"}

// places returns where to die: before each of the statements, up to the one that ends the run, and after those in
// telling. After any other statement is the same as before the next one.
func (s story) places(t *testing.T, statements []string) (all []string) {
	t.Helper()
	for i, statement := range slices.Backward(statements) {
		if name, _, _ := strings.Cut(statement, " "); name == "settle" || name == "commit" {
			statements = statements[:i+1] // a heartbeat under way may be followed by a look at the lease
			break
		}
	}
	if !s.whole {
		statements = slices.DeleteFunc(statements[slices.Index(statements, "lease")+1:], func(s string) bool { return s == "reclaim" })
	}
	for _, statement := range statements {
		name, _, again := strings.Cut(statement, " ")
		if _, known := names[name]; !known {
			t.Errorf("the engine issues a statement that is new here; name it: %s", statement)
		}
		if !again || !slices.Contains(looks, name) {
			all = append(all, "before "+statement)
			if slices.Contains(telling, name) {
				all = append(all, "after "+statement)
			}
		}
	}
	return all
}

// play executes the run with a worker that dies at the given place, then with another one if the run has not ended,
// and checks the result. It returns the statements that the first worker issued.
func (s story) play(t *testing.T, place string) (statements []string) {
	t.Helper()
	url := pgtest.URL(t)
	pool := connect(t, url)
	s.enqueue(t, pool)
	first := s.start(t, url, place)
	if place == never {
		pgtest.Await(t, "the run to finish, or the worker to stop", func() bool { return finished(t, pool) || len(first.ended) > 0 })
		first.signal(syscall.SIGTERM)
	}
	died(t, first, place)
	pgtest.Elapse(t, pool, 2*longLease)
	if !finished(t, pool) {
		s.start(t, url, never)
		settled(t, pool)
	}
	check(t, pool)
	if got := ending(t, pool); got != s.ends {
		t.Errorf("the worker killed %s, the run ends as: %s; want: %s", place, got, s.ends)
	}
	text, err := os.ReadFile(first.log)
	if err != nil {
		t.Fatal(err)
	}
	for line := range strings.Lines(string(text)) {
		if line = strings.TrimSpace(line); !strings.HasPrefix(line, "20") { // lines that begin with a date are the worker's log
			statements = append(statements, line)
		}
	}
	return statements
}

func (s story) start(t *testing.T, url, place string) *process {
	t.Helper()
	self, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	heartbeat := s.heartbeat
	if heartbeat == 0 {
		heartbeat = longLease / 3
	}
	return launch(t, self, strings.ReplaceAll(place, " ", "_"), "DATABASE_URL="+url, deathEnv+"="+place, "HEARTBEAT="+heartbeat.String())
}

func (s story) enqueue(t *testing.T, pool *pgxpool.Pool) {
	t.Helper()
	added, err := run.Enqueue(t.Context(), pool, run.New{Type: s.typ, MaxAttempts: s.attempts})
	if err != nil {
		t.Fatal(err)
	}
	statements := []string{`CREATE TABLE chaos_effect (run_id uuid NOT NULL, lease_no bigint NOT NULL)`}
	if s.abandoned {
		statements = append(statements, `
			UPDATE workflow_run
			SET status = 'leased', lease_token = gen_random_uuid(), lease_no = 1, attempt = 1, leased_by = 'long dead',
			    started_at = now() - interval '1 minute', lease_until = now() - interval '1 second'
			WHERE id = '`+added.ID.String()+`'`)
	}
	for _, statement := range statements {
		if _, err := pool.Exec(t.Context(), statement); err != nil {
			t.Fatal(err)
		}
	}
}

func finished(t *testing.T, pool *pgxpool.Pool) bool {
	t.Helper()
	return number(t, pool, `SELECT count(*) FROM workflow_run WHERE finished_at IS NULL`) == 0
}

// died waits for the worker's end, and fails the test if it did not die at the place.
func died(t *testing.T, p *process, place string) {
	t.Helper()
	var err error
	select {
	case err = <-p.ended:
	case <-time.After(20 * time.Second):
		t.Fatalf("the worker never died %s", place)
	}
	if place == never {
		if err != nil {
			t.Fatalf("the worker ended with %v, want exit code 0", err)
		}
		return
	}
	var exit *exec.ExitError
	if !errors.As(err, &exit) || exit.Sys().(syscall.WaitStatus).Signal() != syscall.SIGKILL {
		t.Fatalf("the worker ended with %v, want it killed %s", err, place)
	}
}

// ending describes the run at its end.
func ending(t *testing.T, pool *pgxpool.Pool) (text string) {
	t.Helper()
	err := pool.QueryRow(t.Context(), `
		SELECT format('%s, %s, %s effects, %s events', status, coalesce('result ' || result::text, 'no result'),
		              (SELECT count(*) FROM chaos_effect WHERE run_id = r.id),
		              (SELECT count(*) FROM outbox_event WHERE aggregate_id = r.id))
		FROM workflow_run r`).Scan(&text)
	if err != nil {
		t.Fatal(err)
	}
	return text
}
