// Package fault decides whose error it is when a statement on many rows fails: one row's, or the statement's.
//
// An error is a row's only if three things hold. The row is alone in the statement. Nobody has locked it. And
// the same statement then succeeds for a control, which is another row, or a row made for this in a transaction
// that is rolled back. If the control fails too, the error is the statement's, an Error, and no row is blamed.
// A class of SQLSTATEs cannot decide this. It only says what to try first, a Remedy.
//
// In the database, workflow_remedy and workflow_isolate have the same rule.
//
// # SQLSTATEs
//
// The same code answers different questions differently, so there is a list for each question, beside what asks it:
//
//   - What to try first after a statement on many rows has failed: OfState, here. Every worker and dispatcher asks this.
//   - Does the error of a user's statement in a settle transaction say anything about the run (worker, passing)? Codes
//     of a server in trouble do not: the outcome is settled again. Codes of time limits do, since a statement that
//     always takes too long would otherwise be tried for ever.
//   - Does the database object to the values that are stored (worker, refusesValue)? Then the same outcome never fits.
//   - May a statement have been executed although its answer is an error (internal/leasing, lost)? Only after codes of a
//     server that shuts down, or of a pooler in front of such a server.
//   - Does the server refuse all connections (internal/session, refusal)? Then more attempts to connect do not help.
package fault

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"time"

	"github.com/jackc/pgerrcode"
	"github.com/jackc/pgx/v5/pgconn"
)

// Patience is how long a statement is tried again as a whole. Then it is halved whatever its SQLSTATE, because
// a user's trigger may raise any.
const Patience = time.Minute

// A Remedy is what to try first after a statement on many rows has failed.
type Remedy int

// Remedies.
const (
	None     Remedy = iota // it has not failed
	Again                  // the whole statement after a pause, and halves of it after Patience: the server is out of reach, or there was a deadlock
	Anew                   // the whole statement at once: its plan is made anew
	PassOver               // halves at once; a row that is alone and locked is passed over, and never blamed
	Fewer                  // fewer rows at a time
	Halve                  // halves at once
)

// OfState returns the remedy for an SQLSTATE. An empty string stands for an error without an SQLSTATE.
func OfState(sqlstate string) Remedy {
	switch sqlstate {
	case "", pgerrcode.ReadOnlySQLTransaction, pgerrcode.DiskFull, pgerrcode.TooManyConnections:
		return Again
	case pgerrcode.InvalidSQLStatementName, pgerrcode.DuplicatePreparedStatement: // a statement that is not prepared, or is already
		return Anew
	case pgerrcode.LockNotAvailable:
		return PassOver
	case pgerrcode.OutOfMemory, pgerrcode.ConfigurationLimitExceeded, pgerrcode.QueryCanceled, pgerrcode.IdleInTransactionSessionTimeout, "25P04": // out of memory or of a limit, or it takes too long
		return Fewer
	}
	for _, class := range []string{"08", "28", "3D", "3F", "40", "57P", "58"} {
		if strings.HasPrefix(sqlstate, class) {
			return Again
		}
	}
	return Halve
}

// Of returns the remedy for an error.
func Of(err error) Remedy {
	if err == nil {
		return None
	}
	var said *pgconn.PgError
	if errors.As(err, &said) && said.Code == pgerrcode.FeatureNotSupported && said.Routine == "RevalidateCachedQuery" {
		return Anew // the table of a prepared statement was altered
	}
	return OfState(State(err))
}

// Hinted returns err with the hint of the database at the end of its text: what to do about it. errors.As still finds the
// *pgconn.PgError.
func Hinted(err error) error {
	var said *pgconn.PgError
	if errors.As(err, &said) && said.Hint != "" {
		return fmt.Errorf("%w. %s", err, said.Hint)
	}
	return err
}

// State returns the SQLSTATE of an error, or "" if it has none.
func State(err error) string {
	var said *pgconn.PgError
	if errors.As(err, &said) && len(said.Code) == 5 {
		return said.Code
	}
	return ""
}

// Loggable returns err without anything that may quote a row. The message of a database error may, whatever its
// SQLSTATE, because triggers choose both. A refused or ended connection is described by the server's own
// message, which is kept.
func Loggable(err error) error {
	var said *pgconn.PgError
	switch {
	case Unreached(err) || !errors.As(err, &said) || said.Severity == "FATAL":
		return err
	case Of(err) == Halve:
		return fmt.Errorf("the database refuses it: SQLSTATE %s, constraint %q", said.Code, said.ConstraintName)
	}
	return fmt.Errorf("the database cannot do it: SQLSTATE %s", said.Code)
}

// Unreached reports whether no server was reached. That is never a row's error, however long it lasts.
func Unreached(err error) bool {
	var connect *pgconn.ConnectError
	return errors.As(err, &connect)
}

// A Series is a series of failures of one statement without a success. A failure to reach a server ends it,
// because that says nothing about the statement. The zero value is an empty series.
type Series struct{ since time.Time }

// Of notes the result of the statement, and returns what to try first. lasting reports that the series has
// lasted longer than Patience. Then Halve takes the place of Again and Anew, and any SQLSTATE may be an answer
// about a row.
func (s *Series) Of(err error) (first Remedy, lasting bool) {
	switch first = Of(err); {
	case first == None, Unreached(err):
		s.since = time.Time{}
	case s.since.IsZero():
		s.since = time.Now()
	}
	lasting = !s.since.IsZero() && time.Since(s.since) > Patience
	if lasting && (first == Again || first == Anew) {
		first = Halve
	}
	return first, lasting
}

