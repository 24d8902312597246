package main

import (
	"bytes"
	"context"
	_ "embed"
	"fmt"
	"image/png"
	"strings"
	"testing"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/simple-workflow/simple-workflow/graph"
	"github.com/simple-workflow/simple-workflow/internal/pgtest"
	"github.com/simple-workflow/simple-workflow/internal/shipped"
	"github.com/simple-workflow/simple-workflow/run"
	"github.com/simple-workflow/simple-workflow/worker"
)

var (
	//go:embed order.json
	definition []byte
	//go:embed schema.sql
	schema string
)

// A firm is a database in which one worker fulfils orders.
type firm struct {
	t    *testing.T
	pool *pgxpool.Pool
}

func open(t *testing.T) *firm {
	t.Helper()
	f := &firm{t, pgtest.New(t)}
	for range 2 { // the second time everything exists
		if _, err := f.pool.Exec(t.Context(), schema); err != nil {
			t.Fatal(err)
		}
	}
	d, err := graph.Parse(definition)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := graph.Deploy(t.Context(), f.pool, d); err != nil {
		t.Fatal(err)
	}
	ctx, stop := context.WithCancel(t.Context())
	ended := make(chan error, 1)
	go func() {
		ended <- worker.Run(ctx, withProcesses(worker.Config{
			Pool: f.pool, Prefixes: []string{"stock.", "payment.", "parcel.", "mail."},
			Lease: shipped.MinLease, PollInterval: 20 * time.Millisecond, Backoff: run.Backoff{Base: 10 * time.Millisecond},
		}))
	}()
	t.Cleanup(func() {
		stop()
		if err := <-ended; err != nil {
			t.Error(err)
		}
	})
	return f
}

func value[T any](f *firm, sql string, args ...any) T {
	f.t.Helper()
	rows, _ := f.pool.Query(f.t.Context(), sql, args...)
	v, err := pgx.CollectExactlyOneRow(rows, pgx.RowTo[T])
	if err != nil {
		f.t.Fatalf("%s: %v", sql, err)
	}
	return v
}

// place starts an order, as psql would.
func (f *firm) place(input string) uuid.UUID {
	f.t.Helper()
	return value[uuid.UUID](f, `
		INSERT INTO workflow_run (type, payload)
		VALUES ('graph.start.v1', jsonb_build_object('process', 'order', 'input', $1::jsonb, 'key', $1::jsonb->>'order'))
		RETURNING id`, input)
}

// collected sends the message that a parcel was collected.
func (f *firm) collected(order string) {
	f.t.Helper()
	value[uuid.UUID](f, `
		INSERT INTO workflow_run (type, payload)
		VALUES ('graph.message.v1', jsonb_build_object('name', 'collected', 'key', $1::text))
		RETURNING id`, order)
}

// books returns what an order has left in the books of the departments.
func (f *firm) books(order string) string {
	f.t.Helper()
	return value[string](f, `
		SELECT concat_ws(', ',
			(SELECT string_agg(CASE WHEN released THEN 'released' ELSE 'reserved' END, ' ') FROM order_reservation WHERE order_id = $1),
			(SELECT string_agg(CASE WHEN refunded THEN 'refunded' ELSE 'charged' END, ' ') FROM order_payment WHERE order_id = $1),
			(SELECT string_agg(CASE WHEN unpacked THEN 'unpacked' ELSE 'packed' END, ' ') FROM order_parcel WHERE order_id = $1),
			(SELECT string_agg(CASE WHEN void THEN 'void' ELSE 'labelled' END, ' ') FROM order_label WHERE order_id = $1),
			(SELECT string_agg('regretted', ' ') FROM order_letter WHERE order_id = $1))`, order)
}

func (f *firm) await(order, status string) {
	f.t.Helper()
	pgtest.Await(f.t, order+" to be "+status, func() bool {
		return value[int](f, `SELECT count(*) FROM process_instance WHERE business_key = $1 AND status = $2`, order, status) == 1
	})
}

// ends waits for the end of an order and checks what it has left.
func (f *firm) ends(order, status, books string) {
	f.t.Helper()
	f.await(order, status)
	if got := f.books(order); got != books {
		f.t.Errorf("%s: %s, want %s", order, got, books)
	}
}

