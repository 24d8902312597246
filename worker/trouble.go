package worker

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"syscall"
	"time"

	"github.com/jackc/pgx/v5/pgconn"
)

// note remembers that the database could not be reached: leases are not taken back until
// their owners have had time to reconnect and extend them. Nor is anything prepared any more in
// sessions that lose it.
func (w *Worker) note(err error) {
	if w.sessions.Note(err) {
		w.config.Logger.Warn("a session has lost its prepared statements; from now on none is prepared, and each costs more", "err", loggable(err))
	}
	var connect *pgconn.ConnectError
	if errors.As(err, &connect) || unreachable(err) || crowded(err) {
		w.trouble.now()
	}
}

// complain logs a problem that will be met again and again while it lasts: as a warning
// every few seconds, in between for debugging only.
func (w *Worker) complain(msg string, args ...any) {
	level := slog.LevelDebug
	w.complaints.Lock()
	if now := time.Now(); now.Sub(w.complained[msg]) >= complaintPause {
		w.complained[msg], level = now, slog.LevelWarn
	}
	w.complaints.Unlock()
	w.config.Logger.Log(context.Background(), level, msg, args...)
}

const complaintPause = 5 * time.Second

// calm reports whether the database has been within reach for at least d.
func (w *Worker) calm(d time.Duration) bool {
	return w.trouble.ago() >= d
}

// down reports whether err says that no server is there, or one that takes no changes, so
// that most likely nobody can have taken a lease over: the connection is refused, the server
// is starting up or read-only.
func down(err error) bool {
	switch code(err) {
	case "57P03", "25006": // cannot_connect_now, read_only_sql_transaction
		return true
	}
	return errors.Is(err, syscall.ECONNREFUSED) || errors.Is(err, syscall.ENOENT)
}

// refusesValue reports whether the database objects to what is to be stored, so that
// storing it again cannot help.
func refusesValue(err error) bool {
	switch class(err) {
	case "22", "23", "54", "P0": // data exception, constraint, program limit, raised by a trigger
		return true
	}
	return false
}

// ofOneRow reports whether a refusal may be about one row of many, a trigger of the user's perhaps, which can have any
// code: whatever does not pass by itself.
func ofOneRow(err error) bool { return code(err) != "" && !transient(err) }

// unreachable reports whether the database can do nothing at all for the moment: no
// connection, no room, going down or coming up.
func unreachable(err error) bool {
	switch class(err) {
	case "08", "58":
		return true
	case "53":
		return !crowded(err)
	case "25":
		return code(err) == "25006" // read-only: a standby, or a primary that was told so
	case "57":
		return code(err) != "57014" // query_canceled, for a statement_timeout perhaps
	case "":
	default:
		return false
	}
	var hook *hookError
	var effect *effectError
	if errors.As(err, &hook) || errors.As(err, &effect) {
		return false
	}
	var broken *brokenError
	var connect *pgconn.ConnectError
	var network net.Error
	switch {
	case errors.As(err, &broken), errors.As(err, &connect):
		return true
	case errors.Is(err, context.DeadlineExceeded):
		return false // it may have waited for a lock
	}
	return pgconn.SafeToRetry(err) || errors.As(err, &network) || errors.Is(err, io.EOF) || errors.Is(err, io.ErrUnexpectedEOF) ||
		errors.Is(err, net.ErrClosed) || errors.Is(err, syscall.EPIPE) || errors.Is(err, syscall.ECONNRESET)
}

// crowded reports whether the server has no memory, or no room for so many locks: fewer at a time may do.
func crowded(err error) bool { return code(err) == "53200" }

// transient reports whether err says that the database cannot do it now, but might soon:
// out of reach, a deadlock, a lock that is held, an answer that took too long.
func transient(err error) bool {
	switch class(err) {
	case "40", "53", "57":
		return true
	case "55":
		return code(err) == "55P03" // lock_not_available; others do not pass, or a trigger has raised them
	}
	return unreachable(err) || errors.Is(err, context.DeadlineExceeded)
}

// code returns the SQLSTATE of a database error, and "" of any other.
func code(err error) string {
	var pg *pgconn.PgError
	if errors.As(err, &pg) && len(pg.Code) == 5 {
		return pg.Code
	}
	return ""
}

func class(err error) string {
	c := code(err)
	return c[:min(2, len(c))]
}

// sanitized drops the parts of a database error that may quote a row.
func sanitized(err error) error {
	var pg *pgconn.PgError
	if errors.As(err, &pg) {
		return &pgconn.PgError{Severity: pg.Severity, Code: pg.Code, Message: pg.Message, ConstraintName: pg.ConstraintName}
	}
	return err
}

// loggable is err without anything that may quote a payload or a result: where the
// database objects to a value, its message often does.
func loggable(err error) error {
	if refusesValue(err) {
		var pg *pgconn.PgError
		errors.As(err, &pg)
		return fmt.Errorf("the database refuses a value: SQLSTATE %s, constraint %q", pg.Code, pg.ConstraintName)
	}
	return sanitized(err)
}
