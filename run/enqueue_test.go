package run_test

import (
	"encoding/json"
	"errors"
	"fmt"
	"math"
	"strings"
	"testing"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/jackc/pgx/v5/stdlib"

	"github.com/simple-workflow/simple-workflow/internal/pgtest"
	"github.com/simple-workflow/simple-workflow/run"
)

type (
	pool     = *pgxpool.Pool
	enqueuer = func(...run.New) ([]run.Enqueued, error)
)

// bothWays runs a test with pgx and with database/sql, which promise the same.
func bothWays(t *testing.T, test func(*testing.T, pool, enqueuer)) {
	t.Run("pgx", func(t *testing.T) {
		pool := pgtest.New(t)
		test(t, pool, func(runs ...run.New) ([]run.Enqueued, error) { return run.EnqueueMany(t.Context(), pool, runs) })
	})
	t.Run("database/sql", func(t *testing.T) {
		pool := pgtest.New(t)
		db := stdlib.OpenDBFromPool(pool)
		test(t, pool, func(runs ...run.New) ([]run.Enqueued, error) { return run.EnqueueSQL(t.Context(), db, runs) })
	})
}

func read(t *testing.T, db run.DB, id uuid.UUID) *run.Run {
	t.Helper()
	r, err := run.Read(t.Context(), db, id)
	if err != nil {
		t.Fatal(err)
	}
	return r
}

func count(t *testing.T, pool pool, what string) (n int) {
	t.Helper()
	if err := pool.QueryRow(t.Context(), `SELECT count(*) FROM workflow_run WHERE `+what).Scan(&n); err != nil {
		t.Fatal(err)
	}
	return n
}

// A run needs only a type. All other columns get the defaults of the table.
func TestEnqueueDefaults(t *testing.T) {
	bothWays(t, func(t *testing.T, pool pool, enqueue enqueuer) {
		done, err := enqueue(run.New{Type: "a.b"})
		if err != nil {
			t.Fatal(err)
		}
		r := read(t, pool, done[0].ID)
		if done[0].Existing || r.ID.Version() != 7 || r.Status != run.Pending || string(r.Payload) != "{}" || r.MaxAttempts != 3 ||
			r.Priority != 0 || r.IdempotencyKey != nil || r.Tenant != nil || r.Metadata != nil || !r.RunAt.Equal(r.CreatedAt) {
			t.Errorf("%+v, %+v", done, r)
		}
		if done, err := enqueue(); err != nil || len(done) != 0 {
			t.Errorf("of nothing: %v, %v", done, err)
		}
	})
}

// All fields that are given are stored. W43: numbers keep every digit.
func TestEnqueueStoresAll(t *testing.T) {
	bothWays(t, func(t *testing.T, pool pool, enqueue enqueuer) {
		const numbers = `{"a": 9223372036854775807, "b": 9007199254740993, "c": 1.10, "d": 12345678901234567890, "e": "<&é\"\\"}`
		at := time.Date(2031, 2, 3, 4, 5, 6, 789000, time.FixedZone("", 3600))
		n := run.New{
			Type: "a.b", Payload: json.RawMessage(numbers), ID: uuid.Must(uuid.NewV7()), RunAt: at, Delay: 90 * time.Second,
			Priority: -7, MaxAttempts: 9, IdempotencyKey: "it's \"é\"", Tenant: "acme", Metadata: map[string]string{"tag": "x"},
		}
		if _, err := enqueue(n); err != nil {
			t.Fatal(err)
		}
		r := read(t, pool, n.ID)
		if string(r.Payload) != numbers {
			t.Errorf("payload = %s", r.Payload)
		}
		if !r.RunAt.Equal(at.Add(n.Delay)) || r.Priority != -7 || r.MaxAttempts != 9 || *r.IdempotencyKey != n.IdempotencyKey || *r.Tenant != "acme" || string(r.Metadata) != `{"tag": "x"}` {
			t.Errorf("%+v", r)
		}
		done, err := enqueue(run.New{Type: "a.b", Delay: time.Hour}, run.New{Type: "a.b", Delay: -time.Hour}, run.New{Type: "a.b", Payload: struct{ N int }{1}})
		if err != nil {
			t.Fatal(err)
		}
		for i, want := range []time.Duration{time.Hour, 0, 0} {
			if r := read(t, pool, done[i].ID); r.RunAt.Sub(r.CreatedAt) != want {
				t.Errorf("run %d is due after %v, want %v", i, r.RunAt.Sub(r.CreatedAt), want)
			}
		}
	})
}

