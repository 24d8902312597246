package session_test

import (
	"errors"
	"io"
	"net"
	"sync/atomic"
	"testing"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"

	"github.com/simple-workflow/simple-workflow/internal/session"
)

// answering returns a config that connects to a server with a fixed answer, and a function that counts the
// attempts.
func answering(t *testing.T, answer func(net.Conn)) (*pgx.ConnConfig, *atomic.Int32) {
	t.Helper()
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = listener.Close() })
	attempts := &atomic.Int32{}
	go func() {
		for {
			conn, err := listener.Accept()
			if err != nil {
				return
			}
			attempts.Add(1)
			answer(conn)
			_ = conn.Close()
		}
	}()
	config, err := pgx.ParseConfig("postgres://somebody@" + listener.Addr().String() + "/postgres?sslmode=disable")
	if err != nil {
		t.Fatal(err)
	}
	session.Pace(config)
	return config, attempts
}

// A connection attempt that breaks off does not delay others: each attempt is made.
func TestBrokenConnectionsAreNotPaced(t *testing.T) {
	t.Parallel()
	config, attempts := answering(t, func(net.Conn) {})
	for range 10 {
		if _, err := pgx.ConnectConfig(t.Context(), config.Copy()); err == nil {
			t.Fatal("connected")
		}
	}
	if n := attempts.Load(); n < 10 {
		t.Errorf("%d attempts were made, want ten at least", n)
	}
}

// While a server refuses connections, few attempts are made. The others fail with the server's error.
func TestRefusedConnectionsArePaced(t *testing.T) {
	t.Parallel()
	config, attempts := answering(t, func(conn net.Conn) {
		startup := make([]byte, 4)
		_, _ = io.ReadFull(conn, startup)
		_, _ = io.ReadFull(conn, make([]byte, int(startup[2])<<8+int(startup[3])-4))
		said := "SFATAL\x00VFATAL\x00C53300\x00Mno room\x00\x00"
		_, _ = conn.Write(append([]byte{'E', 0, 0, 0, byte(len(said) + 4)}, said...))
	})
	for range 100 {
		_, err := pgx.ConnectConfig(t.Context(), config.Copy())
		if code := sqlState(err); code != "53300" {
			t.Fatalf("%v has SQLSTATE %q, want 53300", err, code)
		}
	}
	if n := attempts.Load(); n > 5 {
		t.Errorf("%d attempts were made of 100", n)
	}
}

func sqlState(err error) string {
	var refused *pgconn.PgError
	if errors.As(err, &refused) {
		return refused.Code
	}
	return ""
}
