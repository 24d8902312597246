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

// Exit codes with a meaning of their own, from sysexits.h. All others mean to try again.
const (
	exitUsage  = 64
	exitData   = 65
	exitTemp   = 75 // EX_TEMPFAIL: what the program needs is out of reach
	exitConfig = 78
)

// exitElsewhere hands the run on, as the status of the same number does.
const exitElsewhere = 202

func (p *program) handler(log *slog.Logger) worker.Handler {
	return func(ctx context.Context, payload json.RawMessage) (json.RawMessage, error) {
		if ctx.Err() != nil {
			return nil, fmt.Errorf("%s: not started: %w", p, context.Cause(ctx))
		}
		return p.execute(ctx, payload, log)
	}
}

// execute starts the program and waits for its end, and for that of everything it started.
func (p *program) execute(ctx context.Context, payload json.RawMessage, log *slog.Logger) (json.RawMessage, error) {
	info := run.FromContext(ctx)
	cmd := exec.Command(p.path, p.args...)
	token, _ := worker.Token(ctx) // none, if no worker calls
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

// handedOn is what becomes of a run that goes on elsewhere. What the program writes may say for how long.
func (p *program) handedOn(answer []byte) error {
	var said struct {
		Within float64 `json:"within"`
	}
	if jsonv2.Unmarshal(answer, &said) == nil && said.Within > 0 {
		return run.Elsewhere(time.Duration(min(said.Within, shipped.MaxElsewhere.Seconds()) * float64(time.Second)))
	}
	return run.ErrElsewhere
}

// failure says why a program's end is none of success; nil if it is. One that was stopped
// has not succeeded even if it left with 0: it may have done so early.
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

// report adds the end of stderr: its last line, which is mostly the one that tells, then
// as much before it as 4 kB hold.
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
