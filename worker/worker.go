// Package worker leases runs, calls their handlers, extends the leases meanwhile, and settles the outcomes.
//
//	mux := worker.NewMux()
//	worker.Handle(mux, "billing.invoice_charge.v1", billing.Charge)
//	err := worker.Run(ctx, worker.Config{Pool: pool, Mux: mux, Prefixes: []string{"billing."}})
//
// A run passes through three steps. poll leases it. execute calls its handler, outside of any transaction.
// settle records the outcome in one short transaction, which is fenced by the lease. Other goroutines work
// beside these: beat extends leases, watch gives up leases that could not be extended in time, and reclaim
// takes back the expired leases of dead workers.
package worker

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/simple-workflow/simple-workflow/internal/leasing"
	"github.com/simple-workflow/simple-workflow/internal/naming"
	"github.com/simple-workflow/simple-workflow/internal/session"
	"github.com/simple-workflow/simple-workflow/lease"
)

// A Worker executes runs. Create it with New.
type Worker struct {
	config   Config
	engine   engine
	name     string        // with its random suffix
	db       *pgxpool.Pool // the worker's own connections, except for heartbeats and wake-ups
	beats    *pgxpool.Pool // a single connection for heartbeats, so that they never wait for another statement
	sessions *session.Sessions
	jobs     jobs
	doubts   leasing.Doubts
	outages  outages
	policies atomic.Pointer[lease.Policies] // as last read; nil before the first read
	paused   atomic.Pointer[[]string]       // prefixes and types, by the last discovery; nil before the first
	settles  chan *job                      // outcomes that may share a transaction
	solos    chan *job                      // outcomes that must be settled alone
	settling chan struct{}                  // holds a token while a batch is being settled
	wake     chan struct{}
	tending  chan struct{} // wakes tend before its next tick
	hurry    chan struct{} // closed by StopNow
	hurryUp  sync.Once

	tally tally // what was leased and settled since the last report

	complaints sync.Mutex
	complained map[string]time.Time // when each message was last logged as a warning
	faults     map[string]*failing  // statements that fail for every row, by name

	trouble  moment      // when the database was last out of reach
	lastPoll moment      // when a poll last succeeded
	carrying atomic.Bool // steps were carried on since the last turn of the poll loop
	lastSeek moment      // when the poll loop last looked for runs
	lastLook moment      // when discovery last found out what is due and what is paused
	lastFull moment      // when the poll loop last had no room for more runs, and so did not poll
	wrote    moment      // when the database last accepted a change
	lastTurn moment      // when the poll loop last started a turn
	lastTick moment      // when watch last ticked
	stood    moment      // when this process was last found to have been frozen
	hooked   []moment    // when an outcome was last recorded together with each hook
	unheard  moment      // when a heartbeat last failed

	effectTimeout time.Duration // shorter in tests
}

// ErrStuck is returned by Run when more handlers than Config.Concurrency ignore the end of their contexts. Only
// a new process frees their memory and goroutines.
var ErrStuck = errors.New("worker: too many handlers ignore the end of their context")

// ErrStalled is returned by Run when the poll loop has not turned for more than three leases.
var ErrStalled = errors.New("worker: the poll loop has stalled")

// Run creates a Worker with New and calls its Run.
func Run(ctx context.Context, config Config) error {
	w, err := New(config)
	if err != nil {
		return err
	}
	return w.Run(ctx)
}

// New checks config and returns a Worker. The Worker does nothing until its Run is called. The error names each
// bad field, its value and the fix.
func New(config Config) (*Worker, error) {
	config, err := config.withDefaults()
	if err != nil {
		return nil, err
	}
	w := &Worker{
		config:   config,
		name:     config.Name + "-" + strings.ReplaceAll(uuid.NewString(), "-", "")[:8],
		settles:  make(chan *job, 3*config.Concurrency+2*mostAhead), // holds all jobs of the worker
		solos:    make(chan *job, config.Concurrency),
		settling: make(chan struct{}, 1),
		wake:     make(chan struct{}, 1),
		tending:  make(chan struct{}, 1),
		hurry:    make(chan struct{}),

		complained: map[string]time.Time{},
		faults:     map[string]*failing{},
		engine:     newEngine(config),

		effectTimeout: effectTimeout,
	}
	w.hooked = make([]moment, len(w.engine.hooks))
	w.jobs.slots = config.Concurrency
	w.jobs.freed = make(chan struct{}, 1)
	w.jobs.refuses = w.mustWait
	w.jobs.markable = make(chan struct{}, 1)
	w.outages.heard = map[string]*heard{}
	w.outages.some = make(chan struct{}, 1)
	return w, nil
}

