package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"

	"github.com/jackc/pgx/v5/pgxpool"
)

// graphile is graphile-worker, run by node.
type graphile struct{}

// nodeDir holds the program and the packages of graphile.
const nodeDir = "node"

// prepareGraphile installs the packages if they are missing. The error says why graphile cannot be measured.
func prepareGraphile(ctx context.Context) error {
	if _, err := exec.LookPath("node"); err != nil {
		return errors.New("node is not installed")
	}
	if graphileVersion() != "" {
		return nil
	}
	if _, err := exec.LookPath("npm"); err != nil {
		return errors.New("npm is not installed")
	}
	install := exec.CommandContext(ctx, "npm", "ci", "--ignore-scripts", "--no-audit", "--no-fund")
	install.Dir = nodeDir
	if out, err := install.CombinedOutput(); err != nil {
		return fmt.Errorf("npm ci: %w: %s", err, lastLine(out))
	}
	return nil
}

func lastLine(text []byte) string {
	lines := strings.Split(strings.TrimSpace(string(text)), "\n")
	return lines[len(lines)-1]
}

// graphileVersion returns the installed version, or "".
func graphileVersion() string {
	var is struct{ Version string }
	text, err := os.ReadFile(filepath.Join(nodeDir, "node_modules", "graphile-worker", "package.json"))
	if err != nil || json.Unmarshal(text, &is) != nil {
		return ""
	}
	return is.Version
}

func (graphile) name() string { return "graphile-worker" }

func (graphile) version() string {
	node, err := exec.Command("node", "--version").Output()
	if err != nil {
		return graphileVersion()
	}
	return graphileVersion() + " on node " + strings.TrimPrefix(strings.TrimSpace(string(node)), "v")
}

func (graphile) settings() string {
	return "concurrentJobs 24, localQueue of 500 with refetchDelay 10 ms (none for idle pick-up), completeJobBatchDelay and failJobBatchDelay 0, addJobs in bulk; documented defaults: concurrentJobs 1, no localQueue, pool of 10"
}

// install also stores the task, so that load can refer to it.
func (g graphile) install(ctx context.Context, db *database) error {
	command := g.process(task{Do: "install", URL: db.url})
	if out, err := command.CombinedOutput(); err != nil {
		return fmt.Errorf("%w: %s", err, lastLine(out))
	}
	return db.do(ctx, `INSERT INTO graphile_worker._private_tasks (identifier) VALUES ('noop') ON CONFLICT DO NOTHING`)
}

func (graphile) load(ctx context.Context, db *database, n int, what kind) error {
	payload, priority, at := `json_build_object('n', g)`, 0, "now()"
	switch what {
	case foreground:
	case low:
		payload, priority = `'{"n": -1}'`, 100
	case future:
		payload, priority, at = `'{"n": -1}'`, -100, "now() + interval '1 day'"
	default:
		return fmt.Errorf("graphile-worker is not measured among %s rows", what)
	}
	return db.do(ctx, fmt.Sprintf(`
		INSERT INTO graphile_worker._private_jobs (task_id, payload, priority, run_at, max_attempts)
		SELECT (SELECT id FROM graphile_worker._private_tasks WHERE identifier = 'noop'), %s, %d, %s, 25
		FROM generate_series(1, %d) g`, payload, priority, at, n))
}

// busy looks at the rows that were loaded last, which are the foreground. They are deleted when they are done.
func (graphile) busy(ctx context.Context, db *database) (busy bool, err error) {
	err = db.QueryRow(ctx, `
		SELECT coalesce((SELECT priority = 0 FROM graphile_worker._private_jobs ORDER BY id DESC LIMIT 1), false)`).Scan(&busy)
	return busy, err
}

func (graphile) stored(ctx context.Context, db *database) (n int, err error) {
	err = db.QueryRow(ctx, `SELECT count(*) FROM graphile_worker._private_jobs WHERE (payload->>'n')::int > 0`).Scan(&n)
	return n, err
}

func (g graphile) unsettled(ctx context.Context, db *database, _ int) (int, error) {
	return g.stored(ctx, db)
}

func (graphile) process(t task) *exec.Cmd {
	command := exec.Command("node", "graphile.mjs", t.String())
	command.Dir = nodeDir
	return command
}

func (graphile) producer(_ task, pool *pgxpool.Pool) (producer, error) {
	return graphileProducer{pool}, nil
}

// A graphileProducer calls the functions that node would call.
type graphileProducer struct{ pool *pgxpool.Pool }

func (p graphileProducer) one(ctx context.Context, n int) error {
	_, err := p.pool.Exec(ctx, `SELECT FROM graphile_worker.add_job('noop', json_build_object('n', $1::int))`, n)
	return err
}

func (p graphileProducer) many(ctx context.Context, ns []int) error {
	_, err := p.pool.Exec(ctx, `
		SELECT FROM graphile_worker.add_jobs(ARRAY(
			SELECT ('noop', json_build_object('n', n), NULL, NULL, NULL, NULL, NULL, NULL)::graphile_worker.job_spec
			FROM unnest($1::int[]) n))`, ns)
	return err
}
