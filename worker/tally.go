package worker

import (
	"context"
	"sync"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/simple-workflow/simple-workflow/internal/leasing"
	"github.com/simple-workflow/simple-workflow/internal/settling"
)

const (
	// tallied is how many types are counted by name between two reports.
	tallied = 100
	// otherTypes is what the rest is counted as. It is no type: these have a dot.
	otherTypes = "other"
)

// A tally counts what the worker has leased and settled since it last said so in workflow_minute. What is lost with the
// process is one interval's counts.
type tally struct {
	mu     sync.Mutex
	byType map[string]*counted
}

// counted is what happened to runs of one type.
type counted struct {
	leased, succeeded, failed, retried int64
	seconds, waited                    float64
}

// of returns the counts of a type. It is called with mu held.
func (t *tally) of(typ string) *counted {
	c := t.byType[typ]
	if c != nil {
		return c
	}
	if t.byType == nil {
		t.byType = map[string]*counted{}
	}
	if len(t.byType) >= tallied && typ != otherTypes {
		return t.of(otherTypes)
	}
	c = &counted{}
	t.byType[typ] = c
	return c
}

func (t *tally) leased(leases []leasing.Lease) {
	t.mu.Lock()
	defer t.mu.Unlock()
	for i := range leases {
		c := t.of(leases[i].Type)
		c.leased++
		c.waited += max(leases[i].Waited().Seconds(), 0)
	}
}

// settled counts what was recorded, whose handler took so long.
func (t *tally) settled(typ string, verdict settling.Verdict, took time.Duration) {
	t.mu.Lock()
	defer t.mu.Unlock()
	c := t.of(typ)
	c.seconds += took.Seconds()
	switch verdict {
	case settling.Succeed:
		c.succeeded++
	case settling.Fail:
		c.failed++
	case settling.TryAgain:
		c.retried++
	}
}

// take returns what was counted, and begins anew.
func (t *tally) take() map[string]*counted {
	t.mu.Lock()
	defer t.mu.Unlock()
	all := t.byType
	t.byType = nil
	return all
}

// putBack adds what could not be written to what was counted since.
func (t *tally) putBack(all map[string]*counted) {
	t.mu.Lock()
	defer t.mu.Unlock()
	for typ, was := range all {
		c := t.of(typ)
		c.leased += was.leased
		c.succeeded += was.succeeded
		c.failed += was.failed
		c.retried += was.retried
		c.seconds += was.seconds
		c.waited += was.waited
	}
}

// write has a statement write what was counted: its first columns are workflow_count_v1's arguments, and it returns whether they were written.
func (t *tally) write(ctx context.Context, row func(context.Context, ...any) pgx.Row, args ...any) error {
	all := t.take()
	var types []string
	var leased, succeeded, failed, retried []int64
	var seconds, waited []float64
	for typ, c := range all {
		types = append(types, typ)
		leased, succeeded, failed, retried = append(leased, c.leased), append(succeeded, c.succeeded), append(failed, c.failed), append(retried, c.retried)
		seconds, waited = append(seconds, c.seconds), append(waited, c.waited)
	}
	var written bool
	err := row(ctx, append([]any{types, leased, succeeded, failed, retried, seconds, waited}, args...)...).Scan(&written)
	if err != nil || !written {
		t.putBack(all)
	}
	return err
}
