package leasing_test

import (
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/google/uuid"

	"github.com/simple-workflow/simple-workflow/internal/leasing"
	"github.com/simple-workflow/simple-workflow/internal/pgtest"
	"github.com/simple-workflow/simple-workflow/run"
)

// Prefixes are literal: an underscore is no wildcard, and types that only sort near a prefix are not leased. A
// run under two prefixes is leased once.
func TestPrefixes(t *testing.T) {
	all := []string{"billing.a", "billing.invoice.b", "billing.invoices.c", "billing-x.d", "billing_x.e", "billingx.f",
		"bill.g", "team_a.h", "teamxa.i", "team-a.j", "zz.k"}
	for _, c := range []struct {
		name     string
		prefixes []string
		want     []string
	}{
		{"underscore is no wildcard", []string{"team_a."}, []string{"team_a.h"}},
		{"neighbours", []string{"billing."}, []string{"billing.a", "billing.invoice.b", "billing.invoices.c"}},
		{"sub-prefix", []string{"billing.invoice."}, []string{"billing.invoice.b"}},
		{"overlap", []string{"billing.", "billing.invoice.", "billing."}, []string{"billing.a", "billing.invoice.b", "billing.invoices.c"}},
		{"several", []string{"zz.", "bill."}, []string{"bill.g", "zz.k"}},
		{"none there", []string{"nobody."}, nil},
	} {
		t.Run(c.name, func(t *testing.T) {
			pool := pgtest.New(t)
			for _, typ := range all {
				add(t, pool, typ, 0, time.Minute)
			}
			p := newPoller(pool, c.prefixes...)
			got := types(acquire(t, p, 100))
			slices.Sort(got)
			if !slices.Equal(got, c.want) {
				t.Errorf("leased %v, want %v", got, c.want)
			}
			p.Discover()
			if again := acquire(t, p, 100); len(again) > 0 {
				t.Errorf("and then %v", types(again))
			}
		})
	}
}

// Each poll leases runs of the highest priorities, of all types, and within a priority those that
// became due first.
func TestOrder(t *testing.T) {
	pool := pgtest.New(t)
	for i, typ := range []string{"a.x", "a.y", "a.z"} {
		for priority := -2; priority <= 2; priority++ {
			for k := range 2 {
				add(t, pool, typ, priority, time.Duration(10+k*10+i)*time.Minute)
			}
		}
	}
	p := newPoller(pool, "a.")
	var got []string
	for range 10 {
		part := acquire(t, p, 3)
		got = append(got, names(part)...)
		for i := 1; i < len(part); i++ {
			a, b := read(t, pool, part[i-1].ID), read(t, pool, part[i].ID)
			if a.Priority == b.Priority && a.RunAt.After(b.RunAt) {
				t.Errorf("%s (due %v) came before %s (due %v)", a.Type, a.RunAt, b.Type, b.RunAt)
			}
		}
	}
	want := []string{}
	for _, priority := range []string{" 2", " 1", " 0", " -1", " -2"} {
		for _, typ := range []string{"a.z", "a.y", "a.x"} { // oldest due run first
			want = append(want, typ+priority, typ+priority)
		}
	}
	// Two lanes may share a poll of three, which is in order of due time: compare as sets of six.
	for i := 0; i+6 <= len(want); i += 6 {
		a, b := slices.Sorted(slices.Values(got[i:i+6])), slices.Sorted(slices.Values(want[i:i+6]))
		if !slices.Equal(a, b) {
			t.Errorf("runs %d to %d: %v, want %v", i, i+6, a, b)
		}
	}
	if first := got[0]; first != "a.z 2" {
		t.Errorf("first is %s, want the oldest of the highest priority", first)
	}
}

// A type with a long queue does not starve another type of the same priority: the lane with the
// oldest due run is served first.
func TestNoStarvation(t *testing.T) {
	pool := pgtest.New(t)
	addMany(t, pool, 300, "a.long", 0) // due over 300 ms, an hour ago
	exec(t, pool, `
		INSERT INTO workflow_run (type, run_at)
		SELECT 'a.short', min(run_at) + interval '100 ms' FROM workflow_run`)
	p := newPoller(pool, "a.")
	for before := 0; ; {
		for _, l := range acquire(t, p, 20) {
			if l.Type == "a.short" {
				if before < 90 || before > 140 {
					t.Errorf("%d runs were leased before one that 100 others preceded", before)
				}
				return
			}
			before++
		}
		if before > 300 {
			t.Fatal("the other type was never served")
		}
	}
}

