package leasing

import (
	"context"
	"fmt"
	"math"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"
	"github.com/simple-workflow/simple-workflow/internal/column"
	"github.com/simple-workflow/simple-workflow/run"
)

// Ahead says how many runs of quick types an Acquire may lease ahead of their handlers, beyond those that it leases to be
// begun at once. The zero value means none.
type Ahead struct {
	Runs  int // at most
	Bytes int // of payload, as the database stores it, at most, with that of the runs to be begun at once
	Group int // how many of them share a token, and are begun by one mark; at least 1

	// Behind reports whether runs that were leased ahead wait. Then further runs of quick types are leased only ahead, so
	// that they do not pass those.
	Behind bool
}

// aheadVersion is the UUID version of the token of a lease ahead; every other lease has a random one, of version 4.
const aheadVersion uuid.Version = 8

// tokens draws the tokens of one request: first that of the runs to be begun at once, then one for each group of those
// leased ahead.
func (p *Poller) tokens(ahead int) (tokens []uuid.UUID, err error) {
	for left := ahead; len(tokens) == 0 || left > 0; {
		token, err := newToken(len(tokens) > 0)
		if err != nil {
			return nil, err
		}
		if len(tokens) > 0 {
			left -= p.Ahead.Group
		}
		tokens = append(tokens, token)
	}
	return tokens, nil
}

// newToken draws the token of a lease, which may be one ahead.
func newToken(ahead bool) (uuid.UUID, error) {
	token, err := uuid.NewRandom()
	if err != nil {
		return token, fmt.Errorf("draw a lease token: %w", err)
	}
	if ahead {
		token[6] = token[6]&0x0f | byte(aheadVersion)<<4
	}
	return token, nil
}

// isQuick reports whether runs of the lane may be leased ahead of their handlers.
func (r request) isQuick() bool { return r.Quick && !r.suspect && !r.probe }

// fill leases up to n runs from the chosen lanes, and up to Ahead.Runs more from the lanes of quick types. full reports
// whether more may be due. due is that of take.
//
// One statement does it if all lanes are of quick types. Runs of other types, and suspects, must have a slot, so they are
// leased by a statement of their own, which comes first.
func (p *Poller) fill(ctx context.Context, chosen []request, n, suspects int) (leases []Lease, due int, full bool, err error) {
	quick, others := split(chosen, request.isQuick)
	direct := chosen
	switch {
	case p.Ahead.Behind:
		direct = others
	case p.Ahead.Runs > 0 && len(others) == 0:
		leases, due, err = p.take(ctx, quick, ask{n: n, ahead: p.Ahead.Runs})
		return leases, due, due == n+p.Ahead.Runs || due > len(leases), err
	}
	if n > 0 && len(direct) > 0 {
		leases, due, err = p.take(ctx, direct, ask{n: n, suspects: suspects})
		if full = due == n; err != nil || !full && !p.Ahead.Behind {
			return leases, due, full, err
		}
	}
	if p.Ahead.Runs == 0 || len(quick) == 0 {
		return leases, due, full, nil
	}
	more, further, err := p.take(ctx, quick, ask{ahead: p.Ahead.Runs})
	if len(leases) > 0 { // these must not be lost with the error
		p.owed, err = err, nil
	}
	full = full || further == p.Ahead.Runs || further > len(more)
	return append(leases, more...), due + further, full, err
}

// asksAll reports whether fill asks every chosen lane for runs.
func (p *Poller) asksAll(chosen []request, n int) bool {
	for _, r := range chosen {
		direct := n > 0 && !(r.isQuick() && p.Ahead.Behind)
		if !direct && !(r.isQuick() && p.Ahead.Runs > 0) {
			return false
		}
	}
	return true
}

// split returns the requests for which is reports true, and the others, in their order.
func split(all []request, is func(request) bool) (some, others []request) {
	for _, r := range all {
		if is(r) {
			some = append(some, r)
		} else {
			others = append(others, r)
		}
	}
	return some, others
}

// An ask is how many runs one statement may lease.
type ask struct {
	n        int // to be begun at once
	suspects int // of these, at most
	ahead    int // further ones, ahead of their handlers; then the lanes are all of quick types
}

// upTo returns a with at most most runs in all.
func (a ask) upTo(most int) ask {
	a.n = min(a.n, most)
	a.ahead = min(a.ahead, most-a.n)
	return a
}

// Begin asks whether the handlers of groups of runs that were leased ahead may begin, and stores that they may. tokens
// and runs are pairs: the token of a group, and a run that should still be leased with it. Several runs of a group may be
// named. begun has the tokens of the groups that may begin. The other groups were taken back, or the named runs have
// ended; none of their runs may begin. After an error it may be called again.
//
// A crash of the worker is charged to every run of a group from the moment that this is stored.
func Begin(ctx context.Context, db run.DB, tokens, runs []uuid.UUID) (begun map[uuid.UUID]bool, err error) {
	array := func(ids []uuid.UUID) [][16]byte { return column.Of(ids, func(id uuid.UUID) [16]byte { return id }) }
	rows, _ := db.Query(ctx, `SELECT token FROM workflow_begin_v1($1, $2) WHERE begun`, array(tokens), array(runs))
	may, err := pgx.CollectRows(rows, pgx.RowTo[uuid.UUID])
	if err != nil {
		return nil, fmt.Errorf("begin %d groups of runs: %w", len(tokens), err)
	}
	begun = make(map[uuid.UUID]bool, len(may))
	for _, token := range may {
		begun[token] = true
	}
	return begun, nil
}

// ForgetBegun removes what Begin has stored for leases that have ended, once it is a minute old. The database removes some
// at a time.
func ForgetBegun(ctx context.Context, db run.DB) error {
	for more := true; more; {
		rows, _ := db.Query(ctx, `SELECT workflow_forget_begun_v1()`)
		var err error
		if more, err = pgx.CollectExactlyOneRow(rows, pgx.RowTo[bool]); err != nil {
			return fmt.Errorf("remove marks of leases that have ended: %w", err)
		}
	}
	return nil
}

// Due is what is due by the last discovery.
type Due struct {
	Ahead  bool // runs that may be leased ahead
	Others bool // others: those of types that are not quick, and suspects, also if the caller has no room for these
	Mixed  bool // others, or probes, are due, or were within the last minute
	Top    int  // the highest priority of all of them; math.MinInt: none are due, or they have been leased since
}

// Due returns what is due by the last discovery.
func (p *Poller) Due() Due {
	due := Due{Top: math.MinInt}
	for _, r := range p.choose(1, 1, true) {
		due.Ahead, due.Others = due.Ahead || r.isQuick(), due.Others || !r.isQuick()
		if !p.drained {
			due.Top = max(due.Top, r.priority)
		}
	}
	due.Mixed = due.Others || p.wereOthers()
	return due
}

// wereOthers reports whether discovery has found due runs within the last minute that may not be leased ahead.
func (p *Poller) wereOthers() bool {
	now := time.Now()
	for l, at := range p.lanes {
		if now.Sub(at.wasDue) >= memory {
			continue
		}
		if terms := p.Terms(l.typ); !terms.Quick || terms.Room >= 0 || l.suspect || p.isOpen(l.typ) {
			return true
		}
	}
	return false
}
