package protocol

import (
	"context"
	_ "embed"
	"fmt"
	"strings"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
)

// An Event is one change of a run, as the database made it.
type Event struct {
	Seq int64     // in the order of the commits of a run
	At  time.Time // by the database's clock
	Run uuid.UUID
	// Op is the function that made the change: lease, extend, settle, take back, give back, cancel, retry, release or
	// delete. Other values:
	//
	//   - policy: the part of a settle that first writes the attempts of the policy
	//   - enqueue, remove: the row was inserted or deleted
	//   - edit: any other statement
	//   - keep, fail, over: an outcome is kept, is made a failure by a person, or is no longer kept
	//   - begin: its handler may begin, although it was leased ahead
	//   - fault: settling fails for every run; such an event belongs to no run
	Op   string
	Over bool // its previous lease had expired

	Was, Became Traced

	// For keep, fail, over and begin, which do not change the run.
	Kept   uuid.UUID // the token of the lease
	Keeps  string    // the verdict of what is kept; effects, if these are lost
	Worker string    // the worker whose outcome it is
}

// Traced is a row in a trace. The zero value stands for no row.
type Traced struct {
	Status              string
	Attempt, Most       int
	LeaseNo             int64
	Token, Settled      uuid.UUID // Nil: null
	LeasedBy, SettledBy string    // empty: null
	LeaseUntil          time.Time // zero: null
	Suspect             bool
	Hidden, Deleted     bool  // held or soft-deleted; soft-deleted
	Uncharged           bool  // the lease is that of an exhausted run
	Company             *bool // whether there was another suspect beside it at its last attempt; nil: the database does not say
	Follows             bool  // its policy sets its attempts
}

// String describes the important fields.
func (t Traced) String() string {
	if t.Status == "" {
		return "not there"
	}
	text := fmt.Sprintf("%s, attempt %d of %d, lease %d", t.Status, t.Attempt, t.Most, t.LeaseNo)
	for _, flag := range []struct {
		is   bool
		what string
	}{{t.Suspect, ", suspect"}, {t.Hidden, ", hidden"}, {t.Deleted, ", deleted"}, {t.Uncharged, ", not charged"}} {
		if flag.is {
			text += flag.what
		}
	}
	if t.LeasedBy != "" {
		text += ", held by " + t.LeasedBy
	}
	return text
}

// String describes the event.
func (e Event) String() string {
	text := fmt.Sprintf("%s %s: %s", e.At.UTC().Format("15:04:05.000"), e.Op, e.Became)
	if e.ofKept() {
		text += fmt.Sprintf("; kept: %s, by %s", e.Keeps, e.Worker)
	}
	return text
}

// ofKept reports whether the event changes a kept outcome, and not the run.
func (e Event) ofKept() bool { return e.Op == "keep" || e.Op == "fail" || e.Op == "over" }

// aheadVersion is the UUID version of the tokens of leases ahead, see leasing.Lease.Ahead.
const aheadVersion = 8

// isAhead reports whether the row is under a lease ahead whose attempt is charged only if its handler may begin.
func (t Traced) isAhead() bool { return t.Token.Version() == aheadVersion && !t.Uncharged }

// DB is a pool, a connection or a transaction.
type DB interface {
	Exec(ctx context.Context, sql string, args ...any) (pgconn.CommandTag, error)
	Query(ctx context.Context, sql string, args ...any) (pgx.Rows, error)
}

//go:embed trace.sql
var traceSQL string

// Install makes the database record every further change of a run in the table workflow_trace, in the schema of the
// caller's search_path that has workflow_run. It is for tests.
func Install(ctx context.Context, db DB) error {
	if _, err := db.Exec(ctx, traceSQL, pgx.QueryExecModeSimpleProtocol); err != nil {
		return fmt.Errorf("install the trace of runs: %w", err)
	}
	return nil
}

// Read calls each with the events of the trace, run by run.
func Read(ctx context.Context, db DB, each func(Event)) error {
	const traced = `coalesce((x).status, ''), coalesce((x).attempt, 0), coalesce((x).most, 0), coalesce((x).lease_no, 0), (x).token, (x).settled,
		coalesce((x).leased_by, ''), coalesce((x).settled_by, ''), CASE WHEN isfinite((x).lease_until) THEN (x).lease_until END,
		coalesce((x).suspect, false), coalesce((x).hidden, false), coalesce((x).deleted, false), coalesce((x).uncharged, false), (x).company, coalesce((x).follows, false)`
	rows, _ := db.Query(ctx, `SELECT seq, at, run, op, over, `+strings.ReplaceAll(traced, "(x)", "(was)")+`, `+strings.ReplaceAll(traced, "(x)", "(became)")+` , kept, coalesce(keeps, ''), coalesce(worker, '') FROM workflow_trace ORDER BY run, seq`)
	var e Event
	var until [2]*time.Time
	var token, settled [2]uuid.NullUUID
	var kept uuid.NullUUID
	fields := []any{&e.Seq, &e.At, &e.Run, &e.Op, &e.Over}
	for i, t := range []*Traced{&e.Was, &e.Became} {
		fields = append(fields, &t.Status, &t.Attempt, &t.Most, &t.LeaseNo, &token[i], &settled[i], &t.LeasedBy, &t.SettledBy, &until[i], &t.Suspect, &t.Hidden, &t.Deleted, &t.Uncharged, &t.Company, &t.Follows)
	}
	fields = append(fields, &kept, &e.Keeps, &e.Worker)
	if _, err := pgx.ForEachRow(rows, fields, func() error {
		e.Kept = kept.UUID
		for i, t := range []*Traced{&e.Was, &e.Became} {
			t.Token, t.Settled, t.LeaseUntil = token[i].UUID, settled[i].UUID, time.Time{}
			if until[i] != nil {
				t.LeaseUntil = *until[i]
			}
		}
		each(e)
		return nil
	}); err != nil {
		return fmt.Errorf("read the trace of runs: %w", err)
	}
	return nil
}
