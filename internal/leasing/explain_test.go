package leasing_test

import (
	"context"
	"encoding/json"
	"fmt"
	"slices"
	"strings"
	"testing"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/simple-workflow/simple-workflow/run"
)

// A statement is what was sent to a database.
type statement struct {
	sql  string
	args []any
}

// recorder records the statements that are sent to a database.
type recorder struct {
	run.DB
	sent []statement
}

func (r *recorder) Exec(ctx context.Context, sql string, args ...any) (pgconn.CommandTag, error) {
	r.sent = append(r.sent, statement{sql, args})
	return r.DB.Exec(ctx, sql, args...)
}

func (r *recorder) Query(ctx context.Context, sql string, args ...any) (pgx.Rows, error) {
	r.sent = append(r.sent, statement{sql, args})
	return r.DB.Query(ctx, sql, args...)
}

// record returns the statements that do sends, and rolls back what they did.
func record(t *testing.T, pool *pgxpool.Pool, do func(run.DB)) []statement {
	t.Helper()
	var r recorder
	undo(t, pool, func(tx pgx.Tx) {
		r.DB = tx
		do(&r)
	})
	return r.sent
}

type beginner interface {
	Begin(context.Context) (pgx.Tx, error)
}

func undo(t *testing.T, pool beginner, do func(pgx.Tx)) {
	t.Helper()
	tx, err := pool.Begin(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	do(tx)
	if err := tx.Rollback(t.Context()); err != nil {
		t.Fatal(err)
	}
}

// A node of a plan as EXPLAIN (ANALYZE, BUFFERS, FORMAT JSON) prints it.
type node struct {
	Type      string  `json:"Node Type"`
	Relation  string  `json:"Relation Name"`
	Index     string  `json:"Index Name"`
	Operation string  `json:"Operation"`
	Rows      float64 `json:"Actual Rows"`
	Loops     float64 `json:"Actual Loops"`
	Removed   float64 `json:"Rows Removed by Filter"`
	Unjoined  float64 `json:"Rows Removed by Join Filter"`
	Hit       int     `json:"Shared Hit Blocks"`
	Read      int     `json:"Shared Read Blocks"`
	Plans     []node
}

// A plan holds the plan of a statement, and the plans of the statements within the functions that it calls.
type plan struct {
	texts []string
	nodes []node
	jit   bool
}

// A watched session collects the plans of all statements that it executes.
type watched struct {
	conn  *pgx.Conn
	plans []string
}

// watch makes all sessions that are opened from now on send their plans as notices. It uses PostgreSQL's module
// auto_explain, which sees into functions.
func watch(t *testing.T, owner *pgxpool.Pool) {
	t.Helper()
	for _, set := range []string{"session_preload_libraries = auto_explain", "auto_explain.log_min_duration = 0", "auto_explain.log_analyze = on",
		"auto_explain.log_buffers = on", "auto_explain.log_timing = off", "auto_explain.log_nested_statements = on", "auto_explain.log_format = json",
		"auto_explain.log_level = notice"} {
		exec(t, owner, `DO $do$ BEGIN EXECUTE format('ALTER DATABASE %I SET `+set+`', current_database()); END $do$`)
	}
}

func newWatched(t *testing.T, as *pgxpool.Pool) *watched {
	t.Helper()
	w := &watched{}
	config := as.Config().ConnConfig.Copy()
	config.OnNotice = func(_ *pgconn.PgConn, n *pgconn.Notice) {
		if _, plan, found := strings.Cut(n.Message, "plan:\n"); found {
			w.plans = append(w.plans, plan)
		}
	}
	conn, err := pgx.ConnectConfig(t.Context(), config)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { conn.Close(context.Background()) })
	w.conn = conn
	return w
}

// explain executes the statement twice, rolls it back, and returns the plans of the second time. The first
// time the session also reads the catalogs.
func (w *watched) explain(t *testing.T, s statement) plan {
	t.Helper()
	for range 2 {
		w.plans = nil
		undo(t, w.conn, func(tx pgx.Tx) { exec(t, tx, s.sql, s.args...) })
	}
	var p plan
	for _, text := range w.plans {
		var parsed struct {
			Plan node
			JIT  json.RawMessage
		}
		if err := json.Unmarshal([]byte(text), &parsed); err != nil {
			t.Fatal(err)
		}
		p.texts, p.nodes, p.jit = append(p.texts, text), append(p.nodes, parsed.Plan), p.jit || parsed.JIT != nil
	}
	if len(p.nodes) < 2 {
		t.Fatalf("%d plans of %s: the statements within it are not told", len(p.nodes), s.sql)
	}
	return p
}

// buffers returns how many buffers the whole statement touches. Its plan is the last one.
func (p plan) buffers() int { last := p.nodes[len(p.nodes)-1]; return last.Hit + last.Read }

// bad returns what is wrong with a plan that should touch about n rows: tables and indexes may only be
// searched by key, and no more than about n rows may be sorted or filtered out.
func (p plan) bad(n int) (list []string) {
	indexes := []string{"workflow_pause_open_idx", "workflow_run_lane_idx", "workflow_run_pkey", "workflow_run_leased_idx",
		"process_token_pkey", "process_instance_pkey", "workflow_accepted_pkey"} // of steps, and of runs that are handed on
	var walk func(node)
	walk = func(x node) {
		total := int(x.Rows * x.Loops)
		switch {
		case x.Relation == "workflow_pause", x.Relation == "workflow_policy", x.Relation == "workflow_binding", x.Relation == "workflow_set_aside", x.Relation == "workflow_kept", x.Relation == "workflow_accepted", x.Relation == "outbox_sink", x.Relation == "workflow_outage": // a row or two
		case strings.HasSuffix(x.Type, "Seq Scan"):
			list = append(list, x.Type+" on "+x.Relation)
		case x.Index != "" && !slices.Contains(indexes, x.Index):
			list = append(list, x.Type+" on "+x.Index)
		case strings.HasSuffix(x.Type, "Sort") && total > 2*n:
			list = append(list, fmt.Sprintf("%s of %d rows", x.Type, total))
		}
		if x.Relation == "workflow_run" && x.Operation == "" && (total > 2*n || int(x.Removed*x.Loops) > 2*n) {
			list = append(list, fmt.Sprintf("%s on %s brings %d rows and drops %.0f", x.Type, x.Relation, total, x.Removed*x.Loops))
		}
		if pairs := int(x.Unjoined * x.Loops); pairs > 20*n {
			list = append(list, fmt.Sprintf("%s looks at %d pairs in vain", x.Type, pairs))
		}
		for _, child := range x.Plans {
			walk(child)
		}
	}
	for _, root := range p.nodes {
		walk(root)
	}
	if p.jit {
		list = append(list, "compiled by JIT")
	}
	return list
}

func (p plan) check(t *testing.T, what string, n, buffers int) {
	t.Helper()
	if bad := p.bad(n); len(bad) > 0 {
		t.Errorf("%s: %v\n%s", what, bad, strings.Join(p.texts, "\n"))
	}
	if got := p.buffers(); buffers > 0 && got > buffers {
		t.Errorf("%s: %d buffers, want at most %d\n%s", what, got, buffers, strings.Join(p.texts, "\n"))
	}
}
