package leasing_test

import (
	"fmt"
	"testing"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/simple-workflow/simple-workflow/internal/leasing"
	"github.com/simple-workflow/simple-workflow/internal/pgserver"
	"github.com/simple-workflow/simple-workflow/internal/pgtest"
	"github.com/simple-workflow/simple-workflow/internal/settling"
	"github.com/simple-workflow/simple-workflow/run"
	"github.com/simple-workflow/simple-workflow/sql"
)

// crowd lists the kinds of rows that fill the table step by step. No poll should touch them.
var crowd = []struct{ name, values string }{
	{"eligible at lower priority", "'q.t' || g % 10, -g % 5 - 1, now() - interval '1 day', NULL"},
	{"scheduled at higher priority", "'q.t' || g % 10, 50 + g % 5, now() + interval '1 day', NULL"},
	{"other prefixes", "'p' || g % 50 || '.x', 50, now() - interval '1 day', NULL"},
	{"finished", "'q.t' || g % 10, 50, now() - interval '1 day', 'finished'"},
	{"leased by others", "'q.t' || g % 10, 50, now() - interval '1 day', 'leased'"},
}

func fill(t *testing.T, pool *pgxpool.Pool, n int, values string) {
	t.Helper()
	tx := begin(t, pool)
	exec(t, tx, "SET LOCAL session_replication_role = replica") // no triggers
	exec(t, tx, `
		INSERT INTO workflow_run (type, priority, run_at, status, finished_at, lease_token, lease_until, leased_by, started_at)
		SELECT type, priority, run_at,
		       CASE how WHEN 'finished' THEN 'succeeded' WHEN 'leased' THEN 'leased' ELSE 'pending' END,
		       CASE how WHEN 'finished' THEN now() END,
		       CASE how WHEN 'leased' THEN gen_random_uuid() END, CASE how WHEN 'leased' THEN now() + interval '1 hour' END,
		       CASE how WHEN 'leased' THEN 'w0' END, CASE how WHEN 'leased' THEN now() - interval '10 minutes' END
		FROM (SELECT `+values+` FROM generate_series(1, $1) AS g) AS r (type, priority, run_at, how)`, n)
	commit(t, tx)
}

// A hot statement is one that a worker sends all the time.
type hot struct {
	name string
	statement
}

// hotStatements returns the statements of discover, take, take without discovery, take ahead, begin, extend, settle,
// reclaim and give back.
func hotStatements(t *testing.T, pool *pgxpool.Pool, n int) []hot {
	t.Helper()
	var leases []leasing.Lease
	p, r := newPoller(nil, "q."), newReclaimer(nil)
	sent := record(t, pool, func(db run.DB) {
		p.DB, r.DB = db, db
		leases = acquire(t, p, n)
		p.DontDiscover()
		acquire(t, p, n)
		p.Terms, p.Ahead = quick, leasing.Ahead{Runs: n - 10, Bytes: 1 << 20, Group: 10}
		mayBegin(t, db, acquire(t, p, 10)[10:]...)
		p.Terms, p.Ahead = unlimited, leasing.Ahead{}
		extend(t, db, held(leases, time.Hour))
		outcomes := make([]settling.Outcome, n)
		for i, l := range leases {
			outcomes[i] = settling.Outcome{ID: l.ID, Token: l.Token, Verdict: settling.Succeed}
		}
		if refused, err := settling.Settle(t.Context(), db, "w1", outcomes); err != nil || len(refused) > 0 {
			t.Fatalf("%d refused: %v", len(refused), err)
		}
		reclaim(t, r, n)
	})
	if len(leases) != n || len(sent) != 8 {
		t.Fatalf("%d leases, %d statements", len(leases), len(sent))
	}
	d := &deaf{}
	back := record(t, pool, func(db run.DB) {
		p.DB, d.DB = d, db
		lose(t, p, d, "lost")
		acquire(t, p, n)
	})
	return []hot{{"discover", sent[0]}, {"take", sent[1]}, {"take on", sent[2]}, {"take ahead", sent[3]},
		{"begin", sent[4]}, {"extend", sent[5]}, {"settle", sent[6]}, {"reclaim", sent[7]}, {"give back", back[2]}}
}

