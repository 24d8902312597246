package main

import (
	"bufio"
	"bytes"
	"cmp"
	"context"
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgtype"
)

// A verdict is the result of a torture run.
type verdict struct {
	Rules   []string  `json:"rules"`  // all rules
	Broken  []broken  `json:"broken"` // those that did not hold
	Figures []figure  `json:"figures"`
	Must    []happens `json:"must_have_happened"`
	Index   string    `json:"indexes"` // result of amcheck

	Struck  map[string]int `json:"strikes"`           // strikes that hit somebody, by fault
	Drained time.Duration  `json:"drain_nanoseconds"` // from the last enqueue to the end of the last run, at most
	Exits   []string       `json:"exits,omitempty"`   // process exits without a known reason

	Troubles []string `json:"troubles,omitempty"` // of the torture itself
}

type broken struct {
	Rule     string      `json:"rule"`
	N        int         `json:"n"`
	Examples []uuid.UUID `json:"examples"`
	Story    []string    `json:"story"` // of the first example
}

type figure struct {
	Name  string   `json:"name"`
	Value *float64 `json:"value"`
	Unit  string   `json:"unit"`
	Goal  *float64 `json:"goal,omitempty"` // maximum

	Strict bool `json:"strict,omitempty"` // the run fails if the value exceeds the goal
}

type happens struct {
	What string `json:"what"`
	N    int    `json:"n"`
}

// judge loads the ledgers into the database and evaluates the rules.
func (l *lab) judge(ctx context.Context) (v verdict, err error) {
	if _, err := l.admin.Exec(ctx, `
		CREATE TABLE t.ledger (kind text NOT NULL, at timestamptz NOT NULL, line jsonb NOT NULL);
		CREATE TABLE t.exec_log (event text, run uuid, lease_no bigint, worker text, at timestamptz, outcome text);
		CREATE TABLE t.said (worker text NOT NULL, what text NOT NULL, n bigint NOT NULL)`, pgx.QueryExecModeSimpleProtocol); err != nil {
		return v, fmt.Errorf("make room for the ledgers: %w", err)
	}
	if err := l.loadLedger(ctx); err != nil {
		return v, fmt.Errorf("load the ledger: %w", err)
	}
	if err := l.loadExecutions(ctx); err != nil {
		return v, fmt.Errorf("load the execution logs: %w", err)
	}
	if err := l.loadLogs(ctx); err != nil {
		return v, fmt.Errorf("load the workers' logs: %w", err)
	}
	for _, name := range []string{"verdict.sql", "figures.sql"} {
		if err := l.script(ctx, name); err != nil {
			return v, err
		}
	}
	if v.Rules, err = rules(); err != nil {
		return v, err
	}
	rows, _ := l.admin.Query(ctx, `SELECT rule, n, examples FROM t.invariant ORDER BY rule`)
	v.Broken, err = pgx.CollectRows(rows, func(row pgx.CollectableRow) (b broken, err error) { return b, row.Scan(&b.Rule, &b.N, &b.Examples) })
	if err != nil {
		return v, err
	}
	for i := range v.Broken {
		if v.Broken[i].Story, err = story(ctx, l.admin, v.Broken[i].Examples[0]); err != nil {
			v.Broken[i].Story = []string{"it could not be told: " + err.Error()}
		}
	}
	rows, _ = l.admin.Query(ctx, `SELECT name, value, unit, goal, name = 'the same before the first fault' AS strict FROM t.figure`)
	if v.Figures, err = pgx.CollectRows(rows, pgx.RowToStructByPos[figure]); err != nil {
		return v, err
	}
	rows, _ = l.admin.Query(ctx, `SELECT what, coalesce(n, 0) FROM t.must`)
	if v.Must, err = pgx.CollectRows(rows, pgx.RowToStructByPos[happens]); err != nil {
		return v, err
	}
	if err := l.replay(ctx, &v); err != nil {
		return v, err
	}
	v.Index = l.checkIndexes(ctx)
	return v, nil
}

