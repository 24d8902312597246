package leasing_test

import (
	"fmt"
	"math/rand/v2"
	"slices"
	"testing"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/simple-workflow/simple-workflow/internal/leasing"
	"github.com/simple-workflow/simple-workflow/internal/pgtest"
	"github.com/simple-workflow/simple-workflow/internal/settling"
	"github.com/simple-workflow/simple-workflow/run"
)

// lastAttempt adds a suspect that has one of its two attempts left.
func lastAttempt(t *testing.T, db run.DB, typ string, priority int) uuid.UUID {
	t.Helper()
	id := add(t, db, typ, priority, time.Second)
	exec(t, db, `WITH o AS MATERIALIZED (SELECT set_config('workflow.override', 'a test needs it', true))
		UPDATE workflow_run SET suspect = true, attempt = 1, max_attempts = 2 FROM o WHERE id = $1`, id)
	return id
}

// beside makes the poller's process hold the given suspects, which are at their last attempt and no longer watched.
func beside(p *leasing.Poller, held ...leasing.Lease) {
	p.Suspects = leasing.Suspects{Running: len(held) > 0}
	for _, l := range held {
		p.Suspects.Alone = p.Suspects.Alone || l.Alone
		p.Suspects.Last = append(p.Suspects.Last, leasing.Held{ID: l.ID, Token: l.Token})
	}
}

// died lets leases expire and takes them back, one at a time, each by a worker that has just started. It returns how
// many of the runs are exhausted.
func died(t *testing.T, pool *pgxpool.Pool, held ...leasing.Lease) (exhausted int) {
	t.Helper()
	for _, l := range held {
		expire(t, pool, l.ID)
	}
	for range held {
		r := newReclaimer(pool)
		again, failed := reclaim(t, r, 1)
		if again+len(failed) != 1 {
			t.Fatalf("took back %d and %d, want one", again, len(failed))
		}
		exhausted += len(failed)
	}
	exec(t, pool, "UPDATE workflow_run SET run_at = now() - interval '1 second' WHERE status = 'pending'")
	return exhausted
}

// state returns attempt, status and mark of a run.
func state(t *testing.T, db run.DB, id uuid.UUID) string {
	t.Helper()
	return query[string](t, db, "SELECT concat_ws(' ', attempt, status, CASE WHEN suspect THEN coalesce('alone ' || alone, 'unmarked') ELSE 'no suspect' END) FROM workflow_run WHERE id = $1", id)
}

func wantState(t *testing.T, db run.DB, id uuid.UUID, want string) {
	t.Helper()
	if got := state(t, db, id); got != want {
		t.Errorf("run is %q, want %q", got, want)
	}
}

// A suspect that dies alone at its last attempt has no attempt left.
func TestDiesAlone(t *testing.T) {
	pool := settledServer(t)
	id := lastAttempt(t, pool, "a.x", 0)
	l := one(t, newPoller(pool, "a."))
	wantState(t, pool, id, "2 leased unmarked")
	if died(t, pool, l) != 1 {
		t.Error("it has an attempt left")
	}
}

// A suspect beside which another was leased is given back its last attempt, once. So is the other one, although
// different workers take the two back. From then on it is leased only by a process that holds no other suspect, no
// other suspect is leased until it has ended, and the attempt stays charged.
func TestGivenBackOnce(t *testing.T) {
	pool := settledServer(t)
	first, second := lastAttempt(t, pool, "a.x", 9), lastAttempt(t, pool, "a.x", 8)
	p := newPoller(pool, "a.")
	a := one(t, p)
	beside(p, a)
	b := one(t, p)
	wantState(t, pool, first, "2 leased alone false")
	wantState(t, pool, second, "2 leased alone false")
	if died(t, pool, a, b) != 0 {
		t.Error("one of them is exhausted")
	}
	wantState(t, pool, first, "1 pending alone true")
	wantState(t, pool, second, "1 pending alone true")
	told := query[string](t, pool, `SELECT string_agg(concat_ws(' ', event_type, attempt, lease_no, data->>'attempt_given_back'), ', ') FROM workflow_event WHERE event_type = 'expired' AND workflow_id = $1`, first)
	if told != "expired 2 1 true" {
		t.Errorf("history tells %q", told)
	}

	p = newPoller(pool, "a.")
	other := leasing.Lease{}
	other.ID, other.Token = uuid.New(), uuid.New()
	beside(p, other)
	p.Discover()
	if leases := acquire(t, p, 10); len(leases) > 0 {
		t.Errorf("leased %d beside another suspect", len(leases))
	}
	beside(p)
	a = one(t, p)
	if a.ID != first || !a.Alone || a.Attempt != 2 {
		t.Errorf("leased %+v, want the first, to be kept alone", a)
	}
	beside(p, a)
	innocent := add(t, pool, "a.y", 0, time.Minute)
	lastAttempt(t, pool, "a.y", 0)
	if l := one(t, p); l.ID != innocent {
		t.Errorf("leased %s beside one that is kept alone", l.ID)
	}
	if died(t, pool, a) != 1 {
		t.Error("it has been given back a second attempt")
	}
}

