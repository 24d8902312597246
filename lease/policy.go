package lease

import (
	"cmp"
	"context"
	"fmt"
	"strings"
	"time"

	"github.com/jackc/pgx/v5"
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

// ShippedAttempts is what counts where no policy says how often a run is tried.
const ShippedAttempts = 25

// Policies are all policies there are.
type Policies []Policy

// Of returns the policy of a type. Each field comes from the longest pattern that sets it. Attempts is never 0: if no policy
// sets it, it is ShippedAttempts. workflow_policy_of has the same rule.
func (p Policies) Of(typ string) Policy {
	if len(p) == 0 {
		return Policy{Attempts: ShippedAttempts}
	}
	return p.of(typ)
}

// of is apart, since it needs so much room that the stack of whoever asks may have to grow.
func (p Policies) of(typ string) Policy {
	var of Policy
	var from struct{ attempts, base, limit, curve, deadline, breaker int } // lengths of the patterns that have said it
	for _, one := range p {
		if one.Pattern != "*" && !covers(one.Pattern, typ) {
			continue
		}
		if strings.HasPrefix(typ, "graph.") { // the engine's own runs wait for as long as a process says
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
	of.Attempts = cmp.Or(of.Attempts, ShippedAttempts)
	return of
}

// longer takes over what a longer pattern says.
func longer[T comparable](field *T, said T, from *int, length int) {
	var nothing T
	if said != nothing && length > *from {
		*field, *from = said, length
	}
}

// Most returns how many attempts a run gets that follows its policy. It is never less than the attempts charged so far, the
// present one included.
func (p Policy) Most(attempt int) int {
	return max(p.Attempts, attempt)
}

// Backoff returns the policy's pauses. Fields that the policy leaves out are as shipped. A policy that sets none of them
// returns own. workflow_backoff has the same rule.
func (p Policy) Backoff(own run.Backoff) run.Backoff {
	if p.Base == 0 && p.Cap == 0 && p.Curve == "" {
		return own
	}
	b := run.Backoff{Base: cmp.Or(p.Base, run.DefaultBackoffBase), Cap: cmp.Or(p.Cap, run.DefaultBackoffCap), Curve: p.Curve}
	if p.Cap == 0 {
		b.Cap = max(b.Cap, b.Base)
	}
	return b
}

// Tend makes runs that are set aside eligible again when their time has come: each after ten minutes, and after ten seconds one
// of all that were refused for the same reason. It returns the current policies, even if that failed. Call it every second.
func Tend(ctx context.Context, db run.DB) (Policies, error) {
	p, err := policies(ctx, db, `WITH again AS MATERIALIZED (SELECT workflow_try_again_v1()) SELECT p.* FROM again LEFT JOIN workflow_policies_v1() AS p ON true`)
	if err == nil {
		return p, nil
	}
	err = fmt.Errorf("have what is set aside tried again: %w", err)
	alone, done := context.WithTimeout(context.WithoutCancel(ctx), 2*time.Second) // that may have taken all the time there was
	defer done()
	p, _ = ReadPolicies(alone, db)
	return p, err
}

// ReadPolicies returns the policies: never nil, if there is no error.
func ReadPolicies(ctx context.Context, db run.DB) (Policies, error) {
	p, err := policies(ctx, db, `SELECT * FROM workflow_policies_v1()`)
	if err != nil {
		return nil, fmt.Errorf("read the policies: %w", err)
	}
	return p, nil
}

func policies(ctx context.Context, db run.DB, query string) (Policies, error) {
	all := Policies{}
	var pattern, curve *string
	var attempts *int
	var base, limit, deadline *float64
	var breaker *bool
	rows, _ := db.Query(ctx, query)
	_, err := pgx.ForEachRow(rows, []any{&pattern, &attempts, &base, &limit, &curve, &deadline, &breaker}, func() error {
		if pattern != nil { // there is one
			all = append(all, Policy{Pattern: *pattern, Attempts: or(attempts), Base: seconds(base), Cap: seconds(limit), Curve: run.Curve(or(curve)), Deadline: seconds(deadline), Breaker: breakerOf(breaker)})
		}
		return nil
	})
	return all, err
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
