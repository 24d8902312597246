package main_test

import (
	"fmt"
	"io"
	"net"
	"net/http"
	"strings"
	"testing"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"

	"github.com/simple-workflow/simple-workflow/internal/cmdtest"
	"github.com/simple-workflow/simple-workflow/internal/pgtest"
)

// With the shipped settings, a service that is down for a minute, ten minutes or an hour makes no run and no instance
// fail, and the outage is visible: within 15 s of its first sign, doctor, top, why, show and the worker's metrics
// name the type and the problem. Once the service is back they no longer do. The test moves time by changing rows. It
// has so few runs that an hour has more probes than all of them have attempts: if probes charged attempts, a run would
// fail.
func TestOutageLosesNothing(t *testing.T) {
	t.Parallel()
	for _, outage := range []time.Duration{time.Minute, 10 * time.Minute, time.Hour} {
		t.Run(outage.String(), func(t *testing.T) {
			t.Parallel()
			const n = 2
			url := pgtest.URL(t)
			env := []string{"DATABASE_URL=" + url}
			conn := connect(t, url)
			address, metrics := trips(t, url, n)
			pgtest.Await(t, "the first sign", func() bool {
				return value[bool](t, url, `SELECT EXISTS (SELECT FROM workflow_run WHERE last_error IS NOT NULL)`)
			})
			sign := time.Now()
			waits := value[string](t, url, `SELECT id::text FROM workflow_run WHERE type = 'travel.book.v1' LIMIT 1`)
			places := []place{
				{"doctor", []string{"travel.book.v1", "out of reach", "unavailable"}},
				{"top --once", []string{"travel.book.v1", "unavailable"}},
				{"show breakers", []string{"travel.book.v1", "unavailable"}},
				{"why " + waits, []string{"travel.book.v1", "breaker"}},
			}
			pgtest.Await(t, "all places to name the outage", func() bool {
				places = silent(t, env, places)
				return len(places) == 0 && strings.Contains(get(t, metrics), `workflow_breaker_open{type="travel.book.v1"} 1`)
			})

			for passed := time.Since(sign); passed < outage; {
				before := time.Now()
				jump := pass(t, conn)
				time.Sleep(20 * time.Millisecond)
				passed += jump + time.Since(before)
			}
			back(t, address)
			booked(t, url, n, func() { pass(t, conn) })
			pgtest.Await(t, "nobody to tell of it any more", func() bool {
				p, _ := cmdtest.Run(t, env, "doctor")
				return !strings.Contains(p.Stdout.String(), "out of reach") && strings.Contains(get(t, metrics), `workflow_breaker_open{type="travel.book.v1"} 0`)
			})
		})
	}
}

// With breakers switched off, the shipped attempts and pauses alone outlast an outage of an hour. Each run has its
// own clock, which its pauses advance. The test makes each run that waits for its next attempt due at once.
func TestOutageWithoutBreaker(t *testing.T) {
	t.Parallel()
	const n = 20
	url := pgtest.URL(t)
	conn := connect(t, url)
	if _, err := conn.Exec(t.Context(), `SELECT workflow_set_policy('*', breaker => false)`); err != nil {
		t.Fatal(err)
	}
	address, _ := trips(t, url, n)
	waited, through := map[uuid.UUID]time.Duration{}, []uuid.UUID{} // through: have waited for long enough
	pgtest.Await(t, "the outage to be over", func() bool {
		rows, _ := conn.Query(t.Context(), `
			WITH waits AS (SELECT id, run_at FROM workflow_run WHERE type ^@ 'travel.' AND status = 'pending' AND run_at > now() AND id <> ALL ($1) FOR UPDATE SKIP LOCKED)
			UPDATE workflow_run r SET run_at = now() FROM waits w WHERE r.id = w.id RETURNING r.id, extract(epoch FROM w.run_at - now())::float8`, through)
		var id uuid.UUID
		var seconds float64
		if _, err := pgx.ForEachRow(rows, []any{&id, &seconds}, func() error {
			if waited[id] += time.Duration(seconds * float64(time.Second)); waited[id] >= time.Hour {
				through = append(through, id)
			}
			return nil
		}); err != nil {
			t.Fatal(err)
		}
		return len(through) == 2*n
	})
	back(t, address)
	booked(t, url, n, func() {
		if _, err := conn.Exec(t.Context(), `UPDATE workflow_run SET run_at = now() WHERE type ^@ 'travel.' AND status = 'pending' AND run_at > now()`); err != nil {
			t.Fatal(err)
		}
	})
}

