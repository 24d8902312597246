// Command order is a worker whose steps make up a process, order.json. Its functions belong to separate departments
// and know nothing about processes. The file says which step follows which.
package main

import (
	"context"
	"log"
	"os/signal"
	"syscall"

	"github.com/simple-workflow/simple-workflow/graph"
	"github.com/simple-workflow/simple-workflow/worker"
)

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGINT, syscall.SIGTERM)
	defer stop()
	config, err := fromEnvironment()
	if err != nil {
		log.Fatal(err)
	}
	if err := worker.Run(ctx, withProcesses(config)); err != nil {
		log.Fatal(err)
	}
}

// withProcesses adds everything that a worker needs to execute steps of processes and to advance processes.
func withProcesses(config worker.Config) worker.Config {
	config.Mux = departments()
	config.Processes = graph.New(config.Pool)
	return config
}

// departments are ordinary handlers.
func departments() *worker.Mux {
	mux := worker.NewMux()
	worker.Handle(mux, "stock.reserve.v1", reserve)
	worker.Handle(mux, "stock.release.v1", release)
	worker.Handle(mux, "payment.charge.v1", charge)
	worker.Handle(mux, "payment.refund.v1", refund)
	worker.Handle(mux, "parcel.pack.v1", pack)
	worker.Handle(mux, "parcel.unpack.v1", unpack)
	worker.Handle(mux, "parcel.label.v1", label)
	worker.Handle(mux, "parcel.void.v1", void)
	worker.Handle(mux, "mail.regret.v1", regret)
	return mux
}
