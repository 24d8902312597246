package main_test

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/jackc/pgx/v5"

	"github.com/simple-workflow/simple-workflow/internal/cmdtest"
	"github.com/simple-workflow/simple-workflow/internal/pgtest"
)

const orderJSON = `{"process": "order", "version": 3, "start": "pay", "nodes": {
	"pay": {"do": "billing.charge.v1", "to": "size"},
	"size": {"choose": [{"if": "input.n > 1", "to": "pay"}, {"if": "input.n == 1", "to": "paid"}]}, "paid": {"end": true}}}`

func save(t *testing.T, name, text string) string {
	t.Helper()
	path := filepath.Join(t.TempDir(), name)
	if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
	return path
}

func deployed(t *testing.T, url string) int {
	t.Helper()
	rows, _ := connect(t, url).Query(t.Context(), `SELECT count(*) FROM process_definition`)
	n, err := pgx.CollectExactlyOneRow(rows, pgx.RowTo[int])
	if err != nil {
		t.Fatal(err)
	}
	return n
}

// define deploys a definition, prints its id, and changes nothing the second time. An edited definition with the same
// version is refused.
func TestDefine(t *testing.T) {
	t.Parallel()
	url := pgtest.URL(t)
	env := []string{"DATABASE_URL=" + url}
	order := save(t, "order.json", orderJSON)
	var id string
	first, _ := cmdtest.Run(t, env, "define", order)
	want(t, first, 0, "order.json: note: /nodes/size: NO_ELSE: ", "order version 3 is deployed: ")
	if err := connect(t, url).QueryRow(t.Context(), `SELECT id::text FROM process_definition`).Scan(&id); err != nil {
		t.Fatal(err)
	}
	want(t, first, 0, "is deployed: "+id+"\n")
	again := save(t, "again.json", strings.ReplaceAll(orderJSON, "\n", " "))
	want(t, cmdtest.Start(t, nil, "define", "--database-url", url, again), 0, "order version 3 was there already: "+id+"\n")

	older := save(t, "older.json", strings.Replace(orderJSON, `"version": 3`, `"version": 2`, 1))
	newest, _ := cmdtest.Run(t, env, "define", save(t, "newest.json", strings.Replace(orderJSON, `"version": 3`, `"version": 4`, 1)))
	if text := newest.Stdout.String(); strings.Contains(text, "is the highest") {
		t.Errorf("of the highest version it says %q", text)
	}
	want(t, cmdtest.Start(t, env, "define", older), 0, "order version 2 is deployed: ", "order: note: version 4 is the highest, and new instances take it")

	refund := save(t, "refund.json", strings.Replace(orderJSON, `"order"`, `"a_refund"`, 1))
	edited := save(t, "edited.json", strings.Replace(orderJSON, "n > 1", "n > 2", 1))
	want(t, cmdtest.Start(t, env, "define", refund, edited), 1,
		"nothing was deployed: "+edited, `process "order" version 3 is deployed with another text`)
	if n := deployed(t, url); n != 3 {
		t.Errorf("%d definitions, want three", n)
	}
	want(t, cmdtest.Start(t, env, "define", order, refund), 0, "order version 3 was there already: "+id, "a_refund version 3 is deployed: ")
}

// All findings of all files are printed, and if one file has an error none is deployed.
func TestDefineFindings(t *testing.T) {
	t.Parallel()
	url := pgtest.URL(t)
	good := save(t, "good.json", orderJSON)
	bad := save(t, "bad.json", `{"process": "bad", "version": 0, "start": "a", "nodes": {"a": {"do": "x.y", "to": "b"}}}`)
	typo := save(t, "typo.json", `{"proces": "typo"}`)
	parts := []string{
		"good.json: note: /nodes/size: NO_ELSE: ", "bad.json: error: /nodes/a/to: UNKNOWN_NODE: ", "bad.json: error: /version: VERSION: ",
		"typo.json: error: /proces: UNKNOWN_KEY: there is no such key", "workflowctl: 2 of 3 definitions cannot be used",
	}
	want(t, cmdtest.Start(t, []string{"DATABASE_URL=" + url}, "define", good, bad, typo), 1, parts...)
	want(t, cmdtest.Start(t, nil, "define", "--check", good, bad, typo), 1, parts...)
	if n := deployed(t, url); n != 0 {
		t.Errorf("%d definitions, want none", n)
	}
	want(t, cmdtest.Start(t, nil, "define", good, "--check"), 0, "good.json: note: ")
}

// A file that is too large is refused with a message, and is not read to its end.
func TestDefineLargeFile(t *testing.T) {
	t.Parallel()
	huge := save(t, "huge.json", orderJSON)
	if err := os.Truncate(huge, 1<<40); err != nil { // it takes no room on the disk
		t.Fatal(err)
	}
	for _, args := range [][]string{{"define", "--check", huge}, {"graph", huge}} {
		want(t, cmdtest.Start(t, nil, args...), 1, "more than 1048576 bytes")
	}
}

// Control characters in a file do not reach the terminal.
func TestDefineIsPrintable(t *testing.T) {
	t.Parallel()
	p, code := cmdtest.Run(t, nil, "define", "--check", save(t, "evil.json", `{"start": "a", "nodes": {"\u001b[2J\nok": {}}}`))
	if text := p.Stdout.String(); code != 1 || strings.Contains(text, "\x1b") || strings.Contains(text, "\nok") || !strings.Contains(text, "VERB") {
		t.Errorf("exit code %d, output %q", code, text)
	}
}

// A database without the tables, and a wrong command line, are refused with a message.
func TestDefineUsage(t *testing.T) {
	t.Parallel()
	order := save(t, "order.json", orderJSON)
	want(t, cmdtest.Start(t, []string{"DATABASE_URL=" + pgtest.Empty(t)}, "define", order), 1, "run: workflowctl migrate up")
	host, connections := cmdtest.Trap(t)
	url := "postgres://app:s3cr3t@" + host + "/app"
	for _, row := range []struct {
		env  string
		args []string
		want string
	}{
		{"", []string{"define", order}, "DATABASE_URL"},
		{url, []string{"define"}, "no file is named"},
		{url, []string{"define", "--check"}, "no file is named"},
		{url, []string{"define", "-", "-"}, "name - once"},
		{url, []string{"define", order, order + ".not"}, "order.json.not"},
		{"", []string{"define", order, order + ".not", order + ".nor"}, "order.json.nor"},
		{"", []string{"define", order, order + ".not", order + ".nor"}, "order.json.not"},
		{"", []string{"define", order, order + ".not"}, "no database is named"},
		{"", []string{"define", order, order + ".not"}, "order.json: note: "},
		{url, []string{"define", "--chek", order}, "--chek"},
		{url, []string{"graph"}, "either graph FILE"},
		{url, []string{"graph", order, order}, "at most 1"},
		{url, []string{"graph", order + ".not"}, "order.json.not"},
		{url, []string{"graph", order, "--instance=01890a5d-ac96-774b-bcce-b302099a8057"}, "either graph FILE"},
		{url, []string{"graph", "--instance=17"}, `--instance="17": use a UUID`},
		{"", []string{"graph", "--instance=01890a5d-ac96-774b-bcce-b302099a8057"}, "DATABASE_URL"},
	} {
		p := cmdtest.Start(t, []string{"DATABASE_URL=" + row.env}, row.args...)
		want(t, p, 2, row.want)
		if strings.Contains(p.Stderr.String(), "s3cr3t") {
			t.Errorf("%v: %s", row.args, p.Stderr.String())
		}
	}
	if n := connections(); n != 0 {
		t.Errorf("%d connections, want none", n)
	}
}
