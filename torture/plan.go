package main

import (
	"cmp"
	"fmt"
	"math/rand/v2"
	"slices"
	"time"
)

// A plan is everything that a seed and a profile determine.
type plan struct {
	Seed    uint64
	Name    string
	Workers int
	Rate    float64 // runs enqueued per second
	Cancels float64 // per second
	Foreign float64 // transactions of other programs that enqueue, per second

	Instances float64 // process instances started per second
	Favoured  string  // the process that half of them execute; a name that is not a process: none is favoured
	Halts     float64 // instances cancelled per second
	Pauses    float64 // instances paused for a while, per second

	Keep time.Duration // retention: what has ended is removed at this age or somewhat later; one pause of an instance in four lasts longer

	Warm, Chaos, Calm time.Duration // three phases under load; faults strike in Chaos only
	Operator          time.Duration // between two interventions of an operator
	Drain             time.Duration // the most time after these phases for everything to end

	// Hold scales how long faults last; it is 1 in the long profile.
	Hold    float64
	Strikes []strike // in order of time

	// After the chaos, strikes come one at a time in calm conditions, to measure the figures.
	Singles []strike
	Single  time.Duration // for all of them

	Narrowed bool   // restricted to some faults
	Pills    int    // poison pills, which are runs that end their process, in addition to those of the workload
	Gentle   bool   // the workload has no poison pills
	Mostly   string // the case (cases.go) of half of the plain runs; empty: no case is preferred
}

// A strike is one fault at its time.
type strike struct {
	At    time.Duration // from the start of the chaos, or of the singles
	Fault string
	Seed  uint64 // determines the rest: whom it hits, and for how long
}

// Timing of the workers under torture, short so that leases are lost often.
const (
	leaseLength = 3 * time.Second
	heartbeat   = time.Second
	runLimit    = 10 * time.Second
	grace       = 300 * time.Millisecond
)

// slots is how many handlers a worker runs at once. They are so few that workers lease ahead of them when many runs are
// due at once, and so many that runs that sleep do not take them all.
const slots = 48

func longPlan(seed uint64) *plan {
	p := &plan{
		// The load leaves two processors some capacity to spare. Otherwise a queue would build up without any fault, and
		// the figures would not measure recovery.
		Seed: seed, Name: "long", Workers: 4, Rate: 57, Cancels: 3, Foreign: 5, Instances: 2, Halts: 0.2, Pauses: 0.2,
		Warm: 30 * time.Second, Chaos: 480 * time.Second, Calm: 20 * time.Second,
		Operator: 20 * time.Second, Drain: 2 * time.Minute, Hold: 1, Keep: time.Minute,
	}
	p.schedule(func(f fault) int { return f.long })
	p.oneByOne(6*time.Second, "kill", "stop", "kill", "stop", "kill", "kill", "stop", "kill", "kill", "stop", "kill", "kill",
		"server-kill", "server-kill", "server-kill")
	return p
}

func shortPlan(seed uint64) *plan {
	p := &plan{
		Seed: seed, Name: "short", Workers: 4, Rate: 40, Cancels: 3, Foreign: 4, Instances: 2, Halts: 0.4, Pauses: 0.4,
		Warm: 4 * time.Second, Chaos: 34 * time.Second, Calm: 2 * time.Second,
		Operator: 4 * time.Second, Drain: time.Minute, Hold: 0.4, Pills: 2, Keep: 4 * time.Second,
	}
	p.schedule(func(f fault) int { return f.short })
	p.oneByOne(3*leaseLength, "freeze") // among other faults it sometimes hits a worker that has nothing to do
	return p
}

// schedule gives each fault its number of strikes, at independent and uniformly distributed times. These times are
// distributed like those of a Poisson process with the same number of events, but each fault occurs as often as planned.
func (p *plan) schedule(count func(fault) int) {
	r := p.random("schedule")
	for _, f := range faults {
		for range count(f) {
			p.Strikes = append(p.Strikes, strike{
				At:    time.Duration(r.Float64() * float64(p.Chaos)),
				Fault: f.key, Seed: r.Uint64(),
			})
		}
	}
	slices.SortFunc(p.Strikes, func(a, b strike) int { return cmp.Compare(a.At, b.At) })
}

// oneByOne plans the singles.
func (p *plan) oneByOne(every time.Duration, faults ...string) {
	r := p.random("singles")
	for i, key := range faults {
		p.Singles = append(p.Singles, strike{At: time.Duration(i) * every, Fault: key, Seed: r.Uint64()})
	}
	p.Single = time.Duration(len(faults)) * every
}

// random returns a separate source for each use, so that one use does not affect another.
func (p *plan) random(use string) *rand.Rand {
	h := uint64(14695981039346656037)
	for _, b := range []byte(use) {
		h = (h ^ uint64(b)) * 1099511628211
	}
	return rand.New(rand.NewPCG(p.Seed, h))
}

// between draws a duration.
func between(r *rand.Rand, low, high time.Duration) time.Duration {
	return low + time.Duration(r.Int64N(int64(high-low)+1))
}

// hold draws how long a fault lasts.
func (p *plan) hold(r *rand.Rand, low, high time.Duration) time.Duration {
	return time.Duration(float64(between(r, low, high)) * p.Hold)
}

// narrow leaves only strikes of the named faults, or only the singles.
func (p *plan) narrow(keys []string) error {
	if slices.Equal(keys, []string{"singles"}) {
		p.Narrowed, p.Strikes, p.Chaos = true, nil, time.Second
		return nil
	}
	for _, key := range keys {
		if !slices.ContainsFunc(faults, func(f fault) bool { return f.key == key }) {
			return fmt.Errorf("there is no fault %q", key)
		}
	}
	p.Narrowed, p.Singles, p.Single = true, nil, 0
	p.Strikes = slices.DeleteFunc(p.Strikes, func(s strike) bool { return !slices.Contains(keys, s.Fault) })
	return nil
}

// demands reports whether a run by this plan must have seen something. With few faults, not everything has to happen.
func (p *plan) demands(what string) bool {
	switch {
	case p.Narrowed || p.Name == "mutant":
		return false
	case p.Name == "failover":
		return slices.Contains([]string{"server restarted", "commit of a settle unknown, and done", "stale settle refused"}, what)
	case p.Name == "short" && slices.Contains(seldom, what):
		return false
	case what == "worker ended because its memory was gone":
		return p.count("memory") > 0
	case what == "lease ahead taken back that had not begun":
		return p.count("kill-ahead") > 0
	case what == "run that cannot be leased was set aside":
		return p.count("unleasable") > 0
	case what == "event that cannot be marked was parked":
		return p.count("unmarkable") > 0
	}
	return true
}

// seldom is what happens only a few times per minute, and so may not happen at all. The long run must have seen it.
var seldom = []string{
	"enqueue unknown, and done", "event came twice", "event was refused, and came later", "incident tried again",
	"instance cancelled while a step was at work", "instance paused for longer than retention keeps what is over", "join fired after a branch's worker was killed", "loop re-entered a fork",
	"task completed too late", "undo of a step that nobody knows to have been done", "worker handed its runs back",
}
