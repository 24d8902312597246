package outbox_test

import (
	"context"
	"encoding/json"
	"errors"
	"slices"
	"strings"
	"testing"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/jackc/pgx/v5/stdlib"

	"github.com/simple-workflow/simple-workflow/internal/pgtest"
	"github.com/simple-workflow/simple-workflow/outbox"
)

// begin starts a transaction that is rolled back when t ends.
func begin(t *testing.T, pool *pgxpool.Pool) pgx.Tx {
	t.Helper()
	tx, err := pool.Begin(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = tx.Rollback(context.Background()) })
	return tx
}

func add(t *testing.T, tx pgx.Tx, events ...outbox.Event) {
	t.Helper()
	if err := outbox.Append(t.Context(), tx, events...); err != nil {
		t.Fatal(err)
	}
}

func commit(t *testing.T, tx pgx.Tx) {
	t.Helper()
	if err := tx.Commit(t.Context()); err != nil {
		t.Fatal(err)
	}
}

// types lists the types of all events in order of id.
func types(t *testing.T, pool *pgxpool.Pool) []string {
	t.Helper()
	rows, _ := pool.Query(t.Context(), `SELECT event_type FROM outbox_event ORDER BY id`)
	all, err := pgx.CollectRows(rows, pgx.RowTo[string])
	if err != nil {
		t.Fatal(err)
	}
	return all
}

// Within an aggregate, ids follow the order of commits: a second transaction that appends, with Append or with
// outbox_emit, waits until the first has ended. Events of one call keep their order.
func TestOrderWithinAggregate(t *testing.T) {
	pool := pgtest.New(t)
	aggregate, other := uuid.New(), uuid.New()
	first, second, third := begin(t, pool), begin(t, pool), begin(t, pool)
	add(t, first, outbox.Event{Aggregate: aggregate, Type: "first.1"}, outbox.Event{Aggregate: other, Type: "first.2"})

	ended := make(chan error, 2)
	go func() {
		ended <- outbox.Append(t.Context(), second,
			outbox.Event{Aggregate: other, Type: "second.1"}, outbox.Event{Aggregate: aggregate, Type: "second.2"})
	}()
	pgtest.Blocked(t, pool, 1)
	add(t, first, outbox.Event{Aggregate: aggregate, Type: "first.3"})
	commit(t, first)
	if err := <-ended; err != nil {
		t.Fatal(err)
	}

	go func() {
		_, err := third.Exec(t.Context(), `SELECT outbox_emit($1, 'third.1', '{}')`, aggregate)
		ended <- err
	}()
	pgtest.Blocked(t, pool, 1)
	commit(t, second)
	if err := <-ended; err != nil {
		t.Fatal(err)
	}
	commit(t, third)

	want := []string{"first.1", "first.2", "first.3", "second.1", "second.2", "third.1"}
	if got := types(t, pool); !slices.Equal(got, want) {
		t.Errorf("events %v, want %v", got, want)
	}
}

// Transactions that append to different aggregates do not wait for each other.
func TestAggregatesDoNotWait(t *testing.T) {
	pool := pgtest.New(t)
	first, second := begin(t, pool), begin(t, pool)
	add(t, first, outbox.Event{Aggregate: uuid.New(), Type: "first"})
	if _, err := second.Exec(t.Context(), `SET LOCAL lock_timeout = '1s'`); err != nil {
		t.Fatal(err)
	}
	add(t, second, outbox.Event{Aggregate: uuid.New(), Type: "second"})
	commit(t, second)
	if got, want := types(t, pool), []string{"second"}; !slices.Equal(got, want) {
		t.Errorf("while the first is open: events %v, want %v", got, want)
	}
	commit(t, first)
	if got, want := types(t, pool), []string{"first", "second"}; !slices.Equal(got, want) {
		t.Errorf("events %v, want %v", got, want)
	}
}

// Transactions that append to the same aggregates in opposite orders do not deadlock: all lock them in one
// order.
func TestOppositeOrders(t *testing.T) {
	pool := pgtest.New(t)
	forth := make([]outbox.Event, 200)
	for i := range forth {
		forth[i] = outbox.Event{Aggregate: uuid.New(), Type: "test.told"}
	}
	back := slices.Clone(forth)
	slices.Reverse(back)
	ended := make(chan error, 4)
	for i := range cap(ended) {
		go func() {
			ended <- pgx.BeginFunc(t.Context(), pool, func(tx pgx.Tx) error {
				return outbox.Append(t.Context(), tx, [][]outbox.Event{forth, back}[i%2]...)
			})
		}()
	}
	for range cap(ended) {
		if err := <-ended; err != nil {
			t.Error(err)
		}
	}
}

