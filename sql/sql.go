// Package sql holds the schema of simple-workflow, all of its DDL, and applies it.
//
// The files are numbered from 0001 without gaps, are applied forward only, and are never edited once released. Each
// can also be run by hand with psql, in order.
package sql

import (
	"context"
	"crypto/sha256"
	"embed"
	"encoding/hex"
	"errors"
	"fmt"
	"io/fs"
	"regexp"
	"strconv"
	"time"

	"github.com/jackc/pgerrcode"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
)

//go:embed *.sql
var files embed.FS

// ErrBehind means that the database lacks migrations that this build needs.
var ErrBehind = errors.New("sql: the schema is older than this build")

// ErrAhead means that the database has migrations that this build does not know.
var ErrAhead = errors.New("sql: the schema is newer than this build")

// A Migration is one numbered file of the schema.
type Migration struct {
	Version int    // 1, 2, 3 …
	Name    string // file name
	SQL     string // what it executes
	SHA256  string // of SQL, in hexadecimal
}

// A Step is a migration and when it was applied to a database.
type Step struct {
	Migration
	AppliedAt time.Time // zero: not applied
}

var fileName = regexp.MustCompile(`^(\d{4})_[a-z0-9_]+\.sql$`)

// Migrations returns all migrations in order. It panics if the embedded files are not
// numbered from 1 without gaps, which a test rules out.
func Migrations() []Migration { return migrations(files) }

func migrations(files fs.FS) []Migration {
	names, err := fs.Glob(files, "*.sql")
	if err != nil {
		panic(err)
	}
	var all []Migration
	for i, name := range names {
		match := fileName.FindStringSubmatch(name)
		if match == nil {
			panic("sql: " + name + " is not named 0001_words.sql")
		}
		if version, _ := strconv.Atoi(match[1]); version != i+1 {
			panic(fmt.Sprintf("sql: %s is out of order, expected number %04d", name, i+1))
		}
		text, err := fs.ReadFile(files, name)
		if err != nil {
			panic(err)
		}
		sum := sha256.Sum256(text)
		all = append(all, Migration{Version: i + 1, Name: name, SQL: string(text), SHA256: hex.EncodeToString(sum[:])})
	}
	return all
}

// Up brings the database to this build's schema. Tables go into the first schema of the connection's search_path. Any
// number of processes may call it at once: one does the work, the others wait for it.
//
// Each migration is a transaction of its own. Work on all rows is done before it, in many transactions. A transaction
// waits two seconds for a lock, and is repeated if it does not get the lock or was in a deadlock; the sixtieth time
// that is an error, with SQLSTATE 55P03 or 40P01.
//
// A migration that was applied with other text is an error. So are rows that no CHECK would let anybody change any
// more: the error names them, and what to do. After an error Up may be called again: what was done before stays.
func Up(ctx context.Context, conn *pgx.Conn) error {
	prepared := ""
	for {
		next, err := upOne(ctx, conn, prepared)
		if err != nil || next == "" {
			return err
		}
		if before := prepare[next]; before != nil && next != prepared {
			if err := before(ctx, conn); err != nil {
				return fmt.Errorf("before migration %s: %w", next, err)
			}
		}
		prepared = next
	}
}

// A transaction that has waited for a lock must see what was committed meanwhile, whatever the default isolation
// level is.
var upOptions = pgx.TxOptions{IsoLevel: pgx.ReadCommitted, AccessMode: pgx.ReadWrite}

// upOne applies the first migration that is missing, unless it needs a preparation and prepared does not name it. It
// returns the migration's name, or "" if none is missing.
func upOne(ctx context.Context, conn *pgx.Conn, prepared string) (next string, err error) {
	err = patiently(ctx, conn, func(tx pgx.Tx) error {
		next = "" // the transaction may be repeated after another process has applied it
		if _, err := tx.Exec(ctx, `
			CREATE TABLE IF NOT EXISTS workflow_schema (
				version    integer     PRIMARY KEY,
				name       text        NOT NULL,
				sha256     text        NOT NULL,
				applied_at timestamptz NOT NULL DEFAULT clock_timestamp()
			)`); err != nil {
			return fmt.Errorf("create table workflow_schema (is there a schema in search_path?): %w", err)
		}
		steps, err := Status(ctx, tx)
		if err != nil {
			return err
		}
		for _, s := range steps {
			if !s.AppliedAt.IsZero() {
				continue
			}
			next = s.Name
			if prepare[next] != nil && next != prepared {
				return nil
			}
			return apply(ctx, tx, s.Migration)
		}
		return nil
	})
	return next, err
}

