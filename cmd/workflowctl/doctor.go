package main

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"slices"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/spf13/cobra"

	"github.com/simple-workflow/simple-workflow/sql"
)

// A finding is a problem that doctor reports, and what to do about it.
type finding struct {
	Grave bool   `json:"grave"` // work is lost, wrong or stopped; otherwise the finding is only worth knowing
	What  string `json:"what"`
	Fix   string `json:"fix"`
}

// Each examination is a query that returns findings as rows of grave, what and fix.
var examinations = []string{
	// The guarantees hold only with full durability.
	`SELECT s.name IN ('fsync', 'full_page_writes'), s.name || ' is off: ' || CASE s.name WHEN 'synchronous_commit' THEN 'what was acknowledged may be lost when the server crashes'
	        ELSE 'a crash of the machine can destroy the database' END,
	        CASE s.name WHEN 'synchronous_commit' THEN 'ALTER SYSTEM SET synchronous_commit = on' ELSE 'ALTER SYSTEM SET ' || s.name || ' = on, then restart' END
	 FROM pg_settings s WHERE s.name IN ('fsync', 'full_page_writes', 'synchronous_commit') AND s.setting = 'off'`,
	`SELECT true, 'autovacuum is off: tables grow without end, and every statement gets slower', 'ALTER SYSTEM SET autovacuum = on'
	 FROM pg_settings s WHERE s.name = 'autovacuum' AND s.setting = 'off'`,
	`SELECT true, 'index ' || c.relname || ' is invalid', 'REINDEX INDEX CONCURRENTLY ' || c.oid::regclass
	 FROM pg_index x JOIN pg_class c ON c.oid = x.indexrelid JOIN pg_class r ON r.oid = x.indrelid
	 WHERE NOT x.indisvalid AND r.relnamespace = (SELECT relnamespace FROM pg_class WHERE oid = 'workflow_run'::regclass)`,
	`SELECT true, 'index ' || n || ' is missing: statements that need it read the whole table', 'compare with: workflowctl migrate print'
	 FROM unnest('{workflow_run_lane_idx,workflow_run_leased_idx,workflow_run_finished_idx,workflow_run_idempotency_idx,workflow_run_token_idx,process_instance_failed_idx,outbox_event_open_idx}'::text[]) AS n
	 WHERE to_regclass(n) IS NULL`,
	`SELECT false, 'trigger ' || t.tgname || ' on ' || t.tgrelid::regclass || ' is disabled: wrong rows are not refused', format('ALTER TABLE %s ENABLE TRIGGER %I', t.tgrelid::regclass, t.tgname)
	 FROM pg_trigger t JOIN pg_class r ON r.oid = t.tgrelid
	 WHERE t.tgenabled = 'D' AND NOT t.tgisinternal AND r.relnamespace = (SELECT relnamespace FROM pg_class WHERE oid = 'workflow_run'::regclass)`,
	`SELECT false, 'the tables belong to ' || r.rolname || ', a superuser, and functions run with its rights', 'workflowctl roles gives them to a role that cannot log in'
	 FROM pg_class c JOIN pg_roles r ON r.oid = c.relowner WHERE c.oid = 'workflow_run'::regclass AND r.rolsuper`,
	`SELECT false, 'sessions of other roles are not visible: they may hold locks and old snapshots', 'GRANT pg_read_all_stats TO ' || quote_ident(current_user) || '; and pg_signal_backend, to end them'
	 WHERE NOT pg_has_role('pg_read_all_stats', 'USAGE')`,
	`SELECT true, 'every role may call ' || count(*) || ' functions, ' || min(f.name) || ' for one', 'workflowctl roles revokes that, and grants what each role needs'
	 FROM (SELECT ours::text AS name FROM workflow_functions() AS ours JOIN pg_proc p ON p.oid = ours CROSS JOIN LATERAL aclexplode(coalesce(p.proacl, acldefault('f', p.proowner))) a
	       WHERE a.grantee = 0) f
	 HAVING count(*) > 0`,
	`SELECT false, table_name || ': ' || dead || ' dead rows, ' || dead_percent || ' %', 'SELECT * FROM workflow_blocker names the session that keeps them; if none does: VACUUM ' || table_name
	 FROM workflow_bloat WHERE dead > 50000 AND dead_percent > 30`,
	`SELECT problem LIKE 'holds %Lock on %', 'session ' || coalesce(pid::text, '') || ' of ' || coalesce(role, '') || ' ' || problem || coalesce(', for ' || workflow_span(since), ''), way_out FROM workflow_blocker`,
	`SELECT false, subject || ': ' || problem, 'that is fine if it is intended: both groups lease these runs' FROM workflow_coverage WHERE problem LIKE 'prefixes overlap%'`,
	`SELECT false, 'prefix ' || prefix || ' is paused for ' || workflow_span(workflow_age(paused_at)) || ' by ' || paused_by || ': ' || reason, 'workflowctl resume ' || prefix
	 FROM workflow_pause WHERE resumed_at IS NULL`,
	`SELECT false, 'retention: ' || count(*) || ' rows of ' || type || ' cannot be removed, for ' || workflow_span(workflow_age(min(since))) || coalesce(' (SQLSTATE ' || nullif(sqlstate, '') || ')', ''),
	        format('SELECT id, message FROM workflow_set_aside WHERE kind = ''retention'' AND type = %L says why; once that is fixed the next cleanup removes them', type)
	 FROM workflow_unleasable WHERE statement = 'retention' GROUP BY type, sqlstate`,
	keptLonger,
	`SELECT true, 'instance ' || instance_id || ': ' || problem,
	        coalesce('BEGIN; SET LOCAL workflow.override = ''why''; ' || fix || '; COMMIT', 'SELECT message FROM process_unreachable WHERE instance_id = ' || quote_literal(instance_id) || ' says what refuses it; once that is fixed it continues')
	 FROM process_fault LIMIT 20`,
	`SELECT true, 'run ' || r.id || ' of type ' || r.type || ' is due at ' || r.run_at || ': never', 'SELECT workflow_reschedule(' || quote_literal(r.id) || ', now())'
	 FROM workflow_lane l CROSS JOIN LATERAL (SELECT o.id, o.type, o.run_at FROM workflow_open o WHERE o.suspect = l.suspect AND o.type = l.type AND o.priority = l.priority
	       AND o.run_at > now() + interval '11 years' ORDER BY o.run_at DESC, o.id LIMIT 5) r LIMIT 20`,
	`SELECT false, 'constraint ' || c.conname || ' of ' || c.conrelid::regclass || ' is not valid: older rows may violate it', format('ALTER TABLE %s VALIDATE CONSTRAINT %I', c.conrelid::regclass, c.conname)
	 FROM pg_constraint c WHERE NOT c.convalidated AND c.conrelid IN (SELECT workflow_relations())`,
	`SELECT true, 'CHECK ' || name || ' is missing: nothing keeps values of ' || relation || ' within their bounds', format('SELECT workflow_add_bounds_v1(%L); SELECT workflow_validate_bounds_v1(%1$L)', relation)
	 FROM workflow_bound_check WHERE valid IS NULL`,
	`SELECT open, 'row ' || key::text || ' of ' || "table" || ': ' || "column" || ' is ' || value || ', allowed is ' || allowed, fix FROM workflow_out_of_bounds(NULL, 20)`,
}

