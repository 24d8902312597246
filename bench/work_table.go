package main

import "strconv"

// ofAllowed is which share of what the handlers allow was reached.
func ofAllowed(s sample) float64 { return s.Rate / s.More[allowedKey] }

func workTable(p *page, s *section) {
	p.header("", "runs/s", "range", "the handlers allow", "of that", "smallest share", "Postgres CPU", "worker CPU", "WAL", "RSS", "foreign", "times")
	var urgents samples
	for _, row := range s.Samples.rows() {
		if row[0].Variant == urgentVariant {
			urgents = row
			continue
		}
		smallest := ""
		if share := row.median(more(smallestKey)); share > 0 {
			smallest = decimals(share, 2)
		}
		c := row.costs()
		p.row(append([]string{row[0].Variant, c[0], c[1], thousands(row[0].More[allowedKey]), decimals(row.median(ofAllowed), 2), smallest}, c[2:]...)...)
	}
	p.urgentRow(urgents)
}

func (p *page) urgentRow(row samples) {
	if len(row) == 0 {
		return
	}
	p.line("\nFrom the commit of a run of priority %d to the call of its handler, while handlers that wait for 50 to 150 ms keep all slots busy, and more of them are due;"+
		" milliseconds. A slot becomes free every millisecond on average. Rates and costs are those of the long runs.\n", urgentPriority)
	p.header("", "p50 ms", "p95 ms", "p99 ms", "urgent runs", "long runs/s", "of what their handlers allow", "Postgres CPU", "worker CPU", "RSS", "foreign", "times")
	all, c := row.pooled(), row.costs()
	cells := []string{row[0].Variant}
	for _, g := range gapShares {
		cells = append(cells, decimals(percentile(all, g.share), 2))
	}
	p.row(append(cells, strconv.Itoa(len(all)), c[0], decimals(row.median(ofAllowed), 2), c[2], c[3], c[5], c[6], c[7])...)
}

func crashTable(p *page, s *section) {
	keys := []string{heldKey, begunKey, chargedKey, unjustKey, unchargedKey, elsewhereKey, againKey}
	p.header(append(append([]string{""}, keys...), "seconds in all", "foreign")...)
	for _, one := range s.Samples {
		cells := []string{one.Variant}
		for _, key := range keys[:5] {
			cells = append(cells, thousands(one.More[key]))
		}
		p.row(append(cells, decimals(one.More[elsewhereKey], 2), decimals(one.More[againKey], 2), decimals(one.Seconds, 1), decimals(one.Foreign, 2))...)
	}
}
