package main

import (
	"context"
	"fmt"
)

const nobody = "no other rows"

// crowds are the kinds of other rows that our engine is measured among.
var crowds = []kind{low, future, foreign, foreign50, finished, leased}

// rivalCrowds are the kinds of other rows that the other engines are measured among.
var rivalCrowds = []kind{low, future}

// hugeCrowd is the number of rows from which on there is no room for several templates at the same time.
const hugeCrowd = 2_000_000

// crowd drains some runs while many other rows are in the table, which should not matter.
func crowd(ctx context.Context, b *bench) error {
	for _, e := range b.engines {
		kinds, reps := crowds, b.sizes.crowdReps
		if e.name() != (ours{}).name() {
			kinds, reps = rivalCrowds, b.sizes.rivalCrowdReps
			if b.rows > 0 {
				continue
			}
		}
		groups := [][]kind{kinds}
		if b.sizes.extra > hugeCrowd {
			groups = nil
			for _, k := range kinds {
				groups = append(groups, []kind{k})
			}
		}
		for _, group := range groups {
			if err := b.amongAll(ctx, e, group, reps); err != nil {
				return fmt.Errorf("%s: %w", e.name(), err)
			}
		}
	}
	return nil
}

// amongAll measures an engine among each kind of rows in turn, and without other rows.
func (b *bench) amongAll(ctx context.Context, e engine, kinds []kind, reps int) error {
	for rep := range reps {
		for i, k := range kinds {
			if i%3 == 0 {
				if err := b.among(ctx, e, "", rep); err != nil {
					return err
				}
			}
			if err := b.among(ctx, e, k, rep); err != nil {
				return fmt.Errorf("%s rows: %w", k, err)
			}
		}
	}
	for _, k := range kinds {
		if err := b.server.forget(ctx, crowdName(e, k)); err != nil {
			return err
		}
	}
	return nil
}

func crowdName(e engine, k kind) string { return templateName(e) + "_" + string(k) }

// others returns how many rows of a kind there are.
func (b *bench) others(k kind) int {
	if k == leased {
		return b.sizes.leased
	}
	return b.sizes.extra
}

// crowdVariant names a row of the table.
func (b *bench) crowdVariant(k kind) string {
	words := map[kind]string{
		low: "eligible, lower priority", future: "in the future, higher priority", foreign: "of another prefix",
		foreign50: "of another prefix, 50 types", finished: "finished", leased: "leased by others",
	}
	if k == "" {
		return nobody
	}
	return fmt.Sprintf("%s %s", thousands(float64(b.others(k))), words[k])
}

// among measures once, on a copy of a database that already has the other rows. No kind means no other rows.
func (b *bench) among(ctx context.Context, e engine, k kind, rep int) error {
	template, err := b.base(ctx, e)
	if err != nil {
		return err
	}
	if k != "" {
		err := b.server.template(ctx, crowdName(e, k), template, func(ctx context.Context, db *database) error {
			if err := e.load(ctx, db, b.others(k), k); err != nil {
				return err
			}
			return db.rest(ctx)
		})
		if err != nil {
			return err
		}
		template = crowdName(e, k)
	}
	s := sample{Engine: e.name(), Variant: b.crowdVariant(k), Rep: rep + 1, Runs: b.sizes.crowd}
	err = b.onCopy(ctx, template, func(db *database) error {
		return b.drainOnce(ctx, db, drained{engine: e, task: task{Do: "work"}, processes: 1}, &s)
	})
	if err == nil {
		b.record(s)
	}
	return err
}
