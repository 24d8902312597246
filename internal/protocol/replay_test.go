package protocol

import (
	"maps"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/uuid"
)

// A script writes the history of one run.
type script struct {
	id     uuid.UUID
	now    Traced
	at     time.Time
	events []Event

	keeping Event // the event of what is kept
}

func scripted(r *rand.Rand, most int) *script {
	h := &script{at: time.Date(2026, 1, 1, 12, 0, 0, 0, time.UTC)}
	for i := range h.id {
		h.id[i] = byte(r.Uint32())
	}
	return h.do("enqueue", func(t *Traced) { t.Status, t.Most = "pending", most })
}

// do appends an event 100 ms after the previous one.
func (h *script) do(op string, change func(*Traced)) *script {
	was := h.now
	change(&h.now)
	h.at = h.at.Add(100 * time.Millisecond)
	h.events = append(h.events, Event{Seq: int64(len(h.events) + 1), At: h.at, Run: h.id, Op: op, Was: was, Became: h.now,
		Over: !was.LeaseUntil.IsZero() && was.LeaseUntil.Before(h.at)})
	return h
}

func (h *script) wait(d time.Duration) *script { h.at = h.at.Add(d); return h }

// token returns the token of a lease.
func (h *script) token(no int64) (token uuid.UUID) {
	token = h.id
	token[0], token[1] = byte(no), byte(no>>8)
	token[6] = token[6]&0x0f | 0x40 // no lease ahead
	return token
}

func (h *script) lease(worker string) *script {
	return h.do("lease", func(t *Traced) { h.leased(t, worker, t.Attempt >= t.Most) })
}

// leaseAhead is a lease ahead of the handler.
func (h *script) leaseAhead(worker string) *script {
	return h.do("lease", func(t *Traced) {
		h.leased(t, worker, false)
		t.Token[6] = t.Token[6]&0x0f | aheadVersion<<4
	})
}

// begin notes that the handler may begin, as in the trace: without the run.
func (h *script) begin() *script {
	h.keeping = Event{Kept: h.now.Token}
	return h.kept("begin")
}

// takeBackUnbegun takes back a lease ahead that has expired before its handler could begin.
func (h *script) takeBackUnbegun() *script {
	return h.wait(4*time.Second).do("take back", func(t *Traced) { t.Attempt--; free(t, "pending") })
}

// leased makes the row leased for three seconds.
func (h *script) leased(t *Traced, worker string, uncharged bool) {
	t.Status, t.LeasedBy, t.LeaseUntil, t.Uncharged = "leased", worker, h.at.Add(3*time.Second), uncharged
	t.LeaseNo++
	t.Token = h.token(t.LeaseNo)
	if !uncharged {
		t.Attempt++
	}
}

// free removes the lease from the row.
func free(t *Traced, status string) {
	t.Status, t.LeasedBy, t.LeaseUntil, t.Token, t.Uncharged = status, "", time.Time{}, uuid.Nil, false
}

func (h *script) extend() *script {
	return h.do("extend", func(t *Traced) { t.LeaseUntil = h.at.Add(3 * time.Second) })
}

func (h *script) settle(status string) *script { return h.settleAs(status, 0) }

// settleAs also changes the attempt.
func (h *script) settleAs(status string, attempts int) *script {
	return h.do("settle", func(t *Traced) {
		t.Settled, t.SettledBy = t.Token, t.LeasedBy
		t.Attempt += attempts
		t.Suspect = t.Suspect && attempts < 0
		free(t, status)
	})
}

// takeBack takes back a lease that has expired.
func (h *script) takeBack() *script {
	return h.wait(4*time.Second).do("take back", func(t *Traced) {
		t.Suspect = true
		if t.Attempt >= t.Most {
			h.leased(t, "taker", true)
			return
		}
		free(t, "pending")
	})
}

func (h *script) giveBack() *script {
	return h.do("give back", func(t *Traced) {
		if t.Uncharged {
			t.LeaseUntil = h.at
			return
		}
		t.Attempt--
		free(t, "pending")
	})
}

func (h *script) cancel() *script {
	return h.do("cancel", func(t *Traced) { t.Suspect = false; free(t, "cancelled") })
}

func (h *script) fail() *script {
	return h.do("settle", func(t *Traced) {
		t.Settled, t.SettledBy, t.Suspect = t.Token, t.LeasedBy, false
		free(t, "failed")
	})
}

