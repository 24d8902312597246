package survival

import (
	"fmt"
	"testing"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/simple-workflow/simple-workflow/internal/pgserver"
	"github.com/simple-workflow/simple-workflow/internal/pgtest"
	"github.com/simple-workflow/simple-workflow/sql"
)

// A primary is lost under load and its standby is promoted. Workers whose address names both continue there. With
// synchronous replication, nothing that was acknowledged is lost or done again. With asynchronous replication, the
// last moments are lost: runs that were enqueued in them are gone, runs that were settled in them are done again, and
// their effect in the database is still there exactly once.
func TestFailover(t *testing.T) {
	for name, synchronous := range map[string]bool{"synchronous": true, "asynchronous": false} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			failover(t, synchronous)
		})
	}
}

func failover(t *testing.T, synchronous bool) {
	primary := pgtest.Server(t, pgserver.Options{Durable: true})
	here := session(t, primary)
	if err := sql.Up(t.Context(), here); err != nil {
		t.Fatal(err)
	}
	standby, err := primary.Standby(t.Context(), "standby")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(standby.Stop)
	there := session(t, standby)
	if synchronous {
		do(t, here, `ALTER SYSTEM SET synchronous_standby_names = 'standby'`, `SELECT pg_reload_conf()`)
	}
	url := fmt.Sprintf("postgres://postgres@127.0.0.1:%d,127.0.0.1:%d/postgres?sslmode=disable&target_session_attrs=read-write", primary.Port(), standby.Port())
	pool := connect(t, url)
	one, two := start(t, url, "one"), start(t, url, "two")
	effects(t, pool, 300, 20)
	succeed := func(n int) {
		t.Helper()
		pgtest.Await(t, fmt.Sprint(n, " runs to succeed"), func() bool {
			return number(t, pool, `SELECT count(*) FROM workflow_run WHERE status = 'succeeded'`) >= n
		})
	}
	succeed(50)
	if !synchronous { // the standby falls behind without anybody noticing
		pgtest.Await(t, "the standby to follow", func() bool {
			return number(t, pool, `SELECT count(*) FROM pg_stat_replication WHERE state = 'streaming'`) == 1
		})
		do(t, there, `ALTER SYSTEM SET primary_conninfo = ''`, `SELECT pg_reload_conf()`)
		pgtest.Await(t, "the standby to fall behind", func() bool { return number(t, pool, `SELECT count(*) FROM pg_stat_replication`) == 0 })
		effects(t, pool, 20, 20)
		succeed(number(t, pool, `SELECT count(*) FROM workflow_run WHERE status = 'succeeded'`) + 50)
	}
	acknowledged := successes(t, pool)
	primary.Kill()
	do(t, there, `SELECT pg_promote()`)
	pool.Reset()
	settled(t, pool)
	invariant(t, pool)
	if synchronous {
		replay(t, pool, mostHeld)
	} else { // runs that workers had settled are leased again on the standby by the same workers
		replay(t, pool, 0)
	}
	again, gone := 0, 0
	now := successes(t, pool)
	for id, before := range acknowledged {
		switch at, there := now[id]; {
		case !there:
			gone++
		case !at.Equal(before):
			again++
		}
	}
	t.Logf("of %d runs that had succeeded %d were done again, %d are gone", len(acknowledged), again, gone)
	switch {
	case synchronous && again+gone > 0:
		t.Errorf("%d runs that had succeeded were done again, %d are gone", again, gone)
	case !synchronous && again == 0:
		t.Error("no run was done again: nothing had been lost, so this says nothing")
	}
	if n := len(now); n != 300 {
		t.Errorf("%d runs have succeeded, want the 300 that were enqueued before", n)
	}
	for _, p := range []*process{one, two} {
		select {
		case err := <-p.ended:
			t.Errorf("a worker has ended: %v", err)
		default:
		}
	}
}

func session(t *testing.T, server *pgserver.Server) *pgx.Conn {
	t.Helper()
	conn, err := pgx.Connect(t.Context(), server.URL("postgres"))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = conn.Close(t.Context()) })
	return conn
}

func do(t *testing.T, conn *pgx.Conn, statements ...string) {
	t.Helper()
	for _, s := range statements {
		if _, err := conn.Exec(t.Context(), s); err != nil {
			t.Fatalf("%s: %v", s, err)
		}
	}
}

// successes returns when each succeeded run finished. A run that is done again has another time; its lease_no may be
// the same, if the standby had not received the first lease.
func successes(t *testing.T, pool *pgxpool.Pool) map[uuid.UUID]time.Time {
	t.Helper()
	rows, _ := pool.Query(t.Context(), `SELECT id, finished_at FROM workflow_run WHERE status = 'succeeded'`)
	all := map[uuid.UUID]time.Time{}
	var id uuid.UUID
	var at time.Time
	if _, err := pgx.ForEachRow(rows, []any{&id, &at}, func() error { all[id] = at; return nil }); err != nil {
		t.Fatal(err)
	}
	return all
}