// invariants are views that are empty unless there is a bug.
var invariants = []string{"process_miscounted", "process_undead", "process_untimed", "process_misjoined", "process_misundone", "process_unearned", "process_mismatched", "process_misrecorded"}

func newDoctor() *cobra.Command {
	var t target
	asJSON, thorough := false, false
	doctor := &cobra.Command{
		Use:   "doctor",
		Short: "Look for problems: server, settings, schema, coverage, backlog, blockers; exit with 1 if anything is grave",
		Args:  takes(0),
		RunE: func(cmd *cobra.Command, _ []string) error {
			return t.with(cmd.Context(), func(conn *pgx.Conn) error {
				found, err := examine(cmd.Context(), conn, thorough)
				if err != nil {
					return err
				}
				return tell(cmd.OutOrStdout(), found, asJSON)
			})
		},
	}
	doctor.Flags().BoolVar(&asJSON, "json", asJSON, "print one JSON array")
	doctor.Flags().BoolVar(&thorough, "thorough", thorough, "also look at every open process, and check the invariants; this reads whole tables")
	t.flags(doctor.Flags())
	return doctor
}

func examine(ctx context.Context, conn *pgx.Conn, thorough bool) ([]finding, error) {
	found := []finding{}
	if err := sql.Check(ctx, conn); err != nil {
		return append(found, finding{true, err.Error(), "workflowctl migrate up"}), nil // everything else would only be a consequence
	}
	skew, err := clockSkew(ctx, conn)
	if err != nil {
		return nil, inWords(err)
	}
	if skew.Abs() > time.Second {
		found = append(found, finding{false, fmt.Sprintf("this machine's clock is %v off the server's; leases use the server's clock alone", skew.Round(time.Millisecond)), "synchronize both, so that logs can be compared"})
	}
	if pooler, err := between(ctx, conn); err != nil {
		return nil, inWords(err)
	} else if pooler != nil {
		if found = append(found, *pooler); conn.IsClosed() { // it refused a transaction
			return found, nil
		}
	}
	queries := examinations
	if thorough {
		queries = append(queries, `SELECT true, 'process ' || name || ', instance ' || instance_id || ': ' || why, 'workflowctl why ' || instance_id FROM process_stuck WHERE why NOT LIKE 'incident%' LIMIT 20`)
		for _, view := range invariants {
			queries = append(queries, `SELECT true, '`+view+`: ' || to_jsonb(v)::text, 'this is a bug: please report it with the rows of the view' FROM `+view+` v LIMIT 5`)
		}
	}
	err = uncompiled(ctx, conn, func(tx pgx.Tx) error {
		more, err := collect(ctx, tx, slices.Concat(queries, needs)...)
		found = append(found, more...)
		return err
	})
	if err != nil {
		return nil, err
	}
	// Each look at a lane has to read a piece of its index, independently of the statistics.
	err = uncompiled(ctx, conn, func(tx pgx.Tx) error {
		if _, err := tx.Exec(ctx, `SET LOCAL enable_bitmapscan = off; SET LOCAL enable_seqscan = off`, pgx.QueryExecModeSimpleProtocol); err != nil {
			return inWords(err)
		}
		more, err := collect(ctx, tx, outboxExaminations...)
		found = append(found, more...)
		return err
	})
	if err != nil {
		return nil, err
	}
	return found, nil
}

