package main

import (
	"context"
	_ "embed"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strings"

	"github.com/jackc/pgx/v5"
)

//go:embed orders.sql
var ordersSQL string

const orderCount = 100

// invariants are the views that must be empty.
var invariants = []string{"process_without_mover", "process_miscounted", "process_undead", "process_untimed", "process_misjoined", "process_misundone",
	"process_unearned", "process_mismatched", "process_misrecorded"}

// Messages of people and other programs to the orders, as they would send them in psql.
const (
	agree = `
    INSERT INTO workflow_run (type, payload)
    SELECT 'graph.complete_task.v1', jsonb_build_object('task', id, 'by', 'anna', 'output', jsonb_build_object('ok', true))
    FROM user_task WHERE state = 'open';`
	collect = `
    INSERT INTO workflow_run (type, payload)
    SELECT 'graph.message.v1', jsonb_build_object('name', 'collected', 'key', business_key)
    FROM process_instance WHERE completed_at IS NULL;`
)

// fulfil makes separate worker groups advance a hundred orders, each an instance of a process, and kills one of these
// workers.
func (d *demo) fulfil(ctx context.Context) (*fulfilled, error) {
	ctx, stop := context.WithTimeoutCause(ctx, limit, fmt.Errorf("not finished after %s", limit))
	defer stop()
	say("\nA hundred orders, each an instance of the process examples/order/order.json:")
	if err := d.define(ctx); err != nil {
		return nil, err
	}
	if err := d.startWorkers(
		group{"stock", "order", "stock.,mail.", "4"},
		group{"payment", "order", "payment.", "4"},
		group{"parcel-1", "order", "parcel.", "6"},
		group{"parcel-2", "order", "parcel.", "6"},
	); err != nil {
		return nil, err
	}
	how, err := d.runSQL(ctx, ordersSQL)
	if err != nil {
		return nil, fmt.Errorf("start orders with %s: %w", how, err)
	}
	say("started %d orders with %s", orderCount, how)
	victim := d.named("parcel-1")
	if err := d.murder(ctx, victim, func(s snapshot) bool { return s.Waiting > 0 && s.held(victim) >= 3 }); err != nil {
		return nil, err
	}
	if err := d.watch(ctx, func(s snapshot) bool { return s.Waiting+s.Over == orderCount }); err != nil {
		return nil, err
	}
	for _, said := range []struct{ what, sql string }{
		{"all orders wait, or are over. A person agrees to the large one, with %s:", agree},
		{"\nand all that are not over are collected. The message to the large one is kept until it gets there, with %s:", collect},
	} {
		how, err := d.runSQL(ctx, said.sql)
		if err != nil {
			return nil, fmt.Errorf("with %s: %w", how, err)
		}
		say(said.what+"\n%s", how, strings.TrimPrefix(said.sql, "\n"))
	}
	if err := d.watch(ctx, func(s snapshot) bool { return s.Over == orderCount }); err != nil {
		return nil, err
	}
	return d.settled(ctx, victim)
}

// define creates the tables of the order's departments and deploys the process.
func (d *demo) define(ctx context.Context) error {
	schema, err := os.ReadFile(filepath.Join(d.orderHome, "schema.sql"))
	if err != nil {
		return err
	}
	if _, err := d.pool.Exec(ctx, string(schema)); err != nil {
		return err
	}
	output, err := d.workflowctl(ctx, "define", filepath.Join(d.orderHome, "order.json"))
	fmt.Print(output)
	return err
}

func (d *demo) workflowctl(ctx context.Context, args ...string) (string, error) {
	cmd := exec.CommandContext(ctx, d.bin("workflowctl"), args...)
	cmd.Env = append(inherited(), "DATABASE_URL="+d.url)
	output, err := cmd.CombinedOutput()
	if err != nil {
		err = fmt.Errorf("workflowctl %s: %w\n%s", args[0], err, output)
	}
	return string(output), err
}

// fulfilled is the state of the orders in the database at the end.
type fulfilled struct {
	Collected int
	Regretted int // undone, with a letter to the customer
	Failed    int // undone
	Undone    int // steps
	Recovered int // runs of the killed worker that succeeded in another worker
	Tasks     int // completed by people
	Wrong     int // orders that the books of a department contradict

	Example string // a failed order's instance

	broken []line // the number of rows of each invariant
	victim string
}

