package run_test

import (
	"errors"
	"strings"
	"testing"

	"github.com/google/uuid"

	"github.com/simple-workflow/simple-workflow/internal/pgtest"
	"github.com/simple-workflow/simple-workflow/run"
)

// in enqueues a run and brings it to a state.
func in(t *testing.T, pool pool, status run.Status) uuid.UUID {
	t.Helper()
	done, err := run.Enqueue(t.Context(), pool, run.New{Type: "a.b"})
	if err != nil {
		t.Fatal(err)
	}
	if status == run.Pending {
		return done.ID
	}
	if _, err := pool.Exec(t.Context(), `
		UPDATE workflow_run
		SET status = 'leased', lease_token = gen_random_uuid(), lease_no = 1, lease_until = now() + interval '1 minute', leased_by = 'w'
		WHERE id = $1`, done.ID); err != nil {
		t.Fatal(err)
	}
	if status != run.Leased {
		if _, err := pool.Exec(t.Context(), `UPDATE workflow_run SET status = $2 WHERE id = $1`, done.ID, status); err != nil {
			t.Fatal(err)
		}
	}
	return done.ID
}

// Cancel, Retry and Delete change the run if its state allows it. Otherwise they change nothing, and return
// ErrTooLate, with the run and its state in the message.
func TestChanges(t *testing.T) {
	pool := pgtest.New(t)
	changes := map[string]func(uuid.UUID) error{
		"cancel": func(id uuid.UUID) error { return run.Cancel(t.Context(), pool, id, "why") },
		"retry":  func(id uuid.UUID) error { return run.Retry(t.Context(), pool, id, 1) },
		"delete": func(id uuid.UUID) error { return run.Delete(t.Context(), pool, id, "why") },
	}
	all := []run.Status{run.Pending, run.Leased, run.Succeeded, run.Failed, run.Cancelled}
	want := map[string]map[run.Status]run.Status{ // a state that is missing: ErrTooLate
		"cancel": {run.Pending: run.Cancelled, run.Leased: run.Cancelled},
		"retry":  {run.Failed: run.Pending},
		"delete": {run.Pending: run.Pending, run.Leased: run.Cancelled, run.Succeeded: run.Succeeded, run.Failed: run.Failed, run.Cancelled: run.Cancelled},
	}
	for name, change := range changes {
		for _, from := range all {
			t.Run(name+" "+string(from), func(t *testing.T) {
				id := in(t, pool, from)
				err := change(id)
				to, ok := want[name][from]
				if !ok {
					to = from
				}
				if r := read(t, pool, id); r.Status != to || (r.DeletedAt != nil) != (name == "delete") || r.LeasedBy != nil && to != run.Leased {
					t.Errorf("run = %+v", r)
				}
				if ok && err != nil || !ok && (!errors.Is(err, run.ErrTooLate) || !strings.Contains(err.Error(), id.String()) || !strings.Contains(err.Error(), string(from))) {
					t.Errorf("err = %v", err)
				}
			})
		}
		if err := change(uuid.Must(uuid.NewV7())); !errors.Is(err, run.ErrNotFound) {
			t.Errorf("%s of no run: %v", name, err)
		}
	}
}

// The reason of a cancel is stored as last_error, and that of a delete as delete_reason. A second delete does
// not change delete_reason. The reason of a cancel may be empty.
func TestReasons(t *testing.T) {
	pool := pgtest.New(t)
	id := in(t, pool, run.Leased)
	if err := run.Cancel(t.Context(), pool, id, "duplicate order"); err != nil {
		t.Fatal(err)
	}
	for _, reason := range []string{"tidy", "again"} {
		if err := run.Delete(t.Context(), pool, id, reason); err != nil {
			t.Fatal(err)
		}
	}
	if r := read(t, pool, id); *r.LastError != "cancelled: duplicate order" || *r.DeleteReason != "tidy" {
		t.Errorf("last_error = %q, delete_reason = %q", *r.LastError, *r.DeleteReason)
	}
	id = in(t, pool, run.Pending)
	if err := run.Cancel(t.Context(), pool, id, ""); err != nil {
		t.Fatal(err)
	}
	if r := read(t, pool, id); *r.LastError != "cancelled" {
		t.Errorf("last_error = %q", *r.LastError)
	}
}

// Retry refuses a number of attempts that is out of range, and a deleted run.
func TestRefusedRetries(t *testing.T) {
	pool := pgtest.New(t)
	id := in(t, pool, run.Failed)
	if err := run.Retry(t.Context(), pool, id, 0); err == nil || !strings.Contains(err.Error(), "attempts 0 is outside 1 to 1000") {
		t.Errorf("err = %v", err)
	}
	if err := run.Delete(t.Context(), pool, id, ""); err != nil {
		t.Fatal(err)
	}
	if err := run.Retry(t.Context(), pool, id, 1); !errors.Is(err, run.ErrTooLate) || !strings.Contains(err.Error(), "deleted") {
		t.Errorf("err = %v", err)
	}
}

// Read returns a run in any state, deleted or not, and ErrNotFound if there is none.
func TestRead(t *testing.T) {
	pool := pgtest.New(t)
	id := in(t, pool, run.Leased)
	r := read(t, pool, id)
	if r.ID != id || r.Type != "a.b" || r.LeaseNo != 1 || *r.LeasedBy != "w" || r.LeaseUntil == nil || r.FinishedAt != nil || r.Result != nil {
		t.Errorf("%+v", r)
	}
	if err := run.Delete(t.Context(), pool, id, "x"); err != nil {
		t.Fatal(err)
	}
	if r := read(t, pool, id); r.DeletedAt == nil || r.FinishedAt == nil {
		t.Errorf("%+v", r)
	}
	none := uuid.Must(uuid.NewV7())
	if _, err := run.Read(t.Context(), pool, none); !errors.Is(err, run.ErrNotFound) || !strings.Contains(err.Error(), none.String()) {
		t.Errorf("err = %v", err)
	}
}
