package main

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/simple-workflow/simple-workflow/internal/shipped"
)

const (
	killedVariant = "1 of 2 workers killed, lease of 2 s"

	heldKey        = "leases held"
	begunKey       = "of these begun"
	chargedKey     = "charged"
	unjustKey      = "charged, not begun"
	unchargedKey   = "begun, not charged"
	elsewhereKey   = "not charged, begun after the lease's end, s"
	againKey       = "charged, begun again after the lease's end, s"
	crashLease     = shipped.MinLease
	crashAfter     = 200 * time.Millisecond
	crashPatience  = 10 * time.Second
	crashAttempts  = 3
	journalEntries = 12 // bytes of each
)

// crash kills a worker with SIGKILL while it drains a backlog, and lets another one drain the rest. The lease is the
// shortest that a worker accepts, instead of 30 s: the time is counted from its end.
func crash(ctx context.Context, b *bench) error {
	if !b.has(ours{}) {
		return nil
	}
	for rep := range b.sizes.reps {
		s := sample{Engine: ours{}.name(), Variant: killedVariant, Rep: rep + 1, Runs: b.sizes.crash, More: map[string]float64{}}
		if err := b.onFresh(ctx, ours{}, func(db *database) error { return b.crashOnce(ctx, db, &s) }); err != nil {
			return err
		}
		b.record(s)
	}
	return nil
}

func (b *bench) crashOnce(ctx context.Context, db *database, s *sample) error {
	dir, err := os.MkdirTemp("", "bench-")
	if err != nil {
		return err
	}
	defer os.RemoveAll(dir)
	_, err = db.Exec(ctx, `INSERT INTO workflow_run (type, max_attempts, payload)
		SELECT $1, $2, jsonb_build_object('n', g) FROM generate_series(1, $3::int) g`, noop, crashAttempts, s.Runs)
	if err := errors.Join(err, db.rest(ctx)); err != nil {
		return err
	}
	t := task{Do: "work", URL: db.url, Lease: int(crashLease.Milliseconds()), Journal: filepath.Join(dir, "first")}
	from, err := b.killed(ctx, db, t, s.Runs)
	if err != nil {
		return err
	}
	held, err := leasesHeld(ctx, db)
	if err != nil {
		return err
	}
	first, err := readJournal(t.Journal)
	if err != nil {
		return err
	}
	t.Journal = filepath.Join(dir, "second")
	if err := b.survive(ctx, db, t, from, s); err != nil {
		return err
	}
	second, err := readJournal(t.Journal)
	if err != nil {
		return err
	}
	charged, err := chargedRuns(ctx, db)
	if err == nil {
		s.noteCrash(held, first, second, charged)
	}
	return err
}

// killed starts a worker, kills it while it drains, and waits until the server has ended its sessions: a statement that it
// has sent may still commit. It returns a reading of that moment.
func (b *bench) killed(ctx context.Context, db *database, t task, runs int) (at reading, err error) {
	ps, err := start(ours{}, t, 1)
	if err != nil {
		return at, err
	}
	ps.say("go")
	last := int64(0)
	for begin, begun := time.Now(), (time.Time{}); ; {
		_, handled := ps.handled()
		news := handled > last // so that it is not killed while it holds nothing
		last = handled
		if news && begun.IsZero() {
			begun = time.Now()
		}
		if news && (time.Since(begun) >= crashAfter || handled >= int64(runs/2)) {
			break
		}
		if time.Since(begin) > crashPatience {
			err = errors.New("the worker does not get on")
		}
		if err := errors.Join(err, ps.alive(), pause(ctx, time.Millisecond)); err != nil {
			return at, errors.Join(err, ps.stop())
		}
	}
	if err := ps[0].kill(); err != nil {
		return at, err
	}
	if at, err = b.server.read(ctx, nil); err != nil {
		return at, err
	}
	db.Reset() // so that the sessions that are left are the worker's
	for begin := time.Now(); ; {
		var left int
		err := b.server.pool.QueryRow(ctx, `SELECT count(*) FROM pg_stat_activity WHERE datname = $1 AND backend_type = 'client backend'`, db.name).Scan(&left)
		if err != nil || left == 0 {
			return at, err
		}
		if time.Since(begin) > crashPatience {
			return at, fmt.Errorf("%d sessions of the killed worker are left", left)
		}
		if err := pause(ctx, 5*time.Millisecond); err != nil {
			return at, err
		}
	}
}

