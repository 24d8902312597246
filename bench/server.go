package main

import (
	"context"
	"fmt"
	"maps"
	"slices"
	"strings"

	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/simple-workflow/simple-workflow/internal/pgserver"
)

// settings are the settings of the server. Durability is full: fsync, synchronous_commit and full_page_writes keep
// their defaults, which are on.
var settings = map[string]string{
	"shared_buffers": "4GB", "effective_cache_size": "8GB", "work_mem": "16MB", "maintenance_work_mem": "256MB",
	"min_wal_size": "8GB", "max_wal_size": "10GB", "checkpoint_timeout": "15min", "jit": "off", "autovacuum_naptime": "10s",
}

// A server is the one PostgreSQL of a whole run. Each measurement has a database of its own there, copied from a
// template.
type server struct {
	*pgserver.Server
	pool      *pgxpool.Pool // to the database postgres
	templates map[string]bool
	count     int
}

func startServer(ctx context.Context) (*server, error) {
	process, err := pgserver.Start(ctx, pgserver.Options{Durable: true, Settings: settings})
	if err != nil {
		return nil, err
	}
	s := &server{Server: process, templates: map[string]bool{}}
	if s.pool, err = pgxpool.New(ctx, s.URL("postgres")); err != nil {
		s.Stop()
		return nil, err
	}
	return s, nil
}

// fillWAL writes so much WAL that the log of the whole run goes into existing segments, as on a server that has been
// up for a while. Creating segments takes time, and more of it later in a run.
func (s *server) fillWAL(ctx context.Context, gigabytes int) error {
	_, err := s.pool.Exec(ctx, `SELECT count(pg_logical_emit_message(false, 'bench', repeat('x', 1000000))) FROM generate_series(1, $1)`, 1000*gigabytes)
	if err == nil {
		_, err = s.pool.Exec(ctx, `CHECKPOINT`)
	}
	return err
}

func (s *server) stop() {
	s.pool.Close()
	s.Stop()
}

// templateName is the name of the template with an engine's tables.
func templateName(e engine) string {
	return "template_" + strings.ReplaceAll(strings.ToLower(e.name()), "-", "_")
}

// facts returns the server's version, and an error if the server is not fully durable.
func (s *server) facts(ctx context.Context) (version string, err error) {
	var durability string
	err = s.pool.QueryRow(ctx, `SELECT current_setting('server_version'),
		current_setting('fsync') || current_setting('synchronous_commit') || current_setting('full_page_writes')`).Scan(&version, &durability)
	if err == nil && durability != "ononon" {
		err = fmt.Errorf("fsync, synchronous_commit and full_page_writes are %s", durability)
	}
	version, _, _ = strings.Cut(version, " ")
	return version, err
}

func settingsText() string {
	var all []string
	for _, name := range slices.Sorted(maps.Keys(settings)) {
		all = append(all, name+" = "+settings[name])
	}
	return strings.Join(all, ", ")
}

// A database is created for one measurement.
type database struct {
	*pgxpool.Pool
	name, url string
	server    *server
}

// template makes sure that there is a database with that name which fresh can copy. fill receives a copy of base, or
// an empty database if base is "".
func (s *server) template(ctx context.Context, name, base string, fill func(context.Context, *database) error) error {
	if s.templates[name] {
		return nil
	}
	db, err := s.create(ctx, name, base)
	if err != nil {
		return err
	}
	err = fill(ctx, db)
	db.Close()
	if err != nil {
		return fmt.Errorf("prepare %s: %w", name, err)
	}
	s.templates[name] = true
	return nil
}

// forget drops a template.
func (s *server) forget(ctx context.Context, name string) error {
	delete(s.templates, name)
	_, err := s.pool.Exec(ctx, "DROP DATABASE IF EXISTS "+name+" WITH (FORCE)")
	return err
}

// fresh returns a new copy of a template.
func (s *server) fresh(ctx context.Context, template string) (*database, error) {
	s.count++
	return s.create(ctx, fmt.Sprintf("bench_%d", s.count), template)
}

func (s *server) create(ctx context.Context, name, base string) (*database, error) {
	query := "CREATE DATABASE " + name
	if base != "" {
		query += " TEMPLATE " + base + " STRATEGY file_copy"
	}
	if _, err := s.pool.Exec(ctx, query); err != nil {
		return nil, fmt.Errorf("create database %s: %w", name, err)
	}
	pool, err := pgxpool.New(ctx, s.URL(name))
	if err != nil {
		return nil, err
	}
	return &database{Pool: pool, name: name, url: s.URL(name), server: s}, nil
}

// drop removes the database, even if sessions are still connected.
func (d *database) drop() error {
	d.Close()
	_, err := d.server.pool.Exec(context.Background(), "DROP DATABASE "+d.name+" WITH (FORCE)")
	return err
}

// do executes statements one by one.
func (d *database) do(ctx context.Context, queries ...string) error {
	for _, query := range queries {
		if _, err := d.Exec(ctx, query); err != nil {
			return fmt.Errorf("%.60s: %w", strings.TrimSpace(query), err)
		}
	}
	return nil
}

// set changes a setting for all sessions that begin later.
func (d *database) set(ctx context.Context, setting string) error {
	if err := d.do(ctx, "ALTER DATABASE "+d.name+" SET "+setting); err != nil {
		return err
	}
	d.Reset()
	return nil
}

// rest leaves the server no deferred work.
func (d *database) rest(ctx context.Context) error {
	return d.do(ctx, "VACUUM (ANALYZE)", "CHECKPOINT")
}
