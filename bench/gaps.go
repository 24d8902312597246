package main

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/simple-workflow/simple-workflow/graph"
)

const (
	evenVariant  = "5 steps in a row, 2,900 steps/s"
	aloneVariant = "1 instance alone, 10 steps in a row"

	evenRate   = 580 // instances per second
	aloneSteps = 10
	alonePause = 50 * time.Millisecond // between two instances: at least this, at most twice this
)

// gaps are the columns with the time between two steps, in milliseconds: from the return of the handler, which is the
// engine's whole overhead, and from the recorded time of the settle.
var gaps = []struct{ from, column string }{{"return", "whole"}, {"settle", "settled"}}

var gapShares = []struct {
	name  string
	share float64
}{{"p50", 0.50}, {"p95", 0.95}, {"p99", 0.99}}

func gapKey(from, name string) string { return name + " ms from " + from }

// betweenSteps measures the time that the engine adds between two steps: at a fixed rate, and while nothing else
// happens. The rate is fixed, so that two versions of the engine are compared under the same load.
func (b *bench) betweenSteps(ctx context.Context) error {
	for rep := range b.sizes.reps {
		for _, w := range []struct {
			variant string
			steps   int
			feed    func(ctx context.Context, db *database, ps processes, process string) (fed int, since time.Time, err error)
		}{{evenVariant, sequenceSteps, b.feedEvenly}, {aloneVariant, aloneSteps, b.feedAlone}} {
			s := sample{Engine: ours{}.name(), Variant: w.variant, Rep: rep + 1, More: map[string]float64{}}
			err := b.onFresh(ctx, ours{}, func(db *database) error {
				d := inARow(clocked, w.steps)
				if _, err := graph.Deploy(ctx, db.Pool, d); err != nil {
					return err
				}
				if err := db.rest(ctx); err != nil {
					return err
				}
				fed, since := 0, time.Time{}
				t := task{Do: "work", URL: db.url, Graph: true}
				err := b.timed(ctx, ours{}, t, 1, &s, func(ps processes) (_ int, err error) {
					if fed, since, err = w.feed(ctx, db, ps, d.Process); err != nil {
						return 0, err
					}
					s.Runs = fed * w.steps
					return s.Runs, awaitDrained(ctx, db, ours{}, ps, int64(s.Runs))
				})
				if err != nil {
					return err
				}
				if err := allAre(ctx, db, "COMPLETED", fed, s.Runs); err != nil {
					return err
				}
				return noteGaps(ctx, db, since, &s)
			})
			if w.variant == aloneVariant {
				s.Rate = 0 // it includes pauses
			}
			if err != nil {
				return fmt.Errorf("%s: %w", w.variant, err)
			}
			b.record(s)
		}
	}
	return nil
}

// feedEvenly starts instances a hundred times a second. Late ones are not left out. The first second is for warming up;
// since is its end.
func (b *bench) feedEvenly(ctx context.Context, db *database, _ processes, process string) (fed int, since time.Time, err error) {
	tick := time.NewTicker(10 * time.Millisecond)
	defer tick.Stop()
	begin := time.Now()
	for time.Since(begin) < b.sizes.even {
		if due := int(time.Since(begin).Seconds()*evenRate) + 1 - fed; due > 0 {
			if err := insertStarts(ctx, db, process, fed, due); err != nil {
				return fed, since, err
			}
			fed += due
		}
		select {
		case <-ctx.Done():
			return fed, since, ctx.Err()
		case <-tick.C:
		}
	}
	return fed, begin.Add(time.Second), nil
}

// feedAlone starts instances one at a time, each when the previous one is over. The first one is for warming up; since
// is its end.
func (b *bench) feedAlone(ctx context.Context, db *database, ps processes, process string) (fed int, since time.Time, err error) {
	if err := pause(ctx, b.sizes.warmUp); err != nil {
		return 0, since, err
	}
	for range b.sizes.alone + 1 {
		if err := insertStarts(ctx, db, process, fed, 1); err != nil {
			return fed, since, err
		}
		fed++
		if err := awaitDrained(ctx, db, ours{}, ps, int64(fed*aloneSteps)); err != nil {
			return fed, since, err
		}
		if fed == 1 {
			since = time.Now()
		}
		if err := pause(ctx, alonePause+rand.N(alonePause)); err != nil {
			return fed, since, err
		}
	}
	return fed, since, nil
}

// noteGaps reads from the results of the steps that were enqueued since a time when their handlers were called.
func noteGaps(ctx context.Context, db *database, since time.Time, s *sample) error {
	for _, g := range gaps {
		rows, _ := db.Query(ctx, `
			SELECT (CASE $1 WHEN 'whole' THEN at - lag(at) OVER path ELSE at - lag(settled) OVER path END / 1e6)::float8
			FROM (
				SELECT token_id, created_at, (result->>'at')::bigint AS at, (extract(epoch FROM finished_at) * 1e9)::bigint AS settled
				FROM workflow_run
				WHERE type = $2) step
			WHERE created_at > $3
			WINDOW path AS (PARTITION BY token_id ORDER BY at)`, g.column, clocked, since)
		all, err := pgx.CollectRows(rows, pgx.RowTo[*float64])
		if err != nil {
			return err
		}
		var known []float64
		for _, gap := range all {
			if gap != nil { // nil: the first of its path
				known = append(known, *gap)
			}
		}
		if len(known) == 0 {
			return errors.New("no step came after another")
		}
		for _, p := range gapShares {
			s.More[gapKey(g.from, p.name)] = percentile(known, p.share)
		}
	}
	return nil
}
