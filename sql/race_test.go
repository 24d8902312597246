package sql_test

import (
	"errors"
	"math/rand/v2"
	"sync"
	"testing"

	"github.com/jackc/pgx/v5/pgconn"

	"github.com/simple-workflow/simple-workflow/internal/pgtest"
	"github.com/simple-workflow/simple-workflow/internal/settling"
)

// An answer is the result of a statement that had to wait.
type answer struct {
	value string
	err   error
}

// later sends a statement that waits for a lock, in the background. The session must not be used until the answer is
// received.
func (s *session) later(statement string) <-chan answer {
	c := make(chan answer, 1)
	go func() {
		value, err := s.try(statement)
		c <- answer{value, err}
	}()
	return c
}

// W03, W23: a cancel that comes first wins. The settle that waited for it is refused and changes nothing.
func TestCancelBeforeSettle(t *testing.T) {
	s, pool := psql(t)
	id := s.enqueue()
	l := acquire(t, pool, 1)
	s.do(`BEGIN`)
	s.expect("answer", s.do(`SELECT workflow_cancel('`+id+`', 'first')`), "cancelled")
	refused := make(chan int)
	go func() { refused <- settle(t, pool, settling.Succeed, l...) }()
	pgtest.Blocked(t, pool, 1)
	s.do(`COMMIT`)
	if n := <-refused; n != 1 {
		t.Errorf("refused %d, want 1", n)
	}
	s.expect("run", s.of(id, `concat_ws(' ', status, last_error, settled_token)`), "cancelled cancelled: first")
	s.expect("events", s.events(id), "created leased cancelled")
}

// W23: a settle that comes first wins. The cancel that waited for it says so.
func TestSettleBeforeCancel(t *testing.T) {
	for verdict, want := range map[settling.Verdict]string{settling.Succeed: "too late: succeeded", settling.Fail: "too late: failed", settling.Release: "cancelled"} {
		t.Run(string(verdict), func(t *testing.T) {
			s, pool := psql(t)
			id := s.enqueue()
			l := acquire(t, pool, 1)
			tx, err := pool.Begin(t.Context())
			if err != nil {
				t.Fatal(err)
			}
			defer tx.Rollback(t.Context())
			settle(t, tx, verdict, l...)
			waiting := s.later(`SELECT workflow_cancel('` + id + `')`)
			pgtest.Blocked(t, pool, 1)
			if err := tx.Commit(t.Context()); err != nil {
				t.Fatal(err)
			}
			a := <-waiting
			if a.err != nil {
				t.Fatal(a.err)
			}
			s.expect("answer", a.value, want)
			s.expect("status", s.of(id, `status`), map[bool]string{true: "cancelled", false: string(verdict)}[want == "cancelled"])
		})
	}
}

// Until a retry is committed, other sessions see its run as failed. Afterwards the run can be cancelled.
func TestCancelAfterRetry(t *testing.T) {
	s, pool := psql(t)
	other := connect(t, pool.Config().ConnString())
	id := s.in("failed")
	s.do(`BEGIN; SELECT workflow_retry('` + id + `')`)
	s.expect("while nobody knows", other.do(`SELECT workflow_cancel('`+id+`')`), "too late: failed")
	s.do(`COMMIT`)
	s.expect("afterwards", other.do(`SELECT workflow_cancel('`+id+`')`), "cancelled")
}

// workflow_retry first tries to change the run, then looks why it could not. A run that fails between the two is
// retried, because the answer "not failed" would never have been true.
func TestFailedDuringRetry(t *testing.T) {
	s, pool := psql(t)
	other := connect(t, pool.Config().ConnString())
	id := s.enqueue()
	l := acquire(t, pool, 1)
	s.do(`
		CREATE FUNCTION pause() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN PERFORM pg_advisory_xact_lock(42); RETURN NULL; END $$;
		CREATE TRIGGER pause AFTER UPDATE ON workflow_run
		FOR EACH STATEMENT WHEN (current_setting('workflow.retry', true) = 'on') EXECUTE FUNCTION pause()`)
	s.do(`BEGIN; SELECT pg_advisory_xact_lock(42)`)
	waiting := other.later(`SELECT workflow_retry('` + id + `')`)
	pgtest.Blocked(t, pool, 1)
	settle(t, pool, settling.Fail, l...)
	s.do(`COMMIT`)
	a := <-waiting
	if a.err != nil {
		t.Fatal(a.err)
	}
	s.expect("answer", a.value, "pending")
	s.expect("status", s.of(id, `status`), "pending")
}