func (h *script) retry() *script {
	return h.do("retry", func(t *Traced) { t.Status, t.Suspect, t.Most = "pending", false, max(t.Most, t.Attempt+1) })
}

// keep makes the holder of the lease keep its outcome, under the token of this lease.
func (h *script) keep(keeps string) *script { return h.keepUnder(h.now.LeaseNo, h.now.LeasedBy, keeps) }

func (h *script) keepUnder(lease int64, worker, keeps string) *script {
	h.keeping = Event{Op: "keep", Kept: h.token(lease), Keeps: keeps, Worker: worker}
	return h.kept("keep")
}

// kept appends an event about what is kept, as in the trace: without the run.
func (h *script) kept(op string) *script {
	h.at = h.at.Add(100 * time.Millisecond)
	e := h.keeping
	e.Seq, e.At, e.Run, e.Op = int64(len(h.events)+1), h.at, h.id, op
	h.events = append(h.events, e)
	return h
}

func (h *script) settleBy(worker, status string) *script {
	return h.do("settle", func(t *Traced) {
		t.Settled, t.SettledBy, t.Suspect = t.Token, worker, false
		free(t, status)
	})
}

func (h *script) release() *script {
	return h.do("release", func(t *Traced) { free(t, "pending") })
}

// delete deletes by hand a run that is not leased, or undeletes it.
func (h *script) delete() *script {
	return h.do("edit", func(t *Traced) { t.Hidden, t.Deleted = !t.Hidden, !t.Deleted })
}

func (h *script) hold() *script { return h.do("edit", func(t *Traced) { t.Hidden = !t.Hidden }) }

