package main

import (
	"context"
	"fmt"
	"os"
	"strings"
	"sync"
	"syscall"
	"time"
)

// countGoroutines makes every worker, which is idle now, print its goroutines and end, and does the same with a new
// one. leaked is the most that one of the old ones has beyond the new one.
func (l *lab) countGoroutines(ctx context.Context) (fresh, leaked float64, err error) {
	old := l.slots
	counts := make([]int, len(old))
	errs := make([]error, len(old))
	var all sync.WaitGroup
	for i, s := range old {
		all.Go(func() { counts[i], errs[i] = s.dump(ctx) })
	}
	all.Wait()
	for i := range old {
		if errs[i] != nil {
			return 0, 0, errs[i]
		}
	}
	// By now the slots have started other processes. It asks two of them and uses the longer answer, because Go's
	// runtime may crash while it prints.
	sleep(ctx, 3500*time.Millisecond)
	n := 0
	for _, s := range old[:2] {
		c, err := s.dump(ctx)
		if err != nil {
			return 0, 0, err
		}
		n = max(n, c)
	}
	for _, c := range counts {
		leaked = max(leaked, float64(c-n))
	}
	return float64(n), leaked, nil
}

// dump makes the process print its goroutines, as Go does on SIGQUIT, and counts those that involve the product, but
// not those of the runtime and of idle HTTP connections. It leaves out retention, which always runs and may be active
// just then.
func (s *slot) dump(ctx context.Context) (n int, err error) {
	for start := time.Now(); s.pid() == 0; sleep(ctx, 100*time.Millisecond) {
		if time.Since(start) > 10*time.Second {
			return 0, fmt.Errorf("worker %s does not run", s.name)
		}
	}
	sleep(ctx, time.Second)
	info, err := s.log.Stat()
	if err != nil {
		return 0, err
	}
	before, pid := info.Size(), s.pid()
	if !s.signal(syscall.SIGQUIT, "dump") {
		return 0, fmt.Errorf("worker %s ended by itself when all was calm", s.name)
	}
	for start := time.Now(); s.pid() == pid; sleep(ctx, 50*time.Millisecond) {
		if time.Since(start) > 10*time.Second {
			return 0, fmt.Errorf("worker %s does not print its goroutines", s.name)
		}
	}
	text, err := os.ReadFile(s.log.Name())
	if err != nil {
		return 0, err
	}
	for _, stack := range strings.Split(string(text[before:]), "\n\n") {
		cleaning := strings.Contains(stack, "/internal/cleanup.")
		if strings.HasPrefix(stack, "goroutine ") && strings.Contains(stack, "github.com/simple-workflow/simple-workflow/") && !cleaning {
			n++
		}
	}
	return n, nil
}

// countIdle counts the workers' sessions that are idle in a transaction.
func (l *lab) countIdle(ctx context.Context) (n float64, err error) {
	err = l.admin.QueryRow(ctx, `
		SELECT count(*)
		FROM pg_stat_activity
		WHERE usename = $1 AND state LIKE 'idle in transaction%' AND state_change < now() - interval '5 seconds'`, workerRole).Scan(&n)
	return n, err
}
