package main

import (
	"context"
	"fmt"
	"math"
	"math/rand/v2"
	"slices"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"

	"github.com/simple-workflow/simple-workflow/internal/pgserver"
	"github.com/simple-workflow/simple-workflow/torture/wire"
)

func cutAnswer(ctx context.Context, l *lab, _ *rand.Rand) (string, error) {
	return l.cut(ctx, wire.AnswerLost), nil
}

func cutCommit(ctx context.Context, l *lab, _ *rand.Rand) (string, error) {
	return l.cut(ctx, wire.NeverSent), nil
}

// cut cuts off the next commit of a client, if there is one soon. The clients take turns.
func (l *lab) cut(ctx context.Context, c wire.Cut) string {
	all := append([]*link{l.front}, l.links...)
	k := all[int(l.cuts.Add(1))%len(all)]
	k.wire.Arm(c, 1)
	for range 50 {
		if !k.wire.Armed(c) {
			return k.name
		}
		sleep(ctx, 100*time.Millisecond)
	}
	return noOne
}

// endSessions ends some or all sessions of one client.
func endSessions(ctx context.Context, l *lab, r *rand.Rand) (string, error) {
	k, part := l.anyLink(r), r.Float64()
	var n int
	err := l.admin.QueryRow(ctx, `
		SELECT count(pg_terminate_backend(pid))
		FROM pg_stat_activity
		WHERE datname = $1 AND application_name = $2 AND random() < $3`, database, k.name, part+0.3).Scan(&n)
	l.ledger.add(entry{Kind: "sessions", Worker: k.name, Code: n})
	return hit(k.name, n > 0), l.excuse(err)
}

// excuse drops the error of an injector that was itself hit: by a fault that keeps the server down or makes it refuse
// writes, or by the lock that the injector caused.
func (l *lab) excuse(err error) error {
	switch {
	case err == nil, time.Since(time.Unix(0, l.troubled.Load())) < 2*time.Second:
		return nil
	case code(err) == "40P01", code(err) == "55P03":
		return nil
	}
	return err
}

// trouble records that the server is down, or refuses requests, until the returned function is called.
func (l *lab) trouble() (over func()) {
	l.troubled.Store(math.MaxInt64)
	return func() { l.troubled.Store(time.Now().UnixNano()) }
}

// leased returns at least two runs that are leased now, at most most. It waits a while until there are two.
func (l *lab) leased(ctx context.Context, most int) (ids []uuid.UUID, err error) {
	_, err = soon(ctx, func() (bool, error) {
		rows, _ := l.admin.Query(ctx, `SELECT id FROM workflow_run WHERE status = 'leased' ORDER BY random() LIMIT $1`, most)
		ids, err = pgx.CollectRows(rows, pgx.RowTo[uuid.UUID])
		return len(ids) > 1, err
	})
	return ids, err
}

// locking locks something in a transaction for a while. Even if the transaction is broken later, the lock was held.
// If the lock was not granted in time, other statements have queued up behind it.
func (l *lab) locking(ctx context.Context, whom string, d time.Duration, lock string, args ...any) (string, error) {
	var tx pgx.Tx
	locked, err := soon(ctx, func() (locked bool, err error) {
		if tx, err = l.admin.Begin(ctx); err != nil {
			return false, err
		}
		if _, err = tx.Exec(ctx, `SET LOCAL lock_timeout = '5s'`); err == nil {
			_, err = tx.Exec(ctx, lock, args...)
		}
		if err != nil {
			_ = tx.Rollback(context.WithoutCancel(ctx))
		}
		switch code(err) {
		case "40P01", "55P03":
			return true, err
		}
		return err == nil, err
	})
	if !locked {
		return noOne, l.excuse(err)
	}
	if err == nil {
		sleep(ctx, d)
		_ = tx.Rollback(context.WithoutCancel(ctx))
	}
	return whom, nil
}

// soon waits a while until there is a target, and a server to ask. It polls often, because an event waits only for
// milliseconds.
func soon(ctx context.Context, find func() (found bool, err error)) (found bool, err error) {
	for start := time.Now(); ; sleep(ctx, 10*time.Millisecond) {
		if found, err = find(); found || time.Since(start) > 5*time.Second {
			return found, err
		}
	}
}

// deadlock locks leased rows one after another in descending order; settles lock in ascending order.
func deadlock(ctx context.Context, l *lab, r *rand.Rand) (string, error) {
	ids, err := l.leased(ctx, 12)
	if err != nil || len(ids) < 2 {
		return noOne, l.excuse(err)
	}
	pause := between(r, 20*time.Millisecond, 200*time.Millisecond)
	_, err = l.locking(ctx, "", 0, `DO $$
		DECLARE one uuid;
		BEGIN
			FOR one IN SELECT unnest('`+arrayOf(ids)+`'::uuid[]) ORDER BY 1 DESC LOOP
				PERFORM FROM workflow_run WHERE id = one FOR UPDATE;
				PERFORM pg_sleep(`+fmt.Sprint(pause.Seconds())+`);
			END LOOP;
		END $$`)
	return arrayOf(ids), err
}