// story returns what happened to a run or an instance.
func story(ctx context.Context, db interface {
	Query(ctx context.Context, query string, args ...any) (pgx.Rows, error)
}, id uuid.UUID) ([]string, error) {
	text, err := scripts.ReadFile("story.sql")
	if err != nil {
		return nil, err
	}
	rows, _ := db.Query(ctx, string(text), id)
	return pgx.CollectRows(rows, pgx.RowTo[string])
}

// eachLine calls f with each line of the files that match a pattern.
func (l *lab) eachLine(pattern string, f func(line []byte) error) error {
	names, err := filepath.Glob(filepath.Join(l.dir, pattern))
	if err != nil {
		return err
	}
	for _, name := range names {
		file, err := os.Open(name)
		if err != nil {
			return err
		}
		lines := bufio.NewScanner(file)
		lines.Buffer(nil, 16<<20)
		for err == nil && lines.Scan() {
			err = f(lines.Bytes())
		}
		err = cmp.Or(err, lines.Err())
		_ = file.Close()
		if err != nil {
			return fmt.Errorf("%s: %w", name, err)
		}
	}
	return nil
}

func (l *lab) loadLedger(ctx context.Context) error {
	var rows [][]any
	if err := l.eachLine("ledger.jsonl", func(line []byte) error {
		var e entry
		if err := json.Unmarshal(line, &e); err != nil {
			return err
		}
		rows = append(rows, []any{e.Kind, e.At, json.RawMessage(bytes.Clone(line))})
		return nil
	}); err != nil {
		return err
	}
	_, err := l.admin.CopyFrom(ctx, pgx.Identifier{"t", "ledger"}, []string{"kind", "at", "line"}, pgx.CopyFromRows(rows))
	return err
}

// loadExecutions reads the lines of the handlers: event,run,lease_no,worker,epoch_ms,outcome. The line that a process
// was writing when it was killed may be cut off.
func (l *lab) loadExecutions(ctx context.Context) error {
	form := regexp.MustCompile(`^(start|end),([0-9a-f-]{36}),(\d+),([^,]*),(\d{13}),(\w*)$`)
	var rows [][]any
	broken, exits := 0, 0
	if err := l.admin.QueryRow(ctx, `SELECT count(*) FROM t.ledger WHERE kind = 'exit'`).Scan(&exits); err != nil {
		return err
	}
	if err := l.eachLine("*.exec", func(line []byte) error {
		m := form.FindSubmatch(line)
		if m == nil {
			if broken++; broken > exits {
				return fmt.Errorf("not a line of an execution log: %.100q", line)
			}
			return nil
		}
		var no, ms int64
		if _, err := fmt.Sscan(string(m[3])+" "+string(m[5]), &no, &ms); err != nil {
			return err
		}
		id, err := uuid.ParseBytes(m[2])
		rows = append(rows, []any{string(m[1]), pgtype.UUID{Bytes: id, Valid: true}, no, string(m[4]), time.UnixMilli(ms), string(m[6])})
		return err
	}); err != nil {
		return err
	}
	_, err := l.admin.CopyFrom(ctx, pgx.Identifier{"t", "exec_log"}, []string{"event", "run", "lease_no", "worker", "at", "outcome"}, pgx.CopyFromRows(rows))
	return err
}

// sayings are the messages to look for in the workers' logs.
var sayings = map[string]*regexp.Regexp{
	"stale settle refused": regexp.MustCompile(`^{.*"stale settle refused`),
	"lease is gone":        regexp.MustCompile(`^{.*"lease is gone`),
	"lease given up":       regexp.MustCompile(`^{.*"lease given up`),
	"deadlock":             regexp.MustCompile(`^{.*SQLSTATE 40(P01|001)`),
	"own panic":            regexp.MustCompile(`^panic: chaos: a goroutine of a handler panics`),
	"out of memory":        regexp.MustCompile(`^fatal error: .*memory|^SIGSEGV: segmentation violation$`), // Go's runtime may crash when mmap gives it nothing
}

