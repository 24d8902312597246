package leasing_test

import (
	"slices"
	"testing"
	"time"

	"github.com/simple-workflow/simple-workflow/internal/leasing"
	"github.com/simple-workflow/simple-workflow/internal/pgtest"
	"github.com/simple-workflow/simple-workflow/run"
)

// limited gives groups of types room, and counts what has been leased as a worker does.
type limited struct {
	groups map[string]string
	room   map[string]int
}

func (l *limited) terms(typ string) leasing.Terms {
	terms := unlimited(typ)
	if group, ok := l.groups[typ]; ok {
		terms.Group, terms.Room = group, l.room[group]
	}
	return terms
}

func (l *limited) count(leases []leasing.Lease) {
	for _, x := range leases {
		l.room[l.groups[x.Type]]--
	}
}

// drain acquires n at a time, as long as Acquire returns a wait of 0.
func (l *limited) drain(t *testing.T, p *leasing.Poller, n, suspects int) (all []leasing.Lease) {
	t.Helper()
	p.Discover()
	for range 20 {
		leases, wait, err := p.Acquire(t.Context(), n, suspects)
		if err != nil {
			t.Fatal(err)
		}
		l.count(leases)
		all = append(all, leases...)
		if wait > 0 {
			return all
		}
	}
	t.Fatal("there is no end of it")
	return nil
}

// Types of one group share its room, over all their priorities, and the highest priorities get it.
// Other types get the rest of the batch.
func TestRoom(t *testing.T) {
	pool := pgtest.New(t)
	for _, typ := range []string{"a.x", "a.y", "a.free"} {
		addMany(t, pool, 3, typ, 1)
		addMany(t, pool, 3, typ, 5)
	}
	l := &limited{
		groups: map[string]string{"a.x": "g", "a.y": "g"},
		room:   map[string]int{"g": 7},
	}
	p := newPoller(pool, "a.")
	p.Terms = l.terms
	counts := map[string]int{}
	for _, name := range names(l.drain(t, p, 100, 1)) {
		counts[name]++
	}
	if counts["a.x 5"] != 3 || counts["a.y 5"] != 3 || counts["a.x 1"]+counts["a.y 1"] != 1 {
		t.Errorf("leased %v, want all 6 of priority 5 and one of priority 1", counts)
	}
	if counts["a.free 5"] != 3 || counts["a.free 1"] != 3 {
		t.Errorf("leased %v, want all 6 without limit", counts)
	}
	if more := l.drain(t, p, 100, 1); len(more) > 0 {
		t.Errorf("and then %v, with no room", names(more))
	}
	l.room["g"] = 2
	if more := l.drain(t, p, 100, 1); len(more) != 2 {
		t.Errorf("and then %v, want two", names(more))
	}
}

// A batch that is smaller than what is due is filled strictly by priority, even where room is shared.
func TestRoomAndOrder(t *testing.T) {
	pool := pgtest.New(t)
	add(t, pool, "a.x", 9, time.Minute)
	add(t, pool, "a.free", 7, time.Minute)
	add(t, pool, "a.y", 5, time.Minute)
	addMany(t, pool, 5, "a.free", 3)
	l := &limited{groups: map[string]string{"a.x": "g", "a.y": "g"}, room: map[string]int{"g": 2}}
	p := newPoller(pool, "a.")
	p.Terms = l.terms
	want := []string{"a.x 9", "a.free 7", "a.y 5"}
	if got := names(acquire(t, p, 3)); !slices.Equal(got, want) {
		t.Errorf("leased %v, want %v", got, want)
	}
}

// A due run that is locked does not hold up others that share its room.
func TestRoomBehindLock(t *testing.T) {
	pool := pgtest.New(t)
	locked := add(t, pool, "a.x", 9, time.Hour)
	add(t, pool, "a.y", 5, time.Minute)
	tx := begin(t, pool)
	exec(t, tx, "SELECT FROM workflow_run WHERE id = $1 FOR UPDATE", locked)

	l := &limited{groups: map[string]string{"a.x": "g", "a.y": "g"}, room: map[string]int{"g": 1}}
	p := newPoller(pool, "a.")
	p.Terms = l.terms
	if got := types(acquire(t, p, 10)); !slices.Equal(got, []string{"a.y"}) {
		t.Errorf("leased %v, want a.y", got)
	}
}

func suspect(t *testing.T, pool run.DB, typ string, priority int) {
	t.Helper()
	exec(t, pool, "UPDATE workflow_run SET suspect = true WHERE id = $1", add(t, pool, typ, priority, time.Minute))
}

// A poll leases at most the given number of suspects, of all types and priorities together. Other runs
// are not held up by suspects.
func TestSuspects(t *testing.T) {
	pool := pgtest.New(t)
	for priority := range 3 {
		suspect(t, pool, "a.x", priority)
		suspect(t, pool, "a.y", priority)
		add(t, pool, "a.z", priority, time.Minute)
	}
	p := newPoller(pool, "a.")
	poll := func(suspects int) (bad, good []leasing.Lease) {
		t.Helper()
		p.Discover()
		leases, _, err := p.Acquire(t.Context(), 100, suspects)
		if err != nil {
			t.Fatal(err)
		}
		for _, l := range leases {
			if l.Suspect {
				bad = append(bad, l)
			} else {
				good = append(good, l)
			}
		}
		return bad, good
	}
	if bad, good := poll(0); len(bad) != 0 || len(good) != 3 {
		t.Errorf("none allowed: %v and %v", names(bad), names(good))
	}
	if bad, _ := poll(1); len(bad) != 1 || bad[0].Priority != 2 {
		t.Errorf("one allowed: %v, want one of priority 2", names(bad))
	}
	if bad, _ := poll(3); len(bad) != 3 || bad[0].Priority != 2 || bad[2].Priority != 1 {
		t.Errorf("three allowed: %v, want the next by priority", names(bad))
	}
	if bad, _ := poll(9); len(bad) != 2 {
		t.Errorf("nine allowed: %v, want the last two", names(bad))
	}
}

