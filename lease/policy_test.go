package lease_test

import (
	"math/rand/v2"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/simple-workflow/simple-workflow/internal/pgtest"
	"github.com/simple-workflow/simple-workflow/lease"
	"github.com/simple-workflow/simple-workflow/run"
)

// The worker and the database, whose functions reclaim leases, agree on the policy of a type, the number of attempts of
// a run, and the pauses between the attempts.
func TestPoliciesAgree(t *testing.T) {
	pool := unguarded(t)
	random := rand.New(rand.NewPCG(7, 7))
	patterns := []string{"*", "a.", "a.b.", "a.b.c", "a.b.c.", "a.b.c.d", "ab.", "b."}
	types := []string{"a.b", "a.b.c", "a.b.c.d", "a.b.cc", "ab.c", "b.x", "c.x", "a.c"}
	some := func(value any) any {
		if random.IntN(2) == 0 {
			return nil
		}
		return value
	}
	own := run.Backoff{Base: 3 * time.Second, Cap: 100 * time.Second, Curve: run.Linear}
	delays := make([]float64, 40)
	for i := range delays {
		delays[i] = own.Raw(i).Seconds()
	}
	for _, typ := range types {
		pgtest.ByHand(t, pool, `INSERT INTO workflow_run (type, status, attempt, lease_no, lease_token, lease_until, leased_by, started_at, deadline_at)
			VALUES ('`+typ+`', 'leased', 4, 4, gen_random_uuid(), now() + interval '1 hour', 'w', now(), now() + interval '1 hour')`)
	}
	compared := 0
	for range 60 {
		if _, err := pool.Exec(t.Context(), `DELETE FROM workflow_policy`); err != nil {
			t.Fatal(err)
		}
		for _, pattern := range patterns {
			if random.IntN(3) == 0 {
				continue
			}
			base := 0.5 + float64(random.IntN(20))
			if _, err := pool.Exec(t.Context(), `INSERT INTO workflow_policy (pattern, attempts, backoff_base, backoff_cap, curve, deadline, breaker) VALUES ($1, $2, $3, $4, $5, $6, $7)`, pattern,
				some(1+random.IntN(50)), some(base), some(base+float64(random.IntN(500))), some([]string{"exponential", "linear", "constant"}[random.IntN(3)]), some(float64(1+random.IntN(9000))), some(random.IntN(2) == 0)); err != nil {
				t.Fatal(err)
			}
		}
		policies, err := lease.Read(t.Context(), pool)
		if err != nil {
			t.Fatal(err)
		}
		for _, typ := range types {
			p := policies.Of(typ)
			n := random.IntN(70)
			attempt := 1 + random.IntN(40)
			given := []int{3, 7, 40}[random.IntN(3)]
			suspect := random.IntN(2) == 0
			written := []any{nil, given, given + 1}[random.IntN(3)]
			var attempts int
			var base, limit, deadline, pause float64
			var curve, breaker string
			var most int
			var follows bool
			rows, _ := pool.Query(t.Context(), `
				SELECT coalesce(p.attempts, 0), coalesce(p.backoff_base, 0), coalesce(p.backoff_cap, 0), coalesce(p.curve, ''), coalesce(p.deadline, 0), CASE p.breaker WHEN true THEN 'on' WHEN false THEN 'off' ELSE '' END,
				       workflow_backoff($1, $2, $3), workflow_most($1, $4, $5, $6, $7), workflow_follows($4, $5)
				FROM workflow_policy_of($1) AS p`, typ, delays, n, given, written, attempt, suspect)
			if _, err := pgx.ForEachRow(rows, []any{&attempts, &base, &limit, &curve, &deadline, &breaker, &pause, &most, &follows}, func() error { return nil }); err != nil {
				t.Fatal(err)
			}
			in := lease.Policy{Attempts: attempts, Base: seconds(base), Cap: seconds(limit), Curve: run.Curve(curve), Deadline: seconds(deadline), Breaker: lease.Breaker(breaker)}
			if p != in {
				t.Fatalf("%s: the worker has %+v, the database %+v, of %v", typ, p, in, policies)
			}
			want := given
			if follows {
				again := attempt // a suspect whose last attempt was not known to be the last gets one more
				if suspect && attempt < given {
					again++
				}
				want = max(min(p.Attempts, attempt+2), again)
				if suspect {
					want = max(min(p.Attempts, given), again)
				}
			}
			if most != want {
				t.Fatalf("%s, attempt %d of %d, written %v: the database allows %d after an expired lease, want %d", typ, attempt, given, written, most, want)
			}
			var shown int
			if err := pool.QueryRow(t.Context(), `SELECT max_attempts FROM workflow_working WHERE type = $1`, typ).Scan(&shown); err != nil || shown != max(p.Attempts, 4) {
				t.Fatalf("%s: workflow_working shows %d attempts, the worker gives %d, %v", typ, shown, max(p.Attempts, 4), err)
			}
			if raw := p.Backoff(own).Raw(n); (raw - seconds(pause)).Abs() > time.Millisecond {
				t.Fatalf("%s, after %d failures: the worker waits %s, the database %s, with %+v", typ, n, raw, seconds(pause), p)
			}
			compared++
		}
	}
	if compared != 60*len(types) {
		t.Fatal(compared)
	}
}

