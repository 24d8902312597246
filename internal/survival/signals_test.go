package survival

import (
	"errors"
	"os/exec"
	"syscall"
	"testing"
	"time"

	"github.com/simple-workflow/simple-workflow/internal/pgtest"
	"github.com/simple-workflow/simple-workflow/run"
)

// When a worker is killed, another worker reclaims its leases within a second after they expire, and each run has its
// effect once.
func TestKill(t *testing.T) {
	url := pgtest.URL(t)
	pool := connect(t, url)
	victim := start(t, url, "victim")
	effects(t, pool, 24, 1000)
	leasedBy(t, pool, "victim", 8)
	start(t, url, "heir")
	if n := number(t, pool, `SELECT count(*) FROM workflow_run WHERE leased_by LIKE 'victim-%'`); n == 0 {
		t.Fatal("the victim holds no lease")
	}
	victim.signal(syscall.SIGKILL)
	killed := time.Now()
	settled(t, pool)
	check(t, pool)
	var last time.Time
	if err := pool.QueryRow(t.Context(), `SELECT max(created_at) FROM workflow_event WHERE event_type = 'expired'`).Scan(&last); err != nil {
		t.Fatal(err)
	}
	if late := last.Sub(killed.Add(lease)); late > patience {
		t.Errorf("the last lease was taken back %s after its expiry at the latest, want at most %s", late, patience)
	}
	if n := number(t, pool, `SELECT count(*) FROM workflow_run WHERE status = 'succeeded'`); n != 24 {
		t.Errorf("%d runs succeeded, want 24", n)
	}
}

// A worker that is frozen until after its leases have expired, and then continues, changes nothing: others have its
// runs, and each effect is there once.
func TestFreeze(t *testing.T) {
	url := pgtest.URL(t)
	pool := connect(t, url)
	// The same WORKER_ID on purpose: nothing depends on it.
	zombie := start(t, url, "twin")
	effects(t, pool, 8, 1500)
	leasedBy(t, pool, "twin", 8)
	zombie.signal(syscall.SIGSTOP)
	start(t, url, "twin")
	pgtest.Await(t, "all leases to be taken back", func() bool {
		return number(t, pool, `SELECT count(DISTINCT workflow_id) FROM workflow_event WHERE event_type = 'expired'`) == 8
	})
	zombie.signal(syscall.SIGCONT)
	settled(t, pool)
	check(t, pool)
	if n := number(t, pool, `SELECT count(*) FROM workflow_run WHERE status = 'succeeded' AND attempt = 2 AND lease_no = 2`); n != 8 {
		t.Errorf("%d runs succeeded at their second lease, want 8", n)
	}
}

// A worker that is asked to stop gives its runs back within a second, with no attempt charged, and exits with 0.
func TestTerminate(t *testing.T) {
	url := pgtest.URL(t)
	pool := connect(t, url)
	leaver := start(t, url, "leaver")
	effects(t, pool, 8, 3000)
	leasedBy(t, pool, "leaver", 8)
	start(t, url, "heir")
	leaver.signal(syscall.SIGTERM)
	asked := time.Now()
	leasedBy(t, pool, "heir", 8)
	if took := time.Since(asked); took > patience {
		t.Errorf("the hand-over took %s, want at most %s", took, patience)
	}
	if err := <-leaver.ended; err != nil {
		t.Errorf("the worker ended with %v, want exit code 0", err)
	}
	settled(t, pool)
	check(t, pool)
	if n := number(t, pool, `SELECT count(*) FROM workflow_run WHERE status = 'succeeded' AND attempt = 1`); n != 8 {
		t.Errorf("%d runs succeeded at their first charged attempt, want 8", n)
	}
}

// A run that kills its process is started max_attempts times and then failed, whichever worker it had. All the runs
// beside it succeed.
func TestPill(t *testing.T) {
	url := pgtest.URL(t)
	pool := connect(t, url)
	pgtest.Attempts(t, pool, 3)
	pill, err := run.Enqueue(t.Context(), pool, run.New{Type: "chaos.exit", Payload: map[string]int{"code": 137}})
	if err != nil {
		t.Fatal(err)
	}
	for range 20 {
		if _, err := run.Enqueue(t.Context(), pool, run.New{Type: "chaos.sleep", Payload: map[string]int{"ms": 800}}); err != nil {
			t.Fatal(err)
		}
	}
	deaths := make(chan int, 1)
	stop := make(chan struct{})
	go func() { // a supervisor that restarts the worker
		n := 0
		defer func() { deaths <- n }()
		for {
			p := start(t, url, "supervised")
			select {
			case err := <-p.ended:
				var exit *exec.ExitError
				if !errors.As(err, &exit) || exit.ExitCode() != 137 {
					t.Errorf("the worker ended with %v, want exit code 137", err)
				}
				n++
			case <-stop:
				p.signal(syscall.SIGKILL)
				_ = <-p.ended
				return
			}
		}
	}()
	settled(t, pool)
	close(stop)
	if n := <-deaths; n != 3 {
		t.Errorf("%d processes died, want 3", n)
	}
	r, err := run.Read(t.Context(), pool, pill.ID)
	if err != nil {
		t.Fatal(err)
	}
	if r.Status != run.Failed || r.Attempt != 3 {
		t.Errorf("the pill is %s after %d attempts, want failed after 3", r.Status, r.Attempt)
	}
	if n := number(t, pool, `SELECT count(*) FROM workflow_run WHERE type = 'chaos.sleep' AND status <> 'succeeded'`); n != 0 {
		t.Errorf("%d neighbours of the pill did not succeed", n)
	}
	check(t, pool)
}
