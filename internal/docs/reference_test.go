package docs

import (
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/jackc/pgx/v5"

	"github.com/simple-workflow/simple-workflow/internal/pgtest"
)

// read returns the text of a page.
func read(t *testing.T, path string) string {
	t.Helper()
	text, err := os.ReadFile(filepath.Join(root, path))
	if err != nil {
		t.Fatal(err)
	}
	return string(text)
}

// docs/reference-cli.md has a row for each command of workflowctl, as its usage has it, with all of the command's own flags and no others.
func TestReferenceOfCommands(t *testing.T) {
	t.Parallel()
	c := &ctl{t, map[string]string{}}
	rows := map[string]string{} // usage to flags
	for _, m := range regexp.MustCompile("(?m)^\\| `([^`]+)` \\| [^|]+ \\| ([^|]*)\\|$").FindAllStringSubmatch(read(t, "docs/reference-cli.md"), -1) {
		rows[m[1]] = m[2]
	}
	want := map[string]bool{"completion SHELL": true}
	check := func(path ...string) {
		help := c.help(path...)
		_, usage, _ := strings.Cut(help, "Usage:\n  workflowctl ")
		usage, _, _ = strings.Cut(usage, "\n")
		usage = strings.TrimSuffix(usage, " [flags]")
		want[usage] = true
		row, ok := rows[usage]
		if !ok {
			t.Errorf("docs/reference-cli.md has no row `%s`", usage)
			return
		}
		var own, named []string
		for _, m := range regexp.MustCompile(`(?m)^ +(?:-\w, )?(--[a-z][a-z-]*)`).FindAllStringSubmatch(help, -1) {
			if !slices.Contains([]string{"--help", "--database-url", "--schema"}, m[1]) {
				own = append(own, m[1])
			}
		}
		for _, m := range regexp.MustCompile("`(--[a-z][a-z-]*)`").FindAllStringSubmatch(row, -1) {
			named = append(named, m[1])
		}
		for _, name := range own {
			if !slices.Contains(named, name) {
				t.Errorf("docs/reference-cli.md does not say that %s has %s", usage, name)
			}
		}
		for _, name := range named {
			if !slices.Contains(own, name) {
				t.Errorf("docs/reference-cli.md says that %s has %s", usage, name)
			}
		}
	}
	for name := range c.below() {
		switch name {
		case "help", "completion":
			continue
		case "migrate":
		default:
			check(name)
		}
		for sub := range c.below(name) {
			check(name, sub)
		}
	}
	_, text, _ := strings.Cut(c.help("show"), "psql can read, too:\n\n")
	text, _, _ = strings.Cut(text, "\n\n")
	for _, m := range listed.FindAllStringSubmatch(text, -1) {
		if _, ok := rows[m[1]]; !ok {
			t.Errorf("docs/reference-cli.md does not say what show %s has", m[1])
		}
		want[m[1]] = true
	}
	for usage := range rows {
		if !want[usage] {
			t.Errorf("docs/reference-cli.md has a row `%s`, and workflowctl has no such command", usage)
		}
	}
}

// granted returns what docs/rights.md says that a role is granted: the names of functions, and of relations that it may read.
func granted(t *testing.T, role string) (functions, relations map[string]bool) {
	t.Helper()
	text, _, _ := strings.Cut(read(t, "docs/rights.md"), "\n## What functions change")
	_, text, ok := strings.Cut(text, "\n### "+role+"\n")
	if !ok {
		t.Fatalf("docs/rights.md says nothing of %s", role)
	}
	text, _, _ = strings.Cut(text, "\n### ")
	tables, calls, _ := strings.Cut(text, "\nFunctions:\n")
	functions, relations = map[string]bool{}, map[string]bool{}
	for _, m := range regexp.MustCompile(`(?m)^(\w+)\(`).FindAllStringSubmatch(calls, -1) {
		functions[m[1]] = true
	}
	for _, m := range regexp.MustCompile(`(?m)^(\w+)(?: \(view\))?: .*\bSELECT\b`).FindAllStringSubmatch(tables, -1) {
		relations[m[1]] = true
	}
	return functions, relations
}

