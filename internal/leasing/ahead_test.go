package leasing_test

import (
	"context"
	"fmt"
	"math"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/uuid"

	"github.com/simple-workflow/simple-workflow/internal/leasing"
	"github.com/simple-workflow/simple-workflow/internal/pgtest"
	"github.com/simple-workflow/simple-workflow/run"
)

// quick returns terms with which every type may be leased ahead.
func quick(string) leasing.Terms { return leasing.Terms{Length: time.Minute, Room: -1, Quick: true} }

// ahead returns a Poller that leases up to n runs ahead, in groups.
func ahead(db run.DB, n, group int, prefixes ...string) *leasing.Poller {
	p := newPoller(db, prefixes...)
	p.Terms, p.Ahead = quick, leasing.Ahead{Runs: n, Bytes: 1 << 20, Group: group}
	return p
}

// mayBegin asks whether the groups of some leases may begin, naming the first of each, and returns the tokens of those that may.
func mayBegin(t *testing.T, db run.DB, leases ...leasing.Lease) map[uuid.UUID]bool {
	t.Helper()
	var tokens, runs []uuid.UUID
	for _, l := range leases {
		if !slices.Contains(tokens, l.Token) {
			tokens, runs = append(tokens, l.Token), append(runs, l.ID)
		}
	}
	begun, err := leasing.Begin(t.Context(), db, tokens, runs)
	if err != nil {
		t.Fatal(err)
	}
	return begun
}

// tokens describes the leases by their tokens: a number for each token, with a star if it is that of a lease ahead.
func tokens(leases []leasing.Lease) string {
	var seen []uuid.UUID
	var list []string
	for i := range leases {
		l := &leases[i]
		if !slices.Contains(seen, l.Token) {
			seen = append(seen, l.Token)
		}
		list = append(list, fmt.Sprint(slices.Index(seen, l.Token), map[bool]string{true: "*"}[l.Ahead()]))
	}
	return strings.Join(list, " ")
}

// The first runs, as many as there are slots, are leased to begin at once. Further ones are leased ahead, in groups with a token
// of their own, by priority.
func TestLeaseAhead(t *testing.T) {
	pool := pgtest.New(t)
	addMany(t, pool, 4, "a.low", 0)
	addMany(t, pool, 5, "a.high", 5)
	p := ahead(pool, 5, 2, "a.")
	leases := acquire(t, p, 2)
	if got, want := tokens(leases), "0 0 1* 1* 2* 2* 3*"; got != want {
		t.Errorf("tokens %s, want %s", got, want)
	}
	if got := types(leases); !slices.Equal(got[:5], []string{"a.high", "a.high", "a.high", "a.high", "a.high"}) {
		t.Errorf("leased %v, want those of higher priority first", got)
	}
	if n := query[int](t, pool, `SELECT count(*)::int FROM workflow_run WHERE status = 'leased' AND attempt = 1 AND lease_no = 1 AND leased_by = 'w1' AND lease_until > now()`); n != 7 {
		t.Errorf("%d rows are leased and charged, want 7", n)
	}
	p.Ahead = leasing.Ahead{}
	if got, want := tokens(acquire(t, p, 2)), "0 0"; got != want {
		t.Errorf("without leasing ahead: tokens %s, want %s", got, want)
	}
}

