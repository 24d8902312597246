// Package worktest runs a worker for the time that an example needs.
package worktest

import (
	"context"
	"log/slog"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/simple-workflow/simple-workflow/graph"
	"github.com/simple-workflow/simple-workflow/run"
	"github.com/simple-workflow/simple-workflow/worker"
)

// Until runs a worker of the types under shop., and of processes, until done reports true. It panics if that takes a minute.
func Until(ctx context.Context, pool *pgxpool.Pool, mux *worker.Mux, done func() bool) {
	working, stop := context.WithCancel(ctx)
	ended := make(chan error, 1)
	go func() {
		ended <- worker.Run(working, worker.Config{
			Pool: pool, Mux: mux, Prefixes: []string{"shop."}, Processes: graph.New(pool),
			PollInterval: 20 * time.Millisecond, Logger: slog.New(slog.DiscardHandler),
		})
	}()
	for begun := time.Now(); !done(); time.Sleep(5 * time.Millisecond) {
		if time.Since(begun) > time.Minute {
			panic("the example is not done after a minute")
		}
	}
	stop()
	if err := <-ended; err != nil {
		panic(err)
	}
}

// Finish runs a worker until the run has finished, and returns the run.
func Finish(ctx context.Context, pool *pgxpool.Pool, mux *worker.Mux, id uuid.UUID) (r *run.Run) {
	Until(ctx, pool, mux, func() bool {
		var err error
		if r, err = run.Read(ctx, pool, id); err != nil {
			panic(err)
		}
		return r.Status.Finished()
	})
	return r
}

// Complete runs a worker until the instance of a process is over, and returns its status.
func Complete(ctx context.Context, pool *pgxpool.Pool, mux *worker.Mux, instance uuid.UUID) (status string) {
	Until(ctx, pool, mux, func() bool {
		// There is no row until the run that starts the instance was executed.
		_ = pool.QueryRow(ctx, `SELECT status FROM process_instance WHERE id = $1`, instance).Scan(&status)
		return status == "COMPLETED" || status == "FAILED" || status == "CANCELLED"
	})
	return status
}
