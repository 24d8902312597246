package worker

import (
	"context"
	"errors"
	"io"
	"log/slog"
	"net"
	"slices"
	"strings"
	"syscall"
	"time"

	"github.com/jackc/pgerrcode"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/simple-workflow/simple-workflow/internal/fault"
	"github.com/simple-workflow/simple-workflow/internal/leasing"
)

// note remembers an error that says that the database is out of reach: for a while no leases are taken back, so
// that their owners have time to reconnect and extend them. After an error that says that a session lost its
// prepared statements, nothing is prepared any more.
func (w *Worker) note(err error) {
	if w.sessions.Note(err) {
		w.config.Logger.Warn("a session has lost its prepared statements; from now on statements are not prepared, and each costs more", "err", fault.Loggable(err))
	}
	var connect *pgconn.ConnectError
	var statement *fault.Error
	switch {
	case errors.As(err, &statement): // other workers may be unable to extend their leases, too
		if statement.Statement == "extend" || statement.Statement == "take back" {
			w.trouble.now()
		}
		w.faulty(statement)
	case errors.As(err, &connect), unreachable(err), code(err) == pgerrcode.OutOfMemory:
		w.trouble.now()
	}
}

// A failing is a statement that fails for every row.
type failing struct {
	err         *fault.Error
	since, last time.Time
	logged      time.Time // when it was last logged
	noted       time.Time // when it was last written to workflow_fault
	over        bool      // it has succeeded since
}

const (
	faultTold  = time.Minute      // between two log entries about it
	faultNoted = 10 * time.Second // between two writes to workflow_fault
	faultOver  = 10 * time.Second // a statement that has not failed for this long is over its trouble; failing ones are tried more often
	faultSure  = time.Second      // a failure is reported once it has lasted this long; before that another worker may be isolating the row at fault
)

// sure reports whether a statement has failed for long enough to be reported. A failing extension of leases is
// reported at once, because other workers must not take the leases back.
func (f *failing) sure() bool { return f.err.Statement == "extend" || f.last.Sub(f.since) >= faultSure }

// faulty notes that a statement fails for every row, and logs it once a minute.
func (w *Worker) faulty(err *fault.Error) {
	now := time.Now()
	w.complaints.Lock()
	f := w.faults[err.Statement]
	if f == nil {
		f = &failing{since: now}
		w.faults[err.Statement] = f
	}
	f.err, f.last, f.over = err, now, false
	tell := f.sure() && now.Sub(f.logged) >= faultTold
	if tell {
		f.logged = now
	}
	hurry := err.Statement == "extend" && f.noted.IsZero()
	w.complaints.Unlock()
	if hurry {
		w.tendNow()
	}
	if tell {
		w.config.Logger.Error("a statement fails for every row; no run is blamed for it, and it is tried again: see workflowctl doctor",
			"statement", err.Statement, "sqlstate", code(err), "since", f.since.Round(time.Second), "err", fault.Loggable(err.Err))
	}
}

// goesThrough notes that a statement succeeds again, and has tend tell the other workers at once.
func (w *Worker) goesThrough(statement string) {
	w.complaints.Lock()
	f := w.faults[statement]
	again := f != nil && !f.over
	if again {
		f.over = true
	}
	w.complaints.Unlock()
	if again {
		w.tendNow()
	}
}

func (w *Worker) tendNow() { poke(w.tending) }

// tellFaults writes to workflow_fault which statements fail for every row, and which no longer do.
func (w *Worker) tellFaults(ctx context.Context) error {
	now := time.Now()
	told := map[string]*fault.Error{}
	w.complaints.Lock()
	for statement, f := range w.faults {
		switch over := f.over || now.Sub(f.last) > faultOver; {
		case over && f.noted.IsZero():
			delete(w.faults, statement)
		case over:
			told[statement] = nil
		case f.sure() && now.Sub(f.noted) >= faultNoted:
			told[statement] = f.err
		}
	}
	w.complaints.Unlock()
	var problem error
	for statement, fails := range told {
		if w.config.Observe.Fault != nil {
			w.config.Observe.Fault(statement, fails != nil)
		}
		if err := leasing.TellFault(ctx, w.db, statement, fails); err != nil {
			problem = errors.Join(problem, err)
			continue // reported at the next call
		}
		w.complaints.Lock()
		switch f := w.faults[statement]; {
		case f == nil:
		case fails != nil:
			f.noted = now
		case f.over || now.Sub(f.last) > faultOver: // still over
			delete(w.faults, statement)
		}
		w.complaints.Unlock()
	}
	return problem
}