// Only runs of quick types are leased ahead. Others, and suspects, are leased only if there is a slot, and first if they are
// due first. Due reports that they are due.
func TestOnlyQuickTypesAhead(t *testing.T) {
	pool := pgtest.New(t)
	add(t, pool, "a.slow", 0, 3*time.Hour)
	add(t, pool, "a.limited", 0, 3*time.Hour)
	add(t, pool, "a.suspect", 0, 3*time.Hour)
	byHand(t, pool, `UPDATE workflow_run SET suspect = true WHERE type = 'a.suspect'`)
	addMany(t, pool, 9, "a.quick", 0)
	p := ahead(pool, 4, 2, "a.")
	p.Terms = func(typ string) leasing.Terms {
		terms := quick(typ)
		terms.Quick = typ != "a.slow" && typ != "a.later"
		if typ == "a.limited" {
			terms.Room, terms.Group = 1, typ
		}
		return terms
	}
	leases := acquire(t, p, 0)
	if got, want := tokens(leases), "0* 0* 1* 1*"; got != want || slices.ContainsFunc(leases, func(l leasing.Lease) bool { return l.Type != "a.quick" }) {
		t.Errorf("without a slot: leased %v with tokens %s, want four quick ones with %s", types(leases), got, want)
	}
	if due := p.Due(); !due.Ahead || !due.Others || !due.Mixed {
		t.Errorf("it does not know that both kinds are due: %+v", due)
	}
	p.Discover()
	leases = acquire(t, p, 4)
	got := types(leases)
	slices.Sort(got)
	if want := []string{"a.limited", "a.quick", "a.quick", "a.quick", "a.quick", "a.quick", "a.slow", "a.suspect"}; !slices.Equal(got, want) {
		t.Errorf("with four slots: leased %v, want %v", got, want)
	}
	for _, l := range leases {
		if l.Ahead() && l.Type != "a.quick" {
			t.Errorf("%s is leased ahead", l.Type)
		}
	}
	p.Discover()
	acquire(t, p, 0)
	if due := p.Due(); due.Ahead || due.Others || !due.Mixed {
		t.Errorf("runs count as due though none is, or it has forgotten that others were: %+v", due)
	}
	for also, mixed := range map[string]bool{"a.quick": false, "a.later": false, "a.slow": true, "a.limited": true, "a.suspect": true, "a.open": true} {
		byHand(t, pool, `DELETE FROM workflow_run`)
		add(t, pool, "a.quick", 0, 3*time.Hour)
		add(t, pool, also, 0, 3*time.Hour)
		byHand(t, pool, `UPDATE workflow_run SET suspect = type = 'a.suspect', run_at = run_at + CASE WHEN type = 'a.later' THEN interval '1 day' ELSE '0' END`)
		q := ahead(pool, 4, 2, "a.")
		q.Terms, q.Open = p.Terms, func(typ string) bool { return typ == "a.open" }
		acquire(t, q, 0)
		if due := q.Due(); due.Mixed != mixed {
			t.Errorf("with a run of %s: mixed %v", also, due.Mixed)
		}
	}
}

// While runs that were leased ahead wait, no further ones of quick types are leased to begin at once, and others are. A poll that finds
// nothing reports that nothing more is due.
func TestBehind(t *testing.T) {
	pool := pgtest.New(t)
	add(t, pool, "a.slow", 0, time.Minute)
	addMany(t, pool, 6, "a.quick", 0)
	p := ahead(pool, 4, 2, "a.")
	p.Terms = func(typ string) leasing.Terms {
		terms := quick(typ)
		terms.Quick = typ != "a.slow"
		return terms
	}
	p.Ahead.Behind = true
	leases := acquire(t, p, 3)
	got := types(leases)
	slices.Sort(got)
	if want := []string{"a.quick", "a.quick", "a.quick", "a.quick", "a.slow"}; !slices.Equal(got, want) {
		t.Errorf("leased %v, want %v", got, want)
	}
	for _, l := range leases {
		if l.Ahead() == (l.Type == "a.slow") {
			t.Errorf("%s is leased ahead: %v", l.Type, l.Ahead())
		}
	}
	p.Ahead.Runs = 0
	if leases := acquire(t, p, 3); len(leases) != 0 {
		t.Errorf("leased %v, which pass those that wait", types(leases))
	}
	p.Ahead.Runs = 4
	acquire(t, p, 0)
	if leases, wait, err := p.Acquire(t.Context(), 0, 0); len(leases) != 0 || wait == 0 || err != nil {
		t.Errorf("nothing is due: leased %d, next poll in %s, %v", len(leases), wait, err)
	}
}

