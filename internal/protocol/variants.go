package protocol

import (
	"slices"
	"strings"
)

// A Variant is a design with a name, and the expected finding.
type Variant struct {
	Name string
	Want string // the rule that it breaks; "" if none
	// Explore visits its states, and gives up after most of them.
	Explore func(most int) Finding
}

func of[S comparable](name, want string, d interface{ design() design[S] }) Variant {
	return Variant{name, want, func(most int) Finding { return explore(d.design(), most) }}
}

// The rules that can be broken.
const (
	twoResults      = "two results"
	tooManyStarts   = "more starts than max_attempts"
	lostLease       = "a lost lease has changed the run"
	leftAtStop      = "a worker has stopped and left a lease behind"
	innocent        = "an innocent run was failed"
	uncharged       = "a handler began and was not charged"
	tooMany         = "a crash has charged more unbegun runs than there are slots"
	unknown         = "a living worker holds a lease that it does not know"
	againThoughKept = "a run is started again, or failed, although its outcome is kept"
	notFailed       = "a run that a person has fail has come to something else"
)

// Variants returns every design and every planted fault. With deep it also returns those with wider bounds, which
// take ten minutes.
func Variants(deep bool) []Variant {
	all := slices.Concat(leases(), aheads(), chains(), limits(), outcomes(), breakers())
	if deep {
		all = append(all, deeper()...)
	}
	return all
}

