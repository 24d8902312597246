package sql_test

import (
	"errors"
	"slices"
	"strings"
	"testing"

	"github.com/jackc/pgx/v5"

	"github.com/simple-workflow/simple-workflow/internal/pgtest"
	"github.com/simple-workflow/simple-workflow/internal/schema"
	"github.com/simple-workflow/simple-workflow/sql"
)

// An address with the result of InAddress leads to the schema, whatever characters its name has.
func TestInAddress(t *testing.T) {
	t.Parallel()
	url := pgtest.Empty(t)
	s := connect(t, url)
	for _, name := range []string{"flows", "My Flows", `a"b`, `a\b`, "a,b", "a+b%20&c=d#e", "größe", " a\tb ", "user"} {
		s.do("CREATE SCHEMA " + pgx.Identifier{name}.Sanitize())
		s.expect(name, connect(t, url+"&"+schema.InAddress(name)).do(`SELECT current_schema()`), name)
	}
	if got, want := schema.InAddress("flows"), "options=-csearch_path%3Dflows"; got != want {
		t.Errorf("%s, want %s", got, want)
	}
}

// If a schema has no tables, Check names the schemas that do, even to a role that may not use them. If no schema has
// any, it says how to create them.
func TestCheckFindsOtherSchemas(t *testing.T) {
	t.Parallel()
	url := pgtest.Empty(t)
	s := connect(t, url)
	said := func() string {
		t.Helper()
		err := sql.Check(t.Context(), s.conn)
		if !errors.Is(err, sql.ErrBehind) {
			t.Fatalf("error = %v, want ErrBehind", err)
		}
		return err.Error()
	}
	if got := said(); !strings.Contains(got, "at version 0") || !strings.Contains(got, "migrate up") {
		t.Errorf("with no installation: %s", got)
	}
	s.do(`CREATE SCHEMA flows; CREATE SCHEMA another; CREATE TABLE another.workflow_schema (of_somebody_else text)`)
	if err := sql.Up(t.Context(), connect(t, url+"&"+schema.InAddress("flows")).conn); err != nil {
		t.Fatal(err)
	}
	if found, err := schema.Installations(t.Context(), s.conn); err != nil || !slices.Equal(found, []string{"flows"}) {
		t.Errorf("installations %q, %v, want flows", found, err)
	}
	if found, err := schema.Installations(t.Context(), connect(t, url+"&"+schema.InAddress("flows")).conn); err != nil || len(found) > 0 {
		t.Errorf("beside itself it finds %q, %v", found, err)
	}
	s.do(`SET ROLE pg_monitor`)
	if got := said(); !strings.Contains(got, `in schema "flows"; have the address lead there by ?options=-csearch_path%3Dflows`) || strings.Contains(got, "migrate up") {
		t.Errorf("with one in flows: %s", got)
	}
}
