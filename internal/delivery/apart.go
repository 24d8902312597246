package delivery

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/simple-workflow/simple-workflow/internal/fault"
)

// A Rest is what MarkApart could not record, and what the database says about it.
type Rest struct {
	Lanes   []Outcome // not marked, because their lanes are locked or an error came first: the lanes are still claimed
	Open    []Outcome // not marked, because their rows are locked, or because they may not be the cause of the failure: their lanes are given back
	Refused []Refusal // refused while another event could be marked: they are parked
	Claimed bool      // a lane could not be given back: call MarkApart again, with Lanes
	State   string    // the SQLSTATE of the last error, if it had one
	Fault   error     // the database's error if no event can be marked, so that none is blamed; nil: other events can
}

// A Refusal is an event that the database refuses to mark.
type Refusal struct {
	ID    int64
	State string // SQLSTATE
}

// MarkApart records outcomes after Mark has failed. It marks lane by lane, and gives each lane back when it is done. It
// skips locked rows. It halves a set of events that fails until each failing event stands alone. It parks an event that
// is refused alone and refused again after a control, another event, could be marked. The parking and the database's
// message are recorded in outbox_delivery, because the event's own row accepts no update. No statement takes longer
// than patience.
//
// An error means that the database as a whole has a problem, or that marking the events in Rest.Lanes fails: see
// Claim.AnyState. No event is parked because of such an error. Other lanes are still marked, unless the database does
// not answer.
func MarkApart(ctx context.Context, db DB, c *Claim, outcomes []Outcome, patience time.Duration) (Rest, error) {
	a := apart{ctx: ctx, db: db, claim: c, patience: patience}
	lanes := map[int64]int16{}
	for _, row := range c.Rows {
		lanes[row.ID] = row.Lane
	}
	byLane, named := map[int16][]Outcome{}, []int16{}
	for _, o := range outcomes {
		lane := lanes[o.ID]
		if byLane[lane] == nil {
			named = append(named, lane)
		}
		byLane[lane] = append(byLane[lane], o)
	}
	trouble := a.giveBack(`lane <> ALL ($3)`, named)
	for _, lane := range named {
		err := trouble
		if a.answers(trouble) {
			err = a.markLane(lane, byLane[lane])
		}
		if err != nil {
			trouble = err
			a.rest.Lanes = append(a.rest.Lanes, byLane[lane]...) // some may be marked already: marking is idempotent
		}
	}
	if trouble != nil {
		a.rest.Claimed = true
		return a.rest, fmt.Errorf("mark %d events of sink %q apart: %w", len(outcomes), c.Sink, trouble)
	}
	return a.rest, nil
}

// answers reports whether the database still answers, given the last error or nil. If so, other lanes may be marked.
func (a *apart) answers(err error) bool {
	return err == nil || fault.State(err) != "" && a.ctx.Err() == nil
}

type apart struct {
	ctx      context.Context
	db       DB
	claim    *Claim
	patience time.Duration
	rest     Rest
	broken   bool // no event can be marked

	// About the lane that is being marked:
	lane    int16
	away    bool // the lane is locked, or no longer claimed
	checked bool // a control event could be marked, or there is none
	guilty  []guilty
}

// markLane marks the outcomes of one lane, parks the events that are refused, and gives the lane back.
func (a *apart) markLane(lane int16, outcomes []Outcome) error {
	a.lane, a.away, a.checked, a.guilty = lane, false, false, nil
	err := a.halve(outcomes, a.patience/2)
	if err == nil && !a.away {
		err = a.park()
	}
	switch {
	case err != nil:
		return err
	case a.away:
		return a.lost(outcomes)
	}
	return a.giveBack(`lane = ANY ($3)`, []int16{lane})
}

// halve marks outcomes in one statement or, if that fails, in halves.
func (a *apart) halve(outcomes []Outcome, patience time.Duration) error {
	if a.away {
		return nil
	}
	missing, err := a.try(outcomes, patience)
	switch kind := a.kind(err); {
	case err == nil:
		a.rest.Open = append(a.rest.Open, missing...)
	case kind == passing:
		return err
	default:
		return a.failed(outcomes, kind, err)
	}
	return nil
}

