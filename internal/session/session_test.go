package session_test

import (
	"context"
	"strings"
	"testing"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/simple-workflow/simple-workflow/internal/pgtest"
	"github.com/simple-workflow/simple-workflow/internal/session"
)

func prepared(t *testing.T, url string, change func(*pgxpool.Config)) (*pgxpool.Pool, *session.Sessions) {
	t.Helper()
	config, err := pgxpool.ParseConfig(url)
	if err != nil {
		t.Fatal(err)
	}
	if change != nil {
		change(config)
	}
	sessions := session.Prepare(config)
	config.MaxConns = 1
	pool, err := pgxpool.NewWithConfig(t.Context(), config)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(pool.Close)
	return pool, sessions
}

const sum = `SELECT $1::int + count(*) FROM workflow_run WHERE priority = $2`

func repeat(t *testing.T, pool *pgxpool.Pool, times int) {
	t.Helper()
	for range times {
		if _, err := pool.Exec(t.Context(), sum, 1, 2); err != nil {
			t.Fatal(err)
		}
	}
}

func scan[T any](t *testing.T, pool *pgxpool.Pool, query string, args ...any) (v T) {
	t.Helper()
	if err := pool.QueryRow(t.Context(), query, append([]any{pgx.QueryExecModeSimpleProtocol}, args...)...).Scan(&v); err != nil {
		t.Fatal(err)
	}
	return v
}

// In a session of its own a statement is prepared once, and its plan is kept. After Planned, statements of a
// transaction are planned with their values.
func TestOwnSession(t *testing.T) {
	t.Parallel()
	pool, _ := prepared(t, pgtest.URL(t), nil)
	executed := func(how string) int {
		return scan[int](t, pool, `SELECT `+how+` FROM pg_prepared_statements WHERE statement = $1`, sum)
	}
	repeat(t, pool, 20)
	if kept := executed("generic_plans"); kept != 20 {
		t.Errorf("executed with the plan that is kept %d times, want 20", kept)
	}
	const settings = `SELECT concat_ws(' ', current_setting('plan_cache_mode'), current_setting('enable_seqscan'), current_setting('enable_bitmapscan'), current_setting('jit'))`
	if got, want := scan[string](t, pool, settings), "force_generic_plan off off off"; got != want {
		t.Errorf("settings are %s, want %s", got, want)
	}
	unset := func(_ *pgx.Conn, batch *pgx.Batch) {
		for _, set := range strings.Split(session.Unset, "; ") {
			batch.Queue(set)
		}
	}
	for want, plan := range map[string]func(*pgx.Conn, *pgx.Batch){"force_custom_plan on on on": session.Planned, "auto on on on": unset} {
		var got string
		err := pgx.BeginFunc(t.Context(), pool, func(tx pgx.Tx) error {
			batch := &pgx.Batch{}
			plan(tx.Conn(), batch)
			if err := tx.SendBatch(t.Context(), batch).Close(); err != nil {
				return err
			}
			if _, err := tx.Exec(t.Context(), sum, 1, 2); err != nil {
				return err
			}
			return tx.QueryRow(t.Context(), settings, pgx.QueryExecModeSimpleProtocol).Scan(&got)
		})
		if err != nil || got != want {
			t.Errorf("settings are %s, want %s: %v", got, want, err)
		}
	}
	if own := executed("custom_plans"); own != 2 { // plan_cache_mode auto begins with custom plans
		t.Errorf("planned with its values %d times, want 2", own)
	}
}

// A kept plan uses no sequential scan, even if it was made while the table was empty.
func TestKeptPlans(t *testing.T) {
	t.Parallel()
	pool, _ := prepared(t, pgtest.URL(t), nil)
	do := func(sql string) {
		t.Helper()
		if _, err := pool.Exec(t.Context(), sql, pgx.QueryExecModeSimpleProtocol); err != nil {
			t.Fatal(err)
		}
	}
	do(`VACUUM ANALYZE workflow_run`)
	const find = `SELECT type FROM workflow_run WHERE id = ANY ($1)`
	look := func() {
		t.Helper()
		if _, err := pool.Exec(t.Context(), find, []string{"00000000-0000-0000-0000-000000000000"}); err != nil {
			t.Fatal(err)
		}
	}
	look()
	do(`INSERT INTO workflow_run (type) SELECT 'test.x' FROM generate_series(1, 1000)`)
	look()
	do(`SELECT pg_stat_force_next_flush()`)
	if read := scan[int](t, pool, `SELECT seq_tup_read FROM pg_stat_user_tables WHERE relname = 'workflow_run'`); read > 0 {
		t.Errorf("%d rows were read to find none", read)
	}
}

// If a config has no statement cache, or an AfterRelease hook that changes the session, nothing is prepared, and
// statements work.
func TestNothingPrepared(t *testing.T) {
	t.Parallel()
	for name, change := range map[string]func(*pgxpool.Config){
		"no cache": func(c *pgxpool.Config) { c.ConnConfig.StatementCacheCapacity = 0 },
		"reset": func(c *pgxpool.Config) {
			c.AfterRelease = func(conn *pgx.Conn) bool {
				_, err := conn.Exec(context.Background(), `DISCARD ALL`)
				return err == nil
			}
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			pool, _ := prepared(t, pgtest.URL(t), change)
			repeat(t, pool, 2)
			if got := scan[int](t, pool, `SELECT count(*) FROM pg_prepared_statements`); got != 0 {
				t.Errorf("%d statements are prepared", got)
			}
			if got := scan[string](t, pool, `SHOW enable_seqscan`); got != "on" {
				t.Errorf("enable_seqscan is %s", got)
			}
		})
	}
}

// If a session loses its prepared statements, that costs one failed statement, and after that nothing is
// prepared.
func TestForgottenStatements(t *testing.T) {
	t.Parallel()
	pool, sessions := prepared(t, pgtest.URL(t), nil)
	forget := func() {
		t.Helper()
		if _, err := pool.Exec(t.Context(), `DISCARD ALL`, pgx.QueryExecModeSimpleProtocol); err != nil {
			t.Fatal(err)
		}
	}
	repeat(t, pool, 1)
	forget()
	_, err := pool.Exec(t.Context(), sum, 1, 2)
	if err == nil {
		t.Fatal("what was prepared is still there")
	}
	if !sessions.Note(err) || sessions.Note(err) {
		t.Error("it is not news, or twice")
	}
	for range 3 {
		repeat(t, pool, 1)
		forget()
	}
}

// The hooks of the config are called once for each connection that is used.
func TestHooks(t *testing.T) {
	t.Parallel()
	hooks(t, pgtest.URL(t))
}

func hooks(t *testing.T, url string) {
	t.Helper()
	var before, after, acquire int
	pool, _ := prepared(t, url, func(c *pgxpool.Config) {
		c.BeforeConnect = func(context.Context, *pgx.ConnConfig) error { before++; return nil }
		c.AfterConnect = func(context.Context, *pgx.Conn) error { after++; return nil }
		c.BeforeAcquire = func(context.Context, *pgx.Conn) bool { acquire++; return true } //nolint:staticcheck // deprecated, and used
	})
	repeat(t, pool, 3)
	if before == 0 || after != 1 || acquire != 3 {
		t.Errorf("called %d times before and %d times after connections were opened, %d times before they were used", before, after, acquire)
	}
}