// If only the statement that leases ahead fails, the other leases are returned, and the next poll returns the error.
func TestOwedError(t *testing.T) {
	pool := pgtest.New(t)
	addMany(t, pool, 4, "a.slow", 0)
	add(t, pool, "a.quick", 0, time.Minute)
	p := ahead(pool, 4, 2, "a.")
	p.Terms = func(typ string) leasing.Terms {
		terms := quick(typ)
		terms.Quick = typ != "a.slow"
		return terms
	}
	p.Ahead.Behind = true
	exec(t, pool, `ALTER FUNCTION workflow_lease_ahead_v1 RENAME TO lease_ahead_no_more`)
	if leases := acquire(t, p, 2); len(leases) != 2 {
		t.Errorf("leased %v, want two slow ones", types(leases))
	}
	if leases, _, err := p.Acquire(t.Context(), 1, 1); err == nil || len(leases) != 0 || !strings.Contains(err.Error(), "workflow_lease_ahead_v1") {
		t.Errorf("leased %d, %v; want the error of the statement before", len(leases), err)
	}
	if leases := acquire(t, p, 2); len(leases) != 2 {
		t.Errorf("after that: leased %v, want two slow ones", types(leases))
	}
}

// The payloads of runs that are leased ahead are bounded together. Those that begin at once are not.
func TestBytesAhead(t *testing.T) {
	pool := pgtest.New(t)
	exec(t, pool, `INSERT INTO workflow_run (type, payload, run_at) SELECT 'a.x', jsonb_build_object('x', array_to_string(ARRAY(SELECT md5(g::text || n) FROM generate_series(1, 50) AS n), '')), now() - interval '1 minute' FROM generate_series(1, 10) AS g`)
	p := ahead(pool, 8, 2, "a.")
	p.Ahead.Bytes = 7_000
	if n := len(acquire(t, p, 0)); n != 4 {
		t.Errorf("leased %d payloads of 1.6 kB, want the 4 that fit into 7 kB", n)
	}
	p.Ahead.Bytes = 1
	if got := tokens(acquire(t, p, 3)); got != "0 0 0" {
		t.Errorf("leased %s, want three that begin at once", got)
	}
}

// A lease ahead that expires without a mark costs nothing: the attempt is given back, the run is no suspect, and it is due at once, at
// its old place. A marked one is charged, and fails at its last attempt. Who was too late with the mark is told so.
func TestTakeBackOfLeasesAhead(t *testing.T) {
	for _, most := range []int{1, 3} {
		pool := settledServer(t)
		addMany(t, pool, 6, "a.x", 0)
		exec(t, pool, `UPDATE workflow_run SET max_attempts = $1`, most)
		before := query[[]time.Time](t, pool, `SELECT array_agg(run_at ORDER BY id) FROM workflow_run`)
		leases := acquire(t, ahead(pool, 4, 2, "a."), 2)
		direct, marked, unmarked := leases[:2], leases[2:4], leases[4:]
		if begun := mayBegin(t, pool, marked...); !begun[marked[0].Token] {
			t.Fatalf("the group may not begin: %v", begun)
		}
		expire(t, pool, column(leases)...)
		again, exhausted := reclaim(t, newReclaimer(pool), 10)
		if most == 1 && (again != 2 || len(exhausted) != 4) || most == 3 && (again != 6 || len(exhausted) != 0) {
			t.Errorf("of %d attempts: %d due again, %d exhausted", most, again, len(exhausted))
		}
		for _, l := range unmarked {
			r := read(t, pool, l.ID)
			if suspect := query[bool](t, pool, `SELECT suspect FROM workflow_run WHERE id = $1`, l.ID); r.Status != run.Pending || r.Attempt != 0 || suspect || r.LastError != nil || !slices.Contains(before, r.RunAt) {
				t.Errorf("of %d attempts, not begun: %+v, suspect %v", most, r, suspect)
			}
			if got := query[string](t, pool, `SELECT string_agg(concat_ws(' ', event_type, attempt, leased_by, data->>'reason'), ', ') FROM workflow_history WHERE workflow_id = $1`, l.ID); got != "released 1 w1 its worker has shown no sign of life, and had not begun it" {
				t.Errorf("history %q", got)
			}
		}
		for _, l := range slices.Concat(direct, marked) {
			if suspect := query[bool](t, pool, `SELECT suspect AND attempt = 1 FROM workflow_run WHERE id = $1`, l.ID); !suspect {
				t.Errorf("of %d attempts, begun: it is not charged as a suspect", most)
			}
		}
		if begun := mayBegin(t, pool, unmarked...); len(begun) != 0 {
			t.Error("a group that was taken back may begin")
		}
	}
}