// trips starts a worker whose handlers call a service that is down, n instances of a process that needs it, and n
// runs. It returns the address where the service is expected, and the address of the worker's metrics.
func trips(t *testing.T, url string, n int) (address, metrics string) {
	t.Helper()
	address, metrics = free(t), free(t) // connections are refused
	startWorker(t, url, fmt.Sprintf("travel.book.v1: {url: http://%s/}\ntravel.charge.v1: {url: http://%[1]s/}\n", address), "WORKER_HTTP_ADDR="+metrics)
	want(t, cmdtest.Start(t, []string{"DATABASE_URL=" + url}, "define", save(t, "trip.json", `{"process": "trip", "version": 1, "start": "book", "nodes": {
		"book": {"do": "travel.book.v1", "undo": "travel.undo.v1", "to": "charge"}, "charge": {"do": "travel.charge.v1"}}}`)), 0)
	if _, err := connect(t, url).Exec(t.Context(), `INSERT INTO workflow_run (type, payload) SELECT 'graph.start.v1', '{"process": "trip"}'::jsonb FROM generate_series(1, $1)
		UNION ALL SELECT 'travel.book.v1', '{}'::jsonb FROM generate_series(1, $1)`, n); err != nil {
		t.Fatal(err)
	}
	return address, metrics
}

// back makes the service answer again.
func back(t *testing.T, address string) {
	t.Helper()
	again, err := net.Listen("tcp", address)
	if err != nil {
		t.Fatal(err)
	}
	server := &http.Server{Handler: http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) { fmt.Fprint(w, "{}") }), ReadHeaderTimeout: time.Minute}
	go func() { _ = server.Serve(again) }()
	t.Cleanup(func() { _ = server.Close() })
}

// booked waits until all runs and instances are done, and fails the test if one of them has failed.
func booked(t *testing.T, url string, n int, hasten func()) {
	t.Helper()
	pgtest.Await(t, "everything to be done", func() bool {
		hasten()
		return value[bool](t, url, fmt.Sprintf(`SELECT (SELECT count(*) FROM workflow_run WHERE type = 'travel.book.v1' AND token_id IS NULL AND status NOT IN ('pending', 'leased')) = %d
			AND NOT EXISTS (SELECT FROM workflow_run WHERE status IN ('pending', 'leased')) AND (SELECT count(*) FROM process_instance) = %[1]d`, n))
	})
	if lost := value[int](t, url, `SELECT count(*) FROM workflow_run WHERE status <> 'succeeded' OR type = 'travel.undo.v1'`); lost != 0 {
		t.Errorf("%d runs have failed, or undo what was done", lost)
	}
	if lost := value[int](t, url, `SELECT count(*) FROM process_instance WHERE status <> 'COMPLETED'`); lost != 0 {
		t.Errorf("%d instances are not completed", lost)
	}
}

// A place is a command, and what its output has to contain.
type place struct {
	command string
	says    []string
}

// silent returns the places whose output does not have everything yet.
func silent(t *testing.T, env []string, places []place) (left []place) {
	t.Helper()
	for _, p := range places {
		ran, _ := cmdtest.Run(t, env, strings.Fields(p.command)...)
		for _, text := range p.says {
			if !strings.Contains(ran.Stdout.String(), text) {
				left = append(left, p)
				break
			}
		}
	}
	return left
}

// pass moves time to when the next run is due, unless a run is due or leased now, and returns by how much.
func pass(t *testing.T, conn *pgx.Conn) time.Duration {
	t.Helper()
	var seconds float64
	err := pgx.BeginFunc(t.Context(), conn, func(tx pgx.Tx) error {
		if err := tx.QueryRow(t.Context(), `
			WITH waits AS (SELECT r.id, r.type, r.run_at FROM workflow_run r WHERE r.status = 'pending' ORDER BY r.id FOR UPDATE),
			     next AS (SELECT greatest(min(w.run_at), (SELECT o.next_probe FROM workflow_outage o WHERE o.type = w.type AND o.opened_at IS NOT NULL)) AS at FROM waits w GROUP BY w.type),
			     jump AS (SELECT CASE WHEN EXISTS (SELECT FROM workflow_run l WHERE l.status = 'leased') THEN 0 ELSE coalesce(greatest(extract(epoch FROM min(at) - clock_timestamp()), 0), 0)::float8 END AS s FROM next),
			     moved AS (UPDATE workflow_run r SET run_at = r.run_at - j.s * interval '1 second' FROM waits w, jump j WHERE r.id = w.id AND j.s > 0)
			SELECT s FROM jump`).Scan(&seconds); err != nil {
			return err
		}
		if seconds == 0 {
			return nil
		}
		_, err := tx.Exec(t.Context(), `SELECT workflow_advance('on')`)
		if err == nil {
			_, err = tx.Exec(t.Context(), `UPDATE workflow_outage SET said_at = said_at - $1 * interval '1 second', opened_at = opened_at - $1 * interval '1 second', next_probe = next_probe - $1 * interval '1 second'`, seconds)
		}
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	return time.Duration(seconds * float64(time.Second))
}

// get returns the text of a program's metrics.
func get(t *testing.T, address string) string {
	t.Helper()
	answer, err := http.Get("http://" + address + "/metrics")
	if err != nil {
		t.Fatal(err)
	}
	defer answer.Body.Close()
	text, err := io.ReadAll(answer.Body)
	if err != nil {
		t.Fatal(err)
	}
	return string(text)
}
