package sql_test

import (
	"fmt"
	"testing"
)

var statuses = []string{"pending", "leased", "succeeded", "failed", "cancelled"}

// R12, S32, S33, W44: of the 25 changes from one state to another by a bare UPDATE, those of the state machine work,
// and the others are refused with a message that says what to do instead.
func TestTransitions(t *testing.T) {
	s, _ := psql(t)
	type words struct{ message, hint string }
	final := func(from, to string) words {
		hint := "Enqueue a new run"
		if from == "failed" {
			hint = "SELECT workflow_retry('"
		}
		return words{"is " + from + ", which is final; it cannot become " + to, hint}
	}
	unleased := func(to string) words {
		return words{"is pending and cannot become " + to + " without being leased", "SELECT workflow_cancel('"}
	}
	refused := map[string]words{
		"pending→leased":    {"cannot be leased without lease_token", "Leave leasing to the workers"},
		"pending→succeeded": unleased("succeeded"),
		"pending→failed":    unleased("failed"),
		"failed→pending":    {"has failed and is not simply set to pending", "SELECT workflow_retry('"},
	}
	for _, from := range []string{"succeeded", "failed", "cancelled"} {
		for _, to := range statuses {
			if change := from + "→" + to; from != to && change != "failed→pending" {
				refused[change] = final(from, to)
			}
		}
	}
	for _, from := range statuses {
		for _, to := range statuses {
			t.Run(from+"→"+to, func(t *testing.T) {
				s := &session{t, s.conn}
				id := s.in(from)
				update := fmt.Sprintf(`UPDATE workflow_run SET status = '%s' WHERE id = '%s'`, to, id)
				if want, ok := refused[from+"→"+to]; ok {
					s.refused(update, "23514", want.hint, id, want.message)
					to = from
				} else {
					s.do(update)
				}
				s.expect("status", s.of(id, `status`), to)
				// The columns that go with a state are right, whoever set it.
				s.expect("has a lease", s.of(id, `lease_token IS NOT NULL AND lease_until IS NOT NULL AND leased_by IS NOT NULL`), yes(to == "leased"))
				s.expect("has remains of a lease", s.of(id, `coalesce(lease_token::text, lease_until::text, leased_by, deadline_at::text) IS NOT NULL`), yes(to == "leased"))
				s.expect("has finished", s.of(id, `finished_at IS NOT NULL`), yes(to != "pending" && to != "leased"))
			})
		}
	}
}

func yes(b bool) string {
	if b {
		return "t"
	}
	return "f"
}

// An unknown state is refused with the list of states.
func TestUnknownStatus(t *testing.T) {
	s, _ := psql(t)
	for _, from := range statuses {
		id := s.in(from)
		for _, to := range []string{"PENDING", "panding", "", "done"} {
			s.refused(`UPDATE workflow_run SET status = '`+to+`' WHERE id = '`+id+`'`,
				"23514", "pending, leased, succeeded, failed and cancelled", "status '"+to+"' does not exist")
		}
		s.refused(`UPDATE workflow_run SET status = NULL WHERE id = '`+id+`'`, "23502", "", `"status"`)
	}
}

// Leasing by hand requires every column of a lease. An unexpired lease cannot be taken over.
func TestLeasingByHand(t *testing.T) {
	s, _ := psql(t)
	set := func(id, what string) string { return `UPDATE workflow_run SET ` + what + ` WHERE id = '` + id + `'` }
	id := s.enqueue()
	const all = `status = 'leased', lease_token = gen_random_uuid(), lease_until = now() + interval '1 minute', leased_by = 'me'`
	s.refused(set(id, all), "23514", "workers", id, "next lease_no")
	s.refused(set(id, `status = 'leased', lease_token = gen_random_uuid(), lease_no = 1`), "23514", "workers", id, "lease_until and leased_by")
	s.refused(set(id, all+`, lease_no = -1`), "23514", "workers", id, "lease_no never goes down")
	s.do(set(id, all+`, lease_no = lease_no + 1`))

	const mine = `lease_token = gen_random_uuid(), lease_no = lease_no + 1, leased_by = 'thief'`
	s.refused(set(id, mine), "23514", "Wait until it expires", id, "held by me until", "cannot be given to another")
	s.do(set(id, `lease_until = now() - interval '1 second'`))
	s.refused(set(id, `lease_token = gen_random_uuid()`), "23514", "Wait until", id)
	s.do(set(id, mine))
	s.expect("leased by", s.of(id, `leased_by`), "thief")
}

// Only workflow_retry can change failed to pending. The permission ends with the function.
func TestRetryOnlyByFunction(t *testing.T) {
	s, _ := psql(t)
	first, second := s.in("failed"), s.in("failed")
	update := `UPDATE workflow_run SET status = 'pending' WHERE id = '` + second + `'`
	s.do(`BEGIN`)
	s.expect("answer", s.do(`SELECT workflow_retry('`+first+`')`), "pending")
	s.expect("the setting", s.do(`SELECT coalesce(current_setting('workflow.retry', true), '')`), "")
	s.refused(update, "23514", "SELECT workflow_retry('"+second+"')", second)
	s.do(`ROLLBACK`)
	s.expect("first", s.of(first, `status`), "failed")
	s.refused(update, "23514", "workflow_retry", second)
}

// Without any trigger, the CHECKs still keep states and leases consistent.
func TestChecksHoldAlone(t *testing.T) {
	s, _ := psql(t)
	id := s.leased()
	s.do(`ALTER TABLE workflow_run DISABLE TRIGGER USER`)
	for _, set := range []string{
		`status = 'garbage'`, `status = 'cancelled'`, `status = 'pending'`, `lease_token = NULL`, `lease_until = NULL`,
		`leased_by = NULL`, `finished_at = now()`, `priority = 101`, `attempt = -1`, `max_attempts = 0`, `lease_no = -1`,
		`postponed = -1`, `run_at = 'infinity'`,
		`status = 'succeeded', lease_token = NULL, lease_until = NULL, leased_by = NULL`,
	} {
		s.refused(`UPDATE workflow_run SET `+set+` WHERE id = '`+id+`'`, "23514", "", "workflow_run_")
	}
}