// A querier is a connection or a transaction.
type querier interface {
	Query(context.Context, string, ...any) (pgx.Rows, error)
}

func collect(ctx context.Context, db querier, queries ...string) (found []finding, err error) {
	for _, query := range queries {
		rows, _ := db.Query(ctx, query)
		if found, err = pgx.AppendRows(found, rows, pgx.RowToStructByPos[finding]); err != nil {
			return nil, inWords(err)
		}
	}
	return found, nil
}

// clockSkew returns by how much this machine's clock is ahead of the server's, give or take a round trip.
func clockSkew(ctx context.Context, conn *pgx.Conn) (time.Duration, error) {
	var there time.Time
	before := time.Now()
	if err := conn.QueryRow(ctx, `SELECT clock_timestamp()`).Scan(&there); err != nil {
		return 0, err
	}
	middle := before.Add(time.Since(before) / 2)
	return middle.Sub(there), nil
}

func tell(out io.Writer, found []finding, asJSON bool) error {
	grave := 0
	for _, f := range found {
		if f.Grave {
			grave++
		}
	}
	if asJSON {
		text, err := json.Marshal(found)
		if err != nil {
			return err
		}
		fmt.Fprintln(out, string(text))
	} else {
		for _, f := range found {
			level := "note "
			if f.Grave {
				level = "GRAVE"
			}
			fmt.Fprintf(out, "%s  %s\n       → %s\n", level, printable(f.What), printable(f.Fix))
		}
	}
	switch {
	case grave > 0:
		return fmt.Errorf("%d of %d findings are grave", grave, len(found))
	case !asJSON && len(found) == 0:
		fmt.Fprintln(out, "nothing is wrong")
	}
	return nil
}
