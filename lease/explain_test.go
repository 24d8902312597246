package lease_test

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

	"github.com/simple-workflow/simple-workflow/internal/session"
	"github.com/simple-workflow/simple-workflow/run"
)

// A statement is what was sent to a database.
type statement struct {
	sql  string
	args []any
}

// recorder notes the statements on their way.
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

// record returns the very statements that do sends, and undoes what they did.
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

type plan struct {
	text string
	root node
	jit  bool
}

const explaining = "EXPLAIN (ANALYZE, BUFFERS, FORMAT JSON) "

// explain executes the statement, planned with its values, undoes it, and returns the plan.
func explain(t *testing.T, pool *pgxpool.Pool, s statement) plan {
	t.Helper()
	var text string
	undo(t, pool, func(tx pgx.Tx) {
		exec(t, tx, session.Unset+`; SET LOCAL plan_cache_mode = force_custom_plan`, pgx.QueryExecModeSimpleProtocol)
		text = query[string](t, tx, explaining+s.sql, s.args...)
	})
	return parsePlan(t, text)
}

// explainKept does the same with the plan that the session keeps of the statement.
func explainKept(t *testing.T, conn *pgxpool.Conn, s statement) plan {
	t.Helper()
	prepared, err := conn.Conn().Prepare(t.Context(), s.sql, s.sql)
	if err != nil {
		t.Fatal(err)
	}
	values := make([]string, len(s.args))
	for i, arg := range s.args {
		text, err := conn.Conn().TypeMap().Encode(prepared.ParamOIDs[i], pgx.TextFormatCode, arg, nil)
		if err != nil {
			t.Fatal(err)
		}
		values[i] = "'" + strings.ReplaceAll(string(text), "'", "''") + "'"
		if text == nil {
			values[i] = "NULL"
		}
	}
	var text string
	undo(t, conn, func(tx pgx.Tx) {
		text = query[string](t, tx, fmt.Sprintf("%s EXECUTE %s (%s)", explaining, prepared.Name, strings.Join(values, ", ")), pgx.QueryExecModeSimpleProtocol)
	})
	return parsePlan(t, text)
}

func parsePlan(t *testing.T, text string) plan {
	t.Helper()
	var parsed []struct {
		Plan node
		JIT  json.RawMessage
	}
	if err := json.Unmarshal([]byte(text), &parsed); err != nil {
		t.Fatal(err)
	}
	return plan{text, parsed[0].Plan, parsed[0].JIT != nil}
}

func (p plan) buffers() int { return p.root.Hit + p.root.Read }

// bad returns what is wrong with a plan that is to touch about n rows: tables and indexes
// may only be entered by key, and only as many rows be sorted or thrown away.
func (p plan) bad(n int) (list []string) {
	indexes := []string{"workflow_pause_open_idx", "workflow_run_lane_idx", "workflow_run_pkey", "workflow_run_leased_idx"}
	var walk func(node)
	walk = func(x node) {
		total := int(x.Rows * x.Loops)
		switch {
		case x.Relation == "workflow_pause": // a row or two
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
	walk(p.root)
	if p.jit {
		list = append(list, "compiled by JIT")
	}
	return list
}

func (p plan) check(t *testing.T, what string, n, buffers int) {
	t.Helper()
	if bad := p.bad(n); len(bad) > 0 {
		t.Errorf("%s: %v\n%s", what, bad, p.text)
	}
	if got := p.buffers(); buffers > 0 && got > buffers {
		t.Errorf("%s: %d buffers, want at most %d\n%s", what, got, buffers, p.text)
	}
}