// undone lists the steps that undid others, in their order.
func (f *firm) undone(order string) string {
	f.t.Helper()
	return value[string](f, `
		SELECT coalesce(string_agg(a.run_type, ' ' ORDER BY a.completed_at), '')
		FROM activity_instance a
		JOIN process_instance i ON i.id = a.instance_id
		WHERE i.business_key = $1 AND a.node_id LIKE '%/undo' AND a.run_type NOT LIKE 'graph.%' AND a.status = 'succeeded'`, order)
}

func (f *firm) task(order string) uuid.UUID {
	f.t.Helper()
	var task uuid.UUID
	pgtest.Await(f.t, "a task for "+order, func() bool {
		return f.pool.QueryRow(f.t.Context(), `SELECT id FROM user_task WHERE state = 'open' AND payload->>'order' = $1`, order).Scan(&task) == nil
	})
	return task
}

func (f *firm) complete(task uuid.UUID, ok bool) {
	f.t.Helper()
	value[uuid.UUID](f, `
		INSERT INTO workflow_run (type, payload)
		VALUES ('graph.complete_task.v1', jsonb_build_object('task', $1::uuid, 'by', 'anna', 'output', jsonb_build_object('ok', $2::boolean)))
		RETURNING id`, task, ok)
}

// healthy checks that nothing is stuck, and that the stock has changed only by what was sold.
func (f *firm) healthy() {
	f.t.Helper()
	for _, view := range []string{"process_without_mover", "process_miscounted", "process_undead", "process_untimed", "process_misjoined",
		"process_misundone", "process_unearned", "process_mismatched", "process_misrecorded"} {
		if n := value[int](f, "SELECT count(*) FROM "+view); n != 0 {
			f.t.Errorf("%s has %d rows", view, n)
		}
	}
	if n := value[int](f, `
		SELECT 3000 - sum(free) - (SELECT coalesce(sum(pieces), 0) FROM order_reservation WHERE NOT released)
		FROM order_stock`); n != 0 {
		f.t.Errorf("the stock is wrong by %d", n)
	}
}

// An order is packed and labelled in parallel, and is done once it was collected. The bank may be busy, and the
// message may arrive before the process waits for it.
func TestCollected(t *testing.T) {
	f := open(t)
	f.collected("o-1")
	f.place(`{"order": "o-1", "item": "cup", "pieces": 2, "card": "busy", "cents": 1200}`)
	f.ends("o-1", "COMPLETED", "reserved, charged, packed, labelled")
	f.place(`{"order": "o-2", "item": "plate", "pieces": 1, "card": "good", "cents": 900}`)
	f.await("o-2", "WAITING")
	f.collected("o-2")
	f.ends("o-2", "COMPLETED", "reserved, charged, packed, labelled")
	picture := value[[]byte](f, `
		SELECT l.png
		FROM order_label l JOIN process_instance i ON i.business_key = l.order_id AND i.output_payload->>'parcel' = l.run::text
		WHERE l.order_id = 'o-1' AND (i.output_payload->>'collected')::boolean`)
	if _, err := png.Decode(bytes.NewReader(picture)); err != nil {
		t.Error(err)
	}
	if n := value[int](f, `SELECT attempts FROM activity_instance WHERE run_type = 'payment.charge.v1' AND input->>'order' = 'o-1'`); n != 2 {
		t.Errorf("%d attempts to charge, want 2", n)
	}
	f.healthy()
}

// The same order placed twice is one order.
func TestPlacedTwice(t *testing.T) {
	f := open(t)
	for range 3 {
		f.place(`{"order": "o-1", "item": "cup", "pieces": 1, "card": "good", "cents": 1200}`)
	}
	f.collected("o-1")
	f.ends("o-1", "COMPLETED", "reserved, charged, packed, labelled")
	pgtest.Await(t, "all starts", func() bool {
		return value[int](f, `SELECT count(*) FROM workflow_run WHERE type = 'graph.start.v1' AND status = 'succeeded'`) == 3
	})
	f.healthy()
}

