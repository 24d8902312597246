package pgserver

import (
	"context"
	"fmt"
	"net/url"
	"os"
	"path/filepath"

	"github.com/simple-workflow/simple-workflow/internal/pgserver/child"
)

// Standby copies the server and starts the copy as its hot standby: it streams what the server
// writes, and calls itself by the given name, which synchronous_standby_names may list. It has
// the same options, but a directory of its own. SELECT pg_promote() makes it a primary.
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
	if err := copied.follow(ctx, s.URL("postgres")+"&application_name="+url.QueryEscape(name)); err != nil {
		copied.Stop()
		return nil, fmt.Errorf("start a standby of PostgreSQL: %w", err)
	}
	return copied, nil
}

func (s *Server) follow(ctx context.Context, primary string) error {
	if err := s.finish(ctx, "pg_basebackup", "-D", s.data(), "-d", primary, "-R", "-X", "stream", "-c", "fast"); err != nil {
		return err
	}
	return s.launch(ctx, func() (err error) {
		s.port, err = child.Port()
		return err
	})
}
