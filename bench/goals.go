package main

import (
	"fmt"
	"math"
	"slices"

	"github.com/simple-workflow/simple-workflow/internal/shipped"
)

// A goal is the minimum or maximum that we want a figure to have.
type goal struct {
	text    string
	value   float64
	limit   float64
	atMost  bool
	unit    string
	decimal int
}

func (g goal) reached() bool {
	if g.atMost {
		return g.value <= g.limit
	}
	return g.value >= g.limit
}

func (g goal) verdict() string {
	if g.reached() {
		return "reached"
	}
	return "**not reached**"
}

func (g goal) wanted() string {
	sign := "≥"
	if g.atMost {
		sign = "≤"
	}
	return sign + " " + g.figure(g.limit)
}

func (g goal) figure(x float64) string {
	return fmt.Sprintf("%.*f%s", g.decimal, x, g.unit)
}

// ratio is a goal for a rate or cost relative to another.
func ratio(text string, value, of, limit float64, atMost bool) goal {
	return goal{text: text, value: value / of, limit: limit, atMost: atMost, unit: " ×", decimal: 2}
}

// goals returns the goals of a scenario. Goals that cannot be computed, because an engine was left out, are left out,
// too.
func (s *section) goals() []goal {
	of := map[string]func(*section) []goal{
		"enqueue": enqueueGoals, "drain": drainGoals, "pickup": pickUpGoals,
		"crowd": crowdGoals, "mixed": mixedGoals,
		"work":     workGoals,
		"snapshot": snapshotGoals, "heartbeat": heartbeatGoals,
		"crash":     crashGoals,
		"processes": processGoals,
		"events":    eventGoals,
		"soak":      soakGoals,
	}[s.scenario()]
	if of == nil {
		return nil
	}
	return slices.DeleteFunc(of(s), func(g goal) bool { return math.IsNaN(g.value) || math.IsInf(g.value, 0) })
}

// known returns x, or NaN if it is 0, because it was not measured.
func known(x float64) float64 {
	if x == 0 {
		return math.NaN()
	}
	return x
}

func (s *section) median(engine, variant string, of number) float64 {
	return s.Samples.of(engine, variant).median(of)
}

func (s *section) bestRival(variant string) float64 {
	best := 0.0
	for name := range s.Engines {
		if name != (ours{}).name() {
			best = max(best, s.median(name, variant, rate))
		}
	}
	return best
}

func enqueueGoals(s *section) []goal {
	own := ours{}.name()
	return []goal{
		ratio("enqueue in bulk, of the best rival", s.median(own, bulkVariant, rate), s.bestRival(bulkVariant), 1.5, false),
		ratio("enqueue one by one, of the best rival", s.median(own, singleVariant, rate), s.bestRival(singleVariant), 1, false),
	}
}

func drainGoals(s *section) []goal {
	own := ours{}.name()
	one := s.median(own, oneProcess, rate)
	floor := max(s.median(own, floorOne, rate), s.median(own, floorTwo, rate))
	return []goal{
		ratio("drain, of graphile-worker tuned", one, s.median(graphile{}.name(), oneProcess, rate), 1.05, false),
		ratio("drain, of two processes of graphile-worker tuned", one, s.median(graphile{}.name(), twoProcesses, rate), 0.8, false),
		ratio("Postgres CPU per drained run, of graphile-worker", s.median(own, oneProcess, serverCPU),
			s.median(graphile{}.name(), oneProcess, serverCPU), 1.9, true),
		ratio("drain, of River tuned", one, s.median(riverQueue{}.name(), oneProcess, rate), 1.7, false),
		ratio("drain, of a bare loop of lease and settle", one, floor, 0.7, false),
		{text: "two processes, larger share", value: known(s.median(own, twoProcesses, more(largerKey))), limit: 0.6, atMost: true, decimal: 2},
		{text: "WAL per drained run", value: known(s.median(own, oneProcess, wal)), limit: 1280, atMost: true, unit: " bytes"},
	}
}

