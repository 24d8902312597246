//go:build attack

package attack

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"maps"
	"os"
	"os/exec"
	"regexp"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/cloudevents/sdk-go/v2/event"
	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/simple-workflow/simple-workflow/dispatcher"
	"github.com/simple-workflow/simple-workflow/internal/cleanup"
	"github.com/simple-workflow/simple-workflow/internal/delivery"
	"github.com/simple-workflow/simple-workflow/worker"
)

var quiet = slog.New(slog.NewTextHandler(io.Discard, nil))

// A deed is a mutation of one row by an actor.
type deed struct {
	*mutation
	by  *actor
	row row
}

// A trial is a copy of the world in which deeds were done, beside workers and a dispatcher.
type trial struct {
	w       *world
	name    string // of the database
	pool    *pgxpool.Pool
	touched map[string]bool // specimens that differ from the world

	mu        sync.Mutex
	delivered map[string]int // to the sink that is left alone, by event uuid
}

// An end maps each thing to its state at the end of a trial: the status of a run or an instance, "delivered" for an
// event.
type end map[string]string

// A verdict is what was wrong; the zero verdict means nothing.
type verdict struct {
	harm    []string // to others
	silence []string // what waits without a reported reason
	tools   []string // tools that fail
	took    time.Duration
}

func (v verdict) bad() bool { return len(v.harm)+len(v.silence)+len(v.tools) > 0 }

// kind is the worst of what was wrong.
func (v verdict) kind() string {
	switch {
	case len(v.harm) > 0:
		return "harm to others"
	case len(v.silence) > 0:
		return "silence"
	}
	return "a tool fails"
}

// String names the first few problems of each kind.
func (v verdict) String() string {
	var parts []string
	for _, part := range []struct {
		what string
		all  []string
	}{{"harms others", v.harm}, {"waits untold", v.silence}, {"tools fail", v.tools}} {
		var few []string
		seen := map[string]bool{}
		for _, words := range part.all {
			kind, _, _ := strings.Cut(words, "/")
			if !seen[kind] && len(few) < 8 {
				few = append(few, words)
			}
			seen[kind] = true
		}
		if len(few) > 0 {
			parts = append(parts, fmt.Sprintf("%s, %d in all: %s", part.what, len(part.all), strings.Join(few, "; ")))
		}
	}
	return strings.Join(parts, ". ")
}

var trials atomic.Int64

// try does the deeds in a copy of the world and returns the verdict. Without a baseline it only returns how
// everything ends.
func (w *world) try(ctx context.Context, deeds []deed, baseline end, limit time.Duration) (v verdict, final end, err error) {
	t := &trial{w: w, name: fmt.Sprintf("trial%d", trials.Add(1)), touched: map[string]bool{}, delivered: map[string]int{}}
	if err := w.copy(ctx, t.name); err != nil {
		return v, nil, err
	}
	defer w.drop(t.name)
	if t.pool, err = pgxpool.New(ctx, w.server.URL(t.name)); err != nil {
		return v, nil, err
	}
	defer t.pool.Close()
	if err := t.do(ctx, deeds); err != nil {
		return v, nil, err
	}
	stop := t.start(ctx)
	defer stop()
	begun := time.Now()
	if err := t.poke(ctx, 0); err != nil {
		v.harm = append(v.harm, "nothing can be enqueued: "+err.Error())
	}
	poked, still, before := false, time.Now(), end{}
	for {
		if final, err = t.state(ctx); err != nil {
			return v, nil, err
		}
		if !maps.Equal(final, before) {
			still, before = time.Now(), final
		}
		late := t.late(final, baseline)
		// What existed has ended, or should have: new work now meets what dispatchers believe to be finished.
		over := baseline != nil && !slices.ContainsFunc(late, func(words string) bool { return !comesLater.MatchString(words) })
		if !poked && (over || baseline == nil && time.Since(still) > time.Second || time.Since(begun) > limit/3) {
			poked, still = true, time.Now()
			for range 3 {
				_ = delivery.RaiseFloors(ctx, t.pool, "control")
			}
			if err := t.poke(ctx, 1); err != nil {
				v.harm = append(v.harm, "nothing can be enqueued later: "+err.Error())
			}
		}
		stuck := time.Since(begun) > limit && time.Since(still) > limit/2 || time.Since(begun) > 5*limit // being busy excuses a slow machine, but not one where nothing moves
		if poked && (baseline != nil && len(late) == 0 || baseline == nil && time.Since(still) > 4*time.Second || stuck) {
			v.harm = append(v.harm, late...)
			break
		}
		time.Sleep(50 * time.Millisecond)
	}
	v.took = time.Since(begun)
	if baseline == nil {
		return v, final, nil
	}
	if len(v.harm) == 0 {
		if v.silence, err = t.silent(ctx, baseline); err != nil {
			return v, nil, err
		}
	}
	often, err := t.repeated(ctx)
	if err != nil {
		return v, nil, err
	}
	v.harm = append(v.harm, often...)
	if v.tools, err = t.tools(ctx); err != nil {
		return v, nil, err
	}
	return v, final, nil
}