// R8: a key belongs to one run. Enqueueing the same type and payload again, with members in any order, returns
// the run that exists. Another type or payload is a *ConflictError that names both runs.
func TestKeys(t *testing.T) {
	bothWays(t, func(t *testing.T, pool pool, enqueue enqueuer) {
		first, err := enqueue(run.New{Type: "a.b", Payload: json.RawMessage(`{"a":1,"b":[2]}`), IdempotencyKey: "k"})
		if err != nil {
			t.Fatal(err)
		}
		same, err := enqueue(run.New{Type: "a.b", Payload: json.RawMessage(`{"b": [2.0], "a": 1}`), IdempotencyKey: "k", Priority: 5})
		if err != nil || same[0] != (run.Enqueued{ID: first[0].ID, Existing: true}) {
			t.Errorf("same = %+v, %v", same, err)
		}
		for name, n := range map[string]run.New{
			"payload": {Type: "a.b", Payload: json.RawMessage(`{"a":1}`)},
			"type":    {Type: "a.c", Payload: json.RawMessage(`{"a":1,"b":[2]}`)},
			"tenant":  {Type: "a.b", Payload: json.RawMessage(`{"a":1,"b":[2]}`), Tenant: "acme"},
		} {
			n.IdempotencyKey, n.ID = "k", uuid.Must(uuid.NewV7())
			_, err := enqueue(run.New{Type: "a.b", IdempotencyKey: "before " + name}, n, run.New{Type: "a.b"})
			var conflict *run.ConflictError
			if !errors.As(err, &conflict) || *conflict != (run.ConflictError{Key: "k", Wanted: n.ID, Existing: first[0].ID}) {
				t.Errorf("other %s: %+v, %v", name, conflict, err)
			}
			if text := fmt.Sprint(err); !strings.Contains(text, `"k"`) || !strings.Contains(text, n.ID.String()) || !strings.Contains(text, first[0].ID.String()) {
				t.Errorf("other %s: %s", name, text)
			}
		}
		if n := count(t, pool, "true"); n != 1 {
			t.Errorf("%d runs: a refused statement has stored something", n)
		}
	})
}

// The same key twice in one call has the same result as in two calls, anywhere in the call.
func TestKeysInOneCall(t *testing.T) {
	bothWays(t, func(t *testing.T, pool pool, enqueue enqueuer) {
		keyed := func(key string, n int) run.New {
			return run.New{Type: "a.b", IdempotencyKey: key, Payload: map[string]int{"n": n}}
		}
		done, err := enqueue(keyed("z", 1), keyed("a", 1), keyed("z", 1), run.New{Type: "a.b"}, keyed("a", 1))
		if err != nil {
			t.Fatal(err)
		}
		if done[2] != (run.Enqueued{ID: done[0].ID, Existing: true}) || done[4] != (run.Enqueued{ID: done[1].ID, Existing: true}) ||
			done[0].Existing || done[1].Existing || done[3].Existing || count(t, pool, "true") != 3 {
			t.Errorf("%+v", done)
		}
		var conflict *run.ConflictError
		if _, err := enqueue(keyed("y", 1), keyed("y", 2)); !errors.As(err, &conflict) || conflict.Key != "y" || conflict.Wanted == conflict.Existing {
			t.Errorf("%+v, %v", conflict, err)
		}
		if n := count(t, pool, "true"); n != 3 {
			t.Errorf("%d runs, want 3", n)
		}
	})
}

// An id may be sent again for the same work. For other work it is a *ConflictError. No text of a key
// can be mistaken for an id.
func TestIDs(t *testing.T) {
	bothWays(t, func(t *testing.T, pool pool, enqueue enqueuer) {
		n := run.New{Type: "a.b", ID: uuid.Must(uuid.NewV7()), Payload: json.RawMessage(`{"a":1}`)}
		for i := range 2 {
			done, err := enqueue(n)
			if err != nil || done[0] != (run.Enqueued{ID: n.ID, Existing: i == 1}) {
				t.Errorf("%d: %+v, %v", i, done, err)
			}
		}
		n.IdempotencyKey = "workflow_enqueue: new run " + uuid.NewString() + " is refused: run " + uuid.NewString() + " has the same"
		var conflict *run.ConflictError
		if _, err := enqueue(n); !errors.As(err, &conflict) || *conflict != (run.ConflictError{Wanted: n.ID, Existing: n.ID}) {
			t.Errorf("%+v, %v", conflict, err)
		}
		n.ID = uuid.Must(uuid.NewV7())
		if _, err := enqueue(n); err != nil {
			t.Fatal(err)
		}
		other := run.New{Type: "a.c", ID: uuid.Must(uuid.NewV7()), IdempotencyKey: n.IdempotencyKey}
		if _, err := enqueue(other); !errors.As(err, &conflict) || *conflict != (run.ConflictError{Key: n.IdempotencyKey, Wanted: other.ID, Existing: n.ID}) {
			t.Errorf("%+v, %v", conflict, err)
		}
	})
}

