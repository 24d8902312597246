package worker

import (
	"cmp"
	"time"

	"github.com/simple-workflow/simple-workflow/internal/cleanup"
)

// KeepForever is a duration in Retention. It means that nothing is removed.
const KeepForever time.Duration = -1

// Defaults of Retention.
const (
	DefaultCleanupEvery  = time.Hour
	DefaultKeepFinished  = 30 * 24 * time.Hour
	DefaultKeepFailed    = 90 * 24 * time.Hour
	DefaultKeepDeleted   = 30 * 24 * time.Hour
	DefaultKeepPublished = 7 * 24 * time.Hour
	DefaultKeepProcesses = 90 * 24 * time.Hour
)

// Bounds of Retention.
const (
	MinKeep         = time.Minute
	MaxKeep         = 876000 * time.Hour
	MinCleanupEvery = time.Second
	MaxCleanupEvery = 8760 * time.Hour
)

// Retention says how long finished work of the worker's prefixes is kept. A zero field means its default.
//
// A worker whose role has the rights of the engine also removes events, messages and processes. A worker that
// covers DefaultPrefix also removes runs of types for which no worker has asked for a retention. The settings
// of all workers are in workflow_retention, and the longest time wins: no worker removes what another one
// keeps.
type Retention struct {
	// Off means that this worker removes nothing, and asks for nothing to be kept.
	Off bool

	// Every is the time between two cleanups of a prefix, whichever workers do them. MinCleanupEvery to
	// MaxCleanupEvery; default: DefaultCleanupEvery.
	Every time.Duration

	// Finished is the age at which succeeded and cancelled runs are removed, with their history. Default: DefaultKeepFinished.
	Finished time.Duration

	// Failed is the age at which failed runs are removed, with their history. Default: DefaultKeepFailed.
	Failed time.Duration

	// Deleted is the time after which soft-deleted runs are removed from the table. Default:
	// DefaultKeepDeleted.
	Deleted time.Duration

	// Published is the age at which published events are removed. Default: DefaultKeepPublished.
	Published time.Duration

	// Processes is the age at which finished process instances are removed with all their rows. Messages are
	// removed that long after they expired. Default: DefaultKeepProcesses.
	Processes time.Duration
}

// withDefaults returns r with defaults filled in, and calls bad for each bad field.
func (r Retention) withDefaults(bad func(format string, args ...any)) Retention {
	r.Every = cmp.Or(r.Every, DefaultCleanupEvery)
	if r.Every < MinCleanupEvery || r.Every > MaxCleanupEvery {
		bad("Retention.Every %s: use %s to %s, or Retention.Off", r.Every, MinCleanupEvery, MaxCleanupEvery)
	}
	for _, f := range []struct {
		name      string
		keep      *time.Duration
		otherwise time.Duration
	}{
		{"Finished", &r.Finished, DefaultKeepFinished}, {"Failed", &r.Failed, DefaultKeepFailed}, {"Deleted", &r.Deleted, DefaultKeepDeleted},
		{"Published", &r.Published, DefaultKeepPublished}, {"Processes", &r.Processes, DefaultKeepProcesses},
	} {
		*f.keep = cmp.Or(*f.keep, f.otherwise)
		if *f.keep != KeepForever && (*f.keep < MinKeep || *f.keep > MaxKeep) {
			bad("Retention.%s %s: use %s to %s, or KeepForever", f.name, *f.keep, MinKeep, MaxKeep)
		}
	}
	return r
}

// cleaner returns what removes old rows.
func (c Config) cleaner() *cleanup.Cleaner {
	r := c.Retention
	return cleanup.New(c.Pool, c.Prefixes, r.Every, cleanup.Keep{
		Finished: r.Finished, Failed: r.Failed, Deleted: r.Deleted, Published: r.Published, Processes: r.Processes, Logger: c.Logger,
	})
}
