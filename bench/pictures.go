package main

import "fmt"

// pictures returns the pictures of a section by file name.
func (s *section) pictures() map[string]string {
	if s.Rows > 0 {
		return nil // the usual numbers are shown
	}
	switch s.scenario() {
	case "enqueue":
		return map[string]string{"enqueue.svg": s.enqueuePicture()}
	case "drain":
		return map[string]string{"drain.svg": s.drainPicture(), "cpu.svg": s.cpuPicture()}
	}
	return nil
}

// names returns the engines that took part, ours first.
func (s *section) names() (names []string) {
	for _, e := range []engine{ours{}, riverQueue{}, graphile{}} {
		if s.Engines[e.name()] != "" {
			names = append(names, e.name())
		}
	}
	return names
}

// rateBar shows a median rate and its range.
func (ss samples) rateBar(label string) bar {
	return bar{label: label, parts: []float64{ss.median(rate)},
		text: fmt.Sprintf("%s  (%s)", thousands(ss.median(rate)), ss.span(rate, thousands))}
}

func (s *section) enqueuePicture() string {
	c := bars{title: "Enqueue, runs per second"}
	for _, variant := range []string{bulkVariant, singleVariant} {
		p := panel{title: variant}
		for _, name := range s.names() {
			p.bars = append(p.bars, s.Samples.of(name, variant).rateBar(name))
		}
		c.panels = append(c.panels, p)
	}
	return c.svg()
}

func (s *section) drainPicture() string {
	c := bars{title: "Drain no-op runs, runs per second"}
	for _, variant := range []string{oneProcess, twoProcesses} {
		p := panel{title: variant}
		for _, name := range s.names() {
			p.bars = append(p.bars, s.Samples.of(name, variant).rateBar(name))
		}
		c.panels = append(c.panels, p)
	}
	return c.svg()
}

func (s *section) cpuPicture() string {
	p := panel{}
	for _, name := range s.names() {
		row := s.Samples.of(name, oneProcess)
		server, worker := row.median(serverCPU), row.median(workerCPU)
		p.bars = append(p.bars, bar{name, []float64{server, worker}, fmt.Sprintf("%.1f + %.1f", server, worker)})
	}
	return bars{title: "Drain, seconds of CPU per 100,000 runs", legend: []string{"Postgres", "worker"}, panels: []panel{p}}.svg()
}
