package main

import (
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"sync"
	"syscall"
	"time"
)

// A slot keeps one worker process running: it restarts a process that ends, and strikes it on request.
type slot struct {
	name    string
	program string
	env     []string
	log     *os.File // stderr of the processes
	ledger  *ledger

	mu      sync.Mutex
	random  *rand.Rand // for the time before a restart
	limitKB int        // of memory, for later processes; 0 for no limit
	cmd     *exec.Cmd  // nil while no process runs
	frozen  bool
	expect  string // why the process is about to end, if we caused it
	started bool
	closing bool
	ended   chan struct{} // closed when the slot is empty for good
}

func newSlot(dir, name, program string, env []string, l *ledger, r *rand.Rand) (*slot, error) {
	log, err := os.OpenFile(filepath.Join(dir, name+".log"), os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o644)
	if err != nil {
		return nil, fmt.Errorf("open the log of worker %s: %w", name, err)
	}
	return &slot{name: name, program: program, env: env, log: log, ledger: l, random: r, ended: make(chan struct{})}, nil
}

// start starts the first process.
func (s *slot) start() error {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.started = true
	return s.launch()
}

func (s *slot) launch() error {
	cmd := exec.Command(s.program)
	if s.limitKB > 0 {
		cmd = exec.Command("sh", "-c", fmt.Sprintf("ulimit -d %d; exec %q", s.limitKB, s.program))
	}
	cmd.Env = s.env
	cmd.Stderr, cmd.Stdout = s.log, s.log
	cmd.SysProcAttr = dieWithParent()
	if err := cmd.Start(); err != nil {
		s.started = false
		return fmt.Errorf("start worker %s: %w", s.name, err)
	}
	s.cmd, s.frozen, s.expect = cmd, false, ""
	s.ledger.add(entry{Kind: "start", Worker: s.name, PID: cmd.Process.Pid})
	go s.watch(cmd)
	return nil
}

// watch waits for a process to end and starts the next one.
func (s *slot) watch(cmd *exec.Cmd) {
	err := cmd.Wait()
	s.mu.Lock()
	s.ledger.add(entry{Kind: "exit", Worker: s.name, PID: cmd.Process.Pid, Code: exitCode(err), Answer: s.expect})
	s.cmd = nil
	if s.closing {
		close(s.ended)
		s.mu.Unlock()
		return
	}
	pause := between(s.random, 0, 3*time.Second)
	s.mu.Unlock()
	time.Sleep(pause)
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.closing {
		close(s.ended)
		return
	}
	if err := s.launch(); err != nil {
		fmt.Fprintln(os.Stderr, "torture:", err)
		os.Exit(1)
	}
}

// exitCode is the exit code of the process, or minus the number of the signal that ended it.
func exitCode(err error) int {
	var exit *exec.ExitError
	if !errors.As(err, &exit) {
		return 0
	}
	if status, ok := exit.Sys().(syscall.WaitStatus); ok && status.Signaled() {
		return -int(status.Signal())
	}
	return exit.ExitCode()
}

// kill ends the process at once, even if it is frozen.
func (s *slot) kill() bool { return s.signal(syscall.SIGKILL, "kill") }

// terminate asks the process to stop.
func (s *slot) terminate() bool { return s.signal(syscall.SIGTERM, "terminate") }

// limit gives later processes this much memory; 0 means no limit.
func (s *slot) limit(kb int) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.limitKB = kb
}

// freeze stops the process for a while.
func (s *slot) freeze(d time.Duration) bool { return s.hold(func() { time.Sleep(d) }) }

// hold stops the process for as long as f takes, which may kill it. It returns false, and does not call f, if no process
// runs, or it is stopped or ends already.
func (s *slot) hold(f func()) bool {
	s.mu.Lock()
	cmd := s.cmd
	if cmd == nil || s.frozen || s.expect != "" {
		s.mu.Unlock()
		return false
	}
	s.frozen = true
	_ = cmd.Process.Signal(syscall.SIGSTOP)
	s.mu.Unlock()
	f()
	s.mu.Lock()
	defer s.mu.Unlock()
	_ = cmd.Process.Signal(syscall.SIGCONT)
	if s.cmd == cmd {
		s.frozen = false
	}
	return true
}

// signal sends the process a signal that ends it. It returns false if no process runs.
func (s *slot) signal(sig syscall.Signal, why string) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.cmd == nil || s.frozen && sig != syscall.SIGKILL {
		return false
	}
	s.expect = why
	return s.cmd.Process.Signal(sig) == nil
}

// close ends the slot for good with a signal, and waits until it is empty.
func (s *slot) close(sig syscall.Signal) {
	s.mu.Lock()
	if !s.started {
		s.mu.Unlock()
		return
	}
	s.closing = true
	running := s.cmd != nil
	if running {
		s.expect = "end"
		_ = s.cmd.Process.Signal(syscall.SIGCONT)
		_ = s.cmd.Process.Signal(sig)
	}
	s.mu.Unlock()
	select {
	case <-s.ended:
	case <-time.After(15 * time.Second):
		s.kill()
		<-s.ended
	}
	_ = s.log.Close()
}

// pid is the process id of the running process, or 0.
func (s *slot) pid() int {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.cmd == nil {
		return 0
	}
	return s.cmd.Process.Pid
}
