package wire_test

import (
	"context"
	"net"
	"strconv"
	"testing"

	"github.com/jackc/pgx/v5"

	"github.com/simple-workflow/simple-workflow/internal/pgserver"
	"github.com/simple-workflow/simple-workflow/torture/wire"
)

// proxied returns a server, a proxy to it, and the events of the proxy.
func proxied(t *testing.T) (*pgserver.Server, *wire.Proxy, <-chan wire.Event) {
	t.Helper()
	server, err := pgserver.Start(t.Context(), pgserver.Options{})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(server.Stop)
	events := make(chan wire.Event, 1)
	proxy, err := wire.Listen(net.JoinHostPort("127.0.0.1", strconv.Itoa(server.Port())), func(e wire.Event) { events <- e })
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(proxy.Close)
	return server, proxy, events
}

// A cut connection is an error for the client. The event says what the server has done: everything if the answer was
// lost, nothing if the commit was never sent. Before and after, the proxy passes everything on.
func TestCuts(t *testing.T) {
	server, proxy, events := proxied(t)
	insert := func(x int) error {
		conn, err := pgx.Connect(t.Context(), "postgres://postgres@"+proxy.Addr()+"/postgres?sslmode=disable")
		if err != nil {
			t.Fatal(err)
		}
		defer conn.Close(context.Background())
		return pgx.BeginFunc(t.Context(), conn, func(tx pgx.Tx) error {
			_, err := tx.Exec(t.Context(), `CREATE TABLE IF NOT EXISTS row (x int)`)
			if err == nil {
				_, err = tx.Exec(t.Context(), `INSERT INTO row VALUES ($1)`, x)
			}
			return err
		})
	}
	count := func(x int) (n int) {
		conn, err := pgx.Connect(t.Context(), server.URL("postgres"))
		if err != nil {
			t.Fatal(err)
		}
		defer conn.Close(context.Background())
		if err := conn.QueryRow(t.Context(), `SELECT count(*) FROM row WHERE x = $1`, x).Scan(&n); err != nil {
			t.Fatal(err)
		}
		return n
	}
	if err := insert(0); err != nil {
		t.Fatal(err)
	}
	for i, test := range []struct {
		cut       wire.Cut
		committed bool
	}{{wire.AnswerLost, true}, {wire.NeverSent, false}} {
		proxy.Arm(test.cut, 1)
		if err := insert(i + 1); err == nil {
			t.Errorf("%s: the client saw no error", test.cut)
		}
		e := <-events
		if e.Cut != test.cut || e.Statement != "commit" || e.Committed != test.committed {
			t.Errorf("%s: event %+v, want committed %v", test.cut, e, test.committed)
		}
		if got := count(i+1) == 1; got != test.committed {
			t.Errorf("%s: the row is there: %v, want %v", test.cut, got, test.committed)
		}
	}
	if err := insert(0); err != nil || count(0) != 2 {
		t.Errorf("afterwards: %v, %d rows; want 2", err, count(0))
	}
}

// A statement that was prepared in an earlier round trip is known by its name. One in a transaction that begins in the
// same round trip is not taken for a commit.
func TestCutsOfPrepared(t *testing.T) {
	server, proxy, events := proxied(t)
	const enqueue = `INSERT INTO workflow_run VALUES ($1)`
	control, err := pgx.Connect(t.Context(), server.URL("postgres"))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = control.Close(context.Background()) })
	if _, err := control.Exec(t.Context(), `CREATE TABLE workflow_run (x int)`); err != nil {
		t.Fatal(err)
	}
	count := func() (n int) {
		if err := control.QueryRow(t.Context(), `SELECT count(*) FROM workflow_run`).Scan(&n); err != nil {
			t.Fatal(err)
		}
		return n
	}
	for _, test := range []struct {
		cut  wire.Cut
		want int
	}{{wire.AnswerLost, 1}, {wire.NeverSent, 0}} {
		conn, err := pgx.Connect(t.Context(), "postgres://postgres@"+proxy.Addr()+"/postgres?sslmode=disable")
		if err != nil {
			t.Fatal(err)
		}
		if _, err := conn.Exec(t.Context(), enqueue, 1); err != nil {
			t.Fatal(err)
		}
		proxy.Arm(test.cut, 1)
		batch := &pgx.Batch{}
		batch.Queue(`begin`)
		batch.Queue(enqueue, 2)
		if err := conn.SendBatch(t.Context(), batch).Close(); err != nil || !proxy.Armed(test.cut) {
			t.Fatalf("%s: a transaction that begins: %v, cut: %v", test.cut, err, !proxy.Armed(test.cut))
		}
		proxy.Disarm()
		if _, err := conn.Exec(t.Context(), `rollback`); err != nil {
			t.Fatal(err)
		}
		before := count()
		proxy.Arm(test.cut, 1)
		if _, err := conn.Exec(t.Context(), enqueue, 3); err == nil {
			t.Errorf("%s: the client saw no error", test.cut)
		}
		if proxy.Armed(test.cut) {
			t.Fatalf("%s: nothing was cut", test.cut)
		}
		if e := <-events; e.Statement != "enqueue" || e.Committed != (test.want == 1) {
			t.Errorf("%s: event %+v", test.cut, e)
		}
		if n := count() - before; n != test.want {
			t.Errorf("%s: %d rows were stored, want %d", test.cut, n, test.want)
		}
		_ = conn.Close(context.Background())
	}
}