func leases() []Variant {
	base := aDesign{care: once, runs: 2, most: 2, slots: 2, processes: 2, failing: true}
	with := func(change func(*aDesign)) aDesign { d := base; change(&d); return d }
	poison := func(change func(*aDesign)) aDesign {
		d := aDesign{care: once, runs: 3, most: 2, slots: 3, processes: 2, poisons: 1}
		change(&d)
		return d
	}
	v := of[aState]
	return []Variant{
		v("A kill, freeze, 2 lost answers", "", with(func(d *aDesign) { d.kills, d.freezes, d.losses, d.failing = 1, 1, 2, false })),
		v("A kill, freeze, lost answer, cancel, retry", "", with(func(d *aDesign) { d.runs, d.kills, d.freezes, d.losses, d.cancels, d.retries = 1, 1, 1, 1, 1, 1 })),
		v("A kill, freeze, hold, release by a person", "", with(func(d *aDesign) { d.runs, d.kills, d.freezes, d.holds, d.releases = 1, 1, 1, 2, 1 })),
		v("A stop, kill, freeze", "", with(func(d *aDesign) { d.stops, d.kills, d.freezes = 1, 1, 1 })),
		v("A stop, lost answer, kill", "", with(func(d *aDesign) { d.stops, d.losses, d.kills = 1, 1, 1 })),
		v("A 2 kills, lost answer, also to a take-back", "", with(func(d *aDesign) { d.kills, d.losses, d.failing = 2, 1, false })),
		v("A fault: settle without the token", lostLease, with(func(d *aDesign) { d.freezes, d.NoFence = 1, true })),
		v("A fault: settle leaves the token", twoResults, with(func(d *aDesign) { d.losses, d.TokenStays = 1, true })),
		v("A fault: cancel leaves the token", "a cancelled run was changed", with(func(d *aDesign) { d.cancels, d.CancelKeepsToken = 1, true })),
		v("A fault: what is held is leased", "a run that is held or deleted was leased", with(func(d *aDesign) { d.holds, d.LeasesHidden = 1, true })),
		v("A fault: a lost answer is forgotten after one look", unknown, with(func(d *aDesign) { d.losses, d.forgetful = 1, true })),
		v("A fault: a lost answer to a take-back is forgotten", unknown, with(func(d *aDesign) { d.kills, d.losses, d.takeBackForgets = 2, 1, true })),
		v("A fault: leases whose handlers run are given back as in doubt", tooManyStarts, with(func(d *aDesign) { d.losses, d.doubtsAny = 2, true })),
		v("A fault: tried again although it was the last attempt", tooManyStarts, with(func(d *aDesign) { d.retriesTheLast, d.LeasesMore = true, true })),
		v("A fault: a failure is not charged", tooManyStarts, with(func(d *aDesign) { d.PaysBack = true })),
		v("A fault: a lease is not charged", tooManyStarts, with(func(d *aDesign) { d.LeasesFree = true })),
		v("A fault: a retry forgets the charged starts", tooManyStarts, with(func(d *aDesign) { d.retries, d.RetriesFree = 1, true })),
		v("A fault: a living worker's lease is taken back", "a lease that had not expired was taken back", with(func(d *aDesign) { d.TakesLiving = true })),
		v("A fault: what is cancelled is leased", "a cancelled run was leased", with(func(d *aDesign) { d.cancels, d.LeasesAny = 1, true })),
		v("A fault: a stop forgets what is in doubt", leftAtStop, with(func(d *aDesign) { d.stops, d.losses, d.stopForgets = 1, 1, true })),
		v("A fault: a crash is not charged", tooManyStarts, poison(func(d *aDesign) { d.FreeCrash = true })),
		v("A fault: exhausted runs are due again", tooManyStarts, poison(func(d *aDesign) { d.TakesForever, d.LeasesMore = true, true })),

		// Refused outcomes are kept, and settled by any worker.
		v("A kept: refused twice, kill, freeze, lost answer", "", with(func(d *aDesign) { d.runs, d.refusals, d.kills, d.freezes, d.losses = 1, 2, 1, 1, 1 })),
		v("A kept: 2 runs, kill, freeze", "", with(func(d *aDesign) { d.refusals, d.kills, d.freezes = 1, 1, 1 })),
		v("A kept: effects, kill, freeze, lost answer", "", with(func(d *aDesign) { d.runs, d.refusals, d.kills, d.freezes, d.losses, d.effects = 1, 2, 1, 1, 1, true })),
		v("A kept: cancel, fail, release, hold by a person, kill", "", with(func(d *aDesign) {
			d.runs, d.refusals, d.kills, d.cancels, d.fails, d.releases, d.holds, d.effects = 1, 1, 1, 1, 1, 1, 1, true
		})),
		v("A kept: stop, kill, lost answer", "", with(func(d *aDesign) { d.runs, d.refusals, d.stops, d.kills, d.losses = 1, 1, 1, 1, 1 })),
		v("A kept: poison, others run long", "", poison(func(d *aDesign) { d.refusals, d.long = 1, true })),
		v("A kept: read, and settled later: kill, freeze, lost answer", "", with(func(d *aDesign) {
			d.runs, d.refusals, d.kills, d.freezes, d.losses, d.effects, d.readsFirst = 1, 1, 1, 1, 1, true, true
		})),
		v("A kept: read, failed by a person, and settled later", "", with(func(d *aDesign) {
			d.runs, d.refusals, d.fails, d.kills, d.effects, d.readsFirst = 1, 1, 1, 1, true, true
		})),
		v("A fault: what is kept goes by what was read of it before", notFailed, with(func(d *aDesign) { d.runs, d.refusals, d.fails, d.readsFirst, d.staleReads = 1, 1, 1, true, true })),
		v("A fault: what is kept is taken back", againThoughKept, with(func(d *aDesign) { d.refusals, d.TakesKept = 1, true })),
		v("A fault: a take-back looks for what is kept before it locks", againThoughKept, with(func(d *aDesign) { d.refusals, d.freezes, d.looksFirst = 1, 1, true })),
		v("A fault: what is kept is released", againThoughKept, with(func(d *aDesign) { d.refusals, d.releases, d.ReleasesKept = 1, 1, true })),
		v("A fault: what is kept is forgotten before it is settled", againThoughKept, with(func(d *aDesign) { d.refusals, d.kills, d.ForgetsKept = 1, 1, true })),
		v("A fault: what an older lease has left over is settled", lostLease, with(func(d *aDesign) { d.refusals, d.losses, d.SettlesOlder = 1, 1, true })),

		// Suspects. Poison is started max_attempts times, and once more if its last attempt was given back.
		v("A suspects: poison, 2 attempts", "", poison(func(d *aDesign) {})),
		v("A suspects: poison, 3 attempts", "", poison(func(d *aDesign) { d.most = 3 })),
		v("A suspects: poison, others run long", "", poison(func(d *aDesign) { d.long = true })),
		v("A suspects: poison that waits, others run long", "", poison(func(d *aDesign) { d.long, d.slow = true, true })),
		v("A suspects: the same, 3 attempts", "", poison(func(d *aDesign) { d.long, d.slow, d.most = true, true, 3 })),
		v("A suspects: poison, freeze, lost answer", "", poison(func(d *aDesign) { d.freezes, d.losses, d.runs = 1, 1, 2 })),
		v("A suspects: poison that waits, freeze", "", poison(func(d *aDesign) { d.runs, d.long, d.slow, d.freezes = 2, true, true, 1 })),
		v("A suspects, alone while watched: others run long", innocent, poison(func(d *aDesign) { d.care, d.long = watched, true })),
		v("A suspects, alone to the end: others run long", "", poison(func(d *aDesign) { d.care, d.long = toTheEnd, true })),
		v("A suspects, alone to the end: poison that waits", "", poison(func(d *aDesign) { d.care, d.long, d.slow = toTheEnd, true, true })),
		v("A known: two poison runs, and an innocent one", innocent, poison(func(d *aDesign) { d.poisons = 2 })),
		v("A fault: suspects are not watched", innocent, poison(func(d *aDesign) { d.care, d.noWatch = watched, true })),
		v("A fault: the last attempt is not alone", innocent, poison(func(d *aDesign) { d.care, d.notAlone = watched, true })),
		v("A fault: given back each time", tooManyStarts, poison(func(d *aDesign) { d.long, d.slow, d.SparesAgain = true, true, true })),
		v("A fault: charged although it was not alone", innocent, poison(func(d *aDesign) { d.long, d.chargedInCompany = true, true })),
		v("A fault: company is looked for among what is still leased", innocent, poison(func(d *aDesign) { d.long, d.looksTooLate = true, true })),
	}
}

