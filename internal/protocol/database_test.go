package protocol

import (
	"context"
	"fmt"
	"math/rand/v2"
	"testing"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/simple-workflow/simple-workflow/internal/pgtest"
)

const typ = "test.row.v1"

// transitions are the functions of the database that change a row, each with its transition in the model. $1 is the
// run, and $2 a token: that of its current or previous lease.
var transitions = []struct {
	name, sql string
	model     func(r Row, lease uint16) (Row, bool)
	company   bool // the result depends on whether the run was alone
}{
	{name: "lease", sql: `SELECT FROM workflow_lease_v2('{false,true}', array_fill('` + typ + `'::text, '{2}'), '{0,0}', '{1900-01-01,1900-01-01}', array_fill($1::uuid, '{2}'), '{0,0}', '{9,9}', '{a,b}', '{1000,1000}', true, 9, 9, true, false, false,
		gen_random_uuid(), 'w', '{` + typ + `}', '{60}', '{600}', '{}', '{}', $2::uuid IS NULL, false, false)`,
		model: func(r Row, _ uint16) (Row, bool) { return Rules{}.Lease(r) }},
	{name: "extend", sql: `SELECT workflow_extend_v1(ARRAY[$1::uuid], ARRAY[$2::uuid], '{60}')`,
		model: Rules{}.Extend},
	{name: "succeed", sql: settling("succeeded"), model: func(r Row, lease uint16) (Row, bool) { return Rules{}.Settle(r, lease, Succeed) }},
	{name: "fail", sql: settling("failed"), model: func(r Row, lease uint16) (Row, bool) { return Rules{}.Settle(r, lease, Fail) }},
	{name: "retry later", sql: settling("retried"), model: func(r Row, lease uint16) (Row, bool) { return Rules{}.Settle(r, lease, Retry) }},
	{name: "postpone", sql: settling("postponed"), model: func(r Row, lease uint16) (Row, bool) { return Rules{}.Settle(r, lease, Postpone) }},
	{name: "hand back", sql: settling("released"), model: func(r Row, lease uint16) (Row, bool) { return Rules{}.Settle(r, lease, GiveBack) }},
	{name: "take back", sql: `SELECT $1::uuid, $2::uuid FROM workflow_take_back_v1('1900-01-01', true, 9, '{1}', gen_random_uuid(), 'w', 60)`, company: true},
	{name: "give back", sql: `SELECT workflow_give_back_v1($2, 1e6, 'w'), $1::uuid`, model: Rules{}.GiveBack},
	{name: "keep", sql: `SELECT workflow_unsettled_v2($1, $2, 'postponed', NULL, NULL, NULL, 0, NULL, false, 'w', 'XX000', 'no', '')`,
		model: func(r Row, lease uint16) (Row, bool) { return Rules{}.Keep(r, lease, Postpone) }},
	{name: "forget", sql: `SELECT workflow_try_again_v1(), $1::uuid, $2::uuid`, model: func(r Row, _ uint16) (Row, bool) {
		if r.kept() {
			return r, false
		}
		return Rules{}.Over(r)
	}},
	{name: "fail what is kept", sql: `SELECT workflow_fail($1, 'test'), $2::uuid`, model: func(r Row, _ uint16) (Row, bool) { return Rules{}.FailKept(r) }},
	{name: "cancel", sql: `SELECT workflow_cancel($1, 'test'), $2::uuid`, model: func(r Row, _ uint16) (Row, bool) {
		r, ok := Rules{}.Cancel(r)
		if over, forgets := (Rules{}).Over(r); ok && forgets {
			r = over
		}
		return r, ok
	}},
	{name: "retry", sql: `SELECT workflow_retry($1, 2), $2::uuid`, model: func(r Row, _ uint16) (Row, bool) { return Rules{}.Retry(r, 2) }},
	{name: "release", sql: `SELECT workflow_release('holder', 'test'), $1::uuid, $2::uuid`, model: func(r Row, _ uint16) (Row, bool) { return Rules{}.Release(r) }},
	{name: "delete", sql: `SELECT workflow_delete($1, 'test'), $2::uuid`, model: func(r Row, _ uint16) (Row, bool) { return Rules{}.Delete(r) }},
	{name: "remove", sql: `DELETE FROM workflow_run WHERE set_config('workflow.advance', 'on', true) = 'on' AND id = $1 AND $2::uuid IS NOT NULL`, model: func(r Row, _ uint16) (Row, bool) { return Rules{}.Remove(r) }},
}