// The hot statements have the same plans, and touch no more buffers, whatever else is in the table, whatever its
// statistics say, and with any collation of the database. This holds in a new session, and with plans that were kept
// from when the table was empty.
func TestPlans(t *testing.T) {
	icu := func(t *testing.T) *pgxpool.Pool {
		server := pgtest.Server(t, pgserver.Options{ICU: true})
		config, err := pgxpool.ParseConfig(server.URL("postgres"))
		if err != nil {
			t.Fatal(err)
		}
		config.ConnConfig.DefaultQueryExecMode = pgx.QueryExecModeCacheDescribe
		pool, err := pgxpool.NewWithConfig(t.Context(), config)
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(pool.Close)
		if err := pgx.BeginFunc(t.Context(), pool, func(tx pgx.Tx) error { return sql.Up(t.Context(), tx.Conn()) }); err != nil {
			t.Fatal(err)
		}
		return pool
	}
	c := func(t *testing.T) *pgxpool.Pool { return pgtest.New(t) }
	owner := func(_ *testing.T, owner *pgxpool.Pool) *pgxpool.Pool { return owner }
	for _, test := range []struct {
		name  string
		start func(*testing.T) *pgxpool.Pool
		known string // what the planner's statistics say of the table
		crowd int    // rows of each kind
		as    func(*testing.T, *pgxpool.Pool) *pgxpool.Pool
	}{
		{"never analysed", c, "nothing", 40_000, owner},
		{"analysed when empty", c, "empty", 40_000, owner},
		{"analysed when all was finished", c, "finished", 40_000, owner},
		{"analysed, a million rows", c, "all", 200_000, owner},
		{"analysed, ICU", icu, "all", 40_000, owner},
		{"never analysed, bound", c, "nothing", 40_000, bound},
		{"analysed, bound", c, "all", 40_000, bound},
	} {
		t.Run(test.name, func(t *testing.T) {
			pool := test.start(t)
			testPlans(t, pool, test.as(t, pool), test.known, test.crowd)
		})
	}
}