// A suspect that was not alone under one lease, and was released, counts as alone under the next.
func TestAloneUnderTheNextLease(t *testing.T) {
	pool := settledServer(t)
	id := lastAttempt(t, pool, "a.x", 9)
	lastAttempt(t, pool, "a.y", 8)
	p := newPoller(pool, "a.")
	l := one(t, p)
	beside(p, l)
	other := one(t, p)
	for _, l := range []leasing.Lease{l, other} {
		if _, err := settling.Settle(t.Context(), pool, "w1", []settling.Outcome{{ID: l.ID, Token: l.Token, Verdict: settling.Release}}); err != nil {
			t.Fatal(err)
		}
	}
	wantState(t, pool, id, "1 pending alone false")
	beside(p)
	l = one(t, p)
	wantState(t, pool, id, "2 leased unmarked")
	if died(t, pool, l) != 1 {
		t.Error("it has an attempt left, although it was alone")
	}
}

// The mark is fenced by the token: a worker whose lease was lost does not mark the next lease of the same run.
func TestMarkIsFenced(t *testing.T) {
	pool := settledServer(t)
	id := lastAttempt(t, pool, "a.x", 9)
	p := newPoller(pool, "a.")
	l := one(t, p)
	lastAttempt(t, pool, "a.y", 8)
	l.Token = uuid.New()
	beside(p, l)
	one(t, p)
	wantState(t, pool, id, "2 leased unmarked")
}

// A run that a person retries may be given back its last attempt again.
func TestRetriedIsGivenBackAnew(t *testing.T) {
	pool := settledServer(t)
	id := lastAttempt(t, pool, "a.x", 9)
	p := newPoller(pool, "a.")
	l := one(t, p)
	lastAttempt(t, pool, "a.y", 8)
	beside(p, l)
	other := one(t, p)
	died(t, pool, l)
	settle(t, pool, other)
	beside(p)
	l = one(t, p)
	if _, err := settling.Settle(t.Context(), pool, "w1", []settling.Outcome{{ID: l.ID, Token: l.Token, Verdict: settling.Fail, Failure: settling.NewFailure(fmt.Errorf("no"), l.Info)}}); err != nil {
		t.Fatal(err)
	}
	if err := run.Retry(t.Context(), pool, id, 2); err != nil {
		t.Fatal(err)
	}
	wantState(t, pool, id, "2 pending no suspect")
	l = one(t, p)
	died(t, pool, l)
	wantState(t, pool, id, "3 pending unmarked")
	l = one(t, p)
	lastAttempt(t, pool, "a.y", 8)
	beside(p, l)
	one(t, p)
	if died(t, pool, l) != 0 {
		t.Error("it has not been given back the attempt")
	}
}

// While the handler of a suspect executes although its lease is over, a suspect that is leased does not count as
// alone. But a suspect to be kept alone is leased, because that handler may never end.
func TestBesideStrays(t *testing.T) {
	pool := settledServer(t)
	id := lastAttempt(t, pool, "a.x", 9)
	p := newPoller(pool, "a.")
	p.Suspects.Strays = true
	l := one(t, p)
	wantState(t, pool, id, "2 leased alone false")
	died(t, pool, l)
	if l = one(t, p); !l.Alone {
		t.Errorf("%+v is not kept alone", l)
	}
	if died(t, pool, l) != 1 {
		t.Error("it has been given back a second attempt")
	}
}

