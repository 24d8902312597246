package pgserver_test

import (
	"bufio"
	"context"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/simple-workflow/simple-workflow/internal/pgserver"
)

// childEnv makes this binary start a server, print a few facts about it and wait to be killed.
const childEnv = "PGSERVER_TEST_CHILD"

func TestMain(m *testing.M) {
	if how := os.Getenv(childEnv); how != "" {
		if err := beChild(how); err != nil {
			fmt.Println("error:", err)
			os.Exit(1)
		}
		return
	}
	os.Exit(m.Run())
}

func beChild(how string) error {
	ctx := context.Background()
	server, err := pgserver.Start(ctx, pgserver.Options{})
	if err != nil {
		return err
	}
	pid, err := mainPid(server)
	if err != nil {
		return err
	}
	if how == "killed" {
		server.Kill()
	}
	conn, err := pgx.Connect(ctx, server.URL("postgres"))
	if (err != nil) != (how == "killed") {
		return err
	}
	if err == nil {
		defer conn.Close(ctx)
	}
	fmt.Println(server.Dir(), pid, os.Geteuid())
	_, err = io.Copy(io.Discard, os.Stdin) // until the parent is satisfied
	server.Stop()
	return err
}

type facts struct {
	dir      string
	pid, uid int
}

// startChild runs this binary as a child and returns when it has a server.
func startChild(t *testing.T, how string, attr *syscall.SysProcAttr) (*exec.Cmd, io.Closer, facts) {
	t.Helper()
	cmd := exec.Command(readable(t))
	cmd.Dir = "/"
	cmd.Env = append(os.Environ(), childEnv+"="+how)
	cmd.SysProcAttr = attr
	cmd.Stderr = os.Stderr
	in, err := cmd.StdinPipe()
	if err != nil {
		t.Fatal(err)
	}
	out, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	line, _ := bufio.NewReader(out).ReadString('\n')
	var f facts
	if _, err := fmt.Sscan(line, &f.dir, &f.pid, &f.uid); err != nil {
		t.Fatalf("child says %q: %v", line, err)
	}
	return cmd, in, f
}

// readable copies this binary to where every user can run it.
func readable(t *testing.T) string {
	t.Helper()
	self, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	code, err := os.ReadFile(self)
	if err != nil {
		t.Fatal(err)
	}
	name := filepath.Join(openDir(t), "child")
	if err := os.WriteFile(name, code, 0o755); err != nil {
		t.Fatal(err)
	}
	return name
}

// openDir returns a temporary directory that every user may enter.
func openDir(t *testing.T) string {
	t.Helper()
	dir := t.TempDir()
	for _, d := range []string{dir, filepath.Dir(dir)} {
		if err := os.Chmod(d, 0o755); err != nil {
			t.Fatal(err)
		}
	}
	return dir
}

func start(t *testing.T, options pgserver.Options) *pgserver.Server {
	t.Helper()
	server, err := pgserver.Start(t.Context(), options)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(server.Stop)
	return server
}

// query returns the one value that sql yields.
func query(t *testing.T, server *pgserver.Server, sql string) string {
	t.Helper()
	conn, err := pgx.Connect(t.Context(), server.URL("postgres"))
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close(context.Background())
	rows, err := conn.Query(t.Context(), sql, pgx.QueryExecModeSimpleProtocol)
	if err != nil {
		t.Fatal(err)
	}
	values, err := pgx.CollectRows(rows, pgx.RowTo[string])
	if err != nil {
		t.Fatalf("%s: %v", sql, err)
	}
	return strings.Join(values, " ")
}

// mainPid returns the process id of the server's main process.
func mainPid(server *pgserver.Server) (pid int, err error) {
	lock, err := os.ReadFile(filepath.Join(server.Dir(), "data", "postmaster.pid"))
	if err == nil {
		_, err = fmt.Sscan(string(lock), &pid)
	}
	return pid, err
}

// segment returns the id of the server's shared memory segment.
func segment(t *testing.T, server *pgserver.Server) string {
	t.Helper()
	lock, err := os.ReadFile(filepath.Join(server.Dir(), "data", "postmaster.pid"))
	if err != nil {
		t.Fatal(err)
	}
	return strings.Fields(strings.Split(string(lock), "\n")[6])[1]
}

// segments returns the ids of all shared memory segments.
func segments(t *testing.T) (ids []string) {
	t.Helper()
	list, err := exec.Command("ipcs", "-m").Output()
	if err != nil {
		t.Fatal(err)
	}
	for line := range strings.Lines(string(list)) {
		if words := strings.Fields(line); len(words) > 2 {
			ids = append(ids, words[1])
		}
	}
	return ids
}

func exists(path string) bool {
	_, err := os.Stat(path)
	return err == nil
}

func runs(pid int) bool { return syscall.Kill(pid, 0) == nil }

func await(t *testing.T, what string, cond func() bool) {
	t.Helper()
	tick := time.NewTicker(5 * time.Millisecond)
	defer tick.Stop()
	for deadline := time.Now().Add(10 * time.Second); !cond(); <-tick.C {
		if time.Now().After(deadline) {
			t.Fatalf("not in time: %s", what)
		}
	}
}
