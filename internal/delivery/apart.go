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
	Lanes   []Outcome // their lanes are locked, or an error has kept MarkApart from them: they are still claimed
	Open    []Outcome // their rows are locked, or are refused together with all others: their lanes are given back
	Refused []Refusal // refused while others are not: they are parked
	Claimed bool      // a lane could not be given back: call MarkApart again, with what is in Lanes
	State   string    // the SQLSTATE of the last error, if it had one
	Fault   error     // no event can be marked, and none is blamed for it: what the database says; nil: others can
}

// A Refusal is an event that the database refuses to mark.
type Refusal struct {
	ID    int64
	State string // SQLSTATE
}

// MarkApart records outcomes that Mark has failed on, lane by lane, and gives each lane back as soon as it is
// done with it. It passes over what somebody has locked. What fails is halved until it stands alone. An
// event that is refused alone, and again after one that was marked before could be marked again, is parked with the
// database's words: in outbox_delivery, as its row takes none. No statement takes longer than patience.
//
// An error means that something is wrong with the database as a whole, or with what is in Rest.Lanes: see Claim.AnyState. Nothing is parked
// for that. Other lanes are marked all the same, unless the database does not answer.
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
			a.rest.Lanes = append(a.rest.Lanes, byLane[lane]...) // to mark twice changes nothing
		}
	}
	if trouble != nil {
		a.rest.Claimed = true
		return a.rest, fmt.Errorf("mark %d events of sink %q apart: %w", len(outcomes), c.Sink, trouble)
	}
	return a.rest, nil
}

// answers reports whether the database answers, after an error or none: then another lane may be marked.
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

	// Of the lane that is being marked:
	lane    int16
	away    bool // it is locked, or claimed no more
	checked bool // other events can be marked, or none is there to tell
	guilty  []guilty
}

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

// halve marks outcomes, or if that fails the halves of them.
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

// failed goes on with outcomes that could not be marked in one statement.
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
	default: // refused, so there is an answer
		var said *pgconn.PgError
		errors.As(err, &said)
		a.guilty = append(a.guilty, guilty{outcomes[0], said})
	}
	return nil
}

// split marks the halves of what has failed. If the first does not fail the second will, unless it is one event.
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

// try marks outcomes in one statement and returns those whose rows are locked.
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

// guilty is an outcome that was refused alone, and with which words.
type guilty struct {
	outcome Outcome
	said    *pgconn.PgError
}

// blamed is what becomes of it instead.
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

// park parks the guilty of a lane, if others can be marked still and they are refused even then: what has
// refused them may have ended meanwhile.
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

// blame records that the guilty are refused.
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

// othersWork reports whether it may be the events that are refused, and not any event. An error says nothing of that.
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

// control does to another event what marking does, as if it was open, and takes that back: it notes a failure, and that the sink has
// got it. It is one that was marked before, or else one that is open. It reports whether that works; it is not known if there is no other event.
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

// lost sorts out what is in a lane that cannot be had: if it is locked it can be later.
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

// giveBack gives back those of the claim's lanes that are meant. Those that somebody has locked for long
// are given back by the next call.
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

// What an error says about the statement that it has ended.
const (
	passing = iota // nothing: it is about the server, the connection, or chance
	stuck          // it has waited for too long
	refused        // something that it was to write is refused
)

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
