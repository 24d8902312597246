package dispatcher_test

import (
	"bytes"
	"context"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/simple-workflow/simple-workflow/dispatcher"
	"github.com/simple-workflow/simple-workflow/internal/delivery"
	"github.com/simple-workflow/simple-workflow/internal/pgserver"
	"github.com/simple-workflow/simple-workflow/internal/pgtest"
	"github.com/simple-workflow/simple-workflow/sql"
)

// site creates a database on a server, with the schema if schema is set.
func site(t *testing.T, server *pgserver.Server, name string, schema bool) *pgxpool.Pool {
	t.Helper()
	conn, err := pgx.Connect(t.Context(), server.URL("postgres"))
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close(t.Context())
	if _, err := conn.Exec(t.Context(), "CREATE DATABASE "+name); err != nil {
		t.Fatal(err)
	}
	pool, err := pgxpool.New(t.Context(), server.URL(name))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(pool.Close)
	if schema {
		up, err := pgx.Connect(t.Context(), server.URL(name))
		if err != nil {
			t.Fatal(err)
		}
		defer up.Close(t.Context())
		if err := sql.Up(t.Context(), up); err != nil {
			t.Fatal(err)
		}
	}
	return pool
}

// lived fills an outbox as if it had been in use: some events are published, some of these deleted by retention, some
// are open, some wait for a retry; floors are raised, lanes are claimed. Each aggregate has six events, of which the
// last three are open.
func lived(t *testing.T, pool *pgxpool.Pool) (aggregates []uuid.UUID) {
	t.Helper()
	sink := &memory{}
	stop := dispatch(t, pool, nil, dispatcher.Target{Name: "memory", Sink: sink})
	aggregates = emit(t, pool, "test.told", 100, 3)
	drained(t, pool)
	pgtest.Await(t, "floors to rise", func() bool {
		return count(t, pool, `SELECT count(*) FROM outbox_lane WHERE floor > 0`) == delivery.Lanes
	})
	stop()
	unguarded(t, pool, `DELETE FROM outbox_event WHERE id <= 150`)
	for n := 4; n <= 6; n++ {
		if _, err := pool.Exec(t.Context(), `SELECT outbox_emit(a, 'test.told', jsonb_build_object('n', $2::int)) FROM unnest($1::uuid[]) AS a`, aggregates, n); err != nil {
			t.Fatal(err)
		}
	}
	unguarded(t, pool, `
		INSERT INTO outbox_delivery (event_id, sink, aggregate_id, attempt, next_attempt_at, last_error) SELECT id, 'memory', aggregate_id, 1, now(), 'not now' FROM outbox_event WHERE published_at IS NULL LIMIT 5;
		INSERT INTO workflow_run (type) VALUES ('media.x')`)
	claim(t, pool, "memory") // as a dispatcher that died would leave it
	return aggregates
}

// deliversAll starts a dispatcher, appends to the same aggregates, and checks that all events, old and new, come in
// order.
func deliversAll(t *testing.T, pool *pgxpool.Pool, aggregates []uuid.UUID) {
	t.Helper()
	unguarded(t, pool, `UPDATE outbox_lane SET claim_until = now() - interval '1 second' WHERE claim_until IS NOT NULL`) // as if time had passed
	sink := &memory{}
	dispatch(t, pool, nil, dispatcher.Target{Name: "memory", Sink: sink})
	for n := 7; n <= 9; n++ {
		if _, err := pool.Exec(t.Context(), `SELECT outbox_emit(a, 'test.told', jsonb_build_object('n', $2::int)) FROM unnest($1::uuid[]) AS a`, aggregates, n); err != nil {
			t.Fatal(err)
		}
	}
	within(t, time.Minute, "all", func() bool { return count(t, pool, openEvents) == 0 })
	came := map[string][]string{}
	for _, e := range sink.got() {
		came[e.Subject()] = append(came[e.Subject()], string(e.Data()))
	}
	want := []string{`{"n": 4}`, `{"n": 5}`, `{"n": 6}`, `{"n": 7}`, `{"n": 8}`, `{"n": 9}`}
	for _, a := range aggregates {
		if got := slices.Compact(came[a.String()]); !slices.Equal(got, want) {
			t.Fatalf("aggregate %s: %v came, want %v", a, got, want)
		}
	}
}

// path returns where one of PostgreSQL's programs would be. Binaries from npm have no client programs.
func path(t *testing.T, name string) string {
	t.Helper()
	dir, err := pgserver.BinDir()
	if err != nil {
		t.Fatal(err)
	}
	return filepath.Join(dir, name)
}

