package protocol

// A Row is what the protocol knows of one workflow_run. The token of a lease is written as the number of
// that lease: the fence is (id, token), and both are as unique.
type Row struct {
	Status         Status
	Suspect        bool   // its last lease expired
	Hidden         bool   // held or soft-deleted: never leased
	Deleted        bool   // soft-deleted
	Uncharged      bool   // the lease is that of an exhausted run: nothing is started, it is to be failed
	Expired        bool   // no column: what the clock makes of lease_until
	Spared         bool   // a suspect that was given its last attempt back
	Attempt, Most  uint16 // charged starts so far, and max_attempts
	Lease, Settled uint16 // the number of the current or last lease, and of the one that settled; 0: none
	Kept           uint16 // the lease under which an outcome is kept that the database refuses; 0: none
	Keeps          Verdict
}

// Status is the first letter of a status; 0: there is no such row.
type Status byte

// The states of a run.
const (
	Pending   Status = 'p'
	Leased    Status = 'l'
	Succeeded Status = 's'
	Failed    Status = 'f'
	Cancelled Status = 'c'
)

// Over reports whether the run has ended.
func (s Status) Over() bool { return s == Succeeded || s == Failed || s == Cancelled }

// A Verdict is what settling makes of a run.
type Verdict byte

// The verdicts of workflow_settle.
const (
	Succeed  Verdict = 's'
	Fail     Verdict = 'f'
	Retry    Verdict = 't'
	Postpone Verdict = 'a' // the handler asked for it: the attempt is given back
	GiveBack Verdict = 'b' // a release: the attempt is given back
	Effects  Verdict = 'e' // of what is kept: an outcome whose effects are lost. Nobody settles with it
)

// Rules are the transitions of a row. Each method is one statement of sql/, for one row: it returns the row
// afterwards, and false if the statement passes over the row. The zero value is today's protocol. Each
// field takes one guard away, or breaks one effect: a planted fault, which the models and the replay must catch.
type Rules struct {
	LeasesAny    bool // lease: what is not pending, too
	LeasesHidden bool // lease: what is held or deleted, too
	LeasesFree   bool // lease: nothing is charged
	LeasesMore   bool // lease: a run that has no attempt left is started all the same

	ExtendsAny bool // extend: what is not leased, too
	NoFence    bool // extend, settle and give back: the token is not looked at
	TokenStays bool // settle: the token stays, and settles once more
	PaysBack   bool // settle: every verdict but success gives the attempt back

	TakesLiving  bool // take-back: leases that have not expired, too
	FreeCrash    bool // take-back: the attempt is given back
	ForgetsCrash bool // take-back: the run is no suspect
	TakesForever bool // take-back: exhausted runs are due again
	SparesAgain  bool // take-back: that the last attempt was given back is not remembered

	KeepsAny     bool // keep: under the token of a lease that was lost, too
	TakesKept    bool // take-back: leases whose outcome is kept, too
	ReleasesKept bool // release: the same
	SettlesOlder bool // settle what is kept: what was kept under an older lease, too
	SettlesOther bool // settle what is kept: with another outcome
	ForgetsKept  bool // over: what is kept is forgotten before it is settled

	CancelsAny       bool // cancel: what has ended, too
	CancelKeepsToken bool // cancel: the lease stays
	RetriesAny       bool // retry: what has not failed, too
	RetriesFree      bool // retry: the charged starts are forgotten
	RetriesDeleted   bool // retry: what is deleted, too
	DeleteLeaves     bool // delete: what is leased stays leased
	ReleasesAny      bool // release: what is not leased, too
	RemovesLeased    bool // remove: what is leased, too
}

// Enqueued returns a new row.
func Enqueued(most uint16) Row { return Row{Status: Pending, Most: most} }

// Lease is workflow_lease: it charges an attempt, if there is one left.
func (g Rules) Lease(r Row) (Row, bool) {
	if r.Status != Pending && !g.LeasesAny || r.Hidden && !g.LeasesHidden {
		return r, false
	}
	r.Uncharged = r.Attempt >= r.Most && !g.LeasesMore
	if !r.Uncharged && !g.LeasesFree {
		r.Attempt++
	}
	r.Status, r.Expired = Leased, false
	r.Lease++
	return r, true
}

// held is the fence: whether the lease with this number is the one that is held.
func (g Rules) held(r Row, lease uint16) bool {
	return r.Status == Leased && (r.Lease == lease || g.NoFence)
}

// Extend is workflow_extend, the heartbeat. It may come after the lease has expired, if nobody has taken it back.
func (g Rules) Extend(r Row, lease uint16) (Row, bool) {
	if !g.held(r, lease) && !g.ExtendsAny {
		return r, false
	}
	r.Expired = false
	return r, true
}

// Settle is workflow_settle: it records an outcome and ends the lease.
func (g Rules) Settle(r Row, lease uint16, v Verdict) (Row, bool) {
	again := g.TokenStays && r.Status == Succeeded && r.Settled == lease || g.CancelKeepsToken && r.Status == Cancelled && r.Lease == lease
	if !g.held(r, lease) && !again {
		return r, false
	}
	r.Settled = lease
	if back := v == Postpone || v == GiveBack || g.PaysBack && v != Succeed; back && !r.Uncharged && r.Attempt > 0 {
		r.Attempt--
	}
	r.Suspect = r.Suspect && v == GiveBack
	r.Spared = r.Spared && r.Suspect
	switch v {
	case Succeed:
		return r.ended(Succeeded), true
	case Fail:
		return r.ended(Failed), true
	}
	return r.ended(Pending), true
}

