// Package lease holds the policies under which runs are leased again after a failure: how often, how soon and for how long.
// A policy is a row of workflow_policy. Operators and programs change it while workers run.
//
// The statements that lease, extend and reclaim runs are in internal/leasing: a worker calls them, nobody else has to.
package lease

import (
	"cmp"
	"context"
	"fmt"
	"strings"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/simple-workflow/simple-workflow/internal/naming"
	"github.com/simple-workflow/simple-workflow/internal/shipped"
	"github.com/simple-workflow/simple-workflow/run"
)

// A Policy says how often runs of a type, or of all types under a prefix, are tried, and how long. Operators set it while
// workers run, with workflow_set_policy. A zero field says nothing.
type Policy struct {
	Pattern  string        // a type, a prefix that ends with a dot, or * for all types
	Attempts int           // the most starts of a run that was enqueued with max_attempts 3, the default
	Base     time.Duration // the pause before the second attempt
	Cap      time.Duration // the longest pause, jitter aside
	Curve    run.Curve
	Deadline time.Duration // since a run was enqueued: later it is not started any more
	Breaker  Breaker       // whether that of a type may open
}

// A Breaker says whether outages that runs of a type meet have its leases reduced to probes. Empty: nothing is said, and they have.
type Breaker string

// What a policy may say of breakers.
const (
	BreakerOn  Breaker = "on"
	BreakerOff Breaker = "off"
)

// Policies are all policies there are.
type Policies []Policy

// Of returns the policy of a type. Each field comes from the longest pattern that sets it. Attempts is never 0: if no policy
// sets it, it is 25. workflow_policy_of has the same rule.
func (p Policies) Of(typ string) Policy {
	if len(p) == 0 {
		return Policy{Attempts: shipped.Attempts}
	}
	return p.of(typ)
}

// of is apart, since it needs so much room that the stack of whoever asks may have to grow.
func (p Policies) of(typ string) Policy {
	var of Policy
	var from struct{ attempts, base, limit, curve, deadline, breaker int } // lengths of the patterns that have said it
	for _, one := range p {
		if one.Pattern != "*" && !naming.Covers(one.Pattern, typ) {
			continue
		}
		if strings.HasPrefix(typ, naming.Engine) { // the engine's own runs wait for as long as a process says
			one = Policy{Pattern: one.Pattern, Attempts: one.Attempts, Breaker: one.Breaker}
		}
		length := len(one.Pattern)
		longer(&of.Attempts, one.Attempts, &from.attempts, length)
		longer(&of.Base, one.Base, &from.base, length)
		longer(&of.Cap, one.Cap, &from.limit, length)
		longer(&of.Curve, one.Curve, &from.curve, length)
		longer(&of.Deadline, one.Deadline, &from.deadline, length)
		longer(&of.Breaker, one.Breaker, &from.breaker, length)
	}
	of.Attempts = cmp.Or(of.Attempts, shipped.Attempts)
	return of
}

// longer takes over what a longer pattern says.
func longer[T comparable](field *T, said T, from *int, length int) {
	var nothing T
	if said != nothing && length > *from {
		*field, *from = said, length
	}
}

// Backoff returns the policy's pauses. Fields that the policy leaves out are as shipped. A policy that sets none of them
// returns own. workflow_backoff has the same rule.
func (p Policy) Backoff(own run.Backoff) run.Backoff {
	if p.Base == 0 && p.Cap == 0 && p.Curve == "" {
		return own
	}
	b := run.Backoff{Base: cmp.Or(p.Base, shipped.BackoffBase), Cap: cmp.Or(p.Cap, shipped.BackoffCap), Curve: p.Curve}
	if p.Cap == 0 {
		b.Cap = max(b.Cap, b.Base)
	}
	return b
}

// Read returns all policies. They are never nil if the error is.
func Read(ctx context.Context, db run.DB) (Policies, error) {
	all := Policies{}
	var pattern string
	var curve *string
	var attempts *int
	var base, limit, deadline *float64
	var breaker *bool
	rows, _ := db.Query(ctx, `SELECT * FROM workflow_policies_v1()`)
	_, err := pgx.ForEachRow(rows, []any{&pattern, &attempts, &base, &limit, &curve, &deadline, &breaker}, func() error {
		all = append(all, Policy{Pattern: pattern, Attempts: or(attempts), Base: seconds(base), Cap: seconds(limit), Curve: run.Curve(or(curve)), Deadline: seconds(deadline), Breaker: breakerOf(breaker)})
		return nil
	})
	if err != nil {
		return nil, fmt.Errorf("read the policies: %w", err)
	}
	return all, nil
}

// Set stores a policy in place of the one that its pattern has, as the SQL function workflow_set_policy does: only the owner
// and operators may. Zero fields stay unset, so the policy of a shorter pattern decides. A policy without any field set is an
// error; so is a value out of range, and the database's message names it. The dead letter of a pattern is no field of Policy:
// Set removes it.
func Set(ctx context.Context, db run.DB, p Policy) error {
	set := func(d time.Duration) *time.Duration {
		if d == 0 {
			return nil
		}
		return &d
	}
	var attempts *int
	if p.Attempts != 0 {
		attempts = &p.Attempts
	}
	var breaker *bool
	if p.Breaker != "" {
		on := p.Breaker == BreakerOn
		breaker = &on
	}
	_, err := db.Exec(ctx, `SELECT workflow_set_policy($1, attempts => $2, backoff_base => $3, backoff_cap => $4, curve => nullif($5, ''), deadline => $6, breaker => $7)`,
		p.Pattern, attempts, set(p.Base), set(p.Cap), string(p.Curve), set(p.Deadline), breaker)
	if err != nil {
		return fmt.Errorf("set the policy of %.100q: %w", p.Pattern, err)
	}
	return nil
}

func breakerOf(said *bool) Breaker {
	switch {
	case said == nil:
		return ""
	case *said:
		return BreakerOn
	}
	return BreakerOff
}

func or[T any](v *T) (zero T) {
	if v == nil {
		return zero
	}
	return *v
}

func seconds(s *float64) time.Duration { return time.Duration(or(s) * float64(time.Second)) }
