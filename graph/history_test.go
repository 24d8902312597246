package graph_test

import (
	"fmt"
	"os"
	"strings"
	"testing"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/simple-workflow/simple-workflow/graph"
	"github.com/simple-workflow/simple-workflow/internal/leasing"
	"github.com/simple-workflow/simple-workflow/internal/pgtest"
	"github.com/simple-workflow/simple-workflow/internal/settling"
)

// copied returns an engine that also stores every event of the core in the table told, in the order in which the core
// has decided. It does not where the tests run as a role, which may create no table.
func copied(t *testing.T, pool *pgxpool.Pool) *graph.Engine {
	t.Helper()
	if asRole {
		return graph.New(pool)
	}
	if _, err := pool.Exec(t.Context(), tellsAll); err != nil {
		t.Fatal(err)
	}
	e := graph.New(pool)
	graph.Copy(e, told)
	return e
}

// asRole is whether the tests run as a role and not as the owner, see pgtest.New.
var asRole = os.Getenv("PGTEST_ROLES") != ""

const (
	told     = "told" // the table of the events
	tellsAll = `
		CREATE TABLE told (id bigint GENERATED ALWAYS AS IDENTITY, instance_id uuid, token_id uuid, event_type text, node text, version bigint, data jsonb,
			began timestamptz DEFAULT now(), at timestamptz DEFAULT clock_timestamp());
		GRANT INSERT ON told TO PUBLIC`
)

// older makes it appear that a worker of an earlier version has decided some transactions: it stores every event of
// theirs, and the runs that they have inserted have the beginning of the transaction as created_at. percent is how many
// transactions these are. It keeps run.unheeded, which that worker would not have written.
func older(t *testing.T, pool *pgxpool.Pool, percent int) {
	t.Helper()
	pgtest.ByHand(t, pool, `
		WITH chosen AS MATERIALIZED (
			SELECT instance_id, version FROM told GROUP BY 1, 2 HAVING random() * 100 < $1
		), events AS MATERIALIZED (
			SELECT o.* FROM told o JOIN chosen USING (instance_id, version) WHERE o.event_type !~ '^(incident|instance)\.'
		), runs AS (
			UPDATE workflow_run r SET created_at = least(r.created_at, o.began)
			FROM events o
			WHERE o.event_type = 'node.entered'
			  AND NOT EXISTS (SELECT FROM process_event e WHERE e.instance_id = o.instance_id AND e.version = o.version AND e.token_id = o.token_id AND e.node = o.node AND e.event_type = o.event_type)
			  AND r.id = (SELECT n.id FROM workflow_run n WHERE n.token_id = o.token_id AND n.node = o.node AND n.created_at > o.at ORDER BY n.created_at LIMIT 1)
		), kept AS MATERIALIZED (
			SELECT e.* FROM process_event e LEFT JOIN chosen c USING (instance_id, version)
			WHERE c.instance_id IS NULL OR e.event_type !~ '^(node|handler|join|compensation)\.'
		), gone AS (
			DELETE FROM process_event
		)
		INSERT INTO process_event (instance_id, token_id, event_type, node, version, data, created_at)
		SELECT instance_id, token_id, event_type, node, version, data, at
		FROM (SELECT instance_id, token_id, event_type, node, version, data, at, id FROM events
		      UNION ALL SELECT instance_id, token_id, event_type, node, version, data, created_at, id FROM kept) x
		ORDER BY at, id`, percent)
}

// activities returns what activity_instance says of all instances.
func activities(t *testing.T, pool *pgxpool.Pool) string {
	t.Helper()
	return query[string](t, pool, `
		SELECT coalesce(string_agg(concat_ws(' ', instance_id, token_id, node_id, id, status, n), E'\n' ORDER BY instance_id, token_id, node_id, id, status), '')
		FROM (SELECT instance_id, token_id, node_id, id, status, count(*) AS n FROM activity_instance GROUP BY 1, 2, 3, 4, 5) a`)
}

