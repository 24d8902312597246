// Package worker leases runs, executes their handlers, keeps the leases alive, and settles
// the outcomes.
//
//	mux := worker.NewMux()
//	worker.Handle(mux, "billing.invoice_charge.v1", billing.Charge)
//	err := worker.Run(ctx, worker.Config{Pool: pool, Mux: mux, Prefixes: []string{"billing."}})
//
// The road of a run: poll leases it, execute calls the handler outside of any transaction,
// settle records the outcome in one short transaction fenced by the lease. Beside it beat
// extends leases, watch gives up what could not be extended, reclaim takes over from dead
// workers.
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
	db       *pgxpool.Pool // the worker's own connections
	beats    *pgxpool.Pool // one for heartbeats alone: they wait behind nothing
	sessions *session.Sessions
	jobs     jobs
	doubts   leasing.Doubts
	outages  outages
	policies atomic.Pointer[lease.Policies] // as they were read last; nil: not yet
	settles  chan *job                      // outcomes that may share a transaction
	solos    chan *job                      // outcomes that need a transaction of their own
	settling chan struct{}                  // holds a token while a batch is being settled
	wake     chan struct{}
	tending  chan struct{} // tend has something to do at once
	hurry    chan struct{} // closed by StopNow
	hurryUp  sync.Once

	tally tally // what was leased and settled since the last report

	complaints sync.Mutex
	complained map[string]time.Time // when each problem was last warned of
	faults     map[string]*failing  // statements that fail for every row

	trouble  moment   // when the database could last not be reached
	lastPoll moment   // when a poll last succeeded
	wrote    moment   // when the database last took a change
	lastTurn moment   // when the poll loop last turned
	lastTick moment   // when watch last looked
	stood    moment   // when this process was last found to have stood still
	hooked   []moment // when an outcome was last recorded with each hook
	unheard  moment   // when a heartbeat last got no answer

	effectTimeout time.Duration // shorter in tests
}

// ErrStuck ends Run when more handlers than Config.Concurrency ignore the end of their
// contexts: only a new process gets their memory and goroutines back.
var ErrStuck = errors.New("worker: too many handlers ignore the end of their context")

// ErrStalled ends Run when the poll loop has been stuck for three leases and more.
var ErrStalled = errors.New("worker: the poll loop has stalled")

// Run is New followed by the Worker's Run.
func Run(ctx context.Context, config Config) error {
	w, err := New(config)
	if err != nil {
		return err
	}
	return w.Run(ctx)
}

// New checks config and returns a Worker, which does nothing until its Run is called. The
// error names each bad field, its value and the fix.
func New(config Config) (*Worker, error) {
	config, err := config.withDefaults()
	if err != nil {
		return nil, err
	}
	w := &Worker{
		config:   config,
		name:     config.Name + "-" + strings.ReplaceAll(uuid.NewString(), "-", "")[:8],
		settles:  make(chan *job, config.Concurrency),
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
	w.jobs.freed = make(chan struct{}, 1)
	w.outages.heard = map[string]*heard{}
	w.outages.some = make(chan struct{}, 1)
	return w, nil
}

// Name returns the worker's name with its random suffix, as in leased_by.
func (w *Worker) Name() string { return w.name }

// LastPoll returns when a poll last succeeded; zero before the first.
func (w *Worker) LastPoll() time.Time { return w.lastPoll.time() }

// LastWrite returns when the database last took a change by this worker: leases, a heartbeat, outcomes, or
// its row in workflow_worker, which it writes every two and a half seconds if there is nothing else to write. It is
// zero before the first.
func (w *Worker) LastWrite() time.Time { return w.wrote.time() }

// InFlight returns how many leases the worker holds.
func (w *Worker) InFlight() int { return w.jobs.count() }

// StopNow shortens the grace period of a Run whose context has ended: handlers' contexts
// end at once. It may be called at any time and more than once.
func (w *Worker) StopNow() { w.hurryUp.Do(func() { close(w.hurry) }) }

// Run works until ctx ends, and then: leases nothing more, lets handlers finish for
// Config.ShutdownGrace, ends their contexts with cause run.ErrShutdown, hands back what is
// left with no attempt charged, and returns nil. A database that cannot be reached is
// waited for. Run may be called once.
func (w *Worker) Run(ctx context.Context) error {
	if err := w.connect(ctx); err != nil {
		return err
	}
	defer hangUp(w.db, w.beats)
	w.lastTurn.now()
	w.lastTick.now()
	w.announce()

	// Looking for work ends with ctx, or when something fails for good; the rest goes on
	// until the last outcome is recorded.
	seeking, stopSeeking := context.WithCancelCause(ctx)
	defer stopSeeking(nil)
	keeping, stopKeeping := context.WithCancel(context.WithoutCancel(ctx))
	defer stopKeeping()

	var keepers sync.WaitGroup
	for range batchSettlers {
		keepers.Go(func() { w.settleBatches(keeping) })
	}
	keepers.Go(func() { w.settleSolos(keeping) })
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

// connect opens the worker's own pool. It does not wait for the database.
func (w *Worker) connect(ctx context.Context) (err error) {
	config := w.config.Pool.Config()
	config.MaxConns = Connections - 2 // the wake-up and heartbeats have their own
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

// hangUp closes the connections. One to a server that does not answer takes a quarter of a minute: nobody waits for that.
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

// announce logs what the worker covers, and what looks like a mistake.
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

// reportTime is how much later than the handler's context a lease ends at the time limit, so
// that a handler which listens is not taken for one that died.
const reportTime = time.Second

// limit is the most that the job's handler may take; 0: no limit.
func (j *job) limit() time.Duration { return max(j.Timeout-reportTime, 0) }

// terms returns the conditions for the next leases of a type.
func (w *Worker) terms(typ string) leasing.Terms {
	t := leasing.Terms{Length: w.config.Lease, Timeout: max(w.config.Timeout, 0), Room: -1}
	e := w.lookup(typ)
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
		t.Timeout += reportTime
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
