// Package shipped holds the values that ship: the defaults and bounds of the settings of workers and dispatchers. The binaries'
// settings and the fields of worker.Config and dispatcher.Config have the same.
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
	MaxAttempts = 3               // of the column max_attempts; it stands for the policy of the run's type
	Attempts    = 25              // where no policy says how often a run is tried
	BackoffBase = time.Second     // the pause before the second attempt
	BackoffCap  = 5 * time.Minute // the longest pause, jitter aside
)

// MaxElsewhere is the longest that a run may be executed elsewhere.
const MaxElsewhere = 24 * time.Hour
