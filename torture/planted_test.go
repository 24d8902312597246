package main

import (
	"github.com/google/uuid"
)

var plants = []plant{
	{only("I01"), "commit lost", func(s *stage) uuid.UUID {
		e := s.order("effect", wish{})
		s.tell(e)
		return uuid.MustParse(e.Run)
	}},
	{only("I01"), "payload altered", func(s *stage) uuid.UUID {
		e := s.order("sleep", wish{})
		s.but(`VALUES ($1, $2, $3,`, `VALUES ($1, $2, $3::jsonb || '{"number": 9007199254740996}',`).insert(e, wish{}) // as a float64 would store it
		s.tell(e)
		id := uuid.MustParse(e.Run)
		s.work(id, w1)
		s.finish(id, w1)
		return id
	}},
	{only("I01"), "key dropped", func(s *stage) uuid.UUID {
		id := s.but(`nullif($6, '')`, `nullif($6::text, $6)`).enqueue("sleep", wish{key: "k"})
		s.work(id, w1)
		s.finish(id, w1)
		return id
	}},
	{only("I01b"), "rolled back and there", func(s *stage) uuid.UUID {
		id := s.enqueue("effect", wish{answer: "rolled back"})
		s.work(id, w1)
		s.succeed(id, w1, 0)
		return id
	}},
	{only("I02"), "never leased", func(s *stage) uuid.UUID { return s.enqueue("sleep", wish{}) }},
	{only("I02"), "never taken back", func(s *stage) uuid.UUID {
		id := s.enqueue("sleep", wish{})
		s.work(id, w1)
		s.exit(w1, 0)
		s.wait(id, 60*seconds)
		return id
	}},
	{only("I03"), "effect lost", func(s *stage) uuid.UUID {
		id := s.enqueue("effect", wish{})
		s.work(id, w1)
		s.finish(id, w1)
		return id
	}},
	{only("I03"), "effect twice", func(s *stage) uuid.UUID {
		id := s.enqueue("effect", wish{})
		s.work(id, w1)
		s.effect(id, w1) // the answer to the commit was lost
		s.succeed(id, w1, 0)
		return id
	}},
	{[]string{"I04", "I05"}, "effect outside of the settle", func(s *stage) uuid.UUID {
		id := s.enqueue("effect", wish{})
		s.work(id, w1)
		s.end(id, "ok")
		s.effect(id, w1)
		s.call("cancel", id)
		return id
	}},
	{only("I05"), "effect of a lost lease", func(s *stage) uuid.UUID {
		id := s.enqueue("effect", wish{})
		s.work(id, w1)
		s.effect(id, w1)
		s.wait(id, 4*seconds)
		s.expire(id, w2)
		s.work(id, w2)
		s.finish(id, w2)
		return id
	}},
	{only("I05b"), "settled without the fence", func(s *stage) uuid.UUID {
		id := s.enqueue("sleep", wish{})
		s.work(id, w1)
		s.wait(id, 4*seconds)
		s.expire(id, w2)
		s.work(id, w2)
		s.end(id, "ok")
		s.settle(id, w1, "succeeded", "")
		return id
	}},
	{only("I05c"), "handed back unseen", func(s *stage) uuid.UUID {
		id := s.enqueue("fail", wish{})
		s.lease(id, w1)
		s.settle(id, w1, "retried", "handler_error")
		s.wait(id, seconds)
		s.work(id, w1)
		s.finish(id, w1)
		return id
	}},
	{only("I06"), "failure taken for success", func(s *stage) uuid.UUID {
		id := s.enqueue("fail", wish{})
		s.work(id, w1)
		s.end(id, "error")
		s.settle(id, w1, "succeeded", "")
		return id
	}},
	{only("I06"), "handler has not ended", func(s *stage) uuid.UUID {
		id := s.enqueue("sleep", wish{})
		s.work(id, w1)
		s.settle(id, w1, "succeeded", "")
		return id
	}},
	{only("I07"), "taken back too early", func(s *stage) uuid.UUID {
		id := s.enqueue("sleep", wish{})
		s.work(id, w1)
		s.wait(id, seconds)
		s.expire(id, w2)
		s.work(id, w2)
		s.finish(id, w2)
		return id
	}},
	{only("I07"), "exhausted and taken over too early", func(s *stage) uuid.UUID {
		id := s.enqueue("fail", wish{max: 1})
		s.work(id, w1)
		s.without("workflow_run_update_guard")
		s.expire(id, w2)
		s.settle(id, w2, "failed", "lease_expired")
		return id
	}},
	{only("I07"), "lease ahead taken back too early", func(s *stage) uuid.UUID {
		id := s.enqueue("sleep", wish{})
		s.leaseAhead(id, w1)
		s.wait(id, seconds)
		s.unbegun(id, w1) // by the new worker in the same slot
		s.work(id, w2)
		s.finish(id, w2)
		return id
	}},
	{only("I07b"), "heartbeat without the fence", func(s *stage) uuid.UUID {
		id := s.enqueue("sleep", wish{})
		s.work(id, w1)
		s.wait(id, 4*seconds)
		s.expire(id, w2)
		s.work(id, w2)
		s.wait(id, seconds)
		s.beat(id, w1)
		s.finish(id, w2)
		return id
	}},
	{only("I08"), "number skipped", func(s *stage) uuid.UUID {
		id := s.enqueue("fail", wish{})
		s.work(id, w1)
		s.fail(id, w1, "retried")
		s.but(`lease_no + 1`, `lease_no + 2`).work(id, w1)
		s.finish(id, w1)
		return id
	}},
	{only("I08"), "first number skipped", func(s *stage) uuid.UUID {
		id := s.enqueue("sleep", wish{})
		s.but(`lease_no + 1`, `lease_no + 2`).work(id, w1)
		s.finish(id, w1)
		return id
	}},
	{only("I09"), "lease for free", func(s *stage) uuid.UUID {
		id := s.enqueue("sleep", wish{})
		s.but(`attempt + CASE WHEN attempt < max_attempts THEN 1 ELSE 0 END`, `attempt`).work(id, w1)
		s.finish(id, w1)
		return id
	}},
	{only("I09b"), "expired for free", func(s *stage) uuid.UUID {
		id := s.enqueue("sleep", wish{})
		s.work(id, w1)
		s.wait(id, 4*seconds)
		s.but(`suspect = true`, `attempt = w.attempt - 1, suspect = true`).expire(id, w2)
		s.work(id, w2)
		s.finish(id, w2)
		return id
	}},
	{only("I09b"), "failed for free", func(s *stage) uuid.UUID {
		id := s.enqueue("permanent", wish{})
		s.work(id, w1)
		s.but(`IN ('postponed', 'released') AND attempt`, `IN ('failed') AND attempt`).fail(id, w1, "failed")
		return id
	}},
	{[]string{"I09b", "I13", "I13b"}, "begun, and given back", func(s *stage) uuid.UUID {
		id := s.enqueue("sleep", wish{})
		s.leaseAhead(id, w1)
		s.mark(id, w1)
		s.start(id)
		s.wait(id, 4*seconds)
		s.unbegun(id, w2)
		s.work(id, w2)
		s.finish(id, w2)
		return id
	}},
	{[]string{"I09b", "I13", "I13b"}, "given back, and begun after that", func(s *stage) uuid.UUID {
		id := s.enqueue("sleep", wish{})
		s.leaseAhead(id, w1)
		s.wait(id, 4*seconds)
		s.unbegun(id, w2)
		s.do("w1", `DELETE FROM workflow_begun WHERE token = (SELECT token_was FROM t.transition WHERE run = $1 AND was = 'leased')`, id)
		s.do("w1", `INSERT INTO workflow_begun (token, begun) SELECT token_was, true FROM t.transition WHERE run = $1 AND was = 'leased'`, id)
		s.work(id, w2)
		s.finish(id, w2)
		return id
	}},
	{only("I09b"), "ordinary lease taken back for free", func(s *stage) uuid.UUID {
		id := s.enqueue("sleep", wish{})
		s.lease(id, w1)
		s.wait(id, 4*seconds)
		s.but(`suspect = true`, `attempt = w.attempt - 1, suspect = true`).expire(id, w1) // by the new worker in the same slot
		s.work(id, w2)
		s.finish(id, w2)
		return id
	}},
	{only("I09c"), "begun without a mark", func(s *stage) uuid.UUID {
		id := s.enqueue("sleep", wish{})
		s.leaseAhead(id, w1)
		s.start(id)
		s.wait(id, 4*seconds)
		s.unbegun(id, w2)
		s.work(id, w2)
		s.finish(id, w2)
		return id
	}},
	{only("I09d"), "not begun, and charged", func(s *stage) uuid.UUID {
		id := s.enqueue("sleep", wish{})
		s.leaseAhead(id, w1)
		s.wait(id, 4*seconds)
		s.expire(id, w2)
		s.work(id, w2)
		s.finish(id, w2)
		return id
	}},
	{only("I09d"), "not begun, and out of attempts", func(s *stage) uuid.UUID {
		id := s.enqueue("sleep", wish{max: 1})
		s.leaseAhead(id, w1)
		s.wait(id, 4*seconds)
		s.expire(id, w2)
		s.settle(id, w2, "failed", "lease_expired")
		return id
	}},
	{only("I10"), "exhausted and started", func(s *stage) uuid.UUID {
		id := s.enqueue("fail", wish{max: 2})
		for _, verdict := range []string{"retried", "retried", "failed"} {
			s.work(id, w1)
			s.fail(id, w1, verdict)
		}
		return id
	}},
	{only("I11"), "lease rolled back and started", func(s *stage) uuid.UUID {
		id := s.enqueue("sleep", wish{})
		s.work(id, w1)
		s.finish(id, w1)
		s.do("torture", `INSERT INTO t.exec_log SELECT event, run, 2, $2, at, outcome FROM t.exec_log WHERE run = $1 AND event = 'start'`, id, w2)
		return id
	}},
	{only("I11"), "started twice", func(s *stage) uuid.UUID {
		id := s.enqueue("sleep", wish{})
		s.work(id, w1)
		s.start(id)
		s.finish(id, w1)
		return id
	}},
	{only("I11b"), "called twice", func(s *stage) uuid.UUID {
		id := s.enqueue("external", wish{})
		s.work(id, w1)
		for range 2 {
			s.tell(entry{Kind: "call", Run: id.String(), LeaseNo: 1, Attempt: 1})
		}
		s.finish(id, w1)
		return id
	}},
	{only("I12"), "handed back after a cancel", func(s *stage) uuid.UUID {
		id := s.enqueue("sleep", wish{})
		s.work(id, w1)
		s.ask("cancel", id)
		s.without("workflow_run_update_guard")
		s.do("w1", `UPDATE workflow_run SET status = 'pending', finished_at = NULL WHERE id = $1`, id)
		s.work(id, w2)
		s.finish(id, w2)
		return id
	}},
	{only("I12"), "attempt given back after a cancel", func(s *stage) uuid.UUID {
		id := s.enqueue("sleep", wish{})
		s.work(id, w1)
		s.call("cancel", id)
		s.do("w1", `UPDATE workflow_run SET attempt = attempt - 1 WHERE id = $1`, id)
		return id
	}},
	{[]string{"I12", "I13b", "I14"}, "settled after a cancel", func(s *stage) uuid.UUID {
		id := s.enqueue("deaf", wish{})
		s.work(id, w1)
		s.call("cancel", id)
		s.end(id, "ok")
		s.without("workflow_run_update_guard")
		s.settle(id, w1, "succeeded", "")
		return id
	}},
	{only("I12b"), "retried by nobody", func(s *stage) uuid.UUID {
		id := s.enqueue("fail", wish{max: 1})
		s.work(id, w1)
		s.fail(id, w1, "failed")
		s.ask("retry", id)
		s.work(id, w1)
		s.finish(id, w1)
		return id
	}},
	{only("I13"), "expiry not told", func(s *stage) uuid.UUID {
		id := s.enqueue("sleep", wish{})
		s.work(id, w1)
		s.wait(id, 4*seconds)
		s.expire(id, w2)
		s.do("w2", `DELETE FROM workflow_history WHERE workflow_id = $1`, id)
		s.work(id, w2)
		s.finish(id, w2)
		return id
	}},
	{only("I13b"), "retry told twice", func(s *stage) uuid.UUID {
		id := s.enqueue("fail", wish{})
		s.work(id, w1)
		s.fail(id, w1, "retried")
		s.do("w1", `
			INSERT INTO workflow_history (workflow_id, created_at, event_type, attempt, lease_no, started_at, actor, data)
			SELECT workflow_id, created_at, event_type, attempt, lease_no, started_at, actor, data FROM workflow_history WHERE workflow_id = $1`, id)
		s.work(id, w2)
		s.finish(id, w2)
		return id
	}},
	{only("I13c"), "expiry told late", func(s *stage) uuid.UUID {
		id := s.enqueue("sleep", wish{})
		s.work(id, w1)
		s.wait(id, 4*seconds)
		s.expire(id, w2)
		s.work(id, w2)
		s.finish(id, w2)
		s.do("w2", `UPDATE workflow_history SET created_at = clock_timestamp() WHERE workflow_id = $1`, id)
		return id
	}},
	{only("I14"), "cancel without effect", func(s *stage) uuid.UUID {
		id := s.enqueue("sleep", wish{})
		s.work(id, w1)
		s.tell(entry{Kind: "cancel", Run: id.String(), Answer: "cancelled"})
		s.finish(id, w1)
		return id
	}},
	{only("I14b"), "delete without effect", func(s *stage) uuid.UUID {
		id := s.enqueue("sleep", wish{})
		s.tell(entry{Kind: "delete", Run: id.String(), Answer: "deleted"})
		s.work(id, w1)
		s.finish(id, w1)
		return id
	}},
	{only("I14b"), "lease not revoked", func(s *stage) uuid.UUID {
		id := s.enqueue("sleep", wish{})
		s.work(id, w1)
		s.without("workflow_run_tidy")
		s.do("client", `UPDATE workflow_run SET deleted_at = now(), delete_reason = 'torture' WHERE id = $1`, id)
		s.tell(entry{Kind: "delete", Run: id.String(), Answer: "deleted"})
		return id
	}},
	{only("I15"), "event lost", func(s *stage) uuid.UUID {
		id := s.enqueue("effect", wish{emit: 2})
		s.work(id, w1)
		s.succeed(id, w1, 1)
		return id
	}},
	{only("I15"), "events of a lost lease", func(s *stage) uuid.UUID {
		id := s.enqueue("effect", wish{emit: 1})
		s.work(id, w1)
		s.emit(id, w1, 0)
		s.wait(id, 4*seconds)
		s.expire(id, w2)
		s.work(id, w2)
		s.succeed(id, w2, 1)
		return id
	}},
	{only("I15"), "events under the wrong number", func(s *stage) uuid.UUID {
		id := s.enqueue("effect", wish{emit: 1})
		s.work(id, w1)
		s.emit(id, w1, 0)
		s.wait(id, 4*seconds)
		s.expire(id, w2)
		s.work(id, w2)
		s.succeed(id, w2, 0)
		return id
	}},
	{only("I15"), "events without a success", func(s *stage) uuid.UUID {
		id := s.enqueue("effect", wish{emit: 1})
		s.work(id, w1)
		s.emit(id, w1, 0)
		s.call("cancel", id)
		s.end(id, "cancelled")
		return id
	}},
	{only("I16"), "not recorded and no reason", func(s *stage) uuid.UUID {
		id := s.enqueue("sleep", wish{})
		s.work(id, w1)
		s.beat(id, w1)
		s.end(id, "ok")
		s.strike("network", "w2", 4*seconds, 0) // another worker's trouble
		s.exit(w2, 2*seconds)
		s.wait(id, leaseLength+seconds/10)
		s.expire(id, w2)
		s.work(id, w2)
		s.finish(id, w2)
		return id
	}},
	{only("I16b"), "not recorded after a storm", func(s *stage) uuid.UUID {
		id := s.enqueue("sleep", wish{})
		s.work(id, w1)
		s.end(id, "ok")
		for range 6 {
			s.wait(id, seconds)
			s.beat(id, w1)
		}
		s.wait(id, leaseLength+seconds/10)
		s.strike("storm", "all", 10*seconds, 6*seconds)
		s.expire(id, w2)
		s.work(id, w2)
		s.finish(id, w2)
		return id
	}},
	{only("I30"), "two for one key", func(s *stage) uuid.UUID {
		id := s.enqueue("sleep", wish{key: "k"})
		s.do("torture", `DROP INDEX workflow_run_idempotency_idx`)
		another := s.enqueue("sleep", wish{key: "k", answer: "unknown"})
		for _, id := range []uuid.UUID{id, another} {
			s.work(id, w1)
			s.finish(id, w1)
		}
		return id
	}},
	{only("I30b"), "key free again", func(s *stage) uuid.UUID {
		id := s.enqueue("sleep", wish{key: "k"})
		s.ask("delete", id)
		another := s.enqueue("sleep", wish{key: "k"})
		s.work(another, w1)
		s.finish(another, w1)
		return id
	}},
	{only("I32"), "delay dropped", func(s *stage) uuid.UUID {
		id := s.but(`clock_timestamp() + $4::interval`, `clock_timestamp() + 0 * $4::interval`).enqueue("delayed", wish{delay: 30 * seconds})
		s.work(id, w1)
		s.succeed(id, w1, 0)
		return id
	}},
	{only("I32b"), "backoff not awaited", func(s *stage) uuid.UUID {
		id := s.enqueue("fail", wish{})
		s.work(id, w1)
		s.end(id, "error")
		s.but(`'200 ms'`, `'3 s'`).settle(id, w1, "retried", "handler_error")
		s.work(id, w1)
		s.finish(id, w1)
		return id
	}},
	{only("I34"), "deadlock charged", func(s *stage) uuid.UUID {
		id := s.enqueue("effect", wish{})
		s.work(id, w1)
		s.end(id, "ok")
		s.settle(id, w1, "retried", "effect")
		s.wait(id, seconds)
		s.work(id, w1)
		s.succeed(id, w1, 0)
		return id
	}},
	{only("I34"), "failed over a deadlock", func(s *stage) uuid.UUID {
		id := s.enqueue("effect", wish{max: 1})
		s.work(id, w1)
		s.end(id, "ok")
		s.settle(id, w1, "failed", "effect")
		return id
	}},
	{only("I35"), "given up at once", func(s *stage) uuid.UUID {
		id := s.enqueue("fail", wish{})
		s.work(id, w1)
		s.fail(id, w1, "failed")
		return id
	}},
	{only("I36"), "result dropped", func(s *stage) uuid.UUID {
		id := s.enqueue("badresult", wish{})
		s.work(id, w1)
		s.finish(id, w1)
		return id
	}},
	{only("I38"), "heartbeat beyond the deadline", func(s *stage) uuid.UUID {
		id := s.enqueue("sleep", wish{})
		s.work(id, w1)
		for range 7 {
			s.wait(id, seconds)
			s.beat(id, w1)
		}
		s.wait(id, seconds)
		s.but(`THEN deadline_at END`, `THEN NULL::timestamptz END`).beat(id, w1)
		s.finish(id, w1)
		return id
	}},
	{only("I07b"), "lease stolen with its number", func(s *stage) uuid.UUID {
		id := s.enqueue("sleep", wish{})
		s.work(id, w1)
		s.do("w2", `UPDATE workflow_run SET leased_by = $2, lease_until = lease_until + interval '1 s' WHERE id = $1`, id, w2)
		s.finish(id, w2)
		return id
	}},
	{only("I38"), "no deadline", func(s *stage) uuid.UUID {
		id := s.enqueue("sleep", wish{})
		s.but(`deadline_at = statement_timestamp() + CASE WHEN attempt < max_attempts THEN $4 ELSE '0' END::interval`, `deadline_at = CASE WHEN $4::interval IS NULL THEN now() END`).work(id, w1)
		for range 30 {
			s.wait(id, seconds)
			s.beat(id, w1)
		}
		s.finish(id, w1)
		return id
	}},
	{only("I34"), "charged without a code", func(s *stage) uuid.UUID {
		id := s.enqueue("sleep", wish{})
		s.work(id, w1)
		s.end(id, "ok")
		s.settle(id, w1, "retried", "")
		s.wait(id, seconds)
		s.work(id, w1)
		s.finish(id, w1)
		return id
	}},
	{only("I11"), "started by another", func(s *stage) uuid.UUID {
		id := s.enqueue("sleep", wish{})
		s.work(id, w1)
		s.finish(id, w1)
		s.do("torture", `UPDATE t.exec_log SET worker = $2 WHERE run = $1 AND event = 'start'`, id, w2)
		return id
	}},
	{only("I05b"), "failed by a reaper", func(s *stage) uuid.UUID {
		id := s.enqueue("fail", wish{max: 1})
		s.work(id, w1)
		s.do("w2", `UPDATE workflow_run SET status = 'failed', finished_at = now(), error = '{"code": "handler_error"}', lease_token = NULL, lease_until = NULL, leased_by = NULL WHERE id = $1`, id)
		return id
	}},
	{only("I05b"), "succeeded by nobody", func(s *stage) uuid.UUID {
		id := s.enqueue("sleep", wish{})
		s.work(id, w1)
		s.end(id, "ok")
		s.do("w2", `UPDATE workflow_run SET status = 'succeeded' WHERE id = $1`, id)
		return id
	}},
	{only("I15b"), "event of a run that is not there", func(s *stage) uuid.UUID {
		e := s.order("effect", wish{answer: "rolled back"})
		s.tell(e)
		s.do("w1", `SELECT outbox_emit($1, 'chaos.effect', '{"lease_no": 1}')`, e.Run)
		return uuid.MustParse(e.Run)
	}},
	{[]string{"I12b", "I13b"}, "failed run that succeeds", func(s *stage) uuid.UUID {
		id := s.enqueue("fail", wish{max: 1})
		s.work(id, w1)
		s.fail(id, w1, "failed")
		s.without("workflow_run_update_guard")
		s.do("w1", `UPDATE workflow_run SET status = 'succeeded' WHERE id = $1`, id)
		return id
	}},
	{only("I32b"), "exhausted early", func(s *stage) uuid.UUID {
		id := s.enqueue("sleep", wish{max: 1})
		s.work(id, w1)
		s.exit(w1, 0)
		s.wait(id, 4*seconds)
		s.expire(id, w2)
		s.but(`'0' END::interval END`, `'9 s' END::interval END`).settle(id, w2, "released", "")
		s.lease(id, w1)
		s.settle(id, w1, "failed", "lease_expired")
		return id
	}},
	{only("I50"), "forged by a client", func(s *stage) uuid.UUID {
		e := s.order("effect", wish{answer: "refused"})
		s.tell(e)
		s.tell(entry{Kind: "forged", Run: e.Run})
		return uuid.MustParse(e.Run)
	}},
	{only("I47"), "nobody is told", func(s *stage) uuid.UUID { return s.enqueue("unleasable", wish{}) }},
	{only("I47b"), "set aside for nothing", func(s *stage) uuid.UUID {
		id := s.enqueue("sleep", wish{})
		s.aside(id)
		s.work(id, w1)
		s.finish(id, w1)
		return id
	}},
	{only("I47c"), "kept waiting", func(s *stage) uuid.UUID {
		first := s.enqueue("unleasable", wish{})
		s.aside(first)
		s.wait(first, 60*seconds)
		id := s.enqueue("sleep", wish{})
		s.wait(id, 6*seconds)
		s.exit(w2, 7*seconds) // but not w1
		s.work(id, w1)
		s.finish(id, w1)
		return id
	}},
}
