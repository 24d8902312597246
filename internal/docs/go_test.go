package docs

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"go/ast"
	"go/parser"
	"go/token"
	"go/types"
	"io"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"syscall"
	"testing"

	"github.com/jackc/pgx/v5"

	"github.com/simple-workflow/simple-workflow/internal/cmdtest"
	"github.com/simple-workflow/simple-workflow/internal/compiled"
	"github.com/simple-workflow/simple-workflow/internal/pgtest"
)

// around is what blocks that are not whole files assume: imports, and names of the reader's own.
const around = `package page

import (
	"context"
	"database/sql"
	"encoding/json"
	"errors"
	"log"
	"log/slog"
	"os"
	"os/signal"
	"syscall"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/prometheus/client_golang/prometheus"

	"` + module + `/graph"
	"` + module + `/outbox"
	"` + module + `/run"
	"` + module + `/service"
	"` + module + `/worker"
)

type (
	Charge        struct{ Order any }
	ChargeRequest struct{ Order any }
	Receipt       struct{}
	Film          struct{}
	Document      struct{}
)

var (
	ctx     context.Context
	tx      pgx.Tx
	sqlTx   *sql.Tx
	pool    *pgxpool.Pool
	mux     *worker.Mux
	order   uuid.UUID
	id, task, instance, incident uuid.UUID
	token   string
	input, output json.RawMessage
	errDeclined, errBusy, errDown, errNotYet error
	billing struct{ Charge func(context.Context, ChargeRequest) (Receipt, error) }
	index   struct {
		Bulk func(context.Context, []Document) ([]Receipt, []error)
	}
	farm    struct {
		Submit func(film Film, id uuid.UUID, token string) error
	}
	media   struct{ Transcode func(context.Context, ChargeRequest) (Receipt, error) }
)

`

// exports returns an importer of the compiled packages that blocks import.
func exports(t *testing.T) types.Importer {
	t.Helper()
	var names []string
	for _, m := range regexp.MustCompile(`(?m)^\t"(.+)"$`).FindAllStringSubmatch(around, -1) {
		names = append(names, m[1])
	}
	packages, err := compiled.Importer(names...)
	if err != nil {
		t.Fatal(err)
	}
	return packages
}

// Every Go block compiles, together with the names that its page assumes. Unused declarations in a fragment are no
// error.
func TestGoCompiles(t *testing.T) {
	packages, n := exports(t), 0
	for _, p := range pages(t) {
		for _, b := range p.blocks("go") {
			n++
			text := b.text
			switch {
			case strings.HasPrefix(text, "package "):
			case strings.HasPrefix(text, "func Charge("): // of another package
				text = strings.Replace(around, "Charge        struct", "_ struct", 1) + text
			case strings.HasPrefix(text, "func "), strings.HasPrefix(text, "type "):
				text = around + text
			default:
				text = around + "func _() {\n" + text + "}\n"
			}
			set := token.NewFileSet()
			file, err := parser.ParseFile(set, b.at, text, parser.SkipObjectResolution)
			if err != nil {
				t.Errorf("%s: %v", b.at, err)
				continue
			}
			config := types.Config{Importer: packages, Error: func(err error) {
				if e := (types.Error{}); errors.As(err, &e) && !e.Soft {
					t.Errorf("%s: %s", b.at, e.Msg)
				}
			}}
			_, _ = config.Check("page", set, []*ast.File{file}, nil)
		}
	}
	if n < 8 {
		t.Errorf("found only %d blocks", n)
	}
}

// insertOf returns the statement with which the README enqueues a run, and programsOf the whole programs of a page.
func insertOf(t *testing.T) string {
	t.Helper()
	for _, p := range pages(t) {
		if p.path == "README.md" {
			return p.blocks("sql")[0].text
		}
	}
	t.Fatal("there is no README.md")
	return ""
}

func programsOf(t *testing.T, path string) (all []string) {
	t.Helper()
	for _, p := range pages(t) {
		if p.path == path {
			for _, b := range p.blocks("go") {
				if strings.HasPrefix(b.text, "package main\n") {
					all = append(all, b.text)
				}
			}
		}
	}
	return all
}

