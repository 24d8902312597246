// Command shop is a worker as users write it: a pool, a mux with ordinary functions, and Run.
package main

import (
	"context"
	"log"
	"os/signal"
	"syscall"

	"github.com/simple-workflow/simple-workflow/examples/shop/billing"
	"github.com/simple-workflow/simple-workflow/examples/shop/media"
	"github.com/simple-workflow/simple-workflow/worker"
)

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGINT, syscall.SIGTERM)
	defer stop()
	config, dir, err := fromEnvironment()
	if err != nil {
		log.Fatal(err)
	}
	gallery, err := media.Open(dir)
	if err != nil {
		log.Fatal(err)
	}
	config.Mux = worker.NewMux()
	worker.Handle(config.Mux, "media.thumbnail.v1", gallery.Thumbnail)
	worker.Handle(config.Mux, "billing.invoice_charge.v1", billing.Charge)
	if err := worker.Run(ctx, config); err != nil {
		log.Fatal(err)
	}
}
