package sql_test

import "testing"

// S34–S36, W41: immutable columns cannot be changed, and values that would break a run are refused with the run, the
// column and the value.
func TestRefusedUpdates(t *testing.T) {
	s, _ := psql(t)
	pending, leased, done := s.enqueue(), s.leased(), s.in("succeeded")
	const again = "enqueue a new one"
	tests := []struct {
		name, id, set, hint string
		words               []string
	}{
		{"S34 infinite lease", leased, `lease_until = 'infinity'`, "A lease ends within 24 hours", []string{"lease_until infinity would never expire"}},
		{"S34 long lease", leased, `lease_until = now() + interval '26 hours'`, "A lease ends within 24 hours", []string{"never expire"}},
		{"S35 payload", pending, `payload = '{"a": 1}'`, again, []string{"payload never changes"}},
		{"S35 payload of a finished run", done, `payload = '{"a": 1}'`, again, []string{"payload never changes"}},
		{"type", pending, `type = 'a.c'`, again, []string{"id, type, created_at and created_by never change"}},
		{"id", pending, `id = gen_random_uuid()`, again, []string{"id, type, created_at and created_by never change"}},
		{"created_by", pending, `created_by = 'nobody'`, again, []string{"never change"}},
		{"created_at", pending, `created_at = now() - interval '1 day'`, again, []string{"never change"}},
		{"history of a success", done, `settled_by = 'nobody'`, "Leave them", []string{"has succeeded", "settled_by"}},
		{"history of a success", done, `started_at = now()`, "Leave them", []string{"has succeeded", "started_at"}},
		{"history of a success", done, `finished_at = 'infinity'`, "Leave them", []string{"has succeeded", "finished_at"}},
		{"history of a success", done, `attempt = 0`, "Leave them", []string{"has succeeded", "attempt"}},
		{"priority", pending, `priority = 1000`, "-100 (last)", []string{"priority 1000", "-100 to 100"}},
		{"attempt", pending, `attempt = -1`, "raise max_attempts", []string{"attempt goes from 0 to -1"}},
		{"max_attempts", pending, `max_attempts = 0`, "single start", []string{"max_attempts 0 is outside 1 to 1000"}},
		{"run_at", pending, `run_at = 'infinity'`, "ten years ahead", []string{"run_at infinity"}},
		{"run_at", pending, `run_at = '1999-01-01'`, "from the year 2000", []string{"run_at 1999-01-01"}},
		{"lease_no", leased, `lease_no = 0`, "Leave lease_no", []string{"lease_no never goes down"}},
		{"empty key", pending, `idempotency_key = ''`, "null for none", []string{"idempotency_key has 0 characters"}},
		{"tenant", pending, `tenant_id = 'other'`, "enqueue a new one", []string{"tenant_id never changes"}},
		{"long key", pending, `idempotency_key = repeat('k', 201)`, "hash", []string{"idempotency_key has 201 characters"}},
		{"metadata", pending, `metadata = '[]'`, "tags", []string{"metadata", "16384 bytes and 64 levels"}},
		{"deep metadata", pending, `metadata = ` + nested(65), "tags", []string{"metadata", "16384 bytes and 64 levels"}},
		{"large metadata", pending, `metadata = jsonb_build_object('a', repeat('x', 20000))`, "tags", []string{"metadata"}},
	}
	for _, test := range tests {
		t.Run(test.name, func(t *testing.T) {
			s := &session{t, s.conn}
			s.refused(`UPDATE workflow_run SET `+test.set+` WHERE id = '`+test.id+`'`, "23514", test.hint, append(test.words, test.id)...)
		})
	}
}

// An UPDATE by hand may change priority, run_at, max_attempts, held_at, idempotency_key and metadata. An update that
// names the payload but leaves it unchanged is accepted too.
func TestAcceptedUpdates(t *testing.T) {
	s, _ := psql(t)
	id := s.enqueue()
	for _, set := range []string{
		`priority = 100`, `run_at = now() + interval '1 day'`, `max_attempts = 9`, `held_at = now()`, `held_at = NULL`,
		`idempotency_key = repeat('k', 200)`, `idempotency_key = NULL`, `metadata = '{"a": 1}'`, `metadata = NULL`,
		`payload = payload, priority = -100`, `payload = '{ }'`,
	} {
		s.do(`UPDATE workflow_run SET ` + set + ` WHERE id = '` + id + `'`)
	}
}