func arrayOf(ids []uuid.UUID) string {
	text := "{"
	for i, id := range ids {
		if i > 0 {
			text += ","
		}
		text += id.String()
	}
	return text + "}"
}

// lockRows keeps leased rows locked for two or three lease lengths.
func lockRows(ctx context.Context, l *lab, r *rand.Rand) (string, error) {
	ids, err := l.leased(ctx, 2+r.IntN(6))
	if err != nil || len(ids) == 0 {
		return noOne, l.excuse(err)
	}
	return l.locking(ctx, arrayOf(ids), l.plan.hold(r, 2*leaseLength, 3*leaseLength),
		`SELECT FROM workflow_run WHERE id = ANY ($1) ORDER BY id FOR UPDATE`, ids)
}

// oldSnapshot keeps vacuum from removing any rows.
func oldSnapshot(ctx context.Context, l *lab, _ *rand.Rand) (string, error) {
	tx, err := l.admin.BeginTx(ctx, pgx.TxOptions{IsoLevel: pgx.RepeatableRead})
	if err != nil {
		return noOne, l.excuse(err)
	}
	defer tx.Rollback(context.WithoutCancel(ctx)) // it may be gone by then, because servers are restarted
	// It reads no table: a lock on one would block LOCK TABLE, and all other statements behind that.
	if _, err := tx.Exec(ctx, `SELECT pg_current_snapshot()`); err != nil {
		return noOne, l.excuse(err)
	}
	sleep(ctx, 3*time.Minute)
	return nobody, nil
}

// restart returns a fault that ends the server in the given way and starts it again.
func restart(end func(*pgserver.Server)) func(context.Context, *lab, *rand.Rand) (string, error) {
	return func(ctx context.Context, l *lab, r *rand.Rand) (string, error) {
		defer l.trouble()()
		pause := between(r, 0, 2*time.Second)
		start := time.Now()
		end(l.server)
		sleep(ctx, pause)
		if err := l.server.Restart(context.WithoutCancel(ctx)); err != nil {
			return noOne, err
		}
		ready := time.Now()
		l.ledger.add(entry{Kind: "outage", At: start, Until: &ready})
		return everyone, nil
	}
}

// storms are SQLSTATEs of a server in trouble: serialization failure, deadlock, disk full, cancelled, too many
// connections, read-only, lock not available.
var storms = []string{"40001", "40P01", "53100", "57014", "53300", "25006", "55P03"}

// storm makes statements fail at random with one of them.
func storm(ctx context.Context, l *lab, r *rand.Rand) (string, error) {
	state := storms[int(l.storms.Add(1)-1)%len(storms)]
	if _, err := l.admin.Exec(ctx, `INSERT INTO t.storm VALUES ($1, 0.4)`, state); err != nil {
		return noOne, l.excuse(err)
	}
	sleep(ctx, l.plan.hold(r, 5*time.Second, 10*time.Second))
	l.ledger.add(entry{Kind: "storm", Answer: state})
	return everyone, l.calm(ctx, `DELETE FROM t.storm`)
}

// calm reverts what an injector has done, and repeats that until it succeeds.
func (l *lab) calm(ctx context.Context, sql ...string) error {
	ctx, stop := context.WithTimeout(context.WithoutCancel(ctx), time.Minute)
	defer stop()
	for _, s := range sql {
		for {
			_, err := l.admin.Exec(ctx, s)
			if err == nil {
				break
			}
			if ctx.Err() != nil {
				return fmt.Errorf("%s: %w", s, err)
			}
			sleep(ctx, 100*time.Millisecond)
		}
	}
	return nil
}

// lockTable locks everyone out of one of the tables.
func lockTable(ctx context.Context, l *lab, r *rand.Rand) (string, error) {
	table := []string{"workflow_run", "workflow_run", "workflow_history", "outbox_event", "process_instance", "process_token"}[r.IntN(6)]
	return l.locking(ctx, everyone, l.plan.hold(r, time.Second, 4*time.Second), `LOCK TABLE `+table+` IN ACCESS EXCLUSIVE MODE`)
}

const endWorkers = `SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE usename = '` + workerRole + `'`

// shortTimeout gives the workers' role a statement timeout that is too short.
func shortTimeout(ctx context.Context, l *lab, r *rand.Rand) (string, error) {
	return everyone, l.during(ctx, l.plan.hold(r, 8*time.Second, 12*time.Second),
		[]string{`ALTER ROLE ` + workerRole + ` SET statement_timeout = '50ms'`, endWorkers},
		[]string{`ALTER ROLE ` + workerRole + ` RESET statement_timeout`, endWorkers})
}

// connectionFamine leaves the workers one connection for all of them.
func connectionFamine(ctx context.Context, l *lab, r *rand.Rand) (string, error) {
	for range 50 { // idle sessions of another program
		conn, err := pgx.Connect(ctx, l.server.URL(database))
		if err != nil {
			return noOne, fmt.Errorf("open an idle session: %w", err)
		}
		defer conn.Close(context.WithoutCancel(ctx))
	}
	return everyone, l.during(ctx, l.plan.hold(r, 4*time.Second, 8*time.Second),
		[]string{`ALTER ROLE ` + workerRole + ` CONNECTION LIMIT 1`, endWorkers},
		[]string{`ALTER ROLE ` + workerRole + ` CONNECTION LIMIT -1`})
}

