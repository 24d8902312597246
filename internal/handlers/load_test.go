package handlers_test

import (
	"fmt"
	"io"
	"log/slog"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/simple-workflow/simple-workflow/internal/handlers"
	"github.com/simple-workflow/simple-workflow/run"
	"github.com/simple-workflow/simple-workflow/worker"
)

// A file binds each of its patterns, with its options. JSON is accepted too.
func TestLoad(t *testing.T) {
	path := script(t, "echo 1")
	yaml := `
media.: {program: ` + path + `}   # two lines would do
billing.invoice_charge.v1:
  url: https://billing.example.com/charge
  timeout: 90s
  lease: 1m
  concurrency: 4
  max_attempts: 7
  backoff_base: 500ms
  backoff_cap: 1h30m
`
	json := `{"media.": {"program": "` + path + `"}, "billing.invoice_charge.v1": {"url": "https://billing.example.com/charge",
"timeout": "90s", "lease": "1m", "concurrency": 4, "max_attempts": 7, "backoff_base": "500ms", "backoff_cap": "1h30m"}}`
	for _, data := range []string{yaml, json, "\ufeff" + yaml} {
		file := filepath.Join(t.TempDir(), "handlers.yaml")
		if err := os.WriteFile(file, []byte(data), 0o600); err != nil {
			t.Fatal(err)
		}
		got, err := handlers.Load(file)
		if err != nil {
			t.Fatal(err)
		}
		if s := fmt.Sprint(got); s != "[media.: program "+path+" billing.invoice_charge.v1: POST https://billing.example.com/charge]" {
			t.Errorf("bindings = %s", s)
		}
		if got[0].Options != (worker.Options{}) {
			t.Errorf("options = %+v", got[0].Options)
		}
		want := worker.Options{Timeout: 90 * time.Second, Lease: time.Minute, Concurrency: 4, MaxAttempts: 7,
			Backoff: run.Backoff{Base: 500 * time.Millisecond, Cap: 90 * time.Minute}}
		if got[1].Options != want {
			t.Errorf("options = %+v, want %+v", got[1].Options, want)
		}
		if err := handlers.Register(worker.NewMux(), got, nil); err != nil {
			t.Error(err)
		}
	}
	if got := load(t, "a.b: {program: "+path+", timeout: none}").Options.Timeout; got != worker.NoTimeout {
		t.Errorf("timeout = %s", got)
	}
}

// A file that clashes with the program's own handlers causes an error and not a panic. The error names each clash with
// its line.
func TestRegisterClash(t *testing.T) {
	bindings, err := handlers.Parse("a.b: {url: 'http://x.test'}\na.c: {url: 'http://x.test'}\na.: {url: 'http://x.test'}")
	if err != nil {
		t.Fatal(err)
	}
	mux := worker.NewMux()
	for _, pattern := range []string{"a.b", "a."} {
		mux.HandleRaw(pattern, handler(t, "a.b: {url: 'http://x.test'}"))
	}
	err = handlers.Register(mux, bindings, slog.New(slog.NewTextHandler(io.Discard, nil)))
	want(t, err, false, "", `handlers.yaml:1: a.b: worker: type "a.b" is registered twice; remove it`, "handlers.yaml:3: a.: ", "!a.c")
}

// A file that cannot be a handlers file is refused before it is parsed, with its path and the reason.
func TestLoadUnreadable(t *testing.T) {
	dir := t.TempDir()
	file := func(name, data string) string {
		path := filepath.Join(dir, name)
		if err := os.WriteFile(path, []byte(data), 0o600); err != nil {
			t.Fatal(err)
		}
		return path
	}
	pipe := filepath.Join(dir, "pipe")
	if err := syscall.Mkfifo(pipe, 0o600); err != nil {
		t.Fatal(err)
	}
	for path, reason := range map[string]string{
		filepath.Join(dir, "missing"): "no such file or directory; WORKER_HANDLERS names",
		dir:                           "not a regular file; WORKER_HANDLERS names",
		pipe:                          "not a regular file",
		"/dev/zero":                   "not a regular file",
		file("large", strings.Repeat("#\n", 1<<19)+"#"):    "1048577 bytes, at most 1048576 are read",
		file("latin1", "a.b: {url: 'http://x.test/\xe4'}"): "not UTF-8; save it in that encoding",
		file("utf16", "\xff\xfea\x00.\x00b\x00:\x00"):      "not UTF-8",
		file("empty", ""):                                       "empty; write a line such as",
		file("comment", "# nothing\n"):                          "empty; write a line such as",
		file("null", "null"):                                    "not a mapping; write",
		file("list", "- a.b"):                                   "not a mapping; write",
		file("braces", "{}"):                                    "not a mapping; write",
		file("broken", "a.b: {url: 'http://x.test'"):            "yaml: ",
		file("two", "a.b: {url: 'http://x.test'}\n---\na: b\n"): "more than one YAML document",
		file("tail", "a.b: {url: 'http://x.test'}\n...\n]\n"):   "more than one YAML document",
	} {
		_, err := handlers.Load(path)
		want(t, err, false, "", path, reason)
	}
}

// No format verb prints a secret of a binding.
func TestBindingPrintsNoSecret(t *testing.T) {
	t.Setenv("TOKEN", "canary-1")
	for _, file := range []string{
		"a.b: {url: 'http://me:canary-2@x.test/?key=canary-3', headers: {X-Token: env:TOKEN}}",
		"a.b: {program: " + script(t, "") + ", env: [TOKEN]}",
	} {
		b := load(t, file)
		var text strings.Builder
		slog.New(slog.NewTextHandler(&text, nil)).Info("x", "binding", b, "pointer", &b)
		slog.New(slog.NewJSONHandler(&text, nil)).Info("x", "binding", b)
		fmt.Fprintf(&text, "%v %+v %#v %s", b, b, b, b)
		if strings.Contains(text.String(), "canary") {
			t.Errorf("printed %s", &text)
		}
	}
}

// Parsing any file has one of two results. Either all its entries are bound and can be registered, or the file is
// refused with an error that names it and contains no control characters.
func FuzzParse(f *testing.F) {
	for _, seed := range []string{
		"media.: {program: /bin/sh, args: [a, 1], env: [A=b], dir: /}",
		"a.b: {url: 'https://me:pw@x.test:8443/p?q', allow: [x.test, 10.0.0.0/8, '[::1]:80'], headers: {X: y}, timeout: none}",
		`{"a.b": {"url": "http://127.0.0.1", "lease": "5s", "backoff_cap": "1m", "max_result_bytes": 7}}`,
		"a.b: &a {url: *a}\n? [x]\n: y\n--- !!binary aGk=",
	} {
		f.Add(seed)
	}
	f.Fuzz(func(t *testing.T, data string) {
		bindings, err := handlers.Parse(data)
		if err == nil {
			if err = handlers.Register(worker.NewMux(), bindings, nil); err != nil || len(bindings) == 0 {
				t.Fatalf("%d bindings: %v", len(bindings), err)
			}
			return
		}
		if bindings != nil || !strings.Contains(err.Error(), "handlers.yaml") {
			t.Fatalf("%d bindings, error %v", len(bindings), err)
		}
		if i := strings.IndexFunc(err.Error(), func(r rune) bool { return r < ' ' && r != '\n' || r == 0x7f }); i >= 0 {
			t.Fatalf("error has %q: %q", err.Error()[i], err)
		}
	})
}
