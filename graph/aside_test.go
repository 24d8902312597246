package graph_test

import (
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/google/uuid"

	"github.com/simple-workflow/simple-workflow/graph"
	"github.com/simple-workflow/simple-workflow/internal/pgtest"
)

// A step whose lease the database refuses opens exactly one incident, with the message of the refusal. Retrying the
// incident tries the lease at once. The incident is resolved when the step is leased.
func TestRefusedLeaseOpensAnIncident(t *testing.T) {
	s := newSite(t)
	spoil(s, never+`CREATE TRIGGER refuse BEFORE INSERT OR UPDATE ON workflow_run FOR EACH ROW WHEN (NEW.type = 'test.step.v1' AND NEW.node = 'A' AND NEW.status = 'leased') EXECUTE FUNCTION refuse()`)
	id := s.start(s.deploy("A", step("A", "B")+","+step("B", "")), `{}`)
	s.toldOf(id, "not_leased", "A")
}

// A wait that refuses a signal opens exactly one incident. Retrying the incident tries the signal at once. The incident
// is resolved when the token gets the signal.
func TestUnreachedWaitOpensAnIncident(t *testing.T) {
	s := newSite(t)
	p := s.deploy("W", `"W": {"await": {"signal": "go"}, "to": "A"}, `+step("A", ""))
	id, other := s.start(p, `{}`), s.start(p, `{}`)
	s.waitsFor(2)
	spoil(s, never+fmt.Sprintf(`CREATE TRIGGER refuse BEFORE INSERT ON workflow_run FOR EACH ROW WHEN (NEW.type = 'graph.arrive.v1' AND NEW.token_id = '%s') EXECUTE FUNCTION refuse()`,
		query[uuid.UUID](t, s.pool, `SELECT id FROM process_token WHERE instance_id = $1`, id)))
	s.enqueue("graph.signal.v1", `{"name": "go"}`)
	s.status(other, graph.Completed)
	s.toldOf(id, "not_reached", "W")
}

const never = `CREATE FUNCTION refuse() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN RAISE EXCEPTION 'never' USING ERRCODE = 'XX123'; END $$;`

// toldOf checks that an instance at node, where a trigger refuses something, has exactly one incident with code, and
// that the instance continues within 5 s after the trigger is dropped and the incident is retried.
func (s *site) toldOf(id uuid.UUID, code, node string) {
	s.t.Helper()
	incident := s.stopped(id, code, 1)
	if got := query[string](s.t, s.pool, `SELECT node || ': ' || message FROM incident WHERE id = $1`, incident); !strings.HasPrefix(got, node+": ") || !strings.Contains(got, "SQLSTATE XX123 never") {
		s.t.Errorf("the incident says %s", got)
	}
	if why := query[string](s.t, s.pool, `SELECT process_why($1)`, id); !strings.Contains(why, "XX123") {
		s.t.Errorf("why the process: %s", why)
	}
	time.Sleep(3 * time.Second) // long enough for workers to try again
	if s.stopped(id, code, 1) != incident {
		s.t.Error("it is another incident")
	}
	spoil(s, `DROP TRIGGER refuse ON workflow_run`)
	at := time.Now()
	s.hasten(incident)
	s.status(id, graph.Completed)
	if took := time.Since(at); took > 5*time.Second {
		s.t.Errorf("it went on after %s", took)
	}
	pgtest.Await(s.t, "the incident to be resolved", func() bool {
		return query[string](s.t, s.pool, `SELECT concat_ws(' ', (SELECT sum(open_incidents) FROM process_instance), (SELECT count(*) FROM incident WHERE resolved_at IS NULL), (SELECT count(*) FROM workflow_set_aside))`) == "0 0 0"
	})
	if inside, outside := query[int](s.t, s.pool, `SELECT count(*) FROM process_event WHERE event_type LIKE 'incident.%'`),
		query[int](s.t, s.pool, `SELECT count(*) FROM outbox_event WHERE event_type LIKE 'incident.%'`); inside != 2 || outside != 2 {
		s.t.Errorf("the incident is told %d times inside, %d outside", inside, outside)
	}
	s.healthy()
}

