// Package lease reads and sets retry policies: how often, how soon and for how long failed runs are leased again. A
// policy is a row of workflow_policy. Operators and programs change it while workers run.
//
// The statements that lease, extend and reclaim runs are in internal/leasing, because only workers need them.
package lease

import (
	"cmp"
	"context"
	"fmt"
	"strings"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/simple-workflow/simple-workflow/internal/fault"
	"github.com/simple-workflow/simple-workflow/internal/naming"
	"github.com/simple-workflow/simple-workflow/internal/shipped"
	"github.com/simple-workflow/simple-workflow/run"
)

// A Policy says how often, and for how long, runs of a type or of all types under a prefix are tried. Operators set it
// while workers run, with workflow_set_policy. A field that is zero is not set.
type Policy struct {
	Pattern  string        // a type, a prefix that ends with a dot, or * for all types
	Attempts int           // the most attempts of a run that was enqueued with max_attempts 3, the default
	Base     time.Duration // the pause before the second attempt
	Cap      time.Duration // the longest pause, jitter aside
	Curve    run.Curve
	Deadline time.Duration // counted from enqueueing: a run is not started later than that
	Breaker  Breaker       // whether the circuit breakers of types may open
}

// A Breaker says whether the circuit breaker of a type may open, so that during an outage only probes of it are leased.
// The empty Breaker is not set; if no policy sets it, the breaker may open.
type Breaker string

// The values of Policy.Breaker.
const (
	BreakerOn  Breaker = "on"
	BreakerOff Breaker = "off"
)

// Policies are all policies of a database, as Read returns them.
type Policies []Policy

// Of returns the policy of a type. Each field comes from the longest matching pattern that sets it. Attempts is never
// 0: it is 25 if no policy sets it. The SQL function workflow_policy_of has the same rule.
func (p Policies) Of(typ string) Policy {
	if len(p) == 0 {
		return Policy{Attempts: shipped.Attempts}
	}
	return p.of(typ)
}

// of is the part of Of that is needed if there are policies. It is separate because its stack frame is large: otherwise
// every call of Of would need that much stack.
func (p Policies) of(typ string) Policy {
	var of Policy
	var from struct{ attempts, base, limit, curve, deadline, breaker int } // length of the pattern that each field comes from
	for _, one := range p {
		if one.Pattern != "*" && !naming.Covers(one.Pattern, typ) {
			continue
		}
		if strings.HasPrefix(typ, naming.Engine) { // pauses and deadlines of the engine's own runs come from their process
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

// longer sets a field to said if said is set and comes from a longer pattern than the field's present value.
func longer[T comparable](field *T, said T, from *int, length int) {
	var nothing T
	if said != nothing && length > *from {
		*field, *from = said, length
	}
}

// Backoff returns the policy's backoff. If none of Base, Cap and Curve is set, it returns own. Otherwise a field that
// is not set has its shipped default, and Cap is at least Base unless it is set. The SQL function workflow_backoff has
// the same rule.
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

// Read returns all policies. The result is not nil unless there is an error.
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

// Set stores a policy, and replaces the one that its pattern has. It calls the SQL function workflow_set_policy, which
// only the owner and operators may call. For a field that is zero, the policy of a shorter pattern decides. A policy
// without any field set is an error. So is a value out of range, which the error names. The dead letter of the pattern
// stays as it is.
func Set(ctx context.Context, db run.DB, p Policy) error {
	if p.Breaker != "" && p.Breaker != BreakerOn && p.Breaker != BreakerOff {
		return fmt.Errorf("set the policy of %.100q: Breaker %.40q: use BreakerOn, BreakerOff or nothing", p.Pattern, p.Breaker)
	}
	_, err := db.Exec(ctx, `
		SELECT workflow_set_policy($1, attempts => nullif($2, 0), backoff_base => nullif($3, interval '0'), backoff_cap => nullif($4, interval '0'),
			curve => nullif($5, ''), deadline => nullif($6, interval '0'), breaker => nullif($7, '') = 'on',
			dead_letter => (SELECT p.dead_letter FROM workflow_policy AS p WHERE p.pattern = $1))`,
		p.Pattern, p.Attempts, p.Base, p.Cap, string(p.Curve), p.Deadline, string(p.Breaker))
	if err != nil {
		return fmt.Errorf("set the policy of %.100q: %w", p.Pattern, fault.Hinted(err))
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