// copied copies the rows of the outbox tables, like a data-only dump, without the state of the sequence.
func copied(t *testing.T, from, to string) {
	t.Helper()
	source, err := pgx.Connect(t.Context(), from)
	if err != nil {
		t.Fatal(err)
	}
	defer source.Close(t.Context())
	target, err := pgx.Connect(t.Context(), to)
	if err != nil {
		t.Fatal(err)
	}
	defer target.Close(t.Context())
	for _, table := range []string{"outbox_sink", "outbox_lane", "outbox_event", "outbox_delivery"} {
		var columns string
		if err := source.QueryRow(t.Context(), `SELECT string_agg(quote_ident(attname), ', ' ORDER BY attnum) FROM pg_attribute
			WHERE attrelid = $1::text::regclass AND attnum > 0 AND NOT attisdropped AND attgenerated = ''`, table).Scan(&columns); err != nil {
			t.Fatal(err)
		}
		var data bytes.Buffer
		if _, err := source.PgConn().CopyTo(t.Context(), &data, "COPY "+table+" ("+columns+") TO STDOUT"); err != nil {
			t.Fatal(err)
		}
		if _, err := target.PgConn().CopyFrom(t.Context(), &data, "COPY "+table+" ("+columns+") FROM STDIN"); err != nil {
			t.Fatal(err)
		}
	}
}

// program runs one of PostgreSQL's programs and returns what it prints.
func program(t *testing.T, input []byte, env, name string, args ...string) []byte {
	t.Helper()
	cmd := exec.CommandContext(t.Context(), path(t, name), args...)
	cmd.Stdin = bytes.NewReader(input)
	cmd.Env = append(cmd.Environ(), env)
	var errs strings.Builder
	cmd.Stderr = &errs
	out, err := cmd.Output()
	if err != nil {
		t.Fatalf("%s: %v: %.2000s", name, err, errs.String())
	}
	return out
}

// After a data-only restore into a fresh schema with all its guards, as in docs/operations.md, all events, old and new,
// are delivered in order. This holds for the whole database, for the outbox, and for its tables one by one, which
// leaves the sequence behind.
func TestRestoreOfDataAlone(t *testing.T) {
	server := pgtest.Server(t, pgserver.Options{})
	old := site(t, server, "old", true)
	aggregates := lived(t, old)
	if behind := count(t, old, `SELECT outbox_last_id_v1()`); behind != 600 {
		t.Fatalf("the last id is %d", behind)
	}
	restores := map[string]func(t *testing.T, url string){
		"by COPY": func(t *testing.T, url string) { copied(t, server.URL("old"), url) },
		"everything": func(t *testing.T, url string) {
			dump := program(t, nil, "", "pg_dump", "--data-only", "--exclude-table=workflow_schema", "--disable-triggers", server.URL("old"))
			program(t, dump, "", "psql", "--quiet", "--no-psqlrc", "--set=ON_ERROR_STOP=1", "--single-transaction", url)
		},
		"everything, past the guards": func(t *testing.T, url string) {
			dump := program(t, nil, "", "pg_dump", "--data-only", "--exclude-table=workflow_schema", "--exclude-table=workflow_override", "--exclude-table=outbox_replayed", server.URL("old"))
			program(t, dump, "PGOPTIONS=-c workflow.override=restored", "psql", "--quiet", "--no-psqlrc", "--set=ON_ERROR_STOP=1", "--single-transaction", url)
		},
		"the outbox": func(t *testing.T, url string) {
			dump := program(t, nil, "", "pg_dump", "--data-only", "--table=outbox_event", "--table=outbox_sink", "--table=outbox_lane", "--table=outbox_delivery", server.URL("old"))
			program(t, dump, "", "psql", "--quiet", "--no-psqlrc", "--set=ON_ERROR_STOP=1", "--single-transaction", url)
		},
		"by INSERT": func(t *testing.T, url string) {
			dump := program(t, nil, "", "pg_dump", "--data-only", "--inserts", "--table=outbox_event", "--table=outbox_sink", "--table=outbox_lane", "--table=outbox_delivery", server.URL("old"))
			program(t, dump, "", "psql", "--quiet", "--no-psqlrc", "--set=ON_ERROR_STOP=1", "--single-transaction", url)
		},
		"table by table": func(t *testing.T, url string) {
			dump := program(t, nil, "", "pg_dump", "--format=custom", server.URL("old"))
			for _, table := range []string{"outbox_sink", "outbox_lane", "outbox_event", "outbox_delivery"} {
				program(t, dump, "", "pg_restore", "--data-only", "--exit-on-error", "--table="+table, "--dbname="+url)
			}
		},
	}
	for name, restore := range restores {
		if name != "by COPY" && exec.Command(path(t, "pg_dump"), "--version").Run() != nil {
			t.Logf("these binaries have no pg_dump: not tried %s", name)
			continue
		}
		t.Run(name, func(t *testing.T) {
			called := "new_" + strings.NewReplacer(" ", "_", ",", "").Replace(strings.ToLower(name))
			pool := site(t, server, called, true)
			restore(t, server.URL(called))
			if n := count(t, pool, `SELECT count(*) FROM outbox_event`); n != 450 {
				t.Fatalf("%d events are restored, want 450", n)
			}
			var said string
			if err := pool.QueryRow(t.Context(), `SELECT outbox_set_right_v1()`).Scan(&said); err != nil {
				t.Fatal(err)
			}
			t.Log(said)
			deliversAll(t, pool, aggregates)
		})
	}
}