// If the database refuses an incident of an instance, with any SQLSTATE, only workflow_set_aside and process_why report
// its refused step. Other instances still get their incidents and are tried again, and the instance itself continues
// once nothing refuses its step.
func TestRefusedLeaseWithoutAnIncident(t *testing.T) {
	for _, code := range []string{"XX123", "55P03", "40001", "57P01"} {
		t.Run(code, func(t *testing.T) {
			s := newSite(t)
			p := s.deploy("A", step("A", ""))
			spoil(s, never+`CREATE TRIGGER refuse BEFORE INSERT OR UPDATE ON workflow_run FOR EACH ROW WHEN (NEW.type = 'test.step.v1' AND NEW.status = 'leased') EXECUTE FUNCTION refuse()`)
			id := s.start(p, `{}`)
			spoil(s, fmt.Sprintf(`CREATE FUNCTION other() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN RAISE EXCEPTION 'no' USING ERRCODE = '%s'; END $$;`, code)+
				fmt.Sprintf(`CREATE TRIGGER refuse BEFORE INSERT ON incident FOR EACH ROW WHEN (NEW.instance_id = '%s') EXECUTE FUNCTION other()`, id))
			another := s.start(p, `{}`)
			s.stopped(another, "not_leased", 1)
			if n := query[int](t, s.pool, `SELECT count(*) FROM workflow_unleasable WHERE statement = 'lease'`); n != 2 {
				t.Errorf("%d are told of, want 2", n)
			}
			spoil(s, `DROP TRIGGER refuse ON workflow_run`)
			s.status(id, graph.Completed)
			s.status(another, graph.Completed)
			pgtest.Await(t, "the incident to be resolved", func() bool {
				return query[int](t, s.pool, `SELECT count(*) FROM incident WHERE resolved_at IS NULL`) == 0
			})
			s.healthy()
		})
	}
}

// A step that cannot be leased because its row is locked opens no incident.
func TestLockedStepOpensNoIncident(t *testing.T) {
	s := newSite(t)
	spoil(s, strings.Replace(never, "XX123", "55P03", 1)+`CREATE TRIGGER refuse BEFORE INSERT OR UPDATE ON workflow_run FOR EACH ROW WHEN (NEW.type = 'test.step.v1' AND NEW.status = 'leased') EXECUTE FUNCTION refuse()`)
	id := s.start(s.deploy("A", step("A", "")), `{}`)
	time.Sleep(4 * time.Second)
	if n := query[int](t, s.pool, `SELECT count(*) FROM incident`); n != 0 {
		t.Errorf("%d incidents", n)
	}
	spoil(s, `DROP TRIGGER refuse ON workflow_run`)
	s.status(id, graph.Completed)
}

// A retry that names only the instance retries the incident that stops a token, not an older incident that reports a
// refused row, which workers try again anyway.
func TestRetryOfAnInstanceWithARefusedStep(t *testing.T) {
	s := newSite(t)
	spoil(s, never+`CREATE TRIGGER refuse BEFORE INSERT OR UPDATE ON workflow_run FOR EACH ROW WHEN (NEW.type = 'test.step.v1' AND NEW.node = 'A' AND NEW.status = 'leased') EXECUTE FUNCTION refuse()`)
	id := s.start(s.deploy("F", `"F": {"fork": ["A", "W"]}, "W": {"wait": "3s", "to": "C"}, "C": {"choose": [{"if": "input.nothing == 1", "to": "B"}]}, `+step("A", "")+","+step("B", "")), `{"nothing": 2}`)
	refused := s.stopped(id, "not_leased", 1)
	stopped := s.stopped(id, "no_branch_taken", 1)
	retry := s.enqueue("graph.retry.v1", fmt.Sprintf(`{"instance": "%s"}`, id))
	s.finished(retry)
	if got := query[uuid.UUID](t, s.pool, `SELECT (result->>'incident')::uuid FROM workflow_run WHERE id = $1`, retry); got != stopped {
		t.Errorf("retried is %s, want %s and not %s", got, stopped, refused)
	}
}