// A mark may be sent again after a lost answer. It is refused if the named run is under another lease, also once the mark of the take-back is
// removed: a worker that was frozen must not begin what others have.
func TestBegin(t *testing.T) {
	pool := settledServer(t)
	addMany(t, pool, 4, "a.x", 0)
	p := ahead(pool, 4, 2, "a.")
	leases := acquire(t, p, 0)
	first, second := leases[:2], leases[2:]
	for range 2 {
		if begun := mayBegin(t, pool, first...); !begun[first[0].Token] || len(begun) != 1 {
			t.Errorf("may begin: %v", begun)
		}
	}
	expire(t, pool, column(second)...)
	reclaim(t, newReclaimer(pool), 10)
	forget := func() {
		byHand(t, pool, `UPDATE workflow_begun SET at = at - interval '2 minutes'`)
		if err := leasing.ForgetBegun(t.Context(), pool); err != nil {
			t.Fatal(err)
		}
	}
	if forget(); query[int](t, pool, `SELECT count(*)::int FROM workflow_begun`) != 1 {
		t.Error("the mark of a lease that is held is removed, or one that nobody needs is kept")
	}
	if begun := mayBegin(t, pool, second...); len(begun) != 0 {
		t.Error("a group may begin although its leases were taken back")
	}
	expire(t, pool, column(first)...)
	reclaim(t, newReclaimer(pool), 10)
	if n := query[int](t, pool, `SELECT count(*)::int FROM workflow_run WHERE attempt = 1 AND suspect`); n != 2 {
		t.Errorf("%d runs are charged, want the two that could begin", n)
	}
	if forget(); query[int](t, pool, `SELECT count(*)::int FROM workflow_begun`) != 0 {
		t.Error("marks are kept that nobody needs")
	}
}

// A role that is bound to prefixes can begin only what it may lease.
func TestBeginIsBound(t *testing.T) {
	pool := pgtest.New(t)
	add(t, pool, "q.x", 0, time.Hour)
	add(t, pool, "a.x", 0, time.Hour)
	mine, others := acquire(t, ahead(pool, 1, 1, "q."), 0), acquire(t, ahead(pool, 1, 1, "a."), 0)
	as := bound(t, pool)
	if begun := mayBegin(t, as, append(mine, others...)...); !begun[mine[0].Token] || len(begun) != 1 {
		t.Errorf("may begin %v, want only %s", begun, mine[0].Token)
	}
}

// Leases whose answer was lost are given back, whichever of the tokens of the request they have.
func TestDoubtsAhead(t *testing.T) {
	pool := pgtest.New(t)
	addMany(t, pool, 7, "a.x", 0)
	d := &deaf{DB: pool}
	p := ahead(d, 4, 2, "a.")
	acquire(t, p, 1)
	addMany(t, pool, 5, "a.x", 0)
	lose(t, p, d, "lost")
	if n := query[int](t, pool, `SELECT count(*)::int FROM workflow_run WHERE status = 'leased'`); n != 12 {
		t.Fatalf("%d are leased, want 5, and 7 by the request whose answer was lost", n)
	}
	p.DoubtAgain()
	p.Discover()
	if got := len(acquire(t, p, 3)); got != 7 {
		t.Errorf("leased %d, want 7", got)
	}
	if n := query[int](t, pool, `SELECT count(*)::int FROM workflow_run WHERE attempt > 1`); n != 0 {
		t.Errorf("%d runs are charged for a lease whose answer was lost", n)
	}
}