var copying sync.Mutex // one process at a time may use a template

func (w *world) copy(ctx context.Context, name string) error {
	copying.Lock()
	defer copying.Unlock()
	conn, err := pgx.Connect(ctx, w.server.URL("postgres"))
	if err != nil {
		return err
	}
	defer conn.Close(context.WithoutCancel(ctx))
	_, err = conn.Exec(ctx, "CREATE DATABASE "+name+" TEMPLATE world")
	return err
}

func (w *world) drop(name string) {
	ctx, done := context.WithTimeout(context.Background(), time.Minute)
	defer done()
	if conn, err := pgx.Connect(ctx, w.server.URL("postgres")); err == nil {
		_, _ = conn.Exec(ctx, "DROP DATABASE "+name+" WITH (FORCE)")
		_ = conn.Close(ctx)
	}
}

// do moves the times of the world to now, does the deeds, and records what they have touched.
func (t *trial) do(ctx context.Context, deeds []deed) error {
	conn, err := t.pool.Acquire(ctx)
	if err != nil {
		return err
	}
	defer conn.Release()
	c := conn.Conn()
	if _, err := c.PgConn().Exec(ctx, "BEGIN;"+unguarded+`
		UPDATE workflow_run SET lease_until = now() + interval '2 seconds' WHERE payload->>'specimen' ~ '-leased/' AND status = 'leased';
		UPDATE workflow_run SET run_at = now() + interval '1 second' WHERE type = 'graph.timer.v1' AND status = 'pending';
		UPDATE workflow_worker SET seen_at = now();
		UPDATE process_instance SET completed_at = now() - interval '2 hours' WHERE business_key ^@ 'finished/';
		UPDATE workflow_run SET finished_at = now() - interval '2 hours' WHERE payload->>'specimen' ^@ 'billing-cancelled/';
		UPDATE outbox_lane SET claim_until = now() + interval '1 second' WHERE claim_until IS NOT NULL;
		COMMIT`).ReadAll(); err != nil {
		return fmt.Errorf("revive the world: %w", err)
	}
	rows, err := t.snapshot(ctx, c)
	if err != nil {
		return err
	}
	checks, err := constraints(ctx, c)
	if err != nil {
		return err
	}
	for _, d := range deeds {
		err := execute(ctx, c.PgConn(), d.by, d.sql(d.row))
		last := "COMMIT"
		if err != nil {
			last = "ROLLBACK" // other deeds of the batch may have made it impossible
		}
		if _, err := c.PgConn().Exec(ctx, last+"; RESET ALL").ReadAll(); err != nil {
			return fmt.Errorf("%s: %w", d.name(), err)
		}
		t.touched[d.row.specimen] = true
	}
	for name, add := range checks { // they apply to new rows
		if _, err := c.Exec(ctx, "DO $do$ BEGIN "+add+" NOT VALID; EXCEPTION WHEN duplicate_object THEN END $do$"); err != nil {
			return fmt.Errorf("constraint %s: %w", name, err)
		}
	}
	for _, name := range sorted(t.w.tables) {
		changes, err := t.w.compare(ctx, c, name, rows, "")
		if err != nil {
			return err
		}
		for _, change := range changes {
			t.touched[t.w.of[name+" "+change.key]] = true
		}
	}
	delete(t.touched, "")
	return nil
}

