package main

import (
	"bufio"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"strings"
	"sync"
	"sync/atomic"
	"time"
)

// self is the path of this program.
func self() string {
	path, err := os.Executable()
	if err != nil {
		panic(err) // this program is running
	}
	return path
}

// A process is a child that executes a task.
type process struct {
	command         *exec.Cmd
	in              io.WriteCloser
	foreground, all atomic.Int64
	ready           chan struct{}
	done            chan map[string]float64 // receives the facts of its done line
	ended           chan struct{}

	mu   sync.Mutex
	seen map[int]int64 // when runs with n < -1 were seen
}

// processes execute the same task together.
type processes []*process

// start starts n processes and returns when all are ready.
func start(e engine, t task, n int) (ps processes, err error) {
	t.Engine = e.name()
	for range n {
		p, err := launch(e.process(t))
		if err != nil {
			return nil, errors.Join(err, ps.stop())
		}
		ps = append(ps, p)
	}
	limit := time.After(30 * time.Second)
	for _, p := range ps {
		select {
		case <-p.ready:
		case <-p.ended:
			return nil, errors.Join(fmt.Errorf("a process of %s ended before it was ready", e.name()), ps.stop())
		case <-limit:
			return nil, errors.Join(fmt.Errorf("a process of %s does not get ready", e.name()), ps.stop())
		}
	}
	return ps, nil
}

func launch(command *exec.Cmd) (*process, error) {
	p := &process{command: command, ready: make(chan struct{}), done: make(chan map[string]float64, 1),
		ended: make(chan struct{}), seen: map[int]int64{}}
	command.Stderr = os.Stderr
	var err error
	if p.in, err = command.StdinPipe(); err != nil {
		return nil, err
	}
	out, err := command.StdoutPipe()
	if err != nil {
		return nil, err
	}
	if err := command.Start(); err != nil {
		return nil, err
	}
	go p.hear(out)
	return p, nil
}

// hear records what the child says, until its output ends.
func (p *process) hear(out io.Reader) {
	defer close(p.ended)
	lines := bufio.NewScanner(out)
	for lines.Scan() {
		word, rest, _ := strings.Cut(lines.Text(), " ")
		var a, b int64
		switch word {
		case "ready":
			close(p.ready)
		case "handled":
			if _, err := fmt.Sscan(rest, &a, &b); err == nil {
				p.foreground.Store(a)
				p.all.Store(b)
			}
		case "seen":
			if _, err := fmt.Sscan(rest, &a, &b); err == nil {
				p.mu.Lock()
				p.seen[int(a)] = b
				p.mu.Unlock()
			}
		case "done":
			facts := map[string]float64{}
			if json.Unmarshal([]byte(rest), &facts) == nil {
				p.done <- facts
			}
		}
	}
}

// say sends a word to all processes. A process that has ended is noticed later, when it does not answer.
func (ps processes) say(word string) {
	for _, p := range ps {
		_, _ = fmt.Fprintln(p.in, word)
	}
}

// handled returns how many runs handlers have seen: of the foreground, and of all.
func (ps processes) handled() (foreground, all int64) {
	for _, p := range ps {
		foreground += p.foreground.Load()
		all += p.all.Load()
	}
	return foreground, all
}

// seenAt returns when a handler saw the run with payload n, or 0 if none did.
func (ps processes) seenAt(n int) (at int64) {
	for _, p := range ps {
		p.mu.Lock()
		if t := p.seen[n]; t > 0 {
			at = t
		}
		p.mu.Unlock()
	}
	return at
}

// alive returns an error if a process has ended unexpectedly.
func (ps processes) alive() error {
	for _, p := range ps {
		select {
		case <-p.ended:
			return errors.New("a child process has ended by itself")
		default:
		}
	}
	return nil
}

// kill ends the process with SIGKILL.
func (p *process) kill() error {
	if err := p.command.Process.Kill(); err != nil {
		return err
	}
	<-p.ended
	_ = p.command.Wait() // it was killed
	return nil
}

// stop ends the processes, and kills them if they take too long.
func (ps processes) stop() error {
	var errs []error
	for _, p := range ps {
		_ = p.in.Close() // the process may have ended
	}
	for _, p := range ps {
		kill := time.AfterFunc(15*time.Second, func() { _ = p.command.Process.Kill() })
		<-p.ended
		if err := p.command.Wait(); err != nil {
			errs = append(errs, fmt.Errorf("%s: %w", p.command.Path, err))
		}
		kill.Stop()
	}
	return errors.Join(errs...)
}
