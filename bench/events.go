package main

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/simple-workflow/simple-workflow/internal/delivery"
)

const (
	oneDispatcher  = "backlog of %s, 1 dispatcher"
	twoDispatchers = "backlog of %s, 2 dispatchers"
	behindPoison   = "backlog of %s behind a poisoned aggregate"
	besideOther    = "backlog of %s beside what another sink has not got"

	openSink  = "bench"     // served by the engines under measurement
	otherSink = "elsewhere" // served by nobody
)

// events measures how the outbox is emptied: backlogs of several sizes, also beside failing events, and how long an
// event takes from its commit to the sink.
func events(ctx context.Context, b *bench) error {
	b.section.publishers(b)
	templates, err := b.eventTemplates(ctx)
	if b.has(ours{}) {
		err = errors.Join(err, prepareBroker(ctx))
	}
	if err != nil {
		return err
	}
	for rep := 1; rep <= max(b.sizes.reps, b.sizes.bigReps); rep++ {
		for _, w := range b.backlogs(templates) {
			if rep > w.reps {
				continue
			}
			s := sample{Engine: w.engine.name(), Variant: w.variant, Rep: rep, Runs: w.events * w.rounds}
			if err := b.onCopy(ctx, w.template, func(db *database) error {
				if w.broker {
					return b.throughBroker(ctx, db, w, &s)
				}
				return b.publish(ctx, db, w, &s)
			}); err != nil {
				return fmt.Errorf("%s, %s: %w", s.Engine, w.variant, err)
			}
			b.record(s)
		}
		if rep <= b.sizes.reps {
			if err := b.eventDelays(ctx, templates, rep); err != nil {
				return err
			}
		}
	}
	for _, name := range templates {
		err = errors.Join(err, b.server.forget(ctx, name))
	}
	return err
}

// publishers records who takes part here: our dispatcher and watermill's forwarder.
func (s *section) publishers(b *bench) {
	s.Engines, s.SetUp, s.Missing = map[string]string{}, map[string]string{}, ""
	if b.has(ours{}) {
		s.Engines[ours{}.name()], s.SetUp[ours{}.name()] = ours{}.version(), oursEvents{}.settings()
	}
	if b.watermill {
		s.Engines[forwarded{}.name()], s.SetUp[forwarded{}.name()] = forwarded{}.version(), forwarded{}.settings()
	}
}

// A backlog is the contents of an outbox, and who empties it.
type backlog struct {
	engine    engine
	variant   string
	template  string // of the database
	events    int    // number in it
	rounds    int    // how often it is emptied; the first round is in the template
	task      task
	processes int
	reps      int
	broker    bool // uses a JetStream of its own
}

// backlogs lists what is measured. templates has the database names of the templates.
func (b *bench) backlogs(templates map[string]string) (all []backlog) {
	z := b.sizes
	add := func(e engine, pattern, template string, events, processes, reps int, t task) {
		w := backlog{engine: e, variant: fmt.Sprintf(pattern, thousands(float64(events))), template: templates[template],
			events: events, rounds: 1, task: t, processes: processes, reps: reps}
		if template == "small" { // the costs of a few hundredths of a second cannot be read from meters
			w.rounds = z.smallRounds
		}
		w.task.Do = "publish"
		w.broker = pattern == oneToJetStream || pattern == twoToJetStream
		all = append(all, w)
	}
	if b.has(ours{}) {
		e := oursEvents{}
		for _, size := range []struct {
			template string
			events   int
			reps     int
		}{{"small", z.backlogs[0], z.reps}, {"middle", z.backlogs[1], z.reps}, {"large", z.backlogs[2], z.bigReps}} {
			add(e, oneDispatcher, size.template, size.events, 1, size.reps, task{})
			add(e, twoDispatchers, size.template, size.events, 2, size.reps, task{})
		}
		add(e, behindPoison, "poisoned", z.backlogs[1], 1, z.reps, task{})
		add(e, besideOther, "beside", z.backlogs[1], 1, z.reps, task{})
		add(e, oneToJetStream, "middle", z.backlogs[1], 1, z.reps, task{})
		add(e, twoToJetStream, "middle", z.backlogs[1], 2, z.reps, task{})
	}
	if b.watermill {
		add(forwarded{}, forwardedShipped, "forwarded few", z.forwardedFew, 1, z.reps, task{})
		add(forwarded{}, forwardedGroup, "forwarded few", z.forwardedFew, 1, z.reps, task{Batch: forwardBatch})
		add(forwarded{}, forwardedGroup, "forwarded", z.backlogs[1], 1, z.reps, task{Batch: forwardBatch})
		add(forwarded{queue: true}, forwardedQueue, "forwarded few queue", z.forwardedFew, 1, z.reps, task{Batch: forwardBatch, Queue: true})
		add(forwarded{queue: true}, forwardedQueue, "forwarded queue", z.backlogs[1], 1, z.reps, task{Batch: forwardBatch, Queue: true})
	}
	return all
}

