package leasing_test

import (
	"errors"
	"slices"
	"testing"
	"time"

	"github.com/google/uuid"

	"github.com/simple-workflow/simple-workflow/internal/leasing"
	"github.com/simple-workflow/simple-workflow/internal/pgtest"
	"github.com/simple-workflow/simple-workflow/run"
)

func held(leases []leasing.Lease, length time.Duration) (list []leasing.Held) {
	for _, l := range leases {
		list = append(list, leasing.Held{ID: l.ID, Token: l.Token, Length: length})
	}
	return list
}

func extend(t *testing.T, db run.DB, list []leasing.Held) ([]uuid.UUID, map[uuid.UUID]error) {
	t.Helper()
	kept, gone, err := leasing.Extend(t.Context(), db, list)
	if err != nil {
		t.Fatal(err)
	}
	return kept, gone
}

// left returns how long the run's lease still lasts.
func left(t *testing.T, db run.DB, id uuid.UUID) time.Duration {
	t.Helper()
	return query[time.Duration](t, db, "SELECT lease_until - clock_timestamp() FROM workflow_run WHERE id = $1", id)
}

func near(got, want time.Duration) bool { return got <= want && got > want-5*time.Second }

// One call extends many leases, each to its own length from now, but not beyond the run's
// deadline. An empty call does nothing.
func TestExtend(t *testing.T) {
	pool := pgtest.New(t)
	addMany(t, pool, 20, "a.x", 0)
	p := newPoller(pool, "a.")
	p.Terms = func(string) leasing.Terms { return leasing.Terms{Length: time.Minute, Timeout: time.Hour, Room: -1} }
	list := held(acquire(t, p, 20), 0)
	for i := range list {
		list[i].Length = time.Duration(i) * 10 * time.Minute
	}
	kept, gone := extend(t, pool, list)
	if len(kept) != 20 || len(gone) != 0 {
		t.Errorf("kept %d, gone %v", len(kept), gone)
	}
	for _, h := range list {
		if got, want := left(t, pool, h.ID), min(h.Length, time.Hour); !near(got, want) {
			t.Errorf("asked for %v: %v left, want %v", h.Length, got, want)
		}
	}
	if kept, gone := extend(t, pool, nil); len(kept)+len(gone) > 0 {
		t.Errorf("of nothing kept %v, gone %v", kept, gone)
	}
}

// The lease of an exhausted run can be extended, although its deadline_at is when it was leased.
func TestExtendExhausted(t *testing.T) {
	pool := pgtest.New(t)
	id := add(t, pool, "a.x", 0, time.Minute)
	byHand(t, pool, "UPDATE workflow_run SET attempt = 3 WHERE id = $1", id)
	l := one(t, newPoller(pool, "a."))
	extend(t, pool, held([]leasing.Lease{l}, time.Hour))
	if got := left(t, pool, id); !near(got, time.Hour) {
		t.Errorf("%v left, want an hour", got)
	}
}

// A lease is fenced by its token, not by the worker's name: after a restart under the same
// name, the old process's heartbeats do not extend the new one's lease.
func TestExtendFenced(t *testing.T) {
	pool := pgtest.New(t)
	id := add(t, pool, "a.x", 0, time.Minute)
	p := newPoller(pool, "a.")
	old := one(t, p)
	exec(t, pool, "UPDATE workflow_run SET status = 'pending' WHERE id = $1", id)
	now := one(t, p)
	before := left(t, pool, id)
	kept, gone := extend(t, pool, held([]leasing.Lease{old}, time.Hour))
	if len(kept) > 0 || !errors.Is(gone[id], run.ErrLost) {
		t.Errorf("kept %v, gone %v, want lost", kept, gone)
	}
	if after := left(t, pool, id); after > before {
		t.Errorf("the lease has grown from %v to %v", before, after)
	}
	if kept, _ := extend(t, pool, held([]leasing.Lease{now}, time.Hour)); !slices.Equal(kept, []uuid.UUID{id}) {
		t.Errorf("the new owner kept %v", kept)
	}
}

