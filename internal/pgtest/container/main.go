// Container runs PostgreSQL in Docker for the tests, where no server binaries are found. It is a program in a module of its own, so
// that the product's module does not depend on Docker's client.
//
// It prints the server's address, and ends when its standard input does. A companion container removes the server if this
// program is killed.
package main

import (
	"context"
	"fmt"
	"io"
	"os"
	"time"

	"github.com/testcontainers/testcontainers-go"
	"github.com/testcontainers/testcontainers-go/modules/postgres"
)

func main() {
	if err := run(context.Background()); err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
}

func run(ctx context.Context) error {
	if err := answers(ctx); err != nil {
		return err
	}
	server, err := postgres.Run(ctx, "postgres:17-alpine",
		postgres.BasicWaitStrategies(),
		testcontainers.WithCmdArgs("-c", "fsync=off", "-c", "max_connections=200"))
	if err != nil {
		return err
	}
	url, err := server.ConnectionString(ctx, "sslmode=disable")
	if err != nil {
		return err
	}
	fmt.Println(url)
	_, _ = io.Copy(io.Discard, os.Stdin)
	return testcontainers.TerminateContainer(server)
}

// answers returns an error unless Docker answers within five seconds.
func answers(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, 5*time.Second)
	defer cancel()
	provider, err := testcontainers.ProviderDocker.GetProvider()
	if err != nil {
		return err
	}
	defer provider.Close()
	return provider.Health(ctx)
}