// An event whose transaction is rolled back is not stored. Append without events stores nothing.
func TestRolledBack(t *testing.T) {
	pool := pgtest.New(t)
	tx := begin(t, pool)
	add(t, tx, outbox.Event{Aggregate: uuid.New(), Type: "test.told"})
	if err := tx.Rollback(t.Context()); err != nil {
		t.Fatal(err)
	}
	tx = begin(t, pool)
	add(t, tx)
	commit(t, tx)
	if got := types(t, pool); len(got) != 0 {
		t.Errorf("events %v, want none", got)
	}
}

// All fields of an event are stored. Without an ID the event gets a new one of version 7; without Headers it has none.
func TestStored(t *testing.T) {
	pool := pgtest.New(t)
	given := outbox.Event{
		ID: uuid.New(), Aggregate: uuid.New(), Type: "invoice.charged:v1/a-b_C",
		Payload: json.RawMessage(`{"amount": 1.10}`), Headers: map[string]string{"traceparent": "00-ä"},
	}
	tx := begin(t, pool)
	add(t, tx, given, outbox.Event{Aggregate: given.Aggregate, Type: "b"}, outbox.Event{Type: "c", Payload: []int{1}})
	commit(t, tx)

	type event struct {
		ID, Aggregate          uuid.UUID
		Type, Payload, Headers string
		Untouched              bool
	}
	rows, _ := pool.Query(t.Context(), `
		SELECT event_uuid, aggregate_id, event_type, payload::text, coalesce(headers::text, 'none'),
		       published_at IS NULL AND parked_at IS NULL AND delivered_to IS NULL AND parked_by IS NULL
		FROM outbox_event
		ORDER BY id`)
	got, err := pgx.CollectRows(rows, pgx.RowToStructByPos[event])
	if err != nil || len(got) != 3 {
		t.Fatal(got, err)
	}
	if got[1].ID.Version() != 7 || got[2].ID.Version() != 7 || got[1].ID == got[2].ID {
		t.Errorf("ids %s and %s, want two new ones of version 7", got[1].ID, got[2].ID)
	}
	want := []event{
		{given.ID, given.Aggregate, given.Type, `{"amount": 1.10}`, `{"traceparent": "00-ä"}`, true},
		{got[1].ID, given.Aggregate, "b", `null`, `none`, true},
		{got[2].ID, uuid.Nil, "c", `[1]`, `none`, true},
	}
	if !slices.Equal(got, want) {
		t.Errorf("got  %+v\nwant %+v", got, want)
	}
}

// AppendSQL stores the same as Append, in a transaction of database/sql.
func TestAppendSQL(t *testing.T) {
	pool := pgtest.New(t)
	db := stdlib.OpenDBFromPool(pool)
	t.Cleanup(func() { _ = db.Close() })
	tx, err := db.BeginTx(t.Context(), nil)
	if err != nil {
		t.Fatal(err)
	}
	e := outbox.Event{ID: uuid.New(), Aggregate: uuid.New(), Type: "a.b", Payload: map[string]string{"ä": "\"\n"}, Headers: map[string]string{"k": "v"}}
	if err := outbox.AppendSQL(t.Context(), tx, e, outbox.Event{Aggregate: e.Aggregate, Type: "a.c"}); err != nil {
		t.Fatal(err)
	}
	if got := types(t, pool); len(got) != 0 {
		t.Errorf("events %v before the commit", got)
	}
	if err := tx.Commit(); err != nil {
		t.Fatal(err)
	}
	if got, want := types(t, pool), []string{"a.b", "a.c"}; !slices.Equal(got, want) {
		t.Errorf("events %v, want %v", got, want)
	}
	var same bool
	if err := pool.QueryRow(t.Context(), `SELECT event_uuid = $1 AND aggregate_id = $2 AND payload = '{"ä": "\"\n"}' AND headers = '{"k": "v"}' FROM outbox_event ORDER BY id`,
		e.ID, e.Aggregate).Scan(&same); err != nil || !same {
		t.Errorf("what was given is not what is stored: %v", err)
	}
}

