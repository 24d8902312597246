package main

import (
	"fmt"
	"math"
	"slices"
	"strconv"
	"strings"
)

// A chapter describes how one scenario is reported.
type chapter struct {
	title   string
	text    string
	picture string
	table   func(*page, *section)
}

// chapters are the chapters by scenario, in the order of scenarios.
var chapters = map[string]chapter{
	"enqueue": {"Enqueue", `Runs with the payload {"n": …}, stored by a process of its own: in bulk from 4 producers with 1,000 a call, one by
one from 8. *Client CPU* is the producer's.`, "enqueue.svg", costTable("client")},
	"drain": {"Drain", `The runs are there before the clock starts; it stops when none is unfinished. The floor is a bare loop of
` + "`leasing.Poller` and `settling.Settle`" + `, a full batch at a time, without handlers: the least that any worker must do on this schema. *Larger share*
is that of the busier of our two workers. *Documented defaults* are the settings of a rival's start page, with fewer runs. The last rows
show what the history, the wake-up and a bound role cost, and that more slots gain nothing; they are no configuration that is recommended.`, "drain.svg", drainTable},
	"pickup": {"Idle pick-up", `From the commit of an insert to the start of its handler, one run at a time, and what a worker costs the server
that has nothing to do. Percentiles are over all repetitions.`, "", pickUpTable},
	"crowd": {"Among many other rows", `The same drain with other rows in the table, loaded by plain SQL without history, vacuumed and analyzed; each time on a fresh
copy of the database, in turn with the empty one. *CPU* is per run handled, since those of lower priority are begun before the last of the others
is settled. River's future jobs have the priority of the others, which is its highest.`, "crowd.svg", crowdTable},
	"mixed": {"Many types and priorities", `The same number of runs, of one type and priority or spread over many. On the side a bare
` + "`leasing.Poller`" + ` leases a third as many: no run may come after one of lower priority.`, "", costTable("worker")},
	"work": {"Real work", `Runs whose handlers take time, drained by one worker process with its 100 slots, unless a row says otherwise. *The handlers allow* is the number of slots by the
time that a handler takes; for handlers that compute, the number of cores. It is more than the engine can settle if handlers take a millisecond or less. Where types are mixed, they have equal
shares of the backlog. Of the type that got the least, *smallest share* says how many runs were leased in the first half of the time, as a share of half of its runs.`, "", workTable},
	"snapshot": {"Under an old snapshot", `Another session keeps a REPEATABLE READ snapshot while runs are enqueued in bulk, 10,000 ahead of one worker process, so
that no dead row can be removed. At the end nothing may be left. Our engine is fed for as long without a snapshot, too. It is tried meanwhile: runs are stored in transactions that stay open for 2
to 60 seconds, and leases are planted as dead workers leave them; the longest time of each is shown.`, "snapshot.svg", snapshotTable},
	"heartbeat": {"Heartbeats", `One worker holds leases whose handlers sleep, with a lease of 6 s, so that all are extended every 2 s. Rates and
costs are per lease extended. *Statements* are all that the worker sends in an interval.`, "", heartbeatTable},
	"crash": {"A worker is killed", fmt.Sprintf(`One worker process drains %s runs whose handlers do nothing, and is killed with SIGKILL while it does. Another one drains the rest. Both have a lease of %v;
the shipped one of 30 s would make no other difference than to take longer. *Begun* are the runs whose handlers had been called, by a file that these append to; *charged* are the runs that needed a
second attempt. A run that is charged is suspect, so it waits for a backoff and begins with few others beside it.`, thousands(float64(fullSize.crash)), crashLease), "", crashTable},
	"processes": {"Processes", `Process graphs, whose steps do nothing, carried out by one worker process as it ships, and DBOS Transact: ` + "`RunWorkflow`" + ` with as
many steps. All figures are per step: the start of an instance and what lies between its steps are in the costs of these. Instances are started by one INSERT in SQL before the
clock starts, at the rate in the column *inserted*; what follows from it, up to the last step, is timed. Where instances are to wait, a start counts as a step. A plain run has no process.`,
		"", processTable},
	"events": {"Events", fmt.Sprintf(`The outbox, emptied into a sink that acknowledges at once; beside it, watermill's SQL outbox and its forwarder, with a publisher
that does nothing. An event has a payload of about 200 bytes and is of one of %s aggregates; it is published exactly once. *CPU* is in milliseconds per 1,000 events, *WAL* in bytes per event. Our
dispatchers are at work when the clock starts, but their sink is paused until then; the smallest backlog is appended, and published, several times for one measurement, and
up to a poll's pause is in its rate. The poisoned aggregate has 5,000 events in front of all others; the sink refuses its first one for ever, and the
dispatcher tries again with a backoff from a second on. What another sink has not got is as much as the largest backlog, and published to the sink that is measured.
JetStream is a nats-server of its own process, with a stream in a file; *foreign* has its CPU, too.
watermill appends with its forwarder's publisher, 1,000 a transaction, and is timed from the start of its forwarder.`, thousands(eventAggregates)), "", eventTable},
	"soak": {"Soak", fmt.Sprintf(`One worker, fed evenly with %.0f %% of the rate at which it handles what is enqueued as fast as it can. Finished runs are removed after
%d seconds, by a cleanup every minute. The p99 is of the time from commit to handler, of one run in every fiftieth of a second; sizes are those of all
tables.`, 100*soakShare, soakKeep), "soak.svg", soakTable},
}

