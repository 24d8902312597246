package sql_test

import (
	"context"
	"testing"
	"time"

	"github.com/simple-workflow/simple-workflow/internal/pgtest"
)

// A long transaction that inserts row by row takes two locks for its wake-up, and not one for each 10 ms: the server
// has room for about ten thousand locks in all.
func TestWakeUpTakesTwoLocks(t *testing.T) {
	s, _ := psql(t)
	s.do(`BEGIN`)
	for range 30 {
		s.enqueue()
		time.Sleep(10 * time.Millisecond)
	}
	s.expect("locks", s.do(`SELECT count(*) FROM pg_locks WHERE locktype = 'advisory' AND pid = pg_backend_pid()`), "2")
	s.do(`COMMIT; BEGIN`)
	s.enqueue()
	s.expect("locks of the next transaction", s.do(`SELECT count(*) FROM pg_locks WHERE locktype = 'advisory' AND pid = pg_backend_pid()`), "2")
}

// An open transaction that has inserted a run does not keep others from waking workers.
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

// Only few transactions send a wake-up at the same time, because the commits of transactions that notify wait for
// each other.
func TestFewNotifyAtATime(t *testing.T) {
	_, pool := psql(t)
	var all []*session
	for range 40 {
		all = append(all, connect(t, pool.Config().ConnString()))
	}
	woken, start := 0, time.Now()
	for _, s := range all { // they stay open
		s.do(`BEGIN; INSERT INTO workflow_run (type) VALUES ('a.b')`)
		if s.do(`SELECT current_setting('workflow.woken', true)`) == "on" {
			woken++
		}
		time.Sleep(5 * time.Millisecond)
	}
	if most := 8 * (2 + int(time.Since(start).Seconds())); woken == 0 || woken > most {
		t.Errorf("%d of 40 are to notify, want some, and eight in each second at most: %d", woken, most)
	}
}