// right are histories that the model allows, including steps that are not visible.
var right = map[string]func(*script) *script{
	"success":      func(h *script) *script { return h.lease("a").extend().settle("succeeded") },
	"late success": func(h *script) *script { return h.lease("a").wait(9 * time.Second).settle("succeeded") },
	"failures": func(h *script) *script {
		return h.lease("a").settle("pending").lease("b").settle("pending").lease("a").settle("failed")
	},
	"failed for good": func(h *script) *script { return h.lease("a").settle("failed") },
	"put off, and handed back": func(h *script) *script {
		return h.lease("a").settleAs("pending", -1).lease("a").settleAs("pending", -1).lease("a").settle("succeeded")
	},
	"killed twice, and exhausted": func(h *script) *script {
		return h.lease("a").takeBack().lease("b").takeBack().lease("c").takeBack().fail()
	},
	"the taker is killed, too": func(h *script) *script {
		return h.lease("a").takeBack().lease("b").takeBack().lease("c").takeBack().takeBack().fail()
	},
	"the answer to a take-back lost": func(h *script) *script {
		return h.lease("a").takeBack().lease("b").takeBack().lease("c").takeBack().giveBack().takeBack().fail()
	},
	"frozen, taken back, leased again": func(h *script) *script { return h.lease("a").takeBack().lease("a").extend().settle("succeeded") },
	"answer lost": func(h *script) *script {
		return h.lease("a").giveBack().lease("a").giveBack().lease("b").settle("succeeded")
	},
	"its last attempt given back": func(h *script) *script {
		return h.lease("a").takeBack().lease("b").takeBack().lease("c").spare().lease("d").takeBack().fail()
	},
	"cancelled":             func(h *script) *script { return h.lease("a").cancel() },
	"failed, retried, done": func(h *script) *script { return h.lease("a").fail().retry().lease("b").settle("succeeded") },
	"held, resumed":         func(h *script) *script { return h.hold().hold().lease("b").settle("succeeded") },
	"held while it runs, failed, retried, resumed": func(h *script) *script {
		return h.lease("b").hold().fail().retry().hold().lease("a").settle("succeeded")
	},
	"deleted, restored":  func(h *script) *script { return h.delete().delete().lease("b").settle("succeeded") },
	"held while it runs": func(h *script) *script { return h.lease("b").hold().settle("succeeded") },
	"taken away by a person": func(h *script) *script {
		return h.lease("a").do("release", func(t *Traced) { free(t, "pending") }).lease("b").settle("succeeded")
	},
	"taken away at the last attempt": func(h *script) *script {
		h.lease("a").settle("pending").lease("a").settle("pending").lease("a").do("release", func(t *Traced) { free(t, "pending") })
		return h.lease("b").fail()
	},
	"deleted while it runs": func(h *script) *script {
		return h.lease("a").do("delete", func(t *Traced) { t.Hidden, t.Deleted = true, true; free(t, "cancelled") })
	},
	"kept, settled by another": func(h *script) *script {
		return h.lease("a").extend().keep("succeeded").wait(9*time.Second).settleBy("b", "succeeded").kept("over")
	},
	"kept, settled by who kept it": func(h *script) *script { return h.lease("a").keep("failed").settle("failed").kept("over") },
	"kept after its lease has expired": func(h *script) *script {
		return h.lease("a").wait(9*time.Second).keep("retried").settleBy("b", "pending").kept("over").lease("c").settle("succeeded")
	},
	"kept, the answer lost": func(h *script) *script {
		return h.lease("a").keep("succeeded").extend().settle("succeeded").kept("over")
	},
	"kept, settled as before by who has lost the answer, leased again": func(h *script) *script {
		return h.lease("a").keep("retried").settle("pending").lease("b").kept("over").settle("succeeded")
	},
	"kept, its effects lost": func(h *script) *script {
		return h.lease("a").keep("effects").wait(9 * time.Second).kept("over").takeBack().lease("b").settle("succeeded")
	},
	"kept, cancelled": func(h *script) *script { return h.lease("a").keep("succeeded").cancel().kept("over") },
	"kept, deleted": func(h *script) *script {
		return h.lease("a").keep("succeeded").do("delete", func(t *Traced) { t.Hidden, t.Deleted = true, true; free(t, "cancelled") }).kept("over")
	},
	"kept, failed by a person": func(h *script) *script {
		return h.lease("a").keep("effects").kept("fail").settleBy("b", "failed").kept("over").retry().lease("b").settle("succeeded")
	},
	"kept at a stop": func(h *script) *script {
		h.lease("a").keep("released")
		return h.do("settle", func(t *Traced) {
			t.Settled, t.SettledBy = t.Token, "b"
			t.Attempt--
			free(t, "pending")
		}).kept("over").lease("b").settle("succeeded")
	},
	"kept, of an exhausted run": func(h *script) *script {
		return h.lease("a").takeBack().lease("b").takeBack().lease("c").takeBack().keep("failed").wait(9*time.Second).settleBy("b", "failed").kept("over")
	},
	"kept twice": func(h *script) *script {
		return h.lease("a").keep("retried").settle("pending").lease("a").keep("succeeded").settleBy("b", "succeeded").kept("over")
	},
	"removed before it is forgotten": func(h *script) *script {
		return h.lease("a").keep("succeeded").settle("succeeded").do("remove", func(t *Traced) { *t = Traced{} }).kept("over")
	},
	"removed": func(h *script) *script {
		return h.lease("a").settle("succeeded").do("remove", func(t *Traced) { *t = Traced{} })
	},
	"leased ahead": func(h *script) *script {
		h.leaseAhead("a").extend().takeBackUnbegun()
		h.leaseAhead("b").begin().extend().takeBack()
		return h.lease("b").settle("succeeded")
	},
	"leased ahead, at its last attempt": func(h *script) *script {
		h.lease("a").takeBack().lease("a").takeBack()
		return h.leaseAhead("a").takeBackUnbegun().leaseAhead("a").begin().takeBack().fail()
	},
	"edited": func(h *script) *script {
		return h.do("edit", func(t *Traced) { t.Most = 9 }).do("edit", func(t *Traced) { h.leased(t, "by hand", false) }).takeBack()
	},
}

// beside sets whether the database knows of another suspect beside it.
func (h *script) beside(company bool) *script {
	h.now.Company = &company
	return h
}

func (h *script) spare() *script {
	return h.wait(4*time.Second).do("take back", func(t *Traced) { t.Attempt--; free(t, "pending") })
}

// The replay accepts everything that can happen, in any mixture of runs.
func TestRightHistories(t *testing.T) {
	r := rand.New(rand.NewPCG(1, 1))
	var all Replay
	for name, tell := range right {
		h := tell(scripted(r, 3))
		var alone Replay
		for _, e := range h.events {
			alone.Add(e)
			all.Add(e)
		}
		for _, w := range alone.Verdicts().Wrong {
			t.Errorf("%s: %s", name, w)
		}
	}
	if v := all.Verdicts(); v.Runs != len(right) || len(v.Wrong) > 0 {
		t.Errorf("all of them together: %+v", v)
	}
}

