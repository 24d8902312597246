package main

import (
	"bufio"
	"bytes"
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

// A verdict is what a torture run has shown.
type verdict struct {
	Rules   []string  `json:"rules"`  // all there are
	Broken  []broken  `json:"broken"` // those that did not hold
	Figures []figure  `json:"figures"`
	Must    []happens `json:"must_have_happened"`
	Index   string    `json:"indexes"` // what amcheck says of them

	Struck  map[string]int `json:"strikes"`           // by fault
	Drained time.Duration  `json:"drain_nanoseconds"` // from the last enqueue to the end of the last run, at most
	Exits   []string       `json:"exits,omitempty"`   // of processes, for no reason that is known
}

type broken struct {
	Rule     string      `json:"rule"`
	N        int         `json:"n"`
	Examples []uuid.UUID `json:"examples"`
}

type figure struct {
	Name  string   `json:"name"`
	Value *float64 `json:"value"`
	Unit  string   `json:"unit"`
	Goal  *float64 `json:"goal,omitempty"` // the most it should be
}

type happens struct {
	What string `json:"what"`
	N    int    `json:"n"`
}

// judge loads the ledgers into the database and asks it.
func (l *lab) judge(ctx context.Context) (v verdict, err error) {
	if _, err := l.admin.Exec(ctx, `
		CREATE TABLE t.ledger (kind text NOT NULL, at timestamptz NOT NULL, line jsonb NOT NULL);
		CREATE TABLE t.exec_log (event text, run uuid, lease_no bigint, worker text, at timestamptz, outcome text);
		CREATE TABLE t.said (what text NOT NULL, n bigint NOT NULL)`, pgx.QueryExecModeSimpleProtocol); err != nil {
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
	if v.Broken, err = pgx.CollectRows(rows, pgx.RowToStructByPos[broken]); err != nil {
		return v, err
	}
	rows, _ = l.admin.Query(ctx, `SELECT name, value, unit, goal FROM t.figure`)
	if v.Figures, err = pgx.CollectRows(rows, pgx.RowToStructByPos[figure]); err != nil {
		return v, err
	}
	rows, _ = l.admin.Query(ctx, `SELECT what, coalesce(n, 0) FROM t.must`)
	if v.Must, err = pgx.CollectRows(rows, pgx.RowToStructByPos[happens]); err != nil {
		return v, err
	}
	v.Index = l.checkIndexes(ctx)
	return v, nil
}

// eachLine calls f with each line of the files that a pattern matches.
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
		lines.Buffer(nil, 1<<20)
		for lines.Scan() && err == nil {
			err = f(lines.Bytes())
		}
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

// loadExecutions reads the lines of the handlers: event,run,lease_no,worker,epoch_ms,outcome.
// The last line of a process that was killed may be cut off.
func (l *lab) loadExecutions(ctx context.Context) error {
	form := regexp.MustCompile(`^(start|end),([0-9a-f-]{36}),(\d+),([^,]*),(\d{13}),(\w*)$`)
	var rows [][]any
	if err := l.eachLine("*.exec", func(line []byte) error {
		m := form.FindSubmatch(line)
		if m == nil {
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

// sayings are what is looked for in the workers' logs.
var sayings = map[string][]string{
	"stale settle refused": {"stale settle refused"},
	"lease is gone":        {"lease is gone"},
	"lease given up":       {"lease given up"},
	"deadlock":             {"40P01", "40001"},
}

func (l *lab) loadLogs(ctx context.Context) error {
	said := map[string]int{}
	if err := l.eachLine("w*.log", func(line []byte) error {
		for what, words := range sayings {
			for _, word := range words {
				if strings.Contains(string(line), word) {
					said[what]++
				}
			}
		}
		return nil
	}); err != nil {
		return err
	}
	for what := range sayings {
		if _, err := l.admin.Exec(ctx, `INSERT INTO t.said VALUES ($1, $2)`, what, said[what]); err != nil {
			return err
		}
	}
	return nil
}

// checkIndexes has every index compared with its table.
func (l *lab) checkIndexes(ctx context.Context) string {
	if _, err := l.admin.Exec(ctx, `CREATE EXTENSION IF NOT EXISTS amcheck`); err != nil {
		return "not checked: there is no amcheck here"
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

// strangeExits lists how processes ended that nobody ended, other than by a run that does so.
func (l *lab) strangeExits(ctx context.Context) (strange []string, err error) {
	rows, _ := l.admin.Query(ctx, `
		SELECT format('worker %s ended by itself with code %s at %s', line->>'worker', coalesce(line->>'code', '0'), at)
		FROM t.ledger x
		WHERE kind = 'exit' AND line->>'answer' IS NULL AND coalesce(line->>'code', '0') <> $1
		  -- A panic in a goroutine of its own, and memory that is gone, end a process with 2.
		  AND NOT (line->>'code' = '2' AND EXISTS (
			SELECT FROM t.exec_log s JOIN t.known k USING (run)
			WHERE k.kase IN ('gopanic', 'leak') AND s.event = 'start' AND split_part(s.worker, '-', 1) = x.line->>'worker'
			  AND s.at BETWEEN x.at - interval '5 seconds' AND x.at))`, fmt.Sprint(pillCode))
	return pgx.CollectRows(rows, pgx.RowTo[string])
}

// rules returns the names of all rules, as verdict.sql has them.
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
