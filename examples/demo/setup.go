package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/simple-workflow/simple-workflow/examples/shop/orders"
	"github.com/simple-workflow/simple-workflow/internal/pgserver"
	"github.com/simple-workflow/simple-workflow/sql"
)

const module = "github.com/simple-workflow/simple-workflow"

// A demo is everything that has been started and created so far.
type demo struct {
	terminal  bool
	dir       string // for all files that are written
	home      string // of the shop's sources
	orderHome string // of the order's
	url       string // of the database
	server    *pgserver.Server
	schema    string // in a foreign database; "" in our own
	pool      *pgxpool.Pool
	processes []*process
	enqueued  int
}

func (d *demo) bin(name string) string { return filepath.Join(d.dir, "bin", name) }
func (d *demo) shop() string           { return filepath.Join(d.dir, "shop") }

func (d *demo) makeDir() (err error) {
	if d.dir, err = os.MkdirTemp("", "workflow-demo-"); err != nil {
		return err
	}
	for _, name := range []string{"bin", "logs", "shop/images", "shop/sales"} {
		if err := os.MkdirAll(filepath.Join(d.dir, name), 0o755); err != nil {
			return err
		}
	}
	return nil
}

// end reverts everything that was done so far, in reverse order.
func (d *demo) end() error {
	var problems []error
	d.stopWorkers()
	if d.pool != nil {
		if d.schema != "" {
			problems = append(problems, d.dropSchema())
		}
		d.pool.Close()
	}
	if d.server != nil {
		d.server.Stop()
	}
	if d.dir != "" {
		problems = append(problems, os.RemoveAll(d.dir))
	}
	return errors.Join(problems...)
}

// startDatabase connects to a database with all tables, on our own server unless DEMO_DATABASE_URL names another.
func (d *demo) startDatabase(ctx context.Context) (err error) {
	if d.url = os.Getenv("DEMO_DATABASE_URL"); d.url != "" {
		err = d.makeSchema(ctx)
	} else {
		err = d.startServer(ctx)
	}
	if err != nil {
		return err
	}
	if d.pool, err = pgxpool.New(ctx, d.url); err != nil {
		return err
	}
	if d.schema != "" {
		if err := d.checkSchema(ctx); err != nil {
			return err
		}
	}
	return d.pool.AcquireFunc(ctx, func(c *pgxpool.Conn) error {
		if err := sql.Up(ctx, c.Conn()); err != nil {
			return err
		}
		_, err := c.Exec(ctx, orders.Schema)
		return err
	})
}

func (d *demo) startServer(ctx context.Context) (err error) {
	// Variables that are meant for other servers must not affect ours.
	for _, variable := range os.Environ() {
		name, _, _ := strings.Cut(variable, "=")
		if strings.HasPrefix(name, "PG") && name != "PGTEST_BINDIR" {
			if err := os.Unsetenv(name); err != nil {
				return err
			}
		}
	}
	d.server, err = pgserver.Start(ctx, pgserver.Options{})
	if errors.Is(err, pgserver.ErrNoBinaries) {
		return fmt.Errorf("%w (for the demo: DEMO_DATABASE_URL)", err)
	}
	if err != nil {
		return err
	}
	d.url = d.server.URL("demo")
	return onServer(ctx, d.server.URL("postgres"), `CREATE DATABASE demo`)
}

// makeSchema creates a schema, to keep the demo's tables apart from the others in the database. All connections,
// including the workers', find it through PGOPTIONS.
func (d *demo) makeSchema(ctx context.Context) error {
	d.schema = "demo_" + time.Now().Format("20060102_150405")
	if err := onServer(ctx, d.url, `CREATE SCHEMA `+d.schema); err != nil {
		d.schema = ""
		return err
	}
	return os.Setenv("PGOPTIONS", strings.TrimSpace(os.Getenv("PGOPTIONS")+" -c search_path="+d.schema))
}

func (d *demo) checkSchema(ctx context.Context) error {
	var schema string
	if err := d.pool.QueryRow(ctx, `SELECT coalesce(current_schema(), '')`).Scan(&schema); err != nil {
		return err
	}
	if schema != d.schema {
		return errors.New("DEMO_DATABASE_URL sets options or a search_path of its own; leave them out")
	}
	return nil
}

func (d *demo) dropSchema() error {
	ctx, done := context.WithTimeout(context.Background(), 10*time.Second)
	defer done()
	_, err := d.pool.Exec(ctx, `DROP SCHEMA `+d.schema+` CASCADE`)
	return err
}

func onServer(ctx context.Context, url, statement string) error {
	conn, err := pgx.Connect(ctx, url)
	if err != nil {
		return err
	}
	defer func() { _ = conn.Close(context.WithoutCancel(ctx)) }()
	_, err = conn.Exec(ctx, statement)
	return err
}

// build compiles the programs, and finds the sources of the report and of the process.
func (d *demo) build(ctx context.Context) error {
	build := exec.CommandContext(ctx, "go", "build", "-o", d.bin("")+"/",
		module+"/cmd/worker", module+"/cmd/dispatcher", module+"/cmd/workflowctl", module+"/examples/shop", module+"/examples/order")
	if output, err := build.CombinedOutput(); err != nil {
		return fmt.Errorf("%w\n%s", err, output)
	}
	for name, home := range map[string]*string{"shop": &d.home, "order": &d.orderHome} {
		dir, err := exec.CommandContext(ctx, "go", "list", "-f", "{{.Dir}}", module+"/examples/"+name).Output()
		if err != nil {
			return err
		}
		*home = strings.TrimSpace(string(dir))
	}
	return nil
}
