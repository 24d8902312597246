package worker_test

import (
	"context"
	"encoding/json"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/simple-workflow/simple-workflow/internal/pgtest"
	"github.com/simple-workflow/simple-workflow/run"
	"github.com/simple-workflow/simple-workflow/worker"
)

// A configuration error names each bad field, its value, and what would be right.
func TestConfigErrors(t *testing.T) {
	t.Parallel()
	pool := pgtest.New(t)
	for name, c := range map[string]struct {
		change func(*worker.Config)
		want   string
	}{
		"pool":              {func(c *worker.Config) { c.Pool = nil }, "Pool is nil"},
		"mux":               {func(c *worker.Config) { c.Mux = nil }, "Mux is nil"},
		"prefix":            {func(c *worker.Config) { c.Prefixes = []string{"billing"} }, `did you mean "billing."?`},
		"no prefixes":       {func(c *worker.Config) { c.Prefixes = []string{} }, "no type prefix is given"},
		"lease zero":        {func(c *worker.Config) { c.Lease = -5 * time.Second }, "Lease -5s: use 2s to 24h0m0s"},
		"lease short":       {func(c *worker.Config) { c.Lease = 500 * time.Millisecond }, "Lease 500ms: use 2s"},
		"lease long":        {func(c *worker.Config) { c.Lease = 999 * time.Hour }, "a crash goes unnoticed"},
		"heartbeat":         {func(c *worker.Config) { c.Lease, c.Heartbeat = 30*time.Second, 15*time.Second }, "at most a third of Lease, 10s"},
		"heartbeat sign":    {func(c *worker.Config) { c.Heartbeat = -1 }, "Heartbeat -1ns"},
		"timeout":           {func(c *worker.Config) { c.Timeout = -time.Minute }, "Timeout -1m0s: use a positive duration, or NoTimeout"},
		"poll interval":     {func(c *worker.Config) { c.PollInterval = time.Millisecond }, "PollInterval 1ms: use at least 10ms"},
		"poll sign":         {func(c *worker.Config) { c.PollInterval = -1 }, "PollInterval -1ns"},
		"concurrency":       {func(c *worker.Config) { c.Concurrency = -1 }, "Concurrency -1: use 1 to 100000"},
		"concurrency large": {func(c *worker.Config) { c.Concurrency = 1e9 }, "use 1 to 100000"},
		"grace":             {func(c *worker.Config) { c.UnknownTypeGrace = -1 }, "UnknownTypeGrace -1ns: use 0 or more"},
		"backoff":           {func(c *worker.Config) { c.Backoff = run.Backoff{Base: time.Hour, Cap: time.Second} }, "Backoff from 1h0m0s to 1s is not a range"},
		"backoff sign":      {func(c *worker.Config) { c.Backoff.Cap = -1 }, "is not a range"},
		"postponed":         {func(c *worker.Config) { c.MaxPostponed = -1 }, "MaxPostponed -1: use at least 1"},
		"batch":             {func(c *worker.Config) { c.Batch = 10_001 }, "Batch 10001: use 1 to 10000"},
		"kept too briefly":  {func(c *worker.Config) { c.Retention.Finished = 30 * time.Second }, "Retention.Finished 30s: use 1m0s to 876000h0m0s, or KeepForever"},
		"kept, sign":        {func(c *worker.Config) { c.Retention.Processes = -2 }, "Retention.Processes -2ns: use 1m0s"},
		"cleanup":           {func(c *worker.Config) { c.Retention.Every = time.Millisecond }, "Retention.Every 1ms: use 1s to 8760h0m0s, or Retention.Off"},
		"name":              {func(c *worker.Config) { c.Name = strings.Repeat("x", 65) }, "at most 64 printable characters"},
		"name control":      {func(c *worker.Config) { c.Name = "a\nb" }, "printable"},
		"name encoding":     {func(c *worker.Config) { c.Name = "a\xff" }, "printable"},
	} {
		config := worker.Config{Pool: pool, Mux: worker.NewMux()}
		if _, err := worker.New(config); err != nil {
			t.Fatalf("defaults: %v", err)
		}
		c.change(&config)
		if _, err := worker.New(config); err == nil || !strings.Contains(err.Error(), c.want) {
			t.Errorf("%s: error %v, want %q", name, err, c.want)
		}
	}
	_, err := worker.New(worker.Config{Lease: 1, Concurrency: -1, Batch: -1})
	for _, field := range []string{"Pool", "Mux", "Lease", "Concurrency", "Batch"} {
		if err == nil || !strings.Contains(err.Error(), field) {
			t.Errorf("error %v does not name %s", err, field)
		}
	}
}