// failed handles outcomes that could not be marked in one statement.
func (a *apart) failed(outcomes []Outcome, kind int, err error) error {
	works, trouble := a.othersWork()
	switch {
	case trouble != nil:
		return trouble
	case !works:
		a.rest.Fault = err
		a.rest.Open = append(a.rest.Open, outcomes...)
	case len(outcomes) > 1:
		return a.split(outcomes)
	case kind == stuck:
		a.rest.Open = append(a.rest.Open, outcomes...)
	default: // refused, so err is a PgError
		var said *pgconn.PgError
		errors.As(err, &said)
		a.guilty = append(a.guilty, guilty{outcomes[0], said})
	}
	return nil
}

// split marks outcomes that failed together, in halves. If the first half succeeds, the cause is in the second half.
// That half would fail as a whole, so it is split at once, unless it is one event.
func (a *apart) split(outcomes []Outcome) error {
	half, before := len(outcomes)/2, len(a.guilty)+len(a.rest.Open)
	if err := a.halve(outcomes[:half], a.patience/2); err != nil {
		return err
	}
	if rest := outcomes[half:]; len(rest) > 1 && len(a.guilty)+len(a.rest.Open) == before && !a.away {
		return a.split(rest)
	}
	return a.halve(outcomes[half:], a.patience/2)
}

// try marks outcomes in one statement and returns those whose rows are locked. It sets away if the lane cannot be had.
func (a *apart) try(outcomes []Outcome, patience time.Duration) (missing []Outcome, err error) {
	ctx, done := context.WithTimeout(a.ctx, patience)
	defer done()
	lanes, recorded, err := mark(ctx, a.db, a.claim, outcomes, passingOver, &a.lane)
	if err != nil {
		return nil, err
	}
	if a.away = len(lanes) == 0; a.away {
		return nil, nil
	}
	for _, o := range outcomes {
		if !slices.Contains(recorded, o.ID) {
			missing = append(missing, o)
		}
	}
	return missing, nil
}

// guilty is an outcome that was refused alone, and the database's error.
type guilty struct {
	outcome Outcome
	said    *pgconn.PgError
}

// blamed returns the outcome to record instead: parked, with the database's message as the reason.
func (g guilty) blamed() Outcome {
	o, words := g.outcome, g.said.Code+": "+g.said.Message
	switch {
	case o.Delivered:
		words += " (the sink has acknowledged it; it cannot be marked)"
	case o.Reason != "":
		words += " (it cannot be marked; the sink: " + o.Reason + ")"
	}
	o.refused, o.Reason = true, words
	return o
}

// park parks the guilty events of a lane if a control event can be marked now and they are refused once more after
// that: what refused them may have ended meanwhile.
func (a *apart) park() error {
	if len(a.guilty) == 0 {
		return nil
	}
	works, known, err := a.control()
	if err != nil {
		return err
	}
	if !works || !known {
		if known {
			a.rest.Fault = a.guilty[0].said
		}
		for _, g := range a.guilty {
			a.rest.Open = append(a.rest.Open, g.outcome)
		}
		return nil
	}
	again := a.guilty
	a.guilty = nil
	for _, g := range again {
		if err := a.halve([]Outcome{g.outcome}, a.patience/2); err != nil {
			return err
		}
	}
	return a.blame()
}

// blame records the guilty events as refused, which parks them.
func (a *apart) blame() error {
	if len(a.guilty) == 0 || a.away {
		return nil
	}
	blamed := make([]Outcome, len(a.guilty))
	for k, g := range a.guilty {
		blamed[k] = g.blamed()
	}
	missing, err := a.try(blamed, a.patience/2)
	switch {
	case a.away:
		return nil
	case err != nil && a.kind(err) == passing:
		return err
	case err != nil:
		missing = blamed
	}
	for _, g := range a.guilty {
		if slices.ContainsFunc(missing, func(m Outcome) bool { return m.ID == g.outcome.ID }) {
			a.rest.Open = append(a.rest.Open, g.outcome)
		} else {
			a.rest.Refused = append(a.rest.Refused, Refusal{g.outcome.ID, g.said.Code})
		}
	}
	return nil
}

// othersWork reports whether the events that failed may be the cause: a control event can be marked, or there is none.
// It is false if no event can be marked. If it returns an error, neither is known.
func (a *apart) othersWork() (bool, error) {
	if !a.broken && !a.checked {
		works, known, err := a.control()
		if err != nil {
			return false, err
		}
		a.broken, a.checked = known && !works, true
	}
	return !a.broken, nil
}

