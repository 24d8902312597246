package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"
)

// A mutant breaks one rule of the product, in a copy of its source that only the compiler sees. At least one of the
// invariants that it names must notice.
type mutant struct {
	name    string
	edits   []edit
	faults  map[string]int // faults that reveal it
	noticed []string       // rules, by the beginning of their names

	mostly string // what at least half of the workload is: a case of the plain runs, processes, or one process; empty: nothing particular
}

const processes = "processes" // for mutant.mostly

// graph is a mutant of the code that advances processes.
func graph(name string, edits []edit, faults map[string]int, noticed ...string) mutant {
	return mutant{name, edits, faults, noticed, processes}
}

// of makes half of the instances belong to one process.
func (m mutant) of(process string) mutant {
	m.mostly = process
	return m
}

// An edit replaces a text that occurs exactly once in a file.
type edit struct{ file, old, new string }

// runMutants tortures each mutant for half a minute. It fails if one of them is not noticed.
func (o options) runMutants(ctx context.Context) error {
	var missed []string
	chosen := mutants
	if o.only != "" {
		names := strings.Split(o.only, ",")
		chosen = slices.DeleteFunc(slices.Clone(mutants), func(m mutant) bool { return !slices.Contains(names, m.name) })
	}
	for _, m := range chosen {
		start := time.Now()
		by, all, err := o.runMutant(ctx, m)
		if err != nil {
			return fmt.Errorf("mutant %s: %w", m.name, err)
		}
		if len(m.edits) == 0 && len(all) == 0 { // the control
			by = []string{"nothing noticed, as it should be"}
		}
		fmt.Printf("  %-28s %-8s %6s  %s\n", m.name, map[bool]string{true: "caught", false: "MISSED"}[len(by) > 0], since(start), strings.Join(append(by, all...), "; "))
		if len(by) == 0 {
			missed = append(missed, m.name)
		}
	}
	fmt.Printf("%d of %d caught\n", len(chosen)-len(missed), len(chosen))
	if len(missed) > 0 {
		return errors.New("not caught by the rules that name them: " + strings.Join(missed, ", "))
	}
	return nil
}

// runMutant returns the broken rules that the mutant names, and the other broken rules.
func (o options) runMutant(ctx context.Context, m mutant) (by, others []string, err error) {
	dir, err := os.MkdirTemp("", "torture-"+m.name+"-")
	if err != nil {
		return nil, nil, err
	}
	defer os.RemoveAll(dir)
	overlay, err := m.overlay(o.root, dir)
	if err != nil {
		return nil, nil, err
	}
	bin := filepath.Join(dir, "bin")
	if err := build(ctx, o.root, bin, overlay); err != nil {
		return nil, nil, err
	}
	p := shortPlan(o.seed)
	p.Name, p.Strikes, p.Singles, p.Single = "mutant", nil, nil, 0
	p.Warm, p.Chaos, p.Calm, p.Drain = time.Second, 18*time.Second, time.Second, 40*time.Second
	p.Rate = 200 // so that batches have more than one run
	// At first, each process leases suspects one at a time. Runs that end their process would keep the runs of frozen
	// workers from being leased again before these thaw, and no outcome would be stale.
	p.Pills, p.Gentle, p.Hold = 0, true, 1
	switch m.mostly {
	case "":
	case processes, "post", "parent":
		p.Rate, p.Instances, p.Halts, p.Pauses, p.Favoured = 20, 9, 1, 5, m.mostly
	default:
		p.Rate, p.Mostly = 60, m.mostly // few suspects, so that runs are leased again before the outcomes of their last leases arrive
	}
	p.schedule(func(f fault) int { return m.faults[f.key] })
	v, err := torture(ctx, p, dir, bin, o)
	if err != nil {
		return nil, nil, err
	}
	for _, b := range v.Broken {
		if slices.ContainsFunc(m.noticed, func(rule string) bool { return strings.HasPrefix(b.Rule, rule+" ") }) {
			by = append(by, fmt.Sprintf("%s (%d)", b.Rule, b.N))
		} else {
			others = append(others, fmt.Sprintf("also %s (%d)", b.Rule, b.N))
		}
	}
	return by, others, nil
}

