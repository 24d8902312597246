package main

import "fmt"

// pictures returns the pictures of a section by file name.
func (s *section) pictures() map[string]string {
	if s.Rows > 0 {
		return nil // pictures show the usual numbers only
	}
	switch s.scenario() {
	case "enqueue":
		return map[string]string{"enqueue.svg": s.enqueuePicture()}
	case "drain":
		return map[string]string{"drain.svg": s.drainPicture(), "cpu.svg": s.cpuPicture()}
	case "crowd":
		return map[string]string{"crowd.svg": s.crowdPicture()}
	case "snapshot":
		return map[string]string{"snapshot.svg": s.snapshotPicture()}
	case "soak":
		return map[string]string{"soak.svg": s.soakPicture()}
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
	return s.ratePicture("Enqueue, runs per second", bulkVariant, singleVariant)
}

func (s *section) drainPicture() string {
	return s.ratePicture("Drain no-op runs, runs per second", oneProcess, twoProcesses)
}

// ratePicture has a panel for each variant, with a bar for each engine.
func (s *section) ratePicture(title string, variants ...string) string {
	c := bars{title: title}
	for _, variant := range variants {
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

func (s *section) crowdPicture() string {
	p := panel{mark: crowdShare}
	own := ours{}.name()
	alone := s.median(own, nobody, rate)
	for _, row := range s.Samples.rows() {
		if row[0].Engine != own {
			continue
		}
		share := row.median(rate) / alone
		p.bars = append(p.bars, bar{row[0].Variant, []float64{share}, fmt.Sprintf("%.2f", share)})
	}
	return bars{title: "Drain rate among other rows, as a share of the rate among none", panels: []panel{p}}.svg()
}

func (s *section) snapshotPicture() string {
	c := curves{title: "While an old snapshot is held", unit: "runs handled per second"}
	for _, name := range s.names() {
		for _, one := range s.Samples.of(name, heldVariant) {
			c.curves = append(c.curves, curve{name, one.Series})
		}
	}
	for _, one := range s.Samples.of(ours{}.name(), freeVariant) {
		c.curves = append(c.curves, curve{one.Engine + ", " + freeVariant, one.Series})
	}
	return c.svg()
}

func (s *section) soakPicture() string {
	minutes := s.Samples.of(ours{}.name(), soakMinutes)
	series := func(name string) (points []float64) {
		for _, one := range minutes {
			points = append(points, one.More[name])
		}
		return points
	}
	return curves{title: "Soak with cleanup", unit: "MiB", tick: "min",
		curves: []curve{{"tables", series(tableKey)}, {"indexes", series(indexKey)}}}.svg()
}
