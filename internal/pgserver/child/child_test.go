package child_test

import (
	"bytes"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/simple-workflow/simple-workflow/internal/pgserver/child"
)

func start(t *testing.T, c child.Command) (p *child.Process, dir string) {
	t.Helper()
	dir, err := child.TempDir("child-test-")
	if err != nil {
		t.Fatal(err)
	}
	c.Path, c.Dir = "/bin/sh", dir
	p, err = child.Start(c)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = os.RemoveAll(dir) })
	t.Cleanup(p.End)
	return p, dir
}

// Release of a program that ended on its own returns an error that says how. The program does not see this process's
// environment.
func TestRelease(t *testing.T) {
	t.Setenv("SECRET", "told")
	var out bytes.Buffer
	p, _ := start(t, child.Command{Args: []string{"-c", "echo secret $SECRET; exit 3"}, Output: &out})
	p.Gone(0)
	if err := p.Release(); err == nil || !strings.Contains(err.Error(), "exit status 3") {
		t.Errorf("err = %v, want exit status 3", err)
	}
	if got := out.String(); got != "secret\n" {
		t.Errorf("output = %q", got)
	}
}

// Gone waits for all processes of a program, not only for the first.
func TestGone(t *testing.T) {
	p, dir := start(t, child.Command{Args: []string{"-c", "(trap '' TERM; : >ready; while [ ! -e end ]; do sleep 0.01; done) & wait"}})
	for _, err := os.Stat(filepath.Join(dir, "ready")); err != nil; _, err = os.Stat(filepath.Join(dir, "ready")) {
		if p.Gone(10 * time.Millisecond) {
			t.Fatal("it is gone before it was told to")
		}
	}
	p.Signal(syscall.SIGTERM)
	if p.Gone(50 * time.Millisecond) {
		t.Error("the second process is overlooked")
	}
	if err := os.WriteFile(filepath.Join(dir, "end"), nil, 0o644); err != nil {
		t.Fatal(err)
	}
	if !p.Gone(10 * time.Second) {
		t.Error("it is not gone after its end")
	}
}

// End ends a program that ignores signals, and runs the commands of After.
func TestEnd(t *testing.T) {
	done := filepath.Join(t.TempDir(), "done")
	if err := os.Chmod(filepath.Dir(done), 0o777); err != nil {
		t.Fatal(err)
	}
	if err := os.Chmod(filepath.Dir(filepath.Dir(done)), 0o755); err != nil {
		t.Fatal(err)
	}
	p, _ := start(t, child.Command{
		Args:  []string{"-c", "trap '' INT TERM QUIT; while :; do sleep 0.01; done"},
		After: "touch " + done,
	})
	p.End()
	if syscall.Kill(p.Pid(), 0) == nil {
		t.Error("it still runs")
	}
	if _, err := os.Stat(done); err != nil {
		t.Error(err)
	}
}
