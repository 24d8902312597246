package service

import (
	"fmt"
	"os"
	"reflect"
	"strings"
	"testing"
	"time"

	"github.com/simple-workflow/simple-workflow/internal/env"
	"github.com/simple-workflow/simple-workflow/run"
	"github.com/simple-workflow/simple-workflow/worker"
)

// The help has a line for every field of the config, with its default and a sentence, and a line for every exit
// code.
func TestHelp(t *testing.T) {
	var text strings.Builder
	help(&text, Program{Name: "worker"})
	lines := strings.Split(text.String(), "\n")
	fields := reflect.TypeFor[config]()
	for i := range fields.NumField() {
		tag := fields.Field(i).Tag
		name, sentence := tag.Get("envconfig"), tag.Get("help")
		if name == "" || !strings.HasSuffix(sentence, ".") {
			t.Errorf("field %s has no name or no sentence", fields.Field(i).Name)
		}
		if tag.Get("default") == "" && tag.Get("otherwise") == "" {
			t.Errorf("%s does not say what holds if it is unset", name)
		}
		found := 0
		for _, line := range lines {
			if strings.HasPrefix(line, "  "+name+" ") && strings.Contains(line, tag.Get("default")) && strings.HasSuffix(line, sentence) {
				found++
			}
		}
		if found != 1 {
			t.Errorf("help has %d lines on %s", found, name)
		}
	}
	for _, code := range []int{exitStopped, exitConfig, exitDatabase, exitStuck} {
		if !strings.Contains(text.String(), fmt.Sprintf("\n  %d  ", code)) {
			t.Errorf("help lacks exit code %d", code)
		}
	}
}

// The documented defaults and bounds are those of the packages that use them.
func TestDefaults(t *testing.T) {
	t.Setenv("DATABASE_URL", "postgres://app@127.0.0.1/app")
	c := Program{Name: "worker"}.config()
	if report := env.Load(c, "WORKER_"); len(report.Problems) > 0 {
		t.Fatal(report.Problems)
	}
	for _, row := range []struct{ name, got, want any }{
		{"prefixes", c.Prefixes.Value[0], worker.DefaultPrefix},
		{"concurrency", c.Concurrency.Value, worker.DefaultConcurrency},
		{"lease", c.Lease.Value, worker.DefaultLease},
		{"timeout", c.Timeout.Value, worker.DefaultTimeout},
		{"poll interval", c.PollInterval.Value, worker.DefaultPollInterval},
		{"grace", c.ShutdownGrace.Value, worker.DefaultShutdownGrace},
		{"postponed", c.MaxPostponed.Value, worker.DefaultMaxPostponed},
		{"batch", c.Batch.Value, worker.DefaultBatch},
		{"base", c.BackoffBase.Value, run.DefaultBackoffBase},
		{"cap", c.BackoffCap.Value, run.DefaultBackoffCap},
		{"no time limit", env.None, worker.NoTimeout},
		{"cleanup", c.CleanupEvery.Value, worker.DefaultCleanupEvery},
		{"keep finished", c.KeepFinished.Value, worker.DefaultKeepFinished},
		{"keep failed", c.KeepFailed.Value, worker.DefaultKeepFailed},
		{"keep deleted", c.KeepDeleted.Value, worker.DefaultKeepDeleted},
		{"keep published", c.KeepPublished.Value, worker.DefaultKeepPublished},
		{"keep processes", c.KeepProcesses.Value, worker.DefaultKeepProcesses},
		{"for ever", env.None, worker.KeepForever},
		{"shortest time to keep", bound(t, "KeepFinished", "min"), worker.MinKeep},
		{"longest time to keep", bound(t, "KeepFinished", "max"), worker.MaxKeep},
		{"most cleanups", bound(t, "CleanupEvery", "min"), worker.MinCleanupEvery},
		{"fewest cleanups", bound(t, "CleanupEvery", "max"), worker.MaxCleanupEvery},
		{"shortest lease", bound(t, "Lease", "min"), worker.MinLease},
		{"longest lease", bound(t, "Lease", "max"), worker.MaxLease},
		{"shortest poll interval", bound(t, "PollInterval", "min"), worker.MinPollInterval},
	} {
		if row.got != row.want {
			t.Errorf("%s: %v, want %v", row.name, row.got, row.want)
		}
	}
	field, _ := reflect.TypeFor[config]().FieldByName("Concurrency")
	if got, want := field.Tag.Get("max"), fmt.Sprint(worker.MaxConcurrency); got != want {
		t.Errorf("highest concurrency: %s, want %s", got, want)
	}
}

func bound(t *testing.T, field, which string) time.Duration {
	t.Helper()
	f, _ := reflect.TypeFor[config]().FieldByName(field)
	d, err := time.ParseDuration(f.Tag.Get(which))
	if err != nil {
		t.Fatal(err)
	}
	return d
}

// The documentation has a row for every variable, with its default and bounds.
func TestDocumentation(t *testing.T) {
	text, err := os.ReadFile("../docs/configuration.md")
	if err != nil {
		t.Fatal(err)
	}
	for _, d := range env.Describe(&config{}) {
		row := fmt.Sprintf("\n| `%s` | %s | %s | ", d.Name, d.Default, d.Bounds)
		if !strings.Contains(string(text), row) {
			t.Errorf("docs/configuration.md lacks the row %s", strings.TrimSpace(row))
		}
	}
}
