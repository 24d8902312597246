package main

import (
	"context"
	"errors"
	"fmt"
	"time"
)

const (
	bulkVariant   = "1,000 a call"
	singleVariant = "one by one"
)

// enqueue stores runs in bulk from 4 producers, and one by one from 8.
func enqueue(ctx context.Context, b *bench) error {
	for rep := range b.sizes.reps {
		for _, e := range b.engines {
			for _, how := range []struct {
				variant string
				task    task
			}{
				{bulkVariant, task{Do: "enqueue", Bulk: true, Runs: b.sizes.bulk}},
				{singleVariant, task{Do: "enqueue", Runs: b.sizes.single}},
			} {
				s := sample{Engine: e.name(), Variant: how.variant, Rep: rep + 1, Runs: how.task.Runs}
				if err := b.onFresh(ctx, e, func(db *database) error { return b.enqueueOnce(ctx, db, e, how.task, &s) }); err != nil {
					return fmt.Errorf("%s, %s: %w", e.name(), how.variant, err)
				}
				b.record(s)
			}
		}
	}
	return nil
}

// onFresh calls do with a database that has the engine's tables, and nothing else.
func (b *bench) onFresh(ctx context.Context, e engine, do func(*database) error) error {
	template, err := b.base(ctx, e)
	if err != nil {
		return err
	}
	return b.onCopy(ctx, template, do)
}

// base makes sure that there is a template with the engine's tables, and returns its name.
func (b *bench) base(ctx context.Context, e engine) (string, error) {
	name := templateName(e)
	return name, b.server.template(ctx, name, "", func(ctx context.Context, db *database) error { return e.install(ctx, db) })
}

func (b *bench) onCopy(ctx context.Context, template string, do func(*database) error) error {
	db, err := b.server.fresh(ctx, template)
	if err != nil {
		return err
	}
	return errors.Join(do(db), db.drop())
}

func (b *bench) enqueueOnce(ctx context.Context, db *database, e engine, t task, s *sample) error {
	if err := db.rest(ctx); err != nil {
		return err
	}
	t.URL = db.url
	err := b.timed(ctx, e, t, 1, s, func(ps processes) (int, error) {
		select {
		case <-ps[0].done:
			return s.Runs, nil
		case <-ps[0].ended:
			return 0, errors.New("the producer gave up")
		case <-time.After(5 * time.Minute):
			return 0, errors.New("the producer does not get done")
		}
	})
	if err != nil {
		return err
	}
	n, err := e.stored(ctx, db)
	if err == nil && n != s.Runs {
		err = fmt.Errorf("%d of %d runs were stored", n, s.Runs)
	}
	return err
}