// Registering nonsense is an error at start-up, in words.
func TestRegistration(t *testing.T) {
	t.Parallel()
	nop := func(context.Context, json.RawMessage) (json.RawMessage, error) { return nil, nil }
	typed := func(context.Context, empty) (empty, error) { return empty{}, nil }
	for name, c := range map[string]struct {
		register func(*worker.Mux)
		want     string
	}{
		"twice":            {func(m *worker.Mux) { m.HandleRaw("a.b", nop); m.HandleRaw("a.b", nop) }, `"a.b" is registered twice`},
		"prefix twice":     {func(m *worker.Mux) { m.HandleRaw("a.", nop); m.HandleRaw("a.", nop) }, `"a." is registered twice`},
		"empty":            {func(m *worker.Mux) { m.HandleRaw("", nop) }, "neither a type"},
		"wildcard":         {func(m *worker.Mux) { m.HandleRaw("*", nop) }, "neither a type"},
		"upper case":       {func(m *worker.Mux) { m.HandleRaw("A.b", nop) }, "neither a type"},
		"one segment":      {func(m *worker.Mux) { worker.Handle(m, "a", typed) }, "is not a type"},
		"typed prefix":     {func(m *worker.Mux) { worker.Handle(m, "a.", typed) }, "is not a type"},
		"nil":              {func(m *worker.Mux) { m.HandleRaw("a.b", nil) }, "is nil"},
		"typed nil":        {func(m *worker.Mux) { worker.Handle[empty, empty](m, "a.b", nil) }, "is nil"},
		"two options":      {func(m *worker.Mux) { m.HandleRaw("a.b", nop, worker.Options{}, worker.Options{}) }, "more than one Options"},
		"short lease":      {func(m *worker.Mux) { m.HandleRaw("a.b", nop, worker.Options{Lease: time.Second}) }, "Lease 1s is outside"},
		"negative timeout": {func(m *worker.Mux) { m.HandleRaw("a.b", nop, worker.Options{Timeout: -2}) }, "use NoTimeout"},
		"concurrency":      {func(m *worker.Mux) { m.HandleRaw("a.b", nop, worker.Options{Concurrency: -1}) }, "Concurrency -1"},
		"max attempts":     {func(m *worker.Mux) { m.HandleRaw("a.b", nop, worker.Options{MaxAttempts: 999_999}) }, "MaxAttempts 999999"},
	} {
		func() {
			defer func() {
				if p, _ := recover().(string); !strings.Contains(p, c.want) {
					t.Errorf("%s: panic %q, want %q", name, p, c.want)
				}
			}()
			c.register(worker.NewMux())
		}()
	}
}

// At start the worker tells what it covers, and warns of handlers and prefixes that do not
// meet.
func TestStartupWarnings(t *testing.T) {
	t.Parallel()
	pool := pgtest.New(t)
	mux := worker.NewMux()
	handle(mux, "test.used.v1", func(context.Context) error { return nil })
	handle(mux, "other.unused.v1", func(context.Context) error { return nil })
	var lines journal
	w, stop := work(t, pool, mux, func(c *worker.Config) {
		c.Logger, c.Name, c.Prefixes = lines.logger(), "east", []string{"test.", "empty."}
	})
	_ = stop()
	for _, want := range []string{
		"handler is never used: no prefix covers it\" handler=other.unused.v1",
		"prefix has no handler: its runs will fail as no_handler_registered\" prefix=empty.",
		"prefixes=\"[empty. test.]\"",
	} {
		if !strings.Contains(lines.String(), want) {
			t.Errorf("the log lacks %s:\n%s", want, lines.String())
		}
	}
	if name := w.Name(); !strings.HasPrefix(name, "east-") || len(name) != len("east-")+8 || slices.Contains([]string{"east"}, name) {
		t.Errorf("name = %s, want east with a random suffix", name)
	}
}
