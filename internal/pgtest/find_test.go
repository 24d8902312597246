package pgtest

import (
	"context"
	"errors"
	"strings"
	"testing"

	"github.com/jackc/pgx/v5"

	"github.com/simple-workflow/simple-workflow/internal/pgserver"
	"github.com/simple-workflow/simple-workflow/sql"
)

func absent(context.Context) (*host, error) { return nil, pgserver.ErrNoBinaries }

func broken(context.Context) (*host, error) { return nil, errors.New("it is broken") }

func works(context.Context) (*host, error) { return newHost("found", true), nil }

func unused(context.Context) (*host, error) { panic("asked, although it should not be") }

// If find finds no server, the error says what to do. If one exists but does not work, find does not fall back to the
// next.
func TestFind(t *testing.T) {
	t.Setenv("TEST_DATABASE_URL", "")
	t.Setenv("DATABASE_URL", "")
	for name, c := range map[string]struct {
		local, docker func(context.Context) (*host, error)
		err           string
	}{
		"local":        {works, unused, ""},
		"broken local": {broken, unused, "it is broken"},
		"docker":       {absent, works, ""},
		"nothing":      {absent, broken, "apt-get install postgresql"},
	} {
		t.Run(name, func(t *testing.T) {
			h, err := find(t.Context(), c.local, c.docker)
			if (h == nil) != (c.err != "") || (err == nil) != (c.err == "") {
				t.Fatalf("find = %v, %v", h, err)
			}
			if err != nil && !strings.Contains(err.Error(), c.err) {
				t.Errorf("err = %v, want %q", err, c.err)
			}
		})
	}
}

// find prefers the environment, and in it TEST_DATABASE_URL to DATABASE_URL. A server that is named there must
// answer.
func TestFindInEnvironment(t *testing.T) {
	server := Server(t, pgserver.Options{})
	t.Setenv("TEST_DATABASE_URL", server.URL("postgres"))
	t.Setenv("DATABASE_URL", "postgres://127.0.0.1:1/none")
	h, err := find(t.Context(), unused, unused)
	if err != nil {
		t.Fatal(err)
	}
	if h.private || h.schemas {
		t.Errorf("private = %v, schemas = %v, want neither", h.private, h.schemas)
	}
	t.Setenv("TEST_DATABASE_URL", "")
	if _, err := find(t.Context(), unused, unused); err == nil || !strings.Contains(err.Error(), "DATABASE_URL") {
		t.Errorf("err = %v, want one that names DATABASE_URL", err)
	}
}

// On a server of somebody else, tests leave nothing behind: each test migrates a database, or a schema where it may
// not create databases, and drops it.
func TestForeign(t *testing.T) {
	server := Server(t, pgserver.Options{})
	root := newHost(server.URL("postgres"), false)
	for _, statement := range []string{
		"CREATE ROLE humble LOGIN", "CREATE DATABASE theirs OWNER humble",
	} {
		if err := root.exec(t.Context(), statement); err != nil {
			t.Fatal(err)
		}
	}
	humble := strings.Replace(server.URL("theirs"), "postgres@", "humble@", 1)
	const words = "host=127.0.0.1 user=humble dbname=theirs sslmode=disable port="
	for name, c := range map[string]struct {
		url     string
		schemas bool
	}{
		"database":         {server.URL("postgres"), false},
		"schema":           {humble, true},
		"schema, no URL":   {words + strings.Split(strings.Split(humble, ":")[2], "/")[0], true},
		"database, no URL": {strings.Replace(words, "humble", "postgres", 1) + strings.Split(strings.Split(humble, ":")[2], "/")[0], false},
	} {
		t.Run(name, func(t *testing.T) {
			h, err := foreign(t.Context(), c.url)
			if err != nil {
				t.Fatal(err)
			}
			if h.schemas != c.schemas {
				t.Errorf("schemas = %v, want %v", h.schemas, c.schemas)
			}
			tryOut(t, h)
		})
	}
	if left := leftovers(t, root, "SELECT datname FROM pg_database WHERE datname LIKE 't\\_%'"); len(left) > 0 {
		t.Errorf("databases left: %v", left)
	}
	theirs := newHost(humble, false)
	if left := leftovers(t, theirs, "SELECT nspname FROM pg_namespace WHERE nspname LIKE 't\\_%'"); len(left) > 0 {
		t.Errorf("schemas left: %v", left)
	}
}

// tryOut creates, uses and drops two migrated databases at the same time.
func tryOut(t *testing.T, h *host) {
	t.Helper()
	for range 2 {
		name := randomName()
		defer func() {
			if err := h.drop(name); err != nil {
				t.Error(err)
			}
		}()
		if err := h.migrated(t.Context(), name); err != nil {
			t.Fatal(err)
		}
		conn, err := pgx.Connect(t.Context(), h.urlOf(name))
		if err != nil {
			t.Fatal(err)
		}
		defer conn.Close(context.Background())
		if err := sql.Check(t.Context(), conn); err != nil {
			t.Error(err)
		}
		if _, err := conn.Exec(t.Context(), "CREATE TABLE mine ()"); err != nil {
			t.Error(err)
		}
	}
}

func leftovers(t *testing.T, h *host, query string) (left []string) {
	t.Helper()
	err := h.with(t.Context(), func(conn *pgx.Conn) error {
		rows, err := conn.Query(t.Context(), query)
		if err != nil {
			return err
		}
		left, err = pgx.CollectRows(rows, pgx.RowTo[string])
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	return left
}
