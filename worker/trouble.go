package worker

import (
	"context"
	"errors"
	"io"
	"net"
	"syscall"
	"time"

	"github.com/jackc/pgx/v5/pgconn"
)

// note remembers that the database could not be reached: leases are not taken back until
// their owners have had time to reconnect and extend them.
func (w *Worker) note(err error) {
	var connect *pgconn.ConnectError
	if errors.As(err, &connect) {
		w.trouble.Store(time.Now().UnixNano())
	}
}

// calm reports whether the database has been within reach for at least d.
func (w *Worker) calm(d time.Duration) bool {
	return time.Since(time.Unix(0, w.trouble.Load())) >= d
}

// down reports whether err says that no server is there at all, so that nobody can have
// taken a lease over: the connection is refused, or the server is starting up.
func down(err error) bool {
	var pg *pgconn.PgError
	if errors.As(err, &pg) {
		return pg.Code == "57P03" // cannot_connect_now
	}
	return errors.Is(err, syscall.ECONNREFUSED) || errors.Is(err, syscall.ENOENT)
}

// refusesValue reports whether the database objects to what is to be stored, so that
// storing it again cannot help.
func refusesValue(err error) bool {
	var pg *pgconn.PgError
	if !errors.As(err, &pg) || len(pg.Code) != 5 {
		return false
	}
	switch pg.Code[:2] {
	case "22", "23", "54": // data exception, integrity constraint, program limit
		return true
	}
	return false
}

// transient reports whether err says that the database cannot do it now, but might later:
// broken connections, deadlocks, a full disk, a server that starts or stops.
func transient(err error) bool {
	var pg *pgconn.PgError
	if !errors.As(err, &pg) || len(pg.Code) != 5 {
		var connect *pgconn.ConnectError
		return errors.As(err, &connect) || pgconn.Timeout(err) || errors.Is(err, context.DeadlineExceeded) ||
			pgconn.SafeToRetry(err) || brokenConnection(err)
	}
	switch pg.Code[:2] {
	case "08", "25", "40", "53", "55", "57", "58":
		return pg.Code != "25P02"
	}
	return false
}

// brokenConnection reports whether err comes from the connection and not from the server.
func brokenConnection(err error) bool {
	var network net.Error
	return errors.As(err, &network) || errors.Is(err, io.EOF) || errors.Is(err, io.ErrUnexpectedEOF) ||
		errors.Is(err, net.ErrClosed) || errors.Is(err, syscall.EPIPE) || errors.Is(err, syscall.ECONNRESET)
}

// sanitized drops the parts of a database error that may quote a row.
func sanitized(err error) error {
	var pg *pgconn.PgError
	if errors.As(err, &pg) {
		return &pgconn.PgError{Severity: pg.Severity, Code: pg.Code, Message: pg.Message, ConstraintName: pg.ConstraintName}
	}
	return err
}