// survive lets another worker drain the rest.
func (b *bench) survive(ctx context.Context, db *database, t task, from reading, s *sample) error {
	ps, err := start(ours{}, t, 1)
	if err != nil {
		return err
	}
	ps.say("go")
	err = func() error {
		for begin := time.Now(); ; {
			left, err := ours{}.unsettled(ctx, db, s.Runs)
			if err != nil {
				return err
			}
			if left == 0 {
				break
			}
			if time.Since(begin) > time.Minute {
				return fmt.Errorf("%d of %d runs are not settled", left, s.Runs)
			}
			if err := errors.Join(ps.alive(), pause(ctx, 20*time.Millisecond)); err != nil {
				return err
			}
		}
		to, err := b.server.read(ctx, ps)
		s.costs(from, to, s.Runs)
		return err
	}()
	return errors.Join(err, ps.stop())
}

// leasesHeld returns when the lease of each leased run ends, by the number in its payload.
func leasesHeld(ctx context.Context, db *database) (map[int]time.Time, error) {
	held := map[int]time.Time{}
	rows, _ := db.Query(ctx, `SELECT (payload->>'n')::int, lease_until FROM workflow_run WHERE status = 'leased'`)
	var n int
	var until time.Time
	_, err := pgx.ForEachRow(rows, []any{&n, &until}, func() error {
		held[n] = until
		return nil
	})
	return held, err
}

// chargedRuns returns the runs that needed more than one attempt.
func chargedRuns(ctx context.Context, db *database) (map[int]bool, error) {
	charged := map[int]bool{}
	rows, _ := db.Query(ctx, `SELECT (payload->>'n')::int FROM workflow_run WHERE attempt > 1`)
	var n int
	_, err := pgx.ForEachRow(rows, []any{&n}, func() error {
		charged[n] = true
		return nil
	})
	return charged, err
}

// noteCrash counts what became of the leases that the dead worker held. first and second say when handlers of the two
// workers began.
func (s *sample) noteCrash(held, first, second map[int]time.Time, charged map[int]bool) {
	s.More[heldKey] = float64(len(held))
	for _, key := range []string{begunKey, chargedKey, unjustKey, unchargedKey, elsewhereKey, againKey} {
		s.More[key] = 0
	}
	for n, until := range held {
		_, begun := first[n]
		late := second[n].Sub(until).Seconds()
		if begun {
			s.More[begunKey]++
		}
		if !charged[n] {
			s.More[elsewhereKey] = max(s.More[elsewhereKey], late)
			if begun {
				s.More[unchargedKey]++
			}
			continue
		}
		s.More[chargedKey]++
		s.More[againKey] = max(s.More[againKey], late)
		if !begun {
			s.More[unjustKey]++
		}
	}
}

// A journal is a file to which handlers append when they were called, so that it is known after a SIGKILL.
type journal struct{ file *os.File }

func openJournal(path string) (*journal, error) {
	file, err := os.OpenFile(path, os.O_APPEND|os.O_CREATE|os.O_WRONLY, 0o600)
	return &journal{file}, err
}

// note appends that the handler of run n was called now. One write of a few bytes is never torn.
func (j *journal) note(n int) error {
	entry := binary.LittleEndian.AppendUint32(make([]byte, 0, journalEntries), uint32(n))
	_, err := j.file.Write(binary.LittleEndian.AppendUint64(entry, uint64(time.Now().UnixNano())))
	return err
}

// readJournal returns when the handler of each run was first called.
func readJournal(path string) (map[int]time.Time, error) {
	text, err := os.ReadFile(path)
	if err != nil {
		return nil, err
	}
	called := map[int]time.Time{}
	for ; len(text) >= journalEntries; text = text[journalEntries:] {
		n := int(binary.LittleEndian.Uint32(text))
		if _, known := called[n]; !known {
			called[n] = time.Unix(0, int64(binary.LittleEndian.Uint64(text[4:])))
		}
	}
	return called, nil
}