// control marks another event, in a transaction that is rolled back: first as failed, then as delivered, as if it
// were open. It takes an event that was published before or, if there is none, an open one. works reports whether the
// database accepts that. known is false if there is no other event.
func (a *apart) control() (works, known bool, err error) {
	ctx, done := context.WithTimeout(a.ctx, a.patience/2)
	defer done()
	tx, err := a.db.Begin(ctx)
	if err != nil {
		return false, false, err
	}
	defer func() { _ = tx.Rollback(context.WithoutCancel(ctx)) }()
	claimed := make([]int64, len(a.claim.Rows))
	for k, row := range a.claim.Rows {
		claimed[k] = row.ID
	}
	var id int64
	err = tx.QueryRow(ctx, `
		WITH marked AS MATERIALIZED (
			SELECT id FROM outbox_event
			WHERE published_at IS NOT NULL AND (SELECT set_config('lock_timeout', '200ms', true)) <> ''
			ORDER BY published_at DESC
			LIMIT 1
			FOR NO KEY UPDATE SKIP LOCKED
		), open AS MATERIALIZED (
			SELECT id FROM outbox_event
			WHERE NOT EXISTS (SELECT FROM marked) AND id <> ALL ($1::bigint[])
			ORDER BY id
			LIMIT 1
			FOR NO KEY UPDATE SKIP LOCKED)
		UPDATE outbox_event e SET published_at = NULL, delivered_to = NULL
		WHERE e.id = ANY (ARRAY(SELECT id FROM marked UNION ALL SELECT id FROM open))
		RETURNING e.id`, planned, claimed).Scan(&id)
	for _, outcome := range []Outcome{{ID: id, Reason: "tried", Attempt: 1, Again: time.Second}, {ID: id, Delivered: true}} {
		if err == nil {
			_, _, err = mark(ctx, tx, a.claim, []Outcome{outcome}, ofControl, nil)
		}
	}
	switch {
	case errors.Is(err, pgx.ErrNoRows):
		return false, false, nil
	case err == nil:
		return true, true, nil
	case a.kind(err) == passing:
		return false, false, err
	}
	return false, true, nil
}

// lost handles the outcomes of a lane that could not be had. If the lane is still claimed it is only locked, and its
// outcomes can be marked later.
func (a *apart) lost(outcomes []Outcome) error {
	var ours bool
	err := a.db.QueryRow(a.ctx, `SELECT EXISTS (SELECT FROM outbox_lane WHERE sink = $1 AND lane = $2 AND claim_token = $3)`,
		planned, a.claim.Sink, a.lane, a.claim.Token).Scan(&ours)
	switch {
	case err != nil:
		return err
	case ours:
		a.rest.Lanes, a.rest.Claimed = append(a.rest.Lanes, outcomes...), true
	default:
		a.rest.Open = append(a.rest.Open, outcomes...)
	}
	return nil
}

// giveBack gives back the claim's lanes that match the condition which, in which $3 is lanes. If a lane stays locked,
// the next call of MarkApart gives them back.
func (a *apart) giveBack(which string, lanes []int16) error {
	ctx, done := context.WithTimeout(a.ctx, a.patience)
	defer done()
	_, err := a.db.Exec(ctx, `
		UPDATE outbox_lane SET claim_token = NULL, claimed_by = NULL, claim_until = NULL
		WHERE sink = $1 AND claim_token = $2 AND (SELECT set_config('lock_timeout', '200ms', true)) <> '' AND `+which,
		planned, a.claim.Sink, a.claim.Token, lanes)
	if err != nil && a.kind(err) == stuck {
		a.rest.Claimed = true
		return nil
	}
	return err
}

// What an error says about the statement that failed with it.
const (
	passing = iota // nothing: the error is about the server, the connection, or other transactions
	stuck          // the statement waited too long, for a lock or in all
	refused        // something that the statement writes is refused
)

// kind classifies an error, and notes its SQLSTATE for Rest.State.
func (a *apart) kind(err error) int {
	if err == nil || a.ctx.Err() != nil {
		return passing
	}
	if state := fault.State(err); state != "" {
		a.rest.State = state
	}
	switch first := fault.Of(err); {
	case first == fault.PassOver, errors.Is(err, context.DeadlineExceeded):
		return stuck
	case first == fault.Halve, first == fault.Fewer, a.claim.AnyState && fault.State(err) != "":
		return refused
	}
	return passing
}
