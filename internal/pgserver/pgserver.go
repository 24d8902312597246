// Package pgserver runs a private PostgreSQL server as a child process, for tests, the demo and benchmarks. It needs
// PostgreSQL's server binaries, but no installation, configuration or privileges: as root it runs the server as
// another user. When this process ends, even by kill -9, the server ends and its directory is removed.
package pgserver

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/url"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"time"

	"github.com/simple-workflow/simple-workflow/internal/pgserver/child"
)

const (
	startLimit = 2 * time.Minute        // for a start, crash recovery included
	stopLimit  = 10 * time.Second       // for a fast stop, before an immediate one
	poll       = 5 * time.Millisecond   // how often a starting server is looked at
	retry      = 100 * time.Millisecond // before a taken port is tried again
)

// Options say how a server is set up. The zero value is a fast server that keeps its data in memory, if there is
// enough, and may lose the latest commits when killed.
type Options struct {
	// Settings are PostgreSQL settings. They override the defaults of this package, such as max_connections, which is
	// 200.
	Settings map[string]string

	// Durable leaves fsync, synchronous_commit and full_page_writes on, and
	// keeps the data off memory file systems.
	Durable bool

	// ICU makes en-US of ICU the default collation, in place of C. It needs
	// PostgreSQL 15.
	ICU bool

	// Dir is where the server keeps all its files. If it holds a database already, that database is used. If this
	// process is root, Dir is given to another user. If Dir is empty, a temporary directory is used, and Stop removes
	// it.
	Dir string

	// Log receives the server's log. If it is nil, the log is the file
	// server.log in Dir.
	Log io.Writer
}

// Server is a PostgreSQL server that belongs to this process. Its superuser is
// postgres, who needs no password. Its methods may be called concurrently.
type Server struct {
	options Options
	bin     string
	dir     string
	port    int

	mu      sync.Mutex
	log     *os.File       // nil if Options.Log is used
	process *child.Process // the latest, nil before the first and after Stop
}

// Start sets up a server and returns when it accepts connections on 127.0.0.1. It fails if no binaries are found (see
// BinDir), or if ctx ends before the server is up.
func Start(ctx context.Context, options Options) (*Server, error) {
	bin, err := BinDir()
	if err != nil {
		return nil, err
	}
	s := &Server{options: options, bin: bin}
	if err := s.setUp(ctx); err != nil {
		s.Stop()
		return nil, fmt.Errorf("start PostgreSQL from %s: %w", bin, err)
	}
	return s, nil
}

// URL returns the connection string of a database. It stays the same when the
// server is restarted.
func (s *Server) URL(database string) string {
	u := url.URL{
		Scheme:   "postgres",
		User:     url.User("postgres"),
		Host:     net.JoinHostPort("127.0.0.1", strconv.Itoa(s.port)),
		Path:     "/" + database,
		RawQuery: "sslmode=disable",
	}
	return u.String()
}

// Port returns the TCP port of the server.
func (s *Server) Port() int { return s.port }

// Dir returns the directory that holds the server's data and log.
func (s *Server) Dir() string { return s.dir }

// Stop ends the server for good, closes its connections, and removes its directory unless Options.Dir named it.
// Further calls do nothing.
func (s *Server) Stop() {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.process != nil {
		s.halt(syscall.SIGINT)
		s.process.End()
		s.process = nil
	}
	if s.log != nil {
		s.log.Close()
		s.log = nil
	}
	if s.options.Dir == "" && s.dir != "" {
		_ = os.RemoveAll(s.dir) // mostly done by the watchdog
	}
}

// Mode is a way to stop a server.
type Mode int

const (
	// Fast closes the connections and writes everything to disk.
	Fast Mode = iota
	// Immediate ends like a crash: the next start recovers from the log.
	Immediate
)

// StopMode ends the server's processes and keeps its data for Restart.
func (s *Server) StopMode(mode Mode) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if mode == Immediate {
		s.halt(syscall.SIGQUIT)
		return
	}
	s.halt(syscall.SIGINT)
}

// Kill ends the server's main process with SIGKILL, as the kernel might. It returns when the server's other processes
// have noticed this and ended too. The data stays for Restart.
func (s *Server) Kill() {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.halt(syscall.SIGKILL)
}

// halt returns when no process of the server runs any more.
func (s *Server) halt(sig syscall.Signal) {
	if s.process == nil {
		return
	}
	s.process.Signal(sig)
	if sig == syscall.SIGINT && !s.process.Gone(stopLimit) {
		s.process.Signal(syscall.SIGQUIT)
	}
	s.process.Gone(0)
}

// Restart starts the server again on the same port with the same data, after Kill, StopMode or a crash. If the server
// runs, Restart stops it first. It returns when the server accepts connections. It fails if ctx ends before that, and
// after Stop.
func (s *Server) Restart(ctx context.Context) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.process == nil {
		return errors.New("restart PostgreSQL: it was stopped for good")
	}
	s.halt(syscall.SIGINT)
	// All its processes are gone, but PostgreSQL cannot know that: to it, a process that was killed but not yet
	// reaped looks alive.
	err := os.Remove(filepath.Join(s.data(), "postmaster.pid"))
	if err != nil && !errors.Is(err, os.ErrNotExist) {
		return fmt.Errorf("restart PostgreSQL: %w", err)
	}
	if err := s.launch(ctx, func() error { return nil }); err != nil {
		return fmt.Errorf("restart PostgreSQL: %w", err)
	}
	return nil
}

func (s *Server) data() string { return filepath.Join(s.dir, "data") }

// logTail returns the end of the log, for errors.
func (s *Server) logTail() string {
	if s.log == nil {
		return ""
	}
	text, err := os.ReadFile(s.log.Name())
	if err != nil {
		return ""
	}
	return "\n" + strings.TrimSpace(string(text[max(0, len(text)-2000):]))
}
