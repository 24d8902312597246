package main

import (
	"context"
	"embed"
	"fmt"
	"net/url"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgconn/ctxwatch"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/simple-workflow/simple-workflow/internal/pgbouncer"
	"github.com/simple-workflow/simple-workflow/internal/pgserver"
	"github.com/simple-workflow/simple-workflow/internal/protocol"
)

//go:embed *.sql
var scripts embed.FS

// Roles and names in the database under test.
const (
	database   = "torture"
	workerRole = "torture_worker"
	clientRole = "torture_client"
)

// A lab is everything under test: a server, the proxies before it, and the workers.
type lab struct {
	plan    *plan
	dir     string // for ledgers and logs
	bin     string // the programs under test
	ledger  *ledger
	server  *pgserver.Server
	standby *pgserver.Server   // nil: none
	bouncer *pgbouncer.Bouncer // nil: no worker uses a pooler
	links   []*link            // of the workers, by slot
	front   *link              // of the clients
	back    *link              // of the injector and the verdict; no fault strikes it
	slots   []*slot
	outside *receiver
	events  *consumer

	dispatchers []*slot
	sides       []*link // of the dispatchers; no network fault strikes them

	admin   *pgxpool.Pool // through back
	client  *pgxpool.Pool // through front
	strikes sync.Mutex    // held by a fault of the server: one at a time
	storms  atomic.Int32  // number so far
	cuts    atomic.Int32  // number so far
	spoilt  atomic.Int32  // number so far

	troubled atomic.Int64 // until when the server was down or refused everything, in Unix nanoseconds
}

// build compiles the programs under test from the product's source. overlay, if not empty, is a file for go build
// -overlay.
func build(ctx context.Context, root, bin, overlay string) error {
	args := []string{"build", "-trimpath", "-o", bin + "/"} // as make build does
	if overlay != "" {
		args = append(args, "-overlay", overlay)
	}
	cmd := exec.CommandContext(ctx, "go", append(args, "./cmd/workflowctl", "./cmd/dispatcher", "./examples/chaos")...)
	cmd.Dir = root
	cmd.Env = append(os.Environ(), "CGO_ENABLED=0")
	if out, err := cmd.CombinedOutput(); err != nil {
		return fmt.Errorf("build the programs under test: %w\n%s", err, out)
	}
	return nil
}

// newLab sets everything up and starts the workers.
func newLab(ctx context.Context, p *plan, dir, bin string, pooler bool) (l *lab, err error) {
	l = &lab{plan: p, dir: dir, bin: bin}
	defer func() {
		if err != nil {
			l.close()
		}
	}()
	if l.ledger, err = openLedger(dir); err != nil {
		return l, err
	}
	options := serverOptions()
	if options.Log, err = os.Create(filepath.Join(dir, "server.log")); err != nil {
		return l, err
	}
	if l.server, err = pgserver.Start(ctx, options); err != nil {
		return l, err
	}
	if err := l.prepare(ctx); err != nil {
		return l, err
	}
	if pooler {
		if l.bouncer, err = pgbouncer.Start(ctx, clientURL(l.address(), workerRole, "", 12)); err != nil {
			return l, err
		}
		go l.notePooler()
	}
	if l.front, err = newLink("client", l.address(), l.ledger); err != nil {
		return l, err
	}
	if l.client, err = l.clientPool(ctx); err != nil {
		return l, err
	}
	if l.outside, err = newReceiver(l.ledger); err != nil {
		return l, err
	}
	if err := l.addDispatchers(); err != nil {
		return l, err
	}
	return l, l.addSlots(ctx)
}

// serverOptions are those of a durable server with PostgreSQL's defaults, on a real disk, so that a kill loses what a
// kill may lose.
func serverOptions() pgserver.Options {
	return pgserver.Options{Durable: true, Settings: map[string]string{
		"max_connections":  "250",
		"log_min_messages": "log", // not errors, because refusals are expected here
		// These may help to explain a verdict.
		"log_line_prefix": "%m %a [%p] ", "log_lock_waits": "on", "log_min_duration_statement": "1s", "log_parameter_max_length": "200",
	}}
}

func (l *lab) address() string { return "127.0.0.1:" + strconv.Itoa(l.server.Port()) }

