package graph

import (
	"context"
	"fmt"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"

	"github.com/simple-workflow/simple-workflow/internal/session"
)

// A lasting transaction is one in a session that is ours: there the engine's statements are
// prepared once, and their plans kept until a table has doubled. An advance is a dozen short
// statements, of which parsing and planning is most of the work.
type lasting struct{ pgx.Tx }

// plans are what is known about those of a connection.
type plans struct {
	kept   bool
	looked time.Time // at the sizes of tables
	sizes  []int64   // in bytes, when plans were last made anew
}

const (
	plansKey  = "simple-workflow: plans" // among a connection's custom data
	lookPause = 100 * time.Millisecond
	aFewRows  = 64 << 10 // bytes of a table: so little is no reason to plan anew
)

// growing are the tables of which the sizes decide how statements with kept plans are executed.
var growing = []string{"process_instance", "process_token", "workflow_run", "parallel_group", "parallel_join", "join_arrival", "each_progress",
	"compensation_record", "incident"}

// In a lasting transaction what finds its rows by their keys has keptPlans; what looks for all of
// an instance, or brings two lists together, has ownPlans: without the values nobody can tell how
// much that is. While a scene is loaded, the first that needs a plan of its own has the rest
// planned so, too.
const (
	keptPlans = `SELECT set_config('plan_cache_mode', 'force_generic_plan', true)`
	ownPlans  = `SELECT set_config('plan_cache_mode', 'force_custom_plan', true)`
)

// last returns the transaction as a lasting one with kept plans, if its session is ours, and
// otherwise as it is.
func (e *Engine) last(ctx context.Context, tx pgx.Tx) (pgx.Tx, error) {
	if e.fleeting.Load() {
		return tx, nil
	}
	conn := tx.Conn().PgConn()
	p, known := conn.CustomData()[plansKey].(*plans)
	if !known {
		own, err := session.Own(ctx, tx.Conn())
		if err != nil {
			return nil, fmt.Errorf("look whose session it is: %w", err)
		}
		p = &plans{kept: own && tx.Conn().Config().StatementCacheCapacity > 0}
		conn.CustomData()[plansKey] = p
	}
	if !p.kept {
		return tx, nil
	}
	l := lasting{tx}
	if err := p.outgrow(ctx, l); err != nil {
		return nil, fmt.Errorf("look whether plans are still good: %w", err)
	}
	_, err := l.Exec(ctx, keptPlans)
	return l, err
}

// forgotten notes that a session has lost what was prepared in it, by a DISCARD ALL say: then none
// lasts here. The connection is of no use any more.
func (e *Engine) forgotten(ctx context.Context, tx pgx.Tx, err error) error {
	if session.Lost(err) {
		e.fleeting.Store(true)
		_ = tx.Conn().Close(ctx)
	}
	return err
}

func isLasting(tx pgx.Tx) bool {
	_, lasts := tx.(lasting)
	return lasts
}

// ownPlan has what follows planned with its values.
func ownPlan(ctx context.Context, tx pgx.Tx) error {
	if !isLasting(tx) {
		return nil
	}
	_, err := tx.Exec(ctx, ownPlans)
	return err
}

// outgrow has plans made anew if a table has more than doubled since they were made: one that was
// made for an empty table reads all of it, and would do so until somebody analyzes it.
func (p *plans) outgrow(ctx context.Context, l lasting) error {
	if time.Since(p.looked) < lookPause {
		return nil
	}
	rows, _ := l.Query(ctx, `SELECT pg_relation_size(t::regclass) FROM unnest($1::text[]) WITH ORDINALITY AS g (t, place) ORDER BY place`, growing)
	sizes, err := pgx.CollectRows(rows, pgx.RowTo[int64])
	if err != nil {
		return err
	}
	p.looked = time.Now()
	for k, size := range sizes {
		if p.sizes == nil || size > 2*p.sizes[k]+aFewRows {
			p.sizes = sizes
			_, err = l.Tx.Exec(ctx, `DISCARD PLANS`)
			return err
		}
	}
	return nil
}

func (l lasting) Exec(ctx context.Context, sql string, args ...any) (pgconn.CommandTag, error) {
	return l.Tx.Exec(ctx, sql, append([]any{pgx.QueryExecModeCacheStatement}, args...)...)
}

func (l lasting) Query(ctx context.Context, sql string, args ...any) (pgx.Rows, error) {
	return l.Tx.Query(ctx, sql, append([]any{pgx.QueryExecModeCacheStatement}, args...)...)
}

// send sends statements that return nothing.
func send(ctx context.Context, tx pgx.Tx, batch *pgx.Batch) error {
	if l, ok := tx.(lasting); ok {
		for _, q := range batch.QueuedQueries { // pgx has no such mode for batches, but finds a statement by its text
			if _, err := l.Conn().Prepare(ctx, q.SQL, q.SQL); err != nil {
				return err
			}
		}
	}
	return tx.SendBatch(ctx, batch).Close()
}
