package pgtest

import (
	"context"
	"errors"
	"fmt"
	"os"
	"sync"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/testcontainers/testcontainers-go"
	"github.com/testcontainers/testcontainers-go/modules/postgres"

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

// startDocker starts a container, which a companion container removes when
// this process has ended.
func startDocker(ctx context.Context) (*host, error) {
	if err := dockerAnswers(ctx); err != nil {
		return nil, err
	}
	container, err := postgres.Run(ctx, "postgres:17-alpine",
		postgres.BasicWaitStrategies(),
		testcontainers.WithCmdArgs("-c", "fsync=off", "-c", "max_connections=200"))
	if err != nil {
		return nil, err
	}
	url, err := container.ConnectionString(ctx, "sslmode=disable")
	if err != nil {
		return nil, err
	}
	return newHost(url, true), nil
}

func dockerAnswers(ctx context.Context) error {
	const patience = 5 * time.Second
	ctx, cancel := context.WithTimeout(ctx, patience)
	defer cancel()
	provider, err := testcontainers.ProviderDocker.GetProvider()
	if err != nil {
		return err
	}
	defer provider.Close()
	return provider.Health(ctx)
}
