package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"strings"
	"time"

	"github.com/simple-workflow/simple-workflow/run"
	"github.com/simple-workflow/simple-workflow/worker"
)

// logExecutions returns a middleware that appends a line to a file when a handler starts and when it ends:
//
//	start|end,run_id,lease_no,worker,epoch_ms,outcome
//
// The outcome is empty at the start. At the end it is ok, error, panic, or, if the handler failed after its context
// had ended, the reason: cancelled, lost, deadline or shutdown. Each line is one write in append mode, so several
// processes may share the file.
func logExecutions(name string) (worker.Middleware, error) {
	file, err := os.OpenFile(name, os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o644)
	if err != nil {
		return nil, fmt.Errorf("EXECLOG: %w", err)
	}
	write := func(ctx context.Context, event, outcome string) {
		info := run.FromContext(ctx)
		line := fmt.Sprintf("%s,%s,%d,%s,%d,%s\n", event, info.ID, info.LeaseNo,
			strings.ReplaceAll(info.Worker, ",", "_"), time.Now().UnixMilli(), outcome)
		if _, err := file.WriteString(line); err != nil {
			slog.Error("cannot write execution log", "err", err)
		}
	}
	return func(next worker.Handler) worker.Handler {
		return func(ctx context.Context, payload json.RawMessage) (result json.RawMessage, err error) {
			write(ctx, "start", "")
			outcome := "panic"
			defer func() { write(ctx, "end", outcome) }()
			result, err = next(ctx, payload)
			outcome = outcomeOf(ctx, err)
			return result, err
		}
	}, nil
}

func outcomeOf(ctx context.Context, err error) string {
	cause := context.Cause(ctx)
	switch {
	case err == nil:
		return "ok"
	case errors.Is(cause, run.ErrCancelled):
		return "cancelled"
	case errors.Is(cause, run.ErrLost):
		return "lost"
	case errors.Is(cause, run.ErrDeadline):
		return "deadline"
	case errors.Is(cause, run.ErrShutdown):
		return "shutdown"
	}
	return "error"
}
