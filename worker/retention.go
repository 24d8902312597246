package worker

import (
	"cmp"
	"time"

	"github.com/simple-workflow/simple-workflow/internal/cleanup"
	"github.com/simple-workflow/simple-workflow/internal/shipped"
)

// KeepForever is a duration in Retention. It means that nothing is removed.
const KeepForever time.Duration = -1

// Retention says how long finished work of the worker's prefixes is kept. A zero field means its default; all others
// are from a minute to 100 years, or KeepForever.
//
// A worker whose role has the rights of the engine also removes events, messages and processes. A worker that
// covers "default." also removes runs of types for which no worker has asked for a retention. The settings
// of all workers are in workflow_retention, and the longest time wins: no worker removes what another one
// keeps.
type Retention struct {
	// Off means that this worker removes nothing, and asks for nothing to be kept.
	Off bool

	// Every is the time between two cleanups of a prefix, whichever workers do them. 1 s to
	// a year; default: an hour.
	Every time.Duration

	// Finished is the age at which succeeded and cancelled runs are removed, with their history. Default: 30 days.
	Finished time.Duration

	// Failed is the age at which failed runs are removed, with their history. Default: 90 days.
	Failed time.Duration

	// Deleted is the time after which soft-deleted runs are removed from the table. Default:
	// 30 days.
	Deleted time.Duration

	// Published is the age at which published events are removed. Default: 7 days.
	Published time.Duration

	// Processes is the age at which finished process instances are removed with all their rows. Messages are
	// removed that long after they expired. Default: 90 days.
	Processes time.Duration
}

// withDefaults returns r with defaults filled in, and calls bad for each bad field.
func (r Retention) withDefaults(bad func(format string, args ...any)) Retention {
	r.Every = cmp.Or(r.Every, shipped.CleanupEvery)
	if r.Every < shipped.MinCleanupEvery || r.Every > shipped.MaxCleanupEvery {
		bad("Retention.Every %s: use %s to %s, or Retention.Off", r.Every, shipped.MinCleanupEvery, shipped.MaxCleanupEvery)
	}
	for _, f := range []struct {
		name      string
		keep      *time.Duration
		otherwise time.Duration
	}{
		{"Finished", &r.Finished, shipped.KeepFinished}, {"Failed", &r.Failed, shipped.KeepFailed}, {"Deleted", &r.Deleted, shipped.KeepDeleted},
		{"Published", &r.Published, shipped.KeepPublished}, {"Processes", &r.Processes, shipped.KeepProcesses},
	} {
		*f.keep = cmp.Or(*f.keep, f.otherwise)
		if *f.keep != KeepForever && (*f.keep < shipped.MinKeep || *f.keep > shipped.MaxKeep) {
			bad("Retention.%s %s: use %s to %s, or KeepForever", f.name, *f.keep, shipped.MinKeep, shipped.MaxKeep)
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
