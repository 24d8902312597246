package model

import (
	"cmp"
	"errors"
	"fmt"
	"maps"
	"regexp"
	"slices"
	"testing"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgxpool"
	"pgregory.net/rapid"

	"github.com/simple-workflow/simple-workflow/internal/leasing"
	"github.com/simple-workflow/simple-workflow/internal/pgtest"
	"github.com/simple-workflow/simple-workflow/internal/settling"
	"github.com/simple-workflow/simple-workflow/run"
)

// A world is a few runs in a database, together with their states in the model.
type world struct {
	*rapid.T
	test *testing.T
	pool *pgxpool.Pool
	runs []*subject
	// The leases that each worker believes it holds. A worker never gives up such a belief.
	claims map[string][]claim
}

// A subject is a run and its state in the model.
type subject struct {
	state
	name    string
	id      uuid.UUID
	tokens  []uuid.UUID // of the leases; there is no lease 0
	history []event
}

// A claim is a lease that a worker was granted.
type claim struct {
	*subject
	lease int
}

func (c claim) String() string { return fmt.Sprintf("lease %d of %s", c.lease, c.name) }

// hours is a duration that the model counts as h hours.
func hours(h int) time.Duration { return max(time.Duration(h)*time.Hour-30*time.Minute, 0) }

// newWorld starts with one to three pending runs.
func newWorld(test *testing.T, t *rapid.T, pool *pgxpool.Pool) *world {
	w := &world{T: t, test: test, pool: pool, claims: map[string][]claim{}}
	pgtest.ByHand(test, pool, `TRUNCATE workflow_run, workflow_history`)
	one[string](w, `SELECT workflow_set_policy('*', attempts => $1)`, attempts)
	for i := range rapid.IntRange(1, 3).Draw(t, "runs") {
		s := &subject{
			state: state{Status: run.Pending, Max: rapid.IntRange(1, 4).Draw(t, "max_attempts"), Timeout: rapid.SampledFrom([]int{0, 0, 0, 1, 3}).Draw(t, "timeout")},
			name:  fmt.Sprintf("run %c", 'A'+i), id: uuid.UUID{15: byte(i + 1)}, tokens: make([]uuid.UUID, 1), history: []event{{Type: "created", Actor: someone}},
		}
		one[uuid.UUID](w, `SELECT workflow_enqueue($1, max_attempts => $2, id => $3)`, fmt.Sprintf("model.%d", s.Timeout), s.Max, s.id)
		w.runs = append(w.runs, s)
	}
	return w
}

// do takes the step in the model, and compares the model's answer with the product's.
func (w *world) do(s *subject, c command, got string) {
	w.Helper()
	was := s.state
	next, answer, told := step(was, c)
	check(w.T, was, next, c, told)
	s.state, s.history = next, append(s.history, told...)
	if next != was && c.Do != "wait" {
		w.Logf("    %s: %s → %s", s.name, was, next)
	}
	if got != answer {
		w.Fatalf("%s: %s: answered %q, want %q", s.name, c, got, answer)
	}
}

// given records that a worker was granted a lease, and checks what the worker was told about it.
func (w *world) given(by string, s *subject, l leasing.Lease) {
	w.Helper()
	s.tokens = append(s.tokens, l.Token)
	w.claims[by] = append(w.claims[by], claim{s, s.LeaseNo})
	got := fmt.Sprintln(l.Attempt, l.MaxAttempts, l.LeaseNo, l.Postponed, l.Suspect, l.Exhausted, l.Priority)
	if want := fmt.Sprintln(s.Attempt, s.Max, s.LeaseNo, s.Postponed, s.Suspect, s.Uncharged, s.Priority); got != want {
		w.Fatalf("%s: the lease tells attempt, max, number, postponed, suspect, exhausted, priority\n%swant\n%s", s.name, got, want)
	}
}

func (w *world) by() string { return rapid.SampledFrom(workers).Draw(w.T, "worker") }