func settling(verdict string) string {
	return `SELECT workflow_settle_v1(ARRAY[$1::uuid], ARRAY[$2::uuid], '{` + verdict + `}', ARRAY[NULL::jsonb], ARRAY[NULL::jsonb], ARRAY[NULL::text], '{0}', 'w')`
}

// A case is a row, together with what the model does not know about it.
type rowCase struct {
	Row
	alone *bool
}

// Each function of the database changes a row as the transition of the model does, for rows in every state, including
// kept, held and expired ones.
func TestRowsAsInTheDatabase(t *testing.T) {
	pool := pgtest.New(t)
	pgtest.Await(t, "leases to be taken back", func() bool {
		var old bool
		return pool.QueryRow(t.Context(), `SELECT pg_postmaster_start_time() < clock_timestamp() - interval '2 seconds'`).Scan(&old) == nil && old
	})
	random := rand.New(rand.NewPCG(5, 5))
	changed := map[string]int{}
	for _, c := range rowCases() {
		for _, tr := range transitions {
			lease := c.Lease
			if random.IntN(3) == 0 {
				lease = 1
			}
			var want Row
			var ok bool
			if tr.company {
				want, ok = Rules{}.TakeBack(c.Row, c.alone != nil && !*c.alone)
			} else {
				want, ok = tr.model(c.Row, lease)
			}
			if every := map[bool]int{true: 3, false: 16}[ok]; random.IntN(every) > 0 {
				continue
			}
			if !ok {
				want = c.Row
			} else {
				changed[tr.name]++
			}
			got, err := inDatabase(t.Context(), pool, c, tr.sql, lease)
			if tr.name == "remove" && c.Status == Leased && err != nil { // it is refused with a message
				continue
			}
			if err != nil {
				t.Errorf("%s: of %+v: %v", tr.name, c, err)
			} else if !got.asIn(want) {
				t.Errorf("%s: of %+v, by lease %d\n is %+v,\nwant %+v", tr.name, c, lease, got, want)
			}
		}
	}
	for _, tr := range transitions {
		if changed[tr.name] == 0 {
			t.Errorf("%s: no row was changed", tr.name)
		}
	}
}

// asIn leaves out fields that have no meaning in a state.
func (r Row) asIn(want Row) bool {
	for _, x := range []*Row{&r, &want} {
		if x.Status.Over() {
			x.Suspect = false
		}
		x.Spared = x.Spared && x.Suspect
		x.Expired = x.Expired && x.Status == Leased
	}
	return r == want
}

func rowCases() (all []rowCase) {
	yes, no := true, false
	flags := []bool{false, true}
	for _, status := range []Status{Pending, Leased, Succeeded, Failed, Cancelled} {
		for _, attempt := range []uint16{0, 1, 2} {
			for _, suspect := range flags {
				for _, hidden := range []int{0, 1, 2} {
					for _, alone := range []*bool{nil, &no, &yes} {
						for _, kept := range []uint16{0, 1, 2} {
							for _, uncharged := range flags {
								for _, expired := range flags {
									r := Row{Status: status, Suspect: suspect, Hidden: hidden > 0, Deleted: hidden > 1, Uncharged: uncharged, Expired: expired,
										Spared: suspect && alone == &yes, Attempt: attempt, Most: 2, Lease: 2, Settled: 1, Kept: kept}
									if kept > 0 {
										r.Keeps = []Verdict{Succeed, Effects}[(attempt+kept)%2]
									}
									switch {
									case status != Leased && (uncharged || expired),
										status == Leased && hidden > 1, // a guard cancels it at its next change
										status == Leased && attempt == 0,
										alone != nil && !suspect,
										uncharged && attempt < r.Most && !suspect: // somebody has raised max_attempts
										continue
									}
									all = append(all, rowCase{r, alone})
								}
							}
						}
					}
				}
			}
		}
	}
	return all
}

var statuses = map[Status]string{Pending: "pending", Leased: "leased", Succeeded: "succeeded", Failed: "failed", Cancelled: "cancelled"}

