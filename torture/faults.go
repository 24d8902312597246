package main

import (
	"context"
	"fmt"
	"math/rand/v2"
	"os"
	"os/exec"
	"slices"
	"sync"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/simple-workflow/simple-workflow/internal/pgserver"
)

// A fault is one way to disturb the system; strike does it once. Faults of the server come one at a time. strike
// returns whom it has hit: everyone, one worker or the clients, or runs by their ids; noOne if there was nobody to hit.
type fault struct {
	key, name   string
	server      bool
	long, short int // number of strikes in ten minutes, and in the short run
	strike      func(ctx context.Context, l *lab, r *rand.Rand) (whom string, err error)
}

// faults are all faults. Faults that need root or another kernel (a full disk, clocks that jump) are left out.
var faults []fault

func init() { // in init, because the schedule refers to the faults, and they to the lab
	faults = []fault{
		{"kill", "worker killed", false, 60, 7, killWorker},
		{"kill-ahead", "worker killed while it holds leases ahead", false, 8, 2, killAhead},
		{"freeze", "worker frozen beyond its lease", false, 54, 6, freezeWorker},
		{"stop", "worker told to stop, one in five twice", false, 24, 5, stopWorker},
		{"memory", "worker out of memory", false, 3, 0, starveMemory},
		{"cpu", "processors busy with something else", false, 3, 0, starveCPU},
		{"network", "network slow, narrow, cut or silent", false, 66, 8, poisonNetwork},
		{"silence", "worker cut off beyond its lease", false, 6, 1, silence},
		{"answer-lost", "commit done, answer lost", false, 70, 14, cutAnswer},
		{"never-sent", "commit never sent", false, 36, 8, cutCommit},
		{"sessions", "sessions ended", false, 90, 10, endSessions},
		{"deadlock", "rows locked in the wrong order", false, 20, 3, deadlock},
		{"rows", "leased rows locked for longer than a lease", false, 12, 2, lockRows},
		{"snapshot", "old snapshot held", false, 1, 0, oldSnapshot},
		{"server-kill", "server killed", true, 5, 1, restart(func(s *pgserver.Server) { s.Kill() })},
		{"server-crash", "server stopped at once", true, 3, 1, restart(func(s *pgserver.Server) { s.StopMode(pgserver.Immediate) })},
		{"server-stop", "server stopped in order", true, 2, 0, restart(func(s *pgserver.Server) { s.StopMode(pgserver.Fast) })},
		{"storm", "statements fail by chance", true, 14, 4, storm},
		{"table", "table locked", true, 10, 2, lockTable},
		{"timeout", "statement_timeout of 50 ms", true, 6, 1, shortTimeout},
		{"famine", "one connection for all workers", true, 4, 1, connectionFamine},
		{"read-only", "server read-only", true, 3, 1, readOnly},
		{"dispatcher-kill", "dispatcher killed, or one in four told to stop", false, 20, 3, killDispatcher},
		{"dispatcher-freeze", "dispatcher frozen beyond its claim", false, 10, 1, freezeDispatcher},
		{"sink", "consumer of events that errs, stalls or hangs up", false, 26, 3, upset},
		{"outage", "world outside away", false, 12, 2, outage},
		{"sink-moody", "consumer that takes every other event", false, 4, 1, moody},
		{"unleasable", "rows that cannot be leased, at the head of a lane", false, 15, 5, spoil},
		{"unmarkable", "events that cannot be marked", false, 15, 3, spoilEvents},
		{"events", "events locked for longer than a claim", false, 12, 2, lockEvents},
		{"forge", "start forged in the name of a token", false, 15, 3, forge},
		{"failover", "primary lost, standby promoted", true, 0, 0, failOver},
	}
}

// needs names the relation that a fault requires, by the key of the fault. If the version under test does not have the
// relation, it does not have the feature that the fault tests, and the fault never strikes.
var needs = map[string]string{"unleasable": "workflow_set_aside", "unmarkable": "outbox_aggregate", "events": "outbox_aggregate", "forge": "outbox_aggregate"}

// Values for whom a strike has hit.
const (
	everyone = "all"
	noOne    = ""
	nobody   = "nobody in particular"
)

func findFault(key string) fault {
	for _, f := range faults {
		if f.key == key {
			return f
		}
	}
	panic("no fault " + key)
}

// anySlot returns one of the workers' slots.
func (l *lab) anySlot(r *rand.Rand) *slot { return l.slots[r.IntN(len(l.slots))] }

// mortal returns one of the slots except the first, whose process is meant to grow old.
func (l *lab) mortal(r *rand.Rand) *slot { return l.slots[1+r.IntN(len(l.slots)-1)] }

func (l *lab) anyLink(r *rand.Rand) *link {
	all := append([]*link{l.front}, l.links...)
	return all[r.IntN(len(all))]
}

// hit returns name if ok, and otherwise noOne.
func hit(name string, ok bool) string {
	if ok {
		return name
	}
	return noOne
}

func killWorker(_ context.Context, l *lab, r *rand.Rand) (string, error) {
	s := l.mortal(r)
	return hit(s.name, s.kill()), nil
}

