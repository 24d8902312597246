package run_test

import (
	"context"
	"database/sql"
	"errors"
	"testing"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5/stdlib"

	"github.com/simple-workflow/simple-workflow/internal/pgtest"
	"github.com/simple-workflow/simple-workflow/run"
)

// A run is stored in the caller's transaction: it exists after a commit, and not after a rollback.
func TestEnqueueInTransaction(t *testing.T) {
	pool := pgtest.New(t)
	for _, commit := range []bool{false, true} {
		for _, key := range []string{"", "k"} {
			tx, err := pool.Begin(t.Context())
			if err != nil {
				t.Fatal(err)
			}
			done, err := run.Enqueue(t.Context(), tx, run.New{Type: "a.b", IdempotencyKey: key})
			if err != nil || done.Existing {
				t.Fatal(done, err)
			}
			if _, err := run.Read(t.Context(), pool, done.ID); !errors.Is(err, run.ErrNotFound) {
				t.Errorf("seen before the commit: %v", err)
			}
			end := tx.Rollback
			if commit {
				end = tx.Commit
			}
			if err := end(t.Context()); err != nil {
				t.Fatal(err)
			}
			if _, err := run.Read(t.Context(), pool, done.ID); (err == nil) != commit {
				t.Errorf("commit %v: %v", commit, err)
			}
		}
	}
}

// The same holds for database/sql, on a transaction and on a connection.
func TestEnqueueSQLInTransaction(t *testing.T) {
	pool := pgtest.New(t)
	db := stdlib.OpenDBFromPool(pool)
	for _, commit := range []bool{false, true} {
		tx, err := db.BeginTx(t.Context(), nil)
		if err != nil {
			t.Fatal(err)
		}
		done, err := run.EnqueueSQL(t.Context(), tx, []run.New{{Type: "a.b"}, {Type: "a.c", IdempotencyKey: "k"}})
		if err != nil || len(done) != 2 {
			t.Fatal(done, err)
		}
		end := tx.Rollback
		if commit {
			end = tx.Commit
		}
		if err := end(); err != nil {
			t.Fatal(err)
		}
		for _, d := range done {
			if _, err := run.Read(t.Context(), pool, d.ID); (err == nil) != commit {
				t.Errorf("commit %v: %v", commit, err)
			}
		}
	}
	conn, err := db.Conn(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	done, err := run.EnqueueSQL(t.Context(), conn, []run.New{{Type: "a.c", IdempotencyKey: "k"}})
	if err != nil || !done[0].Existing {
		t.Errorf("%+v, %v", done, err)
	}
}

// otherDriver is a database behind a driver that is not pgx. Its errors have a SQLSTATE, and contain
// the server's message.
type otherDriver struct{ state, message string }

func (d otherDriver) QueryContext(context.Context, string, ...any) (*sql.Rows, error) { return nil, d }
func (d otherDriver) Error() string                                                   { return "pq: " + d.message }
func (d otherDriver) SQLState() string                                                { return d.state }

// A conflict is recognized with any driver.
func TestEnqueueSQLOtherDriver(t *testing.T) {
	wanted, existing := uuid.Must(uuid.NewV7()), uuid.Must(uuid.NewV7())
	words := "workflow_enqueue: new run " + wanted.String() + " is refused: run " + existing.String() + " has the same idempotency key 'k'"
	for _, test := range []struct {
		db       otherDriver
		conflict bool
	}{
		{otherDriver{"23505", words}, true},
		{otherDriver{"23514", words}, false},
		{otherDriver{"23505", "duplicate key value"}, false},
	} {
		_, err := run.EnqueueSQL(t.Context(), test.db, []run.New{{Type: "a.b", ID: wanted, IdempotencyKey: "k"}})
		var conflict *run.ConflictError
		if got := errors.As(err, &conflict); got != test.conflict {
			t.Errorf("%s %s: %v", test.db.state, test.db.message, err)
		} else if got && *conflict != (run.ConflictError{Key: "k", Wanted: wanted, Existing: existing}) {
			t.Errorf("%+v", conflict)
		}
		if !test.conflict && !errors.Is(err, test.db) {
			t.Errorf("the driver's error is lost: %v", err)
		}
	}
}

// A conflict refuses its whole statement. In a large call outside of a transaction, what earlier statements
// stored stays, and the call may be repeated.
func TestConflictInLargeCall(t *testing.T) {
	bothWays(t, func(t *testing.T, pool pool, enqueue enqueuer) {
		if _, err := enqueue(run.New{Type: "a.z", IdempotencyKey: "taken"}); err != nil {
			t.Fatal(err)
		}
		runs := make([]run.New, 1500)
		for i := range runs {
			runs[i].Type = "a.b"
		}
		runs[1400].IdempotencyKey = "taken"
		_, err := enqueue(runs...)
		var conflict *run.ConflictError
		if !errors.As(err, &conflict) || conflict.Key != "taken" {
			t.Fatal(err)
		}
		if n := count(t, pool, "type = 'a.b'"); n != 1000 {
			t.Errorf("%d runs, want the first statement's 1000", n)
		}
	})
}

// Two callers that enqueue the same keys in opposite order do not deadlock: one waits for the other.
func TestOppositeOrders(t *testing.T) {
	bothWays(t, func(t *testing.T, pool pool, enqueue enqueuer) {
		forth := make([]run.New, 200)
		for i := range forth {
			forth[i] = run.New{Type: "a.b", IdempotencyKey: string(rune('a'+i%26)) + string(rune('a'+i/26))}
		}
		back := make([]run.New, len(forth))
		for i, n := range forth {
			back[len(back)-1-i] = n
		}
		errs := make(chan error, 8)
		for i := range cap(errs) {
			go func() {
				_, err := enqueue([][]run.New{forth, back}[i%2]...)
				errs <- err
			}()
		}
		for range cap(errs) {
			if err := <-errs; err != nil {
				t.Error(err)
			}
		}
		if n := count(t, pool, "true"); n != len(forth) {
			t.Errorf("%d runs, want %d", n, len(forth))
		}
	})
}
