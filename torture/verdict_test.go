package main

import (
	"cmp"
	"context"
	"encoding/json"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"reflect"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"

	"github.com/simple-workflow/simple-workflow/internal/pgserver"
)

// Clean data breaks no rule, and each rule notices the fault that it is meant for: that fault alone, or together with
// rules that it necessarily breaks, too.
func TestPlantedFaults(t *testing.T) {
	all, err := rules()
	if err != nil {
		t.Fatal(err)
	}
	conn := judged(t)
	base := &stage{t: t, conn: conn, db: conn}
	for _, tell := range stories {
		tell(base)
	}
	// Strikes at workers there must not excuse what follows.
	base.simple("an hour later", `
		SELECT t.elapse(id, '1 hour') FROM workflow_run;
		UPDATE t.turn SET at = at - interval '1 hour';
		UPDATE t.movement SET at = at - interval '1 hour';
		UPDATE t.firing SET at = at - interval '1 hour';
		UPDATE chaos_effect SET at = at - interval '1 hour';
		UPDATE t.ledger
		SET at = at - interval '1 hour', line = line || CASE WHEN line ? 'until'
			THEN jsonb_build_object('until', (line->>'until')::timestamptz - interval '1 hour') ELSE '{}' END
		WHERE kind IN ('exit', 'strike')`)
	if !t.Run("clean", func(t *testing.T) {
		undone(t, conn, func(s *stage) {
			if got := s.verdict(); len(got) > 0 {
				t.Errorf("broken: %v", got)
			}
			s.script("figures.sql")
		})
	}) {
		return
	}
	var planted []string
	for _, p := range plants {
		planted = append(planted, p.breaks[0])
		t.Run(strings.ReplaceAll(p.breaks[0]+" "+p.name, " ", "-"), func(t *testing.T) {
			undone(t, conn, func(s *stage) {
				s.last = 1000
				culprit := p.plant(s)
				want := map[string]string{}
				for _, rule := range p.breaks {
					want[rule] = culprit.String()
				}
				if s.edited.old != "" {
					t.Errorf("no statement has %q", s.edited.old)
				}
				if got := s.verdict(); !maps.Equal(got, want) {
					t.Errorf("broken: %v, want %v", got, want)
				}
				none := slices.Contains([]string{"I01", "I15b", "I17", "I18", "I18b", "I19", "I48", "I48b", "I50"}, p.breaks[0]) // what is lost, or an event
				if told, err := story(t.Context(), s.db, culprit); err != nil || len(told) == 0 && !none {
					t.Errorf("its story is %q, %v", told, err)
				}
			})
		})
	}
	slices.Sort(planted)
	var named []string
	for _, rule := range all {
		named = append(named, number(rule))
	}
	slices.Sort(named)
	if planted = slices.Compact(planted); !reflect.DeepEqual(planted, named) {
		t.Errorf("faults are planted for %v, rules are %v", planted, named)
	}
}

// number is the beginning of a rule's name.
func number(rule string) string {
	n, _, _ := strings.Cut(rule, " ")
	return n
}