// wrong are histories that the model must refuse at their last event, and the change to the model that makes each
// pass; nil means that no guard of the model refuses it.
var wrong = []struct {
	name   string
	tell   func(*script) *script
	passes func(*aDesign)
}{
	{"lease: of a cancelled run", func(h *script) *script { return h.cancel().lease("a") }, func(d *aDesign) { d.LeasesAny = true }},
	{"lease: of one that is held", func(h *script) *script { return h.hold().lease("a") }, func(d *aDesign) { d.LeasesHidden = true }},
	{"lease: not charged", func(h *script) *script {
		return h.do("lease", func(t *Traced) { h.leased(t, "a", false); t.Attempt-- })
	}, func(d *aDesign) { d.LeasesFree = true }},
	{"lease: charged beyond max_attempts", func(h *script) *script {
		h.lease("a").settle("pending").lease("a").settle("pending").lease("a").do("release", func(t *Traced) { free(t, "pending") })
		return h.do("lease", func(t *Traced) { h.leased(t, "a", false) })
	}, func(d *aDesign) { d.LeasesMore = true }},
	{"lease: of a run that another holds", func(h *script) *script { return h.lease("a").lease("b") }, func(d *aDesign) { d.LeasesAny = true }},
	{"lease: with the token of the one before", func(h *script) *script {
		return h.lease("a").giveBack().do("lease", func(t *Traced) { h.leased(t, "a", false); t.Token = h.token(1) })
	}, nil},
	{"lease: with a number left out", func(h *script) *script {
		return h.do("lease", func(t *Traced) { t.LeaseNo++; h.leased(t, "a", false) })
	}, nil},
	{"extend: after it was taken back", func(h *script) *script { return h.lease("a").extend().takeBack().extend() }, func(d *aDesign) { d.ExtendsAny = true }},
	{"settle: by a lease that was lost to another", func(h *script) *script {
		return h.lease("a").takeBack().lease("b").do("settle", func(t *Traced) {
			t.Settled, t.SettledBy, t.Suspect = h.token(1), "a", false
			free(t, "succeeded")
		})
	}, func(d *aDesign) { d.NoFence = true }},
	{"settle: by somebody who never had a lease", func(h *script) *script {
		return h.lease("a").do("settle", func(t *Traced) { t.Settled, t.SettledBy = t.Token, "b"; free(t, "succeeded") })
	}, nil},
	{"settle: what an older lease has left over", func(h *script) *script {
		return h.lease("a").keep("retried").settle("pending").lease("a").settleBy("b", "pending")
	}, func(d *aDesign) { d.SettlesOlder = true }},
	{"settle: by another, after what was kept is over", func(h *script) *script {
		return h.lease("a").keep("effects").kept("over").settleBy("b", "succeeded")
	}, nil},
	{"settle: another outcome than the one that is kept", func(h *script) *script { return h.lease("a").keep("failed").settleBy("b", "succeeded") }, func(d *aDesign) { d.SettlesOther = true }},
	{"settle: what a person has failed, as its handler wanted", func(h *script) *script {
		return h.lease("a").keep("succeeded").kept("fail").settleBy("b", "succeeded")
	}, func(d *aDesign) { d.SettlesOther = true }},
	{"settle: a failure in place of the success that is kept", func(h *script) *script { return h.lease("a").keep("succeeded").settleBy("b", "failed") }, func(d *aDesign) { d.SettlesOther = true }},
	{"settle: an outcome whose effects are lost", func(h *script) *script { return h.lease("a").keep("effects").settleBy("b", "succeeded") }, func(d *aDesign) { d.SettlesOther = true }},
	{"keep: of a lease that was lost", func(h *script) *script { return h.lease("a").takeBack().keepUnder(1, "a", "succeeded") }, func(d *aDesign) { d.KeepsAny = true }},
	{"keep: by somebody who never had a lease", func(h *script) *script { return h.lease("a").keepUnder(1, "b", "succeeded") }, nil},
	{"keep: under a token that it never had", func(h *script) *script { return h.lease("a").keepUnder(7, "a", "succeeded") }, nil},
	{"keep: of a run that was cancelled", func(h *script) *script { return h.lease("a").cancel().keepUnder(1, "a", "succeeded") }, func(d *aDesign) { d.KeepsAny = true }},
	{"fail: of one that is settled", func(h *script) *script { return h.lease("a").keep("succeeded").settle("succeeded").kept("fail") }, nil},
	{"over: before it is settled", func(h *script) *script { return h.lease("a").keep("succeeded").kept("over") }, func(d *aDesign) { d.ForgetsKept = true }},
	{"over: twice", func(h *script) *script { return h.lease("a").keep("effects").kept("over").kept("over") }, nil},
	{"take back: of a lease whose outcome is kept", func(h *script) *script { return h.lease("a").keep("succeeded").takeBack() }, func(d *aDesign) { d.TakesKept = true }},
	{"take back: of a lease whose outcome is kept, though its effects are lost", func(h *script) *script { return h.lease("a").keep("effects").takeBack() }, func(d *aDesign) { d.TakesKept = true }},
	{"release: of a lease whose outcome is kept", func(h *script) *script { return h.lease("a").keep("succeeded").release() }, func(d *aDesign) { d.ReleasesKept = true }},
	{"settle: of a run that was cancelled", func(h *script) *script {
		return h.lease("a").cancel().do("settle", func(t *Traced) { t.Settled, t.SettledBy, t.Status = h.token(1), "a", "succeeded" })
	}, func(d *aDesign) { d.CancelKeepsToken = true }},
	{"settle: a failure that is not charged", func(h *script) *script { return h.lease("a").settleAs("failed", -1) }, func(d *aDesign) { d.PaysBack = true }},
	{"settle: tried again after the last attempt", func(h *script) *script {
		return h.lease("a").settle("pending").lease("a").settle("pending").lease("a").settle("pending")
	}, func(d *aDesign) { d.retriesTheLast = true }},
	{"settle: the handler of an exhausted run", func(h *script) *script {
		return h.lease("a").takeBack().lease("b").takeBack().lease("c").takeBack().settle("succeeded")
	}, nil},
	{"take back: of a lease that has not expired", func(h *script) *script {
		return h.lease("a").do("take back", func(t *Traced) { t.Suspect = true; free(t, "pending") })
	}, func(d *aDesign) { d.TakesLiving = true }},
	{"take back: not charged", func(h *script) *script {
		return h.lease("a").wait(4*time.Second).do("take back", func(t *Traced) { t.Suspect = true; t.Attempt--; free(t, "pending") })
	}, func(d *aDesign) { d.FreeCrash = true }},
	{"take back: no suspect", func(h *script) *script {
		return h.lease("a").wait(4*time.Second).do("take back", func(t *Traced) { free(t, "pending") })
	}, func(d *aDesign) { d.ForgetsCrash = true }},
	{"take back: an exhausted run is due again", func(h *script) *script {
		return h.lease("a").takeBack().lease("a").takeBack().lease("a").wait(4*time.Second).do("take back", func(t *Traced) { free(t, "pending") })
	}, func(d *aDesign) { d.TakesForever = true }},
	{"take back: the last attempt given back twice", func(h *script) *script {
		return h.lease("a").takeBack().lease("a").takeBack().lease("a").spare().lease("a").spare()
	}, func(d *aDesign) { d.SparesAgain = true }},
	{"take back: the last attempt of one that was no suspect given back", func(h *script) *script {
		return h.lease("a").settle("pending").lease("a").settle("pending").lease("a").wait(4*time.Second).do("take back", func(t *Traced) { t.Suspect = true; t.Attempt--; free(t, "pending") })
	}, func(d *aDesign) { d.FreeCrash = true }},
	{"take back: charged at the last attempt, although it was not alone", func(h *script) *script {
		return h.lease("a").takeBack().lease("a").takeBack().lease("a").beside(true).takeBack()
	}, func(d *aDesign) { d.chargedInCompany = true }},
	{"take back: given back, although it was alone", func(h *script) *script {
		return h.lease("a").takeBack().lease("a").takeBack().lease("a").beside(false).spare()
	}, func(d *aDesign) { d.company = nil }},
	{"give back: after the handler was started", func(h *script) *script { return h.lease("a").extend().giveBack() }, func(d *aDesign) { d.doubtsAny = true }},
	{"give back: an exhausted run is due again", func(h *script) *script {
		return h.lease("a").takeBack().lease("b").takeBack().lease("c").takeBack().do("give back", func(t *Traced) { t.Attempt--; free(t, "pending") })
	}, nil},
	{"release: of a run that has succeeded", func(h *script) *script {
		return h.lease("a").settle("succeeded").do("release", func(t *Traced) { free(t, "pending") })
	}, func(d *aDesign) { d.ReleasesAny = true }},
	{"cancel: of a run that has succeeded", func(h *script) *script { return h.lease("a").settle("succeeded").cancel() }, func(d *aDesign) { d.CancelsAny = true }},
	{"retry: of a run that was cancelled", func(h *script) *script { return h.cancel().retry() }, func(d *aDesign) { d.RetriesAny = true }},
	{"retry: the charged starts are forgotten", func(h *script) *script {
		return h.lease("a").fail().do("retry", func(t *Traced) { t.Status, t.Attempt = "pending", 0 })
	}, func(d *aDesign) { d.RetriesFree = true }},
	{"retry: of a run that is deleted", func(h *script) *script { return h.lease("a").fail().delete().retry() }, func(d *aDesign) { d.RetriesDeleted = true }},
	{"delete: what is leased stays leased", func(h *script) *script {
		return h.lease("a").do("delete", func(t *Traced) { t.Hidden, t.Deleted = true, true })
	}, func(d *aDesign) { d.DeleteLeaves = true }},
	{"remove: of a run that is leased", func(h *script) *script { return h.lease("a").do("remove", func(t *Traced) { *t = Traced{} }) }, func(d *aDesign) { d.RemovesLeased = true }},
	{"edit: a run that has succeeded is pending", func(h *script) *script {
		return h.lease("a").settle("succeeded").do("edit", func(t *Traced) { free(t, "pending") })
	}, func(d *aDesign) { d.ReleasesAny = true }},
	{"changed where the trace does not look", func(h *script) *script {
		h.lease("a")
		h.now.Attempt = 2
		return h.extend()
	}, nil},
	{"take back: of a lease ahead that was not begun, charged", func(h *script) *script { return h.leaseAhead("a").takeBack() }, nil},
	{"take back: of a lease ahead that was begun, not charged", func(h *script) *script { return h.leaseAhead("a").begin().takeBackUnbegun() }, nil},
	{"take back: of a lease ahead that lasts", func(h *script) *script {
		return h.leaseAhead("a").do("take back", func(t *Traced) { t.Attempt--; free(t, "pending") })
	}, nil},
	{"take back: of a lease to begin at once, not charged", func(h *script) *script { return h.lease("a").takeBackUnbegun() }, nil},
}

