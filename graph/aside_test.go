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

// A step that no worker may lease opens one incident, with the words of who refuses it; to retry that has the lease tried at once. It is resolved once the
// step is leased.
func TestRefusedLeaseOpensAnIncident(t *testing.T) {
	s := newSite(t)
	spoil(s, never+`CREATE TRIGGER refuse BEFORE UPDATE ON workflow_run FOR EACH ROW WHEN (NEW.type = 'test.step.v1' AND NEW.node = 'A' AND NEW.status = 'leased') EXECUTE FUNCTION refuse()`)
	id := s.start(s.deploy("A", step("A", "B")+","+step("B", "")), `{}`)
	s.toldOf(id, "not_leased", "A")
}

// A wait that a signal does not reach opens one incident, likewise.
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

// toldOf has an instance that stands at a node, as a trigger refuses something, told of by an incident, and go on once the trigger is gone and the incident is retried.
func (s *site) toldOf(id uuid.UUID, code, node string) {
	s.t.Helper()
	incident := s.stopped(id, code, 1)
	if got := query[string](s.t, s.pool, `SELECT node || ': ' || message FROM incident WHERE id = $1`, incident); !strings.HasPrefix(got, node+": ") || !strings.Contains(got, "SQLSTATE XX123 never") {
		s.t.Errorf("the incident says %s", got)
	}
	if why := query[string](s.t, s.pool, `SELECT process_why($1)`, id); !strings.Contains(why, "XX123") {
		s.t.Errorf("why the process: %s", why)
	}
	time.Sleep(3 * time.Second) // in which workers look again
	if s.stopped(id, code, 1) != incident {
		s.t.Error("it is another incident")
	}
	spoil(s, `DROP TRIGGER refuse ON workflow_run`)
	at := time.Now()
	s.retry(incident, ``)
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

// An instance whose row takes no incident is told of by workflow_set_aside and process_why alone, and goes on like any other.
func TestRefusedLeaseWithoutAnIncident(t *testing.T) {
	s := newSite(t)
	spoil(s, never+`CREATE TRIGGER refuse BEFORE UPDATE ON workflow_run FOR EACH ROW WHEN (NEW.type = 'test.step.v1' AND NEW.node = 'A' AND NEW.status = 'leased') EXECUTE FUNCTION refuse()`)
	spoil(s, `CREATE TRIGGER refuse BEFORE INSERT ON incident FOR EACH ROW EXECUTE FUNCTION refuse()`)
	id := s.start(s.deploy("A", step("A", "")), `{}`)
	await(t, "it to be told", func() bool {
		return query[int](t, s.pool, `SELECT count(*) FROM workflow_unleasable WHERE statement = 'lease'`) == 1
	})
	time.Sleep(3 * time.Second)
	if n := query[int](t, s.pool, `SELECT count(*) FROM incident`); n != 0 {
		t.Errorf("%d incidents", n)
	}
	spoil(s, `DROP TRIGGER refuse ON workflow_run; DROP TRIGGER refuse ON incident`)
	s.status(id, graph.Completed)
	s.healthy()
}
