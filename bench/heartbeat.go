package main

import (
	"context"
	"errors"
	"fmt"
	"time"
)

const (
	hotKey       = "HOT share"
	beatsKey     = "heartbeats an interval"
	statementKey = "statements an interval"
	lostKey      = "leases lost"

	beatLease    = 6 * time.Second
	beatInterval = beatLease / 3 // the default
)

// heartbeat makes one worker hold many leases whose handlers sleep.
func heartbeat(ctx context.Context, b *bench) error {
	e := ours{}
	s := sample{Engine: e.name(), Variant: fmt.Sprintf("%s leases", thousands(float64(b.sizes.leases))), Rep: 1, More: map[string]float64{}}
	err := b.onFresh(ctx, e, func(db *database) error {
		err := db.do(ctx, fmt.Sprintf(`INSERT INTO workflow_run (type, payload)
			SELECT '%s', jsonb_build_object('n', g) FROM generate_series(1, %d) g`, asleep, b.sizes.leases))
		if err := errors.Join(err, db.rest(ctx)); err != nil {
			return err
		}
		ps, err := start(e, task{Do: "work", URL: db.url, Slots: b.sizes.leases, Lease: int(beatLease.Milliseconds()), Beats: true}, 1)
		if err != nil {
			return err
		}
		return errors.Join(b.holdLeases(ctx, db, ps, &s), ps.stop())
	})
	if err == nil {
		b.record(s)
	}
	return err
}

// holdLeases watches the heartbeats for a while, then lets the handlers return, and checks that each run succeeded at
// its first attempt.
func (b *bench) holdLeases(ctx context.Context, db *database, ps processes, s *sample) error {
	ps.say("go")
	n := int64(b.sizes.leases)
	for held := int64(0); held < n; held, _ = ps.handled() {
		if err := errors.Join(ps.alive(), pause(ctx, 10*time.Millisecond)); err != nil {
			return err
		}
	}
	if err := pause(ctx, beatInterval); err != nil {
		return err
	}
	if err := b.countBeats(ctx, db, ps, s); err != nil {
		return err
	}
	ps.say("release")
	select {
	case facts := <-ps[0].done:
		intervals := s.Seconds / beatInterval.Seconds()
		s.More[beatsKey] = facts["heartbeats"] / intervals
		s.More[statementKey] = facts["statements"] / intervals
		s.More[lostKey] = facts["lost"]
	case <-ps[0].ended:
		return errors.New("the worker ended by itself")
	}
	if err := awaitDrained(ctx, db, ours{}, ps, n); err != nil {
		return err
	}
	var again int
	err := db.QueryRow(ctx, `SELECT $1 - count(*) FROM workflow_run WHERE status = 'succeeded' AND lease_no = 1`, n).Scan(&again)
	if err == nil && again > 0 {
		err = fmt.Errorf("%d of %d runs did not succeed with their first lease", again, n)
	}
	return err
}

// countBeats counts the updates during a period. All of them are heartbeats.
func (b *bench) countBeats(ctx context.Context, db *database, ps processes, s *sample) error {
	updates := func() (all, hot int, err error) {
		err = db.QueryRow(ctx, `SELECT n_tup_upd, n_tup_hot_upd FROM pg_stat_user_tables WHERE relname = 'workflow_run'`).Scan(&all, &hot)
		return all, hot, err
	}
	all, hot, err := updates()
	if err != nil {
		return err
	}
	from, err := b.server.read(ctx, ps)
	if err != nil {
		return err
	}
	ps.say("begin")
	if err := pause(ctx, b.sizes.beats); err != nil {
		return err
	}
	to, err := b.server.read(ctx, ps)
	if err != nil {
		return err
	}
	allNow, hotNow, err := updates()
	if err != nil {
		return err
	}
	s.Runs = allNow - all
	s.costs(from, to, max(s.Runs, 1))
	s.Rate = float64(s.Runs) / s.Seconds
	s.More[hotKey] = float64(hotNow-hot) / float64(max(s.Runs, 1))
	return nil
}