func (t *trial) snapshot(ctx context.Context, conn *pgx.Conn) (map[string]row, error) {
	all := map[string]row{}
	for _, name := range sorted(t.w.tables) {
		changes, err := t.w.compare(ctx, conn, name, nil, "")
		if err != nil {
			return nil, err
		}
		for _, c := range changes {
			text, _ := json.Marshal(c.after)
			all[name+" "+c.key] = row{table: name, key: c.key, data: c.after, text: string(text)}
		}
	}
	return all, nil
}

func constraints(ctx context.Context, conn *pgx.Conn) (map[string]string, error) {
	rows, _ := conn.Query(ctx, `
		SELECT conname, format('ALTER TABLE %s ADD CONSTRAINT %I %s', conrelid::regclass, conname, regexp_replace(pg_get_constraintdef(oid), ' NOT VALID$', ''))
		FROM pg_constraint WHERE contype = 'c' AND conrelid IN (SELECT workflow_relations())`)
	all := map[string]string{}
	var name, add string
	_, err := pgx.ForEachRow(rows, []any{&name, &add}, func() error { all[name] = add; return nil })
	return all, err
}

// start starts a worker for everything, a worker bound to media., and a dispatcher, each with its role.
func (t *trial) start(ctx context.Context) (stop func()) {
	ctx, cancel := context.WithCancel(ctx)
	var group sync.WaitGroup
	var pools []*pgxpool.Pool
	as := func(role string) *pgxpool.Pool {
		pool, err := pgxpool.New(ctx, strings.Replace(t.w.server.URL(t.name), "postgres@", role+"@", 1))
		if err != nil {
			panic(err)
		}
		pools = append(pools, pool)
		return pool
	}
	fine := func(context.Context, json.RawMessage) (json.RawMessage, error) { return json.RawMessage("{}"), nil }
	mux, bound := worker.NewMux(), worker.NewMux()
	for _, typ := range []string{"media.", "billing.", "test."} {
		mux.HandleRaw(typ, fine)
	}
	bound.HandleRaw("media.", fine)
	worker.Handle(mux, cleanup.Type, cleanup.New(as("engine"), []string{"default."}, time.Hour, cleanup.Keep{Finished: time.Hour, Failed: time.Hour, Deleted: time.Hour, Published: time.Hour, Processes: time.Hour}).Handle)
	for _, c := range []worker.Config{config(as("engine"), mux, "media.", "billing.", "test.", "default.", "graph."), config(as("media"), bound, "media.")} {
		group.Go(func() { _ = worker.Run(ctx, c) })
	}
	targets := []dispatcher.Target{}
	for _, name := range sinks() {
		targets = append(targets, dispatcher.Target{Name: name, Sink: &receiver{t, name == "control"}})
	}
	d, err := dispatcher.New(dispatcher.Config{Pool: as("dispatcher"), Source: "attack", Sinks: targets, Claim: 3 * time.Second, Logger: quiet})
	if err != nil {
		panic(err)
	}
	group.Go(func() { _ = d.Run(ctx) })
	return func() {
		cancel()
		group.Wait()
		for _, p := range pools {
			p.Close()
		}
	}
}

// A receiver is a sink that accepts everything.
type receiver struct {
	t     *trial
	notes bool
}

func (r *receiver) Publish(_ context.Context, events []event.Event) []error {
	r.t.mu.Lock()
	defer r.t.mu.Unlock()
	for _, e := range events {
		if r.notes {
			r.t.delivered[e.ID()]++
		}
	}
	return make([]error, len(events))
}

func (r *receiver) Close() error { return nil }