// lockMigrations waits until nobody else applies migrations, and locks others out until the transaction ends. The key
// includes the schema, so that two schemas of one database do not wait for each other.
func lockMigrations(ctx context.Context, tx pgx.Tx) error {
	if _, err := tx.Exec(ctx, `
		SELECT pg_advisory_xact_lock(hashtextextended('simple-workflow migrate ' || current_schema(), 0))`); err != nil {
		return fmt.Errorf("wait for the migration lock: %w", err)
	}
	return nil
}

func apply(ctx context.Context, tx pgx.Tx, m Migration) error {
	// The string has many statements, which only the simple protocol allows.
	if _, err := tx.Conn().PgConn().Exec(ctx, m.SQL).ReadAll(); err != nil {
		return fmt.Errorf("apply migration %s: %w", m.Name, err)
	}
	if _, err := tx.Exec(ctx, `
		INSERT INTO workflow_schema (version, name, sha256)
		VALUES ($1, $2, $3)`, m.Version, m.Name, m.SHA256); err != nil {
		return fmt.Errorf("record migration %s: %w", m.Name, err)
	}
	return nil
}

// Querier is what Status and Check need: a connection, a pool or a transaction.
type Querier interface {
	Query(ctx context.Context, query string, args ...any) (pgx.Rows, error)
}

// Status lists this build's migrations and when each was applied. It returns ErrAhead, with both versions named, if
// the database has newer ones, and an error if one was applied with other text. It changes nothing.
func Status(ctx context.Context, db Querier) ([]Step, error) {
	type applied struct {
		Version   int
		Name      string
		SHA256    string
		AppliedAt time.Time
	}
	rows, _ := db.Query(ctx, `
		SELECT version, name, sha256, applied_at
		FROM workflow_schema
		ORDER BY version`)
	done, err := pgx.CollectRows(rows, pgx.RowToStructByPos[applied])
	var pg *pgconn.PgError
	if errors.As(err, &pg) && pg.Code == pgerrcode.UndefinedTable { // nothing is applied yet
		done, err = nil, nil
	}
	if err != nil {
		return nil, fmt.Errorf("read workflow_schema: %w", err)
	}
	all := Migrations()
	if len(done) > len(all) {
		return nil, fmt.Errorf("%w: the database is at version %d, this build knows %d", ErrAhead, done[len(done)-1].Version, len(all))
	}
	steps := make([]Step, len(all))
	for i, m := range all {
		steps[i].Migration = m
		if i >= len(done) {
			continue
		}
		if done[i].Version != m.Version || done[i].SHA256 != m.SHA256 {
			return nil, fmt.Errorf("sql: migration %04d was applied as %s with other text than this build's %s", m.Version, done[i].Name, m.Name)
		}
		steps[i].AppliedAt = done[i].AppliedAt
	}
	return steps, nil
}

// Check returns nil if the database has exactly this build's schema. Otherwise it returns ErrBehind or ErrAhead with
// both versions named, or the error it met. If the schema has no tables, the text of ErrBehind names the schemas that
// have them.
func Check(ctx context.Context, db Querier) error {
	steps, err := Status(ctx, db)
	if err != nil {
		return err
	}
	for _, s := range steps {
		if s.AppliedAt.IsZero() {
			if s.Version == 1 {
				there, err := elsewhere(ctx, db)
				if err != nil {
					return err
				}
				if there != "" {
					return fmt.Errorf("%w: there is nothing in this schema of the database, and %s", ErrBehind, there)
				}
			}
			return fmt.Errorf("%w: the database is at version %d, this build needs %d; run: workflowctl migrate up", ErrBehind, s.Version-1, len(steps))
		}
	}
	return nil
}