// docs/reference-sql.md has every view, and every function that people and programs of the reader's may call, with all of its parameters
// and with the roles that may call or read it. What is called by our programs and functions alone is named here.
func TestReferenceOfSQL(t *testing.T) {
	t.Parallel()
	ours := map[string]bool{}
	for _, name := range strings.Fields(`outbox_behind outbox_wants process_group_keys process_lock_called process_lock_waits process_paused_since
		process_paused_with process_scopes process_task_finish process_trace process_undoes workflow_advance workflow_age workflow_at_work
		workflow_beyond workflow_console workflow_covers workflow_document_problem workflow_edit workflow_event_id workflow_follows
		workflow_for_others workflow_functions workflow_key_of workflow_open_rows workflow_overrides workflow_relations workflow_row_is
		workflow_run_is_new workflow_run_refuse_insert workflow_run_refuse_reserved workflow_span workflow_stalled_types workflow_unremoved_id`) {
		ours[name] = true
	}
	versioned := regexp.MustCompile(`_v[0-9]+$`)
	type row struct{ parameters, roles string }
	functions, relations := map[string]row{}, map[string]row{}
	for _, m := range regexp.MustCompile("(?m)^\\| `(\\w+)(\\((.*)\\))?` \\| [^|]+ \\| ([^|]+) \\|$").FindAllStringSubmatch(read(t, "docs/reference-sql.md"), -1) {
		if m[2] != "" {
			functions[m[1]] = row{m[3], m[4]}
		} else {
			relations[m[1]] = row{"", m[4]}
		}
	}

	callers, readers := map[string][]string{}, map[string][]string{}
	for _, role := range []struct{ name, heading string }{{"enqueue", "_enqueue"}, {"worker", "_worker, bound to `media.`"}, {"operator", "_operator"}, {"viewer", "_viewer"}, {"tasks", "_tasks"}} {
		calls, reads := granted(t, role.heading)
		for name := range calls {
			callers[name] = append(callers[name], role.name)
			if _, ok := functions[name]; !ok && role.name != "worker" && !ours[name] && !versioned.MatchString(name) {
				t.Errorf("docs/reference-sql.md lacks %s, which %s may call", name, role.heading)
			}
		}
		for name := range reads {
			if role.name != "enqueue" { // it sees the ids of what it has just inserted, and the version of the schema
				readers[name] = append(readers[name], role.name)
			}
		}
	}
	for name, is := range functions {
		if want := strings.Join(callers[name], ", "); is.roles != want {
			t.Errorf("docs/reference-sql.md says that %s is for %s, want %s", name, is.roles, want)
		}
	}
	for name, is := range relations {
		if want := strings.Join(readers[name], ", "); is.roles != want {
			t.Errorf("docs/reference-sql.md says that %s is for %s, want %s", name, is.roles, want)
		}
	}

	conn, err := pgx.Connect(t.Context(), pgtest.URL(t))
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close(t.Context())
	found, err := conn.Query(t.Context(), `SELECT proname, array_to_string(array_remove(coalesce(proargnames[1:pronargs], '{}'), 'on_behalf_of'), ', ')
		FROM pg_proc WHERE pronamespace = current_schema::regnamespace`)
	if err != nil {
		t.Fatal(err)
	}
	there := map[string]string{}
	var name, parameters string
	if _, err := pgx.ForEachRow(found, []any{&name, &parameters}, func() error { there[name] = parameters; return nil }); err != nil {
		t.Fatal(err)
	}
	for name, is := range functions {
		if want, ok := there[name]; !ok || is.parameters != want {
			t.Errorf("docs/reference-sql.md has %s(%s), want (%s)", name, is.parameters, want)
		}
	}
	views, err := conn.Query(t.Context(), `SELECT relname FROM pg_class WHERE relnamespace = current_schema::regnamespace AND relkind = 'v'`)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := pgx.ForEachRow(views, []any{&name}, func() error {
		if _, ok := relations[name]; !ok {
			t.Errorf("docs/reference-sql.md lacks the view %s", name)
		}
		return nil
	}); err != nil {
		t.Fatal(err)
	}
}
