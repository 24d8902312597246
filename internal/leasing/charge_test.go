package leasing_test

import (
	"encoding/json"
	"testing"
	"time"

	"github.com/google/uuid"

	"github.com/simple-workflow/simple-workflow/internal/leasing"
	"github.com/simple-workflow/simple-workflow/internal/pgtest"
	"github.com/simple-workflow/simple-workflow/internal/settling"
	"github.com/simple-workflow/simple-workflow/run"
)

// A lease charges the attempt and has the next lease_no and a new token. The row and the Lease that the
// caller gets agree.
func TestCharge(t *testing.T) {
	pool := pgtest.New(t)
	id := add(t, pool, "a.x", 3, time.Minute)
	byHand(t, pool, `UPDATE workflow_run SET idempotency_key = 'k', metadata = '{"m": 1}', suspect = true, postponed = 4 WHERE id = $1`, id)
	p := newPoller(pool, "a.")
	tokens := map[uuid.UUID]bool{}
	for i := 1; i <= 3; i++ {
		l := one(t, p)
		r := read(t, pool, id)
		if l.ID != id || l.Attempt != i || l.LeaseNo != int64(i) || l.Exhausted || tokens[l.Token] {
			t.Errorf("lease %d: %+v", i, l)
		}
		tokens[l.Token] = true
		if r.Status != run.Leased || r.Attempt != i || r.LeaseNo != int64(i) || *r.LeasedBy != "w1" ||
			query[uuid.UUID](t, pool, "SELECT lease_token FROM workflow_run WHERE id = $1", id) != l.Token {
			t.Errorf("row %d: %+v", i, r)
		}
		if l.Type != "a.x" || l.Priority != 3 || l.MaxAttempts != 3 || l.IdempotencyKey != "k" || l.Worker != "w1" ||
			!l.StartedAt.Equal(*r.StartedAt) || l.Postponed != 4 || l.Length != time.Minute || l.Timeout != 0 {
			t.Errorf("lease %d: %+v", i, l)
		}
		if m := map[string]int{}; json.Unmarshal(l.Metadata, &m) != nil || m["m"] != 1 || string(l.Payload) != "{}" {
			t.Errorf("metadata %s, payload %s", l.Metadata, l.Payload)
		}
		if i == 3 {
			break
		}
		if _, err := settling.Settle(t.Context(), pool, "w1", []settling.Outcome{{ID: id, Token: l.Token, Verdict: settling.TryAgain}}); err != nil {
			t.Fatal(err)
		}
	}
	events := query[int](t, pool, `
		SELECT count(*) FROM workflow_event
		WHERE workflow_id = $1 AND event_type = 'leased' AND actor = 'w1' AND attempt = lease_no`, id)
	if events != 3 {
		t.Errorf("%d events, want 3", events)
	}
}

// A pending run that has no attempt left is leased as exhausted, and is not charged again.
func TestExhausted(t *testing.T) {
	pool := pgtest.New(t)
	id := add(t, pool, "a.x", 0, time.Minute)
	byHand(t, pool, "UPDATE workflow_run SET attempt = 3 WHERE id = $1", id)
	p := newPoller(pool, "a.")
	p.Terms = func(typ string) leasing.Terms {
		return leasing.Terms{Length: time.Minute, Timeout: time.Hour, Room: -1}
	}
	l := one(t, p)
	if !l.Exhausted || l.Attempt != 3 || l.LeaseNo != 1 {
		t.Errorf("lease: %+v", l)
	}
	if r := read(t, pool, id); r.Attempt != 3 || r.Status != run.Leased || r.LeaseUntil.Sub(*r.StartedAt) != time.Minute {
		t.Errorf("row: %+v", r)
	}
	// A release leaves the attempts unchanged, in the row and in the history.
	if _, err := settling.Settle(t.Context(), pool, "w1", []settling.Outcome{{ID: id, Token: l.Token, Verdict: settling.Release}}); err != nil {
		t.Fatal(err)
	}
	if r := read(t, pool, id); r.Attempt != 3 || r.Status != run.Pending {
		t.Errorf("row: %+v", r)
	}
	attempts := query[string](t, pool, "SELECT string_agg(e.event_type || ' ' || e.attempt, ', ' ORDER BY e.id) FROM workflow_event e WHERE event_type NOT IN ('created', 'started')")
	if want := "edited 3, leased 3, released 3"; attempts != want {
		t.Errorf("history %q, want %q", attempts, want)
	}
}

// The type's time limit sets the run's deadline_at, and caps the lease.
func TestDeadline(t *testing.T) {
	pool := pgtest.New(t)
	for _, c := range []struct {
		length, timeout time.Duration
		until           time.Duration
	}{
		{time.Minute, 0, time.Minute},
		{time.Minute, time.Hour, time.Minute},
		{time.Minute, time.Second, time.Second},
		{time.Millisecond, time.Second, time.Millisecond},
	} {
		id := add(t, pool, "a.x", 0, time.Minute)
		p := newPoller(pool, "a.")
		p.Terms = func(string) leasing.Terms { return leasing.Terms{Length: c.length, Timeout: c.timeout, Room: -1} }
		l, r := one(t, p), read(t, pool, id)
		if got := r.LeaseUntil.Sub(*r.StartedAt); got != c.until || l.Timeout != c.timeout || l.Length != c.length {
			t.Errorf("%v within %v: leased for %v, want %v", c.length, c.timeout, got, c.until)
		}
		if (r.DeadlineAt == nil) != (c.timeout == 0) || r.DeadlineAt != nil && r.DeadlineAt.Sub(*r.StartedAt) != c.timeout {
			t.Errorf("%v within %v: deadline %v", c.length, c.timeout, r.DeadlineAt)
		}
	}
}

// Runs of several types that one poll leases get the terms of their own type.
func TestTerms(t *testing.T) {
	pool := pgtest.New(t)
	lengths := map[string]time.Duration{"a.x": time.Minute, "a.y": time.Hour}
	for typ := range lengths {
		add(t, pool, typ, 0, time.Minute)
		add(t, pool, typ, 5, time.Minute)
	}
	p := newPoller(pool, "a.")
	p.Terms = func(typ string) leasing.Terms { return leasing.Terms{Length: lengths[typ], Room: -1} }
	for _, l := range acquire(t, p, 10) {
		r := read(t, pool, l.ID)
		if got := r.LeaseUntil.Sub(*r.StartedAt); got != lengths[l.Type] || l.Length != lengths[l.Type] {
			t.Errorf("%s is leased for %v, says %v", l.Type, got, l.Length)
		}
	}
}

// A lease has its full length even in a transaction that began long ago.
func TestOldTransaction(t *testing.T) {
	pool := pgtest.New(t)
	add(t, pool, "a.x", 0, time.Minute)
	tx := begin(t, pool)
	exec(t, tx, "SELECT pg_sleep(0.3)")
	p := newPoller(tx, "a.")
	p.Terms = func(string) leasing.Terms { return leasing.Terms{Length: 300 * time.Millisecond, Room: -1} }
	one(t, p)
	if left := query[time.Duration](t, tx, "SELECT lease_until - now() FROM workflow_run"); left < 600*time.Millisecond {
		t.Errorf("the lease ends %v after the transaction began, which is 300 ms old", left)
	}
}
