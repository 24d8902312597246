package attack

import (
	"context"
	"fmt"
	"os"
	"strings"
	"testing"

	"github.com/jackc/pgx/v5"

	"github.com/simple-workflow/simple-workflow/internal/pgserver"
	"github.com/simple-workflow/simple-workflow/internal/pgtest"
	"github.com/simple-workflow/simple-workflow/sql"
)

// rightsFile is the page that `make rights` writes. Its first part lists what is granted. Its second part, from
// changedHeading on, lists what functions were observed to change.
const (
	rightsFile     = "../../docs/rights.md"
	changedHeading = "## What functions change\n"
)

// roles are the listed roles, by their names in docs/rights.md. A worker is either bound to a prefix, or to nothing.
var roles = []struct{ name, role string }{
	{"_enqueue", "workflow_enqueue"},
	{"_worker, bound to `media.`", "media"},
	{"_worker, bound to nothing", "workflow_worker"},
	{"_engine", "workflow_engine"},
	{"_dispatcher", "workflow_dispatcher"},
	{"_operator", "workflow_operator"},
	{"_viewer", "workflow_viewer"},
	{"_tasks", "workflow_tasks"},
	{"_console", "desk"},
	{"_owner", "workflow_owner"},
	{"A login that was granted nothing", "stranger"},
}

// docs/rights.md lists exactly what is granted to each role, by tables, columns, policies and functions, so that
// reviewers see each grant that is added or removed.
func TestGranted(t *testing.T) {
	server := pgtest.Server(t, pgserver.Options{})
	conn, err := pgx.Connect(t.Context(), server.URL("postgres"))
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close(context.WithoutCancel(t.Context()))
	if err := makeRoles(t.Context(), conn); err != nil {
		t.Fatal(err)
	}
	found, err := granted(t.Context(), conn)
	if err != nil {
		t.Fatal(err)
	}
	listed, _, _ := strings.Cut(readRights(t), changedHeading)
	compareRights(t, listed, found)
}

// makeRoles migrates a database, and creates all roles, including two bound workers and logins.
func makeRoles(ctx context.Context, conn *pgx.Conn) error {
	if err := sql.Up(ctx, conn); err != nil {
		return err
	}
	if err := sql.Roles(ctx, conn, "workflow"); err != nil {
		return err
	}
	for _, prefix := range []string{"media", "billing"} {
		if err := sql.BindWorker(ctx, conn, "workflow", prefix, []string{prefix + "."}); err != nil {
			return err
		}
	}
	_, err := conn.PgConn().Exec(ctx, `
		ALTER ROLE media LOGIN;
		CREATE ROLE engine LOGIN IN ROLE workflow_engine;
		CREATE ROLE dispatcher LOGIN IN ROLE workflow_dispatcher;
		CREATE ROLE desk LOGIN IN ROLE workflow_console;
		CREATE ROLE anna IN ROLE workflow_operator;
		CREATE ROLE stranger LOGIN`).ReadAll()
	return err
}

func readRights(t *testing.T) string {
	t.Helper()
	text, err := os.ReadFile(rightsFile)
	if err != nil {
		t.Fatal(err)
	}
	return string(text)
}

// compareRights fails with the lines that differ.
func compareRights(t *testing.T, listed, found string) {
	t.Helper()
	if listed == found {
		return
	}
	lines := difference(strings.Split(listed, "\n"), strings.Split(found, "\n"))
	t.Errorf("docs/rights.md (-) is not what the database has (+). If that is meant, write it anew: make rights\n%s", strings.Join(lines[:min(len(lines), 100)], "\n"))
}

// difference lists the lines that only one of two texts has, each after its heading.
func difference(before, after []string) (lines []string) {
	// longest[i][j] is how many lines before[i:] and after[j:] have in common, in this order.
	longest := make([][]int, len(before)+1)
	for i := range longest {
		longest[i] = make([]int, len(after)+1)
	}
	for i := len(before) - 1; i >= 0; i-- {
		for j := len(after) - 1; j >= 0; j-- {
			if before[i] == after[j] {
				longest[i][j] = longest[i+1][j+1] + 1
			} else {
				longest[i][j] = max(longest[i+1][j], longest[i][j+1])
			}
		}
	}
	heading, told := "", ""
	add := func(line string) {
		if heading != told {
			lines = append(lines, "  "+heading)
			told = heading
		}
		lines = append(lines, line)
	}
	for i, j := 0, 0; i < len(before) || j < len(after); {
		switch {
		case i < len(before) && j < len(after) && before[i] == after[j]:
			if strings.HasPrefix(before[i], "#") {
				heading = before[i]
			}
			i, j = i+1, j+1
		case j == len(after) || i < len(before) && longest[i+1][j] >= longest[i][j+1]:
			add("- " + before[i])
			i++
		default:
			add("+ " + after[j])
			j++
		}
	}
	return lines
}

// granted describes what the catalogs say about each role, including what it has through other roles.
func granted(ctx context.Context, conn *pgx.Conn) (string, error) {
	var b strings.Builder
	b.WriteString(`# Rights

Made by ` + "`make rights`" + `; do not edit. [Roles](roles.md) says what they are for. TestGranted compares its first part with what there is, TestRights all of it.

## What is granted

Through other roles and to everybody, too. Rows of tables with policies are seen and changed only where one of those that are named holds. A function marked *owner's* runs with the owner's rights; all others can do no more than who calls them.
A view shows what its owner sees.

`)
	for _, r := range roles {
		fmt.Fprintf(&b, "### %s\n\n", r.name)
		for _, part := range []struct{ title, query string }{{"Roles", memberships}, {"Schema", schemas}, {"Tables, views and sequences", relations}, {"Policies", policies}, {"Functions", functions}} {
			rows, _ := conn.Query(ctx, part.query, r.role)
			lines, err := pgx.CollectRows(rows, pgx.RowTo[string])
			if err != nil {
				return "", fmt.Errorf("%s of %s: %w", part.title, r.role, err)
			}
			if len(lines) == 0 {
				continue
			}
			fmt.Fprintf(&b, "%s:\n\n```\n%s\n```\n\n", part.title, strings.Join(lines, "\n"))
		}
	}
	return b.String(), nil
}

