package main

import (
	"context"
	_ "embed"
	"fmt"
	"os/exec"
	"strings"

	"github.com/jackc/pgx/v5"

	"github.com/simple-workflow/simple-workflow/examples/shop/orders"
)

//go:embed enqueue.sql
var enqueueSQL string

// enqueue inserts most runs with plain SQL, as any program may, and some from Go, each in one transaction with its
// order.
func (d *demo) enqueue(ctx context.Context) error {
	how, err := d.runSQL(ctx, enqueueSQL)
	if err != nil {
		return fmt.Errorf("enqueue with %s: %w", how, err)
	}
	customers := []string{"Ada", "Edsger", "Grace", "Barbara", "Tony", "Leslie", "Frances", "Niklaus", "Radia", "Jim"}
	for n, customer := range customers {
		err := pgx.BeginFunc(ctx, d.pool, func(tx pgx.Tx) error {
			_, err := orders.Place(ctx, tx, orders.Order{Customer: customer, Cents: int64(999 + n)})
			return err
		})
		if err != nil {
			return err
		}
	}
	if err := d.pool.QueryRow(ctx, `SELECT count(*) FROM workflow_run`).Scan(&d.enqueued); err != nil {
		return err
	}
	say("enqueued %d runs with %s and %d from Go, each of these in a transaction with its order",
		d.enqueued-len(customers), how, len(customers))
	return nil
}

// runSQL uses psql if possible. It does not do so for a database that is not ours, because its address may contain a
// password, which must not be a program argument.
func (d *demo) runSQL(ctx context.Context, text string) (how string, err error) {
	psql, err := exec.LookPath("psql")
	if err != nil || d.server == nil {
		_, err := d.pool.Exec(ctx, text)
		return "SQL", err
	}
	cmd := exec.CommandContext(ctx, psql, "--no-psqlrc", "--quiet", "--set=ON_ERROR_STOP=1", d.url)
	cmd.Stdin = strings.NewReader(text)
	if output, err := cmd.CombinedOutput(); err != nil {
		return "psql", fmt.Errorf("%w\n%s", err, output)
	}
	return "psql", nil
}
