package pgserver

import (
	"context"
	"errors"
	"fmt"
	"io"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"time"

	"github.com/simple-workflow/simple-workflow/internal/pgserver/child"
)

// A killed PostgreSQL leaves a small shared memory segment. Its lock file contains the segment's id.
const dropSegment = `
set -- $(sed -n 7p data/postmaster.pid 2>/dev/null)
[ -z "$2" ] || ipcrm -m "$2" 2>/dev/null
`

func (s *Server) setUp(ctx context.Context) error {
	if err := s.makeDir(); err != nil {
		return err
	}
	if s.options.Log == nil {
		log, err := os.OpenFile(filepath.Join(s.dir, "server.log"), os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o644)
		if err != nil {
			return err
		}
		s.log = log
	}
	// If its last file is missing, the database is not ours or was never finished, and initdb refuses to touch it.
	if _, err := os.Stat(s.conf()); err != nil {
		if err := s.initialize(ctx); err != nil {
			return err
		}
	}
	return s.launch(ctx, func() (err error) {
		s.port, err = child.Port()
		return err
	})
}

func (s *Server) makeDir() (err error) {
	if s.options.Dir == "" {
		s.dir, err = child.TempDir("pgserver-", memory(s.options.Durable)...)
		return err
	}
	if s.dir, err = filepath.Abs(s.options.Dir); err != nil {
		return err
	}
	if err := os.MkdirAll(s.dir, 0o755); err != nil {
		return err
	}
	if err := child.Own(s.dir); err != nil {
		return err
	}
	return child.Enterable(s.dir)
}

// memory returns the memory file system if the data may be kept there and there is room.
func memory(durable bool) []string {
	const shm, enough = "/dev/shm", 1 << 30
	if durable || freeBytes(shm) <= enough {
		return nil
	}
	return []string{shm}
}

func (s *Server) initialize(ctx context.Context) error {
	args := []string{"-D", s.data(), "-U", "postgres", "-A", "trust", "-E", "UTF8", "--no-locale", "--no-instructions"}
	if !s.options.Durable {
		args = append(args, "--no-sync")
	}
	if s.options.ICU {
		args = append(args, "--locale-provider=icu", "--icu-locale=en-US")
	}
	if err := s.finish(ctx, "initdb", args...); err != nil {
		return err
	}
	return appendFile(filepath.Join(s.data(), "postgresql.conf"), "include 'pgserver.conf'\n")
}

// finish runs a program of PostgreSQL to its end.
func (s *Server) finish(ctx context.Context, program string, args ...string) error {
	if err := s.spawn(program, args...); err != nil {
		return err
	}
	for !s.process.Gone(poll) {
		if ctx.Err() != nil {
			return context.Cause(ctx)
		}
	}
	p := s.process
	s.process = nil
	if err := p.Release(); err != nil {
		return fmt.Errorf("%s: %w%s", program, err, s.logTail())
	}
	return nil
}

func appendFile(name, text string) error {
	f, err := os.OpenFile(name, os.O_APPEND|os.O_WRONLY, 0)
	if err != nil {
		return err
	}
	_, err = f.WriteString(text)
	return errors.Join(err, f.Close())
}

// launch starts the server on the port that choose sets. It repeats this while another process turns out to listen on
// the port.
func (s *Server) launch(ctx context.Context, choose func() error) error {
	ctx, cancel := context.WithTimeoutCause(ctx, startLimit, errors.New("no answer from the server"))
	defer cancel()
	for {
		if err := choose(); err != nil {
			return err
		}
		if err := s.configure(); err != nil {
			return err
		}
		if err := s.spawn("postgres", "-D", s.data()); err != nil {
			return err
		}
		err := s.ready(ctx)
		if err == nil || ctx.Err() != nil || child.PortFree(s.port) {
			return err
		}
		select {
		case <-ctx.Done():
			return err
		case <-time.After(retry):
		}
	}
}

// spawn replaces the latest process, which must have ended. It dismisses that process's watchdog only after the new
// one is running.
func (s *Server) spawn(program string, args ...string) error {
	p, err := child.Start(child.Command{
		Path:   filepath.Join(s.bin, program),
		Args:   args,
		Dir:    s.dir,
		Remove: s.options.Dir == "",
		Last:   syscall.SIGQUIT,
		After:  dropSegment,
		Output: s.output(),
	})
	if err != nil {
		return err
	}
	if s.process != nil {
		_ = s.process.Release() // how it ended is known already
	}
	s.process = p
	return nil
}

func (s *Server) output() io.Writer {
	if s.log != nil {
		return s.log
	}
	return s.options.Log
}

func (s *Server) conf() string { return filepath.Join(s.data(), "pgserver.conf") }

func (s *Server) configure() error {
	if err := os.WriteFile(s.conf(), []byte(s.settings()), 0o600); err != nil {
		return err
	}
	return child.Own(s.conf())
}

// settings returns this server's part of postgresql.conf.
func (s *Server) settings() string {
	all := map[string]string{
		"max_connections": "200",
		// In the data directory, so that a killed server leaves nothing behind.
		"dynamic_shared_memory_type": "mmap",
	}
	if !s.options.Durable {
		for _, name := range []string{"fsync", "synchronous_commit", "full_page_writes"} {
			all[name] = "off"
		}
	}
	maps.Copy(all, s.options.Settings)
	all["port"] = strconv.Itoa(s.port)
	all["listen_addresses"] = "127.0.0.1"
	all["unix_socket_directories"] = "" // their paths have a low limit

	quote := strings.NewReplacer("'", "''", `\`, `\\`)
	var conf strings.Builder
	for _, name := range slices.Sorted(maps.Keys(all)) {
		fmt.Fprintf(&conf, "%s = '%s'\n", name, quote.Replace(all[name]))
	}
	return conf.String()
}

// ready waits for the server to write into its lock file that it is up.
func (s *Server) ready(ctx context.Context) error {
	pid := strconv.Itoa(s.process.Pid())
	for {
		lock, err := os.ReadFile(filepath.Join(s.data(), "postmaster.pid"))
		lines := strings.Split(string(lock), "\n")
		if err == nil && len(lines) >= 8 && lines[0] == pid {
			if state := strings.TrimSpace(lines[7]); state == "ready" || state == "standby" {
				return nil
			}
		}
		if s.process.Gone(poll) {
			return fmt.Errorf("the server ended%s", s.logTail())
		}
		if ctx.Err() != nil {
			return fmt.Errorf("%w%s", context.Cause(ctx), s.logTail())
		}
	}
}
