// Package program is a sink that passes events to a program of yours: a line in, a line out.
//
// The program is started once and reads events from its standard input, each a line in the
// CloudEvents JSON format. For each it writes a line to its standard output:
//
//	ok ID               the event is acknowledged
//	retry ID REASON     try again later
//	reject ID REASON    the event is rejected
//
// The program may answer in any order, but gets the next event of a subject only after it has answered the
// previous one. Its standard error is the dispatcher's. If it exits, it is started again and gets the
// events that it has not answered again.
//
// To stop the program, the sink closes its standard input. Its environment consists of the configured variables
// and PATH, HOME, LANG, TZ and TMPDIR.
package program

import (
	"bufio"
	"bytes"
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/cloudevents/sdk-go/v2/event"

	"github.com/simple-workflow/simple-workflow/dispatcher"
	"github.com/simple-workflow/simple-workflow/internal/shipped"
)

// maxLine is the most bytes of an answer.
const maxLine = 1 << 20

// A Config configures a sink. Path is required.
type Config struct {
	Path     string // a path, or a name that is looked up in PATH
	Args     []string
	Env      []string      // NAME=value
	AtOnce   int           // most events that the program has not answered yet, for each batch; 0: 16
	Patience time.Duration // the program is killed if it owes answers and gives none for so long; 0: 30 s
	Grace    time.Duration // how long the program may take to exit once its input is closed; 0: 5 s
}

// A sink passes events to a program.
type sink struct {
	config Config

	mu      sync.Mutex
	running *process // nil: none
	closed  bool
}

// A process is one execution of the program.
type process struct {
	config Config
	cmd    *exec.Cmd
	write  sync.Mutex
	in     io.WriteCloser
	ended  chan struct{} // closed when no more answers can arrive

	mu       sync.Mutex
	waiting  map[string]chan error // by event id
	answered time.Time             // when the program last answered
}

// New returns a sink for a program, or an error if the program is not found. The program is started with the first
// event.
func New(c Config) (dispatcher.Sink, error) {
	found, err := exec.LookPath(c.Path)
	if err != nil {
		return nil, fmt.Errorf("program %q cannot be started: %w", c.Path, err)
	}
	c.Path = found
	c.AtOnce, c.Patience, c.Grace = cmp.Or(c.AtOnce, shipped.ProgramAtOnce), cmp.Or(c.Patience, shipped.ProgramPatience), cmp.Or(c.Grace, shipped.ProgramGrace)
	return &sink{config: c}, nil
}

// Publish passes the events to the program and waits for its answers.
func (s *sink) Publish(ctx context.Context, events []event.Event) []error {
	p, err := s.process()
	if err != nil {
		return slices.Repeat([]error{dispatcher.Unavailable(err, 0)}, len(events))
	}
	return dispatcher.BySubject(ctx, events, s.config.AtOnce, p.give)
}

// Close stops the program: it closes its input, and kills it if it has not exited within Config.Grace.
func (s *sink) Close() error {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.closed = true
	if p := s.running; p != nil {
		_ = p.in.Close()
		select {
		case <-p.ended:
		case <-time.After(p.config.Grace):
			p.kill()
			<-p.ended
		}
	}
	return nil
}

// process returns the running program. It starts the program if it is not running.
func (s *sink) process() (*process, error) {
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
	cmd := exec.Command(s.config.Path, s.config.Args...)
	cmd.Env = append(inherited(), s.config.Env...)
	cmd.Stderr = os.Stderr
	ownGroup(cmd)
	in, err := cmd.StdinPipe()
	if err != nil {
		return nil, err
	}
	// os.Pipe rather than StdoutPipe: a child that outlives the program may keep the pipe open for ever.
	out, theirs, err := os.Pipe()
	if err != nil {
		return nil, err
	}
	cmd.Stdout = theirs
	err = cmd.Start()
	_ = theirs.Close()
	if err != nil {
		_ = out.Close()
		return nil, err
	}
	p := &process{cmd: cmd, config: s.config, in: in, ended: make(chan struct{}), waiting: map[string]chan error{}}
	go p.listen(out)
	s.running = p
	return p, nil
}

// inherited returns the variables that a program inherits. It does not get the whole environment, which holds secrets.
func inherited() (env []string) {
	for _, name := range []string{"PATH", "HOME", "LANG", "TZ", "TMPDIR"} {
		if value, ok := os.LookupEnv(name); ok {
			env = append(env, name+"="+value)
		}
	}
	return env
}

// give passes an event to the program and waits for its answer.
func (p *process) give(ctx context.Context, e event.Event) error {
	select {
	case <-p.ended: // another event of the batch may have ended the program; this one is not charged
		return dispatcher.ErrNotTried
	default:
	}
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
	go func() { // the write blocks if the program does not read
		p.write.Lock()
		defer p.write.Unlock()
		_, err := p.in.Write(line.Bytes())
		written <- err
	}()
	begun, sent := time.Now(), false
	late := time.NewTimer(p.config.Patience)
	defer late.Stop()
	for {
		select {
		case err := <-answer:
			return err
		case err := <-written:
			if err != nil {
				return dispatcher.Unavailable(fmt.Errorf("the program does not read: %w", err), 0)
			}
			written, sent = nil, true
		case <-p.ended:
			select {
			case err := <-answer: // answered just before it ended
				return err
			default:
			}
			if !sent {
				return dispatcher.ErrNotTried
			}
			return errors.New("the program ended before it answered")
		case <-late.C:
			if left := p.config.Patience - time.Since(p.progress(begun)); left > 0 {
				late.Reset(left) // it still answers other events
				continue
			}
			p.kill() // a late answer must not be taken for the answer to a later attempt
			return fmt.Errorf("the program has answered nothing for %s", p.config.Patience)
		case <-ctx.Done():
			return dispatcher.ErrNotTried
		}
	}
}

// progress returns when the program last answered, or begun if that is later.
func (p *process) progress(begun time.Time) time.Time {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.answered.After(begun) {
		return p.answered
	}
	return begun
}

func (p *process) kill() { killGroup(p.cmd) }

// listen reads answers until no more can arrive.
func (p *process) listen(out *os.File) {
	exited := make(chan struct{})
	go func() {
		defer close(exited)
		_ = p.cmd.Wait()
		_ = out.SetReadDeadline(time.Now().Add(time.Second)) // time to read what it has written
	}()
	lines := bufio.NewScanner(out)
	lines.Buffer(nil, maxLine)
	for lines.Scan() {
		p.take(lines.Text())
	}
	_ = p.in.Close()
	if lines.Err() != nil {
		p.kill() // its line is too long for an answer, and it would block
	}
	select {
	case <-exited:
	case <-time.After(p.config.Grace): // it can answer no more
		p.kill()
		<-exited
	}
	_ = out.Close()
	close(p.ended)
}

// take handles one line of the program's output. It ignores lines that are not answers.
func (p *process) take(line string) {
	word, rest, _ := strings.Cut(strings.TrimSpace(line), " ")
	id, reason, _ := strings.Cut(rest, " ")
	var err error
	switch word {
	case "ok":
	case "retry":
		err = fmt.Errorf("the program: %s", reason)
	case "reject":
		err = dispatcher.Reject(fmt.Errorf("the program: %s", reason))
	default:
		return // not an answer
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	p.answered = time.Now()
	if answer := p.waiting[id]; answer != nil {
		delete(p.waiting, id)
		answer <- err
	}
}
