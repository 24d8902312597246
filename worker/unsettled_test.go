package worker_test

import (
	"context"
	"errors"
	"regexp"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/simple-workflow/simple-workflow/internal/pgtest"
	"github.com/simple-workflow/simple-workflow/lease"
	"github.com/simple-workflow/simple-workflow/run"
	"github.com/simple-workflow/simple-workflow/worker"
)

// An outcome that is refused time and again is told of where people look: which run, for how long, and why. It is
// kept all the same, and recorded once nothing refuses it; then nothing is told any more.
func TestUnsettledIsTold(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]struct{ refuse, mend, says, why string }{
		"by the database": {
			refuse: `CREATE FUNCTION refuse() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN RAISE EXCEPTION 'never' USING ERRCODE = '55000', CONSTRAINT = 'mine'; END $$;
			         CREATE TRIGGER refuse BEFORE UPDATE ON workflow_run FOR EACH ROW WHEN (OLD.type = 'test.odd.v1' AND OLD.status = 'leased' AND NEW.status <> 'leased') EXECUTE FUNCTION refuse()`,
			mend: `DROP TRIGGER refuse ON workflow_run`,
			says: "settle|55000|never|the database refuses what its handler returned by mine",
			why:  "the database refuses what its handler returned by mine for ",
		},
		"by a hook": {
			mend: `SELECT`,
			says: "settle||hook: not today|what its handler returned cannot be recorded",
			why:  "what its handler returned cannot be recorded for ",
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			pool, mux := pgtest.New(t), worker.NewMux()
			var starts atomic.Int32
			var mended atomic.Bool
			mended.Store(c.refuse != "")
			handle(mux, "test.odd.v1", func(context.Context) error { starts.Add(1); return nil })
			handle(mux, "test.even.v1", func(context.Context) error { return nil })
			if c.refuse != "" {
				execute(t, pool, c.refuse)
			}
			id := enqueue(t, pool, "test.odd.v1", empty{})
			var log journal
			w, _ := work(t, pool, mux, func(cfg *worker.Config) {
				cfg.Logger = log.logger()
				cfg.Hooks = []worker.Hook{{Begin: acting(func(_ context.Context, _ pgx.Tx, batch []lease.Settlement) error {
					for _, s := range batch {
						if s.Type == "test.odd.v1" && !mended.Load() {
							return errors.New("not today")
						}
					}
					return nil
				})}}
			})
			pgtest.AwaitFor(t, quick, "it to be told", func() bool {
				return query[int](t, pool, `SELECT count(*) FROM workflow_unleasable WHERE id = $1`, id) == 1
			})
			if got := query[string](t, pool, `SELECT concat_ws('|', statement, sqlstate, message, problem) FROM workflow_unleasable`); got != c.says {
				t.Errorf("workflow_unleasable says\n%s, want\n%s", got, c.says)
			}
			if why := query[string](t, pool, `SELECT workflow_why($1)`, id); !strings.HasPrefix(why, c.why) || !strings.Contains(why, w.Name()+" keeps it, and tries again every half a minute") {
				t.Errorf("why: %s", why)
			}
			finished(t, pool, enqueue(t, pool, "test.even.v1", empty{}))
			pgtest.AwaitFor(t, quick, "the log to tell of it", func() bool {
				return regexp.MustCompile("outcome refused time and again.* run=" + id.String()).MatchString(log.String())
			})
			execute(t, pool, c.mend)
			mended.Store(true)
			if r := finished(t, pool, id); r.Status != run.Succeeded || r.Attempt != 1 || starts.Load() != 1 {
				t.Errorf("it is %s at attempt %d, and was started %d times", r.Status, r.Attempt, starts.Load())
			}
			if n := query[int](t, pool, `SELECT count(*) FROM workflow_unleasable`); n != 0 {
				t.Errorf("%d are told of still", n)
			}
		})
	}
}

// If no outcome at all can be recorded, it is the fault of no run, and none is told of.
func TestNothingCanBeSettled(t *testing.T) {
	t.Parallel()
	pool, mux := pgtest.New(t), worker.NewMux()
	execute(t, pool, `
		CREATE FUNCTION refuse() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN RAISE EXCEPTION 'no' USING ERRCODE = 'XX001'; END $$;
		CREATE TRIGGER refuse BEFORE UPDATE ON workflow_run FOR EACH ROW WHEN (OLD.status = 'leased' AND NEW.status <> 'leased') EXECUTE FUNCTION refuse()`)
	handle(mux, "test.any.v1", func(context.Context) error { return nil })
	addMany(t, pool, "test.any.v1", 5)
	var tries, told atomic.Int32
	work(t, pool, mux, func(c *worker.Config) {
		c.Observe.SetAside = func(string) { told.Add(1) }
		c.Observe.SettleRun = func(int, time.Duration, error) { tries.Add(1) }
	})
	pgtest.AwaitFor(t, quick, "each to be tried often enough", func() bool { return tries.Load() > 40 })
	if n := query[int](t, pool, `SELECT count(*) FROM workflow_set_aside`); n != 0 || told.Load() != 0 {
		t.Errorf("%d are set aside, %d told of", n, told.Load())
	}
	execute(t, pool, `DROP TRIGGER refuse ON workflow_run`)
	drained(t, pool, 2*quick)
}