// lease is a poll by a worker that has just started: it leases due runs of the highest priorities.
func (w *world) lease(*rapid.T) {
	c := command{Do: "lease", By: w.by()}
	n := rapid.IntRange(1, len(w.runs)).Draw(w.T, "n")
	suspects := n * rapid.IntRange(0, 1).Draw(w.T, "suspects")
	p := &leasing.Poller{DB: w.pool, Prefixes: []string{"model."}, Worker: c.By, Terms: terms}
	last := func(s *subject) bool { return s.Suspect && s.Attempt+1 == s.Max }
	lastDue := slices.ContainsFunc(w.runs, func(s *subject) bool {
		_, answer, _ := step(s.state, c)
		return answer != "" && last(s)
	})
	leases, _, err := p.Acquire(w.test.Context(), n, suspects)
	w.Logf("%s leases %d of up to %d runs, suspects: %v", c.By, len(leases), n, suspects > 0)
	w.must(err)
	taken := map[uuid.UUID]bool{}
	guarded := 0 // suspects among them
	for _, l := range leases {
		s := w.find(l.ID)
		if l.Suspect {
			guarded++
		}
		if l.Suspect && suspects == 0 {
			w.Fatalf("%s is a suspect", s.name)
		}
		taken[l.ID] = true
		w.do(s, c, "leased")
		w.given(c.By, s, l)
	}
	for _, s := range w.runs {
		if taken[s.id] && s.Suspect && !s.Uncharged && s.Attempt == s.Max && guarded > 1 {
			w.Fatalf("%s is at its last attempt and not alone among %d suspects", s.name, guarded)
		}
		if _, answer, _ := step(s.state, c); answer == "" || taken[s.id] || s.Suspect && (suspects == 0 || lastDue && guarded > 0) {
			continue
		}
		better := slices.ContainsFunc(leases, func(l leasing.Lease) bool { return l.Priority < s.Priority })
		if len(leases) < n || better {
			w.Fatalf("%s was passed over: %s", s.name, s)
		}
	}
}

func terms(typ string) leasing.Terms {
	var timeout int
	_, _ = fmt.Sscanf(typ, "model.%d", &timeout)
	return leasing.Terms{Length: hours(length), Timeout: hours(timeout), Room: -1}
}

// some draws a worker and some of its claims, at most one of each run unless repeat is set.
func (w *world) some(repeat bool) (by string, chosen []claim) {
	if len(w.claims) == 0 {
		w.Skip("no lease yet")
	}
	by = rapid.SampledFrom(slices.Sorted(maps.Keys(w.claims))).Draw(w.T, "worker")
	all := w.claims[by]
	for range rapid.IntRange(1, 3).Draw(w.T, "many") {
		c := all[len(all)-1-rapid.IntRange(0, len(all)-1).Draw(w.T, "older")]
		if !slices.ContainsFunc(chosen, func(o claim) bool { return o == c || !repeat && o.subject == c.subject }) {
			chosen = append(chosen, c)
		}
	}
	return by, chosen
}

func (w *world) heartbeat(*rapid.T) {
	by, claims := w.some(false)
	var held []leasing.Held
	for _, c := range claims {
		held = append(held, leasing.Held{ID: c.id, Token: c.tokens[c.lease], Length: hours(length)})
	}
	kept, gone, err := leasing.Extend(w.test.Context(), w.pool, held)
	w.Logf("%s extends %v", by, claims)
	w.must(err)
	for _, c := range claims {
		got := "locked"
		switch {
		case slices.Contains(kept, c.id):
			got = "kept"
		case errors.Is(gone[c.id], run.ErrCancelled):
			got = "cancelled"
		case errors.Is(gone[c.id], run.ErrLost):
			got = "lost"
		}
		w.do(c.subject, command{Do: "heartbeat", By: by, Token: c.lease}, got)
	}
}

// settle reports outcomes in one batch, which may contain a lost lease and the current one of the same run, and then
// asks which of them are recorded.
func (w *world) settle(*rapid.T) {
	by, claims := w.some(true)
	var outcomes []settling.Outcome
	var commands []command
	var stories []string
	for _, c := range claims {
		do := command{Do: "settle", By: by, Token: c.lease, Verdict: rapid.SampledFrom(verdicts).Draw(w.T, "verdict")}
		if !run.Status(do.Verdict).Finished() {
			do.N = 2 * rapid.IntRange(0, 1).Draw(w.T, "delay")
		}
		o := settling.Outcome{ID: c.id, Token: c.tokens[c.lease], Verdict: do.Verdict, Delay: hours(do.N)}
		if do.Verdict == settling.Fail || do.Verdict == settling.TryAgain {
			o.Failure = settling.NewFailure(errors.New("no luck"), run.Info{Attempt: c.Attempt})
			if do.Most = rapid.SampledFrom([]int{0, max(cmp.Or(c.Policy, attempts), c.Attempt)}).Draw(w.T, "most"); do.Most > 0 {
				o.Most = do.Most
			}
		}
		outcomes, commands = append(outcomes, o), append(commands, do)
		stories = append(stories, fmt.Sprint(c.name, " ", do))
	}
	w.Logf("%s settles %v", by, stories)
	refused, err := settling.Settle(w.test.Context(), w.pool, by, slices.Clone(outcomes))
	w.must(err)
	for i, c := range claims {
		got := "recorded"
		if slices.ContainsFunc(refused, func(o settling.Outcome) bool { return o.ID == c.id && o.Token == outcomes[i].Token }) {
			got = "refused"
		}
		w.do(c.subject, commands[i], got)
	}
	for i, c := range claims {
		recorded, err := settling.Recorded(w.test.Context(), w.pool, outcomes[i:i+1])
		w.must(err)
		if got, want := len(recorded) == 1, c.Settled == c.lease; got != want {
			w.Fatalf("%v recorded: %v, want %v", c, got, want)
		}
	}
}

