package graph_test

import (
	"context"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"

	"github.com/simple-workflow/simple-workflow/graph"
)

// ring inserts rings, which the engine never makes: instances that are their own parent or each other's, completed,
// paused and open; and groups that lie within themselves, with tokens in them. It returns the ids of all instances and
// tokens.
func (s *site) ring(process uuid.UUID) (ids []string) {
	s.t.Helper()
	err := pgx.BeginFunc(s.t.Context(), s.pool, func(tx pgx.Tx) error {
		for _, sql := range []string{
			`SET LOCAL session_replication_role = replica`,
			`INSERT INTO process_instance (id, process_definition_id, status, live_tokens, completed_at, paused_at, parent_process_instance_id, parent_token_id, parent_visit, undone_with_parent)
			 SELECT md5(state || length || n)::uuid, '` + process.String() + `', CASE state WHEN 'over' THEN 'COMPLETED' ELSE 'WAITING' END, CASE state WHEN 'over' THEN 0 ELSE 1 END,
			        CASE state WHEN 'over' THEN now() - interval '1 hour' END, CASE state WHEN 'paused' THEN '2026-01-01'::timestamptz END,
			        md5(state || length || (n + 1) % length)::uuid, md5('token ' || state || length || (n + 1) % length)::uuid, 1, true
			 FROM unnest('{open,over,paused}'::text[]) state, unnest('{1,2,3}'::int[]) length, generate_series(0, length - 1) n`,
			`INSERT INTO parallel_group (id, instance_id, parent_group_id, node, host_token_id, live)
			 SELECT md5('group ' || length || n)::uuid, md5('open1' || 0)::uuid, md5('group ' || length || (n + 1) % length)::uuid, 'U', md5('token open10')::uuid, 1
			 FROM unnest('{1,2,3}'::int[]) length, generate_series(0, length - 1) n`,
			`INSERT INTO process_token (id, instance_id, node, state, parallel_group_id)
			 SELECT md5('token ' || state || length || n)::uuid, md5(state || length || n)::uuid, 'U', CASE state WHEN 'over' THEN 'Completed' ELSE 'Waiting' END,
			        CASE state WHEN 'open' THEN md5('group ' || length || n)::uuid END
			 FROM unnest('{open,over,paused}'::text[]) state, unnest('{1,2,3}'::int[]) length, generate_series(0, length - 1) n`,
			`INSERT INTO compensation_record (instance_id, token_id, run_id, node_id, handler_ref) SELECT instance_id, id, id, 'U', 'test.undo.v1' FROM process_token`,
			`INSERT INTO user_task (instance_id, token_id, node, payload) SELECT instance_id, id, 'U', '{}' FROM process_token WHERE state = 'Waiting' AND parallel_group_id IS NOT NULL`,
		} {
			if _, err := tx.Exec(s.t.Context(), sql); err != nil {
				return fmt.Errorf("%.60s: %w", sql, err)
			}
		}
		rows, _ := tx.Query(s.t.Context(), `SELECT id::text FROM process_instance UNION ALL SELECT id::text FROM process_token`)
		var err error
		ids, err = pgx.CollectRows(rows, pgx.RowTo[string])
		return err
	})
	if err != nil {
		s.t.Fatal(err)
	}
	return ids
}

// Nothing that follows parents or groups loops for ever on a ring: no function that takes ids and no view (the test
// finds all of them in the catalogs), not retention, and not the engine.
func TestRings(t *testing.T) {
	s := newSite(t)
	p := s.deploy("U", `"U": {"human": {}}`)
	ids := s.ring(query[uuid.UUID](t, s.pool, `SELECT id FROM process_definition WHERE name = $1`, p))
	ask := func(sql string) {
		err := pgx.BeginFunc(t.Context(), s.pool, func(tx pgx.Tx) error {
			for _, one := range []string{`SET LOCAL statement_timeout = '2s'`, sql, `ROLLBACK`} {
				if _, err := tx.Exec(t.Context(), one); err != nil {
					return err
				}
			}
			return nil
		})
		if err != nil && err != pgx.ErrTxCommitRollback && !strings.Contains(err.Error(), "commit unexpectedly resulted in rollback") {
			t.Errorf("%.120s: %v", sql, err)
		}
	}
	all := func(sql string) []string {
		rows, _ := s.pool.Query(t.Context(), sql)
		found, err := pgx.CollectRows(rows, pgx.RowTo[string])
		if err != nil {
			t.Fatal(err)
		}
		return found
	}
	array := `FROM unnest('{` + strings.Join(ids, ",") + `}'::uuid[]) id`
	called := map[string]bool{}
	for _, f := range all(`SELECT p.oid::regproc::text FROM workflow_functions() f JOIN pg_proc p ON p.oid = f
		WHERE p.pronargs > 0 AND NOT p.proretset AND 2950 = ALL (p.proargtypes::oid[])`) {
		called[f] = true
		n := query[int](t, s.pool, `SELECT pronargs::int FROM pg_proc WHERE oid = $1::regproc`, f)
		for _, id := range ids {
			ask(fmt.Sprintf(`SELECT %s('%s'%s)`, f, id, strings.Repeat(`, '`+id+`'`, n-1)))
		}
		if n == 2 {
			ask(fmt.Sprintf(`SELECT count(%s(id, other)) %s, %s`, f, array, strings.ReplaceAll(array[5:], ") id", ") other")))
		}
	}
	for _, f := range all(`SELECT p.oid::regproc::text FROM (SELECT f::oid AS oid FROM workflow_functions() f OFFSET 0) f JOIN pg_proc p USING (oid)
		WHERE pg_get_functiondef(p.oid) ~* 'with recursive|\mloop\M' AND pg_get_functiondef(p.oid) ~ 'parent_(process|group)'`) {
		if !called[f] {
			t.Errorf("%s walks, and is not called here", f)
		}
	}
	for _, view := range all(`SELECT r::text FROM workflow_relations() r JOIN pg_class c ON c.oid = r WHERE c.relkind = 'v'`) {
		ask(`SELECT count(*) FROM (SELECT * FROM ` + view + ` OFFSET 0) v`)
		ask(`SELECT to_jsonb(v) FROM ` + view + ` v`)
	}
	ctx, done := context.WithTimeout(t.Context(), 10*time.Second)
	defer done()
	if err := s.cleanIn(ctx); err != nil {
		t.Errorf("retention: %v", err)
	}

	// Instances in a ring of groups do not stop others.
	for _, task := range all(`SELECT id::text FROM user_task WHERE state = 'open'`) {
		s.enqueue("graph.complete_task.v1", fmt.Sprintf(`{"task": %q, "by": "anna"}`, task))
	}
	for _, id := range ids[:3] {
		s.enqueue("graph.cancel.v1", fmt.Sprintf(`{"instance": %q}`, id))
	}
	s.status(s.start(s.deploy("A", step("A", "")), `{}`), graph.Completed)
	s.finishes()
}

// finishes waits until all commands have been executed or refused.
func (s *site) finishes() {
	s.t.Helper()
	await(s.t, "all commands to be carried out", func() bool {
		return query[int](s.t, s.pool, `SELECT count(*) FROM workflow_run WHERE status IN ('pending', 'leased') AND token_id IS NULL`) == 0
	})
}
