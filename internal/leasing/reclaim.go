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

// A Reclaimer takes back leases that have expired, whatever their type, priority or
// length. A run that has attempts left becomes due again after a backoff, as a suspect; one
// that has none is leased once more by the caller, who is to fail it.
//
// It looks at leased rows from the oldest living lease on. An old snapshot keeps the entries
// of leases long settled, so looks further back are rare: over those that may have been
// committed late every few seconds, from the very beginning a fiftieth of the time at most.
type Reclaimer struct {
	DB      run.DB
	Worker  string
	Backoff run.Backoff
	Length  time.Duration // of the leases on exhausted runs
	Steps   bool          // also lease exhausted steps of process graphs

	SetAside func([]Aside) // told of runs that are set aside; may be nil
	Doubts   *Doubts       // requests whose answers were lost; nil: of its own

	failures fault.Series
	most     fault.Ration // as many are taken back at a time, as it fails with more; 0: any number

	idle  bool
	looks [len(reach)]glance // the last look with each reach; that with the shortest is the last of all
	whole budget             // of looks from the beginning
}

// lag is how much later than its start a statement that leases runs may commit at most.
const lag = 12 * time.Second

// reach is how much later than its start a lease may be committed for a look to find it, and
// how often such looks are. Almost all leases are committed within a second. If the worker of
// one that took longer dies, it may be taken back some seconds late.
var reach = [...]struct{ back, every time.Duration }{
	{lag, 9 * time.Second},
	{4 * time.Second, 3 * time.Second},
	{time.Second, 0},
}

// A glance is a look that went well: when it began, and the time before which it left no lease
// behind; zero: unknown.
type glance struct{ at, oldest time.Time }

// maxWholePause is the longest pause between two looks from the beginning.
const maxWholePause = time.Minute

// next returns where the look that begins at start shall begin, and the index of its reach;
// -1: at the beginning. A look goes back from where the last one with its reach ended, so
// that none is missed between them.
func (r *Reclaimer) next(start time.Time) (from time.Time, reaching int) {
	if r.looks[len(r.looks)-1].oldest.IsZero() || min(49*r.whole.cost, maxWholePause) <= start.Sub(r.whole.end) {
		return time.Time{}, -1
	}
	for start.Sub(r.looks[reaching].at) < reach[reaching].every {
		reaching++
	}
	return r.looks[reaching].oldest.Add(-reach[reaching].back), reaching
}

// looked notes a look that went well. It stands for all that reach less far.
func (r *Reclaimer) looked(start time.Time, reaching int, found oldest) {
	r.idle = !found.held
	for i := max(reaching, 0); i < len(r.looks); i++ {
		r.looks[i] = glance{at: start, oldest: found.since}
	}
}

// Reclaim takes back up to n expired leases. It returns how many runs became due again, and
// the exhausted runs as leases of the caller. After an error it may have leased some all the same, when it was the
// answer that was lost: these are in doubt, and later calls, those of a Poller with the same Doubts, and Doubts.Settle look
// for them.
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
	if reaching < 0 { // also when it failed, or one that takes too long would be tried again and again
		r.whole = spent(start)
	}
	if err != nil {
		if lost(err) {
			r.Doubts.add(token, start, r.Length)
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

// takeBackMost takes expired leases back, and sets those aside that the database refuses to have taken back. A
// fault.Error means that none can be.
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

// setAside finds the expired leases that the database refuses to have taken back, and sets their runs
// aside. None means that it was not the fault of a row.
func (r *Reclaimer) setAside(ctx context.Context, from time.Time, anyCode bool) ([]Aside, error) {
	rows, _ := r.DB.Query(ctx, `SELECT * FROM workflow_take_back_refused_v1($1, $2, $3, $4, $5)`, from, r.Steps, anyCode, r.Worker, r.Length.Seconds())
	return collectAside(rows)
}

// oldest is since when the oldest lease is held; if there is none, since when that is so. Both
// by the database's clock.
type oldest struct {
	since time.Time
	held  bool
}

// takeBack is the one statement of Reclaim. Entries of leases long settled, up to the first that is held,
// are walked over but once.
//
// A server that has just come up is left alone for two seconds: living owners use them to
// reconnect and extend their leases.
func (r *Reclaimer) takeBack(ctx context.Context, from time.Time, n int, token uuid.UUID) (taken []Lease, first oldest, err error) {
	rows, _ := r.DB.Query(ctx, `SELECT * FROM workflow_take_back_v1($1, $2, $3, $4, $5, $6, $7)`,
		from, r.Steps, n, r.delays(), token, r.Worker, r.Length.Seconds())
	return scanReclaimed(rows)
}

// scanReclaimed reads one row for each lease taken, or a single one that only tells the
// oldest living lease.
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

// delays are the backoffs after each attempt, in seconds; the last goes for all further ones.
func (r *Reclaimer) delays() []float64 {
	delays := make([]float64, 30)
	for i := range delays {
		delays[i] = r.Backoff.Raw(i).Seconds()
	}
	return delays
}

// Idle reports whether the last look found nothing leased. How far back it looked: see Reclaimer.
func (r *Reclaimer) Idle() bool { return r.idle }