// bound returns a pool of a worker whose role is bound to the prefix q.
func bound(t *testing.T, owner *pgxpool.Pool) *pgxpool.Pool {
	t.Helper()
	named := pgtest.Roles(t, owner)
	conn, err := owner.Acquire(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Release()
	if err := sql.BindWorker(t.Context(), conn.Conn(), named, named+"_bound", []string{"q.", "z."}); err != nil {
		t.Fatal(err)
	}
	return pgtest.As(t, owner, named, "bound")
}

// stock stores the runs to be leased, of 10 types at 5 priorities.
func stock(t *testing.T, pool *pgxpool.Pool) {
	t.Helper()
	exec(t, pool, `
		INSERT INTO workflow_run (type, priority, run_at)
		SELECT 'q.t' || g % 10, g / 10 % 5, now() - interval '1 hour' + g * interval '1 ms'
		FROM generate_series(1, 4000) AS g`)
}

// testPlans fills the table as its owner, and executes the hot statements with the pool as.
func testPlans(t *testing.T, pool, as *pgxpool.Pool, known string, crowdSize int) {
	const n = 500
	exec(t, pool, "ALTER TABLE workflow_run SET (autovacuum_enabled = off)")
	watch(t, pool)
	stock(t, pool)
	early := hotStatements(t, as, n)
	pgtest.ByHand(t, pool, "TRUNCATE workflow_run CASCADE")
	switch known {
	case "finished":
		fill(t, pool, crowdSize, "'q.t' || g % 10, 0, now() - interval '1 day', 'finished'")
		fallthrough
	case "empty":
		exec(t, pool, "VACUUM ANALYZE workflow_run")
	}
	keeper := newWatched(t, as)
	for _, h := range early {
		keeper.explain(t, h.statement)
	}
	stock(t, pool)
	base := map[string]int{}
	measure := func(what string) {
		t.Helper()
		if known == "all" {
			exec(t, pool, "ANALYZE workflow_run")
		}
		for _, h := range hotStatements(t, as, n) {
			limit := 0
			if base[h.name] > 0 {
				limit = base[h.name]*3/2 + 1000 // indexes grow a level
			}
			size := n
			if what == "leased by others" && (h.name == "reclaim" || h.name == "give back") {
				size, limit = crowdSize, 0 // these look at each lease
			}
			p := newWatched(t, as).explain(t, h.statement)
			p.check(t, what+": "+h.name, size, limit)
			if base[h.name] == 0 {
				base[h.name] = p.buffers()
			}
			keeper.explain(t, h.statement).check(t, what+": "+h.name+", its plan kept", size, limit)
		}
	}
	measure("nothing else")
	for _, c := range crowd {
		fill(t, pool, crowdSize, c.values)
		measure(c.name)
	}
}

// The search for the runs for which a statement is refused, and the marking of suspects as not alone, touch only the
// runs that are tried, whatever else is in the table.
func TestPlansOfRefusals(t *testing.T) {
	for _, analysed := range []bool{false, true} {
		t.Run(fmt.Sprint("analysed ", analysed), func(t *testing.T) { testPlansOfRefusals(t, analysed) })
	}
}

func testPlansOfRefusals(t *testing.T, analysed bool) {
	const n = 200
	pool := settledServer(t)
	exec(t, pool, "ALTER TABLE workflow_run SET (autovacuum_enabled = off)")
	addMany(t, pool, 2*n, "q.t1", 0)
	leases := acquire(t, newPoller(pool, "q."), n)
	late := newPoller(pool, "q.")
	late.Worker = "late"
	expired := acquire(t, late, n/2)
	expire(t, pool, column(expired)...)
	suspects := make([]leasing.Held, n)
	for i, l := range leases {
		suspects[i] = leasing.Held{ID: l.ID, Token: l.Token, Length: time.Hour}
	}
	ids := column(leases)
	byHand(t, pool, `UPDATE workflow_run SET suspect = true, max_attempts = 2 WHERE id = ANY ($1)`, ids)
	lastAttempt(t, pool, "q.t1", 9)
	exec(t, pool, `INSERT INTO workflow_run (type, tenant_id, run_at) VALUES ('q.t1', 'picky', now() - interval '59 minutes')`)
	for _, kind := range []string{"'q.t1', 0, now() - interval '1 day', 'finished'", "'p' || g % 50 || '.x', 50, now() - interval '1 day', NULL"} {
		fill(t, pool, 40_000, kind)
	}
	if analysed {
		exec(t, pool, "VACUUM ANALYZE workflow_run")
	}
	raises(t, pool, `OLD.id = ANY (ARRAY['`+ids[n/3].String()+`', '`+expired[3].ID.String()+`']::uuid[]) OR OLD.tenant_id = 'picky'`, "XX777")
	watch(t, pool)

	find := record(t, pool, func(db run.DB) {
		if aside, err := leasing.ExtendRefused(t.Context(), db, suspects, false); err != nil || len(aside) != 1 {
			t.Errorf("extend: %v, %v", aside, err)
		}
		for _, by := range []string{
			`SELECT FROM workflow_lease_refused_v1('{f}', '{q.t1}', '{0}', '{1901-01-01}', '{00000000-0000-0000-0000-000000000000}', '{0}', false, 200, false, 'w', '{q.t1}', '{60}', '{NULL}')`,
			`SELECT FROM workflow_take_back_refused_v1('-infinity', false, false, 'w', 60)`,
		} {
			if rows, err := db.Exec(t.Context(), by); err != nil || rows.RowsAffected() == 0 {
				t.Errorf("%s: %d, %v", by, rows.RowsAffected(), err)
			}
		}
		exec(t, db, `WITH off AS MATERIALIZED (SELECT set_config('enable_seqscan', 'off', true), set_config('enable_bitmapscan', 'off', true), set_config('enable_nestloop', 'off', true))
			SELECT workflow_try($1, 'settle', false, 'w', NULL, NULL, NULL) FROM off`, ids[:n/3])
		p := newPoller(db, "q.")
		p.Suspects = leasing.Suspects{Running: true, Last: suspects[:n/3]}
		if leases := acquire(t, p, 1); len(leases) != 1 || !leases[0].Suspect {
			t.Errorf("leased %v, want a suspect", names(leases))
		}
	})
	for _, s := range find {
		newWatched(t, pool).explain(t, s).check(t, s.sql, n, 0)
	}
}

func column(leases []leasing.Lease) []uuid.UUID {
	ids := make([]uuid.UUID, len(leases))
	for i, l := range leases {
		ids[i] = l.ID
	}
	return ids
}