// reclaim reclaims expired leases, as a worker that has just started.
func (w *world) reclaim(*rapid.T) {
	c := command{Do: "reclaim", By: w.by()}
	r := &leasing.Reclaimer{DB: w.pool, Worker: c.By, Length: hours(length), Backoff: run.Backoff{Base: 40 * time.Minute, Cap: 80 * time.Minute}}
	again, exhausted, err := r.Reclaim(w.test.Context(), 100)
	w.Logf("%s takes back expired leases: %d due again, %d exhausted", c.By, again, len(exhausted))
	w.must(err)
	for _, s := range w.runs {
		i := slices.IndexFunc(exhausted, func(l leasing.Lease) bool { return l.ID == s.id })
		switch _, answer, _ := step(s.state, c); {
		case i >= 0:
			w.do(s, c, "leased")
			w.given(c.By, s, exhausted[i])
		case answer == "due again":
			w.do(s, c, answer)
			again--
		default:
			w.do(s, c, "")
		}
	}
	if again != 0 {
		w.Fatalf("%d more became due again than should", again)
	}
}

// wait lets time pass for all runs.
func (w *world) wait(*rapid.T) {
	c := command{Do: "wait", N: rapid.IntRange(1, 2).Draw(w.T, "hours")}
	w.Logf("%d h pass", c.N)
	pgtest.Elapse(w.test, w.pool, time.Duration(c.N)*time.Hour)
	for _, s := range w.runs {
		w.do(s, c, "")
	}
}

// policy sets the policy of all runs.
func (w *world) policy(*rapid.T) {
	c := command{Do: "set policy", By: someone, N: rapid.IntRange(1, 5).Draw(w.T, "attempts")}
	w.Logf("the policy says %d attempts", c.N)
	one[string](w, `SELECT workflow_set_policy('*', attempts => $1)`, c.N)
	for _, s := range w.runs {
		w.do(s, c, "")
	}
}

// people do to a run what they can do by SQL.
func (w *world) people(*rapid.T) {
	s := w.runs[rapid.IntRange(0, len(w.runs)-1).Draw(w.T, "run")]
	c := rapid.SampledFrom(people).Draw(w.T, "what")
	c.By = someone
	w.Logf("someone does to %s: %s", s.name, c)
	answer := ""
	switch c.Do {
	case "cancel":
		answer = one[string](w, `SELECT workflow_cancel($1)`, s.id)
	case "delete":
		answer = one[string](w, `SELECT workflow_delete($1, 'reason')`, s.id)
	case "retry":
		answer = one[string](w, `SELECT workflow_retry($1, $2)`, s.id, c.N)
	case "undelete":
		answer = w.exec(`UPDATE workflow_run SET deleted_at = NULL WHERE id = $1`, s.id)
	case "hold":
		answer = w.exec(`UPDATE workflow_run SET held_at = now() WHERE id = $1`, s.id)
	case "resume":
		answer = w.exec(`UPDATE workflow_run SET held_at = NULL WHERE id = $1`, s.id)
	case "set priority":
		answer = w.exec(`UPDATE workflow_run SET priority = $2 WHERE id = $1`, s.id, c.N)
	case "set run_at":
		answer = w.exec(`UPDATE workflow_run SET run_at = now() + $2::interval WHERE id = $1`, s.id, hours(c.N))
	case "set pending":
		answer = w.exec(`UPDATE workflow_run SET status = 'pending' WHERE id = $1`, s.id)
	}
	w.do(s, c, answer)
}

// must ends the test if there is an error. It removes times from the text, because rapid shortens a story only as
// long as it ends with the same text.
func (w *world) must(err error) {
	w.Helper()
	if err != nil {
		w.Fatal(regexp.MustCompile(`\d{4}-\d\d-\d\d \d\d:\d\d:[0-9.+]+`).ReplaceAllString(err.Error(), "…"))
	}
}

func (w *world) find(id uuid.UUID) *subject {
	return w.runs[slices.IndexFunc(w.runs, func(s *subject) bool { return s.id == id })]
}

// exec returns the command tag of an UPDATE, or "refused" if a guard does not allow it.
func (w *world) exec(query string, args ...any) string {
	w.Helper()
	tag, err := w.pool.Exec(w.test.Context(), query, args...)
	var refused *pgconn.PgError
	if errors.As(err, &refused) && refused.ConstraintName == "workflow_run_update_guard" {
		return "refused"
	}
	w.must(err)
	return tag.String()
}

func one[T any](w *world, query string, args ...any) T {
	w.Helper()
	rows, _ := w.pool.Query(w.test.Context(), query, args...)
	value, err := pgx.CollectExactlyOneRow(rows, pgx.RowTo[T])
	w.must(err)
	return value
}
