package main

import (
	"context"
	"errors"
	"fmt"
	"runtime"
	"time"

	"github.com/simple-workflow/simple-workflow/internal/shipped"
)

const (
	shortVariant  = "handlers wait 1 ms"
	middleVariant = "handlers wait 10 ms"
	longVariant   = "handlers wait 100 ms"
	fewVariant    = "handlers wait 20 ms, 2 slots"
	burnVariant   = "handlers compute for 1 ms"
	fourVariant   = "four types mixed, handlers wait 0, 1, 10 and 100 ms"
	urgentVariant = "an urgent run beside long ones"

	allowedKey  = "handlers allow"
	smallestKey = "smallest share"

	urgent         = "bench.urgent.v1"
	urgentPriority = 100
	urgentEvery    = 50 * time.Millisecond
)

// An effort is a type of run whose handlers take time.
type effort struct {
	Type   string        `json:"type"`
	Wait   time.Duration `json:"wait"`
	Spread time.Duration `json:"spread"` // the wait is longer or shorter by up to this much
	Burn   time.Duration `json:"burn"`   // of CPU
}

// waitFor returns the effort of handlers that wait.
func waitFor(d time.Duration) effort {
	return effort{Type: fmt.Sprintf("bench.wait_%d.v1", d.Milliseconds()), Wait: d}
}

// A toil is a backlog of runs of some types, in equal shares.
type toil struct {
	variant string
	efforts []effort
	slots   int     // 0: as shipped
	allowed float64 // how many runs a second the handlers allow
}

// toils are the backlogs of work.
func toils() []toil {
	const ms = time.Millisecond
	waits := func(variant string, slots int, ds ...time.Duration) toil {
		t := toil{variant: variant, slots: slots, allowed: float64(slots*len(ds)) / sumOf(ds).Seconds()}
		if slots == shipped.Concurrency {
			t.slots = 0
		}
		for _, d := range ds {
			t.efforts = append(t.efforts, waitFor(d))
		}
		return t
	}
	return []toil{
		waits(shortVariant, shipped.Concurrency, ms),
		waits(middleVariant, shipped.Concurrency, 10*ms),
		waits(longVariant, shipped.Concurrency, 100*ms),
		waits(fewVariant, 2, 20*ms),
		{burnVariant, []effort{{Type: "bench.burn.v1", Burn: ms}}, 0, float64(runtime.NumCPU()) / ms.Seconds()},
		waits(fourVariant, shipped.Concurrency, 0, ms, 10*ms, 100*ms),
	}
}

func sumOf(ds []time.Duration) (total time.Duration) {
	for _, d := range ds {
		total += d
	}
	return total
}

// realWork drains runs whose handlers take time, as those of most programs do: then it is the handlers that should set the
// pace, not the engine.
func realWork(ctx context.Context, b *bench) error {
	if !b.has(ours{}) {
		return nil
	}
	for rep := range b.sizes.reps {
		for _, t := range toils() {
			s := sample{Engine: ours{}.name(), Variant: t.variant, Rep: rep + 1, More: map[string]float64{allowedKey: t.allowed}}
			if err := b.onFresh(ctx, ours{}, func(db *database) error { return b.drainToil(ctx, db, t, &s) }); err != nil {
				return fmt.Errorf("%s: %w", t.variant, err)
			}
			b.record(s)
		}
		s := sample{Engine: ours{}.name(), Variant: urgentVariant, Rep: rep + 1, More: map[string]float64{}}
		if err := b.onFresh(ctx, ours{}, func(db *database) error { return b.besideLong(ctx, db, &s) }); err != nil {
			return fmt.Errorf("%s: %w", urgentVariant, err)
		}
		b.record(s)
	}
	return nil
}

// drainToil drains as many runs as the handlers allow in a while.
func (b *bench) drainToil(ctx context.Context, db *database, t toil, s *sample) error {
	round := len(t.efforts) * max(t.slots, 1)
	s.Runs = max(min(int(t.allowed*b.sizes.toil.Seconds()), b.sizes.drain)/round, 1) * round
	if err := loadEfforts(ctx, db, s.Runs, t.efforts...); err != nil {
		return err
	}
	way := drained{engine: ours{}, task: task{Do: "work", Efforts: t.efforts, Slots: t.slots}, processes: 1}
	if err := b.drainLoaded(ctx, db, way, s); err != nil || len(t.efforts) == 1 {
		return err
	}
	smallest, err := smallestShare(ctx, db)
	s.More[smallestKey] = smallest
	return err
}