// scenario is the name of the section's scenario.
func (s *section) scenario() string {
	name, _, _ := strings.Cut(s.Name, " ")
	return name
}

// A page is Markdown that is being written.
type page struct{ strings.Builder }

func (p *page) line(format string, args ...any) { fmt.Fprintf(p, format+"\n", args...) }

func (p *page) row(cells ...string) { p.line("| %s |", strings.Join(cells, " | ")) }

func (p *page) header(cells ...string) {
	p.row(cells...)
	p.line("|%s", strings.Repeat(" --- |", len(cells)))
}

// report returns the text of RESULTS.md.
func (r *results) report() string {
	p := &page{}
	p.line("<!-- Written by `make bench` from results.json. Do not edit. -->")
	p.line("# What was measured\n")
	if len(r.Sections) == 0 {
		p.line("Nothing yet.")
		return p.String()
	}
	r.order()
	p.circumstances(r.Sections[0])
	p.goals(r)
	for _, s := range r.Sections {
		p.section(s, r.Sections[0])
	}
	return p.String()
}

// order sorts sections in the order of scenarios.
func (r *results) order() {
	place := func(s *section) int {
		return slices.IndexFunc(scenarios, func(sc scenario) bool { return sc.name == s.scenario() })
	}
	slices.SortStableFunc(r.Sections, func(a, b *section) int { return place(a) - place(b) })
}

func (p *page) circumstances(s *section) {
	p.line("%s, commit %s. %s. PostgreSQL %s with fsync, synchronous_commit and full_page_writes on;", s.Date, s.Commit, s.Machine, s.Postgres)
	p.line("%s.\n", s.Settings)
	p.line("Engines take turns on this one server. Figures are medians, with the lowest and the highest behind them. *CPU* is in seconds per 100,000")
	p.line("runs, *WAL* in bytes per run, *RSS* the peak of one process in MiB. *Foreign* is how many cores others used meanwhile, the most of all")
	p.line("repetitions: rates of rows with more than a few tenths are not evidence, CPU and WAL still are. [README.md](README.md) tells the rest.\n")
	if s.Missing != "" {
		p.line("**%s.**\n", s.Missing)
	}
	p.header("engine", "version", "settings")
	for _, name := range []string{ours{}.name(), riverQueue{}.name(), graphile{}.name()} {
		if s.Engines[name] != "" {
			p.row(name, s.Engines[name], s.SetUp[name])
		}
	}
	p.line("")
}

func (p *page) goals(r *results) {
	p.line("## Goals\n")
	p.header("goal", "wanted", "measured", "")
	for _, s := range r.Sections {
		for _, g := range s.goals() {
			p.row(g.text, g.wanted(), g.figure(g.value), g.verdict())
		}
	}
	p.line("")
}

func (p *page) section(s, first *section) {
	c, ok := chapters[s.scenario()]
	if !ok {
		return
	}
	p.line("## %s\n", c.title)
	p.line("%s\n", c.text)
	if c.picture != "" && s.Rows == 0 {
		p.line("![%s](../docs/img/%s)\n", c.title, c.picture)
	}
	c.table(p, s)
	p.line("")
	if s.Commit != first.Commit || s.Date != first.Date || s.Machine != first.Machine {
		p.line("Measured %s, commit %s, PostgreSQL %s, %s.\n", s.Date, s.Commit, s.Postgres, s.Machine)
	}
}

// costTable returns a table of rates and costs.
func costTable(client string) func(*page, *section) {
	return func(p *page, s *section) {
		p.header("engine", "", "runs/s", "range", "Postgres CPU", client+" CPU", "WAL", "RSS", "foreign", "times")
		for _, row := range s.Samples.rows() {
			p.row(append([]string{row[0].Engine, row[0].Variant}, row.costs()...)...)
		}
	}
}

// drainTable is a costTable with the larger of the shares of two workers.
func drainTable(p *page, s *section) {
	p.header("engine", "", "runs/s", "range", "larger share", "Postgres CPU", "worker CPU", "WAL", "RSS", "foreign", "times")
	for _, row := range s.Samples.rows() {
		larger := ""
		if share := row.median(more(largerKey)); share > 0 {
			larger = decimals(share, 2)
		}
		c := row.costs()
		p.row(append([]string{row[0].Engine, row[0].Variant, c[0], c[1], larger}, c[2:]...)...)
	}
}

