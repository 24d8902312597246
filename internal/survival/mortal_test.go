package survival

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/signal"
	"regexp"
	"strings"
	"sync"
	"syscall"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/simple-workflow/simple-workflow/outbox"
	"github.com/simple-workflow/simple-workflow/run"
	"github.com/simple-workflow/simple-workflow/worker"
)

// deathEnv makes this test binary a worker, and says where it dies: "before commit", or "after settle 2", which is
// the second statement of that name. never means nowhere.
const (
	deathEnv = "SURVIVAL_DIES"
	never    = "never"
)

// mortal runs such a worker. It stops at SIGTERM, and writes the name of each statement to its output.
func mortal(at string) {
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGTERM)
	defer stop()
	if err := work(ctx, stop, &reaper{at: at, seen: map[string]int{}}); err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
}

func work(ctx context.Context, stop func(), r *reaper) error {
	config, err := pgxpool.ParseConfig(os.Getenv("DATABASE_URL"))
	if err != nil {
		return err
	}
	config.ConnConfig.Tracer = r
	pool, err := pgxpool.NewWithConfig(ctx, config)
	if err != nil {
		return err
	}
	defer pool.Close()
	heartbeat, err := time.ParseDuration(os.Getenv("HEARTBEAT"))
	if err != nil {
		return err
	}
	length := longLease
	if text := os.Getenv("LEASE"); text != "" {
		if length, err = time.ParseDuration(text); err != nil {
			return err
		}
	}
	s := &server{pool: pool, extended: make(chan struct{}, 1)}
	w, err := worker.New(worker.Config{
		Pool: pool, Mux: s.mux(), Prefixes: []string{"chaos."}, Name: "mortal", Concurrency: slots, Retention: worker.Retention{Off: true}, Lease: length, Heartbeat: heartbeat,
		PollInterval: 50 * time.Millisecond, Backoff: run.Backoff{Base: time.Millisecond, Cap: time.Millisecond}, NoWakeUp: true,
		Observe: worker.Observer{Extended: s.sawExtension},
	})
	if err != nil {
		return err
	}
	s.stop = func() { stop(); w.StopNow() }
	return w.Run(ctx)
}

// longLease is so long that a heartbeat extends it only on request.
const longLease = 30 * time.Second

// A server has the handlers. Each of them makes the engine issue other statements.
type server struct {
	pool     *pgxpool.Pool
	extended chan struct{} // receives after each heartbeat
	stop     func()        // stops the worker at once
}

type nothing struct{}

func (s *server) mux() *worker.Mux {
	mux := worker.NewMux()
	for typ, fn := range map[string]func(context.Context, run.Info) error{
		"chaos.succeed":   func(context.Context, run.Info) error { return nil },
		"chaos.permanent": func(context.Context, run.Info) error { return run.Permanent(errors.New("not now, not ever")) },
		"chaos.fail":      func(context.Context, run.Info) error { return errors.New("not now") },
		"chaos.retry":     atFirst(func() error { return errors.New("not now") }),
		"chaos.postpone":  atFirst(func() error { return run.Again(0) }),
		"chaos.effect":    s.effect,
		"chaos.event":     emit,
		"chaos.beat":      s.beat,
		"chaos.cancel":    s.cancel,
		"chaos.release":   s.release,
	} {
		worker.Handle(mux, run.Task[nothing](typ), func(ctx context.Context, _ nothing) (string, error) {
			return "done", fn(ctx, run.FromContext(ctx))
		})
	}
	worker.Handle(mux, run.Task[dose]("chaos.quick"), quick)
	return mux
}

// A dose is the payload of chaos.quick.
type dose struct {
	Poison bool `json:"poison"`
}

// hold is the suffix of a file that keeps handlers from returning, beside the file of their starts.
const hold = ".hold"

// quick writes down that it has begun, and kills its process if its payload says so. It returns once nothing holds it.
func quick(ctx context.Context, d dose) (string, error) {
	starts, err := os.OpenFile(os.Getenv("STARTS"), os.O_APPEND|os.O_CREATE|os.O_WRONLY, 0o600)
	if err != nil {
		return "", err
	}
	_, err = fmt.Fprintln(starts, run.FromContext(ctx).ID)
	if d.Poison {
		_ = syscall.Kill(os.Getpid(), syscall.SIGKILL)
		select {}
	}
	for held := true; held; {
		time.Sleep(time.Millisecond)
		_, missing := os.Stat(os.Getenv("STARTS") + hold)
		held = missing == nil
	}
	return "done", errors.Join(err, starts.Close())
}

