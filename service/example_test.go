package service_test

import (
	"context"
	"fmt"
	"os"
	"syscall"

	"github.com/simple-workflow/simple-workflow/internal/pgtest"
	"github.com/simple-workflow/simple-workflow/run"
	"github.com/simple-workflow/simple-workflow/service"
	"github.com/simple-workflow/simple-workflow/worker"
)

// A program that calls Run has the settings, probes, metrics and logs of the worker binary. At SIGTERM it stops in
// order and returns an exit code. Main does the same, and exits with that code.
func ExampleRun() {
	ctx, pool, done := pgtest.Example()
	defer done()
	_ = os.Setenv("WORKER_DATABASE_URL", pool.Config().ConnString())
	_ = os.Setenv("WORKER_LOG_LEVEL", "error")
	defer os.Unsetenv("WORKER_DATABASE_URL")
	defer os.Unsetenv("WORKER_LOG_LEVEL")

	enqueued, _ := run.Enqueue(ctx, pool, run.New{Type: "shop.count.v1"})
	code := service.Run(service.Program{
		Name:     "shop",
		Prefixes: []string{"shop."},
		Setup: func(s *service.Setup) error {
			worker.Handle(s.Mux, "shop.count.v1", func(ctx context.Context, _ struct{}) (runs int, err error) {
				defer func() { _ = syscall.Kill(os.Getpid(), syscall.SIGTERM) }() // as a supervisor does
				return runs, s.Pool.QueryRow(ctx, `SELECT count(*) FROM workflow_run`).Scan(&runs)
			})
			return nil
		},
	}, nil)
	r, _ := run.Read(ctx, pool, enqueued.ID)
	fmt.Println(code, r.Status, string(r.Result))
	// Output: 0 succeeded 1
}