func pickUpGoals(s *section) []goal {
	own := ours{}.name()
	woken, polled := s.Samples.of(own, wakeUpVariant).pooled(), s.Samples.of(own, pollingVariant).pooled()
	limit := float64(pollInterval.Milliseconds()) + 5
	fastest := math.Inf(1)
	for _, row := range s.Samples.rows() {
		if all := row.pooled(); row[0].Engine != own && len(all) > 0 {
			fastest = min(fastest, percentile(all, 0.50))
		}
	}
	if math.IsInf(fastest, 1) {
		fastest = 0 // no rival took part
	}
	return []goal{
		ratio("idle pick-up by wake-up, p50, of the fastest rival", percentile(woken, 0.50), fastest, 1.1, true),
		{text: "idle pick-up by wake-up, p99", value: percentile(woken, 0.99), limit: 5, atMost: true, unit: " ms", decimal: 2},
		{text: "idle pick-up by polling alone, p99", value: percentile(polled, 0.99), limit: limit, atMost: true, unit: " ms", decimal: 1},
	}
}

// crowdShare is the share of the rate that we want to keep among other rows.
const crowdShare = 0.9

func crowdGoals(s *section) (goals []goal) {
	own := ours{}.name()
	alone, cost := s.median(own, nobody, rate), s.median(own, nobody, serverCPU)
	for _, row := range s.Samples.rows() {
		if row[0].Engine != own || row[0].Variant == nobody {
			continue
		}
		goals = append(goals,
			ratio("drain among "+row[0].Variant+", of the rate among none", row.median(rate), alone, crowdShare, false),
			ratio("Postgres CPU per run among "+row[0].Variant+", of that among none", row.median(serverCPU), cost, 1.15, true))
	}
	return goals
}

func mixedGoals(s *section) []goal {
	own := ours{}.name()
	many := s.Samples.of(own, thirtyType)
	return []goal{
		ratio("drain of "+thirtyType+", of the rate of one type", many.median(rate), s.median(own, oneType, rate), 0.8, false),
		{text: "runs leased after one of lower priority", value: sum(many.sorted(more(strictKey))), atMost: true},
	}
}

// workGoals leave out handlers that allow more than the engine can settle on this machine, and those that compute on
// the cores which the engine needs, too.
func workGoals(s *section) (goals []goal) {
	for _, row := range s.Samples.rows() {
		switch {
		case row[0].Engine != ours{}.name():
		case row[0].Variant == urgentVariant:
			goals = append(goals, goal{text: "pick-up of " + urgentVariant + ", p99", value: percentile(row.pooled(), 0.99), limit: 20, atMost: true, unit: " ms", decimal: 1})
		case row[0].Variant != shortVariant && row[0].Variant != burnVariant:
			goals = append(goals, goal{text: row[0].Variant + ", of what they allow", value: row.median(ofAllowed), limit: 0.95, unit: " ×", decimal: 2})
		}
	}
	return goals
}

func crashGoals(s *section) []goal {
	killed := s.Samples.of(ours{}.name(), killedVariant)
	if len(killed) == 0 {
		return nil
	}
	most := func(key string) float64 { return slices.Max(killed.sorted(more(key))) }
	return []goal{
		{text: "runs of a killed worker that are charged and had not begun", value: most(unjustKey), limit: shipped.Concurrency, atMost: true},
		{text: "runs of a killed worker that had begun and are not charged", value: most(unchargedKey), atMost: true},
		{text: "the last run that is not charged begins elsewhere, after the end of its lease", value: most(elsewhereKey), limit: 2, atMost: true, unit: " s", decimal: 2},
	}
}

func snapshotGoals(s *section) []goal {
	held := s.Samples.of(ours{}.name(), heldVariant)
	return []goal{
		ratio("under an old snapshot, the last 10 s, of those without a snapshot", held.median(more(lastKey)), s.median(ours{}.name(), freeVariant, more(lastKey)), 0.9, false),
		{text: "a run committed up to 60 s late, until it is leased", value: held.median(more(lateKey)), limit: 10, atMost: true, unit: " s", decimal: 2},
		{text: "an expired lease, until it is taken back", value: held.median(more(takenKey)), limit: 1, atMost: true, unit: " s", decimal: 2},
	}
}

func heartbeatGoals(s *section) []goal {
	return []goal{
		{text: "HOT share of heartbeats", value: 100 * s.Samples.median(more(hotKey)), limit: 90, unit: " %"},
		{text: "heartbeat statements per worker and interval", value: s.Samples.median(more(beatsKey)), limit: 1.05, atMost: true, decimal: 2},
		{text: "leases lost", value: s.Samples.median(more(lostKey)), atMost: true},
	}
}