// A suspect that was not alone is given nothing back if its worker's heartbeat shows that it continued after its time
// limit.
func TestPastItsTimeLimit(t *testing.T) {
	pool := settledServer(t)
	for _, after := range []bool{false, true} {
		pgtest.ByHand(t, pool, "TRUNCATE workflow_run, workflow_history")
		id := lastAttempt(t, pool, "a.x", 9)
		p := newPoller(pool, "a.")
		p.Terms = func(typ string) leasing.Terms {
			terms := unlimited(typ)
			terms.Timeout = 30 * time.Second
			return terms
		}
		p.Suspects.Running = true
		l := one(t, p)
		wantState(t, pool, id, "2 leased alone false")
		pgtest.Elapse(t, pool, 29500*time.Millisecond)
		if after {
			extend(t, pool, held([]leasing.Lease{l}, time.Minute))
		}
		pgtest.Elapse(t, pool, 2*time.Second)
		want := 0
		if after {
			want = 1
		}
		r := newReclaimer(pool)
		if _, exhausted := reclaim(t, r, 10); len(exhausted) != want {
			t.Errorf("heartbeat after the limit %v: %d exhausted, want %d", after, len(exhausted), want)
		}
	}
}

// The last attempt by the type's Limit counts as the last attempt of the run.
func TestGivenBackBelowTheTypesLimit(t *testing.T) {
	pool := settledServer(t)
	id := lastAttempt(t, pool, "a.x", 9)
	exec(t, pool, "UPDATE workflow_run SET max_attempts = 9")
	p := newPoller(pool, "a.")
	p.Terms = func(typ string) leasing.Terms { terms := unlimited(typ); terms.Limit = 2; return terms }
	l := one(t, p)
	lastAttempt(t, pool, "a.y", 8)
	beside(p, l)
	one(t, p)
	died(t, pool, l)
	wantState(t, pool, id, "1 pending alone true")
	beside(p)
	if l := one(t, p); !l.Alone {
		t.Errorf("%+v is not kept alone", l)
	}
}

// While the row of a held suspect is locked, or refuses the mark, no suspect is leased beside it. Other runs are.
func TestMarkCannotBeMade(t *testing.T) {
	pool := settledServer(t)
	id := lastAttempt(t, pool, "a.x", 9)
	p := newPoller(pool, "a.")
	l := one(t, p)
	lastAttempt(t, pool, "a.y", 8)
	beside(p, l)
	fine := func() {
		t.Helper()
		add(t, pool, "a.z", 0, time.Minute)
		if l := one(t, p); l.Suspect {
			t.Errorf("leased %s beside one that is not marked", l.ID)
		}
	}
	tx := begin(t, pool)
	exec(t, tx, "SELECT FROM workflow_run WHERE id = $1 FOR UPDATE", id)
	fine()
	commit(t, tx)
	exec(t, pool, `CREATE FUNCTION refuse() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN RAISE EXCEPTION 'not this one'; END $$`)
	exec(t, pool, `CREATE TRIGGER picky BEFORE UPDATE ON workflow_run FOR EACH ROW WHEN (OLD.type = 'a.x' AND OLD.status = NEW.status) EXECUTE FUNCTION refuse()`)
	fine()
	exec(t, pool, `DROP TRIGGER picky ON workflow_run`)
	// The mark need not be removed for a suspect to be leased alone.
	exec(t, pool, "UPDATE workflow_run SET alone = false WHERE id = $1", lastAttempt(t, pool, "a.w", 10))
	exec(t, pool, `CREATE TRIGGER picky BEFORE UPDATE ON workflow_run FOR EACH ROW WHEN (OLD.type = 'a.w' AND OLD.status = NEW.status) EXECUTE FUNCTION refuse()`)
	beside(p)
	settle(t, pool, one(t, p))
	beside(p, l)
	if n := query[int](t, pool, `SELECT count(*)::int FROM workflow_set_aside`); n > 0 {
		t.Errorf("%d runs are set aside", n)
	}
	one(t, p)
	wantState(t, pool, id, "2 leased alone false")
}

