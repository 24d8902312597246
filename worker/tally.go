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
	// otherTypes stands for all further types. It is no valid type, since types contain a dot.
	otherTypes = "other"
)

// A tally counts what the worker has leased and settled since it last wrote that to workflow_minute. If the
// process dies, the counts of one interval are lost.
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

// settled counts an outcome that was recorded. took is the time that its handler ran.
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

// take returns the counts and resets them.
func (t *tally) take() map[string]*counted {
	t.mu.Lock()
	defer t.mu.Unlock()
	all := t.byType
	t.byType = nil
	return all
}

// putBack adds counts that could not be written to those made since.
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

// write takes the counts and writes them with a statement. The statement's first parameters are the arguments
// of workflow_count_v1, args are the others. It returns whether the counts were written; if not, write puts
// them back.
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
