package main_test

import (
	"context"
	"crypto/sha256"
	"encoding/json"
	"fmt"
	"io"
	"math/rand/v2"
	"net/http"
	"net/http/httptest"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/simple-workflow/simple-workflow/internal/cmdtest"
	"github.com/simple-workflow/simple-workflow/internal/pgtest"
)

func connect(t *testing.T, url string) *pgx.Conn {
	t.Helper()
	conn, err := pgx.Connect(t.Context(), url)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = conn.Close(context.Background()) })
	return conn
}

func execute(t *testing.T, url, statement string, args ...any) {
	t.Helper()
	if _, err := connect(t, url).Exec(t.Context(), statement, args...); err != nil {
		t.Fatalf("%s: %v", statement, err)
	}
}

// counter returns a function that executes query and returns its number, for Await.
func counter(t *testing.T, url, query string) func() int {
	t.Helper()
	conn := connect(t, url)
	return func() (n int) {
		if err := conn.QueryRow(t.Context(), query).Scan(&n); err != nil {
			t.Fatal(err)
		}
		return n
	}
}

const open = `SELECT count(*) FROM outbox_event WHERE published_at IS NULL AND parked_at IS NULL`

func drained(t *testing.T, url string) {
	t.Helper()
	left := counter(t, url, open)
	pgtest.Await(t, "the outbox to drain", func() bool { return left() == 0 })
}

// settings returns an environment for sinks, with the variables more added.
func settings(url, sinks string, more ...string) []string {
	return append([]string{"DATABASE_URL=" + url, "DISPATCHER_SINKS=" + sinks, "DISPATCHER_SOURCE=/test", "DISPATCHER_BACKOFF_BASE=50ms", "DISPATCHER_BACKOFF_CAP=200ms"}, more...)
}

func wantExit(t *testing.T, p *cmdtest.Process, code int, parts ...string) {
	t.Helper()
	if got := p.Wait(); got != code {
		t.Errorf("exit code %d, want %d", got, code)
	}
	for _, part := range parts {
		if !strings.Contains(p.Stderr.String(), part) {
			t.Errorf("stderr lacks %q:\n%s", part, p.Stderr.String())
		}
	}
}

// emit appends n events to each of some new aggregates. Their payloads number them from 1.
func emit(t *testing.T, url string, aggregates, n int) {
	t.Helper()
	execute(t, url, `
		INSERT INTO outbox_event (aggregate_id, event_type, payload)
		SELECT a.id, 'test.told', jsonb_build_object('n', n)
		FROM generate_series(1, $2) AS n, (SELECT gen_random_uuid() AS id FROM generate_series(1, $1)) AS a
		ORDER BY n`, aggregates, n)
}

// A receiver is a webhook that records the events it gets, and checks their order and bytes.
type receiver struct {
	t *testing.T
	*httptest.Server
	answer func(w http.ResponseWriter, body []byte) // nil: 200

	mu    sync.Mutex
	came  int
	sums  map[string][32]byte // of bodies, by id
	heads map[string]int      // the highest number seen, by subject
	wrong []string
}

func receive(t *testing.T, answer func(w http.ResponseWriter, body []byte)) *receiver {
	t.Helper()
	r := &receiver{t: t, answer: answer, sums: map[string][32]byte{}, heads: map[string]int{}}
	r.Server = httptest.NewServer(r)
	t.Cleanup(r.Close)
	return r
}

// sink returns the sink's element of DISPATCHER_SINKS.
func (r *receiver) sink() string { return "crm=" + r.URL + "#allow=127.0.0.0/8" }

func (r *receiver) ServeHTTP(w http.ResponseWriter, request *http.Request) {
	body, err := io.ReadAll(request.Body)
	if err != nil {
		return // the dispatcher was killed while it sent
	}
	r.note(body)
	if r.answer != nil {
		r.answer(w, body)
	}
}

