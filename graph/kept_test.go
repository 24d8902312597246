package graph_test

import (
	"strings"
	"testing"
	"time"

	"github.com/google/uuid"

	"github.com/simple-workflow/simple-workflow/graph"
	"github.com/simple-workflow/simple-workflow/internal/pgtest"
)

// If the database refuses to advance the instance of a settled step, the outcome is kept and reported, with an incident
// if the instance's row accepts one, and the lease is not extended. Other instances continue. After the row is mended,
// the process continues with the kept result, and the step is not executed again.
func TestInstanceThatRefuses(t *testing.T) {
	for name, c := range map[string]struct {
		spoil, mend string // $1: the instance
		incident    bool
		says        string
		process     string // the beginning of what process_why reports
	}{
		"a trigger of a user's": {`
			CREATE FUNCTION refuse() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN RAISE EXCEPTION 'never' USING ERRCODE = 'XX123'; END $$;
			CREATE TRIGGER refuse BEFORE UPDATE ON process_token FOR EACH ROW WHEN (NEW.instance_id = '%') EXECUTE FUNCTION refuse()`,
			`DROP TRIGGER refuse ON process_token`, true, "SQLSTATE XX123", "incident not_settled at "},
		"its version is the last": {`UPDATE process_instance SET version = 9223372036854775807 WHERE id = '%'`,
			`UPDATE process_instance SET version = 7 WHERE id = '%'`, false, "process_instance.version of ", "process_instance.version is 9223372036854775807"},
		"a node that is not in its definition": {`UPDATE process_token SET node = 'Z' WHERE instance_id = '%'`,
			`UPDATE process_token SET node = 'A' WHERE instance_id = '%'`, true, "what its handler returned cannot be recorded", "process_token.node of "},
		"another definition": {`UPDATE process_instance SET process_definition_id = (SELECT id FROM process_definition WHERE name = 'other') WHERE id = '%'`,
			`UPDATE process_instance SET process_definition_id = (SELECT id FROM process_definition WHERE name = 'mine') WHERE id = '%'`, true, "what its handler returned cannot be recorded", "process_instance.process_definition_id is that of another process"},
	} {
		t.Run(name, func(t *testing.T) {
			s := newSite(t)
			s.deployAs("mine", "A", step("A", "B", `"ms": "'200'"`)+","+step("B", ""))
			s.deployAs("other", "C", step("C", ""))
			var id uuid.UUID
			started, spoilt := make(chan bool), false
			s.happens = func(step string, _ int) {
				if step == "A" && !spoilt {
					<-started
					spoilt = true
					spoil(s, strings.ReplaceAll(c.spoil, "%", id.String()))
				}
			}
			id = s.start("mine", `{}`)
			close(started)
			pgtest.Await(t, "it to be told", func() bool {
				return query[int](t, s.pool, `SELECT count(*) FROM workflow_unleasable WHERE statement = 'settle' AND kept = 'succeeded'`) == 1
			})
			incidents := query[int](t, s.pool, `SELECT count(*) FROM incident WHERE instance_id = $1 AND code = 'not_settled' AND resolved_at IS NULL`, id)
			if (incidents == 1) != c.incident {
				t.Errorf("%d incidents are open", incidents)
			}
			if why := query[string](t, s.pool, `SELECT workflow_why(run) FROM workflow_kept`); !strings.Contains(why, c.says) || !strings.Contains(why, "it has succeeded: that is kept") {
				t.Errorf("why: %s", why)
			}
			if why := query[string](t, s.pool, `SELECT process_why($1)`, id); !strings.HasPrefix(why, c.process) || c.process[:8] == "incident" && (!strings.Contains(why, "kept") || !strings.Contains(why, "refuse")) {
				t.Errorf("why the process: %s", why)
			}
			s.status(s.start("mine", `{}`), graph.Completed)
			pgtest.Await(t, "its lease to run out, and to be left alone", func() bool {
				return query[bool](t, s.pool, `SELECT lease_until < now() - interval '2 seconds' FROM workflow_run WHERE id = (SELECT run FROM workflow_kept)`)
			})
			s.worker.kill()
			spoil(s, strings.ReplaceAll(c.mend, "%", id.String()))
			s.hire()
			pgtest.Await(t, "it to be completed", func() bool {
				return query[bool](t, s.pool, `SELECT status = 'COMPLETED' FROM process_instance WHERE id = $1`, id)
			})
			s.want(map[string]int{"A": 2, "B": 2})
			if n := query[int](t, s.pool, `SELECT count(*) FROM workflow_run WHERE type = 'test.step.v1' AND attempt <> 1`); n != 0 {
				t.Errorf("%d steps were started again", n)
			}
			if got := query[string](t, s.pool, `SELECT concat_ws(' ', open_incidents, (SELECT count(*) FROM incident WHERE resolved_at IS NULL), (SELECT count(*) FROM workflow_kept), (SELECT count(*) FROM workflow_set_aside)) FROM process_instance WHERE id = $1`, id); got != "0 0 0 0" {
				t.Errorf("left are incidents, open ones, kept, set aside: %s", got)
			}
			s.healthy()
			if inside, outside := query[int](t, s.pool, `SELECT count(*) FROM process_event WHERE event_type LIKE 'incident.%'`),
				query[int](t, s.pool, `SELECT count(*) FROM outbox_event WHERE event_type LIKE 'incident.%'`); inside != outside || (inside == 2) != c.incident {
				t.Errorf("incidents are told %d times inside, %d outside", inside, outside)
			}
		})
	}
}