const (
	memberships = `
		SELECT coalesce(nullif(concat_ws(', ', CASE WHEN r.rolsuper THEN 'superuser' END, CASE WHEN r.rolbypassrls THEN 'passes by policies' END,
		           CASE WHEN r.rolcreaterole THEN 'creates roles' END, CASE WHEN r.rolcreatedb THEN 'creates databases' END, CASE WHEN r.rolreplication THEN 'replicates' END,
		           (SELECT string_agg(m.rolname, ', ' ORDER BY m.rolname COLLATE "C") FROM pg_roles m WHERE m.oid <> r.oid AND pg_has_role(r.oid, m.oid, 'USAGE'))), ''), 'none but itself')
		FROM pg_roles r WHERE r.rolname = $1::name`

	schemas = `
		SELECT concat_ws(', ', CASE WHEN has_schema_privilege($1::name, n.oid, 'USAGE') THEN 'use' END, CASE WHEN has_schema_privilege($1::name, n.oid, 'CREATE') THEN 'create' END)
		FROM pg_namespace n
		WHERE n.nspname = current_schema() AND (has_schema_privilege($1::name, n.oid, 'USAGE') OR has_schema_privilege($1::name, n.oid, 'CREATE'))`

	// A privilege is named without columns if it is on the whole table, and with columns otherwise. MAINTAIN
	// (PostgreSQL 17) is not listed, because only the owner has it.
	relations = `
		SELECT name || kind || ': ' || string_agg(right_, ', ' ORDER BY place)
		FROM (
			SELECT c.relname COLLATE "C" AS name, CASE WHEN c.relkind = 'v' THEN ' (view)' ELSE '' END AS kind, p.place,
			       CASE WHEN has_table_privilege($1::name, c.oid, p.name) THEN p.name
			            ELSE p.name || ' (' || (SELECT string_agg(a.attname, ', ' ORDER BY a.attnum) FROM pg_attribute a
			                                    WHERE a.attrelid = c.oid AND a.attnum > 0 AND NOT a.attisdropped AND p.by_column AND has_column_privilege($1::name, c.oid, a.attnum, p.name)) || ')' END AS right_
			FROM pg_class c
			CROSS JOIN (VALUES (1, 'SELECT', true), (2, 'INSERT', true), (3, 'UPDATE', true), (4, 'DELETE', false), (5, 'TRUNCATE', false), (6, 'REFERENCES', true), (7, 'TRIGGER', false), (8, 'MAINTAIN', false)) AS p (place, name, by_column)
			WHERE c.relnamespace = current_schema()::regnamespace AND c.relkind IN ('r', 'p', 'v', 'm', 'f')
			  AND (p.name <> 'MAINTAIN' OR current_setting('server_version_num')::int >= 170000 AND c.relowner <> (SELECT r.oid FROM pg_roles r WHERE r.rolname = $1::name))
			UNION ALL
			SELECT c.relname COLLATE "C", ' (sequence)', p.place, CASE WHEN has_sequence_privilege($1::name, c.oid, p.name) THEN p.name END
			FROM pg_class c
			CROSS JOIN (VALUES (1, 'USAGE'), (2, 'SELECT'), (3, 'UPDATE')) AS p (place, name)
			WHERE c.relnamespace = current_schema()::regnamespace AND c.relkind = 'S') AS x
		WHERE right_ IS NOT NULL
		GROUP BY name, kind
		ORDER BY name`

	// No policy applies to the owner of a table, unless row-level security is forced.
	policies = `
		SELECT c.relname || ': ' || CASE
		           WHEN c.relowner = me.oid AND NOT c.relforcerowsecurity THEN 'none holds for the owner'
		           ELSE coalesce((SELECT string_agg(rule, '; ' ORDER BY rule COLLATE "C") FROM (
		               SELECT CASE p.polcmd WHEN 'r' THEN 'SELECT' WHEN 'a' THEN 'INSERT' WHEN 'w' THEN 'UPDATE' WHEN 'd' THEN 'DELETE' ELSE 'all' END || CASE WHEN p.polpermissive THEN '' ELSE ' (besides)' END
		                      || coalesce(' where ' || pg_get_expr(p.polqual, p.polrelid), '') || coalesce(' with check ' || pg_get_expr(p.polwithcheck, p.polrelid), '') AS rule
		               FROM pg_policy p
		               WHERE p.polrelid = c.oid AND EXISTS (SELECT FROM unnest(p.polroles) AS x WHERE x = 0 OR pg_has_role(me.oid, x, 'USAGE'))) AS rules), 'no row') END
		FROM pg_class c CROSS JOIN pg_roles me
		WHERE c.relnamespace = current_schema()::regnamespace AND c.relrowsecurity AND me.rolname = $1::name AND has_any_column_privilege($1::name, c.oid, 'SELECT, INSERT, UPDATE')
		ORDER BY c.relname COLLATE "C"`

	functions = `
		SELECT p.oid::regprocedure::text || CASE WHEN p.prosecdef THEN ' owner''s' ELSE '' END
		FROM pg_proc p
		WHERE p.pronamespace = current_schema()::regnamespace AND p.prorettype <> 'trigger'::regtype AND has_function_privilege($1::name, p.oid, 'EXECUTE')
		ORDER BY p.proname COLLATE "C", 1`
)
