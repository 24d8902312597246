package dispatcher

import (
	"testing"
	"time"

	"github.com/jackc/pgx/v5/pgconn"

	"github.com/simple-workflow/simple-workflow/internal/delivery"
	"github.com/simple-workflow/simple-workflow/internal/fault"
)

// How long marking an event has failed is remembered for two minutes without a read, while another dispatcher may hold
// its lane. Otherwise, with two dispatchers that take turns, marking would never have failed for a whole minute. An
// event that could not be marked for another reason, such as a lock, is forgotten by then.
func TestFailuresAreRemembered(t *testing.T) {
	u := unmarked{events: map[int64]*dealtWith{}}
	both := []delivery.Outcome{{ID: 1, Delivered: true}, {ID: 2, Delivered: true}}
	u.remember([]delivery.Row{{ID: 1}, {ID: 2}}, both)
	u.kept(both[:1], &pgconn.PgError{Code: "40001"})
	u.events[1].failures.Age(fault.Patience)
	for _, e := range u.events {
		e.due = e.due.Add(-2 * time.Minute)
	}
	u.waiting()
	if u.events[1] == nil || u.events[2] != nil {
		t.Fatalf("remembered is %v", u.events)
	}
	if u.kept(both[:1], &pgconn.PgError{Code: "40001"}); !u.lasting(both) {
		t.Error("it has not lasted")
	}
	u.events[1].due = u.events[1].due.Add(-time.Hour)
	if u.waiting(); len(u.events) != 0 {
		t.Error("it is remembered for ever")
	}
}
