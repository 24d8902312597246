package leasing

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"slices"
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

	// Terms returns the conditions under which the worker takes a run. false: it does not. It is called once for each type
	// and priority.
	Terms func(typ string, priority int) (Terms, bool)
	// Keep keeps room for a run, so that nothing else takes it before the transaction has ended. ahead reports whether the
	// run is leased ahead of its handler, see Begin. It may be so only if quick is set.
	Keep func(bytes int, quick bool) (ahead, ok bool)

	// Leases are what the transaction has stored. They are ours once its commit is known.
	Leases []Lease

	known   map[kind]*Terms // what Terms has returned
	taken   []taken
	direct  uuid.UUID // the token of the steps that are not ahead; zero: there is none yet
	group   uuid.UUID // the token of the last group of those ahead
	grouped int       // how many have it
	sent    time.Time // when the statement that stores the steps was about to be sent; zero: there is none
	left    bool
}

type kind struct {
	typ      string
	priority int
}

// A taken step has the terms and the token of its lease.
type taken struct {
	Step
	Terms
	token uuid.UUID
}

// Take adds a step, and reports whether it did. If not, the caller stores the step as pending.
func (c *Carrier) Take(s Step) bool {
	if c == nil || s.Chain.Steps >= mostInChain || s.Chain.Steps > 0 && time.Since(s.Chain.since) > longestChain {
		return false
	}
	terms := c.termsOf(s.Type, s.Priority)
	if terms == nil {
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
	}
	c.taken = append(c.taken, taken{s, *terms, *token})
	return true
}

// termsOf returns what Terms says of runs; nil: the worker does not take them.
func (c *Carrier) termsOf(typ string, priority int) *Terms {
	of := kind{typ, priority}
	terms, known := c.known[of]
	if !known {
		if t, ok := c.Terms(typ, priority); ok {
			terms = &t
		}
		if c.known == nil {
			c.known = map[kind]*Terms{}
		}
		c.known[of] = terms
	}
	return terms
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
	if c == nil || len(c.taken) == 0 {
		return
	}
	c.sent = time.Now()
	ready().Queue(`
		SELECT token, follows, created_at, `+leaseColumns+`
		FROM workflow_carry_v1($1, $2, $3, $4, $5, $6, $7, $8, $9, $10, $11, $12)`,
		column.Of(c.taken, func(t taken) [16]byte { return t.Token }),
		column.Of(c.taken, func(t taken) string { return t.Type }),
		column.Of(c.taken, func(t taken) string { return t.Node }),
		column.Of(c.taken, func(t taken) json.RawMessage { return t.Payload }),
		column.Of(c.taken, func(t taken) int { return t.MaxAttempts }),
		column.Of(c.taken, func(t taken) int { return t.Priority }),
		column.Of(c.taken, func(t taken) pgtype.Text { return pgtype.Text{String: t.Tenant, Valid: t.Tenant != ""} }),
		column.Of(c.taken, func(t taken) json.RawMessage { return t.Metadata }),
		column.Of(c.taken, func(t taken) [16]byte { return t.token }),
		column.Of(c.taken, func(t taken) float64 { return t.Length.Seconds() }),
		column.Of(c.taken, func(t taken) pgtype.Float8 { return pgtype.Float8{Float64: t.Timeout.Seconds(), Valid: t.Timeout > 0} }),
		c.Worker,
	).Query(c.answered)
}

// answered reads the answer.
func (c *Carrier) answered(rows pgx.Rows) error {
	of := make(map[uuid.UUID]*taken, len(c.taken)) // runs of one token are of one instance and one type
	for i := range c.taken {
		of[c.taken[i].Token] = &c.taken[i]
	}
	var token [16]byte
	var follows bool
	var created pgtype.Timestamptz
	scanner := scanLeases(&token, &follows, &created)
	c.Leases = make([]Lease, 0, len(c.taken))
	for rows.Next() {
		l, err := scanner.scan(rows)
		if err != nil {
			rows.Close()
			return fmt.Errorf("carry steps on: %w", err)
		}
		t := of[l.Step]
		if t == nil {
			rows.Close()
			return errors.New("carry steps on: a trigger has moved a run to another token")
		}
		l.Token, l.Follows, l.Enqueued, l.Taken, l.Worker = token, follows, created.Time, c.sent, c.Worker
		l.Length, l.Timeout = t.Length, t.Timeout
		if !strings.HasPrefix(l.Type, naming.Engine) {
			l.Instance, l.BusinessKey, l.Node = t.Instance, t.BusinessKey, t.Node
		}
		l.Chain = Chain{t.Chain.Steps + 1, t.Chain.since}
		if t.Chain.Steps == 0 {
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
	var tokens []uuid.UUID
	var longest time.Duration
	for _, t := range c.taken {
		tokens, longest = append(tokens, t.token), max(longest, t.Length)
	}
	slices.SortFunc(tokens, func(a, b uuid.UUID) int { return bytes.Compare(a[:], b[:]) })
	d.add(slices.Compact(tokens), time.Now(), longest) // the server may work on the commit for as long as if it had been sent now
}
