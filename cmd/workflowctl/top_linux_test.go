package main_test

import (
	"fmt"
	"os"
	"regexp"
	"strings"
	"sync"
	"syscall"
	"testing"
	"unicode/utf8"
	"unsafe"

	"github.com/jackc/pgx/v5"
	"golang.org/x/term"

	"github.com/simple-workflow/simple-workflow/internal/cmdtest"
	"github.com/simple-workflow/simple-workflow/internal/pgtest"
)

// A terminal has 80 columns and 24 lines. What is written to it is read at once.
type terminal struct {
	keys, slave *os.File
	mu          sync.Mutex
	shown       []byte
}

func newTerminal(t *testing.T) *terminal {
	t.Helper()
	master, err := os.OpenFile("/dev/ptmx", os.O_RDWR|syscall.O_NOCTTY, 0)
	if err != nil {
		t.Fatalf("there are no terminals here: %v", err)
	}
	control := func(f *os.File, request uintptr, value unsafe.Pointer) {
		if _, _, errno := syscall.Syscall(syscall.SYS_IOCTL, f.Fd(), request, uintptr(value)); errno != 0 {
			t.Fatal(errno)
		}
	}
	var number, unlocked int32
	control(master, syscall.TIOCSPTLCK, unsafe.Pointer(&unlocked))
	control(master, syscall.TIOCGPTN, unsafe.Pointer(&number))
	slave, err := os.OpenFile(fmt.Sprintf("/dev/pts/%d", number), os.O_RDWR|syscall.O_NOCTTY, 0)
	if err != nil {
		t.Fatal(err)
	}
	size := struct{ rows, columns, x, y uint16 }{24, 80, 0, 0}
	control(slave, syscall.TIOCSWINSZ, unsafe.Pointer(&size))
	s := &terminal{keys: master, slave: slave}
	t.Cleanup(func() { slave.Close(); master.Close() })
	go func() {
		for part := make([]byte, 4096); ; {
			n, err := master.Read(part)
			if err != nil {
				return
			}
			s.mu.Lock()
			s.shown = append(s.shown, part[:n]...)
			s.mu.Unlock()
		}
	}()
	return s
}

func (s *terminal) text() string {
	s.mu.Lock()
	defer s.mu.Unlock()
	return string(s.shown)
}

// top fits a terminal of 80 columns and 24 lines however much there is to show, includes a piece of everything, and
// quits at q, which restores the terminal.
func TestTopAtATerminal(t *testing.T) {
	t.Parallel()
	url := pgtest.URL(t)
	if _, err := connect(t, url).Exec(t.Context(), `
		INSERT INTO workflow_run (type, run_at) SELECT 'billing.a_type_that_has_a_rather_long_name_' || g || '.v1', now() - interval '5 minutes' FROM generate_series(1, 30) g;
		INSERT INTO workflow_worker (id, name, prefixes, handlers, steps, concurrency, running, version, host, pid) SELECT gen_random_uuid(), 'worker-' || g, '{media.}', '{media.}', true, 10, 3, '', 'a-host-with-a-name', 1 FROM generate_series(1, 30) g;
		INSERT INTO outbox_sink (name, down_since, last_error) SELECT 'sink' || g, now(), 'no route' FROM generate_series(1, 9) g;
		BEGIN; SET LOCAL session_replication_role = replica;
		UPDATE workflow_worker SET seen_at = now() + interval '1 hour';
		INSERT INTO workflow_run (type, status, attempt, finished_at, error, last_error) SELECT 'media.x' || g, 'failed', 3, now(), '{"code": "timeout"}', repeat('timeout: no answer ', 20) FROM generate_series(1, 30) g;
		INSERT INTO workflow_run (type, status, attempt, started_at, lease_until, leased_by, lease_token, lease_no) SELECT 'media.x' || g, 'leased', 1, now(), now() + interval '1 hour', 'worker-1', gen_random_uuid(), 1 FROM generate_series(1, 3) g;
		COMMIT`, pgx.QueryExecModeSimpleProtocol); err != nil {
		t.Fatal(err)
	}
	s := newTerminal(t)
	before, err := term.GetState(int(s.slave.Fd()))
	if err != nil {
		t.Fatal(err)
	}
	p := cmdtest.StartAt(t, s.slave, []string{"DATABASE_URL=" + url}, "top", "--every", "200ms")
	const fresh = "\x1b[H\x1b[2J"
	pgtest.Await(t, "three screens", func() bool { return strings.Count(s.text(), fresh) > 3 })
	screen := strings.Split(s.text(), fresh)[2]
	lines := strings.Split(screen, "\r\n")
	if len(lines) > 24 || len(lines) < 20 || strings.Contains(strings.ReplaceAll(screen, "\r\n", ""), "\n") {
		t.Errorf("%d lines on a screen of 24:\n%s", len(lines), screen)
	}
	for _, line := range lines {
		if utf8.RuneCountInString(line) > 80 {
			t.Errorf("wider than 80: %s", line)
		}
	}
	for _, piece := range []string{`q quits`, `(?m)^NEEDS YOU  \d+; what to do: workflowctl doctor`, `(?m)^! billing`, `(?m)^WAITS .*DUE`, `(?m)^WORKS .*SINCE`, `(?m)^media.x\d .*worker-1`, `(?m)^WORKERS .*RUNNING`, `(?m)^worker-1 +3 of 10`, `(?m)^FAILS .*CODE`, `(?m)^OUTBOX .*down for`} {
		if !regexp.MustCompile(piece).MatchString(strings.ReplaceAll(strings.ReplaceAll(screen, "\r\n", "\n"), "STATE\n", "")) {
			t.Errorf("nothing like %s in\n%s", piece, screen)
		}
	}
	if _, err := s.keys.WriteString("xq"); err != nil {
		t.Fatal(err)
	}
	if code := p.Wait(); code != 0 {
		t.Errorf("after q it ends with %d: %s", code, p.Stderr.String())
	}
	after, err := term.GetState(int(s.slave.Fd()))
	if err != nil || *after != *before {
		t.Errorf("the terminal is not as it was: %v, %v", err, s.text()[max(len(s.text())-200, 0):])
	}
	pgtest.Await(t, "the cursor and the screen from before", func() bool { return strings.HasSuffix(s.text(), "\x1b[?25h\x1b[?1049l") })
}