// Keep is workflow_unsettled: an outcome that is refused is kept under the token of its lease. What is kept already stays as it is.
func (g Rules) Keep(r Row, lease uint16, v Verdict) (Row, bool) {
	if !g.held(r, lease) && !g.KeepsAny || r.Kept == lease {
		return r, false
	}
	r.Kept, r.Keeps = lease, v
	return r, true
}

// kept reports whether the outcome of the lease that is held is kept. What is kept under another one is a leftover.
func (r Row) kept() bool { return r.Status == Leased && r.Kept == r.Lease }

// FailKept is workflow_fail: a person has the run fail whose outcome is kept, instead of what its handler returned.
func (g Rules) FailKept(r Row) (Row, bool) {
	if !r.kept() {
		return r, false
	}
	r.Keeps = Fail
	return r, true
}

// SettleKept is workflow_settle by anybody, with what is kept. That it is over is said by the same transaction.
func (g Rules) SettleKept(r Row, v Verdict) (Row, bool) {
	if !r.kept() && !(g.SettlesOlder && r.Kept != 0) || v != r.Keeps && !g.SettlesOther {
		return r, false
	}
	return g.Settle(r, r.Lease, v)
}

// Over is workflow_kept_over, and what else forgets leftovers. What the run is still leased for is forgotten only if its
// effects are lost: then the lease is taken back.
func (g Rules) Over(r Row) (Row, bool) {
	if r.Kept == 0 || r.kept() && r.Keeps != Effects && !g.ForgetsKept {
		return r, false
	}
	r.Kept, r.Keeps = 0, 0
	return r, true
}

// ended is a row whose lease is over.
func (r Row) ended(s Status) Row {
	r.Status, r.Expired, r.Uncharged = s, false, false
	return r
}

// TakeBack is workflow_take_back: an expired lease is ended by anybody, unless its outcome is kept. The run is due again, as a suspect;
// one that has no attempt left is leased once more by the taker, who is to fail it. With spare, which says that it was at
// its last attempt and not alone in its process, a suspect is given that attempt back: once, as long as it is one.
func (g Rules) TakeBack(r Row, spare bool) (Row, bool) {
	if r.Status != Leased || !r.Expired && !g.TakesLiving || r.kept() && !g.TakesKept {
		return r, false
	}
	spare = spare && r.Suspect && !r.Uncharged && r.Attempt > 0 && !r.Spared
	r.Suspect, r.Expired = !g.ForgetsCrash, false
	switch {
	case spare:
		r.Spared = !g.SparesAgain
		r.Attempt--
		return r.ended(Pending), true
	case r.Attempt < r.Most || g.FreeCrash || g.TakesForever:
		if g.FreeCrash {
			r.Attempt--
		}
		return r.ended(Pending), true
	}
	r.Uncharged = true
	r.Lease++
	return r, true
}

// GiveBack is workflow_give_back: a lease whose answer was lost. Its handler was never started, so the attempt
// is given back. The lease on an exhausted run expires at once instead, and is taken back.
func (g Rules) GiveBack(r Row, lease uint16) (Row, bool) {
	if !g.held(r, lease) {
		return r, false
	}
	if r.Uncharged {
		r.Expired = true
		return r, true
	}
	if r.Attempt > 0 {
		r.Attempt--
	}
	return r.ended(Pending), true
}

// Release is workflow_release: a person takes a worker's leases away, but for those whose outcomes are kept. The attempt stays charged.
func (g Rules) Release(r Row) (Row, bool) {
	if r.Status != Leased && !g.ReleasesAny || r.kept() && !g.ReleasesKept {
		return r, false
	}
	return r.ended(Pending), true
}

// Cancel is workflow_cancel, or whatever else ends a run that nobody wants any more.
func (g Rules) Cancel(r Row) (Row, bool) {
	if r.Status != Pending && r.Status != Leased && !g.CancelsAny {
		return r, false
	}
	r.Suspect = false
	return r.ended(Cancelled), true
}

// Retry is workflow_retry: a failed run gets so many further attempts. One that is held is due once it is resumed.
func (g Rules) Retry(r Row, attempts uint16) (Row, bool) {
	if r.Deleted && !g.RetriesDeleted || r.Attempt >= 1000 || r.Status != Failed && !(g.RetriesAny && r.Status.Over()) {
		return r, false
	}
	r.Suspect, r.Spared = false, false
	r.Most = min(max(r.Most, r.Attempt+attempts), 1000)
	if g.RetriesFree {
		r.Attempt = 0
	}
	return r.ended(Pending), true
}

// Hide holds or soft-deletes a run, or undoes it. What is hidden while it is leased goes on.
func (g Rules) Hide(r Row, hidden bool) (Row, bool) {
	r.Hidden, r.Deleted = hidden, r.Deleted && hidden
	return r, r.Status != 0
}

// Delete is workflow_delete: what is leased is cancelled with it.
func (g Rules) Delete(r Row) (Row, bool) {
	if r.Deleted {
		return r, false
	}
	if r.Status == Leased && !g.DeleteLeaves {
		r, _ = g.Cancel(r)
	}
	r.Deleted = true
	return g.Hide(r, true)
}

// Remove is retention, or a person's DELETE: what is leased stays.
func (g Rules) Remove(r Row) (Row, bool) {
	if r.Status == 0 || r.Status == Leased && !g.RemovesLeased {
		return r, false
	}
	return Row{Kept: r.Kept, Keeps: r.Keeps}, true // a leftover is forgotten later
}
