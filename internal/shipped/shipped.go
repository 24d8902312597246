// Package shipped has the defaults and bounds of the settings of workers and dispatchers. They are the same for the
// settings of the binaries and for the fields of worker.Config and dispatcher.Config.
package shipped

import "time"

// Defaults of a worker.
const (
	Prefix        = "default."
	Concurrency   = 100
	Lease         = 30 * time.Second
	Timeout       = time.Hour
	PollInterval  = time.Second
	ShutdownGrace = 10 * time.Second
	MaxPostponed  = 1000
	Batch         = 1000
)

// Bounds of a worker.
const (
	MinLease        = 2 * time.Second
	MaxLease        = 24 * time.Hour
	MinPollInterval = 10 * time.Millisecond
	MaxConcurrency  = 100_000
)

// Defaults of retention.
const (
	CleanupEvery  = time.Hour
	KeepFinished  = 30 * 24 * time.Hour
	KeepFailed    = 90 * 24 * time.Hour
	KeepDeleted   = 30 * 24 * time.Hour
	KeepPublished = 7 * 24 * time.Hour
	KeepProcesses = 90 * 24 * time.Hour
)

// Bounds of retention.
const (
	MinKeep         = time.Minute
	MaxKeep         = 876000 * time.Hour
	MinCleanupEvery = time.Second
	MaxCleanupEvery = 8760 * time.Hour
)

// Defaults of a run.
const (
	MaxAttempts = 3               // default of the column max_attempts; it means the number that the policy of the run's type sets
	Attempts    = 25              // attempts of a run if no policy sets a number
	BackoffBase = time.Second     // pause before the second attempt
	BackoffCap  = 5 * time.Minute // longest pause, jitter aside
)

// MaxElsewhere is the longest time for which a run may be handed on.
const MaxElsewhere = 24 * time.Hour