// comesLater matches what late says about things of the second round.
var comesLater = regexp.MustCompile(` (poke-\S+|poke/\S.*|event \d+)/1 is `)

// poke acts as the outside world: work is enqueued, people complete tasks, messages arrive, what was paused is
// resumed. In the second round only new work and events come.
func (t *trial) poke(ctx context.Context, round int) error {
	var b strings.Builder
	enqueue := func(label, typ, payload string) {
		fmt.Fprintf(&b, "INSERT INTO workflow_run (type, payload, idempotency_key) VALUES (%s, %s, %s);\n", quoted(typ), payload, quoted(fmt.Sprintf("poke/%s/%d", label, round)))
	}
	for _, typ := range []string{"media.work.v1", "billing.work.v1"} {
		enqueue(typ, typ, "'{}'")
	}
	for _, process := range []string{"step", "call", "each", "join", "undoing"} {
		enqueue("start "+process, "graph.start.v1", fmt.Sprintf(`'{"process": %q, "key": "poke-%s/%d", "input": {"items": [1, 2, 3]}}'`, process, process, round))
	}
	for n := range 100 { // enough for almost every lane
		id := uuid.NewSHA1(uuid.Nil, fmt.Appendf(nil, "%d %d", round, n))
		fmt.Fprintf(&b, "SELECT outbox_emit('%s', 'test.happened.v1', '{\"poke\": \"event %d/%d\"}');\n", id, n, round)
	}
	if round == 0 {
		enqueue("signal", "graph.signal.v1", `'{"name": "go"}'`)
		for n := range victims + controls {
			enqueue(fmt.Sprintf("message/%d", n), "graph.message.v1", fmt.Sprintf(`'{"name": "paid", "key": "message/%d"}'`, n))
			enqueue(fmt.Sprintf("race/%d", n), "graph.message.v1", fmt.Sprintf(`'{"name": "paid", "key": "race/%d"}'`, n))
		}
		fmt.Fprintf(&b, "INSERT INTO workflow_run (type) VALUES (%s);\n", quoted(cleanup.Type)) // retention would remove what is judged
		for _, r := range t.w.rows {
			switch {
			case r.table == "user_task":
				enqueue(r.specimen, "graph.complete_task.v1", fmt.Sprintf(`'{"task": %q, "by": "anna"}'`, r.data["id"]))
			case r.table == "process_instance" && strings.HasPrefix(r.specimen, "paused/"):
				fmt.Fprintf(&b, "DO $do$ BEGIN PERFORM process_resume('%s'); EXCEPTION WHEN OTHERS THEN END $do$;\n", r.data["id"])
			}
		}
	}
	conn, err := pgx.Connect(ctx, t.w.server.URL(t.name))
	if err != nil {
		return err
	}
	defer conn.Close(context.WithoutCancel(ctx))
	_, err = conn.PgConn().Exec(ctx, "SET statement_timeout = '10s';"+b.String()).ReadAll()
	return err
}

// state returns how everything stands: plain runs, instances and events.
func (t *trial) state(ctx context.Context) (end, error) {
	rows, _ := t.pool.Query(ctx, `
		SELECT coalesce(idempotency_key, 'run '||id), status FROM workflow_run
		WHERE token_id IS NULL AND (type ^@ 'media.' OR type ^@ 'billing.' OR idempotency_key ^@ 'poke/')
		UNION ALL
		SELECT CASE WHEN business_key ^@ 'poke-' THEN business_key ELSE 'instance '||id END, status FROM process_instance
		UNION ALL
		SELECT coalesce(payload->>'poke', 'event '||id),
		       CASE WHEN 'control' = ANY (delivered_to) THEN 'delivered' WHEN 'control' = ANY (parked_by) THEN 'parked' ELSE 'not delivered' END
		FROM outbox_event WHERE event_type = 'test.happened.v1'`)
	now := end{}
	for _, r := range t.w.rows {
		if name, ok := nameOf(r); ok {
			now[name] = "gone"
		}
	}
	var name, status string
	_, err := pgx.ForEachRow(rows, []any{&name, &status}, func() error { now[name] = status; return nil })
	for name := range now {
		if strings.HasPrefix(name, "instance ") && t.w.specimenOf(name) == "" {
			delete(now, name) // started by an instance that was started since: its id differs each time
		}
	}
	return now, err
}

