package main

import (
	"encoding/json"
	"fmt"
	"math/rand/v2"
	"time"

	"github.com/google/uuid"
)

// An order is a run to be enqueued.
type order struct {
	id          uuid.UUID
	name        string // of its case
	typ         string
	payload     json.RawMessage
	emit        int           // events that its success emits
	delay       time.Duration // until it is due
	due         time.Time     // zero: after the delay
	maxAttempts int
	key         string
	copies      int  // sessions that enqueue it at the same time
	rival       bool // one of the copies has another payload
	quiet       bool // clients may not choose it when they intervene, because an instance waits for it
	once        bool // not sent again if the answer is unknown, because retention may have removed it by then
}

// A kase is one part of the workload. verdict.sql has the allowed outcomes of its runs.
type kase struct {
	name  string
	share float64 // in percent
	draw  func(r *rand.Rand, o *order, w world) map[string]any
}

// A world is what cases need to know about their surroundings.
type world struct {
	receiver string // URL
}

var cases = []kase{
	{"effect", 57, func(r *rand.Rand, o *order, _ world) map[string]any {
		o.typ, o.emit = "chaos.effect", r.IntN(3)
		return map[string]any{"ms": 1 + r.IntN(50), "key": o.id.String(), "emit": o.emit}
	}},
	{"sleep", 15, func(r *rand.Rand, o *order, _ world) map[string]any {
		o.typ = "chaos.sleep"
		return map[string]any{"ms": 1000 + r.IntN(8000)}
	}},
	{"fail", 10, func(r *rand.Rand, o *order, _ world) map[string]any {
		o.typ = "chaos.fail"
		return map[string]any{"times": 1 + r.IntN(3), "ms": r.IntN(2) * r.IntN(6000)}
	}},
	{"permanent", 5, func(_ *rand.Rand, o *order, _ world) map[string]any {
		o.typ = "chaos.fail"
		return map[string]any{"times": 100, "permanent": true}
	}},
	{"external", 4, func(_ *rand.Rand, o *order, w world) map[string]any {
		o.typ = "chaos.external"
		return map[string]any{"url": w.receiver}
	}},
	{"deaf", 3, func(r *rand.Rand, o *order, _ world) map[string]any {
		o.typ = "chaos.ignorecancel"
		return map[string]any{"ms": 500 + r.IntN(4500)}
	}},
	{"overdue", 0.3, func(_ *rand.Rand, o *order, _ world) map[string]any {
		o.typ, o.maxAttempts = "chaos.ignorecancel", 2
		return map[string]any{"ms": int((runLimit + 2*time.Second).Milliseconds())}
	}},
	{"delayed", 2, func(r *rand.Rand, o *order, _ world) map[string]any {
		o.typ, o.delay = "chaos.effect", between(r, 5*time.Second, 40*time.Second)
		return map[string]any{"ms": 1, "key": o.id.String(), "emit": 0}
	}},
	{"panic", 2, func(_ *rand.Rand, o *order, _ world) map[string]any {
		o.typ, o.maxAttempts = "chaos.panic", 2
		return map[string]any{}
	}},
	{"badresult", 1.5, func(r *rand.Rand, o *order, _ world) map[string]any {
		o.typ = "chaos.result"
		kinds := []string{"nul", "surrogate", "big", "nan", "deep"}
		return map[string]any{"kind": kinds[r.IntN(len(kinds))]}
	}},
	{"exit", 0.05, func(_ *rand.Rand, o *order, _ world) map[string]any {
		o.typ, o.maxAttempts = "chaos.exit", 2
		return map[string]any{"code": pillCode}
	}},
	{"gopanic", 0.05, func(_ *rand.Rand, o *order, _ world) map[string]any {
		o.typ, o.maxAttempts = "chaos.gopanic", 2
		return map[string]any{}
	}},
}

// pill reports whether the run ends the process that executes it.
func (o order) pill() bool { return o.name == "exit" || o.name == "gopanic" }

// pillCode is the exit code of a process that was ended by a run.
const pillCode = 77

// draw draws the next run of the workload.
func draw(r *rand.Rand, w world, hold float64) order {
	total := 0.0
	for _, k := range cases {
		total += k.share
	}
	at := r.Float64() * total
	k := cases[0]
	for _, k = range cases {
		if at -= k.share; at < 0 {
			break
		}
	}
	return drawCase(r, k, w, hold)
}

func drawCase(r *rand.Rand, k kase, w world, hold float64) order {
	o := order{id: newID(r), name: k.name, maxAttempts: 5, copies: 1}
	payload := k.draw(r, &o, w)
	if o.maxAttempts == 5 && r.IntN(2) == 0 {
		o.maxAttempts = 3 // follow the policy
	}
	payload["text"] = fmt.Sprintf("%x \u00e4\u4e16\U0001f600", r.Uint64())
	payload["number"] = json.Number(fmt.Sprint(int64(1)<<53 + r.Int64N(1<<60)))
	o.delay = time.Duration(float64(o.delay) * hold)
	if r.IntN(20) == 0 {
		o.key, o.copies, o.rival = o.id.String(), 2+r.IntN(3), r.IntN(5) == 0
	}
	var err error
	if o.payload, err = json.Marshal(payload); err != nil {
		panic(err) // numbers and strings
	}
	return o
}

func findCase(name string) kase {
	for _, k := range cases {
		if k.name == name {
			return k
		}
	}
	panic("no case " + name)
}

// newID draws a random UUID (version 4) from r, so that a seed determines it.
func newID(r *rand.Rand) (id uuid.UUID) {
	for i := range 16 {
		id[i] = byte(r.UintN(256))
	}
	id[6], id[8] = id[6]&0x0f|0x40, id[8]&0x3f|0x80
	return id
}