// Age makes the series older, if it has begun. It is for tests.
func (s *Series) Age(by time.Duration) {
	if !s.since.IsZero() {
		s.since = s.since.Add(-by)
	}
}

// A Ration is how many rows a statement may change at a time, because it failed with more; 0 means any number.
type Ration int

// plenty is the largest ration; a larger one becomes 0.
const plenty = 2000

// Of returns how many of n rows may be changed at a time.
func (r Ration) Of(n int) int {
	if r > 0 {
		return min(n, int(r))
	}
	return n
}

// Less notes that n rows, at least 2, were too many. The new ration is half of that.
func (r *Ration) Less(n int) { *r = Ration(n / 2) }

// Through notes that a full ration succeeded. The ration doubles.
func (r *Ration) Through() {
	if *r *= 2; *r > plenty {
		*r = 0
	}
}

// An Error is an error of a statement that also fails for a control. No row is blamed for it.
type Error struct {
	Statement string // lease, extend, settle, take back, mark or retention, as in workflow_fault
	Err       error  // never nil
}

func (e *Error) Error() string { return e.Statement + " fails for every row: " + e.Err.Error() }
func (e *Error) Unwrap() error { return e.Err }

// OfStatement returns err as a statement's Error. An error of the server or the connection is returned
// unchanged.
func OfStatement(statement string, err error) error {
	if first := Of(err); first == None || first == Again || first == Anew {
		return err
	}
	return &Error{statement, err}
}

// A Refusal is a row for which a statement is refused, and why.
type Refusal[R any] struct {
	Row R
	Err error
}

// A Statement changes many rows at once.
type Statement[R any] struct {
	Name    string // as in Error
	Do      func(ctx context.Context, rows []R) error
	Free    func(ctx context.Context, row R) (bool, error) // reports whether the row is unlocked, without waiting; nil: Do passes over locked rows
	Control func(ctx context.Context) error                // does the same to another row, or to one made for this, and undoes it

	anyCode bool
}

// Apart changes rows that a statement could not change all at once: err is its error. Apart halves the rows
// until each refused row is alone, and returns the refused rows. The control must succeed before and after
// that. Then each row must be refused once more, since the cause may have ended in between. Locked rows are
// passed over.
//
// With anyCode, any SQLSTATE is taken as an answer about a row. Set it if the failures have lasted, as Series.Of
// reports.
//
// An error means that not all was done. An Error is the statement's, and no row is blamed. After any other
// error the caller tries again.
func (s Statement[R]) Apart(ctx context.Context, rows []R, err error, anyCode bool) (refused []Refusal[R], _ error) {
	if s.anyCode = anyCode; s.trouble(err) {
		return nil, err
	}
	if err := s.control(ctx, err); err != nil {
		return nil, err
	}
	alone, err := s.halve(ctx, rows)
	if len(alone) == 0 {
		return nil, err
	}
	if problem := s.control(ctx, alone[0].Err); problem != nil {
		return nil, errors.Join(problem, err)
	}
	for _, r := range alone {
		again, problem := s.alone(ctx, r.Row)
		if problem != nil {
			return refused, errors.Join(problem, err)
		}
		if again != nil {
			refused = append(refused, Refusal[R]{r.Row, again})
		}
	}
	return refused, err
}

// trouble reports whether an error is about the server or the connection, and so says nothing about rows.
func (s Statement[R]) trouble(err error) bool {
	first := Of(err)
	return (first == Again || first == Anew) && (!s.anyCode || State(err) == "" || Unreached(err))
}

// control returns nil if the control succeeds, and otherwise an Error with err.
func (s Statement[R]) control(ctx context.Context, err error) error {
	problem := s.Control(ctx)
	switch {
	case problem == nil:
		return nil
	case s.trouble(problem) || ctx.Err() != nil:
		return problem
	}
	return &Error{s.Name, fmt.Errorf("%w (for a control: %w)", err, problem)}
}

// halve changes the halves of rows separately, and returns the rows that are refused alone.
func (s Statement[R]) halve(ctx context.Context, rows []R) (alone []Refusal[R], err error) {
	if len(rows) == 1 {
		refusal, err := s.alone(ctx, rows[0])
		if refusal != nil {
			alone = []Refusal[R]{{rows[0], refusal}}
		}
		return alone, err
	}
	for _, half := range [][]R{rows[:len(rows)/2], rows[len(rows)/2:]} {
		if len(half) == 0 {
			continue
		}
		if len(half) > 1 {
			switch err := s.Do(ctx, half); {
			case err == nil:
				continue
			case s.trouble(err):
				return alone, err
			}
		}
		more, err := s.halve(ctx, half)
		if alone = append(alone, more...); err != nil {
			return alone, err
		}
	}
	return alone, nil
}

// alone changes one row. It returns why the row is refused, or err if that could not be found out.
func (s Statement[R]) alone(ctx context.Context, row R) (refusal, err error) {
	if s.Free != nil {
		if free, err := s.Free(ctx, row); err != nil || !free {
			return nil, err
		}
	}
	switch err := s.Do(ctx, []R{row}); {
	case err == nil, Of(err) == PassOver:
		return nil, nil
	case s.trouble(err) || ctx.Err() != nil:
		return nil, err
	default:
		return err, nil
	}
}