// publish empties one backlog for the given number of rounds. Dispatchers run before the clock starts, but do not use
// their sink until then. A forwarder has no such switch and starts with the clock.
func (b *bench) publish(ctx context.Context, db *database, w backlog, s *sample) error {
	w.task.URL = db.url
	ps, err := start(w.engine, w.task, w.processes)
	if err != nil {
		return err
	}
	return errors.Join(b.publishRounds(ctx, db, w, ps, s), ps.stop())
}

func (b *bench) publishRounds(ctx context.Context, db *database, w backlog, ps processes, s *sample) error {
	_, gated := w.engine.(oursEvents)
	if gated {
		ps.say("go")
		if err := cmp.Or(pause(ctx, b.sizes.warmUp), checkedLanes(ctx, db)); err != nil {
			return err
		}
	}
	var first, total reading
	for round := range w.rounds {
		if round > 0 {
			if err := errors.Join(w.engine.load(ctx, db, w.events, foreground), db.rest(ctx)); err != nil {
				return err
			}
		} else {
			b.calm()
		}
		from, err := b.server.read(ctx, ps)
		if err != nil {
			return err
		}
		if gated {
			err = openGate(ctx, db)
		} else {
			ps.say("go")
		}
		if err := errors.Join(err, awaitDrained(ctx, db, w.engine, ps, int64(w.events*(round+1)))); err != nil {
			return err
		}
		to, err := b.server.read(ctx, ps)
		if err != nil {
			return err
		}
		if round == 0 {
			first, total = from, from
		}
		total = total.plus(from, to)
		if round+1 < w.rounds {
			if err := closeGate(ctx, db); err != nil {
				return err
			}
		}
	}
	s.costs(first, total, s.Runs)
	s.Rate = float64(s.Runs) / s.Seconds
	return publishedOnce(ctx, db, w.engine, ps, s.Runs)
}

// checkedLanes waits until the dispatchers have checked their lanes, which they do once at their start. Among a million
// open events this takes longer than the warm-up.
func checkedLanes(ctx context.Context, db *database) error {
	for begin := time.Now(); ; {
		var busy bool
		err := db.QueryRow(ctx, `SELECT EXISTS (SELECT FROM pg_stat_activity
			WHERE datname = current_database() AND pid <> pg_backend_pid() AND state = 'active' AND query LIKE '%outbox_set_right%')`).Scan(&busy)
		if err == nil && busy && time.Since(begin) > patience {
			err = fmt.Errorf("lanes are still checked after %v", patience)
		}
		if err != nil || !busy {
			return err
		}
		if err := pause(ctx, 50*time.Millisecond); err != nil {
			return err
		}
	}
}

// plus adds what was used between two readings.
func (r reading) plus(from, to reading) reading {
	return reading{at: r.at.Add(to.at.Sub(from.at)), server: r.server + to.server - from.server, workers: r.workers + to.workers - from.workers,
		own: r.own + to.own - from.own, machine: r.machine + to.machine - from.machine, wal: r.wal + to.wal - from.wal, rss: to.rss}
}

// openGate and closeGate make dispatchers publish to the sink, or not use it.
func openGate(ctx context.Context, db *database) error {
	return db.do(ctx, `UPDATE outbox_sink SET paused_until = NULL WHERE name = '`+openSink+`'`)
}

func closeGate(ctx context.Context, db *database) error {
	return db.do(ctx, `UPDATE outbox_sink SET paused_until = '9000-01-01' WHERE name = '`+openSink+`'`)
}

