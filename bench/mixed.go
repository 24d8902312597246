package main

import (
	"context"
	"fmt"

	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/simple-workflow/simple-workflow/internal/session"
)

const (
	oneType    = "1 type, 1 priority"
	thirtyType = "3 prefixes, 30 types, 5 priorities"
	strictKey  = "out of order"
)

var mixedPrefixes = []string{"bench_a.", "bench_b.", "bench_c."}

// mixedTypes are ten types of each prefix.
func mixedTypes() (types []string) {
	for i := range 10 {
		for _, prefix := range mixedPrefixes {
			types = append(types, fmt.Sprintf("%snoop_%d.v1", prefix, i))
		}
	}
	return types
}

// mixed drains runs of many types and priorities at the same time.
func mixed(ctx context.Context, b *bench) error {
	single := drained{engine: ours{}, variant: oneType, task: task{Do: "work"}, processes: 1}
	many := drained{engine: ours{}, variant: thirtyType, task: task{Do: "work", Types: mixedTypes(), Prefixes: mixedPrefixes}, processes: 1}
	for rep := range b.sizes.mixedReps {
		for _, w := range []drained{single, many} {
			s := sample{Engine: w.engine.name(), Variant: w.variant, Rep: rep + 1, Runs: b.sizes.crowd}
			err := b.onFresh(ctx, w.engine, func(db *database) error {
				if w.variant == oneType {
					return b.drainOnce(ctx, db, w, &s)
				}
				if err := loadMixed(ctx, db, s.Runs); err != nil {
					return err
				}
				return b.drainLoaded(ctx, db, w, &s)
			})
			if err != nil {
				return err
			}
			if w.variant == thirtyType && rep == 0 {
				n, err := b.outOfOrder(ctx)
				if err != nil {
					return err
				}
				s.More = map[string]float64{strictKey: float64(n)}
			}
			b.record(s)
		}
	}
	return nil
}

func loadMixed(ctx context.Context, db *database, n int) error {
	_, err := db.Exec(ctx, `
		INSERT INTO workflow_run (type, priority, payload)
		SELECT ($2::text[])[1 + g % cardinality($2)], (g / cardinality($2) % 5 - 2) * 10, jsonb_build_object('n', g)
		FROM generate_series(1, $1::int) g`, n, mixedTypes())
	if err != nil {
		return err
	}
	return db.rest(ctx)
}

// outOfOrder leases everything and counts the runs that follow one of lower priority.
func (b *bench) outOfOrder(ctx context.Context) (n int, err error) {
	err = b.onFresh(ctx, ours{}, func(db *database) error {
		total := b.sizes.crowd / 3
		if err := loadMixed(ctx, db, total); err != nil {
			return err
		}
		config := db.Config()
		session.Prepare(config) // like the worker
		pool, err := pgxpool.NewWithConfig(ctx, config)
		if err != nil {
			return err
		}
		defer pool.Close()
		n, err = leaseInOrder(ctx, pool, total)
		return err
	})
	return n, err
}

func leaseInOrder(ctx context.Context, pool *pgxpool.Pool, total int) (outOfOrder int, err error) {
	p := newPoller(pool, mixedPrefixes...)
	last := 100
	for taken, polls := 0, 0; taken < total; polls++ {
		leases, _, err := p.Acquire(ctx, 499, 0)
		if err != nil {
			return 0, err
		}
		if polls > total {
			return 0, fmt.Errorf("%d of %d runs can be leased", taken, total)
		}
		for _, l := range leases {
			if l.Priority > last {
				outOfOrder++
			}
			last = l.Priority
		}
		taken += len(leases)
	}
	return outOfOrder, nil
}
