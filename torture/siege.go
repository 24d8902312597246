package main

import (
	"context"
	"errors"
	"fmt"
	"math"
	"math/rand/v2"
	"slices"
	"sync"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
)

// A siege is one run: the workload, the strikes, and the calm after it.
type siege struct {
	lab     *lab
	load    *load
	drained time.Duration // how long the drain took

	mu     sync.Mutex
	past   int            // strikes so far
	struck map[string]int // strikes that hit somebody, by fault
	errs   []error        // errors of injectors
}

func (s *siege) run(ctx context.Context) error {
	p := s.lab.plan
	working, stopWork := context.WithCancel(ctx)
	defer stopWork()
	s.load.gentle.Store(p.Gentle)
	ended := make(chan struct{})
	go func() { defer close(ended); s.load.run(working) }()

	start := time.Now()
	watched := s.watch(working)
	defer watched.Wait()
	defer stopWork()
	report := s.progress(ctx, start)
	defer report()
	sleep(ctx, p.Warm)
	pills := p.random("pills")
	for range p.Pills {
		s.load.enqueueOne(ctx, drawCase(pills, findCase("exit"), world{}, p.Hold))
	}
	s.strikeAll(ctx, p.Strikes, p.Chaos)
	s.pacify(ctx)
	s.strikeAgain(ctx)
	if len(p.Singles) > 0 {
		s.load.gentle.Store(true)
		s.recover(ctx)
		s.lab.ledger.add(entry{Kind: "singles"})
		s.strikeAll(ctx, p.Singles, p.Single)
	}
	sleep(ctx, p.Calm)
	stopWork()
	<-ended
	if ctx.Err() != nil {
		return ctx.Err()
	}
	return s.drain(ctx)
}

// strikeAll executes a schedule of the given length. Strikes at the server wait for each other.
func (s *siege) strikeAll(ctx context.Context, schedule []strike, long time.Duration) {
	start := time.Now()
	var all sync.WaitGroup
	for _, next := range schedule {
		sleep(ctx, next.At-time.Since(start))
		if ctx.Err() != nil {
			break
		}
		all.Go(func() {
			s.strike(ctx, next)
			s.mu.Lock()
			defer s.mu.Unlock()
			s.past++
		})
	}
	sleep(ctx, long-time.Since(start))
	all.Wait()
}

// strikeAgain repeats each fault that has hit nobody so far until it hits, at most five times: among others there may
// have been nobody to hit.
func (s *siege) strikeAgain(ctx context.Context) {
	for _, f := range faults {
		k := slices.IndexFunc(s.lab.plan.Strikes, func(planned strike) bool { return planned.Fault == f.key })
		for try := uint64(1); k >= 0 && try <= 5 && s.struck[f.key] == 0 && ctx.Err() == nil; try++ {
			s.strike(ctx, strike{Fault: f.key, Seed: s.lab.plan.Strikes[k].Seed + try})
		}
	}
}

// strike strikes once, and records in the ledger whom it has hit.
func (s *siege) strike(ctx context.Context, next strike) {
	f := findFault(next.Fault)
	if f.server {
		s.lab.strikes.Lock()
		defer s.lab.strikes.Unlock()
	}
	e := entry{Kind: "strike", At: time.Now(), Fault: f.key}
	whom, err := f.strike(ctx, s.lab, rand.New(rand.NewPCG(next.Seed, 1)))
	end := time.Now()
	e.Until, e.Worker = &end, whom
	s.lab.ledger.add(e)
	s.mu.Lock()
	defer s.mu.Unlock()
	if whom != noOne {
		s.struck[f.key]++
	}
	if err != nil && ctx.Err() == nil {
		s.errs = append(s.errs, fmt.Errorf("%s: %w", f.name, err))
	}
}

// pacify ends everything that a fault may have left.
func (s *siege) pacify(ctx context.Context) {
	for _, k := range append(s.lab.links, s.lab.front) {
		k.heal()
	}
	s.lab.events.mood.Store(&fine)
	if err := s.lab.calm(ctx, `DELETE FROM t.storm`); err != nil {
		s.errs = append(s.errs, err)
	}
}

