package sql_test

import (
	"context"
	"testing"
	"time"

	"github.com/simple-workflow/simple-workflow/internal/pgtest"
)

// A transaction that inserts row by row for long takes two locks for its wake-up, not one for
// each hundredth of a second: the server has room for some ten thousand in all.
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

// Few transactions are on their way to wake workers at a time: their commits wait for each other.
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