// complain logs a problem that repeats while it lasts: as a warning every 5 s, and at debug level in between. A
// fault.Error is always logged at debug level, since faulty logs it. Errors are passed through fault.Loggable.
func (w *Worker) complain(msg string, args ...any) {
	level := slog.LevelDebug
	statement := slices.ContainsFunc(args, func(a any) bool {
		err, _ := a.(error)
		return errors.As(err, new(*fault.Error))
	})
	w.complaints.Lock()
	if now := time.Now(); !statement && now.Sub(w.complained[msg]) >= complaintPause {
		w.complained[msg], level = now, slog.LevelWarn
	}
	w.complaints.Unlock()
	args = slices.Clone(args)
	for i, a := range args {
		if err, ok := a.(error); ok {
			args[i] = fault.Loggable(err)
		}
	}
	w.config.Logger.Log(context.Background(), level, msg, args...)
}

const complaintPause = 5 * time.Second

// calm reports whether the database has been within reach for at least d.
func (w *Worker) calm(d time.Duration) bool {
	return w.trouble.ago() >= d
}

// down reports whether err says that there is no server, or none that accepts changes: the connection is
// refused, the server is starting up, or it is read-only. Then most likely nobody can have taken a lease.
func down(err error) bool {
	switch code(err) {
	case pgerrcode.CannotConnectNow, pgerrcode.ReadOnlySQLTransaction:
		return true
	}
	return errors.Is(err, syscall.ECONNREFUSED) || errors.Is(err, syscall.ENOENT)
}

// refused reports whether err is the database's answer to the data to be stored. If it is not the statement's
// error, storing the same data again cannot help.
func refused(err error) bool { return code(err) != "" && fault.Of(err) == fault.Halve }

// refusesValue reports whether the database seems to object to the values to be stored: a data exception, a
// constraint, a program limit, an exception raised by a trigger, or an event that this worker's role may not
// append.
func refusesValue(err error) bool {
	return refused(err) && (slices.Contains([]string{"22", "23", "54", "P0"}, code(err)[:2]) || code(err) == pgerrcode.InsufficientPrivilege && errors.As(err, new(*eventError)))
}

// unreachable reports whether the database can do nothing at all for now: it cannot be connected to, has no
// disk space or connection left, or is stopping or starting.
func unreachable(err error) bool {
	if code(err) != "" {
		return fault.Of(err) == fault.Again && !strings.HasPrefix(code(err), "40")
	}
	var hook *hookError
	var effect *effectError
	if errors.As(err, &hook) || errors.As(err, &effect) {
		return false
	}
	var broken *brokenError
	var network net.Error
	switch {
	case errors.As(err, &broken), fault.Unreached(err):
		return true
	case errors.Is(err, context.DeadlineExceeded):
		return false // the statement may have waited for a lock
	}
	return pgconn.SafeToRetry(err) || errors.As(err, &network) || errors.Is(err, io.EOF) || errors.Is(err, io.ErrUnexpectedEOF) ||
		errors.Is(err, net.ErrClosed) || errors.Is(err, syscall.EPIPE) || errors.Is(err, syscall.ECONNRESET)
}

// crowded reports whether a smaller batch may succeed: memory, locks or time ran out.
func crowded(err error) bool { return fault.Of(err) == fault.Fewer }

// tooLong reports whether a statement was cancelled, by this worker or by the server. It may have waited for a
// lock.
func tooLong(err error) bool {
	return errors.Is(err, context.DeadlineExceeded) || code(err) == pgerrcode.QueryCanceled
}

// transient reports whether err may be over soon: the database is out of reach, there was a deadlock, a lock is
// held, or the answer took too long.
func transient(err error) bool {
	return code(err) != "" && !refused(err) || unreachable(err) || errors.Is(err, context.DeadlineExceeded)
}

// whole reports whether a batch that failed with err is to be tried again as a whole, whatever its size.
// lasting says that it has failed for longer than fault.Patience: then any error may be one row's.
func whole(err error, lasting bool) bool {
	first := fault.Of(err)
	return !lasting && (first == fault.Again || first == fault.Anew) && (code(err) != "" || unreachable(err))
}

// code returns the SQLSTATE of a database error, and "" for any other error.
func code(err error) string { return fault.State(err) }

// sanitized removes the parts of a database error that may quote a row.
func sanitized(err error) error {
	var pg *pgconn.PgError
	if errors.As(err, &pg) {
		return &pgconn.PgError{Severity: pg.Severity, Code: pg.Code, Message: pg.Message, ConstraintName: pg.ConstraintName}
	}
	return err
}
