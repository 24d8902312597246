package handlers_test

import (
	"bytes"
	"encoding/json"
	"fmt"
	"log/slog"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/simple-workflow/simple-workflow/internal/handlers"
	"github.com/simple-workflow/simple-workflow/internal/settling"
	"github.com/simple-workflow/simple-workflow/run"
)

// script writes a program and returns its path.
func script(t *testing.T, lines string) string {
	t.Helper()
	path := filepath.Join(t.TempDir(), "handler")
	if !strings.HasPrefix(lines, "#!") {
		lines = "#!/bin/sh\n" + lines
	}
	if err := os.WriteFile(path, []byte(lines), 0o700); err != nil {
		t.Fatal(err)
	}
	return path
}

func execute(t *testing.T, lines, payload string) (string, error) {
	t.Helper()
	return call(t, handler(t, "media.: {program: "+script(t, lines)+"}"), payload)
}

// The payload comes on stdin, byte for byte, and stdout is the result; what is in the payload
// is data to nobody else.
func TestProgram(t *testing.T) {
	marker := filepath.Join(t.TempDir(), "marker")
	payload := `{"a":"-rf $(touch ` + marker + `) ; touch ` + marker + `\n` + "`touch " + marker + "`" + `","b":1.10}`
	for _, payload := range []string{payload, `"-n"`, `["--help"]`} {
		if got, err := execute(t, "exec cat", payload); got != payload || err != nil {
			t.Errorf("result = %q, %v, want %q", got, err, payload)
		}
	}
	if _, err := os.Stat(marker); err == nil {
		t.Error("the payload was executed")
	}
}

// The guide's files can be loaded as they are printed, and its script works.
func TestGuide(t *testing.T) {
	guide, err := os.ReadFile("../../docs/handlers-file.md")
	if err != nil {
		t.Fatal(err)
	}
	blocks := func(language string) (all []string) {
		for _, part := range strings.Split(string(guide), "```"+language+"\n")[1:] {
			block, _, _ := strings.Cut(part, "```")
			all = append(all, block)
		}
		return all
	}
	for _, name := range []string{"BILLING_AUTHORIZATION", "S3_BUCKET", "S3_SECRET_KEY"} {
		t.Setenv(name, "Bearer x")
	}
	thumb := script(t, blocks("python")[0])
	files := blocks("yaml")
	for _, file := range files {
		if _, err := handlers.Parse(strings.ReplaceAll(file, "/opt/handlers/thumb.py", thumb)); err != nil {
			t.Errorf("%s\n%v", file, err)
		}
	}
	if _, err := exec.LookPath("python3"); err != nil {
		return
	}
	// Where python3 is depends on the machine; a container has it in the usual places.
	two := strings.Replace(files[0], "/opt/handlers/thumb.py}", thumb+", env: [PATH, HOME]}", 1)
	t.Setenv("HOME", os.Getenv("HOME"))
	h := handler(t, two)
	got, err := call(t, h, `{"width": 640}`)
	if want := `{"width": 320}`; got != want || err != nil {
		t.Errorf("result = %q, %v, want %q", got, err, want)
	}
	_, err = call(t, h, `{}`)
	want(t, err, false, "", "exit status 1: KeyError: 'width'\nTraceback (most recent call last):")
}

// A program that prints nothing succeeds without a result, and need not read its input.
func TestProgramNoResult(t *testing.T) {
	if got, err := execute(t, "exit 0", `"`+strings.Repeat("x", 250_000)+`"`); got != "" || err != nil {
		t.Errorf("result = %q, %v", got, err)
	}
}

// Output that cannot be stored ends the run: its work is done and is not done again.
func TestProgramResultRejected(t *testing.T) {
	for _, lines := range []string{"echo done", "echo '{}'; echo '{}'", `printf '{"a":1,"a":2}'`, `printf '"\377"'`} {
		_, err := execute(t, lines+"; echo why >&2", "{}")
		want(t, err, true, settling.CodeResult, "program /", "why")
	}
}

