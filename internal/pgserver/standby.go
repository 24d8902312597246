package pgserver

import (
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"net/url"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"github.com/jackc/pgx/v5"
	"github.com/simple-workflow/simple-workflow/internal/pgserver/child"
)

// Standby copies the server and starts the copy as its hot standby. The standby streams what the server writes, and
// uses the given name as its application_name, which synchronous_standby_names may list. It has the same options, but
// a directory of its own. SELECT pg_promote() makes it a primary.
func (s *Server) Standby(ctx context.Context, name string) (*Server, error) {
	dir, err := child.TempDir("pgserver-", memory(s.options.Durable)...)
	if err != nil {
		return nil, err
	}
	options := s.options
	options.Dir, options.Log = "", nil
	copied := &Server{options: options, bin: s.bin, dir: dir}
	if copied.log, err = os.OpenFile(filepath.Join(dir, "server.log"), os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o644); err != nil {
		copied.Stop()
		return nil, err
	}
	if err := copied.follow(ctx, s, name); err != nil {
		copied.Stop()
		return nil, fmt.Errorf("start a standby of PostgreSQL: %w", err)
	}
	return copied, nil
}

// follow makes the server a copy of primary that replays what primary writes.
func (s *Server) follow(ctx context.Context, primary *Server, name string) error {
	if err := s.backUp(ctx, primary); err != nil {
		return err
	}
	source := primary.URL("postgres") + "&application_name=" + url.QueryEscape(name) // nothing in it needs to be quoted
	if err := s.write("standby.signal", ""); err != nil {
		return err
	}
	if err := appendFile(filepath.Join(s.data(), "postgresql.auto.conf"), "primary_conninfo = '"+source+"'\n"); err != nil {
		return err
	}
	return s.launch(ctx, func() (err error) {
		s.port, err = child.Port()
		return err
	})
}

// backUp copies the files of primary while it runs, following the PostgreSQL manual (Making a Base Backup Using the
// Low Level API). It does not use pg_basebackup because the server binaries from npm do not include it.
func (s *Server) backUp(ctx context.Context, primary *Server) error {
	conn, err := pgx.Connect(ctx, primary.URL("postgres"))
	if err != nil {
		return err
	}
	defer conn.Close(context.WithoutCancel(ctx)) // and with the connection a backup that was not stopped
	// Until the connection ends, the server keeps the WAL that it writes from now on.
	if _, err := conn.Exec(ctx, "SELECT pg_create_physical_replication_slot('backup_' || pg_backend_pid(), true, true)"); err != nil {
		return err
	}
	if _, err := conn.Exec(ctx, "SELECT pg_backup_start('standby', true)"); err != nil {
		return err
	}
	if err := s.copyTree(primary.data(), func(path string) bool { return !slices.Contains(notBackedUp, path) }); err != nil {
		return err
	}
	var label string
	if err := conn.QueryRow(ctx, "SELECT labelfile FROM pg_backup_stop(false)").Scan(&label); err != nil {
		return err
	}
	// The WAL is copied last, because it has to contain everything that was written since the start.
	if err := s.copyTree(primary.data(), func(path string) bool { return path == "." || strings.HasPrefix(path, "pg_wal") }); err != nil {
		return err
	}
	return s.write("backup_label", label)
}

// notBackedUp are files that belong to the running server alone, or to its other standbys.
var notBackedUp = []string{"postmaster.pid", "postmaster.opts", "pg_wal", "pg_replslot", "pg_dynshmem", "standby.signal", "postgresql.auto.conf.tmp"}

// copyTree copies files into the server's data directory from another one. A directory that is not wanted is created
// and left empty. A file that vanishes meanwhile is not needed.
func (s *Server) copyTree(from string, wanted func(path string) bool) error {
	return filepath.WalkDir(from, func(name string, entry fs.DirEntry, err error) error {
		if errors.Is(err, fs.ErrNotExist) {
			return nil
		}
		if err != nil {
			return err
		}
		path, err := filepath.Rel(from, name)
		if err != nil {
			return err
		}
		to := filepath.Join(s.data(), path)
		switch {
		case entry.IsDir():
			if err := os.Mkdir(to, 0o700); err != nil && !errors.Is(err, fs.ErrExist) {
				return err
			}
			if err := child.Own(to); err != nil || wanted(path) {
				return err
			}
			return fs.SkipDir
		case !wanted(path):
			return nil
		}
		return s.copyFile(name, to)
	})
}

// copyFile copies a file, if it still exists.
func (s *Server) copyFile(from, to string) error {
	in, err := os.Open(from)
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	if err != nil {
		return err
	}
	defer in.Close()
	out, err := os.OpenFile(to, os.O_CREATE|os.O_TRUNC|os.O_WRONLY, 0o600)
	if err != nil {
		return err
	}
	_, err = io.Copy(out, in)
	return errors.Join(err, out.Close(), child.Own(to))
}

// write writes a file into the server's data directory.
func (s *Server) write(path, content string) error {
	name := filepath.Join(s.data(), path)
	if err := os.WriteFile(name, []byte(content), 0o600); err != nil {
		return err
	}
	return child.Own(name)
}
