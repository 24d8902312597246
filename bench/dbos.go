package main

import (
	"context"
	"errors"
	"fmt"
	"os/exec"
	"sync"
	"sync/atomic"
	"time"

	"github.com/dbos-inc/dbos-transact-golang/dbos"
	"github.com/jackc/pgx/v5/pgxpool"
)

// transact is DBOS Transact. It takes part in the processes scenario only.
type transact struct{}

const (
	dbosCallers = 32
	dbosConns   = 20
	dbosSteps   = 5
)

func (transact) name() string    { return "DBOS" }
func (transact) version() string { return moduleVersion("github.com/dbos-inc/dbos-transact-golang") }
func (transact) settings() string {
	return fmt.Sprintf("RunWorkflow without a queue from %d goroutines, pool of %d, all else as shipped", dbosCallers, dbosConns)
}

func (transact) install(ctx context.Context, db *database) error {
	c, err := dbosContext(ctx, db.url)
	if err != nil {
		return err
	}
	return errors.Join(dbos.Launch(c), dbos.Shutdown(c, 10*time.Second)) // its launch migrates
}

func dbosContext(ctx context.Context, url string) (dbos.Context, error) {
	config, err := pgxpool.ParseConfig(url)
	if err != nil {
		return nil, err
	}
	config.MaxConns, config.MinConns = dbosConns, dbosConns
	pool, err := pgxpool.NewWithConfig(ctx, config)
	if err != nil {
		return nil, err
	}
	return dbos.NewContext(ctx, dbos.Config{
		AppName: "bench", SystemDBPool: pool, Logger: quiet(), ApplicationVersion: "v1", ExecutorID: "bench",
	})
}

func (transact) load(context.Context, *database, int, kind) error { return errNoQueue }

func (transact) producer(task, *pgxpool.Pool) (producer, error) { return nil, errNoQueue }

var errNoQueue = errors.New("DBOS is measured without a queue")

func (transact) busy(context.Context, *database) (bool, error) { return false, nil }

// stored counts steps.
func (transact) stored(ctx context.Context, db *database) (n int, err error) {
	err = db.QueryRow(ctx, `SELECT count(*) FROM dbos.operation_outputs`).Scan(&n)
	return n, err
}

// unsettled counts workflows.
func (transact) unsettled(ctx context.Context, db *database, n int) (left int, err error) {
	err = db.QueryRow(ctx, `SELECT $1::int - count(*) FROM dbos.workflow_status WHERE status = 'SUCCESS'`, n).Scan(&left)
	return left, err
}

func (transact) process(t task) *exec.Cmd { return exec.Command(self(), "child", t.String()) }

// fiveSteps runs five steps that do nothing.
func fiveSteps(c dbos.Context, n int) (int, error) {
	for range dbosSteps {
		if _, err := dbos.RunAsStep(c, func(context.Context) (struct{}, error) { return struct{}{}, nil }, dbos.WithStepName("step")); err != nil {
			return 0, err
		}
	}
	return n, nil
}

// carryOut runs t.Runs workflows.
func (transact) carryOut(ctx context.Context, t task, c *conversation) error {
	d, err := dbosContext(ctx, t.URL)
	if err != nil {
		return err
	}
	dbos.RegisterWorkflow(d, fiveSteps)
	if err := dbos.Launch(d); err != nil || !c.ready() {
		return err
	}
	var next atomic.Int64
	var all sync.WaitGroup
	errs := make(chan error, dbosCallers)
	for range dbosCallers {
		all.Go(func() {
			for n := int(next.Add(1)); n <= t.Runs; n = int(next.Add(1)) {
				h, err := dbos.RunWorkflow(d, fiveSteps, n)
				if err == nil {
					_, err = h.GetResult()
				}
				if err != nil {
					errs <- err
					return
				}
			}
		})
	}
	all.Wait()
	close(errs)
	if err := <-errs; err != nil {
		return err
	}
	c.done(nil)
	return nil
}