// max_result_bytes is exact. Beyond it the program is killed, not read on.
func TestProgramLimit(t *testing.T) {
	limited := func(lines string) (string, error) {
		return call(t, handler(t, "media.: {program: "+script(t, lines)+", max_result_bytes: 5}"), "{}")
	}
	if got, err := limited(`printf '"123"'`); got != `"123"` || err != nil {
		t.Errorf("at the limit: %q, %v", got, err)
	}
	for _, lines := range []string{`printf '"1234"'`, "while :; do echo xxxxxxxxxxxxxxxxxxxxx; done"} {
		_, err := limited(lines)
		want(t, err, true, settling.CodeResult, "more than 5 bytes")
	}
}

// What an exit code means: the table in docs/handlers-file.md.
func TestExitCodes(t *testing.T) {
	for _, test := range []struct {
		lines, want string
		permanent   bool
	}{
		{"exit 1", "exit status 1", false},
		{"exit 2", "exit status 2", false},
		{"exit 64", "exit status 64", true},
		{"exit 65", "exit status 65", true},
		{"exit 66", "exit status 66", false},
		{"exit 75", "exit status 75", false},
		{"exit 78", "exit status 78", true},
		{"exit 255", "exit status 255", false},
		{"exec /nowhere", "exit status 127", false},
		{"kill -KILL $$", "signal: killed", false},
		{"kill -SEGV $$", "signal: segmentation fault", false},
	} {
		got, err := execute(t, "echo '{}'; "+test.lines, "{}")
		want(t, err, test.permanent, "", test.want)
		if got != "" {
			t.Errorf("%s: result = %q", test.lines, got)
		}
	}
}

// A program that is gone or broken is an ordinary failure: the next deployment may cure it.
func TestProgramStart(t *testing.T) {
	path := script(t, "exit 0")
	h := handler(t, "media.: {program: "+path+"}")
	if err := os.WriteFile(path, []byte("#!/nowhere\n"), 0o700); err != nil {
		t.Fatal(err)
	}
	_, err := call(t, h, "{}")
	want(t, err, false, "", path, "no such file")
	os.Remove(path)
	_, err = call(t, h, "{}")
	want(t, err, false, "", path, "no such file")
}

// A program gets the variables of the run and those the file lists, and nothing else of the
// worker's environment. Arguments are passed as they are written.
func TestProgramEnvironment(t *testing.T) {
	t.Setenv("CANARY", "secret")
	t.Setenv("LISTED", "from the worker")
	dir := t.TempDir()
	file := fmt.Sprintf(`{media.: {program: %q, dir: %q, args: [--size, 010, yes, "$HOME; ls *"], env: [LISTED, ACT=environment, "EMPTY=", "A=b=c"]}}`, os.Args[0], dir)
	got, err := call(t, handler(t, file), "{}")
	if err != nil {
		t.Fatal(err)
	}
	var child struct {
		Env, Args []string
		Dir       string
	}
	if err := json.Unmarshal([]byte(got), &child); err != nil {
		t.Fatal(err)
	}
	slices.Sort(child.Env)
	wantEnv := []string{
		"A=b=c", "ACT=environment", "EMPTY=", "LISTED=from the worker", "PATH=/usr/local/bin:/usr/bin:/bin",
		"TRACEPARENT=00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01", "WORKFLOW_ATTEMPT=2",
		"WORKFLOW_IDEMPOTENCY_KEY=order 17", "WORKFLOW_LEASE_NO=7", "WORKFLOW_MAX_ATTEMPTS=5",
		"WORKFLOW_RUN_ID=" + info.ID.String(), "WORKFLOW_TENANT=acme", "WORKFLOW_TYPE=media.thumb.v1",
	}
	if !slices.Equal(child.Env, wantEnv) {
		t.Errorf("environment = %q, want %q", child.Env, wantEnv)
	}
	if want := []string{"--size", "010", "yes", "$HOME; ls *"}; !slices.Equal(child.Args, want) {
		t.Errorf("arguments = %q, want %q", child.Args, want)
	}
	if want, _ := filepath.EvalSymlinks(dir); child.Dir != want {
		t.Errorf("folder = %q, want %q", child.Dir, want)
	}
}