// The replay refuses wrong histories at the event that is wrong. Without the named guard it accepts them, so the
// guard of the model refuses them: the replay has no second copy of it.
func TestWrongHistories(t *testing.T) {
	kinds := map[string]bool{}
	for _, w := range wrong {
		h := w.tell(scripted(rand.New(rand.NewPCG(1, 2)), 3))
		kind, _, _ := strings.Cut(w.name, ":")
		kinds[kind] = true
		var r Replay
		for _, e := range h.events {
			r.Add(e)
		}
		switch got := r.Verdicts().Wrong; {
		case len(got) == 0:
			t.Errorf("%s: not refused", w.name)
		case len(got[0].Events) != len(h.events):
			t.Errorf("%s: refused at event %d of %d: %s", w.name, len(got[0].Events), len(h.events), got[0])
		}
		if w.passes == nil {
			continue
		}
		without := Replay{broken: w.passes}
		for _, e := range h.events {
			without.Add(e)
		}
		if got := without.Verdicts().Wrong; len(got) > 0 {
			t.Errorf("%s: refused although its guard is gone: %s", w.name, got[0])
		}
	}
	for _, kind := range []string{"lease", "extend", "settle", "keep", "fail", "over", "take back", "give back", "release", "cancel", "retry", "delete", "remove", "edit"} {
		if !kinds[kind] {
			t.Errorf("no wrong history of a %s", kind)
		}
	}
}

