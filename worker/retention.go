package worker

import (
	"cmp"
	"time"

	"github.com/simple-workflow/simple-workflow/internal/cleanup"
	"github.com/simple-workflow/simple-workflow/internal/shipped"
)

// KeepForever is a time in Retention: what is over is never removed.
const KeepForever time.Duration = -1

// Retention says for how long what is over is kept, of the worker's prefixes. A worker whose role has the rights of the engine
// removes events, messages and processes, too, and one that covers "default." removes runs of types that no worker asks for. A zero field means its default; KeepForever
// is for ever. What workers ask for stands in workflow_retention, and the longest time counts: a worker removes nothing that another one
// keeps.
type Retention struct {
	// Off has this worker remove nothing and ask for nothing.
	Off bool

	// Every is the time between two cleanups of a prefix, whichever worker does them. 1 s to a year; default: an hour.
	Every time.Duration

	// Finished is the age at which succeeded and cancelled runs are removed, with their history. Default: 30 days.
	Finished time.Duration

	// Failed is the age at which failed runs are removed, with their history. Default: 90 days.
	Failed time.Duration

	// Deleted is the time after which soft-deleted runs are removed for good. Default: 30 days.
	Deleted time.Duration

	// Published is the age at which published events are removed. Default: 7 days.
	Published time.Duration

	// Processes is the age at which finished instances of processes are removed, with all that is theirs, and messages that long after
	// their time is over. Default: 90 days.
	Processes time.Duration
}

// withDefaults tells what is bad of it.
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

// cleaner removes what is old.
func (c Config) cleaner() *cleanup.Cleaner {
	r := c.Retention
	return cleanup.New(c.Pool, c.Prefixes, r.Every, cleanup.Keep{
		Finished: r.Finished, Failed: r.Failed, Deleted: r.Deleted, Published: r.Published, Processes: r.Processes, Logger: c.Logger,
	})
}
