package main

import (
	"context"
	"os/exec"

	"github.com/jackc/pgx/v5/pgxpool"
)

// An engine is what is measured. Its workers and producers are separate processes, so that their resource use can be
// told from that of the bench.
type engine interface {
	name() string
	version() string

	// settings says how it was set up, for the report.
	settings() string

	// install creates the engine's tables in an empty database.
	install(ctx context.Context, db *database) error

	// load stores n runs by plain SQL. Foreground runs have the payload {"n": 1} to
	// {"n": n}, others {"n": -1}.
	load(ctx context.Context, db *database, n int, what kind) error

	// busy reports whether a foreground run is unfinished. It is called once handlers have seen all of them, and
	// costs little.
	busy(ctx context.Context, db *database) (bool, error)

	// stored counts foreground runs, settled or not. An engine that deletes finished runs counts only the others.
	stored(ctx context.Context, db *database) (int, error)

	// unsettled counts the foreground runs, of n that were stored, that are not recorded as succeeded.
	unsettled(ctx context.Context, db *database, n int) (int, error)

	// process returns the program that executes t.
	process(t task) *exec.Cmd

	// producer returns a producer that stores runs through the engine's own API.
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
	foreign    kind = "foreign"    // due now, of one type that no worker here handles
	foreign50  kind = "foreign50"  // the same, of 50 types
	finished   kind = "finished"   // succeeded long ago
	leased     kind = "leased"     // leased by other workers
)

// A task tells a child process what to do. An engine ignores settings that it does not have.
type task struct {
	Engine string `json:"engine"`
	URL    string `json:"url"`
	Do     string `json:"do"` // work, enqueue, floor or publish

	Runs int  `json:"runs"` // to enqueue
	Bulk bool `json:"bulk"` // 1,000 a call

	Default  bool     `json:"default"`  // the settings for idle pick-up that the engine ships with
	Idle     bool     `json:"idle"`     // the settings that suit idle pick-up best
	Start    bool     `json:"start"`    // the settings of the engine's start page
	Types    []string `json:"types"`    // ours: types to handle
	Prefixes []string `json:"prefixes"` // ours: of these types
	NoWakeUp bool     `json:"noWakeUp"` // ours
	Poll     int      `json:"poll"`     // ours: milliseconds between polls
	Slots    int      `json:"slots"`    // ours: concurrency; 0: as shipped
	Lease    int      `json:"lease"`    // ours: milliseconds of a lease; 0: as shipped
	Beats    bool     `json:"beats"`    // ours: counts statements and heartbeats, and has handlers that sleep
	Loops    int      `json:"loops"`    // ours: loops of the floor
	Keep     int      `json:"keep"`     // ours: seconds for which finished runs are kept; 0: for ever
	Efforts  []effort `json:"efforts"`  // ours: types to handle whose handlers take time
	Journal  string   `json:"journal"`  // ours: a file to which handlers append when they are called
	Graph    bool     `json:"graph"`    // ours: executes processes
	Counted  string   `json:"counted"`  // ours: a type whose settlements count as handled

	Told      bool   `json:"told"`      // publish: reports for each event when it reached the sink
	JetStream string `json:"jetStream"` // publish: to this server; empty: to no broker
	Batch     int    `json:"batch"`     // watermill: events read at once; 0: the default
	Queue     bool   `json:"queue"`     // watermill: a queue, whose events are deleted, instead of a log with offsets
}
