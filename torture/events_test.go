package main

import (
	"github.com/google/uuid"
)

// dispatched publishes all events: each was delivered once, and acknowledged.
func (s *stage) dispatched() {
	s.t.Helper()
	s.do("torture", `INSERT INTO outbox_sink (name, created_at) VALUES ('events', now() - interval '10 minutes') ON CONFLICT (name) DO UPDATE SET seen_at = now()`)
	for _, sql := range []string{
		`INSERT INTO t.ledger
		 SELECT 'event', clock_timestamp(), jsonb_build_object('kind', 'event', 'run', event_uuid, 'type', event_type, 'key', aggregate_id, 'payload', payload,
		                                                      'answer', 'ok', 'sent', clock_timestamp())
		 FROM outbox_event WHERE published_at IS NULL AND event_type <> 'torture.unmarkable' ORDER BY id`,
		`UPDATE outbox_event SET published_at = clock_timestamp(), delivered_to = '{events}' WHERE published_at IS NULL AND event_type <> 'torture.unmarkable'`,
	} {
		if _, err := s.db.Exec(s.t.Context(), sql); err != nil {
			s.t.Fatalf("%v\n%s", err, sql)
		}
	}
}

// told returns the second event of a run that has succeeded with two events, which were published.
func (s *stage) told() (event uuid.UUID) {
	s.t.Helper()
	id := s.enqueue("effect", wish{emit: 2})
	s.work(id, w1)
	s.succeed(id, w1, 2)
	s.dispatched()
	if err := s.row(&event, `SELECT event_uuid FROM outbox_event WHERE aggregate_id = $1 ORDER BY id DESC`, id); err != nil {
		s.t.Fatal(err)
	}
	return event
}

// unmarkable returns an event that cannot be marked.
func (s *stage) unmarkable() (event uuid.UUID) {
	s.t.Helper()
	if err := s.row(&event, `INSERT INTO outbox_event (aggregate_id, event_type, payload) VALUES (gen_random_uuid(), 'torture.unmarkable', '{}') RETURNING event_uuid`); err != nil {
		s.t.Fatal(err)
	}
	return event
}

// parked parks the event in a row beside it.
func (s *stage) parked(event uuid.UUID) {
	s.t.Helper()
	s.do("torture", `INSERT INTO outbox_sink (name, created_at) VALUES ('events', now() - interval '10 minutes') ON CONFLICT (name) DO UPDATE SET seen_at = now()`)
	s.do("torture", `INSERT INTO outbox_delivery (event_id, sink, aggregate_id, attempt, last_error, parked_at)
		SELECT id, 'events', aggregate_id, 1, 'torture: this row is not for you', now() FROM outbox_event WHERE event_uuid = $1`, event)
}

var eventPlants = []plant{
	{only("I15c"), "failure that nobody is told of", func(s *stage) uuid.UUID {
		s.dispatched()
		id := s.enqueue("fail", wish{max: 1})
		s.work(id, w1)
		s.fail(id, w1, "failed")
		s.do("torture", `DELETE FROM outbox_event WHERE aggregate_id = $1 AND event_type = 'run.failed'`, id)
		return id
	}},
	{only("I17"), "event from nowhere", func(s *stage) uuid.UUID {
		s.told()
		id := uuid.New()
		s.tell(entry{Kind: "event", Run: id.String(), Type: "chaos.effect", Answer: "ok"})
		return id
	}},
	{only("I17"), "payload altered on the way", func(s *stage) uuid.UUID {
		id := s.told()
		s.do("torture", `UPDATE t.ledger SET line = jsonb_set(line, '{payload,n}', '7') WHERE kind = 'event' AND line->>'run' = $1::text`, id)
		return id
	}},
	{only("I18"), "marked without having come", func(s *stage) uuid.UUID {
		id := s.told()
		s.do("torture", `DELETE FROM t.ledger WHERE kind = 'event' AND line->>'run' = $1::text`, id)
		return id
	}},
	{only("I18"), "marked without having been acknowledged", func(s *stage) uuid.UUID {
		id := s.told()
		s.do("torture", `UPDATE t.ledger SET line = line - 'answer' WHERE kind = 'event' AND line->>'run' = $1::text`, id)
		return id
	}},
	{only("I18b"), "left in the outbox", func(s *stage) uuid.UUID {
		id := s.told()
		s.do("torture", `UPDATE outbox_event SET published_at = NULL, delivered_to = NULL WHERE event_uuid = $1`, id)
		return id
	}},
	{only("I48"), "nobody is told of one that cannot be marked", func(s *stage) uuid.UUID {
		id := s.unmarkable()
		s.dispatched()
		return id
	}},
	{only("I48b"), "kept waiting by one that cannot be marked", func(s *stage) uuid.UUID {
		s.parked(s.unmarkable())
		id := s.told()
		s.do("torture", `UPDATE t.ledger SET at = at + interval '6 seconds', line = jsonb_set(line, '{sent}', to_jsonb((line->>'sent')::timestamptz + interval '6 seconds')) WHERE kind = 'event' AND line->>'run' = $1::text`, id)
		return id
	}},
	{only("I19"), "second before the first", func(s *stage) uuid.UUID {
		id := s.told()
		s.do("torture", `UPDATE t.ledger SET line = jsonb_set(line, '{sent}', to_jsonb((line->>'sent')::timestamptz - interval '1 minute')) WHERE kind = 'event' AND line->>'run' = $1::text`, id)
		return id
	}},
}

func init() { plants = append(plants, eventPlants...) }