func aheads() (all []Variant) {
	with := func(mark, fence string, change ...func(*bDesign)) bDesign {
		d := bDesign{mark: mark, fence: fence, most: 2, slots: 1, runs: 2}
		for _, c := range change {
			c(&d)
		}
		return d
	}
	v := func(name, want string, d bDesign) { all = append(all, of[bState](name, want, d)) }
	// The budgets: everything happens to two runs, and less to three.
	everything := func(d *bDesign) { d.poison, d.kills, d.freezes, d.losses = true, 1, 1, 1 }
	three := func(d *bDesign) { d.runs, d.kills, d.losses = 3, 1, 1 }
	poison3 := func(d *bDesign) { d.runs, d.poison, d.freezes, d.most = 3, true, 1, 1 }
	stopping := func(d *bDesign) { d.stops, d.kills, d.losses = 1, 1, 1 }

	v("B all charged at the lease (as measured)", tooMany, with("lease", "", three))
	v("B ahead is never charged", uncharged, with("none", "", everything))
	for _, design := range [][2]string{{"run", ""}, {"worker", "retire"}, {"worker", "time"}, {"token", "first"}} {
		name := strings.TrimSpace("B mark by " + design[0] + " " + design[1])
		v(name+": 2 runs, poison, kill, freeze, loss", "", with(design[0], design[1], everything))
		v(name+": 3 runs, kill, loss", "", with(design[0], design[1], three))
		v(name+": 3 runs, poison, freeze", "", with(design[0], design[1], poison3))
		v(name+": 3 runs, 2 slots, kill, loss", "", with(design[0], design[1], three, func(d *bDesign) { d.slots = 2 }))
		v(name+": 2 runs, stop, kill, loss", "", with(design[0], design[1], stopping))
	}
	v("B mark in the worker's row, read in a snapshot", uncharged, with("worker", "snapshot", everything))
	v("B mark in the worker's row, lock without a fence", uncharged, with("worker", "lock", everything))
	v("B run: a mark by id alone", tooMany, with("run", "", three, func(d *bDesign) { d.unfenced, d.freezes = true, 1 }))
	v("B mark by token, the take-back only looks", uncharged, with("token", "looks", everything))
	v("B token: marks are cleaned while the lease is held", uncharged, with("token", "first", everything, func(d *bDesign) { d.cleanEarly = true }))
	v("B token: marks are cleaned, and a mark does not look at the lease", uncharged, with("token", "first", everything, func(d *bDesign) { d.noCheck = true }))
	v("B token: the handler begins before the answer", uncharged, with("token", "first", everything, func(d *bDesign) { d.early = true }))
	v("B time: clocks that stand still", uncharged, with("worker", "time", everything, func(d *bDesign) { d.clockLies = true }))
	v("B retire: leases of the old identity are kept", uncharged, with("worker", "retire", poison3, func(d *bDesign) { d.keepOld = true }))
	v("B retire: one row for each name", uncharged, with("worker", "retire", everything, func(d *bDesign) { d.byName = true }))
	v("B retire: the handler begins before the answer", uncharged, with("worker", "retire", everything, func(d *bDesign) { d.early = true }))
	v("B run: the handler begins before the answer", uncharged, with("run", "", everything, func(d *bDesign) { d.early = true }))
	v("B retire: a mark replaces the one before", uncharged, with("worker", "retire", three, func(d *bDesign) { d.absolute = true }))
	v("B retire: no row means not begun", uncharged, with("worker", "retire", poison3, func(d *bDesign) { d.missingIsUnbegun, d.deleteAtTakeBack = true, true }))
	v("B retire: take-back deletes the row", tooMany, with("worker", "retire", three, func(d *bDesign) { d.deleteAtTakeBack = true }))
	v("B retire: stop deletes the row first", tooMany, with("worker", "retire", stopping, func(d *bDesign) { d.deleteAtStop, d.runs = true, 3 }))
	v("B retire: exhausted before given back", "a run was failed that nobody was allowed to begin", with("worker", "retire", everything, func(d *bDesign) { d.exhaustedFirst, d.most = true, 1 }))
	v("B retire: the whole batch is marked", tooMany, with("worker", "retire", three, func(d *bDesign) { d.wholeBatch = true }))
	v("B retire: a position, and another run first", tooMany, with("worker", "retire", three, func(d *bDesign) { d.position = true }))
	v("B retire: unanswered marks do not count", tooMany, with("worker", "retire", three, func(d *bDesign) { d.forgetUnknown, d.losses = true, 2 }))
	v("B retire: the mark is not flushed", uncharged, with("worker", "retire", everything, func(d *bDesign) { d.async, d.breakdowns, d.losses, d.freezes = true, 1, 0, 0 }))
	return all
}