// An event with an invalid type or payload is refused, and so are all events of the same call.
func TestRefused(t *testing.T) {
	pool := pgtest.New(t)
	for _, typ := range []string{"", "with space", "ä", "a\nb"} {
		tx := begin(t, pool)
		err := outbox.Append(t.Context(), tx, outbox.Event{Type: "good"}, outbox.Event{Type: typ})
		var refused *pgconn.PgError
		if !errors.As(err, &refused) || refused.ConstraintName != "outbox_event_type_check" {
			t.Errorf("type %q: %v", typ, err)
		}
		if err := tx.Commit(t.Context()); !errors.Is(err, pgx.ErrTxCommitRollback) {
			t.Errorf("type %q: commit: %v", typ, err)
		}
	}
	tx := begin(t, pool)
	if err := outbox.Append(t.Context(), tx, outbox.Event{Type: "a", Payload: func() {}}); err == nil {
		t.Error("a payload that has no JSON was taken")
	}
	commit(t, tx)
	if got := types(t, pool); len(got) != 0 {
		t.Errorf("events %v, want none", got)
	}
}

// Headers beyond a limit are refused with a message that names the limit and with a hint, however the event is
// appended.
func TestRefusedHeaders(t *testing.T) {
	pool := pgtest.New(t)
	named := pgtest.Roles(t, pool)
	program := pgtest.As(t, pool, named, "enqueue")
	deep := func(levels int) string { return strings.Repeat(`{"a":`, levels) + "1" + strings.Repeat("}", levels) }
	for _, c := range []struct{ headers, problem string }{
		{`{"x": "` + strings.Repeat("x", 65536-9) + `"}`, ""},
		{`{"x": "` + strings.Repeat("x", 65536-8) + `"}`, "headers: they have 65537 bytes, the limit is 65536"},
		{`{"x": "` + strings.Repeat(`\u0001`, 11000) + `"}`, "headers: they have 66009 bytes, the limit is 65536"},
		{deep(64), ""},
		{deep(65), "headers: they are nested deeper than 64 levels"},
		{`{"a":` + strings.Repeat("[", 64) + strings.Repeat("]", 64) + "}", "headers: they are nested deeper than 64 levels"},
		{`{"x": 1e308}`, ""},
		{`{"x": 1e309}`, "headers: a number is beyond ±1e308"},
		{`{"x": 1e70000}`, "headers: they have 70008 bytes, the limit is 65536"},
		{`{"` + strings.Repeat("x", 512) + `": "x"}`, ""},
		{`{"` + strings.Repeat("x", 513) + `": "x"}`, "headers: key '" + strings.Repeat("x", 40) + "…' has 513 bytes, the limit is 512"},
		{`{"traceparent": "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"}`, ""},
	} {
		for how, append := range map[string]func() error{
			"outbox_emit": func() error {
				_, err := program.Exec(t.Context(), `SELECT outbox_emit(gen_random_uuid(), 'a.b', '{}', $1)`, c.headers)
				return err
			},
			"outbox_append_v1": func() error {
				_, err := program.Exec(t.Context(), `SELECT outbox_append_v1('{NULL,NULL}', ARRAY[gen_random_uuid(), gen_random_uuid()], '{a.b,a.b}', '{1,2}', ARRAY[NULL, $1::text::jsonb])`, c.headers)
				return err
			},
			"INSERT": func() error {
				_, err := pool.Exec(t.Context(), `INSERT INTO outbox_event (aggregate_id, event_type, payload, headers) VALUES (gen_random_uuid(), 'a.b', '{}', $1)`, c.headers)
				return err
			},
		} {
			err := append()
			var refused *pgconn.PgError
			errors.As(err, &refused)
			switch {
			case c.problem == "" && err != nil:
				t.Errorf("%s of %.40s: %v", how, c.headers, err)
			case c.problem != "" && (refused == nil || refused.Code != "23514" || !strings.Contains(refused.Message, c.problem) || refused.Hint == "" || refused.ColumnName != "headers"):
				t.Errorf("%s of %.40s: %v, want %s", how, c.headers, err, c.problem)
			}
		}
	}
}

// Appending takes no room in the server's lock table, even for 100,000 aggregates.
func TestManyAggregates(t *testing.T) {
	pool := pgtest.New(t)
	tx := begin(t, pool)
	events := make([]outbox.Event, 100_000)
	for k := range events {
		events[k] = outbox.Event{Aggregate: uuid.New(), Type: "test.told", Payload: k}
	}
	add(t, tx, events...)
	var locks int
	err := tx.QueryRow(t.Context(), `SELECT count(*) FROM pg_locks WHERE pid = pg_backend_pid()`).Scan(&locks)
	if err != nil || locks > 100 {
		t.Errorf("%d locks: %v", locks, err)
	}
	commit(t, tx)
}