// Suspects at their last attempt, by max_attempts or by the type's Limit, are leased alone, when they
// come first and no suspect is watched. The other suspects pass them, but wait for one that has been
// due for long.
func TestLastAttemptAlone(t *testing.T) {
	pool := pgtest.New(t)
	for _, priority := range []int{9, 8, 7, 6, 5} {
		suspect(t, pool, "a.x", priority)
	}
	suspect(t, pool, "a.limited", 4)
	byHand(t, pool, "UPDATE workflow_run SET attempt = 1, run_at = now()")
	byHand(t, pool, "UPDATE workflow_run SET attempt = 2 WHERE priority IN (8, 7)")
	p := newPoller(pool, "a.")
	p.Terms = func(typ string) leasing.Terms {
		terms := unlimited(typ)
		if typ == "a.limited" {
			terms.Limit = 2
		}
		return terms
	}
	for i, step := range []struct {
		watched bool
		before  string
		want    []int // priorities
	}{
		{false, "", []int{9, 6, 5}},
		{true, "", nil},
		{false, "", []int{8}},
		{true, "UPDATE workflow_run SET status = 'cancelled' WHERE priority = 7", nil}, // the limited one
		{false, "", []int{4}},
		{false, "", nil},
	} {
		if step.before != "" {
			exec(t, pool, step.before)
		}
		p.Suspects.Watched = step.watched
		p.Discover()
		leases, wait, err := p.Acquire(t.Context(), 100, 10)
		if err != nil {
			t.Fatal(err)
		}
		if got := priorities(leases); !slices.Equal(got, step.want) {
			t.Errorf("step %d: suspects of priority %v were leased, want %v", i, got, step.want)
		}
		// When all suspects wait, the next poll comes at once, for other runs, and the one after it later.
		if len(leases) == 0 && wait == 0 {
			if leases, wait, err = p.Acquire(t.Context(), 100, 10); err != nil || len(leases) > 0 || wait < 100*time.Millisecond {
				t.Errorf("step %d: then %d suspects, and another look after %s, %v", i, len(leases), wait, err)
			}
			p.StopWaiting()
		}
	}
	// One has been due for ten seconds, and others are behind it. As one was alone just now, the others
	// go first once. Then they wait until it has had its turn.
	suspect(t, pool, "a.y", 3)
	byHand(t, pool, "UPDATE workflow_run SET attempt = 2, run_at = now() - interval '10 seconds' WHERE priority = 3")
	for i, step := range []struct {
		add     int // priority of one more suspect
		watched bool
		want    []int
	}{{2, true, []int{2}}, {1, true, nil}, {0, false, []int{3}}, {-1, false, []int{1, 0, -1}}} {
		suspect(t, pool, "a.y", step.add)
		p.Suspects.Watched = step.watched
		p.StopWaiting()
		p.Discover()
		leases, _, err := p.Acquire(t.Context(), 100, 10)
		if err != nil {
			t.Fatal(err)
		}
		if got := priorities(leases); !slices.Equal(got, step.want) {
			t.Errorf("late, step %d: suspects of priority %v were leased, want %v", i, got, step.want)
		}
	}
}

func priorities(leases []leasing.Lease) (all []int) {
	for _, l := range leases {
		all = append(all, l.Priority)
	}
	return all
}

// A suspect that cannot be leased does not hold up other suspects: neither a step, at a worker that does not execute
// processes, nor a locked run.
func TestSuspectsBehindOthers(t *testing.T) {
	pool := pgtest.New(t)
	suspect(t, pool, "a.step", 9)
	suspect(t, pool, "a.locked", 8)
	suspect(t, pool, "a.x", 1)
	pgtest.ByHand(t, pool, "UPDATE workflow_run SET token_id = gen_random_uuid() WHERE type = 'a.step'")
	tx := begin(t, pool)
	exec(t, tx, "SELECT FROM workflow_run WHERE type = 'a.locked' FOR UPDATE")
	p := newPoller(pool, "a.")
	leases, _, err := p.Acquire(t.Context(), 10, 1)
	if got := types(leases); err != nil || !slices.Equal(got, []string{"a.x"}) {
		t.Errorf("leased %v, %v, want a.x", got, err)
	}
}

// A suspect counts against the room of its group.
func TestSuspectsInRoom(t *testing.T) {
	pool := pgtest.New(t)
	suspect(t, pool, "a.x", 9)
	add(t, pool, "a.x", 8, time.Minute)
	suspect(t, pool, "a.y", 7)
	l := &limited{groups: map[string]string{"a.x": "g"}, room: map[string]int{"g": 1}}
	p := newPoller(pool, "a.")
	p.Terms = l.terms
	if got := names(acquire(t, p, 10)); !slices.Equal(got, []string{"a.x 9", "a.y 7"}) {
		t.Errorf("leased %v, want a.x 9 and a.y 7", got)
	}
}
