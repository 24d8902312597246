package main

import (
	"context"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/kelseyhightower/envconfig"

	"github.com/simple-workflow/simple-workflow/worker"
)

// fromEnvironment returns the worker's configuration, except for its mux.
func fromEnvironment() (config worker.Config, err error) {
	var s struct {
		DatabaseURL string        `envconfig:"DATABASE_URL" required:"true"`
		Prefixes    []string      `envconfig:"WORKER_TYPE_PREFIXES" default:"stock.,payment.,parcel.,mail."`
		Name        string        `envconfig:"WORKER_ID" default:"order"`
		Concurrency int           `envconfig:"WORKER_CONCURRENCY" default:"8"`
		Lease       time.Duration `envconfig:"WORKER_LEASE"`
	}
	if err := envconfig.Process("", &s); err != nil {
		return config, err
	}
	pool, err := pgxpool.New(context.Background(), s.DatabaseURL)
	if err != nil {
		return config, err
	}
	return worker.Config{
		Pool:        pool,
		Prefixes:    s.Prefixes,
		Name:        s.Name,
		Concurrency: s.Concurrency,
		Lease:       s.Lease,
	}, nil
}
