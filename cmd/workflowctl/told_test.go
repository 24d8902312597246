package main_test

import (
	"fmt"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/simple-workflow/simple-workflow/internal/cmdtest"
	"github.com/simple-workflow/simple-workflow/internal/pgtest"
)

// free returns an address at which nobody listens.
func free(t *testing.T) string {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	return l.Addr().String()
}

// doctor, top (under what needs a person), why and the metrics report a problem within 15 s of its first sign: twenty
// failed instances, a bug in one type, a sink that is down, and a type of which nothing is leased though it is due.
// Steps of processes are reported like other runs.
func TestWhatIsWrongIsTold(t *testing.T) {
	t.Parallel()
	url := pgtest.URL(t)
	env := []string{"DATABASE_URL=" + url}
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		_, _ = io.Copy(io.Discard, r.Body)
		w.WriteHeader(http.StatusInternalServerError)
		fmt.Fprint(w, "KeyError: 'currency'")
	}))
	t.Cleanup(server.Close)
	ofWorker, ofDispatcher := free(t), free(t)
	// The worker covers ghost., has no handler for it and leaves it to others: it seems able to lease these runs, and
	// does not.
	startWorker(t, url, fmt.Sprintf("travel.bug.v1: {url: %s/}\ntravel.charge.v1: {url: %[1]s/}\n", server.URL), "WORKER_HTTP_ADDR="+ofWorker, "WORKER_TYPE_PREFIXES=travel.,ghost.", "WORKER_UNKNOWN_TYPE_GRACE=1h")
	startProgram(t, "dispatcher", []string{"DATABASE_URL=" + url, "DISPATCHER_SINKS=crm=http://" + free(t) + "/#allow=127.0.0.1/32", "DISPATCHER_SOURCE=/test", "DISPATCHER_HTTP_ADDR=" + ofDispatcher, "DISPATCHER_LOG_LEVEL=error"})
	want(t, cmdtest.Start(t, env, "define", save(t, "trip.json", `{"process": "trip", "version": 1, "start": "charge", "nodes": {
		"charge": {"do": "travel.charge.v1", "retry": {"attempts": 1}, "failure": "fail"}}}`)), 0)
	conn := connect(t, url)
	holds := func(query string) (is bool) {
		if err := conn.QueryRow(t.Context(), query).Scan(&is); err != nil {
			t.Fatal(err)
		}
		return is
	}
	pgtest.Await(t, "both programs", func() bool {
		return holds(`SELECT (SELECT count(*) FROM workflow_live_worker) = 1 AND (SELECT count(*) FROM outbox_sink) = 1`)
	})
	metrics := func(address string) string {
		answer, err := http.Get("http://" + address + "/metrics")
		if err != nil {
			return err.Error()
		}
		defer answer.Body.Close()
		text, _ := io.ReadAll(answer.Body)
		return string(text)
	}
	says := func(args ...string) func() string {
		return func() string {
			p, _ := cmdtest.Run(t, env, args...)
			return p.Stdout.String()
		}
	}
	doctor, top := says("doctor"), says("top", "--once")
	needs := func() string { // only the part of top about what needs a person
		text, _, _ := strings.Cut(top(), "\nWAITS")
		text, _, _ = strings.Cut(text, "\nWORKERS")
		return text
	}
	for _, c := range []struct {
		name, happens, sign string
		who                 string // what to ask why about
		why                 string
		told                string // doctor and top contain it
		metric, at          string
	}{
		{"instances that have failed", `INSERT INTO workflow_run (type, payload) SELECT 'graph.start.v1', '{"process": "trip"}' FROM generate_series(1, 20)`, `SELECT count(*) >= 20 FROM process_instance WHERE status = 'FAILED'`,
			`SELECT id::text FROM process_instance WHERE status = 'FAILED' LIMIT 1`, `FAILED .*KeyError`, `20 instances of process trip failed within an hour`, `workflow_outcomes_total\{outcome="failed",type="travel.charge.v1"\} 20`, ofWorker},
		{"a bug in one type", `INSERT INTO workflow_run (type) SELECT 'travel.bug.v1' FROM generate_series(1, 20)`, `SELECT count(*) >= 5 FROM workflow_run WHERE type = 'travel.bug.v1' AND attempt >= 1 AND last_error IS NOT NULL`,
			`SELECT id::text FROM workflow_run WHERE type = 'travel.bug.v1' AND last_error IS NOT NULL AND status = 'pending' LIMIT 1`, `attempt \d+ of 25 .*KeyError`, `100 % of the attempts of type travel.bug.v1 have failed within 15 min: .*KeyError`,
			`workflow_outcomes_total\{outcome="retried",type="travel.bug.v1"\} [1-9]`, ofWorker},
		{"a sink that is down", `SELECT outbox_emit(gen_random_uuid(), 'travel.told', '{}')`, `SELECT true`, "", "", `sink crm takes nothing for \d+ s, .*events? waits?: «.*refused`, `outbox_sink_down\{sink="crm"\} 1`, ofDispatcher},
		{"nothing leased though due", `WITH w AS (INSERT INTO workflow_worker (id, name, prefixes, handlers, steps, concurrency, running, version, host, pid, started_at, seen_at)
				VALUES (gen_random_uuid(), 'sleeper', '{ghost.}', '{ghost.}', true, 4, 0, '', '', 1, now() - interval '1 hour', now() + interval '1 hour'))
			INSERT INTO workflow_run (type, run_at) VALUES ('ghost.x.v1', now() - interval '31 seconds')`, `SELECT true`,
			`SELECT id::text FROM workflow_run WHERE type = 'ghost.x.v1'`, `due for \d+ s: .*sleeper`, `nothing of type ghost.x.v1 is leased, though it has been due for \d+ s, and .*sleeper could take it`, `(?s)workflow_backlog_due\{prefix="ghost."\} 1\n.*workflow_backlog_oldest_seconds\{prefix="ghost."\} [3-9].*workflow_stalled_types 1`, ofWorker},
	} {
		t.Run(c.name, func(t *testing.T) {
			if _, err := conn.Exec(t.Context(), c.happens); err != nil {
				t.Fatal(err)
			}
			pgtest.Await(t, "the first sign", func() bool { return holds(c.sign) })
			sign := time.Now()
			ask := map[string]func() string{"doctor": doctor, "top": needs, "metrics": func() string { return metrics(c.at) }}
			expect := map[string]string{"doctor": c.told, "top": c.told, "metrics": c.metric}
			if c.who != "" {
				ask["why"], expect["why"] = says("why", value[string](t, url, c.who)), c.why
			}
			for {
				missing := map[string]string{}
				for who, asked := range ask {
					if said := asked(); !regexp.MustCompile(expect[who]).MatchString(said) {
						missing[who] = said
					} else {
						delete(ask, who)
					}
				}
				if len(missing) == 0 {
					break
				}
				if time.Since(sign) > 15*time.Second {
					for who, said := range missing {
						t.Errorf("after 15 s %s does not say %q:\n%s", who, expect[who], said)
					}
					break
				}
				time.Sleep(200 * time.Millisecond)
			}
			t.Logf("told after %s", time.Since(sign))
		})
	}
}

