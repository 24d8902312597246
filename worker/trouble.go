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

	"github.com/jackc/pgx/v5/pgconn"
	"github.com/simple-workflow/simple-workflow/internal/fault"
	"github.com/simple-workflow/simple-workflow/internal/leasing"
)

// note remembers that the database could not be reached: leases are not taken back until
// their owners have had time to reconnect and extend them. Nor is anything prepared any more in
// sessions that lose it.
func (w *Worker) note(err error) {
	if w.sessions.Note(err) {
		w.config.Logger.Warn("a session has lost its prepared statements; from now on none is prepared, and each costs more", "err", fault.Loggable(err))
	}
	var connect *pgconn.ConnectError
	var statement *fault.Error
	switch {
	case errors.As(err, &statement): // whoever holds leases cannot extend them either, perhaps
		if statement.Statement == "extend" || statement.Statement == "take back" {
			w.trouble.now()
		}
		w.faulty(statement)
	case errors.As(err, &connect), unreachable(err), code(err) == "53200":
		w.trouble.now()
	}
}

// A failing statement fails for every row.
type failing struct {
	err         *fault.Error
	since, last time.Time
	logged      time.Time // when it was last told in the log
	noted       time.Time // and in workflow_fault
	over        bool      // it has gone through since
}

const (
	faultTold  = time.Minute      // between two lines about it in the log
	faultNoted = 10 * time.Second // and two notes about it in the database
	faultOver  = 10 * time.Second // it has not failed for so long: it is tried more often than that
	faultSure  = time.Second      // it has to fail for so long to be told of: another worker may be looking for the row at fault
)

// sure reports whether a statement has failed for long enough to be told of. That leases cannot be extended others have to know at
// once: they must not take them back.
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

// goesThrough notes that a statement goes through again, which others are to know at once.
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

func (w *Worker) tendNow() {
	select {
	case w.tending <- struct{}{}:
	default:
	}
}

// tellFaults says in workflow_fault which statements fail for every row, and which do so no more; and looks what others say: while leases
// cannot be extended, none is taken back.
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
			continue // it is told the next time
		}
		w.complaints.Lock()
		switch f := w.faults[statement]; {
		case f == nil:
		case fails != nil:
			f.noted = now
		case f.over || now.Sub(f.last) > faultOver: // still
			delete(w.faults, statement)
		}
		w.complaints.Unlock()
	}
	others, err := leasing.Faults(ctx, w.db)
	if slices.Contains(others, "extend") {
		w.trouble.now()
	}
	return errors.Join(problem, err)
}

// complain logs a problem that will be met again and again while it lasts: as a warning
// every few seconds, in between for debugging only; so what faulty tells of. Of errors it logs what fault.Loggable leaves.
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

// refused reports whether err is the database's answer to what is to be stored: storing it again cannot help, if it is no error of
// the statement's.
func refused(err error) bool { return code(err) != "" && fault.Of(err) == fault.Halve }

// refusesValue reports whether the database seems to object to what is to be stored: a data exception, a constraint, a program limit,
// what a trigger raised, or an event that this worker's role may not append.
func refusesValue(err error) bool {
	return refused(err) && (slices.Contains([]string{"22", "23", "54", "P0"}, code(err)[:2]) || code(err) == "42501" && errors.As(err, new(*eventError)))
}

// unreachable reports whether the database can do nothing at all for the moment: no
// connection, no room, going down or coming up.
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
		return false // it may have waited for a lock
	}
	return pgconn.SafeToRetry(err) || errors.As(err, &network) || errors.Is(err, io.EOF) || errors.Is(err, io.ErrUnexpectedEOF) ||
		errors.Is(err, net.ErrClosed) || errors.Is(err, syscall.EPIPE) || errors.Is(err, syscall.ECONNRESET)
}

// crowded reports whether fewer at a time may do: there is no memory, no room for so many locks, or too little time.
func crowded(err error) bool { return fault.Of(err) == fault.Fewer }

// tooLong reports whether a statement was given up, by this worker or by the server. It may have waited for a lock.
func tooLong(err error) bool {
	return errors.Is(err, context.DeadlineExceeded) || code(err) == "57014" // query_canceled
}

// transient reports whether err says that the database cannot do it now, but might soon:
// out of reach, a deadlock, a lock that is held, an answer that took too long.
func transient(err error) bool {
	return code(err) != "" && !refused(err) || unreachable(err) || errors.Is(err, context.DeadlineExceeded)
}

// whole reports whether a batch that has failed with err is to be tried as a whole again, however large it is. lasting says that it has
// failed for so long that any error may be one row's.
func whole(err error, lasting bool) bool {
	first := fault.Of(err)
	return !lasting && (first == fault.Again || first == fault.Anew) && (code(err) != "" || unreachable(err))
}

// code returns the SQLSTATE of a database error, and "" of any other.
func code(err error) string { return fault.State(err) }

// sanitized drops the parts of a database error that may quote a row.
func sanitized(err error) error {
	var pg *pgconn.PgError
	if errors.As(err, &pg) {
		return &pgconn.PgError{Severity: pg.Severity, Code: pg.Code, Message: pg.Message, ConstraintName: pg.ConstraintName}
	}
	return err
}
