// Command broker is nats-server with JetStream and one stream in a file, for the events scenario. It talks to the
// bench like its other children (child.go). It is a program of its own because nats-server would increase the memory
// of all others.
package main

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"net"
	"net/url"
	"os"
	"time"

	"github.com/nats-io/nats-server/v2/server"
	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"
)

func main() {
	if err := serve(context.Background(), os.Args[1]); err != nil {
		fmt.Fprintln(os.Stderr, "broker:", err)
		os.Exit(1)
	}
}

// serve reports the port of the server. After the word release it reports how many messages the stream has stored for
// the subject.
func serve(ctx context.Context, subject string) error {
	dir, err := os.MkdirTemp("", "bench-nats-")
	if err != nil {
		return err
	}
	defer os.RemoveAll(dir)
	s, err := server.NewServer(&server.Options{Host: "127.0.0.1", Port: server.RANDOM_PORT, JetStream: true, StoreDir: dir, NoSigs: true, NoLog: true})
	if err != nil {
		return err
	}
	go s.Start()
	defer s.WaitForShutdown()
	defer s.Shutdown()
	if !s.ReadyForConnections(10 * time.Second) {
		return errors.New("nats-server does not start")
	}
	conn, err := nats.Connect(s.ClientURL())
	if err != nil {
		return err
	}
	defer conn.Close()
	js, err := jetstream.New(conn)
	if err != nil {
		return err
	}
	stream, err := js.CreateStream(ctx, jetstream.StreamConfig{Name: "BENCH", Subjects: []string{subject + ".>"}, Storage: jetstream.FileStorage})
	if err != nil {
		return err
	}
	return converse(ctx, stream, s.ClientURL())
}

func converse(ctx context.Context, stream jetstream.Stream, address string) error {
	u, err := url.Parse(address)
	if err != nil {
		return err
	}
	_, port, err := net.SplitHostPort(u.Host)
	if err != nil {
		return err
	}
	fmt.Println("ready")
	for in := bufio.NewScanner(os.Stdin); in.Scan(); {
		switch in.Text() {
		case "go":
			fmt.Println("seen 1", port)
		case "release":
			info, err := stream.Info(ctx)
			if err != nil {
				return err
			}
			fmt.Printf("done {\"kept\": %d}\n", info.State.Msgs)
		}
	}
	return nil
}
