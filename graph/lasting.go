package graph

import (
	"context"
	"fmt"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/simple-workflow/simple-workflow/internal/session"
)

// A transaction is the worker's, in which a batch advances. In a session of the worker's own the
// engine's statements are prepared once, and their plans kept until a table has doubled: an advance
// is a dozen short statements, of which parsing and planning is most of the work.
type transaction struct {
	pgx.Tx
	prepares bool
	working  bool   // whether it has said that the engine is at work
	mode     string // how the next statement is planned, as far as is known
}

// plans are what is known about those of a connection.
type plans struct {
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

// What finds its rows by their keys has keptPlans; what looks for all of an instance, or brings two
// lists together, has ownPlans: without the values nobody can tell how much that is.
const (
	keptPlans = `SELECT set_config('plan_cache_mode', 'force_generic_plan', true)`
	ownPlans  = `SELECT set_config('plan_cache_mode', 'force_custom_plan', true)`
)

// in returns the transaction, with plans that are not outgrown.
func in(ctx context.Context, tx pgx.Tx) (*transaction, error) {
	t := &transaction{Tx: tx, prepares: session.Prepares(tx.Conn())}
	if !t.prepares {
		return t, nil
	}
	data := tx.Conn().PgConn().CustomData()
	p, known := data[plansKey].(*plans)
	if !known {
		p = &plans{}
		data[plansKey] = p
	}
	if err := p.outgrow(ctx, tx); err != nil {
		return nil, fmt.Errorf("look whether plans are still good: %w", err)
	}
	return t, nil
}

// outgrow has plans made anew if a table has more than doubled since they were made: one that was
// made for an empty table reads all of it, and would do so until somebody analyzes it.
func (p *plans) outgrow(ctx context.Context, tx pgx.Tx) error {
	if time.Since(p.looked) < lookPause {
		return nil
	}
	rows, _ := tx.Query(ctx, `SELECT pg_relation_size(t::regclass) FROM unnest($1::text[]) WITH ORDINALITY AS g (t, place) ORDER BY place`, growing)
	sizes, err := pgx.CollectRows(rows, pgx.RowTo[int64])
	if err != nil {
		return err
	}
	p.looked = time.Now()
	for k, size := range sizes {
		if p.sizes == nil || size > 2*p.sizes[k]+aFewRows {
			p.sizes = sizes
			_, err = tx.Exec(ctx, `DISCARD PLANS`)
			return err
		}
	}
	return nil
}

// statements are sent together.
type statements struct {
	batch *pgx.Batch
	tx    *transaction
	mode  string // how those that follow are to be planned
}

func (t *transaction) statements() *statements {
	return &statements{batch: &pgx.Batch{}, tx: t, mode: keptPlans}
}

// plan has what follows, if anything does, planned in one way.
func (s *statements) plan(mode string) { s.mode = mode }

// ready returns the batch, for a statement to be queued.
func (s *statements) ready() *pgx.Batch {
	if s.tx.prepares && s.tx.mode != s.mode {
		s.tx.mode = s.mode
		s.batch.Queue(s.mode)
	}
	return s.batch
}

// do queues a statement that returns nothing.
func (s *statements) do(sql string, args ...any) { s.ready().Queue(sql, plain(args)...) }

// work has the transaction say that the engine is at work: what anybody else changes of a process is
// refused, or told to the process.
func (s *statements) work() {
	if !s.tx.working {
		s.tx.working = true
		s.do(`SELECT set_config('workflow.advance', 'on', true)`)
	}
}

// ask queues a statement, and has its answer taken.
func (s *statements) ask(take func(pgx.Rows) error, sql string, args ...any) {
	ask(s.ready(), take, sql, args...)
}

func ask(batch *pgx.Batch, take func(pgx.Rows) error, sql string, args ...any) {
	batch.Queue(sql, plain(args)...).Query(take)
}

// send sends what was queued, and has the answers taken one after the other.
func (s *statements) send(ctx context.Context) error {
	if s.batch.Len() == 0 {
		return nil
	}
	return s.tx.SendBatch(ctx, s.batch).Close()
}