// inDatabase stores a row, changes it by a statement, returns the result, and rolls back.
func inDatabase(ctx context.Context, pool *pgxpool.Pool, c rowCase, sql string, lease uint16) (got Row, err error) {
	ctx, done := context.WithTimeout(ctx, time.Minute)
	defer done()
	id := uuid.New()
	token := func(lease uint16) *uuid.UUID {
		if lease == 0 {
			return nil
		}
		u := id
		u[0] ^= byte(lease)
		return &u
	}
	tx, err := pool.Begin(ctx)
	if err != nil {
		return got, err
	}
	defer tx.Rollback(ctx)
	var batch pgx.Batch
	batch.Queue(`SET LOCAL session_replication_role = replica`)
	batch.Queue(`
		INSERT INTO workflow_run (id, type, status, suspect, held_at, deleted_at, attempt, max_attempts, lease_no, settled_token, alone, run_at, finished_at,
			lease_token, leased_by, started_at, deadline_at, lease_until)
		SELECT $1, '`+typ+`', $2, $3, CASE WHEN $4 THEN now() END, CASE WHEN $5 THEN now() END, $6, $7, $8, $9, $10, now() - interval '1 minute', CASE WHEN $2 NOT IN ('pending', 'leased') THEN now() END,
			l.token, CASE WHEN l.token IS NOT NULL THEN 'holder' END, now() - interval '5 minutes', CASE WHEN l.token IS NOT NULL THEN now() + CASE WHEN $12 THEN '-5 minutes' ELSE '5 minutes'::interval END END,
			CASE WHEN l.token IS NOT NULL THEN now() + CASE WHEN $13 THEN '-1 minute' ELSE '1 minute'::interval END END
		FROM (SELECT $11::uuid) AS l (token)`,
		id, statuses[c.Status], c.Suspect, c.Hidden && !c.Deleted, c.Deleted, c.Attempt, c.Most, c.Lease, token(c.Settled), c.alone,
		map[bool]*uuid.UUID{true: token(c.Lease)}[c.Status == Leased], c.Uncharged, c.Expired)
	batch.Queue(`INSERT INTO workflow_kept (run, token, verdict, delay, effects, worker) SELECT $1, $2, 'succeeded', 0, $3, 'holder' WHERE $2::uuid IS NOT NULL`, id, token(c.Kept), c.Keeps == Effects)
	batch.Queue(`SET LOCAL session_replication_role = origin`)
	batch.Queue(sql, id, token(lease))
	if err = tx.SendBatch(ctx, &batch).Close(); err != nil {
		return got, err
	}
	var status, verdict string
	var settled, current, kept *uuid.UUID
	var alone bool
	err = tx.QueryRow(ctx, `
		SELECT coalesce(w.status, ''), coalesce(w.suspect, false), coalesce(w.held_at, w.deleted_at) IS NOT NULL, w.deleted_at IS NOT NULL, coalesce(w.status = 'leased' AND w.deadline_at IS NOT DISTINCT FROM w.started_at, false),
		       coalesce(w.lease_until < clock_timestamp(), false), coalesce(w.alone, false), coalesce(w.attempt, 0), coalesce(w.max_attempts, 0), coalesce(w.lease_no, 0), w.lease_token, w.settled_token,
		       k.token, coalesce(CASE WHEN k.effects THEN 'effects' ELSE k.verdict END, '')
		FROM (SELECT $1::uuid) AS one (id) LEFT JOIN workflow_run w ON w.id = one.id LEFT JOIN workflow_kept k ON k.run = one.id`, id).
		Scan(&status, &got.Suspect, &got.Hidden, &got.Deleted, &got.Uncharged, &got.Expired, &alone, &got.Attempt, &got.Most, &got.Lease, &current, &settled, &kept, &verdict)
	if err != nil {
		return got, err
	}
	of := func(u *uuid.UUID) uint16 { // returns the lease of a token
		for lease := uint16(1); u != nil && lease < 4; lease++ {
			if *u == *token(lease) {
				return lease
			}
		}
		return 0
	}
	if status != "" {
		got.Status = Status(status[0])
	}
	got.Spared = got.Suspect && alone
	got.Settled, got.Kept, got.Keeps = of(settled), of(kept), keeps[verdict]
	if (got.Status == Leased) != (current != nil) || current != nil && (*current == *token(c.Lease)) != (got.Lease == c.Lease) {
		return got, fmt.Errorf("it is %s with token %v and lease %d", status, current, got.Lease)
	}
	return got, nil
}
