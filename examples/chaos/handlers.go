package main

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"os"
	"sync"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/simple-workflow/simple-workflow/graph"
	"github.com/simple-workflow/simple-workflow/outbox"
	"github.com/simple-workflow/simple-workflow/run"
	"github.com/simple-workflow/simple-workflow/worker"
)

// none is the result of handlers that return nothing.
type none struct{}

type chaos struct {
	pool *pgxpool.Pool
	leak leak
}

// newMux returns a mux with all handlers of chaos, including those for processes. If execLog is not "", it names the
// file that gets a line for each start and end of a handler.
func newMux(pool *pgxpool.Pool, engine *graph.Engine, execLog string) (*worker.Mux, error) {
	mux := worker.NewMux()
	if execLog != "" {
		logged, err := logExecutions(execLog)
		if err != nil {
			return nil, err
		}
		mux.Use(logged)
	}
	c := &chaos{pool: pool}
	worker.Handle(mux, "chaos.sleep", c.sleep)
	worker.Handle(mux, "chaos.fail", c.fail)
	worker.Handle(mux, "chaos.panic", c.panic)
	worker.Handle(mux, "chaos.gopanic", c.goPanic)
	worker.Handle(mux, "chaos.exit", c.exit)
	worker.Handle(mux, "chaos.ignorecancel", c.ignoreCancel)
	worker.Handle(mux, "chaos.effect", c.effect)
	worker.Handle(mux, "chaos.external", c.external)
	worker.Handle(mux, "chaos.leak", c.leakMemory)
	worker.Handle(mux, "chaos.holdconn", c.holdConn)
	worker.Handle(mux, "chaos.step", c.step)
	worker.Handle(mux, "chaos.undo", c.undo)
	mux.HandleRaw("chaos.result", badResult)
	return mux, nil
}

type nap struct {
	MS int `json:"ms"`
}

func (n nap) duration() time.Duration { return time.Duration(n.MS) * time.Millisecond }

// sleep takes ms milliseconds, or until its context ends.
func (c *chaos) sleep(ctx context.Context, in nap) (none, error) {
	timer := time.NewTimer(in.duration())
	defer timer.Stop()
	select {
	case <-timer.C:
		return none{}, nil
	case <-ctx.Done():
		return none{}, context.Cause(ctx)
	}
}

// ignoreCancel takes ms milliseconds even if its context ends, or for ever if ms is 0.
func (c *chaos) ignoreCancel(_ context.Context, in nap) (none, error) {
	if in.MS == 0 {
		select {}
	}
	time.Sleep(in.duration())
	return none{}, nil
}

type failure struct {
	nap
	Times     int  `json:"times"`
	Permanent bool `json:"permanent"`
}

// fail takes ms milliseconds even if its context ends, and fails the first Times attempts.
func (c *chaos) fail(ctx context.Context, in failure) (none, error) {
	time.Sleep(in.duration())
	attempt := run.FromContext(ctx).Attempt
	if attempt > in.Times {
		return none{}, nil
	}
	err := fmt.Errorf("chaos: attempt %d of the %d that fail", attempt, in.Times)
	if in.Permanent {
		err = run.Permanent(err)
	}
	return none{}, err
}

func (c *chaos) panic(context.Context, none) (none, error) {
	panic("chaos: a handler panics")
}

// goPanic panics where no recover of the worker can reach: the process dies.
func (c *chaos) goPanic(context.Context, none) (none, error) {
	go func() { panic("chaos: a goroutine of a handler panics") }()
	select {}
}

type exit struct {
	Code int `json:"code"`
}

func (c *chaos) exit(_ context.Context, in exit) (none, error) {
	os.Exit(in.Code)
	return none{}, nil
}

type effect struct {
	nap
	Key  string `json:"key"`
	Emit int    `json:"emit"`
}

// effect sleeps, and then writes one row, and the requested number of events, in the transaction that records its
// success.
func (c *chaos) effect(ctx context.Context, in effect) (none, error) {
	if _, err := c.sleep(ctx, in.nap); err != nil {
		return none{}, err
	}
	info := run.FromContext(ctx)
	for n := range in.Emit {
		event := outbox.Event{Aggregate: info.ID, Type: "chaos.effect", Payload: emitted{LeaseNo: info.LeaseNo, N: n}}
		if err := worker.Emit(ctx, event); err != nil {
			return none{}, err
		}
	}
	return none{}, worker.InSettle(ctx, func(tx pgx.Tx) error {
		_, err := tx.Exec(ctx, `
			INSERT INTO chaos_effect (run_id, lease_no, key)
			VALUES ($1, $2, $3)`, info.ID, info.LeaseNo, in.Key)
		return err
	})
}

type emitted struct {
	LeaseNo int64 `json:"lease_no"`
	N       int   `json:"n"`
}

type target struct {
	URL string `json:"url"`
}

type call struct {
	RunID   string `json:"run_id"`
	LeaseNo int64  `json:"lease_no"`
	Attempt int    `json:"attempt"`
}

// external sends its run, lease and attempt to an external server, so that the server can count calls and compare
// fencing numbers.
func (c *chaos) external(ctx context.Context, in target) (none, error) {
	info := run.FromContext(ctx)
	body, err := json.Marshal(call{RunID: info.ID.String(), LeaseNo: info.LeaseNo, Attempt: info.Attempt})
	if err != nil {
		return none{}, err
	}
	request, err := http.NewRequestWithContext(ctx, http.MethodPost, in.URL, bytes.NewReader(body))
	if err != nil {
		return none{}, run.Permanent(err)
	}
	request.Header.Set("Content-Type", "application/json")
	response, err := http.DefaultClient.Do(request)
	if err != nil {
		return none{}, err
	}
	defer response.Body.Close()
	if _, err := io.Copy(io.Discard, io.LimitReader(response.Body, 1<<20)); err != nil {
		return none{}, err
	}
	if response.StatusCode == http.StatusServiceUnavailable {
		return none{}, run.Unavailable(errors.New(response.Status))
	}
	if response.StatusCode/100 != 2 {
		return none{}, errors.New(response.Status)
	}
	return none{}, nil
}

// A leak is memory that is never released.
type leak struct {
	mu   sync.Mutex
	kept [][]byte
}

type size struct {
	MB int `json:"mb"`
}

func (c *chaos) leakMemory(_ context.Context, in size) (none, error) {
	lost := make([]byte, in.MB<<20)
	for i := 0; i < len(lost); i += 4096 {
		lost[i] = 1 // memory counts once it is touched
	}
	c.leak.mu.Lock()
	defer c.leak.mu.Unlock()
	c.leak.kept = append(c.leak.kept, lost)
	return none{}, nil
}

// holdConn holds a connection of the pool that was given to the worker.
func (c *chaos) holdConn(ctx context.Context, in nap) (none, error) {
	conn, err := c.pool.Acquire(ctx)
	if err != nil {
		return none{}, err
	}
	defer conn.Release()
	return c.sleep(ctx, in)
}