// Runs that are scheduled for later, held, deleted, leased or finished are never leased. Neither are
// runs of other prefixes, nor steps of processes by a worker that does not execute processes.
func TestNotOpen(t *testing.T) {
	pool := pgtest.New(t)
	for name, sql := range map[string]string{
		"future":    "run_at = now() + interval '1 second'",
		"held":      "held_at = now()",
		"deleted":   "deleted_at = now()",
		"cancelled": "status = 'cancelled'",
		"leased": `status = 'leased', lease_no = 1, attempt = 1, lease_token = gen_random_uuid(),
			lease_until = now() - interval '1 hour', leased_by = 'w0', started_at = now() - interval '1 hour'`,
		"step": "token_id = gen_random_uuid()",
	} {
		id := add(t, pool, "a."+name, 50, time.Hour)
		pgtest.ByHand(t, pool, "UPDATE workflow_run SET "+sql+" WHERE id = $1", id)
	}
	for _, status := range []run.Status{run.Succeeded, run.Failed} {
		id := add(t, pool, "a."+string(status), 50, time.Hour)
		exec(t, pool, `UPDATE workflow_run SET status = 'leased', lease_no = 1, lease_token = gen_random_uuid(),
			lease_until = now(), leased_by = 'w0' WHERE id = $1`, id)
		exec(t, pool, "UPDATE workflow_run SET status = $2 WHERE id = $1", id, status)
	}
	add(t, pool, "b.foreign", 50, time.Hour)
	add(t, pool, "a.good", -50, time.Minute)

	p := newPoller(pool, "a.")
	if got := types(acquire(t, p, 100)); !slices.Equal(got, []string{"a.good"}) {
		t.Errorf("leased %v, want a.good", got)
	}
	for range 3 { // the same without discovery and with it
		p.DontDiscover()
		got := acquire(t, p, 100)
		p.Discover()
		if got = append(got, acquire(t, p, 100)...); len(got) > 0 {
			t.Errorf("leased %v", types(got))
		}
	}
	p.Steps = true
	p.Discover()
	if got := types(acquire(t, p, 100)); !slices.Equal(got, []string{"a.step"}) {
		t.Errorf("with steps: leased %v, want a.step", got)
	}
}

// If a run is scheduled, Acquire returns the time until it is due as wait. Then the run is leased.
func TestScheduled(t *testing.T) {
	pool := pgtest.New(t)
	p := newPoller(pool, "a.")
	if leases, wait, err := p.Acquire(t.Context(), 10, 1); len(leases) > 0 || wait != leasing.Never || err != nil {
		t.Errorf("empty table: %v, %v, %v", leases, wait, err)
	}
	add(t, pool, "a.x", 0, -time.Minute)
	p.Discover()
	_, wait, err := p.Acquire(t.Context(), 10, 1)
	if wait < 50*time.Second || wait > time.Minute || err != nil {
		t.Errorf("wait = %v, %v, want almost a minute", wait, err)
	}
	pgtest.Elapse(t, pool, time.Minute)
	one(t, p)
}

// Runs of a type that has a grace are not leased before they have been due for that long, so that other
// workers can lease them.
func TestGrace(t *testing.T) {
	pool := pgtest.New(t)
	add(t, pool, "a.unknown", 9, 0)
	add(t, pool, "a.known", 0, 0)
	p := newPoller(pool, "a.")
	p.Terms = func(typ string) leasing.Terms {
		terms := unlimited(typ)
		if typ == "a.unknown" {
			terms.Grace = time.Minute
		}
		return terms
	}
	if l := one(t, p); l.Type != "a.known" {
		t.Errorf("leased %s", l.Type)
	}
	p.DontDiscover()
	if got := acquire(t, p, 10); len(got) > 0 {
		t.Errorf("leased %v within its grace", types(got))
	}
	p.Discover()
	if _, wait, _ := p.Acquire(t.Context(), 10, 1); wait < 50*time.Second || wait > time.Minute {
		t.Errorf("wait = %v, want almost a minute", wait)
	}
	pgtest.Elapse(t, pool, time.Minute)
	if l := one(t, p); l.Type != "a.unknown" {
		t.Errorf("leased %s", l.Type)
	}
}

// When many pollers lease thousands of runs at the same time, each run is leased exactly once.
func TestExactlyOnce(t *testing.T) {
	pool := pgtest.New(t)
	const each = 1000
	for _, typ := range []string{"a.x", "a.y", "b.z"} {
		for priority := range 2 {
			addMany(t, pool, each, typ, priority)
		}
	}
	var mu sync.Mutex
	taken := map[uuid.UUID]uuid.UUID{}
	var group sync.WaitGroup
	for range 4 {
		group.Go(func() {
			p := newPoller(pool, "a.", "b.")
			for {
				leases, wait, err := p.Acquire(t.Context(), 40, 1)
				if err != nil {
					t.Error(err)
					return
				}
				mu.Lock()
				for _, l := range leases {
					if _, twice := taken[l.ID]; twice {
						t.Errorf("run %s was leased twice", l.ID)
					}
					taken[l.ID] = l.Token
				}
				done := len(taken) == 6*each
				mu.Unlock()
				if done || len(leases) == 0 && wait == leasing.Never {
					return
				}
			}
		})
	}
	group.Wait()
	if len(taken) != 6*each {
		t.Errorf("%d runs were leased, want %d", len(taken), 6*each)
	}
	wrong := query[int](t, pool, "SELECT count(*) FROM workflow_run WHERE NOT (status = 'leased' AND attempt = 1 AND lease_no = 1)")
	events := query[int](t, pool, "SELECT count(*) FROM workflow_event WHERE event_type = 'leased'")
	if wrong != 0 || events != 6*each {
		t.Errorf("%d rows are not leased once, %d events", wrong, events)
	}
}