// overlay writes the changed files, and a list of them for go build -overlay.
func (m mutant) overlay(root, dir string) (string, error) {
	root, err := filepath.Abs(root)
	if err != nil {
		return "", err
	}
	changed := map[string]string{}
	for _, e := range m.edits {
		name := filepath.Join(root, e.file)
		if _, ok := changed[name]; !ok {
			text, err := os.ReadFile(name)
			if err != nil {
				return "", err
			}
			changed[name] = string(text)
		}
		if n := strings.Count(changed[name], e.old); n != 1 {
			return "", fmt.Errorf("%s: the text to be changed occurs %d times, want once: %s", e.file, n, e.old)
		}
		changed[name] = strings.Replace(changed[name], e.old, e.new, 1)
	}
	replace := map[string]string{}
	for i, name := range slices.Sorted(maps.Keys(changed)) {
		copied := filepath.Join(dir, fmt.Sprintf("%d-%s", i, filepath.Base(name)))
		if err := os.WriteFile(copied, []byte(changed[name]), 0o644); err != nil {
			return "", err
		}
		replace[name] = copied
	}
	list, err := json.Marshal(map[string]any{"Replace": replace})
	if err != nil {
		return "", err
	}
	file := filepath.Join(dir, "overlay.json")
	return file, os.WriteFile(file, list, 0o644)
}

// Faults that reveal mutants: leases that are lost while their handlers live, crashes, crashes with leases ahead, and
// commits with an unknown outcome.
var (
	zombies = map[string]int{"freeze": 9, "network": 3}
	crashes = map[string]int{"kill": 8, "freeze": 3}
	bursts  = map[string]int{"kill-ahead": 5}
	cuts    = map[string]int{"answer-lost": 16, "never-sent": 30, "sessions": 12}
	nothing = map[string]int{}
)

// extending is the file with the newest function that extends.
const extending = "sql/0026_elsewhere.sql"

// settling is the file with the newest functions that settle, cancel and find expired leases.
const settling = "sql/0018_unsettled.sql"

// taking is the file with the newest functions that lease.
const taking = "sql/0019_suspect.sql"

// ahead is the file with the newest functions that reclaim, and those that lease ahead.
const ahead = "sql/0035_ahead.sql"

