package database

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"strings"
	"time"

	"github.com/jackc/pgerrcode"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"

	"github.com/simple-workflow/simple-workflow/sql"
)

// OldestServer is the oldest supported major version of Postgres.
const OldestServer = 15

// MaxSkew is how far the clocks of this machine and of the database may differ without a warning.
const MaxSkew = time.Second

// A FatalError is an error that waiting does not cure: somebody has to act.
type FatalError struct{ err error }

func (e *FatalError) Error() string { return e.err.Error() }
func (e *FatalError) Unwrap() error { return e.err }

func fatal(format string, args ...any) error {
	return &FatalError{fmt.Errorf(format, args...)}
}

// Facts describe a server and a database.
type Facts struct {
	Version  int // as in server_version_num
	Encoding string
	Recovery bool
	ReadOnly bool
	Now      time.Time
	Skew     time.Duration // the database's clock minus ours; 0 if the difference is too small to measure
}

// Look asks a server for its Facts.
func Look(ctx context.Context, conn *pgx.Conn) (f Facts, err error) {
	start := time.Now()
	err = conn.QueryRow(ctx, `
		SELECT current_setting('server_version_num')::integer, current_setting('server_encoding'),
		       pg_is_in_recovery(), current_setting('transaction_read_only')::boolean, clock_timestamp()`,
		pgx.QueryExecModeDescribeExec).Scan(&f.Version, &f.Encoding, &f.Recovery, &f.ReadOnly, &f.Now)
	if err != nil {
		return f, fmt.Errorf("ask the server about itself: %w", err)
	}
	// The clock was read at some time between start and now.
	took := time.Since(start)
	if skew := f.Now.Sub(start.Add(took / 2)); skew.Abs() > took/2 {
		f.Skew = skew
	}
	return f, nil
}

// Supported returns an error if the engine cannot work on such a server.
func (f Facts) Supported() error {
	switch {
	case f.Version < OldestServer*10_000:
		return fatal("the server is Postgres %d.%d; Postgres %d or newer is required", f.Version/10_000, f.Version%10_000, OldestServer)
	case f.Encoding != "UTF8":
		return fatal("the database's encoding is %s; create it with ENCODING 'UTF8', which is required", f.Encoding)
	}
	return nil
}

// Writable returns an error if the server accepts no writes at present.
func (f Facts) Writable() error {
	switch {
	case f.Recovery:
		return errors.New("the server is in recovery (a standby, or starting after a crash) and takes no writes")
	case f.ReadOnly:
		return errors.New("the server or database is read-only")
	}
	return nil
}

// Connect opens a connection. Its error is a *FatalError if waiting does not help.
func Connect(ctx context.Context, config *pgx.ConnConfig) (*pgx.Conn, error) {
	conn, err := pgx.ConnectConfig(ctx, config)
	if err != nil {
		return nil, connectError(err)
	}
	return conn, nil
}

// Inspect connects once, and returns nil if the engine can work with the database. For a *FatalError somebody
// has to act. Any other error may pass.
func Inspect(ctx context.Context, config *pgx.ConnConfig) (Facts, error) {
	conn, err := Connect(ctx, config)
	if err != nil {
		return Facts{}, err
	}
	defer func() { _ = conn.Close(context.WithoutCancel(ctx)) }()
	facts, err := Look(ctx, conn)
	if err != nil {
		return facts, err
	}
	if err := errors.Join(facts.Supported(), facts.Writable()); err != nil {
		return facts, err
	}
	return facts, schemaError(sql.Check(ctx, conn))
}

// connectError turns an error that only a person can fix into a *FatalError.
func connectError(err error) error {
	var pg *pgconn.PgError
	if errors.As(err, &pg) {
		switch pg.Code {
		case pgerrcode.InvalidPassword, pgerrcode.InvalidAuthorizationSpecification:
			return fatal("the server refuses the user or password: %s", pg.Message)
		case "3D000":
			return fatal("%s; create it, or correct the address", pg.Message)
		case pgerrcode.InsufficientPrivilege:
			return fatal("%s; grant it, or connect as another user", pg.Message)
		}
		return line(err)
	}
	var certificate *tls.CertificateVerificationError
	var authority x509.UnknownAuthorityError
	var host x509.HostnameError
	if errors.As(err, &certificate) || errors.As(err, &authority) || errors.As(err, &host) {
		return fatal("the server's certificate is not accepted: %w", line(err))
	}
	if strings.Contains(err.Error(), "server refused TLS connection") {
		return fatal("the server does not speak TLS, which sslmode asks for: %w", line(err))
	}
	return line(err)
}

// line puts the driver's list of all that it tried on one line.
func line(err error) error {
	return errors.New(strings.Join(strings.Fields(err.Error()), " "))
}

func schemaError(err error) error {
	var pg *pgconn.PgError
	switch {
	case errors.Is(err, sql.ErrBehind), errors.Is(err, sql.ErrAhead):
		return &FatalError{err}
	case errors.As(err, &pg) && pg.Code == pgerrcode.InsufficientPrivilege:
		return fatal("%s; grant this user what the engine needs", pg.Message)
	case err != nil && errors.Unwrap(err) == nil:
		return &FatalError{err} // about the schema; errors of the server are wrapped
	}
	return err
}
