package main

import (
	"context"
	"errors"
	"fmt"

	"github.com/jackc/pgx/v5"
)

const (
	heldVariant = "old snapshot held"
	freeVariant = "no snapshot"
	firstKey    = "first runs/s"
	lastKey     = "last runs/s"
	waitingKey  = "waiting in the end"
	lateKey     = "late commit to handler s"
	takenKey    = "expiry to taken back s"
)

// snapshot feeds and drains while another session holds an old snapshot, so that vacuum removes nothing. It feeds our
// engine for as long without a snapshot: the table grows then, too.
func snapshot(ctx context.Context, b *bench) error {
	for _, e := range b.engines {
		variants := []string{heldVariant}
		if e.name() == (ours{}).name() {
			variants = append(variants, freeVariant)
		}
		for _, variant := range variants {
			s := sample{Engine: e.name(), Variant: variant, Rep: 1, More: map[string]float64{}}
			err := b.onFresh(ctx, e, func(db *database) error { return b.underSnapshot(ctx, db, e, &s) })
			if err != nil {
				return fmt.Errorf("%s, %s: %w", e.name(), variant, err)
			}
			b.record(s)
		}
	}
	return nil
}

func (b *bench) underSnapshot(ctx context.Context, db *database, e engine, s *sample) error {
	if err := db.rest(ctx); err != nil {
		return err
	}
	if s.Variant == heldVariant {
		release, err := db.hold(ctx)
		if err != nil {
			return err
		}
		defer release()
	}
	ps, err := start(e, task{Do: "work", URL: db.url}, 1)
	if err != nil {
		return err
	}
	return errors.Join(b.feedUnderSnapshot(ctx, db, e, ps, s), ps.stop())
}

// hold opens a session that keeps its snapshot until release is called.
func (d *database) hold(ctx context.Context) (release func(), err error) {
	conn, err := pgx.Connect(ctx, d.url)
	if err != nil {
		return nil, err
	}
	for _, query := range []string{"BEGIN ISOLATION LEVEL REPEATABLE READ", "SELECT count(*) FROM pg_class"} {
		if _, err := conn.Exec(ctx, query); err != nil {
			return nil, errors.Join(err, conn.Close(ctx))
		}
	}
	return func() { _ = conn.Close(context.Background()) }, nil
}

func (b *bench) feedUnderSnapshot(ctx context.Context, db *database, e engine, ps processes, s *sample) error {
	p, err := e.producer(task{}, db.Pool)
	if err != nil {
		return err
	}
	length := b.sizes.heldRival
	if e.name() == (ours{}).name() {
		length = b.sizes.held
	}
	from, err := b.server.read(ctx, ps)
	if err != nil {
		return err
	}
	ps.say("go")
	f := startFeed(ctx, p, ps)
	trials := b.startTrials(ctx, db, e, ps, length)
	s.Series, err = perSecond(ctx, ps, length)
	handled, _ := ps.handled()
	s.Runs, s.More[waitingKey] = int(handled), float64(f.made.Load()-handled)
	to, readErr := b.server.read(ctx, ps)
	made, feedErr := f.stop()
	if err := errors.Join(err, readErr, feedErr, trials.join(s)); err != nil {
		return err
	}
	s.costs(from, to, s.Runs)
	s.Rate = float64(s.Runs) / s.Seconds
	s.compareEdges(int(b.sizes.edge.Seconds()))
	if err := awaitDrained(ctx, db, e, ps, int64(made)); err != nil {
		return err
	}
	left, err := e.unsettled(ctx, db, made)
	if err == nil && left != 0 {
		err = fmt.Errorf("%d of %d runs were passed over", left, made)
	}
	return err
}

// compareEdges compares the mean of the first n seconds with that of the last n. It leaves out the very first second,
// which is for warming up.
func (s *sample) compareEdges(n int) {
	if len(s.Series) <= n {
		return
	}
	s.More[firstKey] = sum(s.Series[1:n+1]) / float64(n)
	s.More[lastKey] = sum(s.Series[len(s.Series)-n:]) / float64(n)
}
