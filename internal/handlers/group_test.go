package handlers_test

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/simple-workflow/simple-workflow/internal/settling"
	"github.com/simple-workflow/simple-workflow/run"
)

// A witness tells whether processes live: it is a named pipe that they hold open on
// descriptor 3, the first says "here", and it ends once the last of them is gone.
type witness struct {
	path string
	pipe chan *os.File
}

func newWitness(t *testing.T) *witness {
	t.Helper()
	w := &witness{filepath.Join(t.TempDir(), "witness"), make(chan *os.File, 1)}
	if err := syscall.Mkfifo(w.path, 0o600); err != nil {
		t.Fatal(err)
	}
	go func() {
		f, err := os.Open(w.path) // waits for a process to open it, too
		if err == nil {
			_, err = io.ReadFull(f, make([]byte, len("here\n")))
		}
		if err != nil {
			t.Errorf("no process came: %v", err)
		}
		w.pipe <- f
	}()
	return w
}

// gone checks that no holder is left.
func (w *witness) gone(t *testing.T) {
	t.Helper()
	f := <-w.pipe
	defer f.Close()
	_ = f.SetReadDeadline(time.Now().Add(5 * time.Second))
	if _, err := io.ReadAll(f); err != nil {
		t.Errorf("a process still lives: %v", err)
	}
}

// alive waits until a process has said so.
func (w *witness) alive() {
	f := <-w.pipe
	w.pipe <- f
}

// stop runs lines until their witness is there, ends the context and returns what comes of
// it and how long that took.
func stop(t *testing.T, lines string, grace time.Duration) (w *witness, took time.Duration, err error) {
	t.Helper()
	w = newWitness(t)
	b := load(t, "media.: {program: "+script(t, lines)+", env: [W="+w.path+"]}")
	b.SetPatience(grace)
	ctx, cancel := context.WithCancelCause(t.Context())
	var ended time.Time
	go func() {
		w.alive()
		ended = time.Now()
		cancel(run.ErrDeadline)
	}()
	got, err := callContext(ctx, b.Handler(nil), "{}")
	if got != "" {
		t.Errorf("result = %q", got)
	}
	want(t, err, false, "")
	if !errors.Is(err, run.ErrDeadline) {
		t.Errorf("error = %v, want the context's cause", err)
	}
	return w, time.Since(ended), err
}

// When its context ends, a program gets SIGTERM and may clean up; that it then exits with 0
// and a result does not make the attempt a success.
func TestStopPolitely(t *testing.T) {
	w, _, err := stop(t, `trap 'echo cleaned up >&2; echo "{}"; exit 0' TERM; exec 3>"$W"; echo here >&3; while :; do sleep 0.05; done`, time.Minute)
	w.gone(t)
	want(t, err, false, "", "stopped: run: time limit exceeded: cleaned up")
}

// SIGTERM goes to the whole group, and the children of a program that dies of it may still
// clean up.
func TestStopGroup(t *testing.T) {
	done := filepath.Join(t.TempDir(), "done")
	w, took, _ := stop(t, `
sh -c 'trap "sleep 0.2; touch `+done+`; exit" TERM; exec 3>"$W"; echo here >&3; while :; do sleep 0.05; done' &
wait`, time.Minute)
	w.gone(t)
	if _, err := os.Stat(done); err != nil {
		t.Errorf("the child could not clean up: %v", err)
	}
	if took > 30*time.Second {
		t.Errorf("waited %s for a group that was gone", took)
	}
}

// What ignores SIGTERM is killed once the time of grace is over: the program, its child and
// its grandchild.
func TestStopStubborn(t *testing.T) {
	w, took, err := stop(t, `
trap '' TERM
exec 3>"$W"
sh -c 'sh -c "while :; do sleep 1; done" & while :; do sleep 1; done' &
echo here >&3
while :; do sleep 1; done`, 300*time.Millisecond)
	w.gone(t)
	want(t, err, false, "", "stopped: run: time limit exceeded")
	if took < 300*time.Millisecond || took > 4*time.Second {
		t.Errorf("took %s", took)
	}
}

// What a program leaves behind when it is done goes with it, and does not keep its run
// waiting, be it for stdout or for stdin.
func TestLeftBehind(t *testing.T) {
	for _, leave := range []string{"sleep 600 &", "trap '' TERM; sleep 600 >/dev/null 2>&1 &", "sleep 600 <&0 &"} {
		for end, permanent := range map[string]bool{`echo '{"a":1}'`: false, "exit 65": true} {
			w := newWitness(t)
			path := script(t, `exec 3>"$W"; echo here >&3; `+leave+" "+end)
			begin := time.Now()
			got, err := call(t, handler(t, "media.: {program: "+path+", env: [W="+w.path+"]}"), `"`+strings.Repeat("x", 250_000)+`"`)
			w.gone(t)
			if permanent {
				want(t, err, true, "", "exit status 65")
			} else if got != `{"a":1}` || err != nil {
				t.Errorf("result = %q, %v", got, err)
			}
			if took := time.Since(begin); took > 5*time.Second {
				t.Errorf("took %s", took)
			}
		}
	}
}

// A program over its limit takes its children along.
func TestLimitKillsGroup(t *testing.T) {
	w := newWitness(t)
	path := script(t, `exec 3>"$W"; echo here >&3; sleep 600 & while :; do echo xxxxxxxx; done`)
	_, err := call(t, handler(t, "media.: {program: "+path+", max_result_bytes: 10, env: [W="+w.path+"]}"), "{}")
	want(t, err, true, settling.CodeResult)
	w.gone(t)
}

// A process that leaves the group to outlive it can hold stdout open, but the run no longer
// than a moment.
func TestEscaped(t *testing.T) {
	begin := time.Now()
	got, err := call(t, handler(t, fmt.Sprintf("media.: {program: %q, env: [ACT=escape]}", os.Args[0])), "{}")
	if err != nil {
		t.Fatal(err)
	}
	pid, err := strconv.Atoi(got)
	if err != nil {
		t.Fatal(err)
	}
	if err := syscall.Kill(pid, syscall.SIGKILL); err != nil {
		t.Errorf("the process did not escape, the test shows nothing: %v", err)
	}
	if took := time.Since(begin); took > 5*time.Second {
		t.Errorf("took %s", took)
	}
}

// A run whose context has ended starts nothing.
func TestNotStarted(t *testing.T) {
	marker := filepath.Join(t.TempDir(), "marker")
	ctx, cancel := context.WithCancelCause(t.Context())
	cancel(run.ErrShutdown)
	_, err := callContext(ctx, handler(t, "media.: {program: "+script(t, "touch "+marker)+"}"), "{}")
	if !errors.Is(err, run.ErrShutdown) {
		t.Errorf("error = %v", err)
	}
	if _, err := os.Stat(marker); err == nil {
		t.Error("the program was started")
	}
}