// retold checks that process_history has what the core has decided, and nothing else: for each token of each instance
// the same events in the same order, and the events of an instance in the order of its transactions. It leaves out
// events that SQL functions write as well.
func retold(t *testing.T, pool *pgxpool.Pool) {
	t.Helper()
	if asRole {
		return
	}
	const events = `
		WITH core AS (
			SELECT instance_id, token_id, event_type, coalesce(node, '') AS node, data, version, row_number() OVER (PARTITION BY instance_id ORDER BY id) AS nth
			FROM told WHERE event_type !~ '^(incident|instance)\.' AND instance_id IN (SELECT id FROM process_instance)
		), shown AS (
			SELECT instance_id, token_id, event_type, coalesce(node, '') AS node, data, version, row_number() OVER (PARTITION BY instance_id ORDER BY created_at, place, id) AS nth
			FROM process_history WHERE event_type !~ '^(incident|instance|task|fact)\.'
		)`
	if wrong := query[string](t, pool, events+`
		SELECT coalesce(string_agg(concat_ws(E'\n', instance_id || ' ' || token_id, c.line, s.line), E'\n'), '')
		FROM (SELECT instance_id, token_id, string_agg(concat_ws(' ', event_type, node, data), ', ' ORDER BY nth) AS line FROM core GROUP BY 1, 2) c
		FULL JOIN (SELECT instance_id, token_id, string_agg(concat_ws(' ', event_type, node, data), ', ' ORDER BY nth) AS line FROM shown GROUP BY 1, 2) s
		     USING (instance_id, token_id)
		WHERE c.line IS DISTINCT FROM s.line`); wrong != "" {
		t.Errorf("the core has decided, and the history has:\n%s", wrong)
	}
	if wrong := query[string](t, pool, events+`
		SELECT coalesce(string_agg(concat_ws(' ', instance_id, event_type, node, 'of version', version, 'after', before), E'\n'), '')
		FROM (SELECT s.*, c.version, lag(c.version) OVER (PARTITION BY instance_id ORDER BY s.nth) AS before
		      FROM (SELECT instance_id, token_id, event_type, node, nth, row_number() OVER (PARTITION BY instance_id, token_id, event_type, node ORDER BY nth) AS k FROM shown) s
		      JOIN (SELECT instance_id, token_id, event_type, node, version, row_number() OVER (PARTITION BY instance_id, token_id, event_type, node ORDER BY nth) AS k FROM core) c
		           USING (instance_id, token_id, event_type, node, k)) x
		WHERE version < before`); wrong != "" {
		t.Errorf("the history is not in the order of the transactions:\n%s", wrong)
	}
}

