package main

import (
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/collectors"

	"github.com/simple-workflow/simple-workflow/dispatcher"
	"github.com/simple-workflow/simple-workflow/internal/build"
)

// A metrics holds the Prometheus metrics of a dispatcher.
type metrics struct {
	registry *prometheus.Registry

	published, failed, parked    *prometheus.CounterVec
	down, open, oldest, parkedIn *prometheus.GaugeVec
	fault                        *prometheus.GaugeVec
	poll, publish                *prometheus.HistogramVec
	errors                       *prometheus.CounterVec
}

func newMetrics() *metrics {
	m := &metrics{registry: prometheus.NewRegistry()}
	counter := func(name, help string) *prometheus.CounterVec {
		c := prometheus.NewCounterVec(prometheus.CounterOpts{Name: "outbox_" + name, Help: help}, []string{"sink"})
		m.registry.MustRegister(c)
		return c
	}
	gauge := func(name, help string) *prometheus.GaugeVec {
		g := prometheus.NewGaugeVec(prometheus.GaugeOpts{Name: "outbox_" + name, Help: help}, []string{"sink"})
		m.registry.MustRegister(g)
		return g
	}
	histogram := func(name, help string) *prometheus.HistogramVec {
		h := prometheus.NewHistogramVec(prometheus.HistogramOpts{Name: "outbox_" + name, Help: help,
			Buckets: prometheus.ExponentialBucketsRange(0.0005, 60, 16)}, []string{"sink"})
		m.registry.MustRegister(h)
		return h
	}
	m.published = counter("published_total", "Events that the sink has acknowledged.")
	m.failed = counter("retried_total", "Attempts that failed.")
	m.parked = counter("parked_total", "Events that were parked.")
	m.errors = counter("database_errors_total", "Polls of the outbox that failed.")
	m.down = gauge("sink_down", "1 while the sink accepts nothing.")
	m.open = gauge("lag_events", "Events that the sink has to get, counted up to 100000.")
	m.oldest = gauge("oldest_seconds", "Age of the oldest of them.")
	m.parkedIn = gauge("parked_events", "Events that are parked now.")
	m.fault = gauge("mark_fault", "1 while no event at all can be marked, because the database refuses the statement. Alert on it.")
	m.poll = histogram("poll_seconds", "Duration of polls of the outbox.")
	m.publish = histogram("publish_seconds", "Time taken to publish a batch.")
	version := prometheus.NewGauge(prometheus.GaugeOpts{
		Name: "outbox_build_info", Help: "Always 1.", ConstLabels: prometheus.Labels{"version": build.Name()}})
	version.Set(1)
	m.registry.MustRegister(version, collectors.NewGoCollector(), collectors.NewProcessCollector(collectors.ProcessCollectorOpts{}))
	return m
}

func (m *metrics) observer() dispatcher.Observer {
	return dispatcher.Observer{
		Published: func(sink string, events int, took time.Duration) {
			m.published.WithLabelValues(sink).Add(float64(events))
			m.publish.WithLabelValues(sink).Observe(took.Seconds())
		},
		Failed: func(sink string, events int) { m.failed.WithLabelValues(sink).Add(float64(events)) },
		Parked: func(sink string, events int) { m.parked.WithLabelValues(sink).Add(float64(events)) },
		Down: func(sink string, down bool) {
			value := 0.0
			if down {
				value = 1
			}
			m.down.WithLabelValues(sink).Set(value)
		},
		Fault: func(sink string, failing bool) {
			value := 0.0
			if failing {
				value = 1
			}
			m.fault.WithLabelValues(sink).Set(value)
		},
		Lag: func(sink string, open, parked int, oldest time.Duration) {
			m.open.WithLabelValues(sink).Set(float64(open))
			m.oldest.WithLabelValues(sink).Set(oldest.Seconds())
			m.parkedIn.WithLabelValues(sink).Set(float64(parked))
		},
		Polled: func(sink string, _ int, took time.Duration, err error) {
			m.poll.WithLabelValues(sink).Observe(took.Seconds())
			if err != nil {
				m.errors.WithLabelValues(sink).Inc()
			}
		},
	}
}