// crowdTable is a costTable with ratios to the engine's own rate without other rows.
func crowdTable(p *page, s *section) {
	p.header("engine", "other rows", "runs/s", "range", "of the rate among none", "Postgres CPU", "of the CPU among none", "worker CPU", "WAL", "foreign", "times")
	for _, row := range s.Samples.rows() {
		none := s.Samples.of(row[0].Engine, nobody)
		c := row.costs()
		p.row(row[0].Engine, row[0].Variant, c[0], c[1], decimals(row.median(rate)/none.median(rate), 2),
			c[2], decimals(row.median(serverCPU)/none.median(serverCPU), 2), c[3], c[4], c[6], c[7])
	}
}

// costs returns the cells of a row with rates and costs.
func (ss samples) costs() []string {
	return []string{
		thousands(ss.median(rate)), ss.span(rate, thousands),
		decimals(ss.median(serverCPU), 2), decimals(ss.median(workerCPU), 2),
		thousands(ss.median(wal)), thousands(ss.median(rss)),
		decimals(ss.sorted(foreignCores)[len(ss)-1], 2), strconv.Itoa(len(ss)),
	}
}

func (ss samples) span(of number, format func(float64) string) string {
	all := ss.sorted(of)
	return format(all[0]) + "–" + format(all[len(all)-1])
}

// pooled returns the series of all samples as one.
func (ss samples) pooled() (all []float64) {
	for _, s := range ss {
		all = append(all, s.Series...)
	}
	return all
}

func pickUpTable(p *page, s *section) {
	p.header("engine", "", "p50 ms", "p95 ms", "p99 ms", "runs", "transactions a minute while idle", "RSS", "foreign")
	for _, row := range s.Samples.rows() {
		cells := []string{row[0].Engine, row[0].Variant}
		if all := row.pooled(); len(all) > 0 {
			for _, share := range []float64{0.50, 0.95, 0.99} {
				cells = append(cells, decimals(percentile(all, share), 2))
			}
			cells = append(cells, strconv.Itoa(len(all)))
		} else {
			cells = append(cells, "", "", "", "")
		}
		p.row(append(cells, thousands(row[0].More[transactionsKey]), thousands(row.median(rss)),
			decimals(row.sorted(foreignCores)[len(row)-1], 2))...)
	}
}

func decimals(x float64, n int) string {
	if math.IsNaN(x) || math.IsInf(x, 0) {
		return "–"
	}
	return strconv.FormatFloat(x, 'f', n, 64)
}

// thousands rounds and groups digits.
func thousands(x float64) string {
	if math.IsNaN(x) || math.IsInf(x, 0) {
		return "–"
	}
	digits := strconv.FormatFloat(math.Abs(x), 'f', 0, 64)
	for i := len(digits) - 3; i > 0; i -= 3 {
		digits = digits[:i] + "," + digits[i:]
	}
	if x < 0 {
		digits = "-" + digits
	}
	return digits
}

func snapshotTable(p *page, s *section) {
	free := s.median(ours{}.name(), freeVariant, more(lastKey))
	p.header("engine", "", "seconds", "runs/s", "first 10 s", "last 10 s", "of the first", "of those without a snapshot", "waiting in the end", "late commit to handler", "expiry to taken back", "Postgres CPU", "worker CPU", "WAL", "RSS", "foreign")
	for _, one := range s.Samples {
		late, taken, share := "", "", ""
		if one.Engine == (ours{}).name() {
			share = decimals(one.More[lastKey]/free, 2)
			late, taken = decimals(one.More[lateKey], 2)+" s", decimals(one.More[takenKey], 2)+" s"
		}
		c := samples{one}.costs()
		p.row(one.Engine, one.Variant, strconv.Itoa(len(one.Series)), c[0], thousands(one.More[firstKey]), thousands(one.More[lastKey]),
			decimals(one.More[lastKey]/one.More[firstKey], 2), share, thousands(one.More[waitingKey]), late, taken, c[2], c[3], c[4], c[5], c[6])
	}
}

func heartbeatTable(p *page, s *section) {
	p.header("", "extended/s", "HOT", "heartbeats an interval", "statements an interval", "lost", "Postgres CPU", "worker CPU", "WAL", "RSS", "foreign")
	for _, one := range s.Samples {
		c := samples{one}.costs()
		p.row(one.Variant, c[0], decimals(100*one.More[hotKey], 1)+" %", decimals(one.More[beatsKey], 2), decimals(one.More[statementKey], 1),
			thousands(one.More[lostKey]), c[2], c[3], c[4], c[5], c[6])
	}
}

func soakTable(p *page, s *section) {
	p.header("", "runs/s", "p99 ms", "tables MiB", "indexes MiB", "Postgres CPU", "worker CPU", "WAL", "RSS", "foreign")
	for _, one := range s.Samples {
		name, delay, table, indexes := one.Variant, "", "", ""
		if one.Variant == soakMinutes {
			name += " " + strconv.Itoa(one.Rep)
			delay, table, indexes = decimals(one.More[delayKey], 1), thousands(one.More[tableKey]), thousands(one.More[indexKey])
		}
		c := samples{one}.costs()
		p.row(name, c[0], delay, table, indexes, c[2], c[3], c[4], c[5], c[6])
	}
}
