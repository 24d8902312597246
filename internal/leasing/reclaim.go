package leasing

import (
	"context"
	"fmt"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"
	"github.com/simple-workflow/simple-workflow/internal/fault"
	"github.com/simple-workflow/simple-workflow/run"
)

// A Reclaimer takes back leases that have expired, of all types, priorities and lengths. A run
// that has attempts left becomes due again after a backoff, as a suspect. An exhausted run is
// leased once more by the caller, who must fail it.
//
// A look walks over the leased rows in the order in which they were leased, from the oldest lease
// that is still held. An old snapshot keeps the index entries of leases that were settled long ago,
// so looks that begin earlier are rarer. A look over the leases that may have been committed late
// comes every few seconds. Looks from the very beginning take a fiftieth of the time at most.
type Reclaimer struct {
	DB      run.DB
	Worker  string
	Backoff run.Backoff
	Length  time.Duration // of the leases on exhausted runs
	Steps   bool          // also lease exhausted steps of processes

	SetAside func([]Aside) // called with the runs that were set aside; may be nil
	Doubts   *Doubts       // requests whose answers were lost; nil: the Reclaimer makes its own

	failures fault.Series
	most     fault.Ration // how many leases are taken back at a time, because more have failed; 0: any number

	idle  bool
	looks [len(reach)]glance // the last look with each reach; the one with the shortest reach is the last of all
	whole budget             // of looks from the beginning
}

// lag is the longest that a statement that leases runs may take from its start to its commit.
const lag = 12 * time.Second

// reach lists the kinds of looks that begin before the oldest lease held: how far back they go, and
// how often they come. A look finds a lease that was committed at most back after its statement
// started. Almost all leases are committed within a second. If a lease took longer and its worker
// dies, it may be taken back some seconds late.
var reach = [...]struct{ back, every time.Duration }{
	{lag, 9 * time.Second},
	{4 * time.Second, 3 * time.Second},
	{time.Second, 0},
}

// A glance is a successful look: when it began, and the time before which no lease was left after
// it; zero: unknown.
type glance struct{ at, oldest time.Time }

// maxWholePause is the longest pause between two looks from the beginning.
const maxWholePause = time.Minute

// next returns where the look that begins at start must begin among the leases, as a time, and the
// index of its reach. -1 is a look from the beginning. A look goes back from the oldest lease that the
// last look with the same reach found, so that no lease between the two looks is missed.
func (r *Reclaimer) next(start time.Time) (from time.Time, reaching int) {
	if r.looks[len(r.looks)-1].oldest.IsZero() || min(49*r.whole.cost, maxWholePause) <= start.Sub(r.whole.end) {
		return time.Time{}, -1
	}
	for start.Sub(r.looks[reaching].at) < reach[reaching].every {
		reaching++
	}
	return r.looks[reaching].oldest.Add(-reach[reaching].back), reaching
}

// looked notes a successful look. It counts as a look with each shorter reach, too.
func (r *Reclaimer) looked(start time.Time, reaching int, found oldest) {
	r.idle = !found.held
	for i := max(reaching, 0); i < len(r.looks); i++ {
		r.looks[i] = glance{at: start, oldest: found.since}
	}
}

// Reclaim takes back up to n expired leases. It returns how many runs became due again, and the exhausted runs as
// leases of the caller. If only the answer was lost, exhausted runs may be leased in spite of the error. Such leases
// are in doubt: later calls end them, and so do Doubts.Settle and a Poller with the same Doubts.
func (r *Reclaimer) Reclaim(ctx context.Context, n int) (again int, exhausted []Lease, err error) {
	if r.Doubts == nil {
		r.Doubts = &Doubts{}
	}
	if err := r.Doubts.Settle(ctx, r.DB, r.Worker); err != nil {
		return 0, nil, err
	}
	token, err := uuid.NewRandom()
	if err != nil {
		return 0, nil, fmt.Errorf("draw a lease token: %w", err)
	}
	start := time.Now()
	from, reaching := r.next(start)
	found, first, err := r.takeBackMost(ctx, from, n, token)
	if reaching < 0 { // also after an error: otherwise a look that takes too long would be repeated at once, for ever
		r.whole = spent(start)
	}
	if err != nil {
		if lost(err) {
			r.Doubts.add([]uuid.UUID{token}, start, r.Length)
		}
		return 0, nil, fmt.Errorf("take back expired leases: %w", err)
	}
	r.looked(start, reaching, first)
	for _, l := range found {
		if !l.Exhausted {
			again++
			continue
		}
		l.Token, l.Taken, l.Worker, l.Length = token, start, r.Worker, r.Length
		exhausted = append(exhausted, l)
	}
	return again, exhausted, nil
}