// Without dir a program runs in its own folder, wherever the worker was started; without a
// key of its own the run's id is the idempotency key.
func TestProgramDefaults(t *testing.T) {
	path := script(t, `test "$(pwd -P)" = "$(cd "$(dirname "$0")" && pwd -P)" && test $WORKFLOW_IDEMPOTENCY_KEY = $WORKFLOW_RUN_ID && test -z "$TRACEPARENT"`)
	i := run.Info{ID: info.ID}
	if _, err := handler(t, "media.: {program: "+path+"}")(run.NewContext(t.Context(), i), nil); err != nil {
		t.Error(err)
	}
}

// An error begins with the last line of stderr and goes on with as much of its end as 4 kB
// hold, cleaned.
func TestStderr(t *testing.T) {
	_, err := execute(t, `
i=0; while [ $i -lt 2000 ]; do echo "line $i äöü" >&2; i=$((i+1)); done
printf 'Traceback:\n  \033[31mred\377\n\nValueError: bad size\n\n \n' >&2
exit 3`, "{}")
	want(t, err, false, "", ": exit status 3: ValueError: bad size\n…", "line 1999 äöü\nTraceback:\n", "[31mred\uFFFD", "!\x1b", "!line 1 ")
	if n := len(err.Error()); n < 4000 || n > 4096 {
		t.Errorf("error has %d bytes", n)
	}
	_, err = execute(t, "printf 'just this' >&2; exit 1", "{}")
	want(t, err, false, "", ": exit status 1: just this", "!\n")
}

// Secrets that a program gets do not come back in errors or in the log.
func TestStderrSecrets(t *testing.T) {
	t.Setenv("API_TOKEN", "canary-1234")
	log, logger := newLines()
	h := load(t, "media.: {program: "+script(t, `echo "login with $API_TOKEN and $DB_PASSWORD as $MODE" >&2; exit 1`)+
		", env: [API_TOKEN, DB_PASSWORD=canary-5678, MODE=production]}").Handler(logger)
	_, err := call(t, h, "{}")
	want(t, err, false, "", "login with *** and *** as production", "!canary")
	record := <-log.seen
	record.Attrs(func(a slog.Attr) bool {
		if strings.Contains(a.String(), "canary") {
			t.Errorf("log has %s", a)
		}
		return true
	})
}

// Each line of stderr is logged at debug level with the run and its type, the last one even
// without an end, endless ones cut; above that level nothing is.
func TestStderrLog(t *testing.T) {
	log, logger := newLines()
	path := script(t, `printf 'one\n\ntw\033o\n' >&2; head -c 100000 /dev/zero | tr '\0' x >&2; printf '\nthree' >&2`)
	if _, err := call(t, load(t, "media.: {program: "+path+"}").Handler(logger), `{"canary":1}`); err != nil {
		t.Fatal(err)
	}
	for _, want := range []string{"one", "tw o", strings.Repeat("x", 4096), "three"} {
		record := <-log.seen
		got := map[string]string{}
		record.Attrs(func(a slog.Attr) bool { got[a.Key] = a.Value.String(); return true })
		if record.Level != slog.LevelDebug || got["line"] != want || got["run"] != info.ID.String() || got["type"] != info.Type {
			t.Errorf("level %s, %v, want line %q", record.Level, got, want)
		}
	}
	if len(log.seen) > 0 {
		t.Errorf("%d more lines", len(log.seen))
	}
	var quiet bytes.Buffer
	b := load(t, "media.: {program: "+path+"}")
	if _, err := call(t, b.Handler(slog.New(slog.NewTextHandler(&quiet, nil))), "{}"); err != nil || quiet.Len() > 0 {
		t.Errorf("log = %q, %v", &quiet, err)
	}
}