// The texts about what needs a person are grammatical for one item as well as for many, and say what to do.
func TestNeedsInWords(t *testing.T) {
	t.Parallel()
	url := pgtest.URL(t)
	env := []string{"DATABASE_URL=" + url}
	if _, err := connect(t, url).Exec(t.Context(), `
		INSERT INTO workflow_worker (id, name, prefixes, handlers, steps, concurrency, running, version, host, pid) VALUES (gen_random_uuid(), 'w1', '{a.}', '{a.}', true, 10, 3, '', '', 1);
		INSERT INTO outbox_sink (name, seen_at) VALUES ('one', now() - interval '1 hour');
		SELECT outbox_emit('00000000-0000-4000-8000-000000000001', 'a.b', '{}');
		BEGIN; SET LOCAL session_replication_role = replica;
		UPDATE workflow_worker SET seen_at = now() + interval '1 hour';
		INSERT INTO workflow_minute (minute, role, type, leased, failed, retried, succeeded, counted_at, due, oldest) VALUES
			(date_trunc('minute', now()), 'r', 'a.slow', 1, 1, 4, 45, now(), 500, 90), (date_trunc('minute', now()) - interval '4 minutes', 'r', 'a.slow', 0, 0, 0, 0, now(), 100, 60);
		INSERT INTO workflow_run (type, status, attempt, started_at, lease_until, leased_by, lease_token, lease_no) VALUES ('a.lost', 'leased', 1, now() - interval '1 hour', now() - interval '2 minutes', 'w2', gen_random_uuid(), 1);
		INSERT INTO outbox_delivery (event_id, sink, aggregate_id, attempt, last_error, parked_at) SELECT id, 'one', aggregate_id, 1, 'no', now() FROM outbox_event;
		COMMIT`, pgx.QueryExecModeSimpleProtocol); err != nil {
		t.Fatal(err)
	}
	words := []string{
		"type a.slow does not keep up: 500 are due, the first for 90 s, 100 were 4 min ago; w1 covers it",
		"10 % of the attempts of type a.slow have failed within 15 min: 1 run for good, 4 retried, 45 succeeded; the last ",
		"1 lease has run out, the oldest 2 min ago: no worker takes it back",
		"sink one is not served for 60 min, 0 events wait",
		"sink one has parked 1 event",
	}
	want(t, cmdtest.Start(t, env, "top", "--once"), 0, append(slices.Clone(words), "NEEDS YOU  5; what to do: workflowctl doctor")...)
	want(t, cmdtest.Start(t, env, "doctor"), 1, append(words, "→ more workers, or more slots (WORKER_CONCURRENCY)", "→ workflowctl show failing shows the error; to stop it meanwhile: workflowctl pause a.slow REASON")...)
}
