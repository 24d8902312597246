package sql_test

import (
	"context"
	"testing"
	"time"

	"github.com/simple-workflow/simple-workflow/internal/pgtest"
)

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