// One call may enqueue thousands of runs. The results are in the order of the runs. When the runs are sent again with
// their keys, all exist already.
func TestEnqueueThousands(t *testing.T) {
	bothWays(t, func(t *testing.T, pool pool, enqueue enqueuer) {
		for _, keyed := range []bool{false, true} {
			runs := make([]run.New, 2500)
			for i := range runs {
				runs[i] = run.New{Type: "a.b", Payload: map[string]int{"n": i}}
				if keyed {
					runs[i].IdempotencyKey = fmt.Sprint("key ", i*7919%2500)
				}
			}
			done, err := enqueue(runs...)
			if err != nil || len(done) != len(runs) {
				t.Fatalf("%d, %v", len(done), err)
			}
			for _, i := range []int{0, 1, 999, 1000, 2499} {
				if r := read(t, pool, done[i].ID); string(r.Payload) != fmt.Sprintf(`{"n": %d}`, i) || done[i].Existing {
					t.Errorf("run %d = %s", i, r.Payload)
				}
			}
			if !keyed {
				continue
			}
			again, err := enqueue(runs...)
			if err != nil {
				t.Fatal(err)
			}
			for i := range again {
				if again[i] != (run.Enqueued{ID: done[i].ID, Existing: true}) {
					t.Fatalf("run %d = %+v, was %+v", i, again[i], done[i])
				}
			}
		}
		if n := count(t, pool, "true"); n != 5000 {
			t.Errorf("%d runs, want 5000", n)
		}
	})
}

// X11: large payloads are sent in several statements of limited size.
func TestEnqueueLarge(t *testing.T) {
	bothWays(t, func(t *testing.T, pool pool, enqueue enqueuer) {
		runs := make([]run.New, 70)
		for i := range runs {
			runs[i] = run.New{Type: "a.b", Payload: map[string]string{"x": strings.Repeat("x", 250_000)}}
		}
		done, err := enqueue(runs...)
		if err != nil || len(done) != len(runs) || count(t, pool, "true") != len(runs) {
			t.Errorf("%d, %v", len(done), err)
		}
		var statements int
		if err := pool.QueryRow(t.Context(), `SELECT count(DISTINCT xmin::text) FROM workflow_run`).Scan(&statements); err != nil || statements != 2 {
			t.Errorf("%d statements, want 2 (%v)", statements, err)
		}
	})
}

// What cannot be stored is refused before anything is stored: documents by a *DocumentError, the rest by
// an error of the database.
func TestRefusedEnqueues(t *testing.T) {
	bothWays(t, func(t *testing.T, pool pool, enqueue enqueuer) {
		good := make([]run.New, 1001) // more than one statement takes
		for i := range good {
			good[i].Type = "a.b"
		}
		for name, n := range map[string]run.New{
			"payload":  {Type: "a.b", Payload: json.RawMessage(`[1]`)},
			"metadata": {Type: "a.b", Metadata: []byte(`{"a":1,"a":2}`)},
		} {
			_, err := enqueue(append(good, n)...)
			var document *run.DocumentError
			if !errors.As(err, &document) || document.Document != name || !strings.Contains(err.Error(), `enqueue "a.b"`) {
				t.Errorf("%s: %v", name, err)
			}
		}
		for name, n := range map[string]run.New{
			"json: unsupported value": {Type: "a.b", Payload: math.Inf(1)},
			"valid UTF-8":             {Type: "a.b", IdempotencyKey: "a\xff"},
		} {
			if _, err := enqueue(append(good, n)...); err == nil || !strings.Contains(err.Error(), name) {
				t.Errorf("%s: %v", name, err)
			}
		}
		if n := count(t, pool, "true"); n != 0 {
			t.Errorf("%d runs stored, want none", n)
		}
		for words, n := range map[string]run.New{
			"type 'A.b' is not":              {Type: "A.b"},
			"type '' is not":                 {},
			"priority 101 is outside":        {Type: "a.b", Priority: 101},
			"max_attempts -1 is outside":     {Type: "a.b", MaxAttempts: -1},
			"idempotency_key has 201":        {Type: "a.b", IdempotencyKey: strings.Repeat("k", 201)},
			"is not a usable time":           {Type: "a.b", Delay: math.MaxInt64},
			"run_at 1999-01-01 00:00:00+00 ": {Type: "a.b", RunAt: time.Date(1999, 1, 1, 0, 0, 0, 0, time.UTC)},
		} {
			_, err := enqueue(run.New{Type: "a.b"}, n)
			var pg *pgconn.PgError
			if !errors.As(err, &pg) || pg.Code != "23514" || pg.Hint == "" || !strings.Contains(err.Error(), words) {
				t.Errorf("%s: %v", words, err)
			}
		}
		if n := count(t, pool, "true"); n != 0 {
			t.Errorf("%d runs stored, want none", n)
		}
	})
}