// killAhead makes many short runs due at the same moment, and kills a worker that holds leases ahead whose handlers may not
// begin yet. It stops the worker first, looks whether it still holds some, and lets it go on if not. Half of the runs are at
// their last attempt.
func killAhead(ctx context.Context, l *lab, r *rand.Rand) (string, error) {
	due := time.Now().Add(3 * time.Second)
	var all sync.WaitGroup
	defer all.Wait() // each run gets into the ledger
	for i := range 640 {
		o := drawCase(r, findCase("effect"), world{}, 1)
		o.copies, o.key, o.due = 1, "", due
		if i%2 == 0 {
			o.maxAttempts = 1
		}
		all.Go(func() { (&load{lab: l}).enqueueOne(ctx, o) })
	}
	holders := func() []string { // none if the server is down
		ctx, done := context.WithTimeout(ctx, leaseLength/4)
		defer done()
		rows, _ := l.admin.Query(ctx, `
			SELECT split_part(r.leased_by, '-', 1)
			FROM workflow_run r
			WHERE r.status = 'leased' AND get_byte(uuid_send(r.lease_token), 6) >> 4 = 8 AND NOT EXISTS (SELECT FROM workflow_begun b WHERE b.token = r.lease_token)
			GROUP BY 1`)
		names, _ := pgx.CollectRows(rows, pgx.RowTo[string])
		return names
	}
	sleep(ctx, time.Until(due))
	for ; time.Since(due) < 2*time.Second && ctx.Err() == nil; sleep(ctx, 2*time.Millisecond) {
		most := holders()
		i := slices.IndexFunc(l.slots[1:], func(s *slot) bool { return slices.Contains(most, s.name) })
		if i < 0 {
			continue
		}
		s, killed := l.slots[1+i], false
		s.hold(func() {
			sleep(ctx, 20*time.Millisecond) // for what it has sent
			killed = slices.Contains(holders(), s.name) && s.kill()
		})
		if killed {
			return s.name, nil
		}
	}
	return noOne, nil
}

func freezeWorker(_ context.Context, l *lab, r *rand.Rand) (string, error) {
	longest := time.Duration(float64(4*leaseLength) * max(l.plan.Hold, 0.5))
	s := l.anySlot(r)
	return hit(s.name, s.freeze(between(r, leaseLength*12/10, longest))), nil
}

func stopWorker(ctx context.Context, l *lab, r *rand.Rand) (string, error) {
	s, twice := l.mortal(r), r.IntN(5) == 0
	ok := s.terminate()
	if twice {
		sleep(ctx, 2*time.Second)
		s.terminate()
	}
	return hit(s.name, ok), nil
}

// silence drops everything that a worker sends for longer than its leases last, so that it reports too late what its
// handlers have done by then.
func silence(ctx context.Context, l *lab, r *rand.Rand) (string, error) {
	k := l.links[r.IntN(len(l.links))]
	return k.name, k.poison(ctx, "timeout", "upstream", map[string]int{"timeout": 0}, between(r, leaseLength*13/10, leaseLength*25/10))
}

// starveMemory restarts a worker with little memory, and gives each worker in turn runs that use all of it. The
// others have enough.
func starveMemory(ctx context.Context, l *lab, r *rand.Rand) (string, error) {
	s := l.mortal(r)
	s.limit(256 << 10)
	defer s.limit(0) // the next process has no limit
	ok := s.kill()
	for range 40 { // until it runs again
		sleep(ctx, 100*time.Millisecond)
		if s.pid() != 0 {
			break
		}
	}
	for range 48 {
		o := drawCase(r, kase{"leak", 0, func(_ *rand.Rand, o *order, _ world) map[string]any {
			o.typ, o.maxAttempts = "chaos.leak", 2
			return map[string]any{"mb": 100}
		}}, world{}, 1)
		(&load{lab: l}).enqueueOne(ctx, o)
		sleep(ctx, 100*time.Millisecond)
	}
	return hit(s.name, ok), nil
}

// starveCPU runs two busy loops beside everything else.
func starveCPU(ctx context.Context, l *lab, r *rand.Rand) (string, error) {
	self, err := os.Executable()
	if err != nil {
		return noOne, err
	}
	ctx, stop := context.WithTimeout(ctx, l.plan.hold(r, 15*time.Second, 20*time.Second))
	defer stop()
	loops := []*exec.Cmd{exec.Command(self, "burn"), exec.Command(self, "burn")}
	for _, cmd := range loops {
		cmd.SysProcAttr = dieWithParent()
		if err := cmd.Start(); err != nil {
			return noOne, fmt.Errorf("start a busy loop: %w", err)
		}
	}
	<-ctx.Done()
	for _, cmd := range loops {
		_ = cmd.Process.Kill()
		_ = cmd.Wait()
	}
	return everyone, nil
}

// poisonNetwork makes one link bad in one of seven ways.
func poisonNetwork(ctx context.Context, l *lab, r *rand.Rand) (string, error) {
	type poison struct {
		kind, stream string
		attributes   map[string]int
	}
	p := []poison{
		{"latency", "downstream", map[string]int{"latency": 50 + r.IntN(400), "jitter": r.IntN(350)}},
		{"latency", "upstream", map[string]int{"latency": 50 + r.IntN(400), "jitter": r.IntN(350)}},
		{"bandwidth", "upstream", map[string]int{"rate": 8}},
		{"slicer", "downstream", map[string]int{"average_size": 64, "size_variation": 32, "delay": 500}},
		{"reset_peer", "downstream", map[string]int{"timeout": r.IntN(500)}},
		{"timeout", "downstream", map[string]int{"timeout": 0}}, // answers are lost
		{"timeout", "upstream", map[string]int{"timeout": 0}},   // requests are lost
		{"limit_data", "downstream", map[string]int{"bytes": 500 + r.IntN(20_000)}},
	}[r.IntN(8)]
	k := l.anyLink(r)
	return k.name, k.poison(ctx, p.kind, p.stream, p.attributes, l.plan.hold(r, 2*time.Second, 10*time.Second))
}
