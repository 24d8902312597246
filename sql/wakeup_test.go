package sql_test

import (
	"context"
	"testing"
	"time"

	"github.com/simple-workflow/simple-workflow/internal/pgtest"
)

// A transaction that inserts row by row for long takes one lock for its wake-up, not one for
// each hundredth of a second: the server has room for some ten thousand in all.
func TestWakeUpTakesOneLock(t *testing.T) {
	s, _ := psql(t)
	s.do(`BEGIN`)
	for range 30 {
		s.enqueue()
		time.Sleep(10 * time.Millisecond)
	}
	s.expect("locks", s.do(`SELECT count(*) FROM pg_locks WHERE locktype = 'advisory' AND pid = pg_backend_pid()`), "1")
	s.do(`COMMIT; BEGIN`)
	s.enqueue()
	s.expect("locks of the next transaction", s.do(`SELECT count(*) FROM pg_locks WHERE locktype = 'advisory' AND pid = pg_backend_pid()`), "1")
}

// A transaction that has inserted a run and stays open keeps nobody else from waking workers.
func TestWakeUpBesideOpenTransaction(t *testing.T) {
	s, pool := psql(t)
	open := connect(t, pool.Config().ConnString())
	listener := connect(t, pool.Config().ConnString())
	listener.do(`LISTEN workflow_run`)
	open.do(`BEGIN; INSERT INTO workflow_run (type) VALUES ('a.b')`)
	pgtest.Await(t, "another run wakes workers", func() bool {
		s.enqueue()
		call, done := context.WithTimeout(t.Context(), 100*time.Millisecond)
		defer done()
		_, err := listener.conn.WaitForNotification(call)
		return err == nil
	})
}