// A suspect that is kept alone is leased after all other suspects, until it has been due for a minute. Then the others
// wait for it, except at a worker that has just had such a suspect.
func TestKeptAloneInTurns(t *testing.T) {
	pool := settledServer(t)
	solo := lastAttempt(t, pool, "a.x", 9)
	exec(t, pool, "UPDATE workflow_run SET alone = true")
	other := func() uuid.UUID { return lastAttempt(t, pool, "a.y", 0) }
	p := newPoller(pool, "a.")
	wanted := other()
	l := one(t, p)
	if l.ID != wanted {
		t.Errorf("leased %s, want the one that is not kept alone", l.ID)
	}
	wanted = other()
	beside(p, l)
	if l := one(t, p); l.ID != wanted {
		t.Errorf("leased %s, want the one that is not kept alone", l.ID)
	}
	exec(t, pool, "UPDATE workflow_run SET run_at = now() - interval '61 seconds' WHERE id = $1", solo)
	other()
	p.Discover()
	if leases := acquire(t, p, 10); len(leases) > 0 {
		t.Errorf("leased %v, although one that is to be alone has waited for a minute", names(leases))
	}
	beside(p)
	if l = one(t, p); l.ID != solo || !l.Alone {
		t.Errorf("leased %s, want the one that is kept alone", l.ID)
	}
	settle(t, pool, l)
	exec(t, pool, "UPDATE workflow_run SET alone = true, run_at = now() - interval '61 seconds' WHERE id = $1", lastAttempt(t, pool, "a.x", 9))
	if l = one(t, p); l.Alone {
		t.Error("one that is kept alone came after another")
	}
}

const asBefore = `
	SELECT coalesce(array_agg(id), '{}') FROM workflow_lease_v1('{t,f}', '{a.x,a.x}', '{0,0}', '{1901-01-01,1901-01-01}', ARRAY[$1, $1]::uuid[], '{0,0}', '{9,9}', '{NULL,NULL}', '{NULL,NULL}',
		false, 9, 9, true, false, false, $2, $3, '{a.x}', '{60}', '{NULL}')`

// leaseAsBefore polls as a worker of the version before, which does not report the suspects that it holds.
func leaseAsBefore(t *testing.T, pool *pgxpool.Pool, worker string) []uuid.UUID {
	t.Helper()
	return query[[]uuid.UUID](t, pool, asBefore, uuid.Nil, uuid.New(), worker)
}

// Suspects at their last attempt that a worker of the version before leases count as not alone, because it does not
// report what it holds. By its name, the database still keeps alone the suspects that must be, and then their attempt
// stays charged.
func TestWorkersOfTheVersionBefore(t *testing.T) {
	pool := settledServer(t)
	id := lastAttempt(t, pool, "a.x", 0)
	first := leaseAsBefore(t, pool, "old")
	wantState(t, pool, id, "2 leased alone false")
	second := lastAttempt(t, pool, "a.x", 0)
	exec(t, pool, "UPDATE workflow_run SET alone = true WHERE id = $1", second)
	if leases := leaseAsBefore(t, pool, "old"); len(leases) > 0 {
		t.Errorf("leased %v beside another suspect", leases)
	}
	died(t, pool, leasing.Lease{Info: run.Info{ID: first[0]}})
	wantState(t, pool, id, "1 pending alone true")
	if leases := leaseAsBefore(t, pool, "old"); len(leases) != 1 {
		t.Fatalf("leased %v, want one of those that are kept alone", leases)
	} else {
		first = leases
	}
	lastAttempt(t, pool, "a.x", 0)
	plain := add(t, pool, "a.x", 0, time.Minute)
	if leases := leaseAsBefore(t, pool, "old"); !slices.Equal(leases, []uuid.UUID{plain}) {
		t.Errorf("leased %v beside one that is kept alone, want %s", leases, plain)
	}
	if leases := leaseAsBefore(t, pool, "another"); len(leases) != 1 {
		t.Errorf("another leased %v, want one", leases)
	}
	if died(t, pool, leasing.Lease{Info: run.Info{ID: first[0]}}) != 1 {
		t.Error("it has been given back a second attempt")
	}
}