// publishedOnce checks that n events were published, each of them once, and that the outbox has recorded it.
func publishedOnce(ctx context.Context, db *database, e engine, ps processes, n int) error {
	if err := pause(ctx, 50*time.Millisecond); err != nil { // handled counts are reported a hundred times a second
		return err
	}
	different, all := ps.handled()
	left, err := e.unsettled(ctx, db, n)
	if err == nil && (different != int64(n) || all != int64(n) || left != 0) {
		err = fmt.Errorf("of %d events %d were published, %d times; %d are not marked", n, different, all, left)
	}
	return err
}

// eventTemplates creates the databases with the backlogs, and returns their names.
func (b *bench) eventTemplates(ctx context.Context) (map[string]string, error) {
	z, names := b.sizes, map[string]string{}
	add := func(name, base string, fill func(context.Context, *database) error) error {
		names[name] = fmt.Sprintf("template_events_%d", len(names)+1)
		return b.server.template(ctx, names[name], base, func(ctx context.Context, db *database) error {
			return errors.Join(fill(ctx, db), db.rest(ctx))
		})
	}
	load := func(e engine, n int) func(context.Context, *database) error {
		return func(ctx context.Context, db *database) error { return e.load(ctx, db, n, foreground) }
	}
	var errs []error
	if b.has(ours{}) {
		base, err := b.base(ctx, ours{})
		errs = append(errs, err, add("empty", base, func(ctx context.Context, db *database) error {
			return errors.Join(delivery.Register(ctx, db, openSink, nil), closeGate(ctx, db))
		}))
		e, empty := oursEvents{}, names["empty"]
		errs = append(errs,
			add("small", empty, load(e, z.backlogs[0])), add("middle", empty, load(e, z.backlogs[1])), add("large", empty, load(e, z.backlogs[2])),
			add("poisoned", empty, func(ctx context.Context, db *database) error {
				return errors.Join(poison(ctx, db, z.poisoned), e.load(ctx, db, z.backlogs[1], foreground))
			}),
			add("beside", empty, func(ctx context.Context, db *database) error {
				return errors.Join(besides(ctx, db, z.backlogs[2]), e.load(ctx, db, z.backlogs[1], foreground))
			}))
	}
	if b.watermill {
		for suffix, e := range map[string]forwarded{"": {}, " queue": {queue: true}} {
			install := func(n int) func(context.Context, *database) error {
				return func(ctx context.Context, db *database) error {
					return errors.Join(e.install(ctx, db), e.load(ctx, db, n, foreground))
				}
			}
			errs = append(errs, add("forwarded empty"+suffix, "", install(0)), add("forwarded few"+suffix, "", install(z.forwardedFew)),
				add("forwarded"+suffix, "", install(z.backlogs[1])))
		}
	}
	return names, errors.Join(errs...)
}

// poison inserts events of one aggregate at the front. The sink never accepts the first of them.
func poison(ctx context.Context, db *database, n int) error {
	_, err := db.Exec(ctx, `
		INSERT INTO outbox_event (aggregate_id, event_type, payload)
		SELECT $1, 'bench.poison.v1', '{"n": 0}' FROM generate_series(1, $2)`, poisoned, n)
	return err
}

// besides inserts events that one sink has received and another has not, and waits until reading starts after them.
func besides(ctx context.Context, db *database, n int) error {
	if err := delivery.Register(ctx, db, otherSink, nil); err != nil {
		return err
	}
	_, err := db.Exec(ctx, `
		INSERT INTO outbox_event (aggregate_id, event_type, payload, delivered_to)
		SELECT `+aggregateOf+`, 'bench.before.v1', `+payloadOf+`, ARRAY[$2::text] FROM generate_series(1, $1::int) g`, n, openSink)
	if err != nil {
		return err
	}
	for begin := time.Now(); ; {
		var settled bool
		err := cmp.Or(delivery.RaiseFloors(ctx, db, openSink), pause(ctx, 10*time.Millisecond))
		if err == nil {
			err = db.QueryRow(ctx, `SELECT min(floor) = (SELECT max(id) FROM outbox_event) FROM outbox_lane WHERE sink = $1`, openSink).Scan(&settled)
		}
		if err == nil && !settled && time.Since(begin) > patience {
			err = fmt.Errorf("floors are not where they should be after %v", patience)
		}
		if err != nil || settled {
			return err
		}
	}
}
