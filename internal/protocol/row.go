package protocol

// A Row is what the protocol knows of one row of workflow_run. The token of a lease is written as the number of that
// lease. The fence is (id, token), and both forms are equally unique.
type Row struct {
	Status         Status
	Suspect        bool   // its last lease expired
	Hidden         bool   // held or soft-deleted: never leased
	Deleted        bool   // soft-deleted
	Uncharged      bool   // the lease is that of an exhausted run: no handler is started, and the run is to be failed
	Expired        bool   // not a column: lease_until compared with the clock
	Spared         bool   // a suspect whose last attempt was given back
	Attempt, Most  uint16 // charged starts so far, and max_attempts
	Lease, Settled uint16 // the number of the current or last lease, and of the lease that settled; 0: none
	Kept           uint16 // the lease under which a refused outcome is kept; 0: none
	Keeps          Verdict
}

// Status is the first letter of a status; 0 means that the row does not exist.
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

// A Verdict is what settling does to a run.
type Verdict byte

// The verdicts of workflow_settle.
const (
	Succeed  Verdict = 's'
	Fail     Verdict = 'f'
	Retry    Verdict = 't'
	Postpone Verdict = 'a' // the handler asked for it: the attempt is given back
	GiveBack Verdict = 'b' // a release: the attempt is given back
	Effects  Verdict = 'e' // of a kept outcome only: its effects are lost. Nobody settles with it
)

// Rules are the transitions of a row. Each method is one statement of sql/ for one row: it returns the row
// afterwards, and false if the statement skips the row. The zero value is today's protocol. Each field removes one
// guard or breaks one effect: a planted fault, which the models and the replay must detect.
type Rules struct {
	LeasesAny    bool // lease: also runs that are not pending
	LeasesHidden bool // lease: also runs that are held or deleted
	LeasesFree   bool // lease: nothing is charged
	LeasesMore   bool // lease: a run without an attempt left is started anyway

	ExtendsAny bool // extend: also runs that are not leased
	NoFence    bool // extend, settle and give back: the token is not compared
	TokenStays bool // settle: the token stays, and can settle once more
	PaysBack   bool // settle: every verdict but success gives the attempt back

	TakesLiving  bool // take-back: also leases that have not expired
	FreeCrash    bool // take-back: the attempt is given back
	ForgetsCrash bool // take-back: the run is no suspect afterwards
	TakesForever bool // take-back: exhausted runs are due again
	SparesAgain  bool // take-back: it is not remembered that the last attempt was given back

	KeepsAny     bool // keep: also under the token of a lost lease
	TakesKept    bool // take-back: also leases whose outcome is kept
	ReleasesKept bool // release: also leases whose outcome is kept
	SettlesOlder bool // settle what is kept: also what was kept under an older lease
	SettlesOther bool // settle what is kept: with another outcome
	ForgetsKept  bool // over: what is kept is forgotten before it is settled

	CancelsAny       bool // cancel: also runs that have ended
	CancelKeepsToken bool // cancel: the lease stays
	RetriesAny       bool // retry: also runs that have not failed
	RetriesFree      bool // retry: the charged starts are forgotten
	RetriesDeleted   bool // retry: also deleted runs
	DeleteLeaves     bool // delete: a leased run stays leased
	ReleasesAny      bool // release: also runs that are not leased
	RemovesLeased    bool // remove: also leased runs
}

// Enqueued returns a new row.
func Enqueued(most uint16) Row { return Row{Status: Pending, Most: most} }

// Lease is workflow_lease: it charges an attempt if one is left.
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

// held is the fence: whether the lease with this number is the current one.
func (g Rules) held(r Row, lease uint16) bool {
	return r.Status == Leased && (r.Lease == lease || g.NoFence)
}

// Extend is workflow_extend, the heartbeat. It may come after the lease has expired, as long as nobody has taken the
// lease back.
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

// Keep is workflow_unsettled: a refused outcome is kept under the token of its lease. An outcome that is kept already
// stays as it is.
func (g Rules) Keep(r Row, lease uint16, v Verdict) (Row, bool) {
	if !g.held(r, lease) && !g.KeepsAny || r.Kept == lease {
		return r, false
	}
	r.Kept, r.Keeps = lease, v
	return r, true
}

// kept reports whether the outcome of the current lease is kept. What is kept under another lease is a leftover.
func (r Row) kept() bool { return r.Status == Leased && r.Kept == r.Lease }

// FailKept is workflow_fail: a person fails a run whose outcome is kept, instead of what its handler returned.
func (g Rules) FailKept(r Row) (Row, bool) {
	if !r.kept() {
		return r, false
	}
	r.Keeps = Fail
	return r, true
}

// SettleKept is workflow_settle by any worker, with what is kept. The same transaction removes what is kept.
func (g Rules) SettleKept(r Row, v Verdict) (Row, bool) {
	if !r.kept() && !(g.SettlesOlder && r.Kept != 0) || v != r.Keeps && !g.SettlesOther {
		return r, false
	}
	return g.Settle(r, r.Lease, v)
}

// Over is workflow_kept_over, and everything else that removes leftovers. What is kept for the current lease is
// removed only if its effects are lost: then the lease is taken back.
func (g Rules) Over(r Row) (Row, bool) {
	if r.Kept == 0 || r.kept() && r.Keeps != Effects && !g.ForgetsKept {
		return r, false
	}
	r.Kept, r.Keeps = 0, 0
	return r, true
}

// ended returns the row without its lease.
func (r Row) ended(s Status) Row {
	r.Status, r.Expired, r.Uncharged = s, false, false
	return r
}

// TakeBack is workflow_take_back: anybody may end an expired lease, unless its outcome is kept. The run is due again,
// as a suspect. If it has no attempt left, the taker leases it once more, in order to fail it. spare says that the
// run was at its last attempt and not alone in its process: then a suspect gets that attempt back, once, as long as
// it is a suspect.
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

// GiveBack is workflow_give_back, for a lease whose answer was lost. Its handler was never started, so the attempt is
// given back. The lease on an exhausted run expires at once instead, and is taken back.
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

// Release is workflow_release: a person takes a worker's leases away, except those whose outcomes are kept. The
// attempt stays charged.
func (g Rules) Release(r Row) (Row, bool) {
	if r.Status != Leased && !g.ReleasesAny || r.kept() && !g.ReleasesKept {
		return r, false
	}
	return r.ended(Pending), true
}

// Cancel is workflow_cancel, or any other way to end a run that is no longer wanted.
func (g Rules) Cancel(r Row) (Row, bool) {
	if r.Status != Pending && r.Status != Leased && !g.CancelsAny {
		return r, false
	}
	r.Suspect = false
	return r.ended(Cancelled), true
}

// Retry is workflow_retry: a failed run gets this many further attempts. A held one is due once it is resumed.
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

// Hide holds or soft-deletes a run, or undoes that. A run that is hidden while it is leased continues.
func (g Rules) Hide(r Row, hidden bool) (Row, bool) {
	r.Hidden, r.Deleted = hidden, r.Deleted && hidden
	return r, r.Status != 0
}

// Delete is workflow_delete. A leased run is cancelled by it.
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

// Remove is retention, or a DELETE by a person. A leased run is not removed.
func (g Rules) Remove(r Row) (Row, bool) {
	if r.Status == 0 || r.Status == Leased && !g.RemovesLeased {
		return r, false
	}
	return Row{Kept: r.Kept, Keeps: r.Keeps}, true // a leftover is removed later
}