// loadEfforts stores runs of types in turn, due one after the other, as programs enqueue them.
func loadEfforts(ctx context.Context, db *database, n int, efforts ...effort) error {
	types := make([]string, len(efforts))
	for i, e := range efforts {
		types[i] = e.Type
	}
	_, err := db.Exec(ctx, `
		INSERT INTO workflow_run (type, run_at, payload)
		SELECT ($2::text[])[1 + g % cardinality($2)], now() - interval '1 hour' + g * interval '1 millisecond', jsonb_build_object('n', g)
		FROM generate_series(1, $1::int) g`, n, types)
	return errors.Join(err, db.rest(ctx))
}

// smallestShare returns how many runs of the type that got the least were leased in the first half of the time, as a
// share of half of its runs. It is 1 if all types got their share all the time, and 0 if one of them was left until the
// others were empty. A type that is ahead of the others does not lower it, unless the others fall behind.
func smallestShare(ctx context.Context, db *database) (share float64, err error) {
	err = db.QueryRow(ctx, `
		WITH half AS (SELECT min(started_at) + (max(finished_at) - min(started_at)) / 2 AS at FROM workflow_run),
		     type AS (SELECT count(*) FILTER (WHERE started_at <= half.at) / (count(*) / 2.0) AS share FROM workflow_run, half GROUP BY type)
		SELECT min(share)::float8 FROM type`).Scan(&share)
	return share, err
}

// besideLong keeps all slots busy with long handlers, and stores an urgent run of a quick type every now and then. It
// records how long each of these waits, in milliseconds. The long handlers take 100 ms on average, and not all the same
// time: otherwise all slots become free at once, ten times a second.
func (b *bench) besideLong(ctx context.Context, db *database, s *sample) error {
	long := waitFor(100 * time.Millisecond)
	long.Spread = long.Wait / 2
	allowed := shipped.Concurrency / long.Wait.Seconds()
	warm, counted := int(b.sizes.warmUp/urgentEvery), int(b.sizes.urgent/urgentEvery)
	if err := loadEfforts(ctx, db, int(allowed*(b.sizes.warmUp+b.sizes.urgent+5*time.Second).Seconds()), long); err != nil {
		return err
	}
	t := task{Do: "work", URL: db.url, Efforts: []effort{long, {Type: urgent}}}
	ps, err := start(ours{}, t, 1)
	if err != nil {
		return err
	}
	err = func() error {
		b.calm()
		ps.say("go")
		begin := time.Now()
		if _, err := storeUrgent(ctx, db, begin, 0, warm); err != nil {
			return err
		}
		from, err := b.server.read(ctx, ps)
		if err != nil {
			return err
		}
		before, _ := ps.handled()
		committed, err := storeUrgent(ctx, db, begin, warm, warm+counted)
		if err != nil {
			return err
		}
		to, err := b.server.read(ctx, ps)
		if err != nil {
			return err
		}
		after, _ := ps.handled()
		s.Runs = int(after - before)
		s.costs(from, to, max(s.Runs, 1))
		s.Rate, s.More[allowedKey] = float64(s.Runs)/s.Seconds, allowed
		for i, at := range committed {
			seen, err := awaitSeen(ctx, ps, marked(warm+i), 10*time.Second)
			if err != nil {
				return err
			}
			s.Series = append(s.Series, max(0, float64(seen-at)/1e6))
		}
		return stillDue(ctx, db)
	}()
	if err := errors.Join(err, ps.stop()); err != nil {
		return err
	}
	s.More["p50 ms"], s.More["p99 ms"] = percentile(s.Series, 0.50), percentile(s.Series, 0.99)
	return nil
}

// storeUrgent stores the urgent runs with the numbers from first to last-1, at an even rate since begin, and returns
// when each was committed.
func storeUrgent(ctx context.Context, db *database, begin time.Time, first, last int) (committed []int64, err error) {
	p := oursProducer{pool: db.Pool, typ: urgent, priority: urgentPriority}
	for i := first; i < last; i++ {
		if err := pause(ctx, time.Until(begin.Add(time.Duration(i)*urgentEvery))); err != nil {
			return nil, err
		}
		if err := p.one(ctx, marked(i)); err != nil {
			return nil, err
		}
		committed = append(committed, clock())
	}
	return committed, nil
}

// stillDue returns an error if no run waits: then the slots were not busy all the time.
func stillDue(ctx context.Context, db *database) error {
	var due bool
	err := db.QueryRow(ctx, `SELECT EXISTS (SELECT FROM workflow_run WHERE status = 'pending')`).Scan(&due)
	if err == nil && !due {
		err = errors.New("the backlog of long runs came to its end")
	}
	return err
}
