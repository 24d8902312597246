package sql_test

import (
	"testing"

	"github.com/simple-workflow/simple-workflow/internal/pgtest"
)

// outbox_lag counts from the floor and from the beginning, also in lanes without a row. It says if there may be more
// than it looked at. Its cost does not grow with events that only another sink has not received.
func TestLagLooksBothWays(t *testing.T) {
	s, _ := psql(t)
	s.do(`ALTER TABLE outbox_event SET (autovacuum_enabled = off);
		INSERT INTO outbox_sink (name) VALUES ('crm'), ('down'); SELECT outbox_set_right_v1();
		SELECT outbox_emit(gen_random_uuid(), 'a.b', '{}') FROM generate_series(1, 640)`)
	lag := func(of string) string {
		return s.do(`SELECT concat_ws(' ', open, CASE WHEN at_least THEN 'at least' END, oldest < interval '1 minute') FROM outbox_lag WHERE sink = '` + of + `'`)
	}
	s.expect("from the floor", lag("crm"), "640 t")
	s.do(`UPDATE outbox_lane SET floor = 1000 WHERE sink = 'crm'`)
	s.expect("below the floor", lag("crm"), "640 t")
	s.unbound()
	s.do(`UPDATE outbox_lane SET floor = 320 WHERE sink = 'crm' AND lane < 32;
		BEGIN; SET LOCAL session_replication_role = replica; DELETE FROM outbox_lane WHERE sink = 'crm' AND lane > 40; UPDATE outbox_lane SET lane = 32767 WHERE sink = 'crm' AND lane = 40; COMMIT`)
	s.expect("without a row", lag("crm"), "640 t")
	s.do(`UPDATE outbox_event SET delivered_to = '{crm}' WHERE id <= 639`)
	s.expect("one", lag("crm"), "1 t")
	s.do(`BEGIN; SET LOCAL session_replication_role = replica; UPDATE outbox_event SET id = DEFAULT WHERE id = 640; COMMIT`)
	s.do(`BEGIN; SET LOCAL session_replication_role = replica;
		INSERT INTO outbox_event (aggregate_id, event_type, payload, delivered_to) SELECT gen_random_uuid(), 'a.b', '{}', '{crm}' FROM generate_series(1, 100000); COMMIT;
		SELECT outbox_set_right_v1('crm'); UPDATE outbox_lane SET floor = 100000 WHERE sink = 'crm'`)
	for _, then := range []string{`SELECT 1`, `VACUUM ANALYZE outbox_event`} {
		s.do(then)
		s.expect("there may be more", lag("crm"), "1 at least t")
		s.expect("there is more", lag("down"), "1000 at least t")
		if n, whole, plan := s.buffers(`SELECT * FROM outbox_lag WHERE sink = 'crm'`); n > 64*500*4 || len(whole) > 0 {
			t.Errorf("outbox_lag touches %d buffers after %s; %v\n%.6000s", n, then, whole, plan)
		} else {
			t.Logf("%d buffers", n)
		}
	}
}

// outbox_lag shows how long a sink has been down, or back, and neither for a sink that was never down.
func TestLagTellsOfOutages(t *testing.T) {
	s, _ := psql(t)
	s.do(`INSERT INTO outbox_sink (name, down_since, back_at) VALUES ('down', now() - interval '3 minutes', now() - interval '1 hour'), ('back', NULL, now() - interval '2 minutes'), ('up', NULL, NULL)`)
	s.expect("lag", s.do(`SELECT string_agg(concat_ws(' ', sink, 'down ' || date_trunc('minute', down_for), 'back ' || date_trunc('minute', back_for)), ', ' ORDER BY sink) FROM outbox_lag`),
		"back back 00:02:00, down down 00:03:00, up")
}

// While one session repairs the sequence of ids, another may repair it and draw more ids: the sequence does not go
// back. One session repairs it at a time, and a second one leaves it.
func TestIdsNeverGoBack(t *testing.T) {
	s, pool := psql(t)
	s.do(`INSERT INTO outbox_sink (name) VALUES ('s'); SELECT outbox_set_right_v1();
		INSERT INTO outbox_event (id, aggregate_id, event_type, payload) OVERRIDING SYSTEM VALUE VALUES (5000000, gen_random_uuid(), 'a.b', '{}')`)

	other := connect(t, pool.Config().ConnString())
	other.do(`BEGIN; LOCK TABLE workflow_schema IN SHARE UPDATE EXCLUSIVE MODE`)
	s.expect("beside another", s.do(`SELECT outbox_set_right_v1('s')`), "ids are left for the next time: another session is at it")
	other.do(`COMMIT`)
	s.expect("last", s.do(`SELECT outbox_last_id_v1()`), "0")

	// A trigger stands for another session that acts while the lanes of all sinks are looked at.
	s.do(`CREATE SEQUENCE looks;
		CREATE FUNCTION meanwhile() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN
			IF nextval('looks') = 2 THEN
				PERFORM setval(pg_get_serial_sequence('outbox_event', 'id'), 5000000);
				PERFORM outbox_emit(gen_random_uuid(), 'a.b', '{}') FROM generate_series(1, 3);
			END IF;
			RETURN NULL; END $$;
		CREATE TRIGGER meanwhile AFTER INSERT ON outbox_lane FOR EACH STATEMENT EXECUTE FUNCTION meanwhile()`)
	s.expect("set right by another", s.do(`SELECT outbox_set_right_v1('s')`), "nothing was wrong")
	s.expect("it came to that", s.do(`SELECT last_value FROM looks`), "2")
	s.do(`SELECT outbox_emit(gen_random_uuid(), 'a.b', '{}') FROM generate_series(1, 10)`)
	s.expect("last", s.do(`SELECT outbox_last_id_v1()`), "5000013")

	dispatcher := pgtest.As(t, pool, pgtest.Roles(t, pool), "dispatcher")
	if _, err := dispatcher.Exec(t.Context(), `LOCK TABLE workflow_schema IN SHARE UPDATE EXCLUSIVE MODE`); err == nil {
		t.Error("a dispatcher's role can take the lock")
	}
}

// Events that retention may not remove are noted whatever their ids are, and the notes are removed once the events
// are gone.
func TestUnremovedEvents(t *testing.T) {
	s, _ := psql(t)
	const ids = `'{-4611686018427387904,-5,0,5,4611686018427387904}'::bigint[]`
	s.do(`INSERT INTO outbox_event (id, aggregate_id, event_type, payload) OVERRIDING SYSTEM VALUE SELECT id, gen_random_uuid(), 'a.b', '{}' FROM unnest(` + ids + `) AS id`)
	s.expect("noted", s.do(`SELECT workflow_unremoved_v1('outbox_event', (`+ids+`)::text[], array_fill('23503'::text, '{5}'), array_fill('no'::text, '{5}'), array_fill(''::text, '{5}'))`), "5")
	s.do(`SELECT workflow_unremoved_v1('outbox_event', '{}', '{}', '{}', '{}')`)
	s.expect("while they are there", s.do(`SELECT count(*) FROM workflow_set_aside WHERE kind = 'retention' AND id IN (SELECT workflow_unremoved_id(e.id::text) FROM outbox_event e)`), "5")
	s.do(`BEGIN; SET LOCAL session_replication_role = replica; DELETE FROM outbox_event WHERE id < 0; COMMIT; SELECT workflow_unremoved_v1('outbox_event', '{}', '{}', '{}', '{}')`)
	s.expect("once some are gone", s.do(`SELECT count(*) FROM workflow_set_aside WHERE kind = 'retention'`), "3")
}