// atFirst returns a handler that returns fn's error at the first lease of its run.
func atFirst(fn func() error) func(context.Context, run.Info) error {
	return func(_ context.Context, info run.Info) error {
		if info.LeaseNo == 1 {
			return fn()
		}
		return nil
	}
}

func (s *server) effect(ctx context.Context, info run.Info) error {
	return errors.Join(emit(ctx, info), worker.InSettle(ctx, func(tx pgx.Tx) error {
		_, err := tx.Exec(ctx, `INSERT INTO chaos_effect (run_id, lease_no) VALUES ($1, $2)`, info.ID, info.LeaseNo)
		return err
	}))
}

func emit(ctx context.Context, _ run.Info) error {
	return worker.Emit(ctx, outbox.Event{Type: "chaos.happened.v1"})
}

// beat returns after a heartbeat.
func (s *server) beat(ctx context.Context, _ run.Info) error {
	select {
	case <-s.extended:
		return nil
	case <-ctx.Done():
		return context.Cause(ctx)
	}
}

func (s *server) sawExtension(leases int, _ time.Duration, err error) {
	if leases == 0 || err != nil {
		return
	}
	select {
	case s.extended <- struct{}{}:
	default:
	}
}

// cancel cancels its own run and waits until it is notified.
func (s *server) cancel(ctx context.Context, info run.Info) error {
	if err := run.Cancel(ctx, s.pool, info.ID, "as a test"); err != nil {
		return err
	}
	<-ctx.Done()
	return context.Cause(ctx)
}

// release stops the worker during the first lease, so that the run is given back.
func (s *server) release(ctx context.Context, info run.Info) error {
	if info.LeaseNo > 1 {
		return nil
	}
	s.stop()
	<-ctx.Done()
	return context.Cause(ctx)
}

// A reaper is a tracer that kills its process at the given place.
type reaper struct {
	at   string
	mu   sync.Mutex
	seen map[string]int
}

type nameKey struct{}

var unrelated = regexp.MustCompile(`workflow_(present|absent|begin|forget_begun|count|backlog|look|try_again|stalled|kept|elsewhere|outage|fault)_v1|process_(try_again|incidents)_v1`)

func (r *reaper) TraceQueryStart(ctx context.Context, _ *pgx.Conn, data pgx.TraceQueryStartData) context.Context {
	// Statements for presence and for setting up sessions belong to no run, and their times vary.
	if unrelated.MatchString(data.SQL) || strings.Contains(data.SQL, "pg_backend_pid") || strings.HasPrefix(data.SQL, "SET plan_cache_mode") {
		return ctx
	}
	name := nameOf(data.SQL)
	r.mu.Lock()
	r.seen[name]++
	if n := r.seen[name]; n > 1 {
		name = fmt.Sprintf("%s %d", name, n)
	}
	r.mu.Unlock()
	fmt.Println(name)
	r.reach("before " + name)
	return context.WithValue(ctx, nameKey{}, name)
}

func (r *reaper) TraceQueryEnd(ctx context.Context, _ *pgx.Conn, _ pgx.TraceQueryEndData) {
	if name, ok := ctx.Value(nameKey{}).(string); ok {
		r.reach("after " + name)
	}
}

func (r *reaper) reach(place string) {
	if place == r.at {
		_ = syscall.Kill(os.Getpid(), syscall.SIGKILL)
		select {} // nothing more is executed
	}
}

// names has a part of each statement's text by which it is recognized.
var names = map[string]string{
	"policies": "workflow_policies_v1",
	"discover": "workflow_lanes_v2",
	"lease":    "FROM workflow_lease_",
	"extend":   "workflow_extend_v1",
	"look":     "workflow_held_v1",
	"reclaim":  "workflow_take_back_v1",
	"settle":   "workflow_settle_v",
	"unbound":  "SET LOCAL lock_timeout TO DEFAULT",
	"effect":   "INSERT INTO chaos_effect",
	"append":   "outbox_append_v1",
	"cancel":   "workflow_cancel",
	"begin":    "begin; SET LOCAL",
	"commit":   "commit",
}

var space = regexp.MustCompile(`\s+`)

// nameOf returns the name of a statement, or its text if it is unknown.
func nameOf(text string) string {
	text = strings.TrimSpace(space.ReplaceAllString(text, " "))
	for name, part := range names {
		if text == part || len(part) > len("commit") && strings.Contains(text, part) {
			return name
		}
	}
	return text
}
