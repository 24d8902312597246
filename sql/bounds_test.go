package sql_test

import (
	"strings"
	"testing"
)

// A row that got beyond bounds while triggers were off can be cancelled, deleted and repaired: guards do not check
// columns that a statement leaves unchanged.
func TestRowsBeyondBounds(t *testing.T) {
	s, _ := psql(t)
	s.unbound()
	for _, set := range []string{
		`run_at = '1999-01-01'`, `run_at = 'infinity'`, `priority = 1000`, `max_attempts = 0`, `attempt = 2147483647`, `postponed = 2147483647`,
		`lease_no = 9223372036854775807`, `lease_until = 'infinity'`, `started_at = '-infinity'`, `started_at = NULL`, `last_error = repeat('x', 100000)`,
	} {
		for _, mend := range []string{`SELECT workflow_cancel($)`, `SELECT workflow_delete($, 'broken')`, `UPDATE workflow_run SET held_at = now() WHERE id = $`,
			`UPDATE workflow_run SET status = 'cancelled' WHERE id = $`} {
			id := s.leased()
			s.do(`BEGIN; SET LOCAL session_replication_role = replica;
				UPDATE workflow_run SET ` + set + ` WHERE id = '` + id + `'; COMMIT`)
			s.do(strings.ReplaceAll(mend, "$", "'"+id+"'"))
		}
	}
}

// Nobody can rewrite the outcome of a run, or how it was reached. A lease gets no other start, and a step no other
// token.
func TestOutcomesStay(t *testing.T) {
	s, _ := psql(t)
	ended := []string{
		`result = '{"forged": true}'`, `result = NULL`, `error = '{}'`, `last_error = 'never'`, `settled_token = gen_random_uuid()`, `settled_by = 'me'`,
		`started_at = now()`, `started_at = NULL`, `finished_at = now() - interval '1 year'`, `finished_at = 'infinity'`, `attempt = attempt + 1`, `lease_no = lease_no + 1`,
		`postponed = 7`, `suspect = NOT suspect`, `created_at = now()`, `token_id = gen_random_uuid()`, `node = 'a'`,
	}
	for _, status := range []string{"succeeded", "failed", "cancelled"} {
		for _, set := range ended {
			id := s.in(status)
			s.do(`BEGIN; SET LOCAL session_replication_role = replica; UPDATE workflow_run SET result = '{}', error = '{"code": "x"}', started_at = created_at WHERE id = '` + id + `'; COMMIT`)
			s.refused(`UPDATE workflow_run SET `+set+` WHERE id = '`+id+`'`, "23514", "", "workflow_run: run "+id)
		}
	}
	for _, set := range []string{
		`started_at = NULL`, `started_at = '-infinity'`, `started_at = 'infinity'`, `started_at = now() - interval '1 hour'`, `lease_no = lease_no + 1`, `token_id = gen_random_uuid()`, `node = 'a'`,
		`attempt = 2147483647`, `postponed = 2147483647`, `status = 'cancelled', started_at = NULL`,
		`last_error = repeat('x', 16385)`, `error = to_jsonb(repeat(md5(random()::text), 3000))`,
	} {
		id := s.leased()
		s.refused(`UPDATE workflow_run SET `+set+` WHERE id = '`+id+`'`, "23514", "", "workflow_run: run "+id)
	}
	for _, set := range []string{`lease_no = 9223372036854775807`, `token_id = gen_random_uuid()`, `attempt = 1001`,
		`status = 'leased', lease_token = gen_random_uuid(), lease_until = now(), leased_by = 'me', lease_no = 9223372036854775807`} {
		id := s.enqueue()
		s.refused(`UPDATE workflow_run SET `+set+` WHERE id = '`+id+`'`, "23514", "", "workflow_run: run "+id)
	}
}

// A cancel without a reason records its own text, and not the error of an earlier attempt.
func TestCancelHasWordsOfItsOwn(t *testing.T) {
	s, _ := psql(t)
	expired := func() string {
		id := s.enqueue()
		s.do(`BEGIN; SET LOCAL session_replication_role = replica;
			UPDATE workflow_run SET last_error = 'lease_expired: no sign of life from w', error = '{"code": "lease_expired"}' WHERE id = '` + id + `'; COMMIT`)
		return id
	}
	s.do(`SET application_name = 'psql'`)
	by := "cancelled: by " + s.do(`SELECT session_user`) + " [psql]"
	for set, want := range map[string]string{
		`status = 'cancelled'`:                              by,
		`status = 'cancelled', updated_at = now()`:          by,
		`status = 'cancelled', last_error = 'my own words'`: "my own words",
	} {
		id := expired()
		s.do(`UPDATE workflow_run SET ` + set + ` WHERE id = '` + id + `'`)
		s.expect(set, s.of(id, `last_error`), want)
		s.expect(set+": history", s.do(`SELECT data->>'reason' FROM workflow_history WHERE workflow_id = '`+id+`' AND event_type = 'cancelled'`), want)
		s.expect(set+": error", s.of(id, `error->>'code'`), "lease_expired") // an attempt was cut off; undo has to know that
	}
	id := s.leased()
	s.do(`SELECT workflow_delete('` + id + `', 'a duplicate')`)
	s.expect("deleted", s.of(id, `last_error`), "cancelled: deleted: a duplicate")
}
