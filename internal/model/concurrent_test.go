package model

import (
	"context"
	"flag"
	"fmt"
	"math/rand/v2"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/anishathalye/porcupine"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/simple-workflow/simple-workflow/internal/pgtest"
)

var (
	histories = flag.Int("histories", 20, "how many histories of concurrent clients are checked")
	seed      = flag.Uint64("seed", rand.Uint64(), "what the clients' calls are drawn from; who comes first is still chance")
)

const (
	clients   = 4
	callsEach = 15

	callsPerCut = 10 // at least this many between two broken connections
)

// Several clients lease, extend, settle, cancel, retry, reclaim and read the same runs at the same time; some calls
// are cancelled half-way, and some connections break. For each run there is an order of all calls, each within its
// time, in which every reply is that of a register with a token.
func TestLinearizable(t *testing.T) {
	t.Parallel()
	quiet := pgtest.New(t)
	settled(t, quiet)
	pool := named(t, quiet, "model", clients+1)
	killer := named(t, quiet, "killer", 1)
	var calls atomic.Int64
	stop := cut(t, killer, &calls)
	defer stop()
	unknown := 0
	for h := range *histories {
		c := newCrowd(t, quiet, pool)
		var group sync.WaitGroup
		for n := range clients {
			group.Go(func() {
				cl := &client{crowd: c, Rand: rand.New(rand.NewPCG(*seed, uint64(h*clients+n))), number: n}
				for range callsEach {
					cl.act(t.Context())
					calls.Add(1)
				}
			})
		}
		group.Wait()
		for i, part := range registers.Partition(c.history) {
			switch porcupine.CheckOperationsTimeout(registers, part, 20*time.Second) {
			case porcupine.Illegal:
				t.Fatalf("seed %d, history %d: no order of these calls explains the last answer about run %d:\n%s", *seed, h, i, story(part))
			case porcupine.Unknown: // each such call doubles the number of possible orders
				t.Logf("seed %d, history %d: run %d has so many calls without an answer that it would take too long", *seed, h, i)
				unknown++
			}
		}
	}
	if unknown > 2 {
		t.Errorf("%d runs could not be judged", unknown)
	}
}

// named returns a pool of connections to the same database, which can be told from all others by its
// application_name.
func named(t *testing.T, pool *pgxpool.Pool, name string, connections int32) *pgxpool.Pool {
	t.Helper()
	config := pool.Config()
	config.MaxConns = connections
	config.ConnConfig.RuntimeParams["application_name"] = name
	named, err := pgxpool.NewWithConfig(t.Context(), config)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(named.Close)
	return named
}

// cut breaks a busy connection from time to time, until stop is called. On a slow machine it does so less often, because
// few calls are made meanwhile, and a history in which many have no answer cannot be judged.
func cut(t *testing.T, killer *pgxpool.Pool, calls *atomic.Int64) (stop func()) {
	t.Helper()
	ctx, cancel := context.WithCancel(t.Context())
	ended := make(chan bool)
	go func() {
		defer close(ended)
		tick := time.NewTicker(15 * time.Millisecond)
		defer tick.Stop()
		for last := int64(0); ctx.Err() == nil; {
			<-tick.C
			now := calls.Load()
			if now-last < callsPerCut {
				continue
			}
			last = now
			_, _ = killer.Exec(ctx, `
				SELECT pg_terminate_backend(pid)
				FROM pg_stat_activity
				WHERE datname = current_database() AND application_name = 'model' AND state = 'active'
				ORDER BY random()
				LIMIT 1`)
		}
	}()
	return func() {
		cancel()
		<-ended
	}
}

// story describes the shortest prefix of a history that cannot be explained. It leaves out calls that change nothing
// and are not needed for the contradiction.
func story(history []porcupine.Operation) string {
	ends := slices.Clone(history)
	slices.SortFunc(ends, func(a, b porcupine.Operation) int { return int(a.Return - b.Return) })
	for _, o := range ends {
		if short := until(history, o.Return); !explained(short) {
			history = short
			break
		}
	}
	for i := len(history) - 1; i >= 0; i-- {
		if idle(history[i]) {
			if less := slices.Delete(slices.Clone(history), i, i+1); !explained(less) {
				history = less
			}
		}
	}
	slices.SortFunc(history, func(a, b porcupine.Operation) int { return int(a.Call - b.Call) })
	var text strings.Builder
	for _, o := range history {
		end := "…"
		if o.Return != forever {
			end = milliseconds(o.Return)
		}
		fmt.Fprintf(&text, "  %8s to %8s ms  w%d  %s\n", milliseconds(o.Call), end, o.ClientId, registers.DescribeOperation(o.Input, o.Output))
	}
	return text.String()
}

func milliseconds(ns int64) string { return fmt.Sprintf("%.2f", float64(ns)/1e6) }

func explained(history []porcupine.Operation) bool {
	return porcupine.CheckOperations(registers, history)
}

// until is the history as it was known at the end of a call: calls that still run have no reply yet.
func until(history []porcupine.Operation, end int64) (short []porcupine.Operation) {
	for _, o := range history {
		if o.Call > end {
			continue
		}
		if o.Return > end {
			o.Return, o.Output = forever, reply{none: true}
		}
		short = append(short, o)
	}
	return short
}

// idle reports whether a call changes nothing, so that leaving it out leaves less to explain.
func idle(o porcupine.Operation) bool {
	c, a := o.Input.(call), o.Output.(reply)
	switch c.do {
	case "read", "recorded":
		return true
	case "settle":
		return a.answer == "refused"
	case "cancel":
		return !a.none && a.answer != "cancelled"
	case "retry":
		return !a.none && a.answer != "pending"
	case "heartbeat":
		return !a.none && a.answer != "kept"
	}
	return false
}