// takeBackMost takes expired leases back, and sets aside the runs for which the database refuses that. A fault.Error
// means that no lease can be taken back.
func (r *Reclaimer) takeBackMost(ctx context.Context, from time.Time, n int, token uuid.UUID) (taken []Lease, held oldest, err error) {
	for {
		n = r.most.Of(n)
		taken, held, err = r.takeBack(ctx, from, n, token)
		first, anyCode := r.failures.Of(err)
		switch {
		case first == fault.None:
			r.most.Through()
			return taken, held, nil
		case first == fault.Again, first == fault.Anew:
			return nil, held, err
		case first == fault.Fewer && n > 1:
			r.most.Less(n)
			return nil, held, err
		}
		aside, problem := r.setAside(ctx, from, anyCode || first == fault.Fewer)
		switch {
		case problem != nil:
			return nil, held, fault.OfStatement("take back", problem)
		case len(aside) == 0:
			return nil, held, fault.OfStatement("take back", err)
		case r.SetAside != nil:
			r.SetAside(aside)
		}
	}
}

// setAside finds the expired leases that the database refuses to take back, and sets their runs aside. If it returns
// none, no row is the cause.
func (r *Reclaimer) setAside(ctx context.Context, from time.Time, anyCode bool) ([]Aside, error) {
	rows, _ := r.DB.Query(ctx, `SELECT * FROM workflow_take_back_refused_v1($1, $2, $3, $4, $5)`, from, r.Steps, anyCode, r.Worker, r.Length.Seconds())
	return collectAside(rows)
}

// oldest is when the oldest lease was taken, if one is held, and otherwise when the look was made.
// Both are by the database's clock.
type oldest struct {
	since time.Time
	held  bool
}

// takeBack sends the statement that takes back, for Reclaim. It walks only once over the index entries of settled
// leases that stand before the first lease held.
//
// The statement takes nothing back in the first two seconds after the server has started, so that
// living workers can reconnect and extend their leases.
func (r *Reclaimer) takeBack(ctx context.Context, from time.Time, n int, token uuid.UUID) (taken []Lease, first oldest, err error) {
	rows, _ := r.DB.Query(ctx, `SELECT * FROM workflow_take_back_v1($1, $2, $3, $4, $5, $6, $7)`,
		from, r.Steps, n, r.delays(), token, r.Worker, r.Length.Seconds())
	return scanReclaimed(rows)
}

// scanReclaimed reads one row for each lease taken back, or a single row that has only the oldest
// lease held.
func scanReclaimed(rows pgx.Rows) (taken []Lease, first oldest, err error) {
	scanner := scanLeases(&first.since, &first.held)
	found, err := pgx.CollectRows(rows, func(row pgx.CollectableRow) (*Lease, error) {
		if values := row.RawValues(); values[2] == nil {
			skip := make([]any, len(values))
			skip[0], skip[1] = &first.since, &first.held
			return nil, row.Scan(skip...)
		}
		l, err := scanner.scan(row)
		return &l, err
	})
	for _, l := range found {
		if l != nil {
			taken = append(taken, *l)
		}
	}
	return taken, first, err
}

// delays returns the backoff after each attempt in seconds. The last one is used for all later attempts.
func (r *Reclaimer) delays() []float64 {
	delays := make([]float64, 30)
	for i := range delays {
		delays[i] = r.Backoff.Raw(i).Seconds()
	}
	return delays
}

// Idle reports whether the last look found no lease held. Most looks do not see all leases: see Reclaimer.
func (r *Reclaimer) Idle() bool { return r.idle }
