// Package program is a sink that gives events to a program of one's own: a line in, a line out.
//
// The program is started once and reads events from its standard input, each a line in the
// CloudEvents JSON format. For each it writes a line to its standard output:
//
//	ok ID               it keeps the event
//	retry ID REASON     try again later
//	reject ID REASON    it does not want this one
//
// It may answer in any order, but gets the next event of a subject only after its answer to the one
// before. What it writes to standard error goes to ours. If it ends it is started anew with what it
// has not answered.
package program

import (
	"bufio"
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"strings"
	"sync"
	"time"

	"github.com/cloudevents/sdk-go/v2/event"

	"github.com/simple-workflow/simple-workflow/dispatcher"
)

// answerWithin is how long the program may take over an event.
const answerWithin = 30 * time.Second

// A Sink gives events to a program.
type Sink struct {
	path string
	args []string

	mu      sync.Mutex
	running *process // nil: none
	closed  bool
}

// A process is one life of the program.
type process struct {
	cmd   *exec.Cmd
	write sync.Mutex
	in    io.WriteCloser
	ended chan struct{} // closed when it answers no more

	mu      sync.Mutex
	waiting map[string]chan error // by event id
}

// New returns a sink for a program, which is not started before the first event.
func New(path string, args ...string) (*Sink, error) {
	found, err := exec.LookPath(path)
	if err != nil {
		return nil, fmt.Errorf("program %q cannot be started: %w", path, err)
	}
	return &Sink{path: found, args: args}, nil
}

// Publish gives the events to the program.
func (s *Sink) Publish(ctx context.Context, events []event.Event) []error {
	p, err := s.process()
	if err != nil {
		errs := make([]error, len(events))
		for k := range errs {
			errs[k] = dispatcher.Unavailable(err, 0)
		}
		return errs
	}
	return dispatcher.BySubject(ctx, events, 64, p.give)
}

// Close ends the program: its input ends, and if it does not end with it, it is killed.
func (s *Sink) Close() error {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.closed = true
	if p := s.running; p != nil {
		_ = p.in.Close()
		select {
		case <-p.ended:
		case <-time.After(5 * time.Second):
			_ = p.cmd.Process.Kill()
			<-p.ended
		}
	}
	return nil
}

// process returns the running program, started if need be.
func (s *Sink) process() (*process, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.closed {
		return nil, errors.New("the sink is closed")
	}
	if s.running != nil {
		select {
		case <-s.running.ended:
		default:
			return s.running, nil
		}
	}
	cmd := exec.Command(s.path, s.args...)
	cmd.Stderr = os.Stderr
	in, err := cmd.StdinPipe()
	if err != nil {
		return nil, err
	}
	out, err := cmd.StdoutPipe()
	if err != nil {
		return nil, err
	}
	if err := cmd.Start(); err != nil {
		return nil, err
	}
	p := &process{cmd: cmd, in: in, ended: make(chan struct{}), waiting: map[string]chan error{}}
	go p.listen(out)
	s.running = p
	return p, nil
}

// give gives the program an event and waits for its answer.
func (p *process) give(ctx context.Context, e event.Event) error {
	var line bytes.Buffer
	if err := event.WriteJson(&e, &line); err != nil {
		return dispatcher.RejectForGood(err)
	}
	line.WriteByte('\n')
	answer := make(chan error, 1)
	p.mu.Lock()
	p.waiting[e.ID()] = answer
	p.mu.Unlock()
	defer func() {
		p.mu.Lock()
		delete(p.waiting, e.ID())
		p.mu.Unlock()
	}()
	written := make(chan error, 1)
	go func() { // a program that does not read keeps the pipe full
		p.write.Lock()
		defer p.write.Unlock()
		_, err := p.in.Write(line.Bytes())
		written <- err
	}()
	late := time.NewTimer(answerWithin)
	defer late.Stop()
	for {
		select {
		case err := <-answer:
			return err
		case err := <-written:
			if err != nil {
				return dispatcher.Unavailable(fmt.Errorf("the program does not read: %w", err), 0)
			}
			written = nil
		case <-p.ended:
			return errors.New("the program ended before it answered")
		case <-late.C:
			_ = p.cmd.Process.Kill() // what it answers later must not be taken for the answer to another try
			return fmt.Errorf("the program did not answer within %s", answerWithin)
		case <-ctx.Done():
			return dispatcher.ErrNotTried
		}
	}
}

// listen takes answers until there are no more.
func (p *process) listen(out io.Reader) {
	lines := bufio.NewScanner(out)
	for lines.Scan() {
		word, rest, _ := strings.Cut(lines.Text(), " ")
		id, reason, _ := strings.Cut(rest, " ")
		var err error
		switch word {
		case "ok":
		case "retry":
			err = fmt.Errorf("the program: %s", reason)
		case "reject":
			err = dispatcher.Reject(fmt.Errorf("the program: %s", reason))
		default:
			continue // it talks to itself
		}
		p.mu.Lock()
		answer := p.waiting[id]
		delete(p.waiting, id)
		p.mu.Unlock()
		if answer != nil {
			answer <- err
		}
	}
	_ = p.in.Close()
	_ = p.cmd.Wait()
	close(p.ended)
}
