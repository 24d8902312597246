package main

import (
	"bytes"
	"errors"
	"os"
	"os/exec"
	"regexp"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/simple-workflow/simple-workflow/internal/pgserver"
	"github.com/simple-workflow/simple-workflow/internal/pgtest"
)

// mainEnv makes this test binary behave as the program.
const mainEnv = "DEMO_TEST_MAIN"

func TestMain(m *testing.M) {
	if os.Getenv(mainEnv) != "" {
		main()
		return
	}
	os.Exit(m.Run())
}

// A program is the demo as a process, and its output.
type program struct {
	*exec.Cmd
	tmp string
	mu  sync.Mutex
	out bytes.Buffer
}

func (p *program) Write(text []byte) (int, error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.out.Write(text)
}

func (p *program) output() string {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.out.String()
}

// start runs the demo without a terminal, on a server of its own unless database is given. The exported DATABASE_URL
// leads nowhere.
func start(t *testing.T, database string) *program {
	t.Helper()
	p := &program{Cmd: exec.Command(os.Args[0]), tmp: t.TempDir()}
	p.Env = append(os.Environ(), mainEnv+"=1", "TMPDIR="+p.tmp, "DEMO_DATABASE_URL="+database,
		"DATABASE_URL=postgres://nobody@127.0.0.1:1/nowhere")
	p.Stdout, p.Stderr = p, p
	if err := p.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		_ = p.Process.Signal(syscall.SIGTERM) // it has usually ended
		_ = p.Wait()
	})
	return p
}

// nothingLeft fails t if a worker still runs, or a file is left.
func (p *program) nothingLeft(t *testing.T, workers int) {
	t.Helper()
	started := regexp.MustCompile(`(?m)^started .* pid (\d+)`).FindAllStringSubmatch(p.output(), -1)
	if len(started) != workers {
		t.Errorf("%d workers and dispatchers were started, want %d", len(started), workers)
	}
	for _, match := range started {
		pid, err := strconv.Atoi(match[1])
		if err != nil {
			t.Fatal(err)
		}
		if err := syscall.Kill(pid, 0); !errors.Is(err, syscall.ESRCH) {
			t.Errorf("process %d is still there: %v", pid, err)
		}
	}
	files, err := os.ReadDir(p.tmp)
	if err != nil {
		t.Fatal(err)
	}
	if len(files) > 0 {
		t.Errorf("files are left: %v", files)
	}
}

// The demo runs from start to end: nothing is lost although a worker is killed, its last line says so, and it leaves
// nothing behind.
func TestDemo(t *testing.T) {
	database := ""
	if _, err := pgserver.BinDir(); err != nil {
		database = pgtest.Empty(t)
	}
	begin := time.Now()
	p := start(t, database)
	err := p.Wait()
	t.Logf("after %s:\n%s", time.Since(begin).Round(time.Second), p.output())
	if err != nil {
		t.Fatal(err)
	}
	lines := strings.Split(strings.TrimSpace(p.output()), "\n")
	last := regexp.MustCompile(`^demo: (\d+) runs enqueued, (\d+) succeeded, 0 lost$`).FindStringSubmatch(lines[len(lines)-1])
	if last == nil || last[1] != last[2] {
		t.Errorf("last line: %s", lines[len(lines)-1])
	}
	for _, row := range []string{`recovered from killed media-1 +[1-3]`, `retried after an error +[1-9]`, `arrived as CloudEvents +[1-9]`,
		`collected +80`, `recovered from killed parcel-1 +[1-9]`, `process_without_mover +0`, `process_misrecorded +0`, `(?m)^flowchart TD$`, `(?m)^  class n.* undone$`} {
		if !regexp.MustCompile(row).MatchString(p.output()) {
			t.Errorf("no row like %s", row)
		}
	}
	p.nothingLeft(t, 9)
}

// An interrupted demo ends everything it has started, removes what it has written, and says that it did not finish.
func TestInterrupt(t *testing.T) {
	database := pgtest.Empty(t)
	p := start(t, database)
	pgtest.Await(t, "runs are enqueued", func() bool {
		out := p.output()
		if strings.Contains(out, "\ndemo: ") || strings.HasPrefix(out, "demo: ") {
			t.Fatalf("it ended too early:\n%s", out)
		}
		return strings.Contains(out, "\nenqueued ")
	})
	if err := p.Process.Signal(syscall.SIGINT); err != nil {
		t.Fatal(err)
	}
	var exit *exec.ExitError
	if err := p.Wait(); !errors.As(err, &exit) || exit.ExitCode() != 1 || !strings.HasSuffix(p.output(), "demo: interrupted\n") {
		t.Errorf("ended with %v:\n%s", err, p.output())
	}
	p.nothingLeft(t, 5)
	conn, err := pgx.Connect(t.Context(), database)
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close(t.Context())
	var schemas int
	if err := conn.QueryRow(t.Context(), `SELECT count(*) FROM pg_namespace WHERE nspname LIKE 'demo%'`).Scan(&schemas); err != nil {
		t.Fatal(err)
	}
	if schemas != 0 {
		t.Errorf("%d schemas are left", schemas)
	}
}
