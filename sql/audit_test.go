package sql_test

import (
	"context"
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

func poller(db run.DB) *leasing.Poller {
	return &leasing.Poller{DB: db, Prefixes: []string{"a."}, Worker: "engine", Terms: terms}
}

func terms(string) leasing.Terms {
	return leasing.Terms{Length: time.Minute, Timeout: time.Hour, Room: -1}
}

// acquire leases n runs like a worker.
func acquire(t *testing.T, db run.DB, n int) []leasing.Lease {
	t.Helper()
	leases, _, err := poller(db).Acquire(t.Context(), n, n)
	if err != nil || len(leases) != n {
		t.Fatalf("leased %d of %d: %v", len(leases), n, err)
	}
	return leases
}

func settle(t *testing.T, db run.DB, verdict settling.Verdict, leases ...leasing.Lease) (refused int) {
	t.Helper()
	var outcomes []settling.Outcome
	for _, l := range leases {
		outcomes = append(outcomes, settling.Outcome{ID: l.ID, Token: l.Token, Verdict: verdict})
	}
	out, err := settling.Settle(t.Context(), db, "engine", outcomes)
	if err != nil {
		t.Error(err) // not Fatal: this may be another goroutine
	}
	return len(out)
}

// W45: a change that a person makes by bare SQL leaves one event, with who made it.
func TestEventsOfPeople(t *testing.T) {
	s, _ := psql(t)
	s.do(`SET application_name = 'ops'`)
	tests := []struct{ from, set, events string }{
		{"pending", `status = 'cancelled'`, "created cancelled"},
		{"leased", `status = 'pending'`, "created leased released"},
		{"leased", `status = 'succeeded'`, "created leased succeeded"},
		{"leased", `status = 'failed'`, "created leased failed"},
		{"leased", `status = 'cancelled'`, "created leased cancelled"},
		{"pending", `held_at = now()`, "created held"},
		{"pending", `deleted_at = now()`, "created deleted"},
		{"leased", `deleted_at = now()`, "created leased cancelled deleted"},
		{"pending", `status = 'cancelled', held_at = now(), deleted_at = now()`, "created cancelled deleted held"},
		{"pending", `priority = 1, run_at = now()`, "created"},
		{"leased", `lease_until = now() + interval '1 hour'`, "created leased"},
		{"failed", `status = 'failed'`, "created leased failed"},
	}
	for _, test := range tests {
		t.Run(test.from+" "+test.set, func(t *testing.T) {
			s := &session{t, s.conn}
			id := s.in(test.from)
			s.do(`UPDATE workflow_run SET ` + test.set + ` WHERE id = '` + id + `'`)
			s.expect("events", s.events(id), test.events)
			s.expect("anonymous", s.do(`SELECT count(*) FROM workflow_event WHERE workflow_id = '`+id+`' AND event_type NOT IN ('leased', 'started') AND actor NOT LIKE '% [ops]'`), "0")
		})
	}
	id := s.enqueue()
	s.do(`UPDATE workflow_run SET held_at = now(), deleted_at = now(), delete_reason = 'tidy' WHERE id = '` + id + `'`)
	s.do(`UPDATE workflow_run SET held_at = NULL WHERE id = '` + id + `'; UPDATE workflow_run SET deleted_at = NULL WHERE id = '` + id + `'`)
	s.expect("events", s.events(id), "created deleted held resumed undeleted")
	s.expect("reason", s.do(`SELECT data ->> 'reason' FROM workflow_event WHERE workflow_id = '`+id+`' AND event_type = 'deleted'`), "tidy")

	id = s.enqueue() // S36: by the owner, recorded
	s.byHand(`UPDATE workflow_run SET attempt = 2 WHERE id = '` + id + `'; UPDATE workflow_run SET attempt = 0 WHERE id = '` + id + `'`)
	s.expect("was", s.do(`SELECT data ->> 'attempt_was' FROM workflow_event WHERE workflow_id = '`+id+`' ORDER BY id DESC LIMIT 1`), "2")
}

// The functions leave the same events, once each, and none if they change nothing.
func TestEventsOfFunctions(t *testing.T) {
	s, _ := psql(t)
	id := s.do(`SELECT workflow_enqueue('a.b', idempotency_key => 'k')`)
	s.do(`SELECT workflow_enqueue('a.b', idempotency_key => 'k')`)
	s.lease(id)
	s.do(`UPDATE workflow_run SET status = 'failed' WHERE id = '` + id + `'`)
	for range 2 {
		s.do(`SELECT workflow_retry('` + id + `')`)
	}
	for range 2 {
		s.do(`SELECT workflow_cancel('` + id + `', 'enough')`)
	}
	for range 2 {
		s.do(`SELECT workflow_delete('` + id + `', 'tidy')`)
	}
	s.expect("events", s.events(id), "created leased failed requeued cancelled deleted")
	s.expect("reason", s.do(`SELECT data ->> 'reason' FROM workflow_event WHERE workflow_id = '`+id+`' AND event_type = 'cancelled'`), "cancelled: enough")
}

// A change that ends a lease records when the lease was taken and by whom, no matter who ended it: a person who
// cancels the run or takes the lease over, or the worker. workflow_event shows both ends.
func TestEventsOfLeases(t *testing.T) {
	s, pool := psql(t)
	s.do(`SET application_name = 'ops'`)
	cancelled, taken, settled, held := s.leased(), s.leased(), s.enqueue(), s.leased()
	leases := acquire(t, pool, 1)
	started := s.do(`SELECT string_agg(started_at::text, ' ' ORDER BY id) FROM workflow_run`)
	s.do(`UPDATE workflow_run SET status = 'cancelled' WHERE id = '` + cancelled + `'`)
	s.do(`UPDATE workflow_run SET lease_until = now() - interval '1 second' WHERE id = '` + taken + `'`)
	s.do(`UPDATE workflow_run SET lease_token = gen_random_uuid(), lease_no = 2, leased_by = 'worker 8', started_at = now(),
		lease_until = now() + interval '1 minute' WHERE id = '` + taken + `'`)
	settle(t, pool, settling.Succeed, leases...)
	for id, want := range map[string]string{
		cancelled: "created - [ops], leased 1 worker 7, cancelled 1 [ops]",
		taken:     "created - [ops], leased 1 worker 7, expired 1 [ops], leased 2 worker 8",
		settled:   "created - [ops], leased 1 engine, succeeded 1 engine",
		held:      "created - [ops], leased 1 worker 7",
	} {
		s.expect("events", s.do(`
			SELECT string_agg(concat_ws(' ', event_type, coalesce(lease_no::text, '-'), replace(actor, session_user || ' ', '')), ', ' ORDER BY id)
			FROM workflow_event WHERE event_type <> 'started' AND workflow_id = '`+id+`'`), want)
	}
	s.expect("first leases", s.do(`
		SELECT string_agg(created_at::text, ' ' ORDER BY workflow_id) FROM workflow_event WHERE event_type = 'leased' AND lease_no = 1`), started)
	s.expect("who enqueued", s.of(settled, `created_by = session_user || ' [ops]'`), "t")
}

// A success that a person declares is recorded as the person's, whatever else the statement sets, and whoever settled
// an earlier attempt.
func TestEventsOfDeclaredSuccess(t *testing.T) {
	s, pool := psql(t)
	s.do(`SET application_name = 'ops'`)
	for _, set := range []string{
		`status = 'succeeded'`,
		`status = 'succeeded', lease_token = NULL, lease_until = NULL, leased_by = NULL`,
		`status = 'succeeded', lease_token = NULL, lease_until = NULL, leased_by = NULL, finished_at = now(), updated_at = clock_timestamp()`,
	} {
		id := s.enqueue()
		settle(t, pool, settling.Release, acquire(t, pool, 1)...)
		s.do(`UPDATE workflow_run SET run_at = now() WHERE id = '` + id + `'`)
		acquire(t, pool, 1)
		s.do(`UPDATE workflow_run SET ` + set + ` WHERE id = '` + id + `'`)
		s.expect("events", s.events(id), "created leased released leased succeeded")
		s.expect("by ops", s.do(`SELECT actor LIKE '% [ops]' FROM workflow_event WHERE workflow_id = '`+id+`' AND event_type = 'succeeded'`), "t")
	}
}

// However odd the times in rows are, the view can be read.
func TestEventsOfOddTimes(t *testing.T) {
	s, _ := psql(t)
	s.do(`SET session_replication_role = replica`)
	s.do(`INSERT INTO workflow_run (type, created_at) VALUES ('a.b', 'infinity'), ('a.b', '-infinity'), ('a.b', '200000-01-01')`)
	s.expect("events", s.do(`SELECT count(*) FROM (SELECT * FROM workflow_event ORDER BY id) AS e`), "3")
}

// Each statement of the engine leaves exactly one event per run, written by that statement.
func TestEventsOfEngine(t *testing.T) {
	s, pool := psql(t)
	id := s.enqueue()
	one := func() []leasing.Lease {
		s.do(`UPDATE workflow_run SET run_at = now()`)
		return acquire(t, pool, 1)
	}
	settle(t, pool, settling.Release, one()...)
	settle(t, pool, settling.Postpone, one()...)
	settle(t, pool, settling.TryAgain, one()...)
	l := one()
	if _, _, err := leasing.Extend(t.Context(), pool, []leasing.Held{{ID: l[0].ID, Token: l[0].Token, Length: time.Minute}}); err != nil {
		t.Fatal(err)
	}
	pgtest.Elapse(t, pool, 2*time.Minute)
	r := &leasing.Reclaimer{DB: pool, Worker: "engine", Length: time.Minute}
	pgtest.Await(t, "the expired lease is taken back", func() bool {
		again, _, err := r.Reclaim(t.Context(), 1)
		if err != nil {
			t.Fatal(err)
		}
		return again == 1
	})
	settle(t, pool, settling.Fail, one()...)
	s.do(`SELECT workflow_retry('` + id + `')`)
	settle(t, pool, settling.Succeed, one()...)
	s.expect("events", s.events(id),
		"created leased released leased postponed leased retried leased expired leased failed requeued leased succeeded")
	s.expect("events by others", s.do(`SELECT string_agg(event_type, ' ' ORDER BY id) FROM workflow_event WHERE actor <> 'engine'`), "created requeued")
	s.expect("with a lease number", s.do(`SELECT count(*) FROM workflow_event WHERE actor = 'engine' AND (lease_no IS NULL OR attempt IS NULL)`), "0")
}

// With workflow.audit = off no change is recorded, no matter who makes it, except by the functions that operators
// call. The setting stays off.
func TestAuditOff(t *testing.T) {
	s, pool := psql(t)
	off := `SET workflow.audit = 'off'`
	config := pool.Config()
	config.AfterConnect = func(ctx context.Context, conn *pgx.Conn) error {
		_, err := conn.Exec(ctx, off)
		return err
	}
	engine, err := pgxpool.NewWithConfig(t.Context(), config)
	if err != nil {
		t.Fatal(err)
	}
	defer engine.Close()
	s.do(off)
	id := s.enqueue()
	settle(t, engine, settling.Fail, acquire(t, engine, 1)...)
	s.do(`SELECT workflow_retry('` + id + `')`)
	s.do(`UPDATE workflow_run SET held_at = now(), deleted_at = now()`)
	s.expect("history", s.do(`SELECT count(*) FROM workflow_history`), "1")
	s.expect("events", s.events(id), "created requeued")
	s.expect("setting", s.do(`SHOW workflow.audit`), "off")
}

// A statement of the engine writes the history of its own changes only: what a user changes later in the same
// transaction is still recorded. This also holds if nothing was settled, for any number of runs, and if a cancel won
// the race at the last moment.
func TestAuditAfterSettle(t *testing.T) {
	s, pool := psql(t)
	check := func(t *testing.T, tx pgx.Tx) {
		t.Helper()
		s := &session{t, tx.Conn()}
		id := s.enqueue()
		s.do(`UPDATE workflow_run SET held_at = now() WHERE id = '` + id + `'`)
		s.do(`SELECT workflow_cancel('` + id + `')`)
		s.expect("events", s.events(id), "created held cancelled")
	}
	begin := func(t *testing.T) pgx.Tx {
		tx, err := pool.Begin(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { tx.Rollback(t.Context()) })
		return tx
	}
	t.Run("settled", func(t *testing.T) {
		tx := begin(t)
		s.enqueue()
		settle(t, tx, settling.Succeed, acquire(t, tx, 1)...)
		check(t, tx)
	})
	for _, n := range []int{1, 7, 500} {
		t.Run("refused", func(t *testing.T) {
			tx := begin(t)
			leases := make([]leasing.Lease, n)
			for i := range leases {
				leases[i].ID, leases[i].Token = uuid.New(), uuid.New()
			}
			if refused := settle(t, tx, settling.Succeed, leases...); refused != n {
				t.Fatalf("refused %d of %d", refused, n)
			}
			check(t, tx)
		})
	}
	t.Run("cancelled meanwhile", func(t *testing.T) {
		s.enqueue()
		l := acquire(t, pool, 1)
		s.do(`BEGIN; SELECT workflow_cancel('` + l[0].ID.String() + `')`)
		tx := begin(t)
		refused := make(chan int)
		go func() { refused <- settle(t, tx, settling.Succeed, l...) }()
		pgtest.Blocked(t, pool, 1)
		s.do(`COMMIT`)
		if n := <-refused; n != 1 {
			t.Fatal("settled a cancelled run")
		}
		check(t, tx)
	})
}
