package pgtest

import (
	"bufio"
	"bytes"
	"context"
	"errors"
	"fmt"
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

// startDocker starts a container with the program in the directory container, which has a module of its own. The
// container is removed when this process has ended.
func startDocker(ctx context.Context) (*host, error) {
	if !dockerIsThere() {
		return nil, errors.New("DOCKER_HOST is not set, and no socket of Docker is found")
	}
	_, file, _, _ := runtime.Caller(0)
	dir := filepath.Join(filepath.Dir(file), "container")
	bin, err := os.MkdirTemp("", "pgtest")
	if err != nil {
		return nil, err
	}
	defer os.RemoveAll(bin)
	program := filepath.Join(bin, "container")
	build := exec.CommandContext(ctx, "go", "build", "-o", program, ".")
	build.Dir, build.Env = dir, append(os.Environ(), "GOWORK=off")
	if out, err := build.CombinedOutput(); err != nil {
		return nil, fmt.Errorf("build %s: %w\n%s", dir, err, out)
	}
	cmd := exec.Command(program) // not with ctx, which ends before the tests do; it ends when its input does, with this process
	said := &bytes.Buffer{}
	cmd.Stderr = said
	in, err := cmd.StdinPipe()
	if err != nil {
		return nil, err
	}
	out, err := cmd.StdoutPipe()
	if err != nil {
		return nil, err
	}
	if err := cmd.Start(); err != nil {
		return nil, err
	}
	url := make(chan string, 1)
	go func() {
		line, _ := bufio.NewReader(out).ReadString('\n')
		url <- strings.TrimSpace(line)
	}()
	select {
	case <-ctx.Done():
		_ = in.Close()
		return nil, fmt.Errorf("start a container: %w", ctx.Err())
	case at := <-url:
		if at == "" {
			_ = cmd.Wait()
			return nil, fmt.Errorf("start a container: %s", bytes.TrimSpace(said.Bytes()))
		}
		h := newHost(at, true)
		h.input = in
		return h, nil
	}
}

// dockerIsThere reports whether something looks like Docker, so that nothing is built where there is none.
func dockerIsThere() bool {
	if os.Getenv("DOCKER_HOST") != "" {
		return true
	}
	home, _ := os.UserHomeDir()
	for _, socket := range []string{"/var/run/docker.sock", filepath.Join(os.Getenv("XDG_RUNTIME_DIR"), "docker.sock"),
		filepath.Join(home, ".docker/run/docker.sock"), filepath.Join(home, ".docker/desktop/docker.sock")} {
		if _, err := os.Stat(socket); err == nil {
			return true
		}
	}
	return false
}
