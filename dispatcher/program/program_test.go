package program_test

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/cloudevents/sdk-go/v2/event"

	"github.com/simple-workflow/simple-workflow/dispatcher"
	"github.com/simple-workflow/simple-workflow/dispatcher/program"
	"github.com/simple-workflow/simple-workflow/internal/pgtest"
)

// TestMain lets the test binary act as the program: with the arguments "play" and a part, it plays that part.
func TestMain(m *testing.M) {
	if len(os.Args) == 3 && os.Args[1] == "play" {
		play(os.Args[2])
		return
	}
	os.Exit(m.Run())
}

// parts are the programs that the test binary can play: each maps an event to what the program prints.
var parts = map[string]func(e *event.Event) string{
	"by type": func(e *event.Event) string { return e.Type() + " " + e.ID() + " because of " + e.Subject() },
	"chatty": func(e *event.Event) string {
		return "hello\n\nok\nok nobody\n" + strings.Repeat("x", 100_000) + "\nok " + e.ID()
	},
	"floods": func(*event.Event) string { return strings.Repeat("x", 3<<20) },
	"mute":   func(*event.Event) string { return "" },
	"slow": func(e *event.Event) string {
		time.Sleep(100 * time.Millisecond)
		return "ok " + e.ID()
	},
	"ends at poison": func(e *event.Event) string {
		if e.Type() == "poison" {
			os.Exit(1)
		}
		return "ok " + e.ID()
	},
	"shows its environment": func(e *event.Event) string { return "retry " + e.ID() + " " + strings.Join(os.Environ(), "|") },
}

func play(part string) {
	if file := os.Getenv("STARTS"); file != "" {
		note(file, fmt.Sprint(os.Getpid()))
	}
	lines := bufio.NewReader(os.Stdin)
	var kept []string
	for {
		line, err := lines.ReadBytes('\n')
		if err != nil {
			break
		}
		e := event.New()
		if err := json.Unmarshal(line, &e); err != nil {
			fmt.Fprintln(os.Stderr, err)
			os.Exit(3)
		}
		if file := os.Getenv("CAME"); file != "" {
			note(file, e.ID())
		}
		switch part {
		case "backwards": // answers three events at a time, the last one first
			if kept = append(kept, e.ID()); len(kept) == 3 {
				fmt.Printf("ok %s\nretry %s late\nok %s\n", kept[2], kept[1], kept[0])
				kept = nil
			}
		default:
			if answer := parts[part](&e); answer != "" {
				fmt.Println(answer)
			}
		}
	}
	if part == "mute" { // does not exit at the end of its input, either
		time.Sleep(time.Minute)
	}
}

// note appends a line to a file.
func note(file, line string) {
	f, err := os.OpenFile(file, os.O_APPEND|os.O_CREATE|os.O_WRONLY, 0o600)
	if err == nil {
		_, err = fmt.Fprintln(f, line)
		_ = f.Close()
	}
	if err != nil {
		panic(err)
	}
}

func noted(t *testing.T, file string) []string {
	t.Helper()
	text, err := os.ReadFile(file)
	if err != nil && !os.IsNotExist(err) {
		t.Fatal(err)
	}
	return strings.Fields(string(text))
}

func sink(t *testing.T, part string, change func(*program.Config)) dispatcher.Sink {
	t.Helper()
	c := program.Config{Path: os.Args[0], Args: []string{"play", part}, Patience: 20 * time.Second, Grace: 300 * time.Millisecond}
	if change != nil {
		change(&c)
	}
	s, err := program.New(c)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = s.Close() })
	return s
}

func newEvent(id, typ, subject string) event.Event {
	e := event.New()
	e.SetID(id)
	e.SetSource("/test")
	e.SetType(typ)
	e.SetSubject(subject)
	e.SetDataContentType("application/json")
	e.DataEncoded = []byte(`{"n": "é \n"}`)
	return e
}

// kinds returns what each error means to the dispatcher.
func kinds(errs []error) string {
	var all []string
	for _, err := range errs {
		text := strings.TrimPrefix(strings.TrimPrefix(fmt.Sprintf("%T", err), "*dispatcher."), "*errors.")
		if err == dispatcher.ErrNotTried {
			text = "untried"
		}
		all = append(all, map[string]string{"<nil>": "ok", "errorString": "later", "*fmt.wrapError": "later", "rejection": "rejected"}[text]+map[string]string{"untried": "untried", "unavailable": "unavailable"}[text])
	}
	return strings.Join(all, " ")
}

// The program's answer decides the error of an event.
func TestAnswers(t *testing.T) {
	t.Parallel()
	errs := sink(t, "by type", nil).Publish(t.Context(), []event.Event{newEvent("1", "ok", "a"), newEvent("2", "retry", "b"), newEvent("3", "reject", "c"), newEvent("4", "ok", "b")})
	if got := kinds(errs); got != "ok later rejected untried" {
		t.Errorf("%s: %v", got, errs)
	}
	if got, want := fmt.Sprint(errs[1], errs[2]), "the program: because of b the program: because of c"; got != want {
		t.Errorf("reasons %q, want %q", got, want)
	}
}