func (r *receiver) note(body []byte) {
	var e struct {
		ID, Subject string
		Data        struct{ N int }
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	if err := json.Unmarshal(body, &e); err != nil {
		r.wrong = append(r.wrong, err.Error())
	}
	r.came++
	sum := sha256.Sum256(body)
	if first, again := r.sums[e.ID]; again && first != sum {
		r.wrong = append(r.wrong, "other bytes with the id "+e.ID)
	}
	r.sums[e.ID] = sum
	if head := r.heads[e.Subject]; e.Data.N > head+1 {
		r.wrong = append(r.wrong, fmt.Sprintf("%s: %d came after %d", e.Subject, e.Data.N, head))
	}
	r.heads[e.Subject] = max(r.heads[e.Subject], e.Data.N)
}

// check fails the test unless all events came, in order and each time with the same bytes. It returns the number of
// requests.
func (r *receiver) check(events int) (came int) {
	r.t.Helper()
	r.mu.Lock()
	defer r.mu.Unlock()
	if len(r.sums) != events {
		r.t.Errorf("%d events came, want %d", len(r.sums), events)
	}
	if len(r.wrong) > 0 {
		r.t.Errorf("%d faults: %v", len(r.wrong), r.wrong[:min(len(r.wrong), 10)])
	}
	return r.came
}

func (r *receiver) ids() int {
	r.mu.Lock()
	defer r.mu.Unlock()
	return len(r.sums)
}

// An event appended with outbox_emit is written as a line to standard output. SIGTERM ends the process with exit code
// 0.
func TestStdout(t *testing.T) {
	t.Parallel()
	url := pgtest.URL(t)
	p := cmdtest.Start(t, settings(url, "stdout:#types=invoice."))
	execute(t, url, `SELECT outbox_emit('7d0c5a2e-0000-4000-8000-000000000001', 'invoice.charged.v1', '{"cents": 700}', '{"traceparent": "00-1"}')`)
	execute(t, url, `SELECT outbox_emit('7d0c5a2e-0000-4000-8000-000000000001', 'order.placed.v1', '{}')`)
	pgtest.Await(t, "a line", func() bool { return strings.Contains(p.Stdout.String(), "\n") })
	drained(t, url)
	var e struct {
		ID, Source, Type, Subject, Partitionkey, Traceparent string
		Data                                                 json.RawMessage
	}
	if err := json.Unmarshal([]byte(p.Stdout.String()), &e); err != nil {
		t.Fatalf("%v: %s", err, p.Stdout.String())
	}
	const aggregate = "7d0c5a2e-0000-4000-8000-000000000001"
	if got, want := fmt.Sprint(e.Source, e.Type, e.Subject, e.Partitionkey, e.Traceparent, string(e.Data)), fmt.Sprint("/test", "invoice.charged.v1", aggregate, aggregate, "00-1", `{"cents": 700}`); got != want {
		t.Errorf("got  %s\nwant %s", got, want)
	}
	p.Signal(syscall.SIGTERM)
	wantExit(t, p, 0, "dispatcher stopped")
}

// After SIGTERM running batches finish: what the receiver has acknowledged is marked, and no event comes
// twice.
func TestDrain(t *testing.T) {
	t.Parallel()
	url := pgtest.URL(t)
	r := receive(t, func(http.ResponseWriter, []byte) { time.Sleep(20 * time.Millisecond) })
	emit(t, url, 50, 10)
	p := cmdtest.Start(t, settings(url, r.sink(), "DISPATCHER_BATCH=40"))
	pgtest.Await(t, "some to come", func() bool { return r.ids() > 50 })
	p.Signal(syscall.SIGTERM)
	wantExit(t, p, 0, "dispatcher stopped")
	r.mu.Lock()
	came, ids := r.came, len(r.sums)
	r.mu.Unlock()
	if marked := counter(t, url, `SELECT count(*) FROM outbox_event WHERE published_at IS NOT NULL`)(); marked != ids || came != ids || ids == 500 {
		t.Errorf("%d came, of them %d different, and %d are marked", came, ids, marked)
	}
	if n := counter(t, url, `SELECT count(*) FROM outbox_lane WHERE claim_token IS NOT NULL`)(); n > 0 {
		t.Errorf("%d lanes are still claimed", n)
	}
	cmdtest.Start(t, settings(url, r.sink()))
	drained(t, url)
	if came := r.check(500); came != 500 {
		t.Errorf("500 events came %d times", came)
	}
}

// K27, W50: if a dispatcher is killed after the receiver has got an event and before the event is marked, the event is
// published once more, with the same id and the same bytes.
func TestKilledBetweenPublishAndMark(t *testing.T) {
	t.Parallel()
	url := pgtest.URL(t)
	got, release := make(chan []byte, 10), make(chan struct{})
	first := true
	r := receive(t, func(_ http.ResponseWriter, body []byte) {
		hold := first
		first = false
		got <- body
		if hold {
			<-release
		}
	})
	execute(t, url, `SELECT outbox_emit(gen_random_uuid(), 'test.told', '{"n": 1, "text": "é \n"}', '{"b": "2", "a": "1", "Trace-Parent": "1", "traceparent": "2", "trace-parent": "3", "TRACEPARENT": "4", "trace_parent": "5", "t-raceparent": "6", "Traceparent": "7"}')`)
	env := settings(url, r.sink(), "DISPATCHER_CLAIM=1s", "DISPATCHER_WEBHOOK_SECRET=0123456789abcdef01234567")
	p := cmdtest.Start(t, env)
	before := <-got
	p.Signal(syscall.SIGKILL)
	p.Wait()
	close(release)
	if n := counter(t, url, open)(); n != 1 {
		t.Fatalf("%d are open, want 1", n)
	}
	cmdtest.Start(t, env)
	select {
	case after := <-got:
		if string(before) != string(after) {
			t.Errorf("first %s\nthen  %s", before, after)
		}
	case <-time.After(20 * time.Second):
		t.Fatal("it did not come again")
	}
	drained(t, url)
	if came := r.check(1); came != 2 {
		t.Errorf("it came %d times, want 2", came)
	}
}

// While one dispatcher after the other is killed, no event is lost, each aggregate's order is kept, and an id
// always comes with the same bytes.
func TestKills(t *testing.T) {
	t.Parallel()
	url := pgtest.URL(t)
	r := receive(t, nil)
	emit(t, url, 200, 50)
	env := settings(url, r.sink(), "DISPATCHER_CLAIM=1s", "DISPATCHER_BATCH=100")
	var all [4]*cmdtest.Process
	for k := range all {
		all[k] = cmdtest.Start(t, env)
	}
	random := rand.New(rand.NewPCG(1, 2))
	left := counter(t, url, open)
	kills, last := 0, 0
	pgtest.Await(t, "the outbox to drain", func() bool {
		if n := r.ids(); n > last+300+random.IntN(300) {
			last = n
			k := random.IntN(len(all))
			all[k].Signal(syscall.SIGKILL)
			all[k].Wait()
			all[k] = cmdtest.Start(t, env)
			kills++
		}
		return left() == 0
	})
	t.Logf("%d kills, %d requests", kills, r.check(10_000))
	if kills < 5 {
		t.Errorf("%d kills are too few to show anything", kills)
	}
}

// Without faults several dispatchers repeat at most one event in a hundred.
func TestShared(t *testing.T) {
	t.Parallel()
	url := pgtest.URL(t)
	r := receive(t, nil)
	for range 3 {
		cmdtest.Start(t, settings(url, r.sink()))
	}
	emit(t, url, 200, 50)
	drained(t, url)
	if came := r.check(10_000); came > 10_100 {
		t.Errorf("10000 events came %d times", came)
	}
}

// K37: while a registered sink has open events and nobody serves it, a dispatcher of other sinks does not start. It
// names three ways out, two of which are tested: DISPATCHER_ELSEWHERE and --abandon.
func TestOrphans(t *testing.T) {
	t.Parallel()
	url := pgtest.URL(t)
	p := cmdtest.Start(t, settings(url, "old=stdout:"))
	p.AwaitLog("dispatcher starts")
	p.Signal(syscall.SIGTERM)
	p.Wait()
	execute(t, url, `SELECT outbox_emit(gen_random_uuid(), 'test.told', '{}'), outbox_emit(gen_random_uuid(), 'test.told', '{}')`)

	// A sink that was served within the last minute is no obstacle: its dispatcher is probably restarting.
	p = cmdtest.Start(t, settings(url, "new=stdout:"))
	p.AwaitLog("dispatcher starts")
	p.Signal(syscall.SIGTERM)
	p.Wait()

	execute(t, url, `UPDATE outbox_sink SET seen_at = now() - interval '2 minutes'`)
	p = cmdtest.Start(t, settings(url, "new=stdout:"))
	wantExit(t, p, 2, "DISPATCHER_SINKS", "the sink old is not among them, and has 2 events", "DISPATCHER_ELSEWHERE", "dispatcher --abandon old")

	p = cmdtest.Start(t, settings(url, "new=stdout:", "DISPATCHER_ELSEWHERE=older,old"))
	p.AwaitLog("dispatcher starts")
	p.Signal(syscall.SIGTERM)
	p.Wait()

	execute(t, url, `UPDATE outbox_sink SET seen_at = now()`)
	p, code := cmdtest.Run(t, []string{"DATABASE_URL=" + url}, "--abandon", "old")
	if code != 2 || !strings.Contains(p.Stderr.String(), `the sink is served: "old", within the last 20s; stop its dispatchers`) {
		t.Errorf("exit code %d: %s%s", code, p.Stdout.String(), p.Stderr.String())
	}
	execute(t, url, `UPDATE outbox_sink SET seen_at = now() - interval '20 seconds'`)
	p, code = cmdtest.Run(t, []string{"DATABASE_URL=" + url}, "--abandon", "old")
	if code != 0 || p.Stdout.String() != "sink old is gone; 2 events were open for it\n" {
		t.Errorf("exit code %d: %s%s", code, p.Stdout.String(), p.Stderr.String())
	}
	p, code = cmdtest.Run(t, []string{"DATABASE_URL=" + url}, "--abandon", "old")
	if code == 0 || !strings.Contains(p.Stderr.String(), `no such sink: "old"`) {
		t.Errorf("exit code %d: %s%s", code, p.Stdout.String(), p.Stderr.String())
	}
	cmdtest.Start(t, settings(url, "new=stdout:"))
	drained(t, url)
}

// No text of a payload or of headers gets into the log, even if receivers put it into their answers.
func TestLogsAreSilent(t *testing.T) {
	t.Parallel()
	const canary = "canary-7391"
	url := pgtest.URL(t)
	var n int
	var mu sync.Mutex
	r := receive(t, func(w http.ResponseWriter, body []byte) {
		mu.Lock()
		n++
		status := []int{500, 400, 413, 403, 404, 429, 301, 401}[n%8]
		mu.Unlock()
		w.Header().Set("Location", "https://new.example/"+canary)
		w.WriteHeader(status)
		_, _ = w.Write(append([]byte(canary+" "), body...))
	})
	script := filepath.Join(t.TempDir(), "reject")
	if err := os.WriteFile(script, []byte("#!/bin/sh\nwhile read -r line; do id=${line#*\\\"id\\\":\\\"}; echo \"retry ${id%%\\\"*} $line\"; done\n"), 0o700); err != nil {
		t.Fatal(err)
	}
	fails := receive(t, func(w http.ResponseWriter, body []byte) { http.Error(w, string(body), 500) })
	garbage := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		conn, _, err := w.(http.Hijacker).Hijack()
		if err != nil {
			t.Error(err)
			return
		}
		fmt.Fprintf(conn, "HTTP/1.1 %s tls: x509:\r\n\r\n", canary)
		_ = conn.Close()
	}))
	defer garbage.Close()
	sinks := strings.Join([]string{r.sink(), strings.Replace(fails.sink(), "crm", "fails", 1), "garbage=" + garbage.URL + "#allow=127.0.0.0/8", "exec:" + script}, " ")
	execute(t, url, `
		SELECT outbox_emit(gen_random_uuid(), 'test.told', '{"n": 1, "secret": "`+canary+`"}', '{"secret": "`+canary+`"}')
		FROM generate_series(1, 20)`)
	p := cmdtest.Start(t, settings(url, sinks, "DISPATCHER_LOG_LEVEL=debug", "DISPATCHER_MAX_ATTEMPTS=3"))
	told := counter(t, url, `SELECT count(DISTINCT sink) FROM outbox_delivery WHERE last_error LIKE '%`+canary+`%'`)
	down := counter(t, url, `SELECT count(*) FROM outbox_sink WHERE last_error LIKE '%`+canary+`%'`)
	pgtest.Await(t, "the reasons to be noted", func() bool { return told() == 4 && down() >= 3 })
	p.AwaitLog("takes nothing")
	p.AwaitLog("parked")
	p.Signal(syscall.SIGTERM)
	wantExit(t, p, 0)
	if strings.Contains(p.Stderr.String(), canary) {
		t.Error("the log has what was in a payload")
	}
}

