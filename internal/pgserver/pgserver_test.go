package pgserver_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"os/user"
	"slices"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"

	"github.com/jackc/pgx/v5"

	"github.com/simple-workflow/simple-workflow/internal/pgserver"
)

// A server with default options is not durable, allows 200 connections, and listens on the loopback interface only.
func TestDefaults(t *testing.T) {
	server := start(t, pgserver.Options{})
	for name, want := range map[string]string{
		"max_connections":    "200",
		"fsync":              "off",
		"synchronous_commit": "off",
		"full_page_writes":   "off",
		"listen_addresses":   "127.0.0.1",
		"server_encoding":    "UTF8",
		"port":               strconv.Itoa(server.Port()),
	} {
		if got := query(t, server, "SELECT setting FROM pg_settings WHERE name = '"+name+"'"); got != want {
			t.Errorf("%s = %q, want %q", name, got, want)
		}
	}
	if got := query(t, server, "SELECT datcollate FROM pg_database WHERE datname = 'postgres'"); got != "C" {
		t.Errorf("collation = %q, want C", got)
	}
}

// Options reach the server: settings of any content, durability, the collation and the log.
func TestOptions(t *testing.T) {
	var log bytes.Buffer
	server := start(t, pgserver.Options{
		Durable:  true,
		ICU:      true,
		Log:      &log,
		Settings: map[string]string{"log_line_prefix": `it's\ %p `, "max_connections": "23"},
	})
	for sql, want := range map[string]string{
		"SHOW fsync":              "on",
		"SHOW synchronous_commit": "on",
		"SHOW log_line_prefix":    `it's\ %p `,
		"SHOW max_connections":    "23",
		"SELECT datlocprovider::text FROM pg_database WHERE datname = 'postgres'": "i",
		"SELECT max(x) FROM (VALUES ('a'), ('B')) v(x)":                           "B",
	} {
		if got := query(t, server, sql); got != want {
			t.Errorf("%s = %q, want %q", sql, got, want)
		}
	}
	if strings.HasPrefix(server.Dir(), "/dev/shm/") {
		t.Errorf("a durable server keeps its data in memory: %s", server.Dir())
	}
	server.Stop()
	if !strings.Contains(log.String(), "ready to accept connections") {
		t.Errorf("log = %q", log.String())
	}
}

// Stop leaves no process, file or shared memory segment, also after Kill, and may be called twice.
func TestStop(t *testing.T) {
	for name, before := range map[string]func(*pgserver.Server){
		"running":   func(*pgserver.Server) {},
		"stopped":   func(s *pgserver.Server) { s.StopMode(pgserver.Fast) },
		"immediate": func(s *pgserver.Server) { s.StopMode(pgserver.Immediate) },
		"killed":    (*pgserver.Server).Kill,
	} {
		t.Run(name, func(t *testing.T) {
			server := start(t, pgserver.Options{})
			pid, err := mainPid(server)
			if err != nil {
				t.Fatal(err)
			}
			segment := segment(t, server)
			before(server)
			server.Stop()
			server.Stop()
			if runs(pid) || exists(server.Dir()) {
				t.Errorf("process runs: %v, directory exists: %v", runs(pid), exists(server.Dir()))
			}
			if slices.Contains(segments(t), segment) {
				t.Errorf("shared memory segment %s is left", segment)
			}
			if err := server.Restart(t.Context()); err == nil {
				t.Error("a server that was stopped for good starts again")
			}
		})
	}
}

// What a durable server has committed is there after a restart, at the same URL, however the server was ended.
func TestRestart(t *testing.T) {
	server := start(t, pgserver.Options{Durable: true})
	url := server.URL("postgres")
	query(t, server, "CREATE TABLE kept (n text)")
	for n, end := range []func(){
		server.Kill,
		func() { server.StopMode(pgserver.Immediate) },
		func() { server.StopMode(pgserver.Fast) },
		func() {}, // Restart stops it
		server.Kill,
	} {
		query(t, server, "INSERT INTO kept VALUES ('"+strconv.Itoa(n)+"')")
		end()
		if err := server.Restart(t.Context()); err != nil {
			t.Fatalf("after end %d: %v", n, err)
		}
	}
	if got, want := query(t, server, "SELECT n FROM kept ORDER BY n"), "0 1 2 3 4"; got != want {
		t.Errorf("kept %q, want %q", got, want)
	}
	if got := server.URL("postgres"); got != url {
		t.Errorf("URL changed from %s to %s", url, got)
	}
}