func chains() (all []Variant) {
	with := func(doubt string, change ...func(*cDesign)) cDesign {
		d := cDesign{doubt: doubt, slots: 1}
		for _, c := range change {
			c(&d)
		}
		return d
	}
	v := func(name, want string, d cDesign) { all = append(all, of[cState](name, want, d)) }
	row := func(kills, freezes, losses, pauses uint8) func(*cDesign) {
		return func(d *cDesign) { d.kills, d.freezes, d.losses, d.pauses = kills, freezes, losses, pauses }
	}
	fork := func(d *cDesign) { d.fork = true }
	stop := func(d *cDesign) { d.stops = 1 }
	for _, doubt := range []string{"start", "release"} {
		v("C in a row, in doubt "+doubt+": kill, 2 lost answers", "", with(doubt, row(1, 0, 2, 0)))
		v("C in a row, in doubt "+doubt+": freeze, lost answer", "", with(doubt, row(0, 1, 1, 0)))
		v("C in a row, in doubt "+doubt+": pause, lost answer", "", with(doubt, row(0, 0, 1, 1)))
		v("C in a row, in doubt "+doubt+": stop, lost answer", "", with(doubt, row(0, 0, 1, 0), stop))
		v("C in a row, in doubt "+doubt+": kill, freeze, lost answer", "", with(doubt, row(1, 1, 1, 0)))
		v("C fork, in doubt "+doubt+": kill, lost answer", "", with(doubt, row(1, 0, 1, 0), fork))
		v("C fork, 2 slots, in doubt "+doubt+": kill, lost answer", "", with(doubt, row(1, 0, 1, 0), fork, func(d *cDesign) { d.slots = 2 }))
	}
	v("C mutant: nothing is done in doubt (as measured)", unknown, with("ignore", row(0, 0, 1, 0)))
	v("C mutant: given back at once, before settling again", unknown, with("at once", row(0, 0, 1, 0)))
	v("C mutant: begun before the commit is known", "a handler began that nobody has leased", with("start", row(0, 0, 1, 0), func(d *cDesign) { d.optimistic = true }))
	v("C mutant: looks for pauses only when settling", "a handler of a paused type began after its worker had looked", with("start", row(0, 0, 0, 1), func(d *cDesign) { d.looksOnlyAtSettle = true }))
	v("C mutant: in doubt by the worker's name", "two handlers under one lease", with("start", row(1, 1, 1, 0), func(d *cDesign) { d.byName, d.slots = true, 2 }))
	v("C mutant: a stop forgets what is in doubt", unknown, with("start", row(0, 0, 1, 0), stop, func(d *cDesign) { d.forgetAtStop = true }))
	v("C mutant: a heartbeat drops what is being settled", unknown, with("start", row(0, 0, 1, 0), func(d *cDesign) { d.dropWhenGone = true }))
	v("C mutant: no fence", "a step was stored twice", with("start", row(0, 1, 1, 0), func(d *cDesign) { d.noFence = true }))
	v("C mutant: a fork is carried on without room", tooMany, with("start", row(1, 0, 0, 0), fork, func(d *cDesign) { d.noRoom = true }))
	v("C mutant: no slot is kept for what a settling brings", tooMany, with("start", row(1, 0, 0, 0), fork, func(d *cDesign) { d.unreserved = true }))
	return all
}