// K43: if the reader of standard output is gone, other sinks still get their events, and no event is marked as
// delivered that was not written.
func TestClosedPipe(t *testing.T) {
	t.Parallel()
	url := pgtest.URL(t)
	reader, writer, err := os.Pipe()
	if err != nil {
		t.Fatal(err)
	}
	_ = reader.Close()
	r := receive(t, nil)
	p := cmdtest.StartTo(t, writer, settings(url, "stdout: "+r.sink()))
	_ = writer.Close()
	emit(t, url, 10, 2)
	pgtest.Await(t, "the other sink to have all", func() bool { return r.ids() == 20 })
	p.AwaitLog("broken pipe")
	if n := counter(t, url, `SELECT count(*) FROM outbox_event WHERE 'stdout' = ANY (delivered_to)`)(); n != 0 {
		t.Errorf("%d count as written", n)
	}
	p.Signal(syscall.SIGTERM)
	wantExit(t, p, 0)
}

// SIGTERM ends the process even if nobody reads its standard output.
func TestBlockedPipe(t *testing.T) {
	t.Parallel()
	url := pgtest.URL(t)
	reader, writer, err := os.Pipe()
	if err != nil {
		t.Fatal(err)
	}
	defer reader.Close()
	execute(t, url, `SELECT outbox_emit(gen_random_uuid(), 'test.told', to_jsonb(repeat('x', 1000000)))`)
	p := cmdtest.StartTo(t, writer, settings(url, "stdout:", "DISPATCHER_SHUTDOWN_GRACE=200ms"))
	_ = writer.Close()
	claimed := counter(t, url, `SELECT count(*) FROM outbox_lane WHERE claim_token IS NOT NULL`)
	pgtest.Await(t, "it to be written", func() bool { return claimed() > 0 })
	p.Signal(syscall.SIGTERM)
	wantExit(t, p, 0)
	if n := counter(t, url, open)(); n != 1 {
		t.Errorf("%d are open, want 1", n)
	}
}