var mutants = []mutant{
	// Control: nothing is broken, and nothing may be noticed. Without it, a rule that is wrong would seem to notice
	// mutants.
	{"none", nil, map[string]int{"freeze": 6, "network": 3, "kill": 6, "kill-ahead": 2, "answer-lost": 10, "never-sent": 12, "sessions": 8, "storm": 2, "deadlock": 3, "unleasable": 5, "unmarkable": 3, "events": 3}, nil, ""},
	{"lease-without-isolation", []edit{{"internal/leasing/acquire.go",
		`	aside, problem := p.setAside(ctx, suspected, p.tried, anyCode)`, `	_ = anyCode
	aside, problem := []Aside(nil), error(nil)`}},
		map[string]int{"unleasable": 3}, []string{"I01", "I02", "I16", "I47", "I47c"}, ""},
	{"mark-without-isolation", []edit{{"dispatcher/feed.go",
		`		f.apart.Go(func() { f.markApart(ctx, claim, outcomes) })
`, ``}},
		map[string]int{"unmarkable": 3}, []string{"I18b", "I48", "I48b"}, ""},
	{"settle-fence", []edit{
		{settling, `w.id = s.id AND w.lease_token = s.token`, `w.id = s.id AND w.status = 'leased'`},
		{settling, `w.id = o.id AND w.lease_token = o.token`, `w.id = o.id AND w.status = 'leased'`}},
		zombies, []string{"I05", "I05b", "I06"}, ""},
	{"retry-fence", []edit{{settling,
		`w.id = o.id AND w.lease_token = o.token`, `w.id = o.id AND w.status = 'leased' AND (w.lease_token = o.token OR o.verdict = 'retried')`}},
		map[string]int{"silence": 8}, []string{"I05b"}, "fail"},
	{"heartbeat-fence", []edit{{extending,
		`ON w.id = h.id AND w.lease_token = h.token`, `ON w.id = h.id AND w.status = 'leased'`}},
		zombies, []string{"I07b"}, ""},
	{"row-count-ignored", []edit{{"internal/settling/settle.go",
		`if len(settled) == len(outcomes) {`, `if len(settled) >= 0 {`}},
		zombies, []string{"I03", "I04", "I05", "I15"}, ""},
	{"lease-not-charged", []edit{{taking,
		`attempt = w.attempt + CASE WHEN w.attempt < w.max_attempts THEN 1 ELSE 0 END,
        alone = CASE WHEN w.id = ANY (joined) THEN coalesce(w.alone, false) WHEN w.alone THEN true END,
        started_at = statement_timestamp(), updated_at = statement_timestamp(),
        lease_until = statement_timestamp() + least(t.length, t.timeout) * interval '1 second',
        deadline_at = statement_timestamp() + CASE WHEN w.attempt < w.max_attempts THEN t.timeout ELSE 0 END * interval '1 second'
    FROM unnest(term_types, lengths, timeouts) AS t (type, length, timeout)
    WHERE w.id = ANY (ripe.ids) AND w.type = t.type COLLATE "C"
    RETURNING ripe.many, w.suspect AND w.alone IS TRUE, workflow_follows(w.max_attempts, w.policy_attempts), CASE WHEN isfinite(w.created_at) AND w.policy_attempts IS DISTINCT FROM 0 THEN w.created_at END,`, `alone = CASE WHEN w.id = ANY (joined) THEN coalesce(w.alone, false) WHEN w.alone THEN true END,
        started_at = statement_timestamp(), updated_at = statement_timestamp(),
        lease_until = statement_timestamp() + least(t.length, t.timeout) * interval '1 second',
        deadline_at = statement_timestamp() + CASE WHEN w.attempt < w.max_attempts THEN t.timeout ELSE 0 END * interval '1 second'
    FROM unnest(term_types, lengths, timeouts) AS t (type, length, timeout)
    WHERE w.id = ANY (ripe.ids) AND w.type = t.type COLLATE "C"
    RETURNING ripe.many, w.suspect AND w.alone IS TRUE, workflow_follows(w.max_attempts, w.policy_attempts), CASE WHEN isfinite(w.created_at) AND w.policy_attempts IS DISTINCT FROM 0 THEN w.created_at END,`}},
		nothing, []string{"I09", "I51"}, ""},
	{"expiry-not-charged", []edit{{ahead,
		`attempt = w.attempt - CASE WHEN e.spared OR e.unbegun THEN 1 ELSE 0 END,`, `attempt = greatest(w.attempt - 1, 0),`}},
		crashes, []string{"I09b", "I51"}, ""},
	{"unbegun-charged", []edit{{ahead,
		`a.begun IS FALSE AND w.attempt > 0`, `false AND a.begun IS FALSE`}},
		bursts, []string{"I09d", "I51"}, ""},
	{"begun-given-back", []edit{{ahead,
		`a.begun IS FALSE AND w.attempt > 0`, `a.begun IS NOT NULL AND w.attempt > 0`}},
		bursts, []string{"I09b", "I51"}, ""},
	{"limit-before-mark", []edit{{ahead,
		`a.begun IS FALSE AND w.attempt > 0`, `a.begun IS FALSE AND w.attempt BETWEEN 1 AND w.max_attempts - 1`}},
		bursts, []string{"I09d", "I51"}, ""},
	{"begun-without-mark", []edit{{"worker/mark.go",
		`begun, err := leasing.Begin(call, w.db, tokens, runs)`, `begun, err := map[uuid.UUID]bool{}, ctx.Err()
		for i, token := range tokens {
			begun[token] = leasing.Begin != nil && runs[i] != token
		}`}},
		bursts, []string{"I09c"}, ""},
	{"company-not-asked", []edit{{ahead,
		`w.suspect AND w.alone IS FALSE AND w.attempt > 0`, `w.suspect AND w.attempt > 0`}},
		crashes, []string{"I09b"}, ""},
	{"exhausted-started", []edit{
		{taking, `w.node::text END,
              w.id, w.type::text, w.attempt, w.max_attempts, w.lease_no, w.idempotency_key, w.tenant_id, w.metadata, w.started_at,
              w.payload, w.priority, w.postponed, w.suspect, w.deadline_at IS NOT DISTINCT FROM w.started_at,`,
			`w.node::text END,
              w.id, w.type::text, w.attempt, w.max_attempts, w.lease_no, w.idempotency_key, w.tenant_id, w.metadata, w.started_at,
              w.payload, w.priority, w.postponed, w.suspect, false,`},
		{ahead, `SELECT e.*, e.attempt >= e.most AND NOT e.spared AND NOT e.unbegun AS over`, `SELECT e.*, false AS over`},
	}, map[string]int{"kill": 14}, []string{"I10"}, ""},
	{"valid-lease-taken", []edit{{settling,
		`w.started_at >= oldest AND (w.lease_until < clock_timestamp()`, `w.started_at >= oldest AND (w.lease_until < clock_timestamp() + interval '2 seconds'`}},
		crashes, []string{"I07", "I51"}, ""},
	{"reset-on-start", []edit{{"worker/worker.go",
		`	log.Info("worker starts",`, `	_, _ = w.db.Exec(context.Background(), "UPDATE workflow_run SET status = 'pending' WHERE status = 'leased'")
	log.Info("worker starts",`}},
		crashes, []string{"I07"}, ""},
	{"deadline-not-capped", []edit{{extending,
		`CASE WHEN w.deadline_at > w.started_at THEN w.deadline_at END`, `NULL::timestamptz`}},
		nothing, []string{"I38"}, ""},
	{"cancel-does-not-revoke", []edit{{settling,
		`WHERE r.id = workflow_cancel.id AND r.status IN ('pending', 'leased');`, `WHERE r.id = workflow_cancel.id AND r.status = 'pending';
        IF NOT FOUND THEN
            UPDATE workflow_run r SET last_error = 'cancelled' WHERE r.id = workflow_cancel.id AND r.status = 'leased';
        END IF;`}},
		nothing, []string{"I14"}, ""},
	{"outcome-lost-with-batch", []edit{{"worker/settle.go",
		`		w.settle(ctx, batch[len(batch)/2:])
`, ``}},
		map[string]int{"storm": 5}, []string{"I16", "I16b"}, ""},
	{"events-outside", []edit{{"worker/commit.go",
		`if err := outbox.Append(ctx, tx, events...); err != nil {`, `if err := pgx.BeginFunc(ctx, w.db, func(own pgx.Tx) error { return outbox.Append(ctx, own, events...) }); err != nil {`}},
		cuts, []string{"I15"}, ""},
	{"effects-outside", []edit{{"worker/commit.go",
		`if err := w.applyAll(ctx, tx, j); err != nil {`, `if err := pgx.BeginFunc(ctx, w.db, func(own pgx.Tx) error { return w.applyAll(ctx, own, j) }); err != nil {`}},
		cuts, []string{"I03", "I04"}, ""},
	{"unknown-taken-for-done", []edit{{"worker/settle.go",
		`	if err != nil {
		for _, j := range batch {
			j.unsure = true
			_, j.lasting`, `	if err != nil && unreachable(err) {
		w.settled(batch, nil)
		return nil
	}
	if err != nil {
		for _, j := range batch {
			j.unsure = true
			_, j.lasting`}},
		cuts, []string{"I16"}, ""},
	{"history-of-settle-lost", []edit{{settling,
		`WHERE NOT silent AND s.verdict <> 'succeeded'`, `WHERE NOT silent AND s.verdict = 'failed'`}},
		nothing, []string{"I13"}, ""},
	{"history-of-expiry-lost", []edit{{ahead,
		`FROM taken t JOIN expired e ON e.id = t.id
        WHERE NOT silent`, `FROM taken t JOIN expired e ON e.id = t.id
        WHERE NOT silent AND t.attempt = 0`}},
		crashes, []string{"I13"}, ""},
	{"key-not-unique", []edit{{"sql/0001_run.sql",
		`CREATE UNIQUE INDEX workflow_run_idempotency_idx`, `CREATE INDEX workflow_run_idempotency_idx`}},
		nothing, []string{"I30", "I30b"}, ""},
	{"started-too-early", []edit{{taking,
		`SELECT w.id FROM workflow_run w
                WHERE w.status = 'pending' AND w.deleted_at IS NULL AND w.held_at IS NULL
                  AND w.suspect = l.suspect AND w.type = l.type AND w.priority = l.priority
                  AND w.run_at <= statement_timestamp() - l.grace * interval '1 second'`, `SELECT w.id FROM workflow_run w
                WHERE w.status = 'pending' AND w.deleted_at IS NULL AND w.held_at IS NULL
                  AND w.suspect = l.suspect AND w.type = l.type AND w.priority = l.priority
                  AND w.run_at <= statement_timestamp() + interval '3 seconds'`}},
		nothing, []string{"I32"}, ""},
	{"trouble-charged", []edit{{"worker/effect.go",
		`	case err != nil && pg != nil && (passing(pg.Code) || outdated(pg)):
		return fmt.Errorf("effect: %w", err) // settled again with the same outcome; no attempt is charged
`, ``}},
		map[string]int{"storm": 4, "deadlock": 6}, []string{"I34"}, ""},
	{"acknowledged-anyway", []edit{{"dispatcher/feed.go",
		`Delivered: err == nil, Attempt`, `Delivered: row.Attempt >= 0, Attempt`}},
		map[string]int{"sink": 4, "sink-moody": 4}, []string{"I18"}, ""},
	{"aggregate-overtaken", []edit{{"internal/delivery/claim.go",
		`AND d.next_attempt_at > now() AND d.next_attempt_at <`, `AND d.event_id = e.id AND d.next_attempt_at > now() AND d.next_attempt_at <`}},
		map[string]int{"sink-moody": 6, "dispatcher-kill": 2}, []string{"I19"}, ""},
	{"marked-before-sent", []edit{{"dispatcher/feed.go",
		`	if len(wanted) > 0 {
		errs :=`, `	if len(wanted) > 0 {
		var early []delivery.Outcome
		for _, row := range wanted {
			early = append(early, delivery.Outcome{ID: row.ID, Delivered: true})
		}
		f.mark(ctx, claim, early)
		errs :=`}},
		map[string]int{"dispatcher-kill": 10, "sink": 4}, []string{"I18"}, ""},
	graph("control-of-processes", nil, map[string]int{"freeze": 4, "kill": 5, "answer-lost": 8, "sessions": 5, "deadlock": 2}),
	graph("carried-without-fence", []edit{{"worker/commit.go",
		`		if gone[fenceOf(j.outcome)] {`, `		if gone[fenceOf(j.outcome)] && j == nil {`}},
		zombies, "I21", "I23", "I30d", "I31", "I39", "I41"),
	graph("carried-before-the-commit", []edit{{"worker/carry.go",
		`	case err == nil && ctx.Err() == nil && !slices`, `	case stored && !slices`}},
		cuts, "I11", "I31", "I39"),
	graph("join-without-counting", []edit{{"graph/join.go",
		`if !n.Join.Taken && j.joined >= j.expected {
		i.fire(j)`, `if !n.Join.Taken && j.joined >= 1 {
		i.fire(j)`}},
		nothing, "I20", "I39"),
	graph("instance-not-locked", []edit{{"graph/load.go",
		`		ORDER BY id
		FOR NO KEY UPDATE`, `		ORDER BY id`}},
		nothing, "I22", "I42", "I20b"),
	graph("undone-twice", []edit{{"graph/load.go",
		`AND c.status = 'Pending' AND c.undo_run_id IS NULL`, `AND c.status = 'Pending'`}},
		nothing, "I25"),
	graph("undone-in-order", []edit{{"graph/load.go",
		`ORDER BY c."order" DESC`, `ORDER BY c."order"`}},
		nothing, "I28"),
	graph("cancel-leaves-runs", []edit{{"graph/write_end.go",
		`AND status IN ('pending', 'leased') ORDER BY id))
		  AND status IN ('pending', 'leased')`, `AND status IN ('pending', 'leased') ORDER BY id))
		  AND status = 'pending' AND type LIKE 'graph.%'`}},
		nothing, "I21b", "I24", "I29"),
	graph("message-without-lock", []edit{{"graph/message.go",
		`SELECT process_hold_v1($1::text[], $2::text[])`, `SELECT cardinality($1::text[]) + cardinality($2::text[])`}},
		nothing, "I22").of("post"),
	graph("key-ignored", []edit{{"graph/answer.go",
		`if p.Key != "" {`, `if len(p.Key) > 200 {`}},
		nothing, "I30c"),
	graph("parent-unchecked", []edit{
		{"graph/answer.go", `if err := e.called(ctx, p); err != nil {`, `if err := e.called(ctx, p); err != nil && p.Process == "" {`},
		{"graph/start.go", `return t != nil && i.id == p.Parent.Instance`, `return t != nil && !i.passed(t) || t != nil && i.id == p.Parent.Instance`}},
		map[string]int{"forge": 20}, "I40", "I50b"),
	graph("retention-without-the-rule", []edit{
		{"sql/0029_retention.sql", `r.type <> 'graph.signal.v1' OR r.id::text NOT IN`, `true OR r.id::text NOT IN`},
		{"internal/cleanup/cleanup.go", `WHERE p.completed_at IS NULL)`, `WHERE false)`}},
		nothing, "I49", "I49b").of("parent"),
	graph("wait-cut-short", []edit{{"graph/write_steps.go",
		`delays = append(delays, s.due.after.Seconds())`, `delays = append(delays, s.due.after.Seconds()/2)`}},
		nothing, "I32c"),
	graph("pause-stops-at-calls", []edit{{"sql/0016_broadcast.sql",
		`    ids := process_lock_called(process_pause.id);`, `    ids := ARRAY[process_pause.id];`}},
		nothing, "I46").of("parent"),
}