// Of a mark and a take-back at the same time, whichever commits first decides, for both: a run is begun and charged, or neither.
func TestMarkOrTakeBack(t *testing.T) {
	pool := settledServer(t)
	const rounds, groups, each = 60, 3, 4
	begunAndCharged, neither := 0, 0
	for round := range rounds {
		addMany(t, pool, groups*each, "a.x", 0)
		leases := acquire(t, ahead(pool, groups*each, each, "a."), 0)
		expire(t, pool, column(leases)...)
		taken := make(chan error, 1)
		go func() {
			time.Sleep(time.Duration(round%20) * 150 * time.Microsecond)
			_, _, err := newReclaimer(pool).Reclaim(context.WithoutCancel(t.Context()), 100)
			taken <- err
		}()
		begun := map[uuid.UUID]bool{}
		for i := 0; i < len(leases); i += each {
			for token := range mayBegin(t, pool, leases[i]) {
				begun[token] = true
			}
		}
		if err := <-taken; err != nil {
			t.Fatal(err)
		}
		reclaim(t, newReclaimer(pool), 100)
		for _, l := range leases {
			switch charged := read(t, pool, l.ID).Attempt == 1; {
			case charged && begun[l.Token]:
				begunAndCharged++
			case !charged && !begun[l.Token]:
				neither++
			default:
				t.Fatalf("round %d: begun %v, charged %v", round, begun[l.Token], charged)
			}
		}
		exec(t, pool, `UPDATE workflow_run SET status = 'cancelled' WHERE status <> 'cancelled'`)
	}
	if begunAndCharged == 0 || neither == 0 {
		t.Errorf("%d were begun, %d were not: the two never met", begunAndCharged, neither)
	}
}

// Due knows the highest priority of what is due until that was leased. A poll that had no room for runs of some lanes does not
// forget it, and is repeated soon.
func TestDueUntilLeased(t *testing.T) {
	pool := pgtest.New(t)
	add(t, pool, "a.quick", 50, time.Hour)
	add(t, pool, "a.slow", 50, time.Hour)
	p := ahead(pool, 0, 2, "a.")
	p.Terms = func(typ string) leasing.Terms {
		terms := quick(typ)
		terms.Quick = typ == "a.quick"
		return terms
	}
	for _, test := range []struct {
		what  string
		n     int
		ahead leasing.Ahead
		want  string
	}{
		{"no room", 0, leasing.Ahead{}, ""},
		{"slots for types that are not quick", 1, leasing.Ahead{Group: 2, Behind: true}, "a.slow"},
		{"slots for types that are not quick, again", 1, leasing.Ahead{Group: 2, Behind: true}, ""},
	} {
		p.Discover()
		p.Ahead = test.ahead
		leases, wait, err := p.Acquire(t.Context(), test.n, 0)
		if got := strings.Join(types(leases), " "); err != nil || got != test.want {
			t.Fatalf("%s: leased %q, %v; want %q", test.what, got, err, test.want)
		}
		if top := p.Due().Top; top != 50 {
			t.Errorf("%s: the highest priority that is due is %d, want 50", test.what, top)
		}
		if test.n > 0 && wait > 10*time.Millisecond {
			t.Errorf("%s: the next poll is in %s", test.what, wait)
		}
	}
	p.Discover()
	p.Ahead = leasing.Ahead{Runs: 5, Bytes: 1000, Group: 2, Behind: true}
	if got := types(acquire(t, p, 1)); len(got) != 1 || p.Due().Top != math.MinInt {
		t.Errorf("leased %v, and %d is due", got, p.Due().Top)
	}
}
