package main

import (
	"fmt"
	"maps"
	"os"
	"reflect"
	"slices"
	"strings"
	"testing"

	"github.com/simple-workflow/simple-workflow/internal/env"
	"github.com/simple-workflow/simple-workflow/internal/secret"
	"github.com/simple-workflow/simple-workflow/internal/shipped"
)

// The help has a line for every field of the config, with its default and a sentence, and a line for every kind
// of sink, every option and every exit code.
func TestHelp(t *testing.T) {
	var text strings.Builder
	help(&text)
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
	for _, code := range []int{exitStopped, exitConfig, exitDatabase} {
		if !strings.Contains(text.String(), fmt.Sprintf("\n  %d  ", code)) {
			t.Errorf("help lacks exit code %d", code)
		}
	}
	for _, name := range slices.Sorted(maps.Keys(kinds)) {
		if k := kinds[name]; k.about != "" && !strings.Contains(text.String(), "\n    "+k.form+" ") {
			t.Errorf("help lacks the sink %s", k.form)
		}
		for _, option := range append(kinds[name].options, "types", "rate") {
			if !strings.Contains(text.String(), "\n    "+option+"=") {
				t.Errorf("help lacks the option %s", option)
			}
		}
	}
}

// The defaults in the help are those of the packages that use them.
func TestDefaults(t *testing.T) {
	var c config
	if report := env.Load(&c, "DISPATCHER_"); len(report.Problems) > 0 {
		t.Fatal(report.Problems)
	}
	for _, row := range []struct{ name, got, want any }{
		{"batch", c.Batch.Value, shipped.EventBatch},
		{"bytes", c.BatchBytes.Value, shipped.EventBatchBytes},
		{"poll interval", c.PollInterval.Value, shipped.EventPollInterval},
		{"claim", c.Claim.Value, shipped.EventClaim},
		{"attempts", c.MaxAttempts.Value, shipped.EventAttempts},
		{"grace", c.ShutdownGrace.Value, shipped.EventGrace},
		{"base", c.BackoffBase.Value, shipped.BackoffBase},
		{"cap", c.BackoffCap.Value, shipped.BackoffCap},
	} {
		if row.got != row.want {
			t.Errorf("%s: %v, want %v", row.name, row.got, row.want)
		}
	}
	field, _ := reflect.TypeFor[config]().FieldByName("WebhookSecret")
	if got, want := field.Tag.Get("bounds"), fmt.Sprintf("at least %d characters", secret.MinKey); got != want {
		t.Errorf("shortest secret: %s, want %s", got, want)
	}
}

// docs/configuration.md has a row for every variable, with its default and its bounds.
func TestDocumentation(t *testing.T) {
	text, err := os.ReadFile("../../docs/configuration.md")
	if err != nil {
		t.Fatal(err)
	}
	for _, d := range env.Describe(&config{}) {
		row := fmt.Sprintf("\n| `%s` | %s | %s | ", d.Name, d.Default, d.Bounds)
		if strings.HasPrefix(d.Name, "DISPATCHER_") && !strings.Contains(string(text), row) {
			t.Errorf("docs/configuration.md lacks the row %s", strings.TrimSpace(row))
		}
	}
}