// readOnly makes the server refuse writes, like a server that was demoted.
func readOnly(ctx context.Context, l *lab, r *rand.Rand) (string, error) {
	defer l.trouble()()
	return everyone, l.during(ctx, l.plan.hold(r, 5*time.Second, 10*time.Second),
		[]string{`ALTER SYSTEM SET default_transaction_read_only = on`, `SELECT pg_reload_conf()`},
		[]string{`ALTER SYSTEM RESET default_transaction_read_only`, `SELECT pg_reload_conf()`})
}

// during executes statements, waits, and executes others that revert them.
func (l *lab) during(ctx context.Context, d time.Duration, begin, end []string) error {
	if err := l.calm(ctx, begin...); err != nil {
		return err
	}
	sleep(ctx, d)
	return l.calm(ctx, end...)
}

// spoils are ways to keep a row from being leased: a number that cannot grow, and a CHECK and a trigger of a user,
// which setup.sql has for tenants with these names.
var spoils = []string{
	`lease_no = 1000000000000000`,
	`tenant_id = 'unsound'`,
	`tenant_id = 'refused'`,
}

// spoil puts some rows that cannot be leased at the head of a lane, in one of these ways, and leaves them there.
func spoil(ctx context.Context, l *lab, r *rand.Rand) (string, error) {
	how := spoils[int(l.spoilt.Add(1)-1)%len(spoils)]
	typ := []string{"chaos.effect", "chaos.sleep", "chaos.fail"}[r.IntN(3)]
	ids := make([]uuid.UUID, 1+r.IntN(8))
	for i := range ids {
		ids[i] = newID(r)
	}
	const payload = `{"unleasable": true}` // siege.go recognizes it
	try := func() error {
		return pgx.BeginFunc(ctx, l.admin, func(tx pgx.Tx) error {
			_, err := tx.Exec(ctx, `INSERT INTO workflow_run (id, type, payload, run_at) SELECT id, $2, $3, now() - interval '1 hour' FROM unnest($1::uuid[]) AS id`, ids, typ, payload)
			if err == nil {
				_, err = tx.Exec(ctx, `SET LOCAL session_replication_role = replica`) // so that no trigger refuses it
			}
			if err == nil {
				_, err = tx.Exec(ctx, `SET LOCAL t.unsound = on`)
			}
			if err == nil {
				_, err = tx.Exec(ctx, `UPDATE workflow_run SET `+how+` WHERE id = ANY ($1)`, ids)
			}
			return err
		})
	}
	var err error
	for range 20 { // in spite of storms and locks
		if err = try(); code(err) == "23505" {
			err = nil // an earlier commit has succeeded
		}
		if err == nil {
			break
		}
		sleep(ctx, 100*time.Millisecond)
	}
	whom, answer := arrayOf(ids), "done"
	if err != nil {
		whom, answer = noOne, "unknown"
	}
	for _, id := range ids {
		l.ledger.add(entry{Kind: "enqueue", Run: id.String(), Type: typ, Case: "unleasable", Payload: []byte(payload), Answer: answer})
	}
	if slices.Contains(storms, code(err)) {
		err = nil
	}
	return whom, l.excuse(err)
}

// spoilEvents appends some events that cannot be marked: a trigger in setup.sql, like one of a user, refuses each
// change of them. They stay.
func spoilEvents(ctx context.Context, l *lab, r *rand.Rand) (string, error) {
	_, err := l.admin.Exec(ctx, `
		INSERT INTO outbox_event (aggregate_id, event_type, payload)
		SELECT gen_random_uuid(), 'torture.unmarkable', '{}' FROM generate_series(1, $1)`, 1+r.IntN(4))
	if err != nil && slices.Contains(storms, code(err)) {
		return noOne, nil
	}
	return hit(nobody, err == nil), l.excuse(err)
}

// lockEvents keeps events from being marked for a while, like a transaction of a user.
func lockEvents(ctx context.Context, l *lab, r *rand.Rand) (string, error) {
	var ids []int64
	most := 1 + r.IntN(6)
	found, err := soon(ctx, func() (bool, error) {
		rows, _ := l.admin.Query(ctx, `
			SELECT id FROM outbox_event WHERE published_at IS NULL AND parked_at IS NULL AND event_type <> 'torture.unmarkable'
			ORDER BY id DESC LIMIT $1`, most)
		var err error
		ids, err = pgx.CollectRows(rows, pgx.RowTo[int64])
		return len(ids) > 0, err
	})
	if !found {
		return noOne, l.excuse(err)
	}
	return l.locking(ctx, nobody, l.plan.hold(r, 5*time.Second, 20*time.Second),
		`SELECT FROM outbox_event WHERE id = ANY ($1) ORDER BY id FOR UPDATE`, ids)
}