// Name returns the worker's name with its random suffix, as it appears in leased_by.
func (w *Worker) Name() string { return w.name }

// LastPoll returns when a poll last succeeded, or when there was last no room for more runs. It is zero before the first.
func (w *Worker) LastPoll() time.Time {
	if full := w.lastFull.time(); full.After(w.lastPoll.time()) {
		return full
	}
	return w.lastPoll.time()
}

// LastWrite returns when the database last accepted a change from this worker: a lease, a heartbeat, an
// outcome, or the worker's row in workflow_worker. If it has nothing else to write, the worker writes that row
// every 2.5 s. LastWrite is zero before the first change.
func (w *Worker) LastWrite() time.Time { return w.wrote.time() }

// InFlight returns how many leases the worker holds. They may be more than Config.Concurrency, because runs that wait for
// a handler to return, and outcomes that are not recorded yet, count too.
func (w *Worker) InFlight() int { return w.jobs.count() }

// StopNow ends the grace period of a Run whose context has ended: the contexts of its handlers end at once. It
// may be called at any time and more than once.
func (w *Worker) StopNow() { w.hurryUp.Do(func() { close(w.hurry) }) }

// Run works until ctx ends. Then it leases nothing more and lets handlers finish for Config.ShutdownGrace.
// After that it ends their contexts with the cause run.ErrShutdown, releases the runs that are left, charges no
// attempt for them, and returns nil. While the database cannot be reached, Run waits for it. Run may be called
// once.
//
// Run returns ErrStuck or ErrStalled if only a new process can help.
func (w *Worker) Run(ctx context.Context) error {
	if err := w.connect(ctx); err != nil {
		return err
	}
	defer hangUp(w.db, w.beats)
	w.lastTurn.now()
	w.lastTick.now()
	w.announce()

	// The seekers, which look for work, end with ctx or at a fatal error. The keepers continue until the last
	// outcome is recorded.
	seeking, stopSeeking := context.WithCancelCause(ctx)
	defer stopSeeking(nil)
	keeping, stopKeeping := context.WithCancel(context.WithoutCancel(ctx))
	defer stopKeeping()

	var keepers sync.WaitGroup
	for range batchSettlers {
		keepers.Go(func() { w.settleBatches(keeping) })
	}
	keepers.Go(func() { w.settleSolos(keeping) })
	keepers.Go(func() { w.mark(keeping) })
	keepers.Go(func() { w.beat(keeping) })
	keepers.Go(func() { w.watch(keeping, stopSeeking) })
	keepers.Go(func() { w.report(keeping) })
	keepers.Go(func() { w.tend(keeping) })
	keepers.Go(func() { w.tellOutages(keeping) })

	var seekers sync.WaitGroup
	seekers.Go(func() { w.poll(seeking) })
	seekers.Go(func() { w.reclaim(seeking) })
	if !w.config.Retention.Off {
		seekers.Go(func() { w.config.cleaner().Run(seeking) })
	}
	if !w.config.NoWakeUp {
		seekers.Go(func() { w.listen(seeking) })
	}
	<-seeking.Done()
	stopped := time.Now()
	w.jobs.shut()
	w.giveBack(w.jobs.withdraw(func(*job) bool { return true }))
	seekers.Wait()

	w.drain(max(w.config.ShutdownGrace-time.Since(stopped), 0))
	stopKeeping()
	keepers.Wait()
	w.letGo(ctx)
	if cause := context.Cause(seeking); errors.Is(cause, ErrStuck) || errors.Is(cause, ErrStalled) {
		return cause
	}
	return nil
}