func limits() (all []Variant) {
	const exceeded = "more leased than the limit allows"
	with := func(count string, change ...func(*dDesign)) dDesign {
		d := dDesign{count: count, most: 1, kills: 1, freezes: 1}
		for _, c := range change {
			c(&d)
		}
		return d
	}
	v := func(name, want string, d dDesign) { all = append(all, of[dState](name, want, d)) }
	carry := func(how string) func(*dDesign) { return func(d *dDesign) { d.carry = how } }
	v("D lock, then count in a statement of its own", "", with("after the lock"))
	v("D the same, skipping what is locked", "", with("after the lock", func(d *dDesign) { d.skip = true }))
	v("D the same, limit of 2, lowered meanwhile", "", with("after the lock", func(d *dDesign) { d.most, d.lowers = 2, 1 }))
	v("D the same, cancelled by UPDATE", "", with("after the lock", func(d *dDesign) { d.cancels = 1 }))
	v("D the same, steps carried on under the limit", "", with("after the lock", carry("obeys")))
	v("D the same, two limits", "", with("after the lock", carry("obeys"), func(d *dDesign) { d.twoLimits = true }))
	v("D mutant: counted in the statement that locks", exceeded, with("with the lock"))
	v("D mutant: REPEATABLE READ", exceeded, with("first statement"))
	v("D mutant: no lock", exceeded, with("no lock"))
	v("D mutant: a counter, and a late outcome counts down", exceeded, with("counter", func(d *dDesign) { d.lateToo = true }))
	v("D mutant: a counter, and a cancel by UPDATE", stuck, with("counter", func(d *dDesign) { d.cancels = 1 }))
	v("D mutant: carrying on ignores the limit", exceeded, with("after the lock", carry("ignores")))
	v("D mutant: carrying on counts before it locks", exceeded, with("after the lock", carry("counts first")))
	v("D mutant: carrying on locks in the other order", stuck, with("after the lock", carry("obeys"), func(d *dDesign) { d.twoLimits, d.crossed, d.kills, d.freezes = true, true, 0, 0 }))
	return all
}