// late lists what no deed has touched and what does not end as in a world without deeds.
func (t *trial) late(now, baseline end) (late []string) {
	for _, name := range sorted(baseline) {
		if now[name] != baseline[name] && !t.touched[t.w.specimenOf(name)] {
			late = append(late, fmt.Sprintf("%s %s is %s, not %s", t.w.specimenOf(name), name, strings.ToLower(cmp.Or(now[name], "gone")), strings.ToLower(baseline[name])))
		}
	}
	return late
}

// nameOf is what state calls a row of the world.
func nameOf(r row) (name string, named bool) {
	switch {
	case r.specimen == "":
	case r.table == "workflow_run" && r.data["token_id"] == nil:
		return fmt.Sprint("run ", r.data["id"]), true
	case r.table == "process_instance":
		return fmt.Sprint("instance ", r.data["id"]), true
	}
	return "", false
}

// specimenOf returns the specimen that a thing named by state belongs to.
func (w *world) specimenOf(name string) string {
	if label, ok := strings.CutPrefix(name, "poke/"); ok {
		return label[:strings.LastIndex(label, "/")]
	}
	for kind, table := range map[string]string{"run ": "workflow_run", "instance ": "process_instance", "event ": "outbox_event"} {
		if id, ok := strings.CutPrefix(name, kind); ok {
			return w.of[table+" id = "+quoted(id)]
		}
	}
	return name
}

// repeated lists events that were delivered more than once. Several events that deeds append may have the same id,
// because deeds choose it.
func (t *trial) repeated(ctx context.Context) (often []string, err error) {
	rows, _ := t.pool.Query(ctx, "SELECT event_uuid::text, count(*) FROM outbox_event GROUP BY 1 HAVING count(*) > 1")
	same := map[string]int{}
	var id string
	var n int
	if _, err := pgx.ForEachRow(rows, []any{&id, &n}, func() error { same[id] = n; return nil }); err != nil {
		return nil, err
	}
	t.mu.Lock()
	defer t.mu.Unlock()
	for _, id := range sorted(t.delivered) {
		if n := t.delivered[id]; n > 4*max(1, same[id]) {
			often = append(often, fmt.Sprintf("event %s was delivered %d times", id, n))
		}
	}
	return often, nil
}

// complacent are answers to «why» that say that all is well.
var complacent = regexp.MustCompile(`will take it in its turn$|runs of higher priority go first|have no slot free|: such runs are started one at a time|^(\S+: )?runs at .* is extended while|it will be taken back|the instance that it calls is about to be started$|^$`)

// patience is how long it may take until the reason why something waits is reported.
const patience = 10 * time.Second

// silent lists what was touched, does not continue, and has no finding. When it asks, nothing has changed for a
// while.
func (t *trial) silent(ctx context.Context, baseline end) (untold []string, err error) {
	var waiting map[string]string
	for begun := time.Now(); ; time.Sleep(100 * time.Millisecond) {
		if waiting, err = t.waiting(ctx, baseline); err != nil || len(waiting) == 0 {
			return nil, err
		}
		told := !slices.ContainsFunc(slices.Collect(maps.Values(waiting)), complacent.MatchString)
		if waited := time.Since(begun); waited > patience || told && waited > 2*time.Second { // until then it may still move
			break
		}
	}
	doctor, _ := t.tool(ctx, "doctor", "--json", "--thorough")
	for _, name := range sorted(waiting) {
		_, id, named := strings.Cut(name, " ")
		if why := waiting[name]; complacent.MatchString(why) && !(named && strings.Contains(doctor, id)) {
			untold = append(untold, fmt.Sprintf("%s %s, of which is said %q", t.w.specimenOf(name), name, why))
		}
	}
	return untold, nil
}

