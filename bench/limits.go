package main

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"

	"github.com/simple-workflow/simple-workflow/graph"
)

const (
	wideFork = "one fork of %s, joined"
	longEach = "one each over %s elements, limit 50"
	waitFree = "plain runs, no instance waits"
	waitFull = "plain runs, %s instances wait"

	firstRSSKey = "RSS after the first"
)

// limits makes one worker execute instances of unusual size, one at a time.
func (b *bench) limits(ctx context.Context) error {
	fork := forked(b.sizes.branches)
	each := &graph.Definition{Process: "each", Version: 1, Start: "each", Nodes: map[string]*graph.Node{
		"each": {Each: &graph.Each{List: "input.items", Do: noop, Limit: 50}, In: map[string]string{"n": "item"}},
	}}
	return errors.Join(
		b.limit(ctx, wideFork, fork, []int{b.sizes.branches, b.sizes.branches}, []string{`{"n": 1}`, `{"n": 1}`}),
		b.limit(ctx, longEach, each, []int{b.sizes.elements / 10, b.sizes.elements}, []string{list(b.sizes.elements / 10), list(b.sizes.elements)}))
}

// list is the input of an each over n elements.
func list(n int) string {
	var text strings.Builder
	for i := range n {
		fmt.Fprintf(&text, ", %d", i+1)
	}
	return `{"items": [` + strings.TrimPrefix(text.String(), ", ") + `]}`
}

// limit starts one instance for each input, each when the previous one is over, and records how many seconds they
// took.
func (b *bench) limit(ctx context.Context, variant string, d *graph.Definition, steps []int, inputs []string) error {
	last := steps[len(steps)-1]
	s := sample{Engine: ours{}.name(), Variant: fmt.Sprintf(variant, thousands(float64(last))), Rep: 1, More: map[string]float64{}}
	err := b.onFresh(ctx, ours{}, func(db *database) error {
		if _, err := graph.Deploy(ctx, db.Pool, d); err != nil {
			return err
		}
		if err := db.rest(ctx); err != nil {
			return err
		}
		err := b.timed(ctx, ours{}, task{Do: "work", URL: db.url, Graph: true}, 1, &s, func(ps processes) (int, error) {
			if err := pause(ctx, b.sizes.warmUp); err != nil {
				return 0, err
			}
			for i, input := range inputs {
				seconds, err := oneInstance(ctx, db, ps, d.Process, input)
				if err != nil {
					return 0, err
				}
				s.Series, s.Runs = append(s.Series, seconds), s.Runs+steps[i]
				if now, err := b.server.read(ctx, ps); err == nil && i == 0 {
					s.More[firstRSSKey] = now.rss
				}
			}
			return s.Runs, nil
		})
		if err != nil {
			return err
		}
		return allAre(ctx, db, "COMPLETED", len(inputs), s.Runs)
	})
	if err != nil {
		return fmt.Errorf("%s: %w", s.Variant, err)
	}
	s.Rate = 0 // it includes the warm-up
	b.record(s)
	return nil
}

// oneInstance starts an instance and returns the seconds until it is seen to be over.
func oneInstance(ctx context.Context, db *database, ps processes, process, input string) (float64, error) {
	var id uuid.UUID
	err := db.QueryRow(ctx, `
		INSERT INTO workflow_run (type, payload)
		VALUES ($1, jsonb_build_object('process', $2::text, 'input', $3::text::jsonb))
		RETURNING id`, "graph.start.v1", process, input).Scan(&id)
	for begin := time.Now(); err == nil; {
		var over bool
		err = db.QueryRow(ctx, `SELECT EXISTS (SELECT FROM process_instance WHERE id = $1 AND completed_at IS NOT NULL)`, id).Scan(&over)
		switch took := time.Since(begin); {
		case over:
			return took.Seconds(), nil
		case took > 5*time.Minute:
			return 0, fmt.Errorf("an instance of %s is not over after %v", process, took)
		}
		err = errors.Join(err, ps.alive(), pause(ctx, 5*time.Millisecond))
	}
	return 0, err
}

// amongWaiting drains plain runs with and without waiting instances, in turn.
func (b *bench) amongWaiting(ctx context.Context) error {
	none, err := b.base(ctx, ours{})
	if err != nil {
		return err
	}
	full := none + "_waiting"
	if err := b.server.template(ctx, full, none, b.plantWaiting); err != nil {
		return err
	}
	way := drained{engine: ours{}, task: task{Do: "work", Graph: true}, processes: 1}
	for rep := range b.sizes.reps {
		for _, c := range []struct{ variant, template string }{{waitFree, none}, {b.waitFull(), full}} {
			s := sample{Engine: ours{}.name(), Variant: c.variant, Rep: rep + 1, Runs: b.sizes.crowd}
			if err := b.onCopy(ctx, c.template, func(db *database) error { return b.drainOnce(ctx, db, way, &s) }); err != nil {
				return fmt.Errorf("%s: %w", c.variant, err)
			}
			b.record(s)
		}
	}
	return b.server.forget(ctx, full)
}

func (b *bench) waitFull() string { return fmt.Sprintf(waitFull, thousands(float64(b.sizes.waiting))) }

// plantWaiting writes instances as the engine leaves waiting ones: half of them for a message, half until tomorrow.
// Starting them would take hours.
func (b *bench) plantWaiting(ctx context.Context, db *database) error {
	id, err := graph.Deploy(ctx, db.Pool, waits())
	if err != nil {
		return err
	}
	err = pgx.BeginFunc(ctx, db, func(tx pgx.Tx) error {
		if _, err := tx.Exec(ctx, `SET LOCAL session_replication_role = replica`); err != nil {
			return err
		}
		_, err := tx.Exec(ctx, `
			WITH one AS MATERIALIZED (
				SELECT g, g % 2 = 0 AS message, gen_random_uuid() AS instance, gen_random_uuid() AS token FROM generate_series(1, $1::int) g
			), instances AS (
				INSERT INTO process_instance (id, process_definition_id, status, input_payload, version, live_tokens, started_at)
				SELECT instance, $2, 'WAITING', CASE WHEN message THEN jsonb_build_object('key', g) ELSE jsonb_build_object('n', -1) END, 2, 1, now()
				FROM one
			), tokens AS (
				INSERT INTO process_token (id, instance_id, node, state)
				SELECT token, instance, CASE WHEN message THEN 'message' ELSE 'timer' END, 'Waiting'
				FROM one
			), waits AS (
				INSERT INTO message_wait (token_id, place, instance_id, node, name, key)
				SELECT token, '', instance, 'message', 'bench', g FROM one WHERE message
			)
			INSERT INTO workflow_run (token_id, type, node, payload, max_attempts, run_at)
			SELECT token, 'graph.timer.v1', 'timer', '{}', 1000, now() + interval '1 day' FROM one WHERE NOT message`, b.sizes.waiting, id)
		return err
	})
	if err := errors.Join(err, db.rest(ctx)); err != nil {
		return err
	}
	var wrong int
	err = db.QueryRow(ctx, `SELECT (SELECT count(*) FROM process_without_mover) + (SELECT count(*) FROM process_miscounted)`).Scan(&wrong)
	if err == nil && wrong > 0 {
		err = fmt.Errorf("the engine would not leave %d of these instances so", wrong)
	}
	return err
}