// A large order waits for a person, who agrees, refuses, or does not answer.
func TestApproval(t *testing.T) {
	f := open(t)
	for _, order := range []string{"agreed", "refused", "forgotten"} {
		f.place(fmt.Sprintf(`{"order": %q, "item": "cup", "pieces": 100, "card": "good", "cents": 120000}`, order))
	}
	f.complete(f.task("agreed"), true)
	f.complete(f.task("refused"), false)
	f.collected("agreed")
	f.ends("agreed", "COMPLETED", "reserved, charged, packed, labelled")
	f.ends("refused", "FAILED", "released")
	f.task("forgotten")
	pgtest.Elapse(t, f.pool, 49*time.Hour)
	f.ends("forgotten", "FAILED", "released")
	if why := value[string](f, `SELECT string_agg(DISTINCT failure_reason, ', ') FROM process_instance WHERE status = 'FAILED'`); why != "refused: REFUSED" {
		t.Errorf("failed with %q", why)
	}
	if got := value[string](f, `SELECT string_agg(state, ' ' ORDER BY state) FROM user_task`); got != "cancelled completed completed" {
		t.Errorf("tasks are %s", got)
	}
	f.healthy()
}

// If there is nothing to send, or the bank declines, the customer gets a letter, and no other trace is left.
func TestRegret(t *testing.T) {
	f := open(t)
	f.place(`{"order": "none", "item": "teapot", "pieces": 1, "card": "good", "cents": 1200}`)
	f.place(`{"order": "declined", "item": "cup", "pieces": 1, "card": "declined", "cents": 1200}`)
	f.ends("none", "COMPLETED", "regretted")
	f.ends("declined", "COMPLETED", "released, regretted")
	if got := f.undone("declined"); got != "stock.release.v1" {
		t.Errorf("undone by %s", got)
	}
	if n := value[int](f, `SELECT count(*) FROM process_instance WHERE output_payload = '{"collected": false}'`); n != 2 {
		t.Errorf("%d orders say that they were not collected, want 2", n)
	}
	f.healthy()
}

// If an item breaks while it is packed, the order fails: everything that was done is undone in reverse order, the
// parallel label first.
func TestBroken(t *testing.T) {
	f := open(t)
	f.place(`{"order": "broken", "item": "vase", "pieces": 1, "card": "good", "cents": 1200}`)
	f.await("broken", "FAILED")
	books, undone := f.books("broken"), f.undone("broken")
	if books != "released, refunded" && books != "released, refunded, void" {
		t.Errorf("%s is left", books)
	}
	if undone = strings.TrimPrefix(undone, "parcel.void.v1 "); undone != "payment.refund.v1 stock.release.v1" {
		t.Errorf("undone by %s", undone)
	}
	if why := value[string](f, `SELECT failure_reason FROM process_instance`); why != "pack: BROKEN: the vase is broken" {
		t.Errorf("failed with %q", why)
	}
	f.healthy()
}

// A parcel that nobody collects within a week is taken back.
func TestNotCollected(t *testing.T) {
	f := open(t)
	f.place(`{"order": "o-1", "item": "cup", "pieces": 1, "card": "good", "cents": 1200}`)
	f.await("o-1", "WAITING")
	pgtest.Elapse(t, f.pool, 6*24*time.Hour)
	time.Sleep(100 * time.Millisecond)
	f.await("o-1", "WAITING")
	pgtest.Elapse(t, f.pool, 25*time.Hour)
	f.ends("o-1", "COMPLETED", "released, refunded, unpacked, void, regretted")
	undone := f.undone("o-1")
	if undone != "parcel.unpack.v1 parcel.void.v1 payment.refund.v1 stock.release.v1" &&
		undone != "parcel.void.v1 parcel.unpack.v1 payment.refund.v1 stock.release.v1" {
		t.Errorf("undone by %s", undone)
	}
	f.collected("o-1") // too late: the process no longer waits
	time.Sleep(100 * time.Millisecond)
	f.ends("o-1", "COMPLETED", "released, refunded, unpacked, void, regretted")
	f.healthy()
}

// An order that the customer withdraws is cancelled, and undone.
func TestWithdrawn(t *testing.T) {
	f := open(t)
	f.place(`{"order": "o-1", "item": "cup", "pieces": 1, "card": "good", "cents": 1200}`)
	f.await("o-1", "WAITING")
	value[uuid.UUID](f, `
		INSERT INTO workflow_run (type, payload)
		SELECT 'graph.cancel.v1', jsonb_build_object('instance', id, 'reason', 'withdrawn', 'compensate', true)
		FROM process_instance
		WHERE business_key = 'o-1'
		RETURNING id`)
	f.ends("o-1", "CANCELLED", "released, refunded, unpacked, void")
	f.healthy()
}
