package main

import (
	"context"
	"os/exec"

	"github.com/jackc/pgx/v5/pgxpool"
)

// An engine is what is measured. Its workers and producers are processes of their own, so
// that what they use can be told from what the bench uses.
type engine interface {
	name() string
	version() string

	// settings says how it was set up, for the report.
	settings() string

	// install makes the engine's tables in an empty database.
	install(ctx context.Context, db *database) error

	// load stores n runs by plain SQL. Foreground runs have the payload {"n": 1} to
	// {"n": n}, others {"n": -1}.
	load(ctx context.Context, db *database, n int, what kind) error

	// busy reports whether a foreground run is unfinished. It is asked when all of them have
	// been seen by a handler, and costs little.
	busy(ctx context.Context, db *database) (bool, error)

	// stored counts foreground runs, settled or not. An engine that deletes what is done
	// knows only of the others.
	stored(ctx context.Context, db *database) (int, error)

	// unsettled counts foreground runs that are not recorded as succeeded, of n that were
	// stored.
	unsettled(ctx context.Context, db *database, n int) (int, error)

	// process returns the program that carries out t.
	process(t task) *exec.Cmd

	// producer stores runs by the engine's own means.
	producer(t task, pool *pgxpool.Pool) (producer, error)
}

// A producer stores runs with the payloads {"n": n}.
type producer interface {
	one(ctx context.Context, n int) error
	many(ctx context.Context, ns []int) error
}

// A kind of rows that an engine can load.
type kind string

const (
	foreground kind = "foreground" // due now
	low        kind = "low"        // due now, of lower priority than the foreground
	future     kind = "future"     // due tomorrow, of higher priority than the foreground
	foreign    kind = "foreign"    // due now, of one type that no worker here has
	foreign50  kind = "foreign50"  // the same, of 50 types
	finished   kind = "finished"   // succeeded long ago
	leased     kind = "leased"     // in the hands of other workers
)

// A task is what a child process is told to do. Settings that an engine does not have are
// ignored by it.
type task struct {
	Engine string `json:"engine"`
	URL    string `json:"url"`
	Do     string `json:"do"` // work, enqueue, floor or publish

	Runs int  `json:"runs"` // to enqueue
	Bulk bool `json:"bulk"` // 1,000 a call

	Default  bool     `json:"default"`  // the settings for idle pick-up that the engine ships with
	Idle     bool     `json:"idle"`     // the settings that suit idle pick-up best
	Types    []string `json:"types"`    // ours: types to handle
	Prefixes []string `json:"prefixes"` // ours: of these types
	NoWakeUp bool     `json:"noWakeUp"` // ours
	Poll     int      `json:"poll"`     // ours: milliseconds between polls
	Slots    int      `json:"slots"`    // ours: concurrency; negative: the default
	Lease    int      `json:"lease"`    // ours: milliseconds of a lease
	Loops    int      `json:"loops"`    // ours: loops of the floor
	Keep     int      `json:"keep"`     // ours: seconds for which finished runs are kept; 0: for ever
	Graph    bool     `json:"graph"`    // ours: carries out processes
	Counted  string   `json:"counted"`  // ours: a type of which settlements count as handled

	Told      bool   `json:"told"`      // publish: says of each event when it reached the sink
	JetStream string `json:"jetStream"` // publish: to this server; empty: to nobody
	Batch     int    `json:"batch"`     // watermill: events read at once; 0: the default
	Queue     bool   `json:"queue"`     // watermill: a queue, of which events are deleted, in place of a log with offsets
}