// A suspect at its last attempt that refuses every update, or only the mark that it is not alone, is set aside when it
// would be leased beside another. No other run is set aside, and those behind it are leased. A worker of the version
// before gets an error.
func TestRefusedBeside(t *testing.T) {
	pool := settledServer(t)
	for _, when := range []string{`true`, `NEW.alone = false`} {
		pgtest.ByHand(t, pool, "TRUNCATE workflow_run, workflow_history, workflow_set_aside")
		held := newPoller(pool, "a.")
		lastAttempt(t, pool, "a.held", 0)
		l := one(t, held)
		guilty := lastAttempt(t, pool, "a.x", 0)
		innocent := lastAttempt(t, pool, "a.x", 0)
		add(t, pool, "a.y", -1, time.Minute)
		raises(t, pool, `OLD.id = '`+guilty.String()+`' AND `+when, "P0001")
		p := newPoller(pool, "a.")
		beside(p, l)
		p.Discover()
		if leases := acquire(t, p, 10); len(leases) == 0 || leases[0].ID != innocent {
			t.Errorf("refused if %s: leased %v, want the innocent suspect first", when, names(leases))
		}
		if n := query[string](t, pool, `SELECT coalesce(string_agg(id || ' ' || statement, ', '), 'none') FROM workflow_set_aside`); n != guilty.String()+" lease" {
			t.Errorf("refused if %s: set aside is %s, want the guilty suspect", when, n)
		}
		exec(t, pool, `DELETE FROM workflow_set_aside`)
		if _, err := pool.Exec(t.Context(), asBefore, uuid.Nil, uuid.New(), "old"); err == nil {
			t.Errorf("refused if %s: a worker of the version before is told of nothing", when)
		}
		exec(t, pool, `DROP FUNCTION refuse CASCADE`)
	}
}

// A suspect that has been given back an attempt is not given back another, even if its worker leases a suspect beside
// it because it does not report that the first is to be kept alone.
func TestKeptAloneIsChargedBesideOthers(t *testing.T) {
	pool := settledServer(t)
	id := lastAttempt(t, pool, "a.x", 9)
	exec(t, pool, "UPDATE workflow_run SET alone = true")
	p := newPoller(pool, "a.")
	l := one(t, p)
	lastAttempt(t, pool, "a.y", 8)
	l.Alone = false
	beside(p, l)
	one(t, p)
	wantState(t, pool, id, "2 leased alone true")
	if died(t, pool, l) != 1 {
		t.Error("it has been given back a second attempt")
	}
}

// A process of the generated test, and what it holds.
type process struct {
	poller  *leasing.Poller
	held    []leasing.Lease
	watched map[uuid.UUID]bool // the held suspects that are still watched
	proven  int
}

// room does what the worker's room does.
func (w *process) room(slots int) (n, suspects int) {
	w.poller.Suspects = leasing.Suspects{}
	watched, lastWatched := 0, false
	for _, l := range w.held {
		if !l.Suspect {
			continue
		}
		w.poller.Suspects.Running = true
		w.poller.Suspects.Alone = w.poller.Suspects.Alone || l.Alone
		last := l.Attempt >= l.MaxAttempts
		if last {
			w.poller.Suspects.Last = append(w.poller.Suspects.Last, leasing.Held{ID: l.ID, Token: l.Token})
		}
		if w.watched[l.ID] {
			watched++
			lastWatched = lastWatched || last
		}
	}
	w.poller.Suspects.Watched = watched > 0
	if !lastWatched {
		suspects = max(min(1+w.proven, slots)-watched, 0)
	}
	return slots - len(w.held), suspects
}

// A run that dies beside a guilty run never fails, and the guilty run is started at most once more than its attempts,
// in any order in which processes poll, watch, finish, release and die, and leases are taken back. All runs are leased
// at the beginning, so that each run that dies later is a suspect. The guilty run kills its process as soon as it may,
// but not always while it is watched.
func TestInnocentNeverFails(t *testing.T) {
	pool := settledServer(t)
	for seed := range uint64(60) {
		if !t.Run(fmt.Sprint(seed), func(t *testing.T) { innocentNeverFails(t, pool, rand.New(rand.NewPCG(seed, 26))) }) {
			return
		}
	}
}