// The program of the README and the first one of docs/start/go.md, as they stand there, execute the run that the README inserts.
func TestFirstPrograms(t *testing.T) {
	t.Parallel()
	insert := insertOf(t)
	for _, path := range []string{"README.md", "docs/start/go.md"} {
		programs := programsOf(t, path)
		if len(programs) == 0 {
			t.Errorf("%s has no program", path)
			continue
		}
		url := pgtest.URL(t)
		conn, err := pgx.Connect(t.Context(), url)
		if err != nil {
			t.Fatal(err)
		}
		defer conn.Close(context.WithoutCancel(t.Context()))
		p := cmdtest.StartProgram(t, built(t, programs[0]), []string{"DATABASE_URL=" + url})
		if _, err := conn.Exec(t.Context(), insert); err != nil {
			t.Fatal(err)
		}
		pgtest.Await(t, "the run of "+path+" succeeds", func() bool {
			var succeeded bool
			if err := conn.QueryRow(t.Context(), `SELECT status = 'succeeded' AND result = to_jsonb('charged ' || (payload->>'order')) FROM workflow_run`).Scan(&succeeded); err != nil {
				t.Fatal(err)
			}
			return succeeded
		})
		p.Signal(syscall.SIGTERM)
		if code := p.Wait(); code != 0 {
			t.Errorf("%s: exit code %d", path, code)
		}
	}
}

// The last program of docs/start/go.md, as it stands there, executes the run that the README inserts, with its effect, and has what the
// binary worker has: probes, metrics, the settings, a stop at SIGTERM.
func TestProgramWithAnEffect(t *testing.T) {
	t.Parallel()
	insert, programs := insertOf(t), programsOf(t, "docs/start/go.md")
	if len(programs) < 2 {
		t.Fatalf("docs/start/go.md has %d programs, want 2", len(programs))
	}
	path := built(t, programs[len(programs)-1])
	url := pgtest.URL(t)
	conn, err := pgx.Connect(t.Context(), url)
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close(context.WithoutCancel(t.Context()))
	if _, err := conn.Exec(t.Context(), `CREATE TABLE ledger (run_id uuid, order_id uuid)`); err != nil {
		t.Fatal(err)
	}
	p := cmdtest.StartProgram(t, path, []string{"DATABASE_URL=" + url, "WORKER_HTTP_ADDR=127.0.0.1:0"})
	if _, err := conn.Exec(t.Context(), insert); err != nil {
		t.Fatal(err)
	}
	pgtest.Await(t, "the order is charged", func() bool {
		var charged int
		if err := conn.QueryRow(t.Context(), `SELECT count(*) FROM ledger JOIN workflow_run r ON r.id = run_id
			WHERE r.status = 'succeeded' AND r.result = '"charged"' AND order_id::text = r.payload->>'order'`).Scan(&charged); err != nil {
			t.Fatal(err)
		}
		return charged == 1
	})
	address := regexp.MustCompile(`"address":"([^"]+)"`).FindStringSubmatch(p.Stderr.String())
	if address == nil {
		t.Fatalf("it serves no HTTP: %s", p.Stderr.String())
	}
	for path, want := range map[string]string{"/healthz": "alive", "/readyz": "ready", "/metrics": `workflow_handler_seconds_count{type="billing.invoice_charge.v1"} 1`} {
		pgtest.Await(t, path+" says "+want, func() bool {
			response, err := http.Get("http://" + address[1] + path)
			if err != nil {
				t.Fatal(err)
			}
			defer response.Body.Close()
			body, err := io.ReadAll(response.Body)
			return err == nil && response.StatusCode == http.StatusOK && strings.Contains(string(body), want)
		})
	}
	p.Signal(syscall.SIGTERM)
	if code := p.Wait(); code != 0 {
		t.Errorf("exit code %d", code)
	}
	help := cmdtest.StartProgram(t, path, nil, "--help")
	if code := help.Wait(); code != 0 || !regexp.MustCompile(`WORKER_TYPE_PREFIXES +billing\. `).MatchString(help.Stdout.String()) || !strings.HasPrefix(help.Stdout.String(), "billing leases") {
		t.Errorf("exit code %d, help:\n%s", code, help.Stdout.String())
	}
}

// built compiles a program as part of the module, without writing into the module, and returns the path of the
// binary.
func built(t *testing.T, program string) string {
	t.Helper()
	dir := t.TempDir()
	source := filepath.Join(dir, "main.go")
	if err := os.WriteFile(source, []byte(program), 0o600); err != nil {
		t.Fatal(err)
	}
	here, err := filepath.Abs(root)
	if err != nil {
		t.Fatal(err)
	}
	overlay, err := json.Marshal(map[string]any{"Replace": map[string]string{filepath.Join(here, "billing", "main.go"): source}})
	if err != nil {
		t.Fatal(err)
	}
	plan := filepath.Join(dir, "overlay.json")
	if err := os.WriteFile(plan, overlay, 0o600); err != nil {
		t.Fatal(err)
	}
	path := filepath.Join(dir, "billing")
	cmd := exec.Command("go", "build", "-overlay", plan, "-o", path, "./billing")
	cmd.Dir = here
	var said bytes.Buffer
	cmd.Stdout, cmd.Stderr = &said, &said
	if err := cmd.Run(); err != nil {
		t.Fatal(fmt.Errorf("build the program: %w\n%s", err, said.String()))
	}
	return path
}
