package graph

import (
	"context"
	"fmt"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/simple-workflow/simple-workflow/internal/session"
)

// A transaction is the worker's settle transaction, in which a batch of runs advances its instances. If the session
// belongs to the worker alone (no pooler), the engine's statements are prepared once, and their plans are kept until a
// table has doubled in size. Advancing takes about a dozen short statements, and parsing and planning them is most of
// their cost.
type transaction struct {
	pgx.Tx
	prepares bool   // the session keeps prepared statements
	working  bool   // workflow.advance is on: see statements.work
	mode     string // keptPlans or ownPlans, whichever was set last; empty: not known
}

// plans is what the engine knows about the kept plans of a connection.
type plans struct {
	looked time.Time // when table sizes were read last
	sizes  []int64   // of the tables in growing, in bytes, when plans were discarded last
}

const (
	plansKey  = "simple-workflow: plans" // the key of plans in the custom data of a connection
	lookPause = 100 * time.Millisecond   // the shortest time between two looks at table sizes
	aFewRows  = 64 << 10                 // bytes: a table that grows by less is no reason to plan again
)

// growing are the tables whose sizes matter to statements with kept plans.
var growing = []string{"process_instance", "process_token", "workflow_run", "parallel_group", "parallel_join", "join_arrival", "each_progress",
	"compensation_record", "incident"}

// A statement that finds its rows by their keys runs with keptPlans, which has the server use generic plans. A
// statement that reads all rows of an instance, or joins two lists, runs with ownPlans: the planner has to see the
// values to estimate how many rows that is.
const (
	keptPlans = `SELECT set_config('plan_cache_mode', 'force_generic_plan', true)`
	ownPlans  = `SELECT set_config('plan_cache_mode', 'force_custom_plan', true)`
)

// in wraps tx. If its session keeps prepared statements, in first discards plans that the tables have outgrown.
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
		return nil, fmt.Errorf("check whether tables have outgrown their plans: %w", err)
	}
	return t, nil
}

// outgrow discards the plans of the session if a table is larger than twice its size when plans were discarded last,
// plus aFewRows. A plan made while a table was empty reads all of it, and would be kept until somebody analyzes the
// table.
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

// statements is a batch of statements, sent in one round trip.
type statements struct {
	batch *pgx.Batch
	tx    *transaction
	mode  string // keptPlans or ownPlans, for the statements that follow
}

// statements returns an empty batch, with keptPlans.
func (t *transaction) statements() *statements {
	return &statements{batch: &pgx.Batch{}, tx: t, mode: keptPlans}
}

// plan sets the mode, keptPlans or ownPlans, of the statements that follow. It queues nothing.
func (s *statements) plan(mode string) { s.mode = mode }

// ready returns the batch, to queue a statement. It queues the change of the planning mode first, if there is one.
func (s *statements) ready() *pgx.Batch {
	if s.tx.prepares && s.tx.mode != s.mode {
		s.tx.mode = s.mode
		s.batch.Queue(s.mode)
	}
	return s.batch
}

// do queues a statement that returns nothing.
func (s *statements) do(sql string, args ...any) { s.ready().Queue(sql, plain(args)...) }

// atWork sets workflow.advance, which tells the guards of the database that the engine makes the changes that follow:
// changes by others are refused, or reported to the process.
const atWork = `SELECT set_config('workflow.advance', 'on', true)`

// work queues atWork, unless it is in effect in this transaction already.
func (s *statements) work() {
	if !s.tx.working {
		s.tx.working = true
		s.do(atWork)
	}
}

// ask queues a query; send passes its rows to take.
func (s *statements) ask(take func(pgx.Rows) error, sql string, args ...any) {
	ask(s.ready(), take, sql, args...)
}

// ask queues a query on a batch, with its arguments in the form that plain returns.
func ask(batch *pgx.Batch, take func(pgx.Rows) error, sql string, args ...any) {
	batch.Queue(sql, plain(args)...).Query(take)
}

// send sends the batch and reads the answers in order.
func (s *statements) send(ctx context.Context) error {
	if s.batch.Len() == 0 {
		return nil
	}
	return s.tx.SendBatch(ctx, s.batch).Close()
}
