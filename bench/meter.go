package main

import (
	"bytes"
	"context"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"time"
)

// A reading is the state of all meters at one moment. CPU is in seconds.
type reading struct {
	at      time.Time
	server  float64 // CPU of the postmaster and of its children, running and ended
	workers float64 // CPU of the child processes
	own     float64 // CPU of the bench itself
	machine float64 // CPU of the whole machine
	wal     float64 // bytes
	rss     float64 // MiB, the peak of the largest child process
}

func (s *server) read(ctx context.Context, ps processes) (r reading, err error) {
	r = reading{at: time.Now(), server: s.cpu(), own: cpuOf("self", 13), machine: machineCPU()}
	for _, p := range ps {
		pid := strconv.Itoa(p.command.Process.Pid)
		r.workers += cpuOf(pid, 13)
		r.rss = max(r.rss, peakRSS(pid))
	}
	err = s.pool.QueryRow(ctx, `SELECT pg_wal_lsn_diff(pg_current_wal_insert_lsn(), '0/0')::float8`).Scan(&r.wal)
	return r, err
}

// costs sets what it took from one reading to another to handle some runs.
func (s *sample) costs(from, to reading, handled int) {
	s.Seconds = to.at.Sub(from.at).Seconds()
	per := 100_000 / float64(handled)
	server, workers := to.server-from.server, to.workers-from.workers
	s.ServerCPU, s.WorkerCPU = server*per, workers*per
	s.WAL = (to.wal - from.wal) / float64(handled)
	s.RSS = to.rss
	s.Foreign = max(0, to.machine-from.machine-server-workers-(to.own-from.own)) / s.Seconds
}

// cpu reads the children first, so that one which ends meanwhile is included in its parent.
func (s *server) cpu() (total float64) {
	text, err := os.ReadFile(filepath.Join(s.Dir(), "data", "postmaster.pid"))
	if err != nil {
		return 0
	}
	postmaster, _, _ := strings.Cut(string(text), "\n")
	children, _ := os.ReadFile("/proc/" + postmaster + "/task/" + postmaster + "/children")
	for _, pid := range strings.Fields(string(children)) {
		total += cpuOf(pid, 13)
	}
	return total + cpuOf(postmaster, 15)
}

// cpuOf sums fields of /proc/PID/stat, starting with utime: up to 13 for the process itself, up to 15 with the
// children that it has waited for. It returns 0 if the process does not exist.
func cpuOf(pid string, end int) float64 {
	text, err := os.ReadFile("/proc/" + pid + "/stat")
	if err != nil {
		return 0
	}
	return ticks(strings.Fields(string(text[bytes.LastIndexByte(text, ')')+1:]))[11:end])
}

// machineCPU is the CPU time used by all processes, and the time that other machines on the same hardware took
// (steal).
func machineCPU() float64 {
	text, err := os.ReadFile("/proc/stat")
	if err != nil {
		return 0
	}
	first, _, _ := strings.Cut(string(text), "\n")
	field := strings.Fields(first) // cpu user nice system idle iowait irq softirq steal
	return ticks(append(field[1:4], field[6:9]...))
}

// ticks sums fields that count hundredths of a second, which is USER_HZ on Linux.
func ticks(fields []string) float64 {
	sum := 0
	for _, field := range fields {
		n, _ := strconv.Atoi(field)
		sum += n
	}
	return float64(sum) / 100
}

func peakRSS(pid string) float64 {
	text, err := os.ReadFile("/proc/" + pid + "/status")
	if err != nil {
		return 0
	}
	_, rest, _ := strings.Cut(string(text), "VmHWM:")
	var kB float64
	_, _ = fmt.Sscan(rest, &kB)
	return kB / 1024
}

// calm waits up to two seconds for a moment in which nobody uses the machine.
func (b *bench) calm() {
	for range b.sizes.calm {
		before := machineCPU()
		time.Sleep(250 * time.Millisecond)
		if machineCPU()-before < 0.05 {
			return
		}
	}
}
