package graph_test

import (
	"fmt"
	"testing"

	"github.com/simple-workflow/simple-workflow/graph"
)

// If a message or signal arrives in a transaction that overlaps with process_pause or process_resume, its run is held
// when the instance is paused and is not held when the instance is resumed.
func TestPauseMeetsWhatArrives(t *testing.T) {
	const arrived = `SELECT coalesce((SELECT CASE WHEN held_at IS NULL THEN 'free' ELSE 'held' END FROM workflow_run WHERE type = 'graph.arrive.v1'), 'none')`
	for _, c := range []struct{ name, await, typ, payload string }{
		{"message", `{"message": "go", "key": "'k'"}`, "graph.message.v1", `{"name": "go", "key": "k"}`},
		{"signal", `{"signal": "go"}`, "graph.signal.v1", `{"name": "go"}`},
	} {
		begin := func(t *testing.T) (s *site, instance any) {
			t.Helper()
			s = newSite(t)
			id := s.start(s.deploy("S", fmt.Sprintf(`"S": {"await": %s, "to": "A"},`, c.await)+step("A", "")), `{}`)
			s.waitsFor(1)
			return s, id
		}
		for _, function := range []string{"process_pause", "process_resume"} {
			act := fmt.Sprintf(`SELECT %s($1)`, function)
			want := map[string]string{"process_pause": "held", "process_resume": "free"}[function]
			finish := func(t *testing.T, s *site, id any) {
				t.Helper()
				await(t, c.name+" to arrive", func() bool { return query[string](t, s.pool, arrived) != "none" })
				if got := query[string](t, s.pool, arrived); got != want {
					t.Errorf("it is %s, want %s", got, want)
				}
				query[string](t, s.pool, `SELECT process_resume($1)`, id)
				await(t, "the instance to complete", func() bool {
					return query[string](t, s.pool, `SELECT status FROM process_instance WHERE id = $1`, id) == string(graph.Completed)
				})
			}
			t.Run(c.name+" first, then "+function, func(t *testing.T) {
				s, id := begin(t)
				if function == "process_resume" {
					query[string](t, s.pool, `SELECT process_pause($1)`, id)
				}
				execute(t, s.pool, `CREATE FUNCTION linger() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN PERFORM pg_advisory_xact_lock_shared(7); RETURN NULL; END $$;
					CREATE TRIGGER linger AFTER INSERT ON workflow_run FOR EACH ROW WHEN (NEW.type = 'graph.arrive.v1') EXECUTE FUNCTION linger()`)
				lock, err := s.pool.Begin(t.Context())
				if err != nil {
					t.Fatal(err)
				}
				defer lock.Rollback(t.Context())
				if _, err := lock.Exec(t.Context(), `SELECT pg_advisory_xact_lock(7)`); err != nil {
					t.Fatal(err)
				}
				s.enqueue(c.typ, c.payload)
				await(t, c.name+" to be on its way", func() bool {
					return query[bool](t, s.pool, `SELECT EXISTS (SELECT FROM pg_locks WHERE locktype = 'advisory' AND NOT granted AND objid = 7 AND database = (SELECT oid FROM pg_database WHERE datname = current_database()))`)
				})
				acted := make(chan error, 1)
				go func() {
					_, err := s.pool.Exec(t.Context(), act, id)
					acted <- err
				}()
				over := false
				await(t, function+" to wait, or to be over", func() bool {
					select {
					case err = <-acted:
						over = true
						return true
					default:
						return query[bool](t, s.pool, `SELECT EXISTS (SELECT FROM pg_stat_activity WHERE datname = current_database() AND wait_event_type = 'Lock' AND query = $1)`, act)
					}
				})
				if problem := lock.Commit(t.Context()); problem != nil {
					t.Fatal(problem)
				}
				if !over {
					err = <-acted
				}
				if err != nil {
					t.Fatal(err)
				}
				finish(t, s, id)
			})
			t.Run(function+" first, then "+c.name, func(t *testing.T) {
				s, id := begin(t)
				if function == "process_resume" {
					query[string](t, s.pool, `SELECT process_pause($1)`, id)
				}
				tx, err := s.pool.Begin(t.Context())
				if err != nil {
					t.Fatal(err)
				}
				defer tx.Rollback(t.Context())
				if _, err := tx.Exec(t.Context(), act, id); err != nil {
					t.Fatal(err)
				}
				s.enqueue(c.typ, c.payload)
				await(t, c.name+" to wait, or to arrive", func() bool {
					return query[string](t, s.pool, arrived) != "none" || query[bool](t, s.pool, `SELECT EXISTS (SELECT FROM pg_stat_activity WHERE datname = current_database() AND wait_event_type = 'Lock')`)
				})
				if err := tx.Commit(t.Context()); err != nil {
					t.Fatal(err)
				}
				finish(t, s, id)
			})
		}
	}
}