func processGoals(s *section) (goals []goal) {
	own := ours{}.name()
	steps := s.median(transact{}.name(), dbosVariant, rate)
	for _, w := range []struct {
		variant string
		limit   float64
	}{{sequenceVariant, 4}, {forkVariant, 3}} {
		if r := s.median(own, w.variant, rate); r > 0 {
			goals = append(goals,
				ratio("steps of processes, "+w.variant+", of DBOS's steps", r, steps, w.limit, false),
				ratio("steps of processes, "+w.variant+", of plain runs", r, s.median(own, plainVariant, rate), 0.2, false))
		}
	}
	for _, one := range s.Samples.rows() {
		switch {
		case one[0].Engine != own:
		case one[0].Variant == evenVariant:
			goals = append(goals,
				goal{text: "between two steps at 2,900 steps/s, p50", value: one.median(more(gapKey("return", "p50"))), limit: 5, atMost: true, unit: " ms", decimal: 2},
				goal{text: "between two steps at 2,900 steps/s, p99", value: one.median(more(gapKey("return", "p99"))), limit: 20, atMost: true, unit: " ms", decimal: 2})
		case one[0].Variant == aloneVariant:
			goals = append(goals,
				goal{text: "between two steps of an instance alone, p50", value: one.median(more(gapKey("return", "p50"))), limit: 2, atMost: true, unit: " ms", decimal: 2})
		case one[0].isOf(wideFork):
			goals = append(goals, goal{text: one[0].Variant + ", from its start to its end", value: slices.Max(one.pooled()), limit: 2, atMost: true, unit: " s", decimal: 2})
		case one[0].isOf(waitFull):
			goals = append(goals, ratio(one[0].Variant+", of the rate where none does", one.median(rate), s.median(own, waitFree, rate), 0.85, false))
		}
	}
	return goals
}

// eventGoals compare the CPU with that of the smallest backlog, which costs as much as a dispatcher that keeps up.
func eventGoals(s *section) (goals []goal) {
	own := s.Samples.of(ours{}.name(), rareEvents)
	if len(own) > 0 {
		goals = append(goals, goal{text: "from commit to publish, one event after the other, p99", value: own.delay("p99", 0.99), limit: 50, atMost: true, unit: " ms", decimal: 1})
	}
	small := 0.0
	for _, row := range s.Samples.rows() {
		if row[0].Engine != (ours{}).name() || row[0].isDelay() {
			continue
		}
		name := row[0].Variant
		if row[0].isOf(oneDispatcher) && small == 0 {
			small = row.median(eventCPU)
			continue
		}
		if row[0].isOf(oneDispatcher) {
			goals = append(goals, goal{text: "publish to a sink that does nothing, " + name, value: row.median(rate), limit: 10_000, unit: " events/s"})
		}
		if row[0].isOf(besideOther) {
			alone := s.median(ours{}.name(), fmt.Sprintf(oneDispatcher, thousands(float64(row[0].Runs))), rate)
			goals = append(goals, ratio(name+", of the rate without", row.median(rate), alone, 0.8, false))
			continue
		}
		if !row[0].isOf(twoDispatchers) && row[0].More[brokerKey] == 0 {
			goals = append(goals, ratio("CPU per event, "+name+", of that of the smallest", row.median(eventCPU), small, 1.5, true))
		}
	}
	return goals
}

// settledFrom is the minute from which a soak has to be flat.
const settledFrom = 5

// soakGoals compare the last five minutes with the five after warming up.
func soakGoals(s *section) []goal {
	minutes := s.Samples.of(ours{}.name(), soakMinutes)
	if len(minutes) < 3*settledFrom {
		return nil
	}
	early, late := minutes[settledFrom:2*settledFrom], minutes[len(minutes)-settledFrom:]
	demanded := soakShare * s.median(ours{}.name(), peakVariant, rate)
	size := func(one sample) float64 { return one.More[tableKey] + one.More[indexKey] }
	return []goal{
		ratio("soak, rate of the last 5 minutes, of what is enqueued", late.median(rate), demanded, 0.98, false),
		ratio("size of tables and indexes, of that after 5 minutes", late.median(size), early.median(size), 1.1, true),
		ratio("p99 to the handler, of that after 5 minutes", late.median(more(delayKey)), early.median(more(delayKey)), 1.25, true),
	}
}