// updated_at is set by every update, without being named.
func TestUpdatedAt(t *testing.T) {
	s, _ := psql(t)
	id := s.enqueue()
	before := s.of(id, `updated_at`)
	s.do(`UPDATE workflow_run SET priority = 1 WHERE id = '` + id + `'`)
	s.expect("later than "+before, s.of(id, `updated_at > '`+before+`'`), "t")
}

// A run that is resumed, undeleted or moved to another priority is due from then on, or at its run_at if that is
// later: workers do not look for it behind their position in the lane.
func TestPutBackIsDueNow(t *testing.T) {
	s, _ := psql(t)
	for _, set := range []string{`held_at = NULL`, `deleted_at = NULL`, `priority = 7`, `held_at = NULL, run_at = now() - interval '1 day'`} {
		id := s.enqueue()
		s.do(`UPDATE workflow_run SET held_at = now(), deleted_at = now(), run_at = now() - interval '1 hour' WHERE id = '` + id + `'`)
		s.do(`UPDATE workflow_run SET ` + set + ` WHERE id = '` + id + `'`)
		s.expect(set+": due now", s.of(id, `run_at = updated_at`), "t")
		s.do(`UPDATE workflow_run SET held_at = now(), run_at = now() + interval '1 hour' WHERE id = '` + id + `'`)
		s.do(`UPDATE workflow_run SET held_at = NULL WHERE id = '` + id + `'`)
		s.expect(set+": due later", s.of(id, `run_at > now() + interval '59 minutes'`), "t")
	}
}

// S33, R7: a bare cancel of a leased run removes the lease in the same statement.
func TestRawCancelRevokes(t *testing.T) {
	s, _ := psql(t)
	id := s.leased()
	lease := s.do(`UPDATE workflow_run SET status = 'cancelled' WHERE id = '` + id + `'
		RETURNING coalesce(lease_token::text, lease_until::text, leased_by, 'none')`)
	s.expect("lease", lease, "none")
	s.expect("finished_at is now", s.of(id, `finished_at BETWEEN now() - interval '1 minute' AND now()`), "t")
}

// W04: a bare soft delete of a leased run cancels it. For other runs it leaves the state unchanged.
func TestSoftDelete(t *testing.T) {
	s, _ := psql(t)
	for _, status := range statuses {
		id := s.in(status)
		s.do(`UPDATE workflow_run SET deleted_at = now(), delete_reason = 'test' WHERE id = '` + id + `'`)
		if status == "leased" {
			status = "cancelled"
		}
		s.expect("status", s.of(id, `status`), status)
		s.expect("lease", s.of(id, `coalesce(lease_token::text, leased_by, 'none')`), "none")
	}
}

// W40: a soft-deleted run frees its key. Undeleting it while another run has the key is refused with both runs and
// the key.
func TestUndelete(t *testing.T) {
	s, _ := psql(t)
	insert := `INSERT INTO workflow_run (type, idempotency_key) VALUES ('a.b', 'it''s mine') RETURNING id`
	first := s.do(insert)
	s.do(`UPDATE workflow_run SET deleted_at = now() WHERE id = '` + first + `'`)
	second := s.do(insert)
	undelete := `UPDATE workflow_run SET deleted_at = NULL WHERE id = '` + first + `'`
	s.refused(undelete, "23505", "Delete the other run first", first, second, "'it''s mine'")

	s.do(`SELECT workflow_delete('` + second + `', 'test')`)
	s.do(undelete)
	s.expect("deleted", s.of(first, `deleted_at IS NOT NULL`), "f")
	s.refused(`UPDATE workflow_run SET deleted_at = NULL WHERE id = '`+second+`'`, "23505", "clear the key of this one", first, second)
	s.do(`UPDATE workflow_run SET deleted_at = NULL, idempotency_key = NULL WHERE id = '` + second + `'`)
}

// S37: a run cannot be removed by hand, and the message names a way out. The owner can remove it, and the removal is
// recorded.
func TestDelete(t *testing.T) {
	s, _ := psql(t)
	for _, status := range statuses {
		id := s.in(status)
		del := `DELETE FROM workflow_run WHERE id = '` + id + `'`
		words := "is deleted by retention alone"
		if status == "leased" {
			words = "is leased by worker 7 and cannot be deleted"
		}
		s.refused(del, "23514", "SELECT workflow_delete('"+id+"', 'reason')", id, words)
		s.byHand(del)
		s.expect("record", s.do(`SELECT concat_ws(' ', table_name, operation, row_key->>'id', reason) FROM workflow_override ORDER BY id DESC LIMIT 1`), "workflow_run DELETE "+id+" a test needs it")
	}
	s.expect("rows left", s.do(`SELECT count(*) FROM workflow_run`), "0")
}
