// Package pgtest gives every test a PostgreSQL database of its own.
//
// The server is the one that TEST_DATABASE_URL or DATABASE_URL names, or else a private one. A private server is
// started, from local binaries or in Docker, when the first test of a test binary asks for it, and ends with the
// binary. Tests are never skipped for lack of a server: they fail with a message that says what to do.
package pgtest

import (
	"context"
	"os"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/simple-workflow/simple-workflow/internal/pgserver"
)

// setUpLimit bounds the setup that is done once per test or test binary.
const setUpLimit = time.Minute

// New returns a pool of connections to a fresh, migrated database that only this test uses. When t ends, the pool is
// closed and the database dropped.
//
// Its queries run in the mode the whole project uses, which works through a connection pooler and never lets the
// server choose a generic plan.
//
// With PGTEST_BOUNCER=1 in the environment, and the build tag pooler, the pool connects through a pgbouncer in
// transaction mode, which does not pass notifications on. With PGTEST_ROLES, such as engine,enqueue, the pool logs in
// as a user who has only these roles.
func New(t testing.TB) *pgxpool.Pool {
	t.Helper()
	url := URL(t)
	if os.Getenv("PGTEST_BOUNCER") != "" {
		url = through(t, url)
	}
	config, err := pgxpool.ParseConfig(url)
	if err != nil {
		t.Fatal(err)
	}
	config.ConnConfig.DefaultQueryExecMode = pgx.QueryExecModeCacheDescribe
	pool, err := pgxpool.NewWithConfig(t.Context(), config)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(pool.Close)
	if roles := os.Getenv("PGTEST_ROLES"); roles != "" {
		return As(t, pool, Roles(t, pool), strings.Split(roles, ",")...)
	}
	return pool
}

// through is Bouncer in tests that are built with the tag pooler.
var through = func(t testing.TB, _ string) string {
	t.Helper()
	t.Fatal("PGTEST_BOUNCER is set, and these tests were built without the tag pooler: make test-pooler")
	return ""
}

// URL returns the connection string of a fresh, migrated database, for tests that start processes. When t ends, the
// database is dropped and its open connections are closed.
func URL(t testing.TB) string {
	t.Helper()
	return fresh(t, (*host).migrated)
}

// Open returns a pool of connections to a database, with pgx's defaults. It is closed when t ends.
func Open(t testing.TB, url string) *pgxpool.Pool {
	t.Helper()
	pool, err := pgxpool.New(t.Context(), url)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(pool.Close)
	return pool
}

// Empty returns the connection string of a fresh database without any tables,
// which is dropped when t ends.
func Empty(t testing.TB) string {
	t.Helper()
	return fresh(t, (*host).empty)
}

// Server starts a server that only t uses, for tests that stop or kill it, and
// stops it when t ends. It has no database but postgres, and that is empty.
func Server(t testing.TB, options pgserver.Options) *pgserver.Server {
	t.Helper()
	server, err := pgserver.Start(t.Context(), options)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(server.Stop)
	return server
}

func fresh(t testing.TB, create func(*host, context.Context, string) error) string {
	t.Helper()
	h, err := shared()
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithTimeout(t.Context(), setUpLimit)
	defer cancel()
	name := randomName()
	t.Cleanup(func() {
		if err := h.drop(name); err != nil {
			t.Errorf("drop database %s: %v", name, err)
		}
	})
	if err := create(h, ctx, name); err != nil {
		t.Fatalf("create database %s: %v", name, err)
	}
	return h.urlOf(name)
}
