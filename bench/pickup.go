package main

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"time"
)

const (
	wakeUpVariant   = "wake-up"
	pollingVariant  = "polling every 100 ms"
	pollingShipped  = "polling as shipped"
	riverDefault    = "default fetch"
	riverTuned      = "tuned fetch"
	noLocalQueue    = "no local queue"
	pollInterval    = 100 * time.Millisecond
	transactionsKey = "transactions a minute"
)

// A waiting row is an idle worker, and how runs reach it.
type waiting struct {
	engine  engine
	variant string
	task    task
	alter   string
	pickUps int
	every   time.Duration // between two runs: at least this, at most twice this
}

// pickUp measures the time from the commit of an insert to the start of its handler while nothing else happens, and
// the cost of a worker that has nothing to do.
func pickUp(ctx context.Context, b *bench) error {
	frequent, rare := 60*time.Millisecond, 3*pollInterval
	ways := []waiting{
		{ours{}, wakeUpVariant, task{}, "", b.sizes.pickUps, frequent},
		{ours{}, pollingVariant, task{NoWakeUp: true, Poll: int(pollInterval.Milliseconds())}, "workflow.wakeup = off", b.sizes.rarePickUp, rare},
		{ours{}, pollingShipped, task{NoWakeUp: true}, "workflow.wakeup = off", 0, 0},
		{riverQueue{}, riverDefault, task{Default: true}, "", b.sizes.pickUps, frequent},
		{riverQueue{}, riverTuned, task{}, "", b.sizes.pickUps, frequent},
		{graphile{}, noLocalQueue, task{Idle: true}, "", b.sizes.pickUps, frequent},
	}
	for rep := range b.sizes.reps {
		for _, w := range ways {
			if !b.has(w.engine) || w.pickUps == 0 && rep > 0 { // its idle cost is known
				continue
			}
			s := sample{Engine: w.engine.name(), Variant: w.variant, Rep: rep + 1, Runs: w.pickUps, More: map[string]float64{}}
			err := b.onFresh(ctx, w.engine, func(db *database) error { return b.pickUpOnce(ctx, db, w, &s) })
			if err != nil {
				return fmt.Errorf("%s, %s: %w", w.engine.name(), w.variant, err)
			}
			b.record(s)
		}
	}
	return nil
}

func (b *bench) pickUpOnce(ctx context.Context, db *database, w waiting, s *sample) error {
	if w.alter != "" {
		if err := db.set(ctx, w.alter); err != nil {
			return err
		}
	}
	if err := db.rest(ctx); err != nil {
		return err
	}
	w.task.Do, w.task.URL = "work", db.url
	ps, err := start(w.engine, w.task, 1)
	if err != nil {
		return err
	}
	ps.say("go")
	err = func() error {
		if err := pause(ctx, b.sizes.warmUp); err != nil {
			return err
		}
		if s.Rep == 1 {
			n, err := b.idleTransactions(ctx, db)
			if err != nil {
				return err
			}
			s.More[transactionsKey] = n
		}
		return b.deliver(ctx, db, w, ps, s)
	}()
	return errors.Join(err, ps.stop())
}

// idleTransactions counts the transactions of all sessions of the database during a period, including autovacuum.
func (b *bench) idleTransactions(ctx context.Context, db *database) (perMinute float64, err error) {
	count := func() (n float64, err error) {
		err = b.server.pool.QueryRow(ctx, `SELECT xact_commit + xact_rollback FROM pg_stat_database WHERE datname = $1`, db.name).Scan(&n)
		return n, err
	}
	db.Reset() // our own sessions report their transactions only when they end
	before, err := count()
	if err != nil {
		return 0, err
	}
	if err := pause(ctx, b.sizes.idle); err != nil {
		return 0, err
	}
	after, err := count()
	return (after - before) / b.sizes.idle.Minutes(), err
}

// deliver stores runs one at a time and records how long each waits, in milliseconds.
func (b *bench) deliver(ctx context.Context, db *database, w waiting, ps processes, s *sample) error {
	p, err := w.engine.producer(w.task, db.Pool)
	if err != nil {
		return err
	}
	from, err := b.server.read(ctx, ps)
	if err != nil {
		return err
	}
	committed := make([]int64, w.pickUps)
	for i := range committed {
		if err := pause(ctx, w.every+rand.N(w.every)); err != nil {
			return err
		}
		if err := p.one(ctx, marked(i)); err != nil {
			return err
		}
		committed[i] = clock()
	}
	for i, at := range committed {
		seen, err := awaitSeen(ctx, ps, marked(i), 10*time.Second)
		if err != nil {
			return err
		}
		s.Series = append(s.Series, max(0, float64(seen-at)/1e6))
	}
	to, err := b.server.read(ctx, ps)
	s.costs(from, to, max(w.pickUps, 1))
	s.More["p50 ms"], s.More["p99 ms"] = percentile(s.Series, 0.50), percentile(s.Series, 0.99)
	return err
}

// marked is the payload of the ith run whose time must be reported.
func marked(i int) int { return -2 - i }

// awaitSeen returns when the run with payload n was seen.
func awaitSeen(ctx context.Context, ps processes, n int, patience time.Duration) (int64, error) {
	for limit := time.Now().Add(patience); ; {
		if at := ps.seenAt(n); at > 0 {
			return at, nil
		}
		if time.Now().After(limit) {
			return 0, fmt.Errorf("run %d was not seen for %v", n, patience)
		}
		if err := errors.Join(ps.alive(), pause(ctx, 5*time.Millisecond)); err != nil {
			return 0, err
		}
	}
}

// pause waits for d, or returns why ctx has ended.
func pause(ctx context.Context, d time.Duration) error {
	select {
	case <-ctx.Done():
		return ctx.Err()
	case <-time.After(d):
		return nil
	}
}
