package main

import "time"

// sizes say how much is measured. RESULTS.md is made with fullSize.
type sizes struct {
	reps           int // repetitions of a measurement, unless set below
	crowdReps      int
	rivalCrowdReps int
	mixedReps      int

	wal    int           // gigabytes written before the first measurement
	calm   int           // quarters of a second to wait for a quiet machine
	warmUp time.Duration // before idle pick-up

	bulk   int // runs enqueued in bulk
	single int // runs enqueued one by one
	drain  int // runs drained
	start  int // the same by rivals with the settings of their start pages

	pickUps    int // per engine and repetition
	rarePickUp int // the same where only polling finds them
	idle       time.Duration

	crowd  int // runs drained among extra others
	extra  int
	leased int // number of leased others, in place of extra

	toil   time.Duration // how long the handlers of a backlog take at least
	urgent time.Duration // how long urgent runs are stored beside long ones

	held      time.Duration // the old snapshot, for our engine
	heldRival time.Duration
	edge      time.Duration // the first and the last period of this length are compared
	lates     []time.Duration

	leases int           // held at the same time by sleeping handlers
	beats  time.Duration // how long they are watched

	crash int // runs that are drained by a worker that is killed, and by another one

	instances int           // of each process that is executed
	workflows int           // of DBOS
	even      time.Duration // at a fixed rate of steps
	alone     int           // instances, one after the other
	branches  int           // of one fork
	elements  int           // of one each
	waiting   int           // waiting instances

	backlogs     [3]int // events
	smallRounds  int    // how often the smallest backlog is emptied
	bigReps      int    // repetitions of the largest backlog
	poisoned     int    // events of one aggregate at the front
	forwardedFew int    // of watermill, besides the middle backlog
	rareEvents   int    // one after another
	busyEvents   time.Duration

	soak, warm, peak time.Duration
}

var fullSize = sizes{
	reps: 3, crowdReps: 5, rivalCrowdReps: 3, mixedReps: 5,
	wal: 7, calm: 8, warmUp: 2 * time.Second,
	bulk: 100_000, single: 16_000, drain: 100_000, start: 2_000,
	pickUps: 100, rarePickUp: 40, idle: 10 * time.Second,
	crowd: 60_000, extra: 1_000_000, leased: 100_000,
	toil: 5 * time.Second, urgent: 10 * time.Second,
	held: 120 * time.Second, heldRival: 60 * time.Second, edge: 10 * time.Second,
	lates:  []time.Duration{2 * time.Second, 10 * time.Second, 30 * time.Second, 60 * time.Second},
	leases: 10_000, beats: 30 * time.Second,
	crash:     20_000,
	instances: 20_000, workflows: 4_000, even: 20 * time.Second, alone: 30, branches: 1_000, elements: 10_000, waiting: 1_000_000,
	backlogs: [3]int{1_000, 100_000, 1_000_000}, smallRounds: 6, bigReps: 1, poisoned: 5_000, forwardedFew: 10_000,
	rareEvents: 100, busyEvents: 5 * time.Second,
	soak: 30 * time.Minute, warm: 5 * time.Minute, peak: 20 * time.Second,
}

var smokeSize = sizes{
	reps: 1, crowdReps: 1, rivalCrowdReps: 1, mixedReps: 1,
	warmUp: 500 * time.Millisecond,
	bulk:   4_000, single: 400, drain: 4_000, start: 200,
	pickUps: 8, rarePickUp: 2, idle: time.Second,
	crowd: 2_000, extra: 5_000, leased: 1_000,
	toil: 500 * time.Millisecond, urgent: time.Second,
	held: 4 * time.Second, heldRival: 2 * time.Second, edge: time.Second,
	lates:  []time.Duration{time.Second, 2 * time.Second},
	leases: 500, beats: 3 * time.Second,
	crash:     4_000,
	instances: 200, workflows: 50, even: 2 * time.Second, alone: 5, branches: 50, elements: 200, waiting: 1_000,
	backlogs: [3]int{100, 2_000, 5_000}, smallRounds: 2, bigReps: 1, poisoned: 500, forwardedFew: 500,
	rareEvents: 8, busyEvents: time.Second,
	soak: 6 * time.Second, warm: time.Second, peak: 2 * time.Second,
}
