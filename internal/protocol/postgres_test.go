package protocol

import (
	"context"
	"fmt"
	"testing"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/simple-workflow/simple-workflow/internal/pgtest"
)

// PostgreSQL behaves as the models of limits and marks assume: a statement that locks a row sees its newest version,
// but counts other rows as they were when the statement began. INSERT … ON CONFLICT DO UPDATE … RETURNING waits for a
// transaction that holds the row, and returns what is stored.
func TestPostgres(t *testing.T) {
	pool := pgtest.New(t)
	exec := func(sql string) {
		t.Helper()
		if _, err := pool.Exec(t.Context(), sql); err != nil {
			t.Fatalf("%s: %v", sql, err)
		}
	}
	exec(`CREATE TABLE leased (id int PRIMARY KEY, is_so boolean NOT NULL)`)
	exec(`CREATE TABLE "limit" (name text PRIMARY KEY, most int NOT NULL)`)
	exec(`CREATE TABLE begun (token text PRIMARY KEY, is_so boolean NOT NULL)`)
	exec(`INSERT INTO "limit" VALUES ('a', 1)`)
	exec(`CREATE FUNCTION lease_one(n int) RETURNS void VOLATILE LANGUAGE plpgsql AS $$
		BEGIN
			PERFORM FROM "limit" WHERE name = 'a' FOR UPDATE;
			UPDATE leased SET is_so = true WHERE id = n AND (SELECT count(*) FROM leased WHERE is_so) < (SELECT most FROM "limit" WHERE name = 'a');
		END $$`)
	const (
		lock = `SELECT FROM "limit" WHERE name = 'a' FOR UPDATE`
		take = `UPDATE leased SET is_so = true WHERE id = %d AND (SELECT count(*) FROM leased WHERE is_so) < (SELECT most FROM "limit" WHERE name = 'a')`
		both = `WITH l AS MATERIALIZED (SELECT most FROM "limit" WHERE name = 'a' FOR UPDATE) UPDATE leased SET is_so = true FROM l WHERE id = %d AND (SELECT count(*) FROM leased WHERE is_so) < l.most`
	)
	for _, limit := range []struct {
		name       string
		isolation  pgx.TxIsoLevel
		statements []string
		leased     int
	}{
		{"lock, then count and lease in the next statement", pgx.ReadCommitted, []string{lock, take}, 1},
		{"the same in a VOLATILE function, called by one statement", pgx.ReadCommitted, []string{`SELECT lease_one(%d)`}, 1},
		{"lock, count and lease in one statement", pgx.ReadCommitted, []string{both}, 2},
		{"lock, then count, REPEATABLE READ", pgx.RepeatableRead, []string{lock, take}, 2},
	} {
		exec(`TRUNCATE leased`)
		exec(`INSERT INTO leased VALUES (1, false), (2, false)`)
		meet(t, pool, limit.isolation, func(tx pgx.Tx, n int) error {
			for _, s := range limit.statements {
				if s != lock {
					s = fmt.Sprintf(s, n)
				}
				if _, err := tx.Exec(t.Context(), s); err != nil {
					return err
				}
			}
			return nil
		})
		var n int
		if err := pool.QueryRow(t.Context(), `SELECT count(*) FROM leased WHERE is_so`).Scan(&n); err != nil || n != limit.leased {
			t.Errorf("%s: %d are leased (%v), want %d", limit.name, n, err, limit.leased)
		}
	}
	for _, first := range []bool{true, false} {
		exec(`TRUNCATE begun`)
		var told [3]bool
		meet(t, pool, pgx.ReadCommitted, func(tx pgx.Tx, n int) error {
			mine := first == (n == 1)
			return tx.QueryRow(t.Context(), `INSERT INTO begun VALUES ('t', $1) ON CONFLICT (token) DO UPDATE SET token = excluded.token RETURNING is_so`, mine).Scan(&told[n])
		})
		if told[1] != first || told[2] != first {
			t.Errorf("who stored %v first is told %v, the other %v", first, told[1], told[2])
		}
	}
}

// meet calls do in two transactions. The second transaction begins when do has returned in the first one, which has not
// committed. It then waits for the first one.
func meet(t *testing.T, pool *pgxpool.Pool, isolation pgx.TxIsoLevel, do func(tx pgx.Tx, n int) error) {
	t.Helper()
	one, err := pool.BeginTx(t.Context(), pgx.TxOptions{IsoLevel: isolation})
	if err != nil {
		t.Fatal(err)
	}
	defer one.Rollback(context.Background())
	if err := do(one, 1); err != nil {
		t.Fatal(err)
	}
	two, err := pool.BeginTx(t.Context(), pgx.TxOptions{IsoLevel: isolation})
	if err != nil {
		t.Fatal(err)
	}
	pid := two.Conn().PgConn().PID()
	done := make(chan error, 1)
	go func() {
		err := do(two, 2)
		if err == nil {
			err = two.Commit(t.Context())
		}
		done <- err
	}()
	pgtest.Await(t, "the second to wait for the first", func() bool {
		var waits bool
		return pool.QueryRow(t.Context(), `SELECT cardinality(pg_blocking_pids($1)) > 0`, pid).Scan(&waits) == nil && waits
	})
	if err := one.Commit(t.Context()); err != nil {
		t.Fatal(err)
	}
	if err := <-done; err != nil {
		t.Fatal(err)
	}
}