// The program may answer events of different subjects in any order.
func TestAnyOrder(t *testing.T) {
	t.Parallel()
	errs := sink(t, "backwards", nil).Publish(t.Context(), []event.Event{newEvent("1", "x", "a"), newEvent("2", "x", "b"), newEvent("3", "x", "c")})
	late := 0
	for _, err := range errs {
		if err != nil && err.Error() == "the program: late" {
			late++
		} else if err != nil {
			t.Error(err)
		}
	}
	if late != 1 {
		t.Errorf("%d are late, want 1: %v", late, errs)
	}
}

// The program gets an event after its answer to the previous one of the subject.
func TestNextAfterAnswer(t *testing.T) {
	t.Parallel()
	came := filepath.Join(t.TempDir(), "came")
	s := sink(t, "slow", func(c *program.Config) { c.Env = []string{"CAME=" + came} })
	begun := time.Now()
	errs := s.Publish(t.Context(), []event.Event{newEvent("a1", "x", "a"), newEvent("a2", "x", "a"), newEvent("a3", "x", "a")})
	if kinds(errs) != "ok ok ok" || strings.Join(noted(t, came), " ") != "a1 a2 a3" || time.Since(begun) < 300*time.Millisecond {
		t.Errorf("%v in %s: %v", errs, time.Since(begun), noted(t, came))
	}
	// A program that does not answer gets only the first event.
	came = filepath.Join(t.TempDir(), "came")
	mute := sink(t, "mute", func(c *program.Config) {
		c.Env, c.Patience = []string{"CAME=" + came}, 500*time.Millisecond
	})
	if errs := mute.Publish(t.Context(), []event.Event{newEvent("1", "x", "a"), newEvent("2", "x", "a")}); kinds(errs) != "later untried" {
		t.Errorf("%v", errs)
	}
	if got := noted(t, came); len(got) != 1 {
		t.Errorf("it got %v", got)
	}
}

// A program that dies is started again. Events that it had not answered are not acknowledged, and no attempt is charged
// to events that it had not got.
func TestDies(t *testing.T) {
	t.Parallel()
	starts := filepath.Join(t.TempDir(), "starts")
	s := sink(t, "ends at poison", func(c *program.Config) { c.AtOnce, c.Env = 1, []string{"STARTS=" + starts} })
	batch := []event.Event{newEvent("1", "x", "a"), newEvent("2", "poison", "b"), newEvent("3", "x", "b"), newEvent("4", "x", "c")}
	if errs := s.Publish(t.Context(), batch); kinds(errs) != "ok later untried untried" || !strings.Contains(errs[1].Error(), "ended before it answered") {
		t.Errorf("%v", errs)
	}
	if errs := s.Publish(t.Context(), batch[2:]); kinds(errs) != "ok ok" {
		t.Errorf("%v", errs)
	}
	if got := noted(t, starts); len(got) != 2 {
		t.Errorf("it was started %d times, want 2", len(got))
	}
}

// If a program is killed in the middle of a batch, every event still reaches it once the events that failed are
// published again.
func TestKilled(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	starts, came := filepath.Join(dir, "starts"), filepath.Join(dir, "came")
	s := sink(t, "slow", func(c *program.Config) { c.Env = []string{"STARTS=" + starts, "CAME=" + came} })
	var open []event.Event
	for n := range 8 {
		open = append(open, newEvent(fmt.Sprint(n), "x", fmt.Sprint(n)))
	}
	go func() {
		for len(noted(t, came)) < 3 {
			time.Sleep(time.Millisecond)
		}
		var pid int
		if _, err := fmt.Sscan(noted(t, starts)[0], &pid); err != nil {
			t.Error(err)
		}
		_ = syscall.Kill(pid, syscall.SIGKILL)
	}()
	rounds := 0
	for len(open) > 0 && rounds < 10 {
		var left []event.Event
		for k, err := range s.Publish(t.Context(), open) {
			if err != nil {
				left = append(left, open[k])
			}
		}
		open = left
		rounds++
	}
	if len(open) > 0 || rounds != 2 {
		t.Errorf("%d are open after %d rounds, want none after 2", len(open), rounds)
	}
	all := map[string]bool{}
	for _, id := range noted(t, came) {
		all[id] = true
	}
	if len(all) != 8 || len(noted(t, starts)) != 2 {
		t.Errorf("%d events came to %d programs", len(all), len(noted(t, starts)))
	}
}

// A program that gives no answer is killed. A slow one that keeps answering is not, even if the batch takes longer
// than Patience.
func TestPatience(t *testing.T) {
	t.Parallel()
	s := sink(t, "mute", func(c *program.Config) { c.Patience = 200 * time.Millisecond })
	if errs := s.Publish(t.Context(), []event.Event{newEvent("1", "x", "a")}); kinds(errs) != "later" || !strings.Contains(errs[0].Error(), "answered nothing for 200ms") {
		t.Errorf("%v", errs)
	}
	slow := sink(t, "slow", func(c *program.Config) { c.Patience = 2 * time.Second })
	var events []event.Event
	for n := range 30 { // three seconds
		events = append(events, newEvent(fmt.Sprint(n), "x", fmt.Sprint(n)))
	}
	if errs := slow.Publish(t.Context(), events); strings.Contains(kinds(errs), "later") {
		t.Errorf("%v", errs)
	}
}