// unguarded returns a database whose policies may be written by hand.
func unguarded(t *testing.T) *pgxpool.Pool {
	pool := pgtest.New(t)
	if _, err := pool.Exec(t.Context(), `ALTER TABLE workflow_policy DISABLE TRIGGER USER`); err != nil {
		t.Fatal(err)
	}
	return pool
}

func seconds(s float64) time.Duration { return time.Duration(s * float64(time.Second)) }

// As shipped, a run that sets no number of attempts is tried for 80 to 90 minutes.
func TestShippedPolicy(t *testing.T) {
	policies, err := lease.Read(t.Context(), pgtest.New(t))
	if err != nil {
		t.Fatal(err)
	}
	p := policies.Of("any.type.v1")
	var lasts time.Duration
	for n := range p.Attempts - 1 {
		lasts += p.Backoff(run.Backoff{}).Raw(n) // without jitter, which only adds to it
	}
	if p.Attempts != 25 || p.Deadline != 0 || lasts < 80*time.Minute || lasts > 90*time.Minute {
		t.Errorf("%+v, which lasts for %s", p, lasts)
	}
}

// Read returns a policy as Set stored it, whichever of its fields are set. Set replaces the policy that its pattern had.
func TestSet(t *testing.T) {
	pool := pgtest.New(t)
	random := rand.New(rand.NewPCG(3, 3))
	for range 50 {
		want := lease.Policy{Pattern: []string{"*", "a.", "a.b.c"}[random.IntN(3)], Attempts: random.IntN(3) * 7}
		if random.IntN(2) == 0 {
			want.Base, want.Cap = 1500*time.Millisecond, 2*time.Hour
		}
		if random.IntN(2) == 0 {
			want.Deadline, want.Curve = 48*time.Hour, []run.Curve{run.Exponential, run.Linear, run.Constant}[random.IntN(3)]
		}
		if random.IntN(2) == 0 {
			want.Breaker = []lease.Breaker{lease.BreakerOn, lease.BreakerOff}[random.IntN(2)]
		}
		err := lease.Set(t.Context(), pool, want)
		if want == (lease.Policy{Pattern: want.Pattern}) {
			if err == nil {
				t.Fatalf("%+v says nothing, and is stored", want)
			}
			continue
		}
		if err != nil {
			t.Fatalf("%+v: %v", want, err)
		}
		policies, err := lease.Read(t.Context(), pool)
		if err != nil {
			t.Fatal(err)
		}
		got := slices.DeleteFunc(policies, func(p lease.Policy) bool { return p.Pattern != want.Pattern })
		if len(got) != 1 || got[0] != want {
			t.Fatalf("set %+v, read %+v", want, got)
		}
	}
}

// Set leaves the dead letter of a pattern as it is.
func TestSetKeepsTheDeadLetter(t *testing.T) {
	pool := pgtest.New(t)
	if _, err := pool.Exec(t.Context(), `SELECT workflow_set_policy('a.', dead_letter => 'ops.letter.v1')`); err != nil {
		t.Fatal(err)
	}
	if err := lease.Set(t.Context(), pool, lease.Policy{Pattern: "a.", Attempts: 4}); err != nil {
		t.Fatal(err)
	}
	var got string
	if err := pool.QueryRow(t.Context(), `SELECT concat_ws(' ', attempts, dead_letter) FROM workflow_policy WHERE pattern = 'a.'`).Scan(&got); err != nil || got != "4 ops.letter.v1" {
		t.Errorf("%s, %v", got, err)
	}
}

// A policy with a value out of range is refused with an error that names the field, the value and the bounds.
func TestSetRefuses(t *testing.T) {
	pool := pgtest.New(t)
	for _, row := range []struct {
		policy lease.Policy
		want   string
	}{
		{lease.Policy{Pattern: "a.", Attempts: 1001}, "attempts 1001 is outside 1 to 1000 (SQLSTATE 23514). Say how often a run may be started."},
		{lease.Policy{Pattern: "a.", Attempts: -1}, "-1"},
		{lease.Policy{Pattern: "a.", Base: -time.Second}, "backoff_base -00:00:01"},
		{lease.Policy{Pattern: "a.", Curve: "steep"}, "steep"},
		{lease.Policy{Pattern: "", Attempts: 2}, "pattern"},
		{lease.Policy{Pattern: "a.", Breaker: "ON"}, `Breaker "ON": use BreakerOn`},
	} {
		if err := lease.Set(t.Context(), pool, row.policy); err == nil || !strings.Contains(err.Error(), row.want) {
			t.Errorf("%+v: %v, want an error that says %q", row.policy, err, row.want)
		}
	}
}