// A heartbeat reports which leases are gone and why, and extends the others.
func TestExtendGone(t *testing.T) {
	pool := pgtest.New(t)
	for _, c := range []struct {
		name, sql string
		want      error
	}{
		{"cancelled", "SELECT workflow_cancel($1)", run.ErrCancelled},
		{"soft-deleted", "SELECT workflow_delete($1, 'test')", run.ErrCancelled},
		{"put back", "UPDATE workflow_run SET status = 'pending' WHERE id = $1", run.ErrLost},
		{"succeeded", "UPDATE workflow_run SET status = 'succeeded' WHERE id = $1", run.ErrLost},
		{"removed", "WITH c AS (SELECT workflow_cancel($1)) SELECT FROM c", run.ErrLost},
		{"kept", "SELECT $1::uuid", nil},
	} {
		id := add(t, pool, "a.x", 0, time.Minute)
		other := add(t, pool, "a.x", 0, time.Minute)
		leases := acquire(t, newPoller(pool, "a."), 10)
		exec(t, pool, c.sql, id)
		if c.name == "removed" {
			pgtest.ByHand(t, pool, "DELETE FROM workflow_run WHERE id = $1", id)
		}
		kept, gone := extend(t, pool, held(leases, time.Hour))
		if !slices.Contains(kept, other) || slices.Contains(kept, id) != (c.want == nil) {
			t.Errorf("%s: kept %v", c.name, kept)
		}
		if !errors.Is(gone[id], c.want) || gone[other] != nil {
			t.Errorf("%s: gone %v, want %v", c.name, gone, c.want)
		}
	}
}

// A row that another session has locked is left out. The others are extended without waiting.
func TestExtendLocked(t *testing.T) {
	pool := pgtest.New(t)
	addMany(t, pool, 5, "a.x", 0)
	leases := acquire(t, newPoller(pool, "a."), 5)
	holder := begin(t, pool)
	exec(t, holder, "SELECT FROM workflow_run WHERE id = $1 FOR UPDATE", leases[2].ID)
	kept, gone := extend(t, pool, held(leases, time.Hour)) // would wait for ever for the lock
	if len(kept) != 4 || slices.Contains(kept, leases[2].ID) || len(gone) != 0 {
		t.Errorf("kept %v, gone %v", kept, gone)
	}
}

// A heartbeat in a transaction that began long ago extends a lease by its full length.
func TestExtendInTransaction(t *testing.T) {
	pool := pgtest.New(t)
	id := add(t, pool, "a.x", 0, time.Minute)
	l := one(t, newPoller(pool, "a."))
	tx := begin(t, pool)
	exec(t, tx, "SELECT pg_sleep(0.3)")
	extend(t, tx, held([]leasing.Lease{l}, 300*time.Millisecond))
	total := query[time.Duration](t, tx, "SELECT lease_until - now() FROM workflow_run WHERE id = $1", id)
	if total < 600*time.Millisecond {
		t.Errorf("the lease ends %v after the transaction began, which is 300 ms old", total)
	}
}

// Heartbeats change no index: at least 90 % of their updates are heap-only (HOT).
func TestExtendHot(t *testing.T) {
	pool := pgtest.New(t)
	addMany(t, pool, 200, "a.x", 0)
	list := held(acquire(t, newPoller(pool, "a."), 200), time.Hour)
	const beats = 20
	for range beats {
		extend(t, pool, list)
	}
	tx := begin(t, pool)
	extend(t, tx, list)
	hot := query[float64](t, tx, `
		SELECT n_tup_hot_upd::float8 / n_tup_upd FROM pg_stat_xact_user_tables WHERE relname = 'workflow_run'`)
	if hot < 0.9 {
		t.Errorf("%.0f %% of the updates stay on their page, want at least 90", 100*hot)
	}
}
