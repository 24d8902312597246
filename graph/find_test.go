package graph

import (
	"fmt"
	"testing"
	"time"

	"github.com/simple-workflow/simple-workflow/internal/pgtest"
	"github.com/simple-workflow/simple-workflow/run"
)

// A process that was found by name is remembered for starts that were leased before it was found. A start that is leased after a new version was deployed finds the new
// version.
func TestFoundByName(t *testing.T) {
	pool := pgtest.New(t)
	e := New(pool)
	deploy := func(version int) {
		t.Helper()
		d, err := Parse([]byte(fmt.Sprintf(`{"process": "p", "version": %d, "start": "a", "nodes": {"a": {"end": true}}}`, version)))
		if err == nil {
			_, err = Deploy(t.Context(), pool, d)
		}
		if err != nil {
			t.Fatal(err)
		}
	}
	clock := func() (at time.Time) {
		t.Helper()
		if err := pool.QueryRow(t.Context(), `SELECT clock_timestamp()`).Scan(&at); err != nil {
			t.Fatal(err)
		}
		return at
	}
	expect := func(version int, since time.Time, want int) {
		t.Helper()
		p, err := e.find(t.Context(), "p", version, since)
		if err != nil || p.Definition.Version != want {
			t.Errorf("version %d since %s: %v, %v; want version %d", version, since, p, err, want)
		}
	}
	deploy(1)
	first := clock()
	expect(0, first, 1)
	deploy(2)
	expect(0, first, 1)
	expect(0, clock(), 2)
	expect(0, first, 2)
	expect(1, clock(), 1)
	if _, err := e.find(t.Context(), "q", 0, first); !run.IsPermanent(err) {
		t.Errorf("a process that is not deployed: %v, want a permanent error", err)
	}
}
