package main

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"

	"github.com/simple-workflow/simple-workflow/run"
)

// trials test our engine while an old snapshot is held, with rows that are committed late, and leases of workers that
// died.
type trials struct {
	count int
	ended chan trial
}

// A trial is the number of seconds that the engine took for something.
type trial struct {
	key     string
	seconds float64
	err     error
}

const (
	deadAtOnce = 10               // leases of each kind that are planted together
	patience   = 30 * time.Second // for a row that should have been found
)

// startTrials starts all trials if e is ours.
func (b *bench) startTrials(ctx context.Context, db *database, e engine, ps processes, length time.Duration) *trials {
	t := &trials{ended: make(chan trial, 100)}
	if e.name() != (ours{}).name() {
		return t
	}
	for i, late := range b.sizes.lates {
		t.start(lateKey, func() (float64, error) { return commitLate(ctx, db, ps, marked(i), length/20, late) })
	}
	for i := range 4 {
		t.start(takenKey, func() (float64, error) {
			if err := pause(ctx, length*time.Duration(2*i+1)/10); err != nil {
				return 0, err
			}
			return takeBack(ctx, db)
		})
	}
	return t
}

func (t *trials) start(key string, try func() (float64, error)) {
	t.count++
	go func() {
		seconds, err := try()
		t.ended <- trial{key, seconds, err}
	}()
}

// join waits for all trials and records the longest time of each kind.
func (t *trials) join(s *sample) error {
	var errs []error
	for range t.count {
		one := <-t.ended
		errs = append(errs, one.err)
		s.More[one.key] = max(s.More[one.key], one.seconds)
	}
	return errors.Join(errs...)
}

// commitLate stores a run in a transaction that stays open, and returns how long after its commit a handler sees the
// run.
func commitLate(ctx context.Context, db *database, ps processes, n int, begin, late time.Duration) (float64, error) {
	if err := pause(ctx, begin); err != nil {
		return 0, err
	}
	conn, err := pgx.Connect(ctx, db.url)
	if err != nil {
		return 0, err
	}
	defer func() { _ = conn.Close(context.WithoutCancel(ctx)) }()
	err = pgx.BeginFunc(ctx, conn, func(tx pgx.Tx) error {
		if _, err := run.Enqueue(ctx, tx, run.New{Type: noop, Payload: payload{n}}); err != nil {
			return err
		}
		return pause(ctx, late)
	})
	if err != nil {
		return 0, err
	}
	committed := clock()
	seen, err := awaitSeen(ctx, ps, n, patience)
	if err != nil {
		return 0, fmt.Errorf("committed %v late: %w", late, err)
	}
	return max(0, float64(seen-committed)/1e9), nil
}

// takeBack plants leases as a worker that dies leaves them: not expired yet, half of them new, half taken two seconds
// ago. It returns how long after its expiry the last one was reclaimed.
func takeBack(ctx context.Context, db *database) (longest float64, err error) {
	token := uuid.New()
	var ids []uuid.UUID
	err = pgx.BeginFunc(ctx, db, func(tx pgx.Tx) error {
		if _, err := tx.Exec(ctx, `SET LOCAL session_replication_role = replica`); err != nil {
			return err
		}
		rows, _ := tx.Query(ctx, `
			INSERT INTO workflow_run (type, payload, status, attempt, lease_no, started_at, deadline_at, leased_by, lease_token, lease_until)
			SELECT $1, '{"n": -1}', 'leased', 1, 1, clock_timestamp() - age, clock_timestamp() + interval '1 hour', 'dead', $2,
			       clock_timestamp() + interval '4 seconds'
			FROM unnest(ARRAY['0 seconds', '2 seconds']::interval[]) age, generate_series(1, $3)
			RETURNING id`, noop, token, deadAtOnce)
		ids, err = pgx.CollectRows(rows, pgx.RowTo[uuid.UUID])
		return err
	})
	if err != nil {
		return 0, err
	}
	return awaitTakenBack(ctx, db, token, ids)
}

// awaitTakenBack polls the leases until none is left. Each poll shows how long ago the remaining ones could have been
// reclaimed.
func awaitTakenBack(ctx context.Context, db *database, token uuid.UUID, ids []uuid.UUID) (longest float64, err error) {
	for begin := time.Now(); time.Since(begin) < patience; {
		var left int
		var overdue float64
		err := db.QueryRow(ctx, `
			SELECT count(*), coalesce(max(extract(epoch FROM clock_timestamp() - lease_until)), 0)
			FROM workflow_run WHERE id = ANY ($2) AND lease_token = $1`, token, ids).Scan(&left, &overdue)
		if err != nil {
			return 0, err
		}
		longest = max(longest, overdue)
		if left == 0 {
			return longest, nil
		}
		if err := pause(ctx, 20*time.Millisecond); err != nil {
			return 0, err
		}
	}
	return 0, fmt.Errorf("expired leases were not taken back for %v", patience)
}