// Events of 5 MB are published in bounded memory. The binary is built without the race detector, which
// needs memory of its own.
func TestMemory(t *testing.T) {
	t.Parallel()
	const events, most = 100, 250 << 20 // 500 MB are published in all
	url := pgtest.URL(t)
	program := filepath.Join(t.TempDir(), "dispatcher")
	if out, err := exec.CommandContext(t.Context(), "go", "build", "-o", program, ".").CombinedOutput(); err != nil {
		t.Fatalf("%v: %s", err, out)
	}
	execute(t, url, `ALTER TABLE outbox_event ALTER payload SET STORAGE EXTERNAL`) // compression would only take time
	execute(t, url, `
		INSERT INTO outbox_event (aggregate_id, event_type, payload)
		SELECT gen_random_uuid(), 'test.large', to_jsonb(repeat('x', 5000000)) FROM generate_series(1, $1)`, events)
	null, err := os.OpenFile(os.DevNull, os.O_WRONLY, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer null.Close()
	cmd := exec.Command(program)
	var log cmdtest.Text
	cmd.Env, cmd.Stdout, cmd.Stderr = settings(url, "stdout:"), null, &log
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	defer func() {
		_ = cmd.Process.Kill()
		if t.Failed() {
			t.Logf("stderr:\n%s", log.String())
		}
	}()
	drained(t, url)
	if err := cmd.Process.Signal(syscall.SIGTERM); err != nil {
		t.Fatal(err)
	}
	if err := cmd.Wait(); err != nil {
		t.Fatal(err)
	}
	peak := cmd.ProcessState.SysUsage().(*syscall.Rusage).Maxrss
	if runtime.GOOS != "darwin" {
		peak <<= 10
	}
	t.Logf("%d MB at most", peak>>20)
	if peak > most {
		t.Errorf("it took %d MB, want %d at most", peak>>20, most>>20)
	}
	if !slices.Contains([]string{"linux", "darwin"}, runtime.GOOS) {
		t.Logf("the unit on %s is a guess", runtime.GOOS)
	}
}