func innocentNeverFails(t *testing.T, pool *pgxpool.Pool, r *rand.Rand) {
	pgtest.ByHand(t, pool, "TRUNCATE workflow_run, workflow_history")
	pgtest.Attempts(t, pool, 3)
	slots := 3 + r.IntN(3)
	patience := []int{0, 1, 4, 9}[r.IntN(4)] // of the guilty run: it may live longer than it is watched
	addMany(t, pool, slots, "a.x", 0)
	exec(t, pool, "UPDATE workflow_run SET max_attempts = 2 + (random() * ($1 - 2))::int", 2+r.IntN(3))
	pill := query[uuid.UUID](t, pool, "SELECT id FROM workflow_run ORDER BY random() LIMIT 1")
	attempts := query[int](t, pool, "SELECT max_attempts FROM workflow_run WHERE id = $1", pill)
	starts := 0
	workers := [2]*process{}
	story := []string{}
	tell := func(format string, args ...any) { story = append(story, fmt.Sprintf(format, args...)) }
	name := func(id uuid.UUID) string {
		if id == pill {
			return "pill"
		}
		return id.String()[32:]
	}
	begin := func(i int) {
		workers[i] = &process{poller: newPoller(pool, "a."), watched: map[uuid.UUID]bool{}}
	}
	die := func(i int) {
		for _, l := range workers[i].held {
			expire(t, pool, l.ID)
		}
		tell("w%d dies with %d", i, len(workers[i].held))
		begin(i)
	}
	settleAs := func(w *process, k int, verdict settling.Verdict) {
		l := w.held[k]
		w.held = slices.Delete(w.held, k, k+1)
		if l.Suspect && verdict == settling.Succeed {
			w.proven++
		}
		delete(w.watched, l.ID)
		refused, err := settling.Settle(t.Context(), pool, "w1", []settling.Outcome{{ID: l.ID, Token: l.Token, Verdict: verdict}})
		if err != nil || len(refused) > 0 {
			t.Fatal(len(refused), err)
		}
		tell("%s %s", name(l.ID), verdict)
	}
	poll := func(i int) {
		w := workers[i]
		n, suspects := w.room(slots)
		if n == 0 {
			return
		}
		w.poller.Discover()
		w.poller.StopWaiting()
		leases, _, err := w.poller.Acquire(t.Context(), n, suspects)
		if err != nil {
			t.Fatal(err)
		}
		for _, l := range leases {
			tell("w%d leases %s at %d of %d, suspect %v, alone %v", i, name(l.ID), l.Attempt, l.MaxAttempts, l.Suspect, l.Alone)
			if l.Exhausted {
				t.Fatal("exhausted")
			}
			if l.ID == pill {
				starts++
			}
			w.held = append(w.held, l)
			w.watched[l.ID] = l.Suspect
		}
	}
	begin(0)
	begin(1)
	poll(0)
	open := func() int {
		return query[int](t, pool, "SELECT count(*)::int FROM workflow_run WHERE status IN ('pending', 'leased')")
	}
	for step := 0; open() > 0; step++ {
		if step > 2000 {
			t.Fatalf("there is no end of it:\n%v", story)
		}
		i := r.IntN(len(workers))
		w := workers[i]
		guilty := slices.IndexFunc(w.held, func(l leasing.Lease) bool { return l.ID == pill })
		switch k := r.IntN(10); {
		case guilty >= 0 && r.IntN(1+patience) == 0:
			die(i)
		case k < 3:
			poll(i)
		case k < 5: // two seconds
			for id, watched := range w.watched {
				if watched {
					w.watched[id] = false
					w.proven++
				}
			}
			tell("w%d has watched", i)
		case k < 6 && len(w.held) > 0:
			if k := r.IntN(len(w.held)); w.held[k].ID != pill {
				settleAs(w, k, settling.Succeed)
			}
		case k < 7 && len(w.held) > 0 && r.IntN(4) == 0:
			settleAs(w, r.IntN(len(w.held)), settling.Release)
		case k < 9:
			again, exhausted := reclaim(t, newReclaimer(pool), 1+r.IntN(3))
			exec(t, pool, "UPDATE workflow_run SET run_at = now() - random() * interval '100 seconds' WHERE status = 'pending' AND run_at > now()")
			for _, l := range exhausted {
				tell("%s is exhausted", name(l.ID))
				if l.ID != pill {
					t.Fatalf("an innocent run fails: %v", story)
				}
				if _, err := settling.Settle(t.Context(), pool, "w2", []settling.Outcome{{ID: l.ID, Token: l.Token, Verdict: settling.Fail, Failure: settling.NewFailure(fmt.Errorf("gone"), l.Info)}}); err != nil {
					t.Fatal(err)
				}
			}
			if again > 0 {
				tell("%d taken back", again)
			}
		}
	}
	released := query[int](t, pool, "SELECT count(*)::int FROM workflow_history WHERE workflow_id = $1 AND event_type = 'released'", pill)
	if starts -= released; starts < attempts || starts > attempts+1 {
		t.Errorf("the guilty run has been started %d times, of %d: %v", starts, attempts, story)
	}
}
