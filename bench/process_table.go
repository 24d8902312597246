package main

import (
	"strconv"
	"strings"
)

// isOf reports whether the sample's variant was made from a pattern with a number.
func (s sample) isOf(pattern string) bool {
	before, after, _ := strings.Cut(pattern, "%s")
	return strings.HasPrefix(s.Variant, before) && strings.HasSuffix(s.Variant, after)
}

func processTable(p *page, s *section) {
	var rates, between, limits, waits []samples
	for _, row := range s.Samples.rows() {
		switch one := row[0]; {
		case one.Variant == evenVariant || one.Variant == aloneVariant:
			between = append(between, row)
		case one.isOf(wideFork) || one.isOf(longEach):
			limits = append(limits, row)
		case one.Variant == waitFree || one.isOf(waitFull):
			waits = append(waits, row)
		default:
			rates = append(rates, row)
		}
	}
	for _, name := range []string{ours{}.name(), transact{}.name()} {
		if s.Engines[name] != "" {
			p.line("%s %s: %s.\n", name, s.Engines[name], s.SetUp[name])
		}
	}
	p.rateRows(rates)
	p.gapRows(between)
	p.limitRows(limits)
	p.waitRows(s, waits)
}

func (p *page) rateRows(rows []samples) {
	p.header("engine", "", "steps/s", "range", "inserted", "Postgres CPU", "worker CPU", "WAL", "RSS", "foreign", "times")
	for _, row := range rows {
		inserted := ""
		if n := row.median(more(insertedKey)); n > 0 {
			inserted = thousands(n)
		}
		c := row.costs()
		p.row(row[0].Engine, row[0].Variant, c[0], c[1], inserted, c[2], c[3], c[4], c[5], c[6], c[7])
	}
}

func (p *page) gapRows(rows []samples) {
	if len(rows) == 0 {
		return
	}
	p.line("\nInstances that are started evenly at a fixed rate, and instances that are started one at a time on an idle machine. *From return* is the time from the" +
		" return of one handler to the start of the next, which is all that the engine adds; *from settle*, from the time that the settled run has on record. Milliseconds.\n")
	cells := []string{"", "steps/s"}
	for _, g := range gaps {
		for _, share := range gapShares {
			cells = append(cells, share.name+" from "+g.from)
		}
	}
	p.header(append(cells, "Postgres CPU", "worker CPU", "WAL", "RSS", "foreign", "times")...)
	for _, row := range rows {
		c := row.costs()
		cells := []string{row[0].Variant, c[0]}
		if row[0].Rate == 0 {
			cells[1] = ""
		}
		for _, g := range gaps {
			for _, share := range gapShares {
				cells = append(cells, decimals(row.median(more(gapKey(g.from, share.name))), 2))
			}
		}
		p.row(append(cells, c[2:]...)...)
	}
}

func (p *page) limitRows(rows []samples) {
	if len(rows) == 0 {
		return
	}
	p.line("\nOne instance at a time, from its start to its end; measured once. The first compiles the definition; the first of an each has a tenth of the elements.\n")
	p.header("", "first, s", "second, s", "RSS after the first", "RSS after the second", "foreign")
	for _, row := range rows {
		cells := []string{row[0].Variant}
		for i := range 2 {
			if i < len(row[0].Series) {
				cells = append(cells, decimals(row[0].Series[i], 2))
			} else {
				cells = append(cells, "")
			}
		}
		p.row(append(cells, thousands(row[0].More[firstRSSKey]), thousands(row[0].RSS), decimals(row[0].Foreign, 2))...)
	}
}

func (p *page) waitRows(s *section, rows []samples) {
	if len(rows) == 0 {
		return
	}
	p.line("\nPlain runs, drained among instances that wait, half of them for a message, half for tomorrow.\n")
	p.header("", "runs/s", "range", "of the rate where none waits", "Postgres CPU", "worker CPU", "WAL", "foreign", "times")
	for _, row := range rows {
		c := row.costs()
		p.row(row[0].Variant, c[0], c[1], decimals(row.median(rate)/s.median(row[0].Engine, waitFree, rate), 2), c[2], c[3], c[4], c[6], strconv.Itoa(len(row)))
	}
}