// A step of a process stores no event of its visit, and the history has the visit all the same: in a chain, a fork with
// a join, a loop, at a step that an incident has stopped and that is done again, at one that is left over an error edge
// or by a timer, at one that is cut off, and at one that is undone. It has no visit twice if workers of an earlier version
// have stored the events of some transactions, or of all.
func TestHistory(t *testing.T) {
	s := newSite(t)
	s.undoWorks = true
	// The incident comes first: "fails" counts the calls of all steps with this name.
	count := `"n": "'A' in steps ? steps.A.n + 1.0 : 1.0"`
	for _, tale := range []struct {
		name, nodes, want string
		ends              graph.Status
		act               func(id uuid.UUID)
	}{
		{"incident", strings.Replace(step("A", "B", `"fails": "1"`), `"do"`, `"attempts": 1, "do"`, 1) + "," + step("B", ""), "A+ A! A+ A. B+ B.", graph.Completed,
			func(id uuid.UUID) { s.retry(s.stopped(id, "handler_error", 1), "") }},
		{"chain", step("A", "B") + "," + step("B", ""), "A+ A. B+ B.", graph.Completed, nil},
		{"fork", `"A": {"fork": ["B", "C"]}, "J": {"join": "all", "to": "D"},` + step("B", "J") + "," + step("C", "J", `"ms": "100"`) + "," + step("D", ""), "B+ C+ B. C. D+ D.", graph.Completed, nil},
		{"loop", step("A", "X", count) + `, "X": {"choose": [{"if": "steps.A.n < 3.0", "to": "A"}], "else": "end"}, "end": {"end": true}`, "A+ A. A+ A. A+ A.", graph.Completed, nil},
		{"refused result", strings.Replace(step("A", "B"), `"to"`, `"out": {"id": "result.receipt.id"}, "to"`, 1) + "," + step("B", ""), "A+ A. B+ B.", graph.Completed,
			func(id uuid.UUID) {
				incident := s.stopped(id, "mapping_failed", 1)
				s.correct(id, "A", `{"id": "r-9"}`)
				s.retry(incident, "")
			}},
		{"refused for good", strings.Replace(step("A", "B"), `"to"`, `"out": {"id": "result.receipt.id"}, "to"`, 1) + "," + step("B", ""), "A+", graph.Cancelled,
			func(id uuid.UUID) {
				s.stopped(id, "mapping_failed", 1)
				s.enqueue("graph.cancel.v1", fmt.Sprintf(`{"instance": %q}`, id))
			}},
		{"error edge", strings.Replace(step("A", "B", `"fail": "'no'"`), `"to"`, `"on": [{"error": "no", "to": "B"}], "to"`, 1) + "," + step("B", ""), "A+ A! B+ B.", graph.Completed, nil},
		{"error of a scope", `"A": {"scope": {"start": "C", "nodes": {` + step("C", "", `"fail": "'no'"`) + `}}, "on": [{"error": "no", "to": "B"}]}, ` + step("B", ""), "A+ C+ C! B+ B.", graph.Completed, nil},
		{"timer", strings.Replace(step("A", "end", `"ms": "20000"`), `"to"`, `"on": [{"after": "PT0.1S", "keep": true, "to": "C"}, {"after": "PT1S", "to": "B"}], "to"`, 1) + "," +
			step("B", "") + "," + step("C", "") + `, "end": {"end": true}`, "A+ A~ C+ C. A~ B+ B.", graph.Completed, nil},
		{"no key", strings.Replace(step("A", "end"), `"to"`, `"on": [{"message": "m", "key": "input.key", "to": "end"}], "to"`, 1) + `, "end": {"end": true}`, "A+ A+", graph.Cancelled,
			func(id uuid.UUID) {
				s.retry(s.stopped(id, "expression_failed", 1), "")
				s.stopped(id, "expression_failed", 1)
				s.enqueue("graph.cancel.v1", fmt.Sprintf(`{"instance": %q}`, id))
			}},
		{"cancel", step("A", "", `"ms": "20000"`), "A+", graph.Cancelled, func(id uuid.UUID) {
			s.leased(id, "A")
			s.enqueue("graph.cancel.v1", fmt.Sprintf(`{"instance": %q}`, id))
		}},
		{"undo", undoable("A", "B") + "," + step("B", "", `"fail": "'no'"`), "A+ A. B+ B!", graph.Failed, nil},
	} {
		id := s.start(s.deployAs(strings.ReplaceAll(tale.name, " ", "_"), "A", tale.nodes), `{}`)
		if tale.act != nil {
			tale.act(id)
		}
		s.status(id, tale.ends)
		got := query[string](t, s.pool, `
			SELECT string_agg(node || CASE event_type WHEN 'node.entered' THEN '+' WHEN 'node.completed' THEN '.' WHEN 'node.failed' THEN '!' ELSE '~' END, ' ' ORDER BY created_at, place, id)
			FROM process_history WHERE instance_id = $1 AND event_type IN ('node.entered', 'node.completed', 'node.failed', 'handler.taken')`, id)
		if tale.name == "fork" {
			got = strings.Replace(got, "C+ B+", "B+ C+", 1) // they begin together
		}
		if got != tale.want {
			t.Errorf("%s: the history is %s, want %s", tale.name, got, tale.want)
		}
	}
	if got := query[string](t, s.pool, `
		SELECT coalesce(string_agg(DISTINCT concat_ws(' ', d.name, e.event_type, e.node), ', ' ORDER BY concat_ws(' ', d.name, e.event_type, e.node)), '')
		FROM process_event e JOIN process_instance i ON i.id = e.instance_id JOIN process_definition d ON d.id = i.process_definition_id
		WHERE e.event_type IN ('node.entered', 'node.completed', 'run.unheeded')`); got !=
		"error_of_a_scope node.entered A, no_key node.entered A, refused_for_good run.unheeded A, refused_result node.completed A, refused_result run.unheeded A" {
		t.Errorf("stored is %s", got)
	}
	s.worker.release()
	s.healthy()
	visits := activities(t, s.pool)
	for _, percent := range []int{50, 100} {
		older(t, s.pool, percent)
		s.healthy()
		if now := activities(t, s.pool); now != visits {
			t.Errorf("visits are\n%s\nand were\n%s", now, visits)
		}
	}
}