// waiting returns the reasons for what is not over and differs from a world without deeds.
func (t *trial) waiting(ctx context.Context, baseline end) (map[string]string, error) {
	rows, _ := t.pool.Query(ctx, `
		SELECT coalesce(idempotency_key, 'run '||id), status, 'SELECT workflow_why('''||id||''')' FROM workflow_run
		WHERE token_id IS NULL AND status NOT IN ('succeeded', 'failed', 'cancelled')
		UNION ALL
		SELECT CASE WHEN business_key ^@ 'poke-' THEN business_key ELSE 'instance '||id END, status, 'SELECT process_why('''||id||''')' FROM process_instance
		WHERE completed_at IS NULL`)
	questions := map[string]string{}
	var name, status, question string
	if _, err := pgx.ForEachRow(rows, []any{&name, &status, &question}, func() error {
		if baseline[name] != status {
			questions[name] = question
		}
		return nil
	}); err != nil {
		return nil, err
	}
	whys := map[string]string{}
	// For a sink: whether outbox_lag reports events that the sink has not received.
	rows, _ = t.pool.Query(ctx, `
		SELECT 'sink/' || substr(s.name, 5), CASE WHEN coalesce(l.open, 0) > 0 THEN l.open || ' events are open' ELSE '' END
		FROM outbox_sink s LEFT JOIN outbox_lag l ON l.sink = s.name
		WHERE s.name ^@ 'sink' AND EXISTS (SELECT FROM outbox_event e WHERE e.published_at IS NULL AND e.parked_at IS NULL AND outbox_wants(s.types, e.event_type)
		                                   AND s.name <> ALL (coalesce(e.delivered_to, '{}') || coalesce(e.parked_by, '{}'))
		                                   AND NOT EXISTS (SELECT FROM outbox_delivery d WHERE d.event_id = e.id AND d.sink = s.name AND d.parked_at IS NOT NULL))`)
	var why string
	if _, err := pgx.ForEachRow(rows, []any{&name, &why}, func() error { whys[name] = why; return nil }); err != nil {
		return map[string]string{"a sink": ""}, nil // an error is not a reported reason
	}
	for name, question := range questions {
		var why *string
		err := t.pool.QueryRow(ctx, question).Scan(&why)
		if refusal := (*pgconn.PgError)(nil); errors.As(err, &refusal) || why == nil {
			whys[name] = "" // an error is not a reported reason
		} else if err != nil {
			return nil, err
		} else {
			whys[name] = *why
		}
	}
	return whys, nil
}

var workflowctl string // path of the built program

// tool runs workflowctl on the trial's database.
func (t *trial) tool(ctx context.Context, args ...string) (out string, err error) {
	cmd := exec.CommandContext(ctx, workflowctl, args...)
	cmd.Env = append(os.Environ(), "DATABASE_URL="+t.w.server.URL(t.name))
	var stderr strings.Builder
	cmd.Stderr = &stderr
	text, err := cmd.Output()
	if err != nil && strings.HasPrefix(args[0], "doctor") && json.Valid(text) {
		err = nil // doctor found something grave
	}
	if err != nil {
		err = fmt.Errorf("workflowctl %s: %.300s", strings.Join(args, " "), strings.TrimSpace(stderr.String()))
	}
	return string(text), err
}

// tools lists the tools that fail.
func (t *trial) tools(ctx context.Context) (failed []string, err error) {
	for _, args := range [][]string{{"doctor", "--json", "--thorough"}, {"top", "--once"}, {"show", "workers"}, {"show", "working"}, {"show", "waiting"}, {"show", "lag"}, {"show", "tasks"}} {
		if _, err := t.tool(ctx, args...); err != nil {
			failed = append(failed, err.Error())
		}
	}
	return failed, ctx.Err()
}

// without returns what the ends of two quiet worlds have in common: what depends on chance cannot be a baseline.
func (e end) without(other end) end {
	common := maps.Clone(e)
	maps.DeleteFunc(common, func(name, status string) bool { return other[name] != status })
	return common
}