// recover waits until no run is left that was in flight when a process died, and the queue is short, or for two
// minutes: what follows is meant to measure one strike, and not those before it. Runs that ignore the end of their
// context do not count, because they also lose their leases in calm conditions.
func (s *siege) recover(ctx context.Context) {
	for start := time.Now(); time.Since(start) < 2*time.Minute && ctx.Err() == nil; sleep(ctx, time.Second) {
		var left int
		err := s.lab.admin.QueryRow(ctx, `
			SELECT count(*) FILTER (WHERE suspect AND held_at IS NULL AND type <> 'chaos.ignorecancel' OR status = 'leased' AND lease_until < now() OR type IN ('chaos.exit', 'chaos.gopanic', 'chaos.leak'))
			     + greatest(0, count(*) FILTER (WHERE status = 'pending' AND held_at IS NULL AND run_at < now() - interval '2 s') - $1)
			FROM workflow_run
			WHERE status IN ('pending', 'leased') AND deleted_at IS NULL AND payload->'unleasable' IS NULL`, shortQueue).Scan(&left)
		if err == nil && left == 0 {
			return
		}
	}
}

// drain waits until everything that can end has ended, as long as the amount decreases. What is left then is for the
// verdict.
func (s *siege) drain(ctx context.Context) error {
	start := time.Now()
	least, fell := math.MaxInt, start
	for ; time.Since(fell) < s.lab.plan.Drain && time.Since(start) < 5*s.lab.plan.Drain; sleep(ctx, 200*time.Millisecond) {
		if _, err := s.lab.admin.Exec(ctx, `
			WITH resumed AS MATERIALIZED (SELECT process_resume(id) FROM process_instance WHERE paused_at IS NOT NULL AND completed_at IS NULL)
			SELECT count(*) FROM resumed`); err != nil {
			if deadlock := (*pgconn.PgError)(nil); errors.As(err, &deadlock) && deadlock.Code == "40P01" {
				continue // each call locks in order of id, but several calls together do not
			}
			return fmt.Errorf("resume what is paused: %w", err)
		}
		if _, err := s.lab.admin.Exec(ctx, `UPDATE workflow_run SET held_at = NULL WHERE held_at IS NOT NULL`); err != nil {
			return fmt.Errorf("resume what is held: %w", err)
		}
		s.load.serve(ctx)
		s.load.running.Wait()
		var open int
		if err := s.lab.admin.QueryRow(ctx, `
			SELECT (SELECT count(*) FROM workflow_run WHERE status IN ('pending', 'leased') AND deleted_at IS NULL AND payload->'unleasable' IS NULL AND type <> 'default.cleanup.v1')
			     + (SELECT count(*) FROM process_instance WHERE completed_at IS NULL)
			     + (SELECT count(*) FROM outbox_event e WHERE published_at IS NULL AND parked_at IS NULL
			        AND NOT EXISTS (SELECT FROM outbox_delivery d WHERE d.event_id = e.id AND d.parked_at IS NOT NULL))`).Scan(&open); err != nil {
			return fmt.Errorf("count what is open: %w", err)
		}
		if open == 0 {
			break
		}
		if open < least {
			least, fell = open, time.Now()
		}
	}
	s.drained = since(start)
	return ctx.Err()
}

// watch checks regularly, each time in one snapshot, for instances in a state that must never exist. The drain might
// repair them, or end them.
func (s *siege) watch(ctx context.Context) *sync.WaitGroup {
	var all sync.WaitGroup
	text, err := scripts.ReadFile("watch.sql")
	if err != nil {
		panic(err) // the file is embedded
	}
	all.Go(func() {
		for sleep(ctx, 3*time.Second); ctx.Err() == nil; sleep(ctx, 3*time.Second) {
			rows, _ := s.lab.admin.Query(ctx, string(text))
			var what string
			var id uuid.UUID
			// While the server is down, there is nothing to see.
			_, _ = pgx.ForEachRow(rows, []any{&what, &id}, func() error {
				s.lab.ledger.add(entry{Kind: "odd", Run: id.String(), Text: what})
				return nil
			})
		}
	})
	return &all
}

// progress prints a line regularly until the returned function is called.
func (s *siege) progress(ctx context.Context, start time.Time) (stop func()) {
	if s.lab.plan.Name == "mutant" {
		return func() {} // there are many mutants
	}
	ctx, stop = context.WithCancel(ctx)
	every := min(15*time.Second, (s.lab.plan.Chaos+s.lab.plan.Single)/5)
	go func() {
		for sleep(ctx, every); ctx.Err() == nil; sleep(ctx, every) {
			s.mu.Lock()
			n := s.past
			s.mu.Unlock()
			fmt.Printf("%7s  %6d runs acknowledged  %4d of %d strikes\n", since(start), s.load.enqueued.Load(), n, len(s.lab.plan.Strikes)+len(s.lab.plan.Singles))
		}
	}()
	return stop
}