// prepare creates the database, the schema through the product's own command, and the torture's own tables.
func (l *lab) prepare(ctx context.Context) (err error) {
	if err := onServer(ctx, l.server, "postgres", `CREATE DATABASE `+database); err != nil {
		return err
	}
	for _, args := range [][]string{{"migrate", "up"}, {"roles"}} {
		command := exec.CommandContext(ctx, filepath.Join(l.bin, "workflowctl"), args...)
		command.Env = append(os.Environ(), "DATABASE_URL="+l.server.URL(database))
		if out, err := command.CombinedOutput(); err != nil {
			return fmt.Errorf("workflowctl %v: %w\n%s", args, err, out)
		}
	}
	if l.back, err = newLink("torture", l.address(), l.ledger); err != nil {
		return err
	}
	config, err := pgxpool.ParseConfig(clientURL(l.back.wire.Addr(), "postgres", "torture", 30))
	if err != nil {
		return err
	}
	// The lab must be able to write even while everyone else is refused.
	config.ConnConfig.RuntimeParams["default_transaction_read_only"] = "off"
	if l.admin, err = pgxpool.NewWithConfig(ctx, config); err != nil {
		return err
	}
	if err := l.script(ctx, "setup.sql"); err != nil {
		return err
	}
	if _, err := l.admin.Exec(ctx, setPolicy, 5); err != nil {
		return fmt.Errorf("set the policy: %w", err)
	}
	return protocol.Install(ctx, l.admin)
}

const setPolicy = `SELECT workflow_set_policy('chaos.', attempts => $1)`

// leaveOut removes strikes from the plan that need something this product does not have.
func (l *lab) leaveOut(ctx context.Context) error {
	for key, relation := range needs {
		var there bool
		if err := l.admin.QueryRow(ctx, `SELECT to_regclass($1) IS NOT NULL`, relation).Scan(&there); err != nil {
			return fmt.Errorf("look for %s: %w", relation, err)
		}
		if !there && l.plan.count(key) > 0 {
			l.plan.Strikes = slices.DeleteFunc(l.plan.Strikes, func(s strike) bool { return s.Fault == key })
			fmt.Printf("left out, since there is no %s: %s\n", relation, findFault(key).name)
		}
	}
	return nil
}

// script runs one of the embedded scripts.
func (l *lab) script(ctx context.Context, name string) error {
	text, err := scripts.ReadFile(name)
	if err != nil {
		return err
	}
	if _, err := l.admin.Exec(ctx, string(text), pgx.QueryExecModeSimpleProtocol); err != nil {
		return fmt.Errorf("%s: %w", name, err)
	}
	return nil
}

func onServer(ctx context.Context, server *pgserver.Server, db, sql string) error {
	conn, err := pgx.Connect(ctx, server.URL(db))
	if err != nil {
		return err
	}
	defer conn.Close(context.WithoutCancel(ctx))
	_, err = conn.Exec(ctx, sql)
	return err
}

func (l *lab) clientPool(ctx context.Context) (*pgxpool.Pool, error) {
	config, err := pgxpool.ParseConfig(clientURL(l.front.wire.Addr(), clientRole, "client", 24))
	if err != nil {
		return nil, err
	}
	config.ConnConfig.DefaultQueryExecMode = pgx.QueryExecModeExec // the proxy reads the statements
	config.ConnConfig.ConnectTimeout = 3 * time.Second
	config.ConnConfig.BuildContextWatcherHandler = func(conn *pgconn.PgConn) ctxwatch.Handler { // a cancelled call does not close the connection
		return &pgconn.CancelRequestContextWatcherHandler{Conn: conn, DeadlineDelay: time.Second}
	}
	return pgxpool.NewWithConfig(ctx, config)
}

func clientURL(address, role, application string, conns int) string {
	u := url.URL{Scheme: "postgres", User: url.User(role), Host: address, Path: database, RawQuery: url.Values{
		"sslmode": {"disable"}, "application_name": {application}, "pool_max_conns": {strconv.Itoa(conns)},
	}.Encode()}
	return u.String()
}

