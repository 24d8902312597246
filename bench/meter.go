package main

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/simple-workflow/simple-workflow/internal/pgserver"
)

// A meter measures what something costs: time, CPU of server and client, WAL.
type meter struct {
	pool   *pgxpool.Pool
	server *pgserver.Server
}

func (m *meter) measure(ctx context.Context, name string, n int, do func() error) error {
	wal, server, client, start := m.wal(ctx), m.serverCPU(), clientCPU(), time.Now()
	if err := do(); err != nil {
		return err
	}
	took := time.Since(start)
	per := func(d time.Duration) float64 { return float64(d.Nanoseconds()) / 1000 / float64(n) }
	fmt.Printf("%-28s %10.0f %12.1f %12.1f %12.0f\n", name, float64(n)/took.Seconds(),
		per(m.serverCPU()-server), per(clientCPU()-client), (m.wal(ctx)-wal)/float64(n))
	return nil
}

func (m *meter) wal(ctx context.Context) (bytes float64) {
	if err := m.pool.QueryRow(ctx, `SELECT pg_wal_lsn_diff(pg_current_wal_insert_lsn(), '0/0')::float8`).Scan(&bytes); err != nil {
		fmt.Fprintln(os.Stderr, "bench: read the WAL position:", err)
	}
	return bytes
}

func clientCPU() time.Duration {
	var used syscall.Rusage
	_ = syscall.Getrusage(syscall.RUSAGE_SELF, &used)
	return time.Duration(used.Utime.Nano() + used.Stime.Nano())
}

// serverCPU is what the postmaster, its living and its ended children have used. It is 0
// where there is no /proc.
func (m *meter) serverCPU() (total time.Duration) {
	text, err := os.ReadFile(filepath.Join(m.server.Dir(), "data", "postmaster.pid"))
	if err != nil {
		return 0
	}
	postmaster, _, _ := strings.Cut(string(text), "\n")
	stats, _ := filepath.Glob("/proc/[0-9]*/stat")
	for _, path := range stats {
		text, err := os.ReadFile(path)
		if err != nil {
			continue
		}
		// After the name in brackets: state, ppid, … utime, stime, cutime, cstime are 14 to 17.
		_, rest, _ := strings.Cut(string(text), ") ")
		field := strings.Fields(rest)
		pid := filepath.Base(filepath.Dir(path))
		if len(field) < 15 || pid != postmaster && field[1] != postmaster {
			continue
		}
		last := 13
		if pid == postmaster {
			last = 15
		}
		for _, ticks := range field[11:last] {
			n, _ := strconv.Atoi(ticks)
			total += time.Duration(n) * 10 * time.Millisecond // USER_HZ is 100 on Linux
		}
	}
	return total
}

type durations []time.Duration

func (d durations) at(share float64) time.Duration {
	if len(d) == 0 {
		return 0
	}
	sorted := slices.Sorted(slices.Values(d))
	return sorted[min(int(share*float64(len(sorted))), len(sorted)-1)].Round(10 * time.Microsecond)
}