// loadLogs counts these messages for each worker.
func (l *lab) loadLogs(ctx context.Context) error {
	for i := range l.plan.Workers {
		name := fmt.Sprintf("w%d", i+1)
		said := map[string]int{}
		if err := l.eachLine(name+".log", func(line []byte) error {
			for what, form := range sayings {
				if form.Match(line) {
					said[what]++
				}
			}
			return nil
		}); err != nil {
			return err
		}
		for what := range sayings {
			if _, err := l.admin.Exec(ctx, `INSERT INTO t.said VALUES ($1, $2, $3)`, name, what, said[what]); err != nil {
				return err
			}
		}
	}
	return nil
}

// checkIndexes compares every index with its table.
func (l *lab) checkIndexes(ctx context.Context) string {
	switch _, err := l.admin.Exec(ctx, `CREATE EXTENSION IF NOT EXISTS amcheck`); {
	case code(err) == "58P01", code(err) == "0A000":
		return "not checked: there is no amcheck here"
	case err != nil:
		return "broken: " + err.Error()
	}
	var n int
	if err := l.admin.QueryRow(ctx, `
		SELECT count(*) FROM (
			SELECT bt_index_check(c.oid, true)
			FROM pg_class c JOIN pg_am a ON a.oid = c.relam AND a.amname = 'btree'
			WHERE c.relkind = 'i' AND c.relnamespace = 'public'::regnamespace OFFSET 0) x`).Scan(&n); err != nil {
		return "broken: " + err.Error()
	}
	return fmt.Sprintf("%d sound", n)
}

// strangeExits lists the processes whose end neither our signals nor a poison pill explains: processes with another exit
// code, with a panic in a goroutine, or out of memory.
func (l *lab) strangeExits(ctx context.Context) (strange []string, err error) {
	rows, _ := l.admin.Query(ctx, `
		WITH exits AS (
			SELECT line->>'worker' AS worker, coalesce((line->>'code')::int, 0) AS code, coalesce(line->>'answer', '') AS why, at,
			       at - (SELECT max(s.at) FROM t.ledger s WHERE s.kind = 'start' AND s.line->>'pid' = l.line->>'pid' AND s.at < l.at) AS age
			FROM t.ledger l WHERE kind = 'exit'
		)
		SELECT format('worker %s ended with code %s at %s, after %L', worker, code, at, why)
		FROM exits
		WHERE code <> $1 AND NOT (code = 2 AND why <> 'dump') AND NOT (code = -11 AND why = 'dump')
		  AND NOT (code = -15 AND why = 'terminate' AND age < interval '5 seconds') -- it does not listen to signals yet, on a slow machine
		  AND code <> CASE why WHEN 'kill' THEN -9 WHEN 'dump' THEN 2 WHEN '' THEN $1 ELSE 0 END
		UNION ALL
		SELECT format('worker %s panicked %s times more than it was made to', worker, n)
		FROM (SELECT worker, count(*) - (SELECT sum(s.n) FROM t.said s WHERE s.worker = e.worker AND s.what IN ('own panic', 'out of memory')) AS n
		      FROM exits e WHERE code = 2 AND why <> 'dump' GROUP BY worker) p
		WHERE n > 0`, pillCode)
	return pgx.CollectRows(rows, pgx.RowTo[string])
}

// rules returns the names of all rules in verdict.sql.
func rules() ([]string, error) {
	text, err := scripts.ReadFile("verdict.sql")
	if err != nil {
		return nil, err
	}
	var all []string
	for _, m := range regexp.MustCompile(`SELECT '(I\d\d\w? (?:[^']|\'\')*)'`).FindAllSubmatch(text, -1) {
		all = append(all, strings.ReplaceAll(string(m[1]), "''", "'"))
	}
	slices.Sort(all)
	return all, nil
}