// connect creates the worker's two pools. It does not wait for the database.
func (w *Worker) connect(ctx context.Context) (err error) {
	config := w.config.Pool.Config()
	config.MaxConns = Connections - 2 // one listens for wake-ups, one is for heartbeats
	config.MinConns = 0
	w.sessions = session.Prepare(config)
	session.Pace(config.ConnConfig)
	session.Spare(config.ConnConfig)
	beats := config.Copy()
	beats.MaxConns = 1
	if w.db, err = pgxpool.NewWithConfig(ctx, config); err != nil {
		return fmt.Errorf("worker: open connections: %w", err)
	}
	if w.beats, err = pgxpool.NewWithConfig(ctx, beats); err != nil {
		hangUp(w.db)
		return fmt.Errorf("worker: open the connection for heartbeats: %w", err)
	}
	return nil
}

// hangUp closes the pools. Closing a connection to a server that does not answer takes 15 s, so hangUp does not
// wait longer than obey.
func hangUp(pools ...*pgxpool.Pool) {
	closed := make(chan struct{})
	go func() {
		defer close(closed)
		for _, pool := range pools {
			pool.Close()
		}
	}()
	select {
	case <-closed:
	case <-time.After(obey):
	}
}

// announce logs what the worker covers, and warns of what looks like a mistake.
func (w *Worker) announce() {
	log := w.config.Logger
	log.Info("worker starts", "worker", w.name, "prefixes", w.config.Prefixes, "handlers", w.Patterns(),
		"concurrency", w.config.Concurrency, "lease", w.config.Lease, "poll_interval", w.config.PollInterval)
	for _, h := range w.Patterns() {
		if !slices.ContainsFunc(w.config.Prefixes, func(p string) bool { return naming.Overlap(p, h) }) {
			log.Warn("a handler is never used: no prefix covers it", "handler", h, "prefixes", w.config.Prefixes)
		}
	}
	for _, prefix := range w.config.Prefixes {
		if !slices.ContainsFunc(w.Patterns(), func(h string) bool { return naming.Overlap(prefix, h) }) {
			log.Warn("a prefix has no handler: its runs will fail as no_handler_registered", "prefix", prefix)
		}
	}
}

// reportTime is how long before the lease's time limit the handler's context ends. A handler that obeys its
// context then has time to report, and is not taken for one that died.
const reportTime = time.Second

// limit is the longest time that the job's handler may take, from when it begins; 0 means no limit.
func (j *job) limit() time.Duration { return max(j.Timeout-reportTime-longestWait, 0) }

// slots returns how many runs of a type the worker executes at once.
func (w *Worker) slots(typ string) int {
	if e := w.lookup(typ); e != nil && e.options.Concurrency > 0 {
		return min(e.options.Concurrency, w.config.Concurrency)
	}
	return w.config.Concurrency
}

// terms returns the conditions under which runs of a type are leased next.
func (w *Worker) terms(typ string) leasing.Terms {
	e := w.lookup(typ)
	t := leasing.Terms{Length: w.config.Lease, Timeout: max(w.config.Timeout, 0), Room: -1, Quick: w.jobs.isQuick(e)}
	if w.jobs.isBehind(e) {
		t.Room = 0
	}
	if e == nil {
		t.Grace = w.config.UnknownTypeGrace
		return t
	}
	if e.options.Lease > 0 {
		t.Length = e.options.Lease
	}
	if e.options.Timeout != 0 {
		t.Timeout = max(e.options.Timeout, 0)
	}
	if t.Timeout > 0 {
		t.Timeout += reportTime + longestWait
	}
	t.Limit = e.options.MaxAttempts
	if e.options.Concurrency > 0 && t.Room < 0 {
		t.Room, t.Group = max(e.options.Concurrency-w.jobs.countOf(e), 0), e.pattern
	}
	return t
}

func (w *Worker) logger(l *leasing.Lease) *slog.Logger {
	return w.config.Logger.With("run", l.ID, "type", l.Type, "attempt", l.Attempt)
}
