package handlers_test

import (
	"cmp"
	"context"
	"encoding/json"
	"io"
	"log/slog"
	"os"
	"os/exec"
	"strings"
	"syscall"
	"testing"

	"github.com/google/uuid"
	"go.uber.org/goleak"

	"github.com/simple-workflow/simple-workflow/internal/handlers"
	"github.com/simple-workflow/simple-workflow/internal/settling"
	"github.com/simple-workflow/simple-workflow/run"
	"github.com/simple-workflow/simple-workflow/worker"
)

// The test binary is also a program for the handlers under test, where a shell would get in
// the way.
func TestMain(m *testing.M) {
	switch os.Getenv("ACT") {
	case "environment":
		dir, _ := os.Getwd()
		_ = json.NewEncoder(os.Stdout).Encode(map[string]any{"env": os.Environ(), "dir": dir, "args": os.Args[1:]})
	case "escape":
		// A process that leaves the group and keeps stdout and stderr open.
		child := exec.Command("/bin/sleep", "600")
		child.Stdout, child.Stderr = os.Stdout, os.Stderr
		child.SysProcAttr = &syscall.SysProcAttr{Setsid: true}
		if err := child.Start(); err != nil {
			os.Exit(1)
		}
		_ = json.NewEncoder(os.Stdout).Encode(child.Process.Pid)
	default:
		goleak.VerifyTestMain(m)
	}
}

var info = run.Info{
	ID:             uuid.MustParse("01920000-0000-7000-8000-000000000001"),
	Type:           "media.thumb.v1",
	Attempt:        2,
	MaxAttempts:    5,
	LeaseNo:        7,
	IdempotencyKey: "order 17",
	Tenant:         "acme",
	Metadata:       json.RawMessage(`{"traceparent":"00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01","x":1}`),
}

// load returns the only binding of a handlers file.
func load(t *testing.T, file string) handlers.Binding {
	t.Helper()
	bindings, err := handlers.Parse(file)
	if err != nil {
		t.Fatal(err)
	}
	if len(bindings) != 1 {
		t.Fatalf("%d bindings, want 1", len(bindings))
	}
	return bindings[0]
}

func handler(t *testing.T, file string) worker.Handler {
	t.Helper()
	return load(t, file).Handler(nil)
}

func call(t *testing.T, h worker.Handler, payload string) (string, error) {
	t.Helper()
	return callContext(t.Context(), h, payload)
}

func callContext(ctx context.Context, h worker.Handler, payload string) (string, error) {
	data, err := h(run.NewContext(ctx, info), json.RawMessage(payload))
	return string(data), err
}

// want checks an error: its kind and parts of its text. A part with ! in front must be
// missing.
func want(t *testing.T, err error, permanent bool, code string, parts ...string) {
	t.Helper()
	if err == nil {
		t.Fatal("no error")
	}
	if permanent {
		code = cmp.Or(code, settling.CodeRefused) // by a status or an exit code alone
	}
	if run.IsPermanent(err) != permanent || run.Code(err) != code {
		t.Errorf("permanent %t, code %q, want %t, %q: %v", run.IsPermanent(err), run.Code(err), permanent, code, err)
	}
	for _, part := range parts {
		missing, not := strings.CutPrefix(part, "!")
		if not && strings.Contains(err.Error(), missing) {
			t.Errorf("error contains %q: %v", missing, err)
		}
		if !not && !strings.Contains(err.Error(), part) {
			t.Errorf("error lacks %q: %v", part, err)
		}
	}
}

// lines is a log whose program lines a test can wait for.
type lines struct {
	slog.Handler
	seen chan slog.Record
}

func newLines() (*lines, *slog.Logger) {
	l := &lines{slog.NewTextHandler(io.Discard, &slog.HandlerOptions{Level: slog.LevelDebug}), make(chan slog.Record, 100)}
	return l, slog.New(l)
}

func (l *lines) Handle(_ context.Context, r slog.Record) error {
	l.seen <- r
	return nil
}
