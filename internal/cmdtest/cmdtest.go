// Package cmdtest builds the programs and runs them as processes, for tests.
package cmdtest

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"
)

// patience is how long Wait and AwaitLog wait before they fail the test.
const patience = 30 * time.Second

// quickExit spares the second that a program with the race detector sleeps before it exits with success. Other programs
// take no notice.
const quickExit = "GORACE=atexit_sleep_ms=0"

var program string

// Main builds the program of the current directory, runs the tests, and exits.
func Main(m *testing.M) {
	os.Exit(func() int {
		dir, err := os.MkdirTemp("", "cmdtest")
		if err != nil {
			fmt.Fprintln(os.Stderr, err)
			return 1
		}
		defer os.RemoveAll(dir)
		program = filepath.Join(dir, "program")
		args := []string{"build", "-o", program}
		if raceDetector {
			args = append(args, "-race")
		}
		if out, err := exec.Command("go", append(args, ".")...).CombinedOutput(); err != nil {
			fmt.Fprintf(os.Stderr, "build: %v\n%s", err, out)
			return 1
		}
		return m.Run()
	}())
}

// A Process is a running program.
type Process struct {
	t      testing.TB
	cmd    *exec.Cmd
	Stdout Text
	Stderr Text
	exited chan struct{}
}

// Start starts the program with only env as its environment. When t ends, it kills the program if it still runs.
func Start(t testing.TB, env []string, args ...string) *Process {
	t.Helper()
	return StartProgram(t, program, env, args...)
}

// StartProgram is Start for another program than that of the current directory.
func StartProgram(t testing.TB, path string, env []string, args ...string) *Process {
	t.Helper()
	p := &Process{t: t}
	p.start(path, nil, &p.Stdout, env, args)
	return p
}

// StartTo is Start with standard output sent to a file.
func StartTo(t testing.TB, stdout *os.File, env []string, args ...string) *Process {
	t.Helper()
	p := &Process{t: t}
	p.start(program, nil, stdout, env, args)
	return p
}

// StartAt is Start at a terminal, which becomes the program's standard input and output.
func StartAt(t testing.TB, terminal *os.File, env []string, args ...string) *Process {
	t.Helper()
	p := &Process{t: t}
	p.start(program, terminal, terminal, env, args)
	return p
}

func (p *Process) start(path string, stdin io.Reader, stdout io.Writer, env, args []string) {
	p.t.Helper()
	t := p.t
	ctx, cancel := context.WithCancel(context.Background())
	p.cmd, p.exited = exec.CommandContext(ctx, path, args...), make(chan struct{})
	p.cmd.Env = append([]string{"PATH=" + os.Getenv("PATH"), "HOME=" + t.TempDir(), quickExit}, env...)
	p.cmd.Stdin, p.cmd.Stdout, p.cmd.Stderr = stdin, stdout, &p.Stderr
	p.cmd.WaitDelay = time.Second
	if err := p.cmd.Start(); err != nil {
		cancel()
		t.Fatal(err)
	}
	go func() { _ = p.cmd.Wait(); close(p.exited) }()
	t.Cleanup(func() {
		cancel()
		<-p.exited
		if t.Failed() {
			t.Logf("stderr of %v:\n%s", args, p.Stderr.String())
		}
	})
}

// Run starts the program and returns when it has ended, with its exit code.
func Run(t testing.TB, env []string, args ...string) (p *Process, code int) {
	t.Helper()
	p = Start(t, env, args...)
	return p, p.Wait()
}

// Wait returns the exit code once the program has ended.
func (p *Process) Wait() int {
	p.t.Helper()
	select {
	case <-p.exited:
	case <-time.After(patience):
		p.t.Fatal("the program does not end")
	}
	return p.cmd.ProcessState.ExitCode()
}

// Running reports whether the program has not ended.
func (p *Process) Running() bool {
	select {
	case <-p.exited:
		return false
	default:
		return true
	}
}

// Signal sends the program a signal.
func (p *Process) Signal(s syscall.Signal) {
	p.t.Helper()
	if err := p.cmd.Process.Signal(s); err != nil {
		p.t.Fatal(err)
	}
}

// AwaitLog returns when stderr contains text.
func (p *Process) AwaitLog(text string) {
	p.t.Helper()
	tick := time.NewTicker(3 * time.Millisecond)
	defer tick.Stop()
	for deadline := time.Now().Add(patience); ; <-tick.C {
		ended := !p.Running() // asked first, so that its last output is not missed
		switch {
		case strings.Contains(p.Stderr.String(), text):
			return
		case ended, time.Now().After(deadline):
			p.t.Fatalf("the program did not say %q:\n%s", text, p.Stderr.String())
		}
	}
}

// Text is output that can be read while it is written.
type Text struct {
	mu     sync.Mutex
	buffer bytes.Buffer
}

func (o *Text) Write(data []byte) (int, error) {
	o.mu.Lock()
	defer o.mu.Unlock()
	return o.buffer.Write(data)
}

// String returns everything written so far.
func (o *Text) String() string {
	o.mu.Lock()
	defer o.mu.Unlock()
	return o.buffer.String()
}

// Trap listens at an address that stands for a database, and counts connections.
func Trap(t testing.TB) (hostPort string, connections func() int) {
	t.Helper()
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = listener.Close() })
	var count atomic.Int64
	go func() {
		for {
			conn, err := listener.Accept()
			if errors.Is(err, net.ErrClosed) {
				return
			}
			count.Add(1)
			_, _ = io.WriteString(conn, "this is no database\n")
			_ = conn.Close()
		}
	}()
	return listener.Addr().String(), func() int { return int(count.Load()) }
}
