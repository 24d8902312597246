package service

import (
	"errors"
	"slices"
	"strings"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/collectors"

	"github.com/simple-workflow/simple-workflow/internal/build"
	"github.com/simple-workflow/simple-workflow/internal/naming"
	"github.com/simple-workflow/simple-workflow/internal/settling"
	"github.com/simple-workflow/simple-workflow/run"
	"github.com/simple-workflow/simple-workflow/worker"
)

// metrics counts what the worker reports.
type metrics struct {
	registry *prometheus.Registry
	patterns []string // of the handlers, longest first

	leased, retries, stale    prometheus.Counter
	settled, lost, reclaimed  *prometheus.CounterVec
	failures                  *prometheus.CounterVec
	lease, settle, rows, beat prometheus.Histogram
	handler                   *prometheus.HistogramVec
	stuck, stalled, elsewhere prometheus.Gauge
	aside                     prometheus.Counter
	fault, breaker            *prometheus.GaugeVec
	byType                    *prometheus.CounterVec
	due, oldest               *prometheus.GaugeVec
}

var (
	verdicts   = []settling.Verdict{settling.Succeed, settling.Fail, settling.TryAgain, settling.Postpone, settling.Release, settling.HandOn}
	statements = prometheus.ExponentialBucketsRange(0.0005, 10, 14)
	durations  = prometheus.ExponentialBucketsRange(0.001, 3600, 16)
	counts     = []float64{0, 1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10000}
)

func newMetrics() *metrics {
	m := &metrics{registry: prometheus.NewRegistry()}
	m.leased = m.counter("leased_total", "Runs leased.")
	m.settled = m.counters("settled_total", "Outcomes recorded.", "outcome")
	m.byType = m.counters("outcomes_total", "Outcomes recorded, by handler, steps of processes included.", "type", "outcome")
	m.retries = m.counter("retries_total", "Failed attempts after which the run is retried.")
	m.stale = m.counter("stale_settles_refused_total", "Outcomes refused because the lease was lost.")
	m.lost = m.counters("lost_leases_total", "Handlers whose context ended before they returned.", "cause")
	m.reclaimed = m.counters("reclaimed_total", "Expired leases taken back.", "kind")
	m.failures = m.counters("database_errors_total", "Statements that failed and were repeated.", "statement")
	m.lease = m.histogram("lease_seconds", "Time taken by polls.", statements)
	m.settle = m.histogram("settle_seconds", "Time taken to record outcomes.", statements)
	m.beat = m.histogram("heartbeat_seconds", "Time taken to extend leases.", statements)
	m.rows = m.histogram("poll_rows", "Runs leased by a poll.", counts)
	m.handler = prometheus.NewHistogramVec(prometheus.HistogramOpts{
		Name: "workflow_handler_seconds", Help: "Time taken by handlers.", Buckets: durations}, []string{"type"})
	m.stuck = prometheus.NewGauge(prometheus.GaugeOpts{
		Name: "workflow_stuck_handlers", Help: "Handlers that still run although their context has ended."})
	m.stalled = prometheus.NewGauge(prometheus.GaugeOpts{
		Name: "workflow_stalled_types", Help: "Types of which no run is leased although runs are due and a worker has a free slot. Alert if not 0."})
	m.elsewhere = prometheus.NewGauge(prometheus.GaugeOpts{
		Name: "workflow_elsewhere", Help: "Runs of this worker's prefixes that are executed elsewhere, handed on by any worker: take the maximum over the workers, not the sum."})
	m.aside = m.counter("set_aside_total", "Runs that the database refuses to have leased, extended, settled or taken back.")
	m.fault = prometheus.NewGaugeVec(prometheus.GaugeOpts{
		Name: "workflow_statement_fault", Help: "1 while a statement fails for every row; no run is blamed for it. Alert if not 0."}, []string{"statement"})
	m.breaker = prometheus.NewGaugeVec(prometheus.GaugeOpts{
		Name: "workflow_breaker_open", Help: "Types whose breaker is open: a service that their runs need is out of reach. Look into it if not 0."}, []string{"type"})
	m.due = prometheus.NewGaugeVec(prometheus.GaugeOpts{
		Name: "workflow_backlog_due", Help: "Runs of a prefix that are due and not leased. Up to 10000 are counted, divided among types and priorities, but at least 1000 of each."}, []string{"prefix"})
	m.oldest = prometheus.NewGaugeVec(prometheus.GaugeOpts{
		Name: "workflow_backlog_oldest_seconds", Help: "For how long the oldest of them has been due; 0 if none is."}, []string{"prefix"})
	version := prometheus.NewGauge(prometheus.GaugeOpts{
		Name: "workflow_build_info", Help: "Always 1.", ConstLabels: prometheus.Labels{"version": build.Name()}})
	version.Set(1)
	m.registry.MustRegister(m.handler, m.stuck, m.stalled, m.elsewhere, m.fault, m.breaker, m.due, m.oldest, version, collectors.NewGoCollector(),
		collectors.NewProcessCollector(collectors.ProcessCollectorOpts{}))
	m.zero()
	return m
}

// zero creates the series whose labels are known, so that they exist from the start.
func (m *metrics) zero() {
	for _, v := range verdicts {
		m.settled.WithLabelValues(string(v))
	}
	for _, cause := range []string{"lost", "cancelled", "deadline", "shutdown"} {
		m.lost.WithLabelValues(cause)
	}
	for _, kind := range []string{"again", "exhausted"} {
		m.reclaimed.WithLabelValues(kind)
	}
	for _, statement := range []string{"lease", "extend", "settle", "take back"} {
		m.fault.WithLabelValues(statement)
	}
	for _, statement := range []string{"lease", "settle", "heartbeat"} {
		m.failures.WithLabelValues(statement)
	}
}

