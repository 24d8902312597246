package main

import "strconv"

// eventCPU is the CPU time that publishing costs on both sides, in milliseconds per 1,000 events.
func eventCPU(s sample) float64 { return thousandth(s.ServerCPU) + thousandth(s.WorkerCPU) }

// thousandth converts seconds per 100,000 to milliseconds per 1,000.
func thousandth(cpu float64) float64 { return 10 * cpu }

func eventTable(p *page, s *section) {
	for _, name := range []string{ours{}.name(), forwarded{}.name()} {
		if s.Engines[name] != "" {
			p.line("%s %s: %s.\n", name, s.Engines[name], s.SetUp[name])
		}
	}
	var backlogs, delays []samples
	for _, row := range s.Samples.rows() {
		if row[0].isDelay() {
			delays = append(delays, row)
		} else {
			backlogs = append(backlogs, row)
		}
	}
	p.header("engine", "", "events/s", "range", "Postgres CPU", "dispatcher CPU", "both, range", "broker CPU", "WAL", "RSS", "foreign", "times")
	for _, row := range backlogs {
		c, broker := row.costs(), ""
		if cpu := row.median(more(brokerKey)); cpu > 0 {
			broker = decimals(thousandth(cpu), 1)
		}
		p.row(row[0].Engine, row[0].Variant, c[0], c[1], decimals(thousandth(row.median(serverCPU)), 1), decimals(thousandth(row.median(workerCPU)), 1),
			row.span(eventCPU, func(x float64) string { return decimals(x, 1) }), broker, c[4], c[5], c[6], c[7])
	}
	p.delayRows(delays)
}

// isDelay reports whether the sample measures how long events took.
func (s sample) isDelay() bool { return s.Variant == rareEvents || s.isOf(busyEvents) }

func (p *page) delayRows(rows []samples) {
	if len(rows) == 0 {
		return
	}
	p.line("\nFrom the return of an event's commit to the call of the sink with it, one dispatcher; milliseconds. Percentiles of the first kind are over all" +
		" repetitions, of the second their medians. Appending is in the CPU of Postgres.\n")
	p.header("engine", "", "p50 ms", "p95 ms", "p99 ms", "events", "events/s", "Postgres CPU", "dispatcher CPU", "RSS", "foreign", "times")
	for _, row := range rows {
		cells := []string{row[0].Engine, row[0].Variant}
		for _, g := range gapShares {
			cells = append(cells, decimals(row.delay(g.name, g.share), 2))
		}
		c, n := row.costs(), 0
		for _, one := range row {
			n += one.Runs
		}
		p.row(append(cells, thousands(float64(n)), c[0], decimals(thousandth(row.median(serverCPU)), 1), decimals(thousandth(row.median(workerCPU)), 1),
			c[5], c[6], strconv.Itoa(len(row)))...)
	}
}

// delay is a percentile of all series, or the median of the samples' percentiles if there is no series.
func (ss samples) delay(name string, share float64) float64 {
	if all := ss.pooled(); len(all) > 0 {
		return percentile(all, share)
	}
	return ss.median(more(name + " ms"))
}