// W22, W23: of 300 runs that are cancelled while they are settled, each cancel returns the final state, and each run
// has one last event.
func TestCancelsAndSettles(t *testing.T) {
	const runs = 300
	s, pool := psql(t)
	s.do(`INSERT INTO workflow_run (type) SELECT 'a.b' FROM generate_series(1, 300)`)
	leases := acquire(t, pool, runs)
	var all sync.WaitGroup
	answers := make([]string, runs)
	limit := make(chan struct{}, 4)
	for i, l := range leases {
		acts := []func(){
			func() { settle(t, pool, settling.Succeed, l) },
			func() {
				if err := pool.QueryRow(t.Context(), `SELECT workflow_cancel($1)`, l.ID).Scan(&answers[i]); err != nil {
					t.Error(err)
				}
			},
		}
		rand.Shuffle(len(acts), func(i, j int) { acts[i], acts[j] = acts[j], acts[i] })
		for _, act := range acts {
			limit <- struct{}{}
			all.Go(func() {
				act()
				<-limit
			})
		}
	}
	all.Wait()
	count := map[string]int{}
	for i, l := range leases {
		status := s.of(l.ID.String(), `status`)
		count[status]++
		if want := map[string]string{"cancelled": "cancelled", "too late: succeeded": "succeeded"}[answers[i]]; status != want {
			t.Errorf("run %s is %s, but the cancel was told %q", l.ID, status, answers[i])
		}
		s.expect("events", s.events(l.ID.String()), "created leased "+status)
	}
	t.Log(count)
	if count["cancelled"] == 0 || count["succeeded"] == 0 {
		t.Errorf("no race: %v", count)
	}
}

// S46: if two sessions enqueue the same key in open transactions, the second waits. If the first commits, the second
// gets that run. If the first rolls back, the second has its own run. If the first enqueued something else, the
// second is refused.
func TestEnqueueRace(t *testing.T) {
	tests := []struct{ name, end, payload string }{
		{"committed", "COMMIT", `{"a": 1}`},
		{"rolled back", "ROLLBACK", `{"a": 1}`},
		{"conflict", "COMMIT", `{"a": 2}`},
		{"conflict rolled back", "ROLLBACK", `{"a": 2}`},
	}
	for _, test := range tests {
		t.Run(test.name, func(t *testing.T) {
			s, pool := psql(t)
			other := connect(t, pool.Config().ConnString())
			first := s.do(`BEGIN; SELECT workflow_enqueue('a.b', '{"a": 1}', idempotency_key => 'k')`)
			waiting := other.later(`BEGIN; SELECT workflow_enqueue('a.b', '` + test.payload + `', idempotency_key => 'k')`)
			pgtest.Blocked(t, pool, 1)
			s.do(test.end)
			second := <-waiting
			switch {
			case test.name == "conflict":
				var pg *pgconn.PgError
				if !errors.As(second.err, &pg) || pg.Code != "23505" {
					t.Errorf("got %v, want SQLSTATE 23505", second.err)
				}
			case second.err != nil:
				t.Error(second.err)
			case (second.value == first) != (test.end == "COMMIT"):
				t.Errorf("second = %s, first = %s", second.value, first)
			}
			other.do(`COMMIT`) // a failed transaction rolls back
			s.expect("runs", s.do(`SELECT count(*) FROM workflow_run`), "1")
			s.expect("events", s.do(`SELECT count(*) FROM workflow_event`), "1")
		})
	}
}

// S46: the same race against a soft delete that frees the key.
func TestEnqueueAgainstDelete(t *testing.T) {
	s, pool := psql(t)
	other := connect(t, pool.Config().ConnString())
	first := s.do(`SELECT workflow_enqueue('a.b', idempotency_key => 'k')`)
	s.do(`BEGIN; SELECT workflow_delete('` + first + `', 'test')`)
	waiting := other.later(`SELECT workflow_enqueue('a.b', idempotency_key => 'k')`)
	pgtest.Blocked(t, pool, 1)
	s.do(`COMMIT`)
	if second := <-waiting; second.err != nil || second.value == first {
		t.Errorf("second = %+v, first = %s", second, first)
	}
}

// S30: a run in an open transaction is not visible before the commit, and not skipped after it, even if runs that are
// due later were leased in between.
func TestLateCommit(t *testing.T) {
	s, pool := psql(t)
	s.do(`BEGIN`)
	late := s.enqueue()
	p := poller(pool)
	connect(t, pool.Config().ConnString()).enqueue()
	leased := map[string]bool{}
	poll := func() {
		leases, _, err := p.Acquire(t.Context(), 10, 10)
		if err != nil {
			t.Fatal(err)
		}
		for _, l := range leases {
			leased[l.ID.String()] = true
		}
	}
	pgtest.Await(t, "the other run is leased", func() bool { poll(); return len(leased) == 1 })
	if leased[late] {
		t.Error("leased before it was committed")
	}
	s.do(`COMMIT`)
	pgtest.Await(t, "the late run is leased", func() bool { poll(); return leased[late] })
}

// S31: a statement that inserts very many runs does not keep others from being leased meanwhile.
func TestMassInsert(t *testing.T) {
	s, pool := psql(t)
	before := s.enqueue()
	s.do(`BEGIN; INSERT INTO workflow_run (type) SELECT 'a.b' FROM generate_series(1, 50000)`)
	if l := acquire(t, pool, 1); l[0].ID.String() != before {
		t.Errorf("leased %s, want %s", l[0].ID, before)
	}
	s.do(`COMMIT`)
	acquire(t, pool, 500)
	s.expect("events", s.do(`SELECT count(*) FROM workflow_event WHERE event_type = 'created'`), "50001")
}
