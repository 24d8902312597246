package pgtest

import (
	"context"
	"crypto/rand"
	"fmt"
	"io"
	"net/url"
	"strings"
	"sync"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/simple-workflow/simple-workflow/sql"
)

// host is a server on which databases for tests are created.
type host struct {
	// url leads to an existing database.
	url string

	// private means that nobody else uses the server and that it ends with
	// this process, so that a template may be left on it.
	private bool

	// schemas means that databases may not be created: tests get a schema of
	// the existing database instead.
	schemas bool

	template func() (string, error) // of a private host: migrated once
	input    io.Closer              // of the program that keeps a container running; nil: there is none. A file that nothing refers to would be closed
}

func newHost(url string, private bool) *host {
	h := &host{url: url, private: private}
	h.template = sync.OnceValues(h.makeTemplate)
	return h
}

func randomName() string { return "t_" + strings.ToLower(rand.Text()) }

// urlOf returns the connection string of a database, or schema, that was created on the host.
func (h *host) urlOf(name string) string {
	key, u := "dbname", (*url.URL)(nil)
	if h.schemas {
		key = "search_path"
	}
	if strings.HasPrefix(h.url, "postgres://") || strings.HasPrefix(h.url, "postgresql://") {
		u, _ = url.Parse(h.url) // a connection has been made with it
	}
	if u == nil {
		return h.url + " " + key + "=" + name
	}
	if !h.schemas {
		u.Path = "/" + name
		return u.String()
	}
	query := u.Query()
	query.Set(key, name)
	u.RawQuery = query.Encode()
	return u.String()
}

func (h *host) empty(ctx context.Context, name string) error {
	if h.schemas {
		return h.exec(ctx, "CREATE SCHEMA "+name)
	}
	return h.exec(ctx, "CREATE DATABASE "+name)
}

// migrated copies a template on a private host, which is quicker; elsewhere it applies the migrations.
func (h *host) migrated(ctx context.Context, name string) error {
	if h.private {
		template, err := h.template()
		if err != nil {
			return err
		}
		return h.exec(ctx, "CREATE DATABASE "+name+" TEMPLATE "+template)
	}
	if err := h.empty(ctx, name); err != nil {
		return err
	}
	return h.migrate(ctx, name)
}

func (h *host) makeTemplate() (string, error) {
	ctx, cancel := context.WithTimeout(context.Background(), setUpLimit)
	defer cancel()
	name := randomName()
	if err := h.empty(ctx, name); err != nil {
		return "", fmt.Errorf("create template: %w", err)
	}
	if err := h.migrate(ctx, name); err != nil {
		return "", err
	}
	return name, h.with(ctx, func(conn *pgx.Conn) error {
		// Several sessions can copy a template at the same time if nobody can connect to it.
		if _, err := conn.Exec(ctx, "ALTER DATABASE "+name+" ALLOW_CONNECTIONS false"); err != nil {
			return err
		}
		return awaitUnused(ctx, conn, name)
	})
}

func (h *host) migrate(ctx context.Context, name string) error {
	conn, err := pgx.Connect(ctx, h.urlOf(name))
	if err != nil {
		return err
	}
	defer conn.Close(context.WithoutCancel(ctx))
	if err := sql.Up(ctx, conn); err != nil {
		return fmt.Errorf("migrate: %w", err)
	}
	return nil
}

func (h *host) drop(name string) error {
	ctx, cancel := context.WithTimeout(context.Background(), setUpLimit)
	defer cancel()
	if h.schemas {
		return h.exec(ctx, "DROP SCHEMA IF EXISTS "+name+" CASCADE")
	}
	return h.with(ctx, func(conn *pgx.Conn) error {
		// While connections that were just closed are still ending, DROP takes 100 ms longer.
		if err := awaitUnused(ctx, conn, name); err != nil {
			return err
		}
		_, err := conn.Exec(ctx, "DROP DATABASE IF EXISTS "+name+" WITH (FORCE)")
		return err
	})
}

// awaitUnused waits up to 100 ms for the sessions of a database to end.
func awaitUnused(ctx context.Context, conn *pgx.Conn, name string) (err error) {
	const while = 100 * time.Millisecond
	poll(while, func() bool {
		var used bool
		err = conn.QueryRow(ctx, `
			SELECT EXISTS (SELECT FROM pg_stat_activity WHERE datname = $1)`, name).Scan(&used)
		return err != nil || !used
	})
	return err
}

func (h *host) exec(ctx context.Context, statement string) error {
	return h.with(ctx, func(conn *pgx.Conn) error {
		_, err := conn.Exec(ctx, statement)
		return err
	})
}

func (h *host) with(ctx context.Context, do func(*pgx.Conn) error) error {
	conn, err := pgx.Connect(ctx, h.url)
	if err != nil {
		return err
	}
	defer conn.Close(context.WithoutCancel(ctx))
	return do(conn)
}