// soon executes a statement, again if it takes a minute: a slot is created once all transactions that are under way have
// ended, and once the server has noted that.
func soon(t *testing.T, pool *pgxpool.Pool, do string) (err error) {
	t.Helper()
	for range 3 {
		ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
		_, err = pool.Exec(ctx, do)
		cancel()
		if err == nil || ctx.Err() == nil {
			return err
		}
		var sessions string
		if err := pool.QueryRow(t.Context(), `SELECT string_agg(concat_ws(' ', pid, state, wait_event, backend_xid, left(query, 60)), E'\n') FROM pg_stat_activity`).Scan(&sessions); err != nil {
			t.Fatal(err)
		}
		t.Logf("%s: %v; the sessions:\n%s", do, err, sessions)
	}
	return err
}

// In a promoted copy by logical replication, outbox_set_right_v1 advances the sequence, which was not replicated, and
// all events are delivered in order.
func TestPromotedLogicalCopy(t *testing.T) {
	server := pgtest.Server(t, pgserver.Options{Settings: map[string]string{"wal_level": "logical", "max_wal_senders": "5", "max_replication_slots": "5"}})
	old := site(t, server, "old", true)
	aggregates := lived(t, old)
	mirror := site(t, server, "mirror", true)
	for _, step := range []struct {
		on *pgxpool.Pool
		do string
	}{
		{old, `CREATE PUBLICATION outbox FOR TABLE outbox_event, outbox_sink, outbox_lane, outbox_delivery`},
		{old, `SELECT pg_create_logical_replication_slot('outbox', 'pgoutput')`},
		{mirror, `CREATE SUBSCRIPTION outbox CONNECTION '` + server.URL("old") + `' PUBLICATION outbox WITH (slot_name = outbox, create_slot = false)`},
	} {
		if err := soon(t, step.on, step.do); err != nil {
			t.Fatalf("%s: %v", step.do, err)
		}
	}
	t.Cleanup(func() { // otherwise the server waits for the slot when it stops
		_, _ = mirror.Exec(context.Background(), `ALTER SUBSCRIPTION outbox DISABLE`)
	})
	if _, err := old.Exec(t.Context(), `SELECT outbox_emit(gen_random_uuid(), 'test.told', '{"n": 1}')`); err != nil { // arrives by replication, not by the initial copy
		t.Fatal(err)
	}
	pgtest.Await(t, "the copy", func() bool { return count(t, mirror, `SELECT count(*) FROM outbox_event`) == 451 })
	for _, do := range []string{`ALTER SUBSCRIPTION outbox DISABLE`, `ALTER SUBSCRIPTION outbox SET (slot_name = NONE)`, `DROP SUBSCRIPTION outbox`} {
		if _, err := mirror.Exec(t.Context(), do); err != nil {
			t.Fatalf("%s: %v", do, err)
		}
	}
	if last := count(t, mirror, `SELECT outbox_last_id_v1()`); last != 0 {
		t.Fatalf("the sequence came along: it is at %d", last)
	}
	var said string
	if err := mirror.QueryRow(t.Context(), `SELECT outbox_set_right_v1()`).Scan(&said); err != nil || !strings.Contains(said, "ids go on after 601, not 0") {
		t.Errorf("set right: %s, %v", said, err)
	}
	deliversAll(t, mirror, aggregates)
}
