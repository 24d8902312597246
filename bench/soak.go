package main

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"time"
)

const (
	peakVariant = "peak"
	soakShare   = 0.7
	soakKeep    = 60 // seconds for which finished runs are kept
	soakStep    = 20 * time.Millisecond
	tableKey    = "table MiB"
	indexKey    = "indexes MiB"
	delayKey    = "p99 ms"
	soakMinutes = "minute"
)

// soak feeds one worker at a share of its capacity, for a long time, with cleanup.
func soak(ctx context.Context, b *bench) error {
	peak, err := b.findPeak(ctx)
	if err != nil {
		return err
	}
	return b.onFresh(ctx, ours{}, func(db *database) error {
		if err := db.rest(ctx); err != nil {
			return err
		}
		ps, err := start(ours{}, task{Do: "work", URL: db.url, Keep: soakKeep}, 1)
		if err != nil {
			return err
		}
		ps.say("go")
		return errors.Join(b.soakAt(ctx, db, ps, soakShare*peak), ps.stop())
	})
}

// findPeak returns how many runs per second one worker handles while they are enqueued as fast.
func (b *bench) findPeak(ctx context.Context) (peak float64, err error) {
	s := sample{Engine: ours{}.name(), Variant: peakVariant, Rep: 1}
	err = b.onFresh(ctx, ours{}, func(db *database) error {
		if err := db.rest(ctx); err != nil {
			return err
		}
		ps, err := start(ours{}, task{Do: "work", URL: db.url}, 1)
		if err != nil {
			return err
		}
		from, err := b.server.read(ctx, ps)
		if err != nil {
			return errors.Join(err, ps.stop())
		}
		ps.say("go")
		f := startFeed(ctx, oursProducer{pool: db.Pool, typ: noop}, ps)
		s.Series, err = perSecond(ctx, ps, b.sizes.peak)
		to, readErr := b.server.read(ctx, ps)
		handled, _ := ps.handled()
		_, feedErr := f.stop()
		s.Runs = int(handled)
		s.costs(from, to, max(s.Runs, 1))
		s.Rate = float64(s.Runs) / s.Seconds
		return errors.Join(err, readErr, feedErr, ps.stop())
	})
	if err == nil {
		b.record(s)
	}
	return s.Rate, err
}

// A drip stores runs at an even rate. The first of each batch is marked, and the time of its commit is kept.
type drip struct {
	mu        sync.Mutex
	made      int
	committed map[int]int64 // times, by payload
}

func (d *drip) run(ctx context.Context, p producer, perSecond float64) error {
	begin := time.Now()
	for ctx.Err() == nil {
		if err := pause(ctx, soakStep); err != nil {
			return nil //nolint:nilerr // it was told to end
		}
		due := int(time.Since(begin).Seconds()*perSecond) - d.made
		ns := make([]int, min(max(due, 0), 10*feedBatch))
		if len(ns) == 0 {
			continue
		}
		for i := range ns {
			ns[i] = d.made + i + 1
		}
		mark := marked(d.made)
		ns[0] = mark
		if err := p.many(context.WithoutCancel(ctx), ns); err != nil {
			return err
		}
		d.mu.Lock()
		d.made += len(ns)
		d.committed[mark] = clock()
		d.mu.Unlock()
	}
	return nil
}

// delays returns how long the marked runs waited that were seen since the last call, in milliseconds.
func (d *drip) delays(ps processes) (all []float64) {
	d.mu.Lock()
	defer d.mu.Unlock()
	for n, at := range d.committed {
		if seen := ps.seenAt(n); seen > 0 {
			all = append(all, max(0, float64(seen-at)/1e6))
			delete(d.committed, n)
		}
	}
	return all
}

func (b *bench) soakAt(ctx context.Context, db *database, ps processes, perSecond float64) error {
	dripping, stop := context.WithCancel(ctx)
	defer stop()
	d := &drip{committed: map[int]int64{}}
	ended := make(chan error, 1)
	go func() { ended <- d.run(dripping, oursProducer{pool: db.Pool, typ: noop}, perSecond) }()

	err := b.watchSoak(ctx, db, ps, d)
	stop()
	if err := errors.Join(err, <-ended); err != nil {
		return err
	}
	return b.awaitSoaked(ctx, db, ps, d.made)
}

// watchSoak records a sample per minute, or three in all if there is less time.
func (b *bench) watchSoak(ctx context.Context, db *database, ps processes, d *drip) error {
	every := min(time.Minute, b.sizes.soak/3)
	from, err := b.server.read(ctx, ps)
	if err != nil {
		return err
	}
	_, before := ps.handled()
	for i := range int(b.sizes.soak / every) {
		if err := errors.Join(pause(ctx, every), ps.alive()); err != nil {
			return err
		}
		to, err := b.server.read(ctx, ps)
		if err != nil {
			return err
		}
		_, handled := ps.handled()
		s := sample{Engine: ours{}.name(), Variant: soakMinutes, Rep: i + 1, Runs: int(handled - before)}
		s.costs(from, to, max(s.Runs, 1))
		s.Rate = float64(s.Runs) / s.Seconds
		if s.More, err = sizesOf(ctx, db); err != nil {
			return err
		}
		s.More[delayKey] = percentile(d.delays(ps), 0.99)
		b.record(s)
		from, before = to, handled
	}
	return nil
}

// sizesOf returns the total sizes of all tables and of their indexes.
func sizesOf(ctx context.Context, db *database) (map[string]float64, error) {
	var table, indexes float64
	err := db.QueryRow(ctx, `
		SELECT sum(pg_table_size(oid)) / 1048576.0, sum(pg_indexes_size(oid)) / 1048576.0
		FROM pg_class WHERE relkind = 'r' AND relnamespace = 'public'::regnamespace`).Scan(&table, &indexes)
	return map[string]float64{tableKey: table, indexKey: indexes}, err
}

// awaitSoaked waits until every stored run is handled and settled. Cleanup may have removed it already.
func (b *bench) awaitSoaked(ctx context.Context, db *database, ps processes, made int) error {
	for begin := time.Now(); ; {
		_, handled := ps.handled()
		var open int
		err := db.QueryRow(ctx, `SELECT count(*) FROM workflow_run WHERE type = $1 AND status <> 'succeeded'`, noop).Scan(&open)
		if err != nil || handled >= int64(made) && open == 0 {
			return err
		}
		if time.Since(begin) > time.Minute {
			return fmt.Errorf("%d of %d runs were handled, %d are not settled", handled, made, open)
		}
		if err := pause(ctx, 100*time.Millisecond); err != nil {
			return err
		}
	}
}