// watch adds the metrics that are read from the worker, and learns the patterns of its handlers for labels. All
// of the engine's own types share one label.
func (m *metrics) watch(w *worker.Worker) {
	for _, pattern := range w.Patterns() {
		if strings.HasPrefix(pattern, naming.Engine) {
			pattern = naming.Engine
		}
		m.patterns = append(m.patterns, pattern)
	}
	slices.SortFunc(m.patterns, func(a, b string) int { return len(b) - len(a) })
	m.registry.MustRegister(
		prometheus.NewGaugeFunc(prometheus.GaugeOpts{
			Name: "workflow_in_flight", Help: "Leases held.",
		}, func() float64 { return float64(w.InFlight()) }),
		prometheus.NewGaugeFunc(prometheus.GaugeOpts{
			Name: "workflow_last_poll_timestamp_seconds", Help: "When a poll last succeeded, or was not needed because there was no room for more runs; 0 if neither.",
		}, func() float64 {
			if at := w.LastPoll(); !at.IsZero() {
				return float64(at.UnixMilli()) / 1000
			}
			return 0
		}),
	)
}

func (m *metrics) observer() worker.Observer {
	return worker.Observer{
		Polled: func(leased int, took time.Duration, err error) {
			m.statement("lease", m.lease, took, err)
			if err == nil {
				m.leased.Add(float64(leased))
				m.rows.Observe(float64(leased))
			}
		},
		Carried: func(leased int) { m.leased.Add(float64(leased)) },
		Finished: func(typ string, _ string, took time.Duration) {
			m.handler.WithLabelValues(m.labelOf(typ)).Observe(took.Seconds())
		},
		Settled: func(typ string, verdict string) {
			m.settled.WithLabelValues(verdict).Inc()
			m.byType.WithLabelValues(m.labelOf(typ), verdict).Inc()
			if verdict == string(settling.TryAgain) {
				m.retries.Inc()
			}
		},
		SettleRun: func(_ int, took time.Duration, err error) { m.statement("settle", m.settle, took, err) },
		Extended:  func(_ int, took time.Duration, err error) { m.statement("heartbeat", m.beat, took, err) },
		Refused:   func(string) { m.stale.Inc() },
		Lost:      func(_ string, cause error) { m.lost.WithLabelValues(causeOf(cause)).Inc() },
		Reclaimed: func(again, exhausted int) {
			m.reclaimed.WithLabelValues("again").Add(float64(again))
			m.reclaimed.WithLabelValues("exhausted").Add(float64(exhausted))
		},
		Stuck:    func(handlers int) { m.stuck.Set(float64(handlers)) },
		SetAside: func(string) { m.aside.Inc() },
		Fault: func(statement string, failing bool) {
			value := 0.0
			if failing {
				value = 1
			}
			m.fault.WithLabelValues(statement).Set(value)
		},
		Stalled: func(types int) { m.stalled.Set(float64(types)) },
		Breakers: func(open []string) {
			m.breaker.Reset()
			for _, p := range m.patterns {
				m.breaker.WithLabelValues(p)
			}
			for _, typ := range open {
				m.breaker.WithLabelValues(m.labelOf(typ)).Inc()
			}
		},
		Backlog: func(due []worker.Backlog) {
			for _, b := range due {
				m.due.WithLabelValues(b.Prefix).Set(float64(b.Due))
				m.oldest.WithLabelValues(b.Prefix).Set(b.Oldest.Seconds())
			}
		},
		Elsewhere: func(runs int) { m.elsewhere.Set(float64(runs)) },
	}
}

func (m *metrics) statement(name string, h prometheus.Histogram, took time.Duration, err error) {
	h.Observe(took.Seconds())
	if err != nil {
		m.failures.WithLabelValues(name).Inc()
	}
}

// labelOf returns the pattern of a type's handler, for use as a label. Types without a handler share the label
// other, so that clients that insert runs cannot create labels.
func (m *metrics) labelOf(typ string) string {
	for _, p := range m.patterns {
		if p == typ || strings.HasSuffix(p, ".") && strings.HasPrefix(typ, p) {
			return p
		}
	}
	return "other"
}

func causeOf(err error) string {
	switch {
	case errors.Is(err, run.ErrLost):
		return "lost"
	case errors.Is(err, run.ErrCancelled):
		return "cancelled"
	case errors.Is(err, run.ErrDeadline):
		return "deadline"
	case errors.Is(err, run.ErrShutdown):
		return "shutdown"
	}
	return "other"
}

func (m *metrics) counter(name, help string) prometheus.Counter {
	c := prometheus.NewCounter(prometheus.CounterOpts{Name: "workflow_" + name, Help: help})
	m.registry.MustRegister(c)
	return c
}

func (m *metrics) counters(name, help string, labels ...string) *prometheus.CounterVec {
	c := prometheus.NewCounterVec(prometheus.CounterOpts{Name: "workflow_" + name, Help: help}, labels)
	m.registry.MustRegister(c)
	return c
}

func (m *metrics) histogram(name, help string, buckets []float64) prometheus.Histogram {
	h := prometheus.NewHistogram(prometheus.HistogramOpts{Name: "workflow_" + name, Help: help, Buckets: buckets})
	m.registry.MustRegister(h)
	return h
}
