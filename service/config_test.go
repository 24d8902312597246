package service

import (
	"fmt"
	"os"
	"reflect"
	"strings"
	"testing"
	"time"

	"github.com/simple-workflow/simple-workflow/internal/env"
	"github.com/simple-workflow/simple-workflow/internal/shipped"
	"github.com/simple-workflow/simple-workflow/worker"
)

// The help has a line for every field of the config, with its default and a sentence, and
// every exit code.
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

// The defaults and bounds that people are told are the ones of the packages that act on
// them.
func TestDefaults(t *testing.T) {
	t.Setenv("DATABASE_URL", "postgres://app@127.0.0.1/app")
	c := Program{Name: "worker"}.config()
	if report := env.Load(c, "WORKER_"); len(report.Problems) > 0 {
		t.Fatal(report.Problems)
	}
	for _, row := range []struct{ name, got, want any }{
		{"prefixes", c.Prefixes.Value[0], shipped.Prefix},
		{"concurrency", c.Concurrency.Value, shipped.Concurrency},
		{"lease", c.Lease.Value, shipped.Lease},
		{"timeout", c.Timeout.Value, shipped.Timeout},
		{"poll interval", c.PollInterval.Value, shipped.PollInterval},
		{"grace", c.ShutdownGrace.Value, shipped.ShutdownGrace},
		{"postponed", c.MaxPostponed.Value, shipped.MaxPostponed},
		{"batch", c.Batch.Value, shipped.Batch},
		{"base", c.BackoffBase.Value, shipped.BackoffBase},
		{"cap", c.BackoffCap.Value, shipped.BackoffCap},
		{"no time limit", env.None, worker.NoTimeout},
		{"cleanup", c.CleanupEvery.Value, shipped.CleanupEvery},
		{"keep finished", c.KeepFinished.Value, shipped.KeepFinished},
		{"keep failed", c.KeepFailed.Value, shipped.KeepFailed},
		{"keep deleted", c.KeepDeleted.Value, shipped.KeepDeleted},
		{"keep published", c.KeepPublished.Value, shipped.KeepPublished},
		{"keep processes", c.KeepProcesses.Value, shipped.KeepProcesses},
		{"for ever", env.None, worker.KeepForever},
		{"shortest time to keep", bound(t, "KeepFinished", "min"), shipped.MinKeep},
		{"longest time to keep", bound(t, "KeepFinished", "max"), shipped.MaxKeep},
		{"most cleanups", bound(t, "CleanupEvery", "min"), shipped.MinCleanupEvery},
		{"fewest cleanups", bound(t, "CleanupEvery", "max"), shipped.MaxCleanupEvery},
		{"shortest lease", bound(t, "Lease", "min"), shipped.MinLease},
		{"longest lease", bound(t, "Lease", "max"), shipped.MaxLease},
		{"shortest poll interval", bound(t, "PollInterval", "min"), shipped.MinPollInterval},
	} {
		if row.got != row.want {
			t.Errorf("%s: %v, want %v", row.name, row.got, row.want)
		}
	}
	field, _ := reflect.TypeFor[config]().FieldByName("Concurrency")
	if got, want := field.Tag.Get("max"), fmt.Sprint(shipped.MaxConcurrency); got != want {
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

// The documentation has a row for every variable, with the default and the bounds that
// hold.
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