// Output of the program that is not an answer is ignored. A line without end makes the attempt fail.
func TestChatter(t *testing.T) {
	t.Parallel()
	s := sink(t, "chatty", nil)
	if errs := s.Publish(t.Context(), []event.Event{newEvent("1", "x", "a"), newEvent("2", "x", "a")}); kinds(errs) != "ok ok" {
		t.Errorf("%v", errs)
	}
	begun := time.Now()
	if errs := sink(t, "floods", nil).Publish(t.Context(), []event.Event{newEvent("1", "x", "a")}); kinds(errs) != "later" || time.Since(begun) > 10*time.Second {
		t.Errorf("%v after %s", errs, time.Since(begun))
	}
}

// A program that exits is started again even if a child of it still holds its output open.
func TestLeavesChildBehind(t *testing.T) {
	t.Parallel()
	script := filepath.Join(t.TempDir(), "leaves")
	if err := os.WriteFile(script, []byte("#!/bin/sh\nread line\nsleep 60 &\nexit 0\n"), 0o700); err != nil {
		t.Fatal(err)
	}
	s := sink(t, "", func(c *program.Config) { c.Path, c.Args = script, nil })
	for range 2 {
		begun := time.Now()
		if errs := s.Publish(t.Context(), []event.Event{newEvent("1", "x", "a")}); kinds(errs) != "later" || time.Since(begun) > 10*time.Second {
			t.Errorf("%v after %s", errs, time.Since(begun))
		}
	}
}

// If the program reads nothing and the batch is larger than the pipe, Publish returns when its context ends.
func TestReadsNothing(t *testing.T) {
	t.Parallel()
	s := sink(t, "", func(c *program.Config) { c.Path, c.Args = "sleep", []string{"60"} })
	large := newEvent("1", "x", "a")
	large.DataEncoded = []byte(`"` + strings.Repeat("x", 1<<20) + `"`)
	ctx, done := context.WithTimeout(t.Context(), 100*time.Millisecond)
	defer done()
	if errs := s.Publish(ctx, []event.Event{large, newEvent("2", "x", "b")}); kinds(errs) != "untried untried" {
		t.Errorf("%v", errs)
	}
}

// Close ends the program, also one that ignores the end of its input. Then the sink is unavailable.
func TestClose(t *testing.T) {
	t.Parallel()
	for _, part := range []string{"by type", "mute"} {
		starts := filepath.Join(t.TempDir(), "starts")
		s := sink(t, part, func(c *program.Config) { c.Env = []string{"STARTS=" + starts} })
		ctx, done := context.WithTimeout(t.Context(), 500*time.Millisecond)
		defer done()
		go s.Publish(ctx, []event.Event{newEvent("1", "ok", "a")})
		pgtest.Await(t, "the program to start", func() bool { return len(noted(t, starts)) == 1 })
		begun := time.Now()
		if err := s.Close(); err != nil || time.Since(begun) > 5*time.Second {
			t.Errorf("%s: %v after %s", part, err, time.Since(begun))
		}
		var pid int
		if _, err := fmt.Sscan(noted(t, starts)[0], &pid); err != nil {
			t.Fatal(err)
		}
		if err := syscall.Kill(pid, 0); err == nil {
			t.Errorf("%s: the program is still there", part)
		}
		if errs := s.Publish(t.Context(), []event.Event{newEvent("2", "ok", "a")}); kinds(errs) != "unavailable" {
			t.Errorf("%s: after Close: %v", part, errs)
		}
	}
}

// The program gets the configured variables and PATH, but not DATABASE_URL.
func TestEnvironment(t *testing.T) {
	t.Setenv("DATABASE_URL", "postgres://app:s3cr3t@127.0.0.1/app")
	errs := sink(t, "shows its environment", func(c *program.Config) { c.Env = []string{"GREETING=hello"} }).Publish(t.Context(), []event.Event{newEvent("1", "x", "a")})
	if text := fmt.Sprint(errs); strings.Contains(text, "s3cr3t") || !strings.Contains(text, "GREETING=hello") || !strings.Contains(text, "PATH=") {
		t.Error(text)
	}
}

// New refuses a program that does not exist. A program that cannot be started makes the sink
// unavailable.
func TestNoProgram(t *testing.T) {
	if _, err := program.New(program.Config{Path: "/nowhere/at/all"}); err == nil || !strings.Contains(err.Error(), `"/nowhere/at/all"`) {
		t.Error(err)
	}
	script := filepath.Join(t.TempDir(), "broken")
	if err := os.WriteFile(script, bytes.Repeat([]byte{0}, 10), 0o700); err != nil {
		t.Fatal(err)
	}
	s := sink(t, "", func(c *program.Config) { c.Path, c.Args = script, nil })
	if errs := s.Publish(t.Context(), []event.Event{newEvent("1", "x", "a")}); kinds(errs) != "unavailable" {
		t.Errorf("%v", errs)
	}
}
