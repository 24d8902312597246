package leasing_test

import (
	"errors"
	"testing"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/simple-workflow/simple-workflow/internal/leasing"
	"github.com/simple-workflow/simple-workflow/internal/pgtest"
	"github.com/simple-workflow/simple-workflow/internal/settling"
	"github.com/simple-workflow/simple-workflow/run"
)

// expired returns a lease that has just expired.
func expired(t *testing.T, attempts int) (*pgxpool.Pool, leasing.Lease) {
	t.Helper()
	pool := settledServer(t)
	id := add(t, pool, "a.x", 0, time.Minute)
	exec(t, pool, "UPDATE workflow_run SET max_attempts = $2 WHERE id = $1", id, attempts)
	l := one(t, newPoller(pool, "a."))
	expire(t, pool, id)
	return pool, l
}

// A heartbeat that comes before the reclaimer saves the lease, even before its transaction has committed.
func TestHeartbeatThenReclaim(t *testing.T) {
	pool, l := expired(t, 3)
	tx := begin(t, pool)
	if kept, _ := extend(t, tx, held([]leasing.Lease{l}, time.Minute)); len(kept) != 1 {
		t.Fatalf("kept %v", kept)
	}
	r := newReclaimer(pool)
	for range 2 {
		r.LookBack()
		if again, exhausted := reclaim(t, r, 10); again+len(exhausted) > 0 {
			t.Errorf("%d again, %v exhausted", again, exhausted)
		}
		if tx != nil {
			commit(t, tx)
			tx = nil
		}
	}
	settle(t, pool, l)
}

// A reclaimer that comes before the heartbeat gets the run. Before it commits, the heartbeat reports nothing about the
// lease. Afterwards it reports that the lease is lost.
func TestReclaimThenHeartbeat(t *testing.T) {
	for _, attempts := range []int{1, 3} {
		pool, l := expired(t, attempts)
		tx := begin(t, pool)
		if again, exhausted := reclaim(t, newReclaimer(tx), 10); again+len(exhausted) != 1 {
			t.Fatalf("%d again, %v exhausted", again, exhausted)
		}
		if kept, gone := extend(t, pool, held([]leasing.Lease{l}, time.Minute)); len(kept)+len(gone) > 0 {
			t.Errorf("during: kept %v, gone %v", kept, gone)
		}
		commit(t, tx)
		if kept, gone := extend(t, pool, held([]leasing.Lease{l}, time.Minute)); len(kept) > 0 || !errors.Is(gone[l.ID], run.ErrLost) {
			t.Errorf("after: kept %v, gone %v", kept, gone)
		}
	}
}

// A settle that comes before the reclaimer is recorded, although the lease has expired.
func TestSettleThenReclaim(t *testing.T) {
	pool, l := expired(t, 1)
	tx := begin(t, pool)
	settle(t, tx, l)
	r := newReclaimer(pool)
	if again, exhausted := reclaim(t, r, 10); again+len(exhausted) > 0 {
		t.Errorf("during: %d again, %v exhausted", again, exhausted)
	}
	commit(t, tx)
	r.LookBack()
	if again, exhausted := reclaim(t, r, 10); again+len(exhausted) > 0 || !r.Idle() {
		t.Errorf("after: %d again, %v exhausted", again, exhausted)
	}
	if got := read(t, pool, l.ID); got.Status != run.Succeeded {
		t.Errorf("status %s", got.Status)
	}
}

// A settle that waits for the reclaimer's lock finds the lease lost and changes nothing.
func TestReclaimThenSettle(t *testing.T) {
	for _, attempts := range []int{1, 3} {
		pool, l := expired(t, attempts)
		tx := begin(t, pool)
		if again, exhausted := reclaim(t, newReclaimer(tx), 10); again+len(exhausted) != 1 {
			t.Fatalf("%d again, %v exhausted", again, exhausted)
		}
		refused := make(chan int)
		go func() {
			list, err := settling.Settle(t.Context(), pool, "w1", []settling.Outcome{{ID: l.ID, Token: l.Token, Verdict: settling.Succeed}})
			if err != nil {
				t.Error(err)
			}
			refused <- len(list)
		}()
		pgtest.Blocked(t, pool, 1)
		commit(t, tx)
		if n := <-refused; n != 1 {
			t.Errorf("refused %d, want 1", n)
		}
		if got := read(t, pool, l.ID); got.Status.Finished() || got.Attempt != 1 {
			t.Errorf("row: %+v", got)
		}
	}
}

// A run that is cancelled while the reclaimer looks for expired leases is not made due again.
func TestCancelThenReclaim(t *testing.T) {
	pool, l := expired(t, 3)
	tx := begin(t, pool)
	exec(t, tx, "SELECT workflow_cancel($1)", l.ID)
	r := newReclaimer(pool)
	if again, _ := reclaim(t, r, 10); again > 0 {
		t.Errorf("during: %d again", again)
	}
	commit(t, tx)
	r.LookBack()
	if again, _ := reclaim(t, r, 10); again > 0 || read(t, pool, l.ID).Status != run.Cancelled {
		t.Errorf("after: %d again", again)
	}
}
