package handlers

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"os/exec"
	"time"

	jsonv2 "github.com/go-json-experiment/json"

	"github.com/simple-workflow/simple-workflow/internal/shipped"
	"github.com/simple-workflow/simple-workflow/internal/told"
	"github.com/simple-workflow/simple-workflow/run"
	"github.com/simple-workflow/simple-workflow/worker"
)

// Exit codes with a meaning of their own, from sysexits.h. After all others the run is retried.
const (
	exitUsage  = 64
	exitData   = 65
	exitTemp   = 75 // EX_TEMPFAIL: a service that the program needs is out of reach
	exitConfig = 78
)

// exitElsewhere hands the run on, as HTTP status 202 does.
const exitElsewhere = 202

func (p *program) handler(log *slog.Logger) worker.Handler {
	return func(ctx context.Context, payload json.RawMessage) (json.RawMessage, error) {
		if ctx.Err() != nil {
			return nil, fmt.Errorf("%s: not started: %w", p, context.Cause(ctx))
		}
		return p.execute(ctx, payload, log)
	}
}

// execute starts the program, and waits until it and its process group are gone.
func (p *program) execute(ctx context.Context, payload json.RawMessage, log *slog.Logger) (json.RawMessage, error) {
	info := run.FromContext(ctx)
	cmd := exec.Command(p.path, p.args...)
	token, _ := worker.Token(ctx) // empty outside of a worker
	masked := p.secrets.with(token)
	cmd.Env, cmd.Dir = p.environment(info, token), p.dir
	stdout := &capture{limit: p.limit, full: make(chan struct{})}
	stderr := &tail{secrets: masked}
	if log.Enabled(ctx, slog.LevelDebug) {
		stderr.emit = func(text string) {
			log.DebugContext(ctx, "program wrote to stderr", "run", info.ID, "type", info.Type, "line", text)
		}
	}
	c, err := start(cmd, payload, stdout, stderr)
	if err != nil {
		return nil, fmt.Errorf("%s: %w", p, err)
	}
	state, stopped := c.wait(ctx, p.grace)
	stderr.flush()
	switch err := p.failure(state, stopped, stdout.over); {
	case err == nil:
	case stopped != nil, stdout.over:
		return nil, p.report(err, stderr)
	case state.ExitCode() == exitElsewhere:
		return nil, p.handedOn(stdout.data)
	default:
		said := told.By(stdout.data)
		if said.Message != "" {
			err = fmt.Errorf("%w: %s", err, line(masked.mask(said.Message), maxExcerpt))
		}
		return nil, said.Apply(p.report(err, stderr), atOnce(state), state.ExitCode() == exitTemp)
	}
	data, err := result(stdout.data)
	if err != nil {
		return nil, p.report(err, stderr)
	}
	return data, nil
}

// handedOn returns the error that hands the run on. The program's output may say for how long.
func (p *program) handedOn(answer []byte) error {
	var said struct {
		Within float64 `json:"within"`
	}
	if jsonv2.Unmarshal(answer, &said) == nil && said.Within > 0 {
		return run.Elsewhere(time.Duration(min(said.Within, shipped.MaxElsewhere.Seconds()) * float64(time.Second)))
	}
	return run.ErrElsewhere
}

// failure returns why the program did not succeed, or nil if it did. A program that was stopped did not succeed
// even if it exited with 0, since it may have quit early.
func (p *program) failure(state *os.ProcessState, stopped error, over bool) error {
	switch {
	case stopped != nil:
		return fmt.Errorf("stopped: %w", stopped)
	case over:
		return tooLong(p.limit)
	case state.Success():
		return nil
	}
	return errors.New(state.String())
}

// atOnce reports whether the exit code says that no further attempt can help.
func atOnce(state *os.ProcessState) bool {
	switch state.ExitCode() {
	case exitUsage, exitData, exitConfig:
		return true
	}
	return false
}

// report adds the end of stderr to err: first its last line, which mostly says what is wrong, then as much of
// the text before it as fits into 4 kB.
func (p *program) report(err error, stderr *tail) error {
	before, last := stderr.text()
	if last == "" {
		return fmt.Errorf("%s: %w", p, err)
	}
	err = fmt.Errorf("%s: %w: %s", p, err, last)
	if before == "" {
		return err
	}
	return fmt.Errorf("%w\n%s", err, cutFront(before+"\n"+last, maxTail-len(err.Error())-1))
}