// The replay finds a worker that holds more leases than it has slots, and one that leases suspects beside a suspect
// at its last attempt. A lease that was given back or has expired takes no slot.
func TestIntervals(t *testing.T) {
	suspect := func(most int) func(*script) *script {
		return func(h *script) *script {
			h.now.Most = most
			h.events[0].Became.Most = most
			return h.lease("x").takeBack()
		}
	}
	kept := func(h *script) *script { return suspect(2)(h).lease("x").spare() }
	// Each of the two is described by what precedes its lease by a, and by how long it is held.
	for name, test := range map[string]struct {
		second func(*script) *script
		first  func(*script) *script
		after  time.Duration // between their leases
		slots  int
		wrong  int
		long   bool // they are held for three seconds
	}{
		"two with a slot each":                       {slots: 2, after: 200 * time.Millisecond},
		"two with one slot":                          {slots: 1, after: 200 * time.Millisecond, wrong: 1},
		"one after the other, with one slot":         {slots: 1, after: 2 * time.Second},
		"two suspects":                               {first: suspect(3), second: suspect(3), slots: 2, after: 200 * time.Millisecond},
		"one at its last attempt, with another":      {first: suspect(2), second: suspect(3), slots: 2, after: 200 * time.Millisecond, wrong: 1},
		"another, with one at its last attempt":      {first: suspect(3), second: suspect(2), slots: 2, after: 200 * time.Millisecond, wrong: 1},
		"one at its last attempt, no longer held":    {first: suspect(2), second: suspect(3), slots: 2, after: 1100 * time.Millisecond},
		"one that is kept alone, and another later":  {first: kept, second: suspect(3), slots: 2, after: 1600 * time.Millisecond, wrong: 1, long: true},
		"one at its last attempt, and another later": {first: suspect(2), second: suspect(3), slots: 2, after: 1600 * time.Millisecond, long: true},
		"one at its last attempt, with others":       {first: suspect(2), slots: 2, after: 200 * time.Millisecond},
	} {
		r := Replay{Most: test.slots, Watch: 1500 * time.Millisecond}
		random := rand.New(rand.NewPCG(7, 7))
		begin := time.Date(2026, 1, 1, 13, 0, 0, 0, time.UTC)
		for i, before := range []func(*script) *script{test.first, test.second} {
			h := scripted(random, 3)
			if before != nil {
				before(h)
			}
			h.at = begin.Add(time.Duration(i) * test.after)
			h.lease("a").wait(800 * time.Millisecond)
			if test.long {
				h.extend().wait(2 * time.Second)
			}
			h.settle("succeeded")
			for _, e := range h.events {
				r.Add(e)
			}
		}
		if got := r.Verdicts().Wrong; len(got) != test.wrong {
			t.Errorf("%s: %v, want %d", name, got, test.wrong)
		}
	}
}

