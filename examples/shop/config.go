package main

import (
	"context"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/kelseyhightower/envconfig"

	"github.com/simple-workflow/simple-workflow/worker"
)

// fromEnvironment returns the worker's configuration, except for its mux, and the directory of the shop's data.
func fromEnvironment() (config worker.Config, dir string, err error) {
	var s struct {
		DatabaseURL string        `envconfig:"DATABASE_URL" required:"true"`
		Dir         string        `envconfig:"SHOP_DIR" required:"true"`
		Prefixes    []string      `envconfig:"WORKER_TYPE_PREFIXES" default:"media.,billing."`
		Name        string        `envconfig:"WORKER_ID" default:"shop"`
		Concurrency int           `envconfig:"WORKER_CONCURRENCY" default:"8"`
		Lease       time.Duration `envconfig:"WORKER_LEASE"`
	}
	if err := envconfig.Process("", &s); err != nil {
		return config, "", err
	}
	pool, err := pgxpool.New(context.Background(), s.DatabaseURL)
	if err != nil {
		return config, "", err
	}
	return worker.Config{
		Pool:        pool,
		Prefixes:    s.Prefixes,
		Name:        s.Name,
		Concurrency: s.Concurrency,
		Lease:       s.Lease,
	}, s.Dir, nil
}