// 10,000 calls of outbox_emit in one transaction take about as long for one aggregate as for 10,000: a transaction does
// not lock again what it holds.
func TestOneByOne(t *testing.T) {
	pool := pgtest.New(t)
	took := func(aggregates int) (seconds float64) {
		if err := pool.QueryRow(t.Context(), `
			WITH begun AS MATERIALIZED (SELECT clock_timestamp() AS at),
			emitted AS MATERIALIZED (SELECT outbox_emit(uuid_in(md5((n % $1)::text)::cstring), 'test.told', '1') FROM begun, generate_series(1, 10000) AS n)
			SELECT extract(epoch FROM clock_timestamp() - at)::float8 FROM begun WHERE (SELECT count(*) FROM emitted) = 10000`, aggregates).Scan(&seconds); err != nil {
			t.Fatal(err)
		}
		return seconds
	}
	if many, one := took(10_000), took(1); one > 3*many+1 {
		t.Errorf("10000 events of one aggregate took %.1f s, of as many aggregates %.1f s", one, many)
	}
}

// An event with Held does not wait for the aggregate's lock; without Held it does.
func TestHeld(t *testing.T) {
	pool := pgtest.New(t)
	aggregate := uuid.New()
	add(t, begin(t, pool), outbox.Event{Aggregate: aggregate, Type: "test.told"})
	for held, want := range map[bool]string{true: "", false: "55P03"} {
		tx := begin(t, pool)
		if _, err := tx.Exec(t.Context(), `SET LOCAL lock_timeout = '100ms'`); err != nil {
			t.Fatal(err)
		}
		err := outbox.Append(t.Context(), tx, outbox.Event{Aggregate: aggregate, Type: "test.told", Held: held})
		if codeOf(err) != want {
			t.Errorf("held %t: %v", held, err)
		}
	}
}

func codeOf(err error) string {
	var refused *pgconn.PgError
	if errors.As(err, &refused) {
		return refused.Code
	}
	return ""
}

// A role that may not append cannot lock an aggregate, neither with an advisory lock nor through outbox_aggregate.
func TestNobodyHoldsAnAggregate(t *testing.T) {
	pool := pgtest.New(t)
	named := pgtest.Roles(t, pool)
	stranger, program, aggregate := pgtest.As(t, pool, named), pgtest.As(t, pool, named, "enqueue"), uuid.New()
	lock := begin(t, stranger)
	if _, err := lock.Exec(t.Context(), `SELECT pg_advisory_xact_lock(hashtextextended($1::uuid::text, 0))`, aggregate); err != nil {
		t.Fatal(err)
	}
	tx := begin(t, program)
	if _, err := tx.Exec(t.Context(), `SET LOCAL lock_timeout = '1s'`); err != nil {
		t.Fatal(err)
	}
	add(t, tx, outbox.Event{Aggregate: aggregate, Type: "test.told"})
	commit(t, tx)
	// A row of outbox_aggregate that was inserted by hand does not lock it either. The next append removes the row.
	for _, by := range []func(){
		func() {
			tx := begin(t, program)
			add(t, tx, outbox.Event{Aggregate: aggregate, Type: "test.told"})
			commit(t, tx)
		},
		func() {
			tx := begin(t, program)
			add(t, tx, outbox.Event{Aggregate: aggregate, Type: "test.told"}, outbox.Event{Aggregate: uuid.New(), Type: "test.told"})
			commit(t, tx)
		},
		func() {
			if _, err := program.Exec(t.Context(), `SELECT outbox_emit($1, 'test.told', '1')`, aggregate); err != nil {
				t.Error(err)
			}
		},
	} {
		if _, err := pool.Exec(t.Context(), `INSERT INTO outbox_aggregate VALUES ($1)`, aggregate); err != nil {
			t.Fatal(err)
		}
		by()
		var left int
		if err := pool.QueryRow(t.Context(), `SELECT count(*) FROM outbox_aggregate`).Scan(&left); err != nil || left != 0 {
			t.Errorf("%d keys are left, %v", left, err)
		}
	}
	for _, pool := range []*pgxpool.Pool{stranger, program, pgtest.As(t, pool, named, "dispatcher"), pgtest.As(t, pool, named, "engine"), pgtest.As(t, pool, named, "operator")} {
		for _, try := range []string{`INSERT INTO outbox_aggregate VALUES (gen_random_uuid())`, `DELETE FROM outbox_aggregate`, `SELECT FROM outbox_aggregate FOR KEY SHARE`} {
			if _, err := pool.Exec(t.Context(), try); codeOf(err) != "42501" {
				t.Errorf("%s: %v", try, err)
			}
		}
	}
}