// The replay finds nothing wrong in a hundred thousand right histories.
func TestManyRuns(t *testing.T) {
	const runs = 100_000
	r := rand.New(rand.NewPCG(3, 3))
	names := slices.Sorted(maps.Keys(right))
	replay := Replay{Most: 100, Watch: time.Millisecond}
	for i := range runs {
		for _, e := range right[names[i%len(names)]](scripted(r, 3)).events {
			e.At = e.At.Add(time.Duration(i) * time.Second)
			for _, t := range []*Traced{&e.Was, &e.Became} {
				if !t.LeaseUntil.IsZero() {
					t.LeaseUntil = t.LeaseUntil.Add(time.Duration(i) * time.Second)
				}
			}
			replay.Add(e)
		}
	}
	v := replay.Verdicts()
	if v.Runs != runs || len(v.Wrong) > 0 {
		t.Errorf("%d runs, %d found wrong; want %d, none", v.Runs, len(v.Wrong), runs)
	}
}

// Runs that are left out are counted, and not checked.
func TestLeftOut(t *testing.T) {
	h := scripted(rand.New(rand.NewPCG(1, 2)), 3).cancel().lease("a")
	r := Replay{LeaveOut: func(run uuid.UUID) bool { return run == h.id }}
	for _, e := range h.events {
		r.Add(e)
	}
	if v := r.Verdicts(); v.LeftOut != 1 || len(v.Wrong) > 0 {
		t.Errorf("%+v", v)
	}
}

// overlapping replays leases of one worker that began a millisecond apart; each continues with its function of tells.
func overlapping(slots int, faults []time.Duration, tells ...func(*script) *script) Verdicts {
	r := Replay{Most: slots, Watch: 1500 * time.Millisecond}
	random := rand.New(rand.NewPCG(9, 9))
	begin := time.Date(2026, 1, 1, 14, 0, 0, 0, time.UTC)
	for _, after := range faults {
		r.Add(Event{Op: "fault", At: begin.Add(after)})
	}
	for i, tell := range tells {
		h := scripted(random, 3)
		h.at = begin.Add(time.Duration(i) * time.Millisecond)
		for _, e := range tell(h.lease("a").wait(time.Second).extend()).events {
			r.Add(e)
		}
	}
	return r.Verdicts()
}