func spoil(s *site, statement string) {
	s.t.Helper()
	if strings.Contains(statement, "9223372036854775807") {
		pgtest.Unbound(s.t, s.pool.Config().ConnString())
	}
	for _, one := range strings.SplitAfter(statement, "$$;") {
		pgtest.ByHand(s.t, s.pool, one)
	}
}

// Retrying the incident of a kept outcome only tries to settle the outcome again, at once. The step is not executed
// again.
func TestRetryOfWhatIsKept(t *testing.T) {
	s := newSite(t)
	spoil(s, `CREATE FUNCTION refuse() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN RAISE EXCEPTION 'never' USING ERRCODE = 'XX123'; END $$;
		CREATE TRIGGER refuse BEFORE UPDATE ON workflow_run FOR EACH ROW WHEN (OLD.type = 'test.step.v1' AND OLD.node = 'A' AND NEW.status <> 'leased') EXECUTE FUNCTION refuse()`)
	id := s.start(s.deploy("A", step("A", "B")+","+step("B", "")), `{}`)
	incident := s.stopped(id, "not_settled", 1)
	s.retry(incident, `, "force": true`)
	pgtest.Await(t, "it to be tried", func() bool {
		return query[bool](t, s.pool, `SELECT NOT due FROM workflow_set_aside WHERE EXISTS (SELECT FROM workflow_history WHERE data ? 'tried_again')`)
	})
	if s.stopped(id, "not_settled", 1) != incident {
		t.Error("it is another incident")
	}
	spoil(s, `DROP TRIGGER refuse ON workflow_run`)
	s.hasten(incident)
	s.status(id, graph.Completed)
	s.want(map[string]int{"A": 1, "B": 1})
	s.healthy()
}

// If the database refuses to advance any instance, nothing is set aside, and the instance continues when the cause is
// gone.
func TestNoInstanceCanBeMoved(t *testing.T) {
	s := newSite(t)
	p := s.deploy("A", step("A", "B")+","+step("B", ""))
	s.happens = func(name string, call int) {
		if name == "A" && call == 1 {
			spoil(s, `ALTER TABLE process_state_history RENAME TO elsewhere`)
		}
	}
	id := s.start(p, `{}`)
	await(t, "the step to have run", func() bool { return s.count("A") == 1 })
	time.Sleep(5 * time.Second)
	if n := query[int](t, s.pool, `SELECT count(*) FROM workflow_set_aside`); n != 0 {
		t.Errorf("%d are set aside", n)
	}
	spoil(s, `ALTER TABLE elsewhere RENAME TO process_state_history`)
	s.status(id, graph.Completed)
	s.want(map[string]int{"A": 1})
	s.healthy()
}

// A step whose outcome is kept can be cancelled or failed by hand: the process takes the error edge for it, and nothing
// remains kept, set aside or open as an incident.
func TestKeptStepIsCancelled(t *testing.T) {
	s := newSite(t)
	p := s.deploy("A", `"A": {"do": "test.step.v1", "in": {"name": "'A'"}, "to": "never", "on": [{"error": "cancelled", "to": "B"}, {"error": "failed_by_hand", "to": "D"}]},`+step("B", "")+","+step("D", "")+","+step("never", ""))
	spoil(s, `CREATE FUNCTION refuse() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN RAISE EXCEPTION 'never' USING ERRCODE = 'XX123'; END $$;
		CREATE TRIGGER refuse BEFORE UPDATE ON workflow_run FOR EACH ROW WHEN (OLD.type = 'test.step.v1' AND OLD.node = 'A' AND NEW.status IN ('succeeded', 'pending')) EXECUTE FUNCTION refuse()`)
	for act, next := range map[string]string{`SELECT workflow_cancel($1, 'enough')`: "B", `SELECT workflow_fail($1, 'enough')`: "D"} {
		id := s.start(p, `{}`)
		pgtest.Await(t, "it to be told", func() bool {
			return query[int](t, s.pool, `SELECT count(*) FROM incident WHERE instance_id = $1 AND resolved_at IS NULL`, id) == 1
		})
		query[string](t, s.pool, act, query[uuid.UUID](t, s.pool, `SELECT run FROM workflow_kept`))
		s.status(id, graph.Completed)
		s.want(map[string]int{next: 1, "never": 0})
		if n := query[int](t, s.pool, `SELECT (SELECT count(*) FROM workflow_kept) + (SELECT count(*) FROM workflow_set_aside) + (SELECT count(*) FROM incident WHERE resolved_at IS NULL)`); n != 0 {
			t.Errorf("%s: %d are left", act, n)
		}
	}
	s.healthy()
}

// A timer whose payload was changed opens an incident, and a retry sets the timer again.
func TestTimerThatIsNone(t *testing.T) {
	s := newSite(t)
	id := s.start(s.deploy("W", `"W": {"wait": "PT2S", "to": "B"},`+step("B", "")), `{}`)
	await(t, "the timer", func() bool {
		return query[int](t, s.pool, `SELECT count(*) FROM workflow_run WHERE type = 'graph.timer.v1'`) == 1
	})
	spoil(s, `UPDATE workflow_run SET payload = '[]' WHERE type = 'graph.timer.v1'`)
	incident := s.stopped(id, "payload_invalid", 1)
	if why := query[string](t, s.pool, `SELECT process_why($1)`, id); !strings.HasPrefix(why, "incident payload_invalid at W ") {
		t.Errorf("why: %s", why)
	}
	s.healthy()
	s.retry(incident, ``)
	s.status(id, graph.Completed)
	s.want(map[string]int{"B": 1})
	s.healthy()
}