func outcomes() (all []Variant) {
	with := func(store string, change ...func(*eDesign)) eDesign {
		d := eDesign{store: store, freezes: 1, kills: 1, losses: 1}
		for _, c := range change {
			c(&d)
		}
		return d
	}
	v := func(name, want string, d eDesign) { all = append(all, of[eState](name, want, d)) }
	const (
		again    = "begun again though its outcome was acknowledged"
		dropped  = "an acknowledged outcome was dropped"
		deniedIt = "a caller was refused whose outcome counts"
	)
	v("E outcome in the run's row", "", with("row"))
	v("E outcome in a table, the run's row locked first", "", with("table, locked"))
	v("E the same, with a cancel", "", with("row", func(d *eDesign) { d.cancels = 1 }))
	v("E mutant: a table, and no lock", again, with("table"))
	v("E mutant: a take-back does not look", again, with("row", func(d *eDesign) { d.blind = true }))
	v("E mutant: the holder's time limit does not look", dropped, with("row", func(d *eDesign) { d.limitWins = true }))
	v("E mutant: no token", "an outcome was stored under a lost lease", with("row", func(d *eDesign) { d.noToken = true }))
	v("E mutant: the caller's token is not kept", deniedIt, with("row", func(d *eDesign) { d.forgets = true }))
	return all
}

func breakers() (all []Variant) {
	v := func(name, want string, d fDesign) { all = append(all, of[fState](name, want, d)) }
	v("F breaker: outages, kill", "", fDesign{outages: 2, kills: 1})
	v("F breaker: a run that always says so", "", fDesign{bad: true, kills: 1})
	v("F mutant: who is given back keeps its place", stuck, fDesign{bad: true, outages: 1, sameFirst: true})
	v("F breaker: such a run and an outage; who is given back goes behind", "", fDesign{bad: true, outages: 1, kills: 1})
	v("F mutant: a probe is a flag", stuck, fDesign{outages: 1, kills: 1, flag: true})
	v("F mutant: one run opens it", "one run has opened the breaker for all", fDesign{bad: true, any: true})
	v("F mutant: attempts are charged", "an outage has used up attempts", fDesign{outages: 1, charged: true})
	return all
}

// deeper are the same protocols within wider bounds.
func deeper() (all []Variant) {
	a := func(name string, d aDesign) {
		d.care, d.processes = once, 2
		all = append(all, of[aState]("deep A "+name, "", d))
	}
	a("kill, freeze, lost answer, failures", aDesign{runs: 2, most: 2, slots: 2, failing: true, aBudget: aBudget{kills: 1, freezes: 1, losses: 1}})
	a("3 runs: kill, freeze, failures", aDesign{runs: 3, most: 2, slots: 3, failing: true, aBudget: aBudget{kills: 1, freezes: 1}})
	a("stop, kill, freeze, lost answer", aDesign{runs: 2, most: 2, slots: 2, aBudget: aBudget{stops: 1, kills: 1, freezes: 1, losses: 1}})
	a("3 attempts: 2 kills, 2 freezes, 2 lost answers", aDesign{runs: 1, most: 3, slots: 2, aBudget: aBudget{kills: 2, freezes: 2, losses: 2}})
	a("suspects: poison that waits, freeze", aDesign{runs: 3, most: 2, slots: 3, poisons: 1, long: true, slow: true, aBudget: aBudget{freezes: 1}})
	a("suspects: poison that waits, 4 attempts", aDesign{runs: 3, most: 4, slots: 3, poisons: 1, long: true, slow: true})
	b := func(name string, d bDesign) {
		d.mark, d.fence = "token", "first"
		all = append(all, of[bState]("deep B mark by token first: "+name, "", d))
	}
	b("2 runs, poison, kill, freeze, 2 lost answers", bDesign{most: 2, slots: 1, runs: 2, poison: true, kills: 1, freezes: 1, losses: 2})
	b("3 runs, poison, kill, freeze, lost answer", bDesign{most: 1, slots: 1, runs: 3, poison: true, kills: 1, freezes: 1, losses: 1})
	c := func(name string, d cDesign) { all = append(all, of[cState]("deep C "+name, "", d)) }
	c("in a row: kill, freeze, 2 lost answers, stop", cDesign{doubt: "release", slots: 1, kills: 1, freezes: 1, losses: 2, stops: 1})
	c("fork, 2 slots: kill, freeze, 2 lost answers", cDesign{doubt: "start", fork: true, slots: 2, kills: 1, freezes: 1, losses: 2})
	all = append(all, of[dState]("deep D two limits: 2 kills, 2 freezes", "", dDesign{count: "after the lock", carry: "obeys", twoLimits: true, most: 1, kills: 2, freezes: 2}))
	return all
}