// judged returns a connection to a database that is ready for stories: with the product's schema, the torture's own
// tables, and those of the ledgers.
func judged(t *testing.T) *pgx.Conn {
	t.Helper()
	server, err := pgserver.Start(t.Context(), pgserver.Options{})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(server.Stop)
	if err := onServer(t.Context(), server, "postgres", `CREATE DATABASE `+database); err != nil {
		t.Fatal(err)
	}
	conn, err := pgx.Connect(t.Context(), server.URL(database))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { conn.Close(context.Background()) })
	migrations, err := filepath.Glob("../sql/*.sql")
	if err != nil || len(migrations) == 0 {
		t.Fatalf("migrations %v, error %v", migrations, err)
	}
	s := &stage{t: t, conn: conn, db: conn}
	s.simple("versions", `CREATE TABLE workflow_schema (version integer)`) // workflowctl maintains this table
	for _, name := range append(migrations, "../sql/roles/create.sql") {
		text, err := os.ReadFile(name)
		if err != nil {
			t.Fatal(err)
		}
		s.simple(name, string(text))
	}
	s.script("setup.sql")
	s.simple("tables", `
		CREATE TABLE chaos_effect (
			run_id   uuid        NOT NULL,
			lease_no bigint      NOT NULL,
			key      text        NOT NULL,
			at       timestamptz NOT NULL DEFAULT clock_timestamp(),
			tag      text,
			node     text,
			undoes   uuid
		);
		CREATE TABLE t.ledger (kind text NOT NULL, at timestamptz NOT NULL, line jsonb NOT NULL);
		CREATE TABLE t.exec_log (event text, run uuid, lease_no bigint, worker text, at timestamptz, outcome text);
		CREATE TABLE t.said (worker text NOT NULL, what text NOT NULL, n bigint NOT NULL);
		CREATE TABLE t.aside (kind text, id text, sqlstate text, message text);
		INSERT INTO t.said VALUES ('w1', 'stale settle refused', 1), ('w1', 'lease is gone', 1), ('w2', 'deadlock', 2);

		-- Lets time pass for one run: all that has happened to it did so longer ago. (run, by)
		CREATE FUNCTION t.elapse(uuid, interval) RETURNS void LANGUAGE sql SET session_replication_role = replica AS $$
			UPDATE workflow_run
			SET created_at = created_at - $2, updated_at = updated_at - $2, run_at = run_at - $2, started_at = started_at - $2,
			    finished_at = finished_at - $2, lease_until = lease_until - $2, deadline_at = deadline_at - $2, deleted_at = deleted_at - $2
			WHERE id = $1;
			UPDATE workflow_history SET created_at = created_at - $2, started_at = started_at - $2 WHERE workflow_id = $1;
			UPDATE t.transition
			SET at = at - $2, begun = begun - $2, lease_until = lease_until - $2, lease_until_was = lease_until_was - $2,
			    deadline_at = deadline_at - $2, run_at = run_at - $2
			WHERE run = $1;
			UPDATE t.exec_log SET at = at - $2 WHERE run = $1;
			UPDATE t.ledger
			SET at = at - $2, line = line || CASE WHEN line ? 'run_at'
				THEN jsonb_build_object('run_at', (line->>'run_at')::timestamptz - $2) ELSE '{}' END
			WHERE line->>'run' = $1::text
		$$`)
	return conn
}

