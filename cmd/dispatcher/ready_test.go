package main_test

import (
	"net/http"
	"net/url"
	"testing"
	"time"

	"github.com/simple-workflow/simple-workflow/internal/cmdtest"
	"github.com/simple-workflow/simple-workflow/internal/pgserver"
	"github.com/simple-workflow/simple-workflow/internal/pgtest"
	"github.com/simple-workflow/simple-workflow/sql"
)

// A dispatcher is ready only while it can write to the database, even if it has nothing to publish. /readyz turns to
// 503 within ten seconds after writing fails, and back to 200 within ten seconds after it works again; then events are
// published. While its role is refused, all its connections together try to connect about once a second.
func TestReadyMeansWritable(t *testing.T) {
	t.Parallel()
	server := pgtest.Server(t, pgserver.Options{})
	owner := server.URL("postgres")
	if err := sql.Up(t.Context(), connect(t, owner)); err != nil {
		t.Fatal(err)
	}
	execute(t, owner, `CREATE ROLE app LOGIN PASSWORD 'secret'`)
	execute(t, owner, `GRANT ALL ON ALL TABLES IN SCHEMA public TO app`)
	execute(t, owner, `GRANT ALL ON ALL FUNCTIONS IN SCHEMA public TO app`)
	u, err := url.Parse(owner)
	if err != nil {
		t.Fatal(err)
	}
	u.User = url.UserPassword("app", "secret")
	through, connections := cmdtest.Forward(t, u.String())
	r := receive(t, func(http.ResponseWriter, []byte) {})
	p := cmdtest.Start(t, settings(through+"&sslmode=disable", r.sink(), "DISPATCHER_HTTP_ADDR=127.0.0.1:0", "DISPATCHER_READY_WITHIN=5s"))
	within := func(status int, when string) {
		begun := time.Now()
		awaitStatus(t, p, "/readyz", status)
		if took := time.Since(begun); took > 10*time.Second { // 5 s, and as much for a busy machine
			t.Errorf("%s: /readyz is %d after %s", when, status, took.Round(time.Second/10))
		}
	}
	within(200, "at start")
	published := 0
	hurt := func(what string, do, undo func()) {
		do()
		within(503, what)
		undo()
		within(200, what+" no more")
		emit(t, owner, 1, 1)
		published++
		pgtest.Await(t, "an event to be published, after: "+what, func() bool { return r.ids() == published })
	}
	cut := func() {
		execute(t, owner, `SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE usename = 'app'`)
	}
	hurt("no server", func() { server.StopMode(pgserver.Fast) }, func() {
		if err := server.Restart(t.Context()); err != nil {
			t.Fatal(err)
		}
	})
	hurt("read-only sessions", func() { execute(t, owner, `ALTER ROLE app SET default_transaction_read_only = on`); cut() },
		func() { execute(t, owner, `ALTER ROLE app RESET default_transaction_read_only`) })
	hurt("a missing right", func() { execute(t, owner, `REVOKE UPDATE ON outbox_sink FROM app`) },
		func() { execute(t, owner, `GRANT UPDATE ON outbox_sink TO app`) })
	hurt("no connection", func() { execute(t, owner, `ALTER ROLE app CONNECTION LIMIT 0`); cut() }, func() {
		before, begun := connections(), time.Now()
		pgtest.Await(t, "ten seconds to pass", func() bool { return time.Since(begun) > 10*time.Second })
		if n := connections() - before; n < 5 || n > 25 {
			t.Errorf("%d attempts to connect in 10 seconds, want one a second", n)
		}
		execute(t, owner, `ALTER ROLE app CONNECTION LIMIT -1`)
	})
}
