// Package fault says whose error it is when a statement on many rows fails.
//
// An error is a row's only if three things hold: the row stands alone, it is not locked, and the same
// statement then goes through for a control, which is another row, or one that is made for this and undone. If the control
// fails too it is the statement's error, an Error: no row is blamed for it. A class of SQLSTATE cannot tell; it says no
// more than what is tried first, a Remedy.
//
// The database has the same rule for what is halved there: workflow_remedy and workflow_isolate.
package fault

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"time"

	"github.com/jackc/pgx/v5/pgconn"
)

// Patience is after how long a statement that is tried as a whole, again and again, is halved all the same: a
// trigger of a user's may raise any SQLSTATE.
const Patience = time.Minute

// A Remedy is what is tried first after a statement on many rows has failed.
type Remedy int

// What is tried first.
const (
	None     Remedy = iota // it has not failed
	Again                  // the whole again, paced, and halved after Patience: the server is out of reach, or two were in each other's way
	Anew                   // the whole again, at once: its plan is made anew
	PassOver               // halved at once; what stands alone waits for somebody's lock: it is passed over, and never blamed
	Fewer                  // fewer at a time
	Halve                  // halved at once
)

// OfState returns the remedy for a SQLSTATE; empty: there is none.
func OfState(sqlstate string) Remedy {
	switch sqlstate {
	case "", "25006", "53100", "53300": // read_only_sql_transaction, disk_full, too_many_connections
		return Again
	case "26000", "42P05": // a statement that is not prepared, or is already
		return Anew
	case "55P03": // lock_not_available
		return PassOver
	case "53200", "53400", "57014", "25P03", "25P04": // out of memory or of a limit, or it takes too long
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
	if errors.As(err, &said) && said.Code == "0A000" && said.Routine == "RevalidateCachedQuery" {
		return Anew // the table of a prepared statement was altered
	}
	return OfState(State(err))
}

// State returns the SQLSTATE of an error; empty: it has none.
func State(err error) string {
	var said *pgconn.PgError
	if errors.As(err, &said) && len(said.Code) == 5 {
		return said.Code
	}
	return ""
}

// Loggable returns err without anything that may quote a row. The words of an answer may, whatever its code: triggers choose
// both. Those of a connection that is refused or ended are the server's.
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

// Unreached reports whether no server was reached at all: no row has anything to do with that, however long it lasts.
func Unreached(err error) bool {
	var connect *pgconn.ConnectError
	return errors.As(err, &connect)
}

// A Series is of failures of one statement, each and every one since it began. Time in which no server is reached says nothing,
// and ends it. The zero value has none.
type Series struct{ since time.Time }

// Of notes what came of the statement and returns what is tried first. lasting says that the series has lasted for longer than
// Patience: then what would be tried as a whole is halved, and any SQLSTATE taken for an answer about a row.
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

// Age makes the series longer, in tests, if it has begun.
func (s *Series) Age(by time.Duration) {
	if !s.since.IsZero() {
		s.since = s.since.Add(-by)
	}
}

// A Ration is how many rows a statement changes at a time, as it fails with more; 0: any number.
type Ration int

// plenty is a ration that is none any more.
const plenty = 2000

// Of returns how many of n there may be.
func (r Ration) Of(n int) int {
	if r > 0 {
		return min(n, int(r))
	}
	return n
}

// Less notes that n, two at least, were too many: half of them the next time.
func (r *Ration) Less(n int) { *r = Ration(n / 2) }

// Through notes that as many as there may be went through: twice as many the next time.
func (r *Ration) Through() {
	if *r *= 2; *r > plenty {
		*r = 0
	}
}

// An Error is a statement's: it fails for a control, too. It is no row's, and nothing is blamed for it.
type Error struct {
	Statement string // lease, extend, settle, take back, mark or retention, as in workflow_fault
	Err       error  // never nil
}

func (e *Error) Error() string { return e.Statement + " fails for every row: " + e.Err.Error() }
func (e *Error) Unwrap() error { return e.Err }

// OfStatement returns err as a statement's, unless it is about the server or the connection: then it returns it as it is.
func OfStatement(statement string, err error) error {
	if first := Of(err); first == None || first == Again || first == Anew {
		return err
	}
	return &Error{statement, err}
}

// A Refusal is a row that a statement is refused for, and why.
type Refusal[R any] struct {
	Row R
	Err error
}

// A Statement changes many rows at once.
type Statement[R any] struct {
	Name    string // as in an Error
	Do      func(ctx context.Context, rows []R) error
	Free    func(ctx context.Context, row R) (bool, error) // whether nobody has locked it, asked without waiting; nil: Do passes over what is locked
	Control func(ctx context.Context) error                // does the same to another row, or to one that is made for this, and undoes it

	anyCode bool
}

// Apart does to rows what could not be done to all of them at once: err is what the statement failed with. It halves them until those that
// are refused stand alone, and returns these. Before and after that the control has to go through, and then a row has to be refused once more, as
// what refused it may have ended between the two. Rows that are locked are passed over.
//
// With anyCode any SQLSTATE is taken for an answer about a row: see Series.
//
// An error means that not all was done. An Error is the statement's, no row is blamed for it; any other is for the caller to try again.
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

// trouble reports whether an error is about the server or the connection, and says nothing of rows.
func (s Statement[R]) trouble(err error) bool {
	first := Of(err)
	return (first == Again || first == Anew) && (!s.anyCode || State(err) == "" || Unreached(err))
}

// control returns nil if the control goes through; else err, as the statement's.
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

// halve does it to the halves of rows, and returns those that are refused alone.
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

// alone does it to one row, and returns why that is refused; err: it could not be tried.
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