// Only the owner can insert events with given ids, as a restore does. All other ids come from the sequence: a plain
// INSERT draws its id after it has locked the aggregate, so ids follow the order of commits.
func TestIdsByHand(t *testing.T) {
	pool := pgtest.New(t)
	const plain = `INSERT INTO outbox_event (aggregate_id, event_type, payload) VALUES ($1, 'test.told', '1') RETURNING id`
	const given = `INSERT INTO outbox_event (id, aggregate_id, event_type, payload) OVERRIDING SYSTEM VALUE SELECT n, gen_random_uuid(), 'test.told', '1' FROM generate_series(-3, 3) AS n`
	if _, err := pool.Exec(t.Context(), strings.Replace(given, "OVERRIDING SYSTEM VALUE", "", 1)); codeOf(err) != "428C9" {
		t.Errorf("an id is given as if it were any column: %v", err)
	}
	named := pgtest.Roles(t, pool)
	for _, role := range []string{"enqueue", "worker", "engine", "dispatcher", "operator", "viewer", "console"} {
		conn, err := pgtest.As(t, pool, named, role).Acquire(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		if _, err := conn.Exec(t.Context(), given); codeOf(err) != "42501" {
			t.Errorf("%s gives ids: %v", role, err)
		}
		if _, err := conn.Conn().PgConn().CopyFrom(t.Context(), strings.NewReader("1\t"+uuid.NewString()+"\ta.b\t1\n"), `COPY outbox_event (id, aggregate_id, event_type, payload) FROM STDIN`); codeOf(err) != "42501" {
			t.Errorf("%s copies: %v", role, err)
		}
		conn.Release()
	}
	if _, err := pool.Exec(t.Context(), given); err != nil {
		t.Fatal(err)
	}
	conn, err := pool.Acquire(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Release()
	if _, err := conn.Conn().PgConn().CopyFrom(t.Context(), strings.NewReader("1000000\t"+uuid.NewString()+"\ta.b\t1\n"), `COPY outbox_event (id, aggregate_id, event_type, payload) FROM STDIN`); err != nil {
		t.Fatal(err)
	}
	var ids []int64
	if err := pool.QueryRow(t.Context(), `SELECT array_agg(id ORDER BY id) FROM outbox_event`).Scan(&ids); err != nil || !slices.Equal(ids, []int64{-3, -2, -1, 0, 1, 2, 3, 1_000_000}) {
		t.Errorf("ids %v, %v", ids, err)
	}
	// The sequence, which is behind these ids, is advanced past them.
	var said string
	if err := pool.QueryRow(t.Context(), `SELECT outbox_set_right_v1()`).Scan(&said); err != nil || said != "ids go on after 1000000, not 0" {
		t.Errorf("set right: %q, %v", said, err)
	}
	if err := pool.QueryRow(t.Context(), `SELECT outbox_set_right_v1()`).Scan(&said); err != nil || said != "nothing was wrong" {
		t.Errorf("set right again: %q, %v", said, err)
	}

	aggregate, ended := uuid.New(), make(chan int64, 1)
	first, second := begin(t, pool), begin(t, pool)
	add(t, first, outbox.Event{Aggregate: aggregate, Type: "test.told"})
	go func() {
		var id int64
		if err := second.QueryRow(t.Context(), plain, aggregate).Scan(&id); err != nil {
			t.Error(err)
		}
		ended <- id
	}()
	pgtest.Blocked(t, pool, 1)
	var last int64
	if err := first.QueryRow(t.Context(), `SELECT outbox_emit($1, 'test.told', '1')`, aggregate).Scan(&last); err != nil {
		t.Fatal(err)
	}
	commit(t, first)
	if id := <-ended; id <= last {
		t.Errorf("a plain INSERT has drawn %d before its turn: %d was drawn by who held the aggregate", id, last)
	}
}
