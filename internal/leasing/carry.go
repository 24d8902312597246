package leasing

import (
	"encoding/json"
	"errors"
	"fmt"
	"strings"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgtype"
	"github.com/simple-workflow/simple-workflow/internal/column"
	"github.com/simple-workflow/simple-workflow/internal/naming"
)

const (
	// mostInChain and longestChain bound a chain. The step after it is stored as pending, and takes its turn among the
	// others.
	mostInChain  = 100
	longestChain = time.Second
)

// A Chain is steps that were carried on, each by the settling of the one before. The zero value is an empty chain.
type Chain struct {
	Steps int       // how many
	since time.Time // when the first was stored
}

// Or returns the longer of two chains.
func (c Chain) Or(other Chain) Chain {
	if other.Steps > c.Steps {
		return other
	}
	return c
}

// A Step is a run of a process that is due at once.
type Step struct {
	Token       uuid.UUID // of the process, not of a lease
	Type, Node  string
	Payload     json.RawMessage
	MaxAttempts int
	Priority    int
	Tenant      string          // empty: none
	Metadata    json.RawMessage // nil: none
	Instance    uuid.UUID
	BusinessKey string
	Chain       Chain // of the steps before it
}

// A Carrier carries processes on: a settle transaction stores the next steps as leased by the worker that settles, so
// they need not be found and leased. It belongs to one try of one settle transaction. A nil Carrier takes no step.
//
// Worker, Group, Terms and Keep must be set.
type Carrier struct {
	Worker string
	Group  int // how many of the leases ahead share a token, at least 1

	// Terms returns the conditions under which the worker takes a run. false: it does not.
	Terms func(typ string, priority int) (Terms, bool)
	// Keep keeps room for a run, so that nothing else takes it before the transaction has ended. ahead reports whether the
	// run is leased ahead of its handler, see Begin. It may be so only if quick is set.
	Keep func(bytes int, quick bool) (ahead, ok bool)

	// Leases are what the transaction has stored. They are ours once its commit is known.
	Leases []Lease

	steps   []Step
	terms   []Terms
	tokens  []uuid.UUID // of the leases of steps
	all     []uuid.UUID // each of tokens, once
	direct  uuid.UUID   // the token of the steps that are not ahead; zero: there is none yet
	group   uuid.UUID   // the token of the last group of those ahead
	grouped int         // how many have it
	sent    time.Time
	left    bool
}

// Take adds a step, and reports whether it did. If not, the caller stores the step as pending.
func (c *Carrier) Take(s Step) bool {
	if c == nil || s.Chain.Steps >= mostInChain || s.Chain.Steps > 0 && time.Since(s.Chain.since) > longestChain {
		return false
	}
	terms, ok := c.Terms(s.Type, s.Priority)
	if !ok {
		return false
	}
	ahead, ok := c.Keep(len(s.Payload), terms.Quick)
	if !ok {
		return false
	}
	token := &c.direct
	if ahead {
		if c.grouped++; c.grouped > c.Group {
			c.group, c.grouped = uuid.Nil, 1
		}
		token = &c.group
	}
	if *token == uuid.Nil {
		var err error
		if *token, err = newToken(ahead); err != nil {
			return false
		}
		c.all = append(c.all, *token)
	}
	c.steps, c.terms, c.tokens = append(c.steps, s), append(c.terms, terms), append(c.tokens, *token)
	return true
}

// Leave notes that the transaction stores runs as pending which are due, or will be.
func (c *Carrier) Leave() {
	if c != nil {
		c.left = true
	}
}

// Left reports whether Leave was called. It is true of a nil Carrier.
func (c *Carrier) Left() bool { return c == nil || c.left }

// Queue queues the statement that stores the steps, if there are any, on the batch that ready returns. Their leases are in
// Leases once its answer is read.
func (c *Carrier) Queue(ready func() *pgx.Batch) {
	if c == nil || len(c.steps) == 0 {
		return
	}
	c.sent = time.Now()
	ready().Queue(`
		SELECT token, follows, created_at, `+leaseColumns+`
		FROM workflow_carry_v1($1, $2, $3, $4, $5, $6, $7, $8, $9, $10, $11, $12)`,
		column.Of(c.steps, func(s Step) [16]byte { return s.Token }),
		column.Of(c.steps, func(s Step) string { return s.Type }),
		column.Of(c.steps, func(s Step) string { return s.Node }),
		column.Of(c.steps, func(s Step) json.RawMessage { return s.Payload }),
		column.Of(c.steps, func(s Step) int { return s.MaxAttempts }),
		column.Of(c.steps, func(s Step) int { return s.Priority }),
		column.Of(c.steps, func(s Step) pgtype.Text { return pgtype.Text{String: s.Tenant, Valid: s.Tenant != ""} }),
		column.Of(c.steps, func(s Step) json.RawMessage { return s.Metadata }),
		column.Of(c.tokens, func(t uuid.UUID) [16]byte { return t }),
		column.Of(c.terms, func(t Terms) float64 { return t.Length.Seconds() }),
		column.Of(c.terms, func(t Terms) pgtype.Float8 { return pgtype.Float8{Float64: t.Timeout.Seconds(), Valid: t.Timeout > 0} }),
		c.Worker,
	).Query(c.take)
}

// take reads the answer.
func (c *Carrier) take(rows pgx.Rows) error {
	of := make(map[uuid.UUID]int, len(c.steps)) // runs of one token are of one instance and one type
	for i, s := range c.steps {
		of[s.Token] = i
	}
	var token [16]byte
	var follows bool
	var created pgtype.Timestamptz
	scanner := scanLeases(&token, &follows, &created)
	c.Leases = make([]Lease, 0, len(c.steps))
	for rows.Next() {
		l, err := scanner.scan(rows)
		if err != nil {
			rows.Close()
			return fmt.Errorf("carry steps on: %w", err)
		}
		i, known := of[l.Step]
		if !known {
			rows.Close()
			return errors.New("carry steps on: a trigger has moved a run to another token")
		}
		s, t := &c.steps[i], &c.terms[i]
		l.Token, l.Follows, l.Enqueued, l.Taken, l.Worker = token, follows, created.Time, c.sent, c.Worker
		l.Length, l.Timeout = t.Length, t.Timeout
		if !strings.HasPrefix(l.Type, naming.Engine) {
			l.Instance, l.BusinessKey, l.Node = s.Instance, s.BusinessKey, s.Node
		}
		l.Chain = Chain{s.Chain.Steps + 1, s.Chain.since}
		if s.Chain.Steps == 0 {
			l.Chain.since = c.sent
		}
		c.Leases = append(c.Leases, l)
	}
	if err := rows.Err(); err != nil {
		return fmt.Errorf("carry steps on: %w", err)
	}
	return nil
}

// InDoubt notes the leases that the transaction may have stored, if err, the error of its commit, leaves that open. The
// caller must call it, and not use Leases, also if err is nil but the context of the commit has ended: a server whose
// commit waits for a standby answers a cancelled wait with success.
func (c *Carrier) InDoubt(err error, d *Doubts) {
	if c.sent.IsZero() || err != nil && (!lost(err) || errors.Is(err, pgx.ErrTxCommitRollback)) {
		return
	}
	var longest time.Duration
	for _, t := range c.terms {
		longest = max(longest, t.Length)
	}
	d.add(c.all, time.Now(), longest) // the server may work on the commit for as long as if it had been sent now
}