func (d *demo) settled(ctx context.Context, victim *process) (*fulfilled, error) {
	rows, _ := d.pool.Query(ctx, `
		WITH instance AS (
			SELECT id, business_key AS order_id, status, coalesce((output_payload->>'collected')::boolean, false) AS collected
			FROM process_instance
		), books AS (
			SELECT collected::int AS one,
			       (SELECT count(*) FROM order_reservation r WHERE r.order_id = i.order_id AND NOT released) AS reserved,
			       (SELECT count(*) FROM order_payment p WHERE p.order_id = i.order_id AND NOT refunded) AS paid,
			       (SELECT count(*) FROM order_parcel p WHERE p.order_id = i.order_id AND NOT unpacked) AS packed,
			       (SELECT count(*) FROM order_label l WHERE l.order_id = i.order_id AND NOT void) AS labelled
			FROM instance i
		)
		SELECT (SELECT count(*) FROM instance WHERE collected) AS collected,
		       (SELECT count(*) FROM instance WHERE status = 'COMPLETED' AND NOT collected) AS regretted,
		       (SELECT count(*) FROM instance WHERE status = 'FAILED') AS failed,
		       (SELECT count(*) FROM compensation_record WHERE status = 'Completed') AS undone,
		       (SELECT count(DISTINCT r.id)
		        FROM workflow_run r
		        JOIN workflow_event e ON e.workflow_id = r.id AND e.event_type = 'expired'
		        WHERE r.status = 'succeeded' AND e.data->>'worker' LIKE $1 || '-%' AND r.settled_by NOT LIKE $1 || '-%') AS recovered,
		       (SELECT count(*) FROM user_task WHERE state = 'completed') AS tasks,
		       (SELECT count(*) FROM books WHERE (reserved, paid, packed, labelled) <> (one, one, one, one)) AS wrong,
		       (SELECT coalesce(min(id::text), '') FROM instance WHERE status = 'FAILED') AS example`, victim.name)
	r, err := pgx.CollectExactlyOneRow(rows, pgx.RowToAddrOfStructByNameLax[fulfilled])
	if err != nil {
		return nil, fmt.Errorf("look at the orders: %w", err)
	}
	r.victim = victim.name
	for _, view := range invariants {
		rows, _ := d.pool.Query(ctx, `SELECT count(*) FROM `+view)
		n, err := pgx.CollectExactlyOneRow(rows, pgx.RowTo[int])
		if err != nil {
			return nil, fmt.Errorf("look at %s: %w", view, err)
		}
		r.broken = append(r.broken, line{view, n})
	}
	return r, nil
}

// show prints where a failed order was, and the result.
func (r *fulfilled) show(ctx context.Context, w io.Writer, d *demo) error {
	picture, err := d.workflowctl(ctx, "graph", "--instance", r.Example)
	if err != nil {
		return err
	}
	fmt.Fprintf(w, "\nOne that failed and was undone, as a Mermaid flowchart (workflowctl graph --instance %s):\n\n%s", r.Example, picture)
	table(w, append([]line{
		{"orders started", orderCount},
		{"collected", r.Collected},
		{"declined: undone, with a letter", r.Regretted},
		{"broken: failed, and undone", r.Failed},
		{"steps undone", r.Undone},
		{"tasks completed by a person", r.Tasks},
		{"recovered from killed " + r.victim, r.Recovered},
		{"orders with wrong books", r.Wrong},
	}, r.broken...))
	return nil
}

// verdict returns an error that lists what is not as expected.
func (r *fulfilled) verdict() error {
	var problems []error
	for _, c := range []struct {
		what      string
		got, want int
	}{
		{"orders collected", r.Collected, 80},
		{"orders regretted", r.Regretted, 10},
		{"orders failed", r.Failed, 10},
		{"tasks completed", r.Tasks, 1},
		{"orders with wrong books", r.Wrong, 0},
	} {
		if c.got != c.want {
			problems = append(problems, fmt.Errorf("%d %s, want %d", c.got, c.what, c.want))
		}
	}
	for _, view := range r.broken {
		if view.value != 0 {
			problems = append(problems, fmt.Errorf("%s has %d rows, want none", view.name, view.value))
		}
	}
	if r.Recovered == 0 {
		problems = append(problems, fmt.Errorf("no run of %s was recovered", r.victim))
	}
	return errors.Join(problems...)
}