// notePooler records when the pooler ended unexpectedly, as old versions do: that has cut off the workers behind it.
func (l *lab) notePooler() {
	for at := range l.bouncer.Ended() {
		until := at.Add(time.Second)
		for i := 1; i < l.plan.Workers; i += 2 {
			l.ledger.add(entry{Kind: "strike", At: at, Until: &until, Fault: "pooler", Worker: fmt.Sprintf("w%d", i+1)})
		}
	}
}

// addSlots creates the slots of the workers. With a pooler, half of them go through it.
func (l *lab) addSlots(ctx context.Context) error {
	for i := range l.plan.Workers {
		name := fmt.Sprintf("w%d", i+1)
		upstream := l.address()
		if l.bouncer != nil && i%2 == 1 {
			upstream = l.bouncer.Addr()
		}
		k, err := newLink(name, upstream, l.ledger)
		if err != nil {
			return err
		}
		l.links = append(l.links, k)
		env := []string{
			"DATABASE_URL=" + clientURL(k.wire.Addr(), workerRole, name, 12),
			"EXECLOG=" + filepath.Join(l.dir, name+".exec"),
			"WORKER_ID=" + name,
			"WORKER_CONCURRENCY=" + strconv.Itoa(slots),
			"WORKER_LEASE=" + leaseLength.String(),
			"WORKER_HEARTBEAT=" + heartbeat.String(),
			"WORKER_TIMEOUT=" + runLimit.String(),
			"WORKER_POLL_INTERVAL=200ms",
			"WORKER_SHUTDOWN_GRACE=" + grace.String(),
			"WORKER_BACKOFF_BASE=200ms",
			"WORKER_BACKOFF_CAP=3s",
			"WORKER_LOG_FORMAT=json",
			"KEEP=" + l.plan.Keep.String(),
			"GOTRACEBACK=all",
			"PATH=" + os.Getenv("PATH"),
		}
		s, err := newSlot(l.dir, name, filepath.Join(l.bin, "chaos"), env, l.ledger, l.plan.random("restarts of "+name))
		if err != nil {
			return err
		}
		l.slots = append(l.slots, s)
	}
	for _, s := range l.slots {
		if err := s.start(); err != nil {
			return err
		}
	}
	return l.awaitWorkers(ctx)
}

// awaitWorkers returns when the workers have finished their setup.
func (l *lab) awaitWorkers(ctx context.Context) error {
	for start := time.Now(); ; sleep(ctx, 50*time.Millisecond) {
		var ready bool
		err := l.admin.QueryRow(ctx, `SELECT to_regclass('chaos_effect') IS NOT NULL AND EXISTS (SELECT FROM outbox_sink)`).Scan(&ready)
		switch {
		case ready:
			// The storms also affect their effects. But timeouts and locks in effects count as the handler's errors,
			// so they are left out.
			_, err := l.admin.Exec(ctx, `CREATE TRIGGER t_storm BEFORE INSERT ON chaos_effect FOR EACH STATEMENT EXECUTE FUNCTION t.blow('40', '53')`)
			return err
		case err != nil:
			return err
		case time.Since(start) > 30*time.Second:
			return fmt.Errorf("the workers, or the dispatchers, do not get ready; see %s", l.dir)
		}
	}
}

// stopWorkers ends the workers and the dispatchers with a signal.
func (l *lab) stopWorkers(sig syscall.Signal) {
	var all sync.WaitGroup
	for _, s := range append(l.slots, l.dispatchers...) {
		all.Go(func() { s.close(sig) })
	}
	all.Wait()
	l.slots, l.dispatchers = nil, nil
}

// close stops and removes everything.
func (l *lab) close() {
	l.stopWorkers(syscall.SIGKILL)
	if l.outside != nil {
		l.outside.close()
	}
	if l.events != nil {
		l.events.close()
	}
	if l.client != nil {
		l.client.Close()
	}
	if l.admin != nil {
		l.admin.Close()
	}
	for _, k := range slices.Concat(l.links, l.sides, []*link{l.front, l.back}) {
		if k != nil {
			k.close()
		}
	}
	if l.bouncer != nil {
		l.bouncer.Stop()
	}
	for _, s := range []*pgserver.Server{l.server, l.standby} {
		if s != nil {
			s.Stop()
		}
	}
}