// Kill also ends the server's other processes, both those of sessions and background ones, so that the data can be
// used again.
func TestKillEndsAll(t *testing.T) {
	server := start(t, pgserver.Options{})
	conn, err := pgx.Connect(t.Context(), server.URL("postgres"))
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close(context.Background())
	rows, err := conn.Query(t.Context(), "SELECT pid FROM pg_stat_activity")
	if err != nil {
		t.Fatal(err)
	}
	pids, err := pgx.CollectRows(rows, pgx.RowTo[int])
	if err != nil {
		t.Fatal(err)
	}
	server.Kill()
	for _, pid := range pids {
		// They have closed their files, and may be about to end.
		await(t, fmt.Sprintf("process %d of %v ends", pid, pids), func() bool { return !runs(pid) })
	}
}

// A directory that the caller named outlives the server, and the next server finds its data there.
func TestDir(t *testing.T) {
	dir := openDir(t)
	first := start(t, pgserver.Options{Dir: dir})
	query(t, first, "CREATE TABLE left_here ()")
	first.Stop()
	second := start(t, pgserver.Options{Dir: dir, Settings: map[string]string{"work_mem": "5MB"}})
	if got := query(t, second, "SELECT to_regclass('left_here')::text"); got != "left_here" {
		t.Errorf("table = %q", got)
	}
	if got := query(t, second, "SHOW work_mem"); got != "5MB" {
		t.Errorf("work_mem = %q", got)
	}
}

// The directory of a foreign database is refused and not changed.
func TestForeignDir(t *testing.T) {
	dir := openDir(t)
	if err := os.MkdirAll(dir+"/data/base", 0o755); err != nil {
		t.Fatal(err)
	}
	_, err := pgserver.Start(t.Context(), pgserver.Options{Dir: dir})
	if err == nil || !exists(dir+"/data/base") {
		t.Errorf("err = %v, data exists: %v", err, exists(dir+"/data/base"))
	}
}

// The error of a server that cannot start says why.
func TestBadSetting(t *testing.T) {
	_, err := pgserver.Start(t.Context(), pgserver.Options{Settings: map[string]string{"work_mem": "much"}})
	if err == nil || !strings.Contains(err.Error(), "work_mem") {
		t.Errorf("err = %v, want one about work_mem", err)
	}
}

// Start gives up when its context ends.
func TestCancel(t *testing.T) {
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if _, err := pgserver.Start(ctx, pgserver.Options{}); !errors.Is(err, context.Canceled) {
		t.Errorf("err = %v, want context.Canceled", err)
	}
}

// Servers that start at the same time do not disturb each other.
func TestManyAtOnce(t *testing.T) {
	var servers [3]*pgserver.Server
	var group sync.WaitGroup
	for i := range servers {
		group.Go(func() {
			server, err := pgserver.Start(t.Context(), pgserver.Options{})
			if err != nil {
				t.Error(err)
				return
			}
			servers[i] = server
			t.Cleanup(server.Stop)
		})
	}
	group.Wait()
	for _, server := range servers {
		if got := query(t, server, "SELECT current_setting('port')"); got != strconv.Itoa(server.Port()) {
			t.Errorf("port = %s, want %d", got, server.Port())
		}
	}
}

// Nothing of a server is left after its parent process was killed with SIGKILL, even if the server itself had been
// killed before.
func TestParentKilled(t *testing.T) {
	for _, how := range []string{"running", "killed"} {
		t.Run(how, func(t *testing.T) {
			cmd, _, child := startChild(t, how, nil)
			if how == "running" && !runs(child.pid) {
				t.Fatal("the server does not run")
			}
			if err := cmd.Process.Kill(); err != nil {
				t.Fatal(err)
			}
			_ = cmd.Wait()
			await(t, "the server ends", func() bool { return !runs(child.pid) })
			await(t, "its directory is removed", func() bool { return !exists(child.dir) })
		})
	}
}

// A user without any privileges can run a server.
func TestUnprivileged(t *testing.T) {
	if os.Geteuid() != 0 {
		// As another user than root, all other tests show this.
		start(t, pgserver.Options{})
		return
	}
	nobody, err := user.Lookup("nobody")
	if err != nil {
		t.Fatal(err)
	}
	uid, err := strconv.Atoi(nobody.Uid)
	if err != nil {
		t.Fatal(err)
	}
	cmd, in, child := startChild(t, "running", &syscall.SysProcAttr{
		Credential: &syscall.Credential{Uid: uint32(uid), Gid: uint32(uid)},
	})
	if child.uid != uid {
		t.Errorf("the child runs as user %d, want %d", child.uid, uid)
	}
	if err := in.Close(); err != nil {
		t.Fatal(err)
	}
	if err := cmd.Wait(); err != nil {
		t.Error(err)
	}
	if runs(child.pid) || exists(child.dir) {
		t.Error("Stop left something")
	}
}
