package pgtest

import (
	"bufio"
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strings"
	"sync"

	"github.com/jackc/pgx/v5"

	"github.com/simple-workflow/simple-workflow/internal/pgserver"
)

// shared returns the server of this test binary, started on first use.
var shared = sync.OnceValues(func() (*host, error) {
	ctx, cancel := context.WithTimeout(context.Background(), 3*setUpLimit)
	defer cancel()
	return find(ctx, startLocal, startDocker)
})

// find prefers a server that the environment names, then local binaries, then Docker. It goes on to the next only if
// one is absent; one that does not work is an error.
func find(ctx context.Context, local, docker func(context.Context) (*host, error)) (*host, error) {
	for _, name := range []string{"TEST_DATABASE_URL", "DATABASE_URL"} {
		if url := os.Getenv(name); url != "" {
			h, err := foreign(ctx, url)
			if err != nil {
				return nil, fmt.Errorf("%s: %w", name, err)
			}
			return h, nil
		}
	}
	h, err := local(ctx)
	if !errors.Is(err, pgserver.ErrNoBinaries) {
		return h, err
	}
	h, dockerErr := docker(ctx)
	if dockerErr != nil {
		return nil, fmt.Errorf("%w\nNor can Docker be used: %w", err, dockerErr)
	}
	return h, nil
}

func foreign(ctx context.Context, url string) (*host, error) {
	h := newHost(url, false)
	return h, h.with(ctx, func(conn *pgx.Conn) error {
		return conn.QueryRow(ctx, `
			SELECT NOT (rolcreatedb OR rolsuper)
			FROM pg_roles
			WHERE rolname = current_user`).Scan(&h.schemas)
	})
}

func startLocal(ctx context.Context) (*host, error) {
	server, err := pgserver.Start(ctx, pgserver.Options{}) // it ends with this process
	if err != nil {
		return nil, err
	}
	return newHost(server.URL("postgres"), true), nil
}

// startDocker starts a container by the program in the directory container, which has a module of its own. The container is
// removed when this process has ended.
func startDocker(ctx context.Context) (*host, error) {
	_, file, _, _ := runtime.Caller(0)
	dir := filepath.Join(filepath.Dir(file), "container")
	program := filepath.Join(os.TempDir(), fmt.Sprintf("pgtest-container-%d", os.Getpid()))
	build := exec.CommandContext(ctx, "go", "build", "-o", program, ".")
	build.Dir, build.Env = dir, append(os.Environ(), "GOWORK=off")
	if out, err := build.CombinedOutput(); err != nil {
		return nil, fmt.Errorf("build %s: %w\n%s", dir, err, out)
	}
	defer os.Remove(program)
	cmd := exec.Command(program) // it ends when its input does, which is with this process
	cmd.Stderr = &bytes.Buffer{}
	out, err := cmd.StdoutPipe()
	var in io.Closer
	if err == nil {
		in, err = cmd.StdinPipe()
	}
	if err == nil {
		err = cmd.Start()
	}
	if err != nil {
		return nil, err
	}
	url, err := bufio.NewReader(out).ReadString('\n')
	if err != nil {
		_ = cmd.Wait()
		return nil, fmt.Errorf("%s", bytes.TrimSpace(cmd.Stderr.(*bytes.Buffer).Bytes()))
	}
	h := newHost(strings.TrimSpace(url), true)
	h.input = in
	return h, nil
}