// A lease that is still held when the trace ends counts like any other, until its last heartbeat may have been sent.
func TestHeldAtTheEnd(t *testing.T) {
	held := func(h *script) *script { return h.wait(2 * time.Second).extend().wait(2 * time.Second).extend() }
	for slots, wrong := range map[int]int{2: 1, 3: 0} {
		if v := overlapping(slots, nil, held, held, held); len(v.Wrong) != wrong || wrong > 0 && v.Wrong[0].Kind != Crowded {
			t.Errorf("three leases of a worker with %d slots: %v, want %d", slots, v.Wrong, wrong)
		}
	}
	given := func(h *script) *script { return h } // while its heartbeat, a second after the lease, was under way
	if v := overlapping(2, nil, held, held, given); len(v.Wrong) > 0 {
		t.Errorf("two leases, and one that may have been given up: %v, want none", v.Wrong)
	}
}

// An outcome that waits to be settled needs no slot: a worker may hold as many of these as it has slots, in addition.
// They are those that are kept in the end, or any while settling fails for every run.
func TestParked(t *testing.T) {
	done := func(h *script) *script { return h.settle("succeeded") }
	kept := func(h *script) *script {
		return h.keep("succeeded").wait(9*time.Second).settleBy("b", "succeeded").kept("over")
	}
	for name, test := range map[string]struct {
		slots  int
		faults []time.Duration
		tells  []func(*script) *script
		wrong  int
	}{
		"one of two is kept":                      {slots: 1, tells: []func(*script) *script{done, kept}},
		"the first of two is kept":                {slots: 1, tells: []func(*script) *script{kept, done}},
		"two of three are kept":                   {slots: 1, tells: []func(*script) *script{done, kept, kept}, wrong: 1},
		"one of three is kept":                    {slots: 1, tells: []func(*script) *script{done, done, kept}, wrong: 1},
		"two, while settling fails":               {slots: 1, faults: []time.Duration{3 * time.Second}, tells: []func(*script) *script{done, done}},
		"three, while settling fails":             {slots: 1, faults: []time.Duration{3 * time.Second}, tells: []func(*script) *script{done, done, done}, wrong: 1},
		"two, and settling has failed before":     {slots: 1, faults: []time.Duration{-time.Minute}, tells: []func(*script) *script{done, done}, wrong: 1},
		"two, and settling has failed afterwards": {slots: 1, faults: []time.Duration{time.Minute}, tells: []func(*script) *script{done, done}, wrong: 1},
	} {
		v := overlapping(test.slots, test.faults, test.tells...)
		if len(v.Wrong) != test.wrong || test.wrong > 0 && v.Wrong[0].Kind != Crowded {
			t.Errorf("%s: %v, want %d", name, v.Wrong, test.wrong)
		}
		if v.Runs != len(test.tells) {
			t.Errorf("%s: %d runs", name, v.Runs)
		}
	}
}

// A lease ahead counts among those that a worker holds from the moment that its handler may begin.
func TestHeldFromItsMark(t *testing.T) {
	for name, test := range map[string]struct {
		second func(*script) *script
		wrong  int
	}{
		"never begun": {func(h *script) *script { return h.leaseAhead("a").extend().extend().takeBackUnbegun() }, 0},
		"begun":       {func(h *script) *script { return h.leaseAhead("a").extend().begin().extend().settle("succeeded") }, 1},
		"begun later": {func(h *script) *script {
			return h.leaseAhead("a").extend().extend().wait(3 * time.Second).extend().begin().wait(time.Second).settle("succeeded")
		}, 0},
	} {
		r := Replay{Most: 1}
		random := rand.New(rand.NewPCG(5, 5))
		begin := time.Date(2026, 1, 1, 15, 0, 0, 0, time.UTC)
		for _, tell := range []func(*script) *script{func(h *script) *script { return h.lease("a").wait(2 * time.Second).settle("succeeded") }, test.second} {
			h := scripted(random, 3)
			h.at = begin
			for _, e := range tell(h).events {
				r.Add(e)
			}
		}
		v := r.Verdicts()
		if len(v.Wrong) != test.wrong || test.wrong > 0 && v.Wrong[0].Kind != Crowded {
			t.Errorf("%s: %v, want %d", name, v.Wrong, test.wrong)
		}
	}
}