// leased waits until a step of an instance is leased.
func (s *site) leased(id uuid.UUID, node string) {
	s.t.Helper()
	await(s.t, node+" to be leased", func() bool {
		return query[int](s.t, s.pool, `SELECT count(*) FROM workflow_run r JOIN process_token t ON t.id = r.token_id WHERE t.instance_id = $1 AND r.node = $2 AND r.status = 'leased'`, id, node) == 1
	})
}

// A step that succeeds in the batch in which a boundary event leads its token on does not complete its node in the
// history, although its run has succeeded. If the boundary event lets the token stay, the history has its event before the
// completion, as in the batch.
func TestHistoryOfALateSuccess(t *testing.T) {
	for _, c := range []struct {
		name, keep string
		first      int // of the batch: 0 for the step, 1 for the boundary event
		want       string
	}{
		{"late", "", 1, "node.entered A, handler.taken A, node.entered B"},
		{"in time", "", 0, "node.entered A, node.completed A, node.entered C"},
		{"kept", `"keep": true, `, 1, "node.entered A, handler.taken A, node.entered B, node.completed A, node.entered C"},
	} {
		t.Run(c.name, func(t *testing.T) {
			s := newSite(t)
			id := s.start(s.deploy("A", `"A": {"do": "elsewhere.step.v1", "on": [{"after": "P1D", `+c.keep+`"to": "B"}], "to": "C"}, "B": {"await": {"signal": "go"}}, "C": {"await": {"signal": "go"}}`), `{}`)
			await(t, "the step", func() bool {
				return query[int](t, s.pool, `SELECT count(*) FROM workflow_run WHERE node IN ('A', 'A/on/0') AND status = 'pending'`) == 2
			})
			s.worker.release()
			pgtest.ByHand(t, s.pool, `
				UPDATE workflow_run SET status = 'leased', lease_token = gen_random_uuid(), lease_no = 1, attempt = 1, leased_by = 'w', started_at = now(), deadline_at = now() + interval '1 hour', lease_until = now() + interval '1 hour'
				WHERE node IN ('A', 'A/on/0')`)
			rows, _ := s.pool.Query(t.Context(), `SELECT id, type, token_id, payload, lease_token FROM workflow_run WHERE node IN ('A', 'A/on/0') ORDER BY node`)
			batch, err := pgx.CollectRows(rows, func(row pgx.CollectableRow) (x leasing.Settlement, err error) {
				err = row.Scan(&x.Outcome.ID, &x.Type, &x.Step, &x.Payload, &x.Outcome.Token)
				x.Lease.ID, x.Lease.Token, x.Verdict, x.Result = x.Outcome.ID, x.Outcome.Token, settling.Succeed, []byte(`{}`)
				return x, err
			})
			if err != nil {
				t.Fatal(err)
			}
			batch[0], batch[1] = batch[c.first], batch[1-c.first]
			if err := pgx.BeginFunc(t.Context(), s.pool, func(tx pgx.Tx) error {
				b := &pgx.Batch{}
				advance, err := s.engine.Parts().Hook.Begin(b, batch)
				if err != nil {
					return err
				}
				if err := tx.SendBatch(t.Context(), b).Close(); err != nil {
					return err
				}
				if refused, err := settling.Settle(t.Context(), tx, "w", []settling.Outcome{batch[0].Outcome, batch[1].Outcome}); err != nil || len(refused) > 0 {
					return fmt.Errorf("%d are refused: %w", len(refused), err)
				}
				return advance(t.Context(), tx, batch, nil)
			}); err != nil {
				t.Fatal(err)
			}
			if got := query[string](t, s.pool, `SELECT string_agg(event_type || ' ' || node, ', ' ORDER BY created_at, place, id) FROM process_history WHERE instance_id = $1`, id); got != c.want {
				t.Errorf("the history is %s, want %s", got, c.want)
			}
			if got := query[string](t, s.pool, `SELECT status FROM activity_instance WHERE instance_id = $1 AND node_id = 'A'`, id); got != "succeeded" {
				t.Errorf("the step has %s", got)
			}
			s.healthy()
		})
	}
}
