package docs

import (
	"context"
	"errors"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"

	"github.com/simple-workflow/simple-workflow/internal/pgtest"
)

// anyID replaces … in statements.
const anyID = "01a20152-b46e-7d02-8a4b-6c1f8f6a9d10"

// statements splits a block at semicolons, except in quotes, between dollars and in comments.
func statements(text string) (all []string) {
	start, until := 0, ""
	for k := 0; k < len(text); k++ {
		rest := text[k:]
		switch {
		case until != "":
			if strings.HasPrefix(rest, until) {
				k += len(until) - 1
				until = ""
			}
		case strings.HasPrefix(rest, "--"):
			until = "\n"
		case rest[0] == '\'':
			until = "'"
		case strings.HasPrefix(rest, "$$"):
			until = "$$"
			k++
		case rest[0] == ';':
			all = append(all, text[start:k])
			start = k + 1
		}
	}
	return append(all, text[start:])
}

var (
	comment = regexp.MustCompile(`(?m)--.*$`)
	literal = regexp.MustCompile(`'[^']*'`)
	whole   = regexp.MustCompile(`^(SELECT .|INSERT .* VALUES|UPDATE .* SET |ALTER .* SET |CREATE .)`)
	calls   = regexp.MustCompile(`^(?:SELECT )?((?:workflow|process|outbox|pg)_\w+)\((.*)\)$`)
	words   = regexp.MustCompile(`^([a-z_]+(, [a-z_]+)*)?$`)
)

// The database accepts the SQL of the pages: tables, columns, functions and their parameters exist. Where … stands
// for an id, or a page shows a refusal, the database may answer that there is no such row or that the change is not
// allowed, but not that it does not understand the statement.
func TestSQL(t *testing.T) {
	t.Parallel()
	conn, err := pgx.Connect(t.Context(), pgtest.URL(t))
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close(context.WithoutCancel(t.Context()))
	n := 0
	for _, p := range pages(t) {
		all := p.blocks("sql")
		for _, b := range p.inline() {
			call := calls.FindStringSubmatch(b.text)
			if call != nil && words.MatchString(call[2]) {
				parameters(t, conn, b.at, call[1], call[2])
				continue
			}
			if call != nil {
				b.text = "SELECT " + strings.TrimPrefix(b.text, "SELECT ")
			}
			if whole.MatchString(b.text) && !strings.Contains(literal.ReplaceAllString(b.text, ""), "…") {
				all = append(all, b)
			}
		}
		for _, b := range all {
			tx, err := conn.Begin(t.Context())
			if err != nil {
				t.Fatal(err)
			}
			for _, statement := range statements(b.text) {
				statement = strings.TrimSpace(comment.ReplaceAllString(statement, ""))
				if statement == "" {
					continue
				}
				n++
				try(t, tx, b.at, statement)
			}
			if err := tx.Rollback(t.Context()); err != nil {
				t.Fatal(err)
			}
		}
	}
	if n < 60 {
		t.Errorf("found only %d statements", n)
	}
}

func try(t *testing.T, tx pgx.Tx, at, statement string) {
	t.Helper()
	err := pgx.BeginFunc(t.Context(), tx, func(tx pgx.Tx) error {
		_, err := tx.Exec(t.Context(), strings.ReplaceAll(statement, "…", anyID), pgx.QueryExecModeSimpleProtocol)
		return err
	})
	if pg := (*pgconn.PgError)(nil); errors.As(err, &pg) {
		const noRole = "42704" // a role of the reader's own
		if strings.HasPrefix(pg.Code, "42") && pg.Code != noRole {
			t.Errorf("%s: %s: %s", at, statement, pg.Message)
		}
	} else if err != nil {
		t.Fatalf("%s: %s: %v", at, statement, err)
	}
}

// parameters checks that a function exists that has all the parameters that a page names.
func parameters(t *testing.T, conn *pgx.Conn, at, function, names string) {
	t.Helper()
	var there bool
	if err := conn.QueryRow(t.Context(), `SELECT EXISTS (SELECT FROM pg_proc WHERE proname = $1 AND string_to_array($2, ', ') <@ coalesce(proargnames, '{}'))`, function, names).Scan(&there); err != nil {
		t.Fatal(err)
	}
	if !there {
		t.Errorf("%s: there is no function %s with parameters %s", at, function, names)
	}
}

var name = regexp.MustCompile(`^(workflow|process|outbox)_[a-z0-9_]+[a-z0-9](\(\))?$`)

// Every name in code that looks like an object of ours in the database, or like a metric, exists.
func TestNamesExist(t *testing.T) {
	t.Parallel()
	known := map[string]bool{
		"process_def_id": true, // a name of others
	}
	for _, role := range regexp.MustCompile(`(?m)^  (workflow_[a-z]+) `).FindAllStringSubmatch(run(t, "workflowctl", "roles", "--help"), -1) {
		known[role[1]] = true
	}
	conn, err := pgx.Connect(t.Context(), pgtest.URL(t))
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close(context.WithoutCancel(t.Context()))
	rows, err := conn.Query(t.Context(), `SELECT relname FROM pg_class UNION SELECT proname FROM pg_proc UNION SELECT attname FROM pg_attribute
		UNION SELECT tgname FROM pg_trigger UNION SELECT conname FROM pg_constraint UNION SELECT unnest(proargnames) FROM pg_proc`)
	if err != nil {
		t.Fatal(err)
	}
	found, err := pgx.CollectRows(rows, pgx.RowTo[string])
	if err != nil {
		t.Fatal(err)
	}
	for _, n := range found {
		known[n] = true
	}
	for _, file := range []string{"service/metrics.go", "cmd/dispatcher/metrics.go"} {
		text, err := os.ReadFile(filepath.Join(root, file))
		if err != nil {
			t.Fatal(err)
		}
		for _, m := range regexp.MustCompile(`"([a-z_]+)"`).FindAllStringSubmatch(string(text), -1) {
			known[m[1]], known["workflow_"+m[1]], known["outbox_"+m[1]] = true, true, true
		}
	}
	for _, p := range pages(t) {
		for _, b := range p.inline() {
			if n := strings.TrimSuffix(b.text, "()"); name.MatchString(b.text) && !known[n] {
				t.Errorf("%s: there is no %s", b.at, b.text)
			}
		}
	}
}