// undone calls f in a transaction that is rolled back.
func undone(t *testing.T, conn *pgx.Conn, f func(*stage)) {
	t.Helper()
	tx, err := conn.Begin(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	defer func() {
		if err := tx.Rollback(context.Background()); err != nil {
			t.Error(err)
		}
	}()
	f(&stage{t: t, conn: conn, db: tx})
}

// A stage is where stories of runs are played: each step writes into the database, the ledgers and the execution logs
// what the real system would write.
type stage struct {
	t    *testing.T
	conn *pgx.Conn
	db   interface {
		Exec(ctx context.Context, sql string, args ...any) (pgconn.CommandTag, error)
		Query(ctx context.Context, sql string, args ...any) (pgx.Rows, error)
	}
	last   int  // the last number of a run
	edited edit // a defect for the next statement that contains the text
}

// simple executes several statements.
func (s *stage) simple(name, text string) {
	s.t.Helper()
	if _, err := s.conn.PgConn().Exec(s.t.Context(), text).ReadAll(); err != nil {
		s.t.Fatalf("%s: %v", name, err)
	}
}

func (s *stage) script(name string) {
	s.t.Helper()
	text, err := scripts.ReadFile(name)
	if err != nil {
		s.t.Fatal(err)
	}
	s.simple(name, string(text))
}

// verdict returns the numbers of the broken rules, and the runs that break them.
func (s *stage) verdict() map[string]string {
	s.t.Helper()
	s.script("verdict.sql")
	rows, _ := s.db.Query(s.t.Context(), `SELECT rule, array_to_string(examples, ' ') FROM t.invariant WHERE n > 0`)
	got := map[string]string{}
	var rule, runs string
	if _, err := pgx.ForEachRow(rows, []any{&rule, &runs}, func() error {
		got[number(rule)] = runs
		return nil
	}); err != nil {
		s.t.Fatal(err)
	}
	return got
}

// do executes a statement that affects one row, under the name of a program.
func (s *stage) do(app, sql string, args ...any) {
	s.t.Helper()
	if s.edited.old != "" && strings.Contains(sql, s.edited.old) {
		sql = strings.Replace(sql, s.edited.old, s.edited.new, 1)
		s.edited = edit{}
	}
	if _, err := s.db.Exec(s.t.Context(), `SELECT set_config('application_name', $1, false), set_config('workflow.advance', 'on', false), set_config('workflow.override', 'a fault is planted', false)`, app); err != nil {
		s.t.Fatal(err)
	}
	switch tag, err := s.db.Exec(s.t.Context(), sql, args...); {
	case err != nil:
		s.t.Fatalf("%v\n%s", err, sql)
	case tag.RowsAffected() != 1 && (tag.Insert() || tag.Update() || tag.Delete()):
		s.t.Fatalf("%s\n%s", tag, sql)
	}
}

// but gives the next statement that contains the text old a defect.
func (s *stage) but(old, text string) *stage {
	s.edited = edit{old: old, new: text}
	return s
}

// without disables a trigger that would refuse a defect, until the transaction ends.
func (s *stage) without(trigger string) {
	s.do("torture", `ALTER TABLE workflow_run DISABLE TRIGGER `+trigger)
}

// tell writes an entry into the ledger.
func (s *stage) tell(e entry) {
	s.t.Helper()
	if e.At.IsZero() {
		e.At = time.Now()
	}
	line, err := json.Marshal(e)
	if err != nil {
		s.t.Fatal(err)
	}
	s.do("torture", `INSERT INTO t.ledger VALUES ($1, $2, $3)`, e.Kind, e.At, line)
}

// wait lets time pass for a run.
func (s *stage) wait(id uuid.UUID, d time.Duration) {
	s.do("torture", `SELECT t.elapse($1, $2)`, id, d)
}

const seconds = time.Second

// A wish is what a client wants of a run, apart from its case.
type wish struct {
	emit   int
	max    int // attempts; 0 for 5
	delay  time.Duration
	key    string
	answer string // empty: done
}

// types are the types of the cases that are played here; the others are chaos.sleep.
var types = map[string]string{
	"effect": "chaos.effect", "delayed": "chaos.effect", "fail": "chaos.fail", "permanent": "chaos.fail", "external": "chaos.external",
	"deaf": "chaos.ignorecancel", "overdue": "chaos.ignorecancel", "panic": "chaos.panic", "badresult": "chaos.result",
	"exit": "chaos.exit",
}

// order is what a client sends and records.
func (s *stage) order(name string, w wish) entry {
	s.last++
	id := fmt.Sprintf("00000000-0000-4000-8000-%012d", s.last)
	e := entry{Kind: "enqueue", Run: id, Type: cmp.Or(types[name], "chaos.sleep"), Case: name, Emit: w.emit, Key: w.key, Answer: cmp.Or(w.answer, "done")}
	e.Payload = json.RawMessage(fmt.Sprintf(`{"ms": 1, "key": %q, "emit": %d, "number": 9007199254740995}`, id, w.emit))
	if w.delay > 0 {
		due := time.Now().Add(w.delay)
		e.RunAt = &due
	}
	return e
}

// enqueue enqueues a run of a case as a client, and records the answer.
func (s *stage) enqueue(name string, w wish) uuid.UUID {
	s.t.Helper()
	e := s.order(name, w)
	s.insert(e, w)
	s.tell(e)
	return uuid.MustParse(e.Run)
}

func (s *stage) insert(e entry, w wish) {
	s.t.Helper()
	s.do("client", `
		INSERT INTO workflow_run (id, type, payload, run_at, max_attempts, idempotency_key)
		VALUES ($1, $2, $3, clock_timestamp() + $4::interval, $5, nullif($6, ''))`,
		e.Run, e.Type, e.Payload, w.delay, cmp.Or(w.max, 5), e.Key)
}

// Names of workers, as they give them.
const (
	w1 = "w1-0a1b2c3d"
	w2 = "w2-4e5f6a7b"
)

func app(worker string) string { return worker[:2] }

// self executes a statement of the engine that writes its own history.
func (s *stage) self(worker, sql string, args ...any) {
	s.t.Helper()
	s.do(app(worker), `SELECT set_config('workflow.audit', 'self', false)`)
	s.do(app(worker), sql, args...)
	s.do(app(worker), `SELECT set_config('workflow.audit', '', false)`)
}

// lease is what leasing.Poller does.
func (s *stage) lease(id uuid.UUID, worker string) {
	s.t.Helper()
	s.do(app(worker), `
		UPDATE workflow_run
		SET status = 'leased', lease_token = gen_random_uuid(), leased_by = $2, lease_no = lease_no + 1,
		    attempt = attempt + CASE WHEN attempt < max_attempts THEN 1 ELSE 0 END,
		    started_at = statement_timestamp(), updated_at = statement_timestamp(),
		    lease_until = statement_timestamp() + $3::interval,
		    deadline_at = statement_timestamp() + CASE WHEN attempt < max_attempts THEN $4 ELSE '0' END::interval
		WHERE id = $1`, id, worker, leaseLength, runLimit)
}

// leaseAhead is what leasing.Poller does with a run for which the worker has no slot yet.
func (s *stage) leaseAhead(id uuid.UUID, worker string) {
	s.t.Helper()
	s.but(`gen_random_uuid()`, `encode(set_byte(uuid_send(gen_random_uuid()), 6, 128), 'hex')::uuid`).lease(id, worker)
}

// mark stores that the handler of a run that was leased ahead may begin, as leasing.Begin does.
func (s *stage) mark(id uuid.UUID, worker string) {
	s.t.Helper()
	s.do(app(worker), `INSERT INTO workflow_begun (token, begun) SELECT lease_token, true FROM workflow_run WHERE id = $1`, id)
}

// start writes the line of a handler that begins.
func (s *stage) start(id uuid.UUID) {
	s.t.Helper()
	s.do("torture", `
		INSERT INTO t.exec_log
		SELECT 'start', id, lease_no, leased_by, date_trunc('milliseconds', clock_timestamp()), ''
		FROM workflow_run WHERE id = $1`, id)
}

// end writes the line of a handler that ends, even if its lease is gone.
func (s *stage) end(id uuid.UUID, outcome string) {
	s.t.Helper()
	s.do("torture", `
		INSERT INTO t.exec_log
		SELECT 'end', run, lease_no, worker, date_trunc('milliseconds', clock_timestamp()), $2
		FROM t.exec_log WHERE run = $1 AND event = 'start' ORDER BY at DESC LIMIT 1`, id, outcome)
}

// work leases a run and starts its handler.
func (s *stage) work(id uuid.UUID, worker string) {
	s.t.Helper()
	s.lease(id, worker)
	s.start(id)
	s.wait(id, 50*time.Millisecond)
}

// beat is a heartbeat, as leasing.Extend sends it.
func (s *stage) beat(id uuid.UUID, worker string) {
	s.t.Helper()
	s.do(app(worker), `
		UPDATE workflow_run
		SET lease_until = least(clock_timestamp() + $2::interval, CASE WHEN deadline_at > started_at THEN deadline_at END),
		    updated_at = statement_timestamp()
		WHERE id = $1`, id, leaseLength)
}

// settle records an outcome, as run.Settle does. code is the code of a failure.
func (s *stage) settle(id uuid.UUID, worker, verdict, code string) {
	s.t.Helper()
	if verdict != "succeeded" {
		s.do(app(worker), `
			INSERT INTO workflow_history (workflow_id, event_type, attempt, lease_no, started_at, actor, data)
			SELECT id, $2, attempt, lease_no, started_at, $3, jsonb_build_object('code', nullif($4, ''))
			FROM workflow_run WHERE id = $1`, id, verdict, worker, code)
	}
	s.self(worker, `
		UPDATE workflow_run
		SET status = CASE $2 WHEN 'succeeded' THEN 'succeeded' WHEN 'failed' THEN 'failed' ELSE 'pending' END,
		    result = CASE $2 WHEN 'succeeded' THEN '{}'::jsonb ELSE result END,
		    error = coalesce(CASE WHEN $4 <> '' THEN jsonb_build_object('code', $4) END, error),
		    attempt = attempt - CASE WHEN $2 IN ('postponed', 'released') AND attempt > 0
		                               AND deadline_at IS DISTINCT FROM started_at THEN 1 ELSE 0 END,
		    suspect = suspect AND $2 = 'released',
		    run_at = CASE WHEN $2 IN ('succeeded', 'failed') THEN run_at
		                  ELSE statement_timestamp() + CASE $2 WHEN 'retried' THEN '200 ms' ELSE '0' END::interval END,
		    finished_at = CASE WHEN $2 IN ('succeeded', 'failed') THEN statement_timestamp() END,
		    settled_token = lease_token, settled_by = $3, updated_at = statement_timestamp(),
		    lease_token = NULL, lease_until = NULL, leased_by = NULL, deadline_at = NULL
		WHERE id = $1`, id, verdict, worker, code)
}

// effect writes what the handler of chaos.effect writes with its success.
func (s *stage) effect(id uuid.UUID, worker string) {
	s.t.Helper()
	s.do(app(worker), `INSERT INTO chaos_effect SELECT id, lease_no, payload->>'key' FROM workflow_run WHERE id = $1`, id)
}

// emit appends an event that comes with a success.
func (s *stage) emit(id uuid.UUID, worker string, n int) {
	s.t.Helper()
	s.do(app(worker), `
		SELECT outbox_emit(id, 'chaos.effect', jsonb_build_object('lease_no', lease_no, 'n', $2::int))
		FROM workflow_run WHERE id = $1`, id, n)
}

// succeed ends the handler and records its success, with effect and events.
func (s *stage) succeed(id uuid.UUID, worker string, events int) {
	s.t.Helper()
	s.end(id, "ok")
	for n := range events {
		s.emit(id, worker, n)
	}
	s.effect(id, worker)
	s.settle(id, worker, "succeeded", "")
}

// finish is succeed for a run that leaves nothing but its status.
func (s *stage) finish(id uuid.UUID, worker string) {
	s.t.Helper()
	s.end(id, "ok")
	s.settle(id, worker, "succeeded", "")
}

// fail ends the handler with an error, and records it.
func (s *stage) fail(id uuid.UUID, worker, verdict string) {
	s.t.Helper()
	s.end(id, "error")
	s.settle(id, worker, verdict, "handler_error")
	s.wait(id, seconds)
}

// expire takes back a lease, as leasing.Reclaimer does.
func (s *stage) expire(id uuid.UUID, worker string) {
	s.t.Helper()
	s.do(app(worker), `
		INSERT INTO workflow_history (workflow_id, created_at, event_type, attempt, lease_no, started_at, actor, leased_by)
		SELECT id, statement_timestamp(), 'expired', attempt, lease_no, started_at, $2, leased_by
		FROM workflow_run WHERE id = $1`, id, worker)
	s.self(worker, `
		UPDATE workflow_run w
		SET status = CASE WHEN w.attempt < w.max_attempts THEN 'pending' ELSE 'leased' END,
		    suspect = true, updated_at = statement_timestamp(),
		    error = jsonb_build_object('code', 'lease_expired', 'attempt', w.attempt, 'worker', w.leased_by, 'lease_no', w.lease_no),
		    run_at = CASE WHEN w.attempt < w.max_attempts THEN statement_timestamp() + interval '250 ms' ELSE w.run_at END,
		    lease_token = CASE WHEN w.attempt >= w.max_attempts THEN gen_random_uuid() END,
		    lease_no = w.lease_no + CASE WHEN w.attempt >= w.max_attempts THEN 1 ELSE 0 END,
		    leased_by = CASE WHEN w.attempt >= w.max_attempts THEN $2 END,
		    lease_until = CASE WHEN w.attempt >= w.max_attempts THEN clock_timestamp() + $3::interval END,
		    started_at = CASE WHEN w.attempt >= w.max_attempts THEN statement_timestamp() ELSE w.started_at END,
		    deadline_at = CASE WHEN w.attempt >= w.max_attempts THEN statement_timestamp() END
		WHERE id = $1`, id, worker, leaseLength)
	s.wait(id, seconds)
}

// spare takes back the lease of a suspect that was not alone at its last attempt, as leasing.Reclaimer does.
func (s *stage) spare(id uuid.UUID, worker string) {
	s.t.Helper()
	s.self(worker, `UPDATE workflow_run SET alone = false, updated_at = statement_timestamp() WHERE id = $1`, id)
	s.do(app(worker), `
		INSERT INTO workflow_history (workflow_id, created_at, event_type, attempt, lease_no, started_at, actor, leased_by)
		SELECT id, statement_timestamp(), 'expired', attempt, lease_no, started_at, $2, leased_by
		FROM workflow_run WHERE id = $1`, id, worker)
	s.self(worker, `
		UPDATE workflow_run
		SET status = 'pending', attempt = attempt - 1, alone = true, updated_at = statement_timestamp(), run_at = statement_timestamp() + interval '250 ms',
		    lease_token = NULL, leased_by = NULL, lease_until = NULL, deadline_at = NULL
		WHERE id = $1`, id)
	s.wait(id, seconds)
}

// unbegun takes back a lease ahead that was not begun, as leasing.Reclaimer does.
func (s *stage) unbegun(id uuid.UUID, worker string) {
	s.t.Helper()
	s.do(app(worker), `INSERT INTO workflow_begun (token, begun) SELECT lease_token, false FROM workflow_run WHERE id = $1 ON CONFLICT (token) DO UPDATE SET at = excluded.at`, id)
	s.do(app(worker), `
		INSERT INTO workflow_history (workflow_id, created_at, event_type, attempt, lease_no, started_at, actor, leased_by, data)
		SELECT id, statement_timestamp(), 'released', attempt, lease_no, started_at, $2, leased_by, '{"reason": "its worker has shown no sign of life, and had not begun it"}'
		FROM workflow_run WHERE id = $1`, id, worker)
	s.self(worker, `
		UPDATE workflow_run
		SET status = 'pending', attempt = attempt - 1, updated_at = statement_timestamp(),
		    lease_token = NULL, leased_by = NULL, lease_until = NULL, deadline_at = NULL
		WHERE id = $1`, id)
	s.wait(id, seconds)
}

// doubt gives a lease back whose answer was lost, as leasing.Poller does.
func (s *stage) doubt(id uuid.UUID, worker string) {
	s.t.Helper()
	s.do(app(worker), `
		INSERT INTO workflow_history (workflow_id, event_type, attempt, lease_no, started_at, actor, data)
		SELECT id, 'released', attempt, lease_no, started_at, $2, '{"reason": "the answer to the lease was lost"}'
		FROM workflow_run WHERE id = $1`, id, worker)
	s.self(worker, `
		UPDATE workflow_run
		SET status = 'pending', run_at = now(), updated_at = now(),
		    attempt = attempt - CASE WHEN deadline_at = started_at THEN 0 ELSE 1 END,
		    lease_token = NULL, lease_until = NULL, leased_by = NULL, deadline_at = NULL
		WHERE id = $1`, id)
}

// call makes a client intervene through one of the product's functions, and records the answer.
func (s *stage) call(kind string, id uuid.UUID) {
	s.t.Helper()
	sent := time.Now()
	e := entry{Kind: kind, Run: id.String(), Sent: &sent, Answer: s.ask(kind, id)}
	s.tell(e)
}

func (s *stage) ask(kind string, id uuid.UUID) string {
	s.t.Helper()
	sql := map[string]string{
		"cancel": `SELECT workflow_cancel($1, 'torture')`,
		"retry":  `SELECT workflow_retry($1)`,
		"delete": `SELECT workflow_delete($1, 'torture')`,
		"hold":   `WITH u AS (UPDATE workflow_run SET held_at = now() WHERE id = $1 RETURNING 1) SELECT count(*)::text FROM u`,
		"resume": `WITH u AS (UPDATE workflow_run SET held_at = NULL WHERE id = $1 RETURNING 1) SELECT count(*)::text FROM u`,
	}[kind]
	s.do("client", `SELECT 1`)
	rows, _ := s.db.Query(s.t.Context(), sql, id)
	answer, err := pgx.CollectExactlyOneRow(rows, pgx.RowTo[string])
	if err != nil {
		s.t.Fatal(err)
	}
	return answer
}

// aside makes the product report that it cannot lease a run.
func (s *stage) aside(id uuid.UUID) {
	s.t.Helper()
	s.do("torture", `INSERT INTO t.aside VALUES ('run', $1::uuid::text, '22003', 'integer out of range')`, id)
}

// exit records the end of a worker's process some time ago.
func (s *stage) exit(worker string, ago time.Duration) {
	s.t.Helper()
	s.tell(entry{Kind: "exit", At: time.Now().Add(-ago), Worker: app(worker), Code: -9, Answer: "kill"})
}

// strike records a fault that hit somebody; from and until are how long ago it began and ended.
func (s *stage) strike(fault, whom string, from, until time.Duration) {
	s.t.Helper()
	end := time.Now().Add(-until)
	s.tell(entry{Kind: "strike", At: time.Now().Add(-from), Fault: fault, Worker: whom, Until: &end})
}

// stories are legal histories.
var stories = []func(*stage){
	func(s *stage) { // succeeds at once
		id := s.enqueue("effect", wish{emit: 2})
		s.work(id, w1)
		s.wait(id, seconds)
		s.beat(id, w1)
		s.succeed(id, w1, 2)
		s.call("cancel", id)
	},
	func(s *stage) { // the second attempt succeeds
		id := s.enqueue("fail", wish{})
		s.work(id, w1)
		s.fail(id, w1, "retried")
		s.work(id, w2)
		s.finish(id, w2)
	},
	func(s *stage) { // a worker is killed, and another continues
		id := s.enqueue("effect", wish{emit: 1})
		s.work(id, w1)
		s.wait(id, 2*seconds)
		s.exit(w1, 0)
		s.wait(id, 2*seconds)
		s.expire(id, w2)
		s.work(id, w2)
		s.succeed(id, w2, 1)
	},
	func(s *stage) { // a worker is killed before it can record an outcome
		id := s.enqueue("effect", wish{})
		s.work(id, w1)
		s.end(id, "ok")
		s.exit(w1, 0)
		s.wait(id, 4*seconds)
		s.expire(id, w2)
		s.work(id, w2)
		s.succeed(id, w2, 0)
	},
	func(s *stage) { // a worker freezes, and learns that it has lost its lease
		id := s.enqueue("sleep", wish{})
		s.work(id, w1)
		s.wait(id, 4*seconds)
		s.expire(id, w2)
		s.lease(id, w2)
		s.end(id, "ok")
		s.start(id)
		s.finish(id, w2)
	},
	func(s *stage) { // the row is locked until the lease is over
		id := s.enqueue("sleep", wish{})
		s.work(id, w1)
		s.end(id, "ok")
		s.wait(id, 4*seconds)
		s.strike("rows", "all "+id.String(), 4*seconds, 0)
		s.expire(id, w2)
		s.work(id, w2)
		s.finish(id, w2)
	},
	func(s *stage) { // everything is blocked until the lease is over
		id := s.enqueue("effect", wish{emit: 1})
		s.work(id, w1)
		s.end(id, "ok")
		s.wait(id, 4*seconds)
		s.strike("storm", "all", 5*seconds, 0)
		s.expire(id, w2)
		s.work(id, w2)
		s.succeed(id, w2, 1)
	},
	func(s *stage) { // cancelled during execution, while waiting, and too late for a deaf handler
		id := s.enqueue("effect", wish{emit: 1})
		s.work(id, w1)
		s.call("cancel", id)
		s.end(id, "cancelled")
		id = s.enqueue("sleep", wish{})
		s.call("cancel", id)
		id = s.enqueue("deaf", wish{})
		s.work(id, w1)
		s.call("cancel", id)
		s.end(id, "ok")
	},
	func(s *stage) { // failed for good; failed, and retried by an operator
		id := s.enqueue("permanent", wish{})
		s.work(id, w1)
		s.fail(id, w1, "failed")
		id = s.enqueue("fail", wish{max: 1})
		s.work(id, w1)
		s.fail(id, w1, "failed")
		s.call("retry", id)
		s.work(id, w2)
		s.finish(id, w2)
	},
	func(s *stage) { // a panic, and a result that cannot be stored
		id := s.enqueue("panic", wish{max: 2})
		for _, verdict := range []string{"retried", "failed"} {
			s.work(id, w1)
			s.end(id, "panic")
			s.settle(id, w1, verdict, "panic")
			s.wait(id, seconds)
		}
		id = s.enqueue("badresult", wish{})
		s.work(id, w1)
		s.end(id, "ok")
		s.settle(id, w1, "failed", "result")
	},
	func(s *stage) { // a run that ends its process, again and again
		id := s.enqueue("exit", wish{max: 2})
		for range 2 {
			s.work(id, w1)
			s.wait(id, 4*seconds)
			s.expire(id, w2)
		}
		s.settle(id, w2, "released", "") // the worker stops and has not started it yet
		s.lease(id, w1)
		s.settle(id, w1, "failed", "lease_expired")
	},
	func(s *stage) { // a suspect at its last attempt, beside which another run ended the process
		id := s.enqueue("sleep", wish{max: 2})
		s.work(id, w1)
		s.wait(id, 4*seconds)
		s.expire(id, w2)
		s.work(id, w1)
		s.wait(id, 4*seconds)
		s.spare(id, w1) // the new worker in the dead one's slot
		s.work(id, w2)
		s.finish(id, w2)
	},
	func(s *stage) { // workers are killed before they begin what they have leased ahead; the new one in the dead one's slot takes it back, or another
		id := s.enqueue("effect", wish{max: 1, emit: 1})
		for _, by := range []string{w1, w2} {
			s.leaseAhead(id, w1)
			s.exit(w1, 0)
			s.wait(id, 4*seconds)
			s.unbegun(id, by)
		}
		s.work(id, w2)
		s.succeed(id, w2, 1)
	},
	func(s *stage) { // leased ahead, and begun: the first worker is killed, the second one succeeds
		id := s.enqueue("effect", wish{max: 2})
		s.leaseAhead(id, w1)
		s.mark(id, w1)
		s.start(id)
		s.exit(w1, 0)
		s.wait(id, 4*seconds)
		s.expire(id, w2)
		s.leaseAhead(id, w2)
		s.mark(id, w2)
		s.start(id)
		s.succeed(id, w2, 0)
	},
	func(s *stage) { // leased ahead, and given back: the worker stops, or never got the answer; then it is cancelled
		id := s.enqueue("sleep", wish{})
		s.leaseAhead(id, w1)
		s.settle(id, w1, "released", "")
		s.leaseAhead(id, w1)
		s.doubt(id, w1)
		s.leaseAhead(id, w2)
		s.call("cancel", id)
	},
	func(s *stage) { // an exhausted run is leased among those ahead, and its worker is killed
		id := s.enqueue("sleep", wish{max: 1})
		s.work(id, w1)
		s.wait(id, 4*seconds)
		s.expire(id, w2)
		s.doubt(id, w2)
		s.leaseAhead(id, w1)
		s.wait(id, 4*seconds)
		s.expire(id, w2)
		s.settle(id, w2, "failed", "lease_expired")
	},
	func(s *stage) { // the worker that was to fail it is gone, too
		id := s.enqueue("sleep", wish{max: 1})
		s.work(id, w1)
		s.wait(id, 4*seconds)
		s.expire(id, w2)
		s.wait(id, 4*seconds)
		s.expire(id, w1)
		s.doubt(id, w1)
		s.lease(id, w2)
		s.settle(id, w2, "failed", "lease_expired")
	},
	func(s *stage) { // a worker stopped; the answer to a lease was lost
		id := s.enqueue("effect", wish{emit: 1})
		s.work(id, w1)
		s.end(id, "shutdown")
		s.settle(id, w1, "released", "")
		s.lease(id, w2)
		s.doubt(id, w2)
		s.work(id, w2)
		s.succeed(id, w2, 1)
	},
	func(s *stage) { // one key: two clients, one that wants something else, and one that comes after its end
		w := wish{key: "once", emit: 1}
		e := s.order("effect", w)
		s.insert(e, w)
		s.tell(e)
		s.tell(e)
		id := uuid.MustParse(e.Run)
		s.tell(s.order("rival", wish{key: "once", answer: "conflict"}))
		s.work(id, w1)
		s.succeed(id, w1, 1)
		s.call("delete", id)
		id = s.enqueue("effect", w)
		s.work(id, w1)
		s.succeed(id, w1, 1)
	},
	func(s *stage) { // deleted during execution, and while waiting
		id := s.enqueue("effect", wish{emit: 1})
		s.work(id, w1)
		s.call("delete", id)
		s.end(id, "lost")
		s.call("delete", s.enqueue("sleep", wish{}))
	},
	func(s *stage) { // not before its time, and not while it is held
		id := s.enqueue("delayed", wish{delay: 30 * seconds})
		s.call("hold", id)
		s.wait(id, 31*seconds)
		s.call("resume", id)
		s.work(id, w1)
		s.succeed(id, w1, 0)
	},
	func(s *stage) { // the outside is called once for each lease
		id := s.enqueue("external", wish{})
		s.work(id, w1)
		s.tell(entry{Kind: "call", Run: id.String(), LeaseNo: 1, Attempt: 1})
		s.fail(id, w1, "retried")
		s.work(id, w1)
		s.tell(entry{Kind: "call", Run: id.String(), LeaseNo: 2, Attempt: 2})
		s.finish(id, w1)
	},
	func(s *stage) { // enqueued or not, without an answer to the client
		id := s.enqueue("sleep", wish{answer: "unknown"})
		s.work(id, w1)
		s.finish(id, w1)
		s.tell(s.order("sleep", wish{answer: "unknown"}))
		s.tell(s.order("sleep", wish{answer: "rolled back"}))
		s.tell(s.order("sleep", wish{answer: "refused"}))
	},
	func(s *stage) { // one cannot be leased and is set aside; the next does not wait for it, except while nobody can work
		s.aside(s.enqueue("unleasable", wish{}))
		id := s.enqueue("sleep", wish{})
		s.wait(id, 4*seconds)
		s.work(id, w1)
		s.finish(id, w1)
		id = s.enqueue("sleep", wish{})
		s.wait(id, 20*seconds)
		s.strike("table", "all", 18*seconds, seconds)
		s.work(id, w1)
		s.finish(id, w1)
	},
	func(s *stage) { // a handler that ignores its deadline
		id := s.enqueue("overdue", wish{max: 2})
		for _, verdict := range []string{"retried", "failed"} {
			s.work(id, w1)
			for range 9 {
				s.wait(id, seconds)
				s.beat(id, w1)
			}
			s.settle(id, w1, verdict, "time_limit")
			s.wait(id, 2*seconds)
			s.end(id, "ok")
		}
	},
}

// A plant is a planted fault. It breaks these rules: the first is meant for it, and the others see the same fact from
// another side.
type plant struct {
	breaks []string
	name   string
	plant  func(*stage) uuid.UUID // returns the run that is wrong
}

func only(rule string) []string { return []string{rule} }
