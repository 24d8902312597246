package protocol

import "fmt"

// Model E: an outcome that arrives later. A handler has answered "accepted" (202): its run stays leased and is
// extended until somebody calls with the token of the lease and an outcome. The call stores the outcome under that
// token. The holder of the lease settles with it; if somebody takes the lease back, they also settle with it, and do
// not start the run again. There are one run, two workers, and a caller whose answers may be lost and who then calls
// again.

type eState struct {
	status          byte  // pending, leased, succeeded, failed (its time was over), cancelled
	lease, stored   uint8 // stored: the lease under which an outcome is stored; 0: none
	holder          int8
	settled         uint8 // the lease that was settled
	used            uint8 // the lease of the caller whose outcome was recorded
	expired         bool
	waits           [2]uint8 // the leases for which each worker waits
	takes           int8     // the worker in the middle of a take-back; -1: none
	sawStored, seen uint8    // what that worker saw
	call            byte     // 's' sent, 'c' has checked the token
	token           uint8    // the caller's
	acked           uint8    // the lease whose outcome was acknowledged
	freezes, kills  uint8
	losses, cancels uint8
	fault           string
}

type eDesign struct {
	store                              string // "row", "table", "table, locked"
	freezes, kills, losses, cancels    uint8
	blind, limitWins, noToken, forgets bool
}

func (d eDesign) design() design[eState] {
	s := eState{status: 'p', holder: -1, takes: -1, freezes: d.freezes, kills: d.kills, losses: d.losses, cancels: d.cancels}
	return design[eState]{start: s, next: d.next,
		wrong: func(s eState) string {
			switch {
			case s.fault != "":
				return s.fault
			case s.acked != 0 && s.status == 'f':
				return "an acknowledged outcome was dropped"
			}
			return ""
		},
		done: func(s eState) bool { return s.status != 'p' && s.status != 'l' },
	}
}

func (s *eState) settle(status byte) {
	s.settled, s.status, s.holder, s.expired = s.lease, status, -1, false
	if status == 's' {
		s.used = s.stored
	}
}

func (d eDesign) next(s eState, do func(string, eState)) {
	for p := range s.waits {
		name := fmt.Sprintf("W%d", p+1)
		mine := s.status == 'l' && s.lease == s.waits[p] && s.waits[p] != 0
		if s.status == 'p' && s.lease < 3 {
			t := s
			t.status, t.lease, t.holder = 'l', s.lease+1, int8(p)
			t.waits[p] = t.lease
			if s.acked != 0 {
				t.fault = "begun again though its outcome was acknowledged"
			}
			if s.token == 0 || s.call == 0 {
				t.token = t.lease // the next call is for this attempt; the previous one may still be under way
			}
			do(name+" leases the run and calls out: accepted", t)
		}
		if mine && s.stored == s.lease {
			t := s
			t.settle('s')
			t.waits[p] = 0
			do(name+" settles with the stored outcome", t)
		}
		if mine && (s.stored != s.lease || d.limitWins) && s.call == 0 {
			t := s
			t.settle('f')
			t.waits[p] = 0
			do(name+": its time is over, failed", t)
		}
		if mine && s.expired {
			t := s
			t.expired = false
			do(name+" extends the lease", t)
		}
		if !mine && s.waits[p] != 0 {
			t := s
			t.waits[p] = 0
			do(name+" hears that its lease is gone", t)
		}
		if s.kills > 0 && s.waits[p] != 0 {
			t := s
			t.kills--
			t.waits[p] = 0
			if t.holder == int8(p) {
				t.holder = -1
			}
			do(name+" is killed", t)
		}
		if s.status == 'l' && s.expired && s.takes < 0 && s.lease < 3 {
			t := s
			t.takes, t.sawStored, t.seen = int8(p), s.stored, s.lease
			if d.store == "table" {
				do(name+" looks at the expired lease", t) // in its snapshot
			} else {
				d.take(t, p, name, do)
			}
		}
		if s.takes == int8(p) {
			d.take(s, p, name, do)
		}
	}
	if s.status == 'l' && !s.expired && (s.holder < 0 || s.freezes > 0) {
		t := s
		t.expired = true
		if s.holder >= 0 {
			t.freezes--
		}
		do("the lease expires", t)
	}
	if s.cancels > 0 && (s.status == 'l' || s.status == 'p') {
		t := s
		t.cancels--
		t.status, t.holder, t.expired, t.acked = 'c', -1, false, 0 // an acknowledged outcome may be cancelled, too
		do("somebody cancels", t)
	}
	d.calls(s, do)
}

func (d eDesign) take(s eState, p int, name string, do func(string, eState)) {
	t := s
	t.takes, t.sawStored, t.seen = -1, 0, 0
	switch {
	case s.status != 'l' || s.lease != s.seen || !s.expired:
		do(name+" finds that the lease has changed", t)
		return
	case s.sawStored == s.lease && !d.blind: // leased once more only to settle
		t.lease, t.holder, t.expired = s.lease+1, int8(p), false
		t.stored = t.lease
		t.waits[p] = t.lease
		do(name+" takes the lease over, with its outcome", t)
	default:
		t.status, t.holder, t.expired = 'p', -1, false
		do(name+" takes the lease back", t)
	}
}

// calls are the steps of the caller, who stores an outcome under its token.
func (d eDesign) calls(s eState, do func(string, eState)) {
	valid := s.status == 'l' && s.lease == s.token || d.noToken && s.status == 'l'
	switch s.call {
	case 0:
		if s.token != 0 && s.acked == 0 {
			t := s
			t.call = 's'
			do(fmt.Sprintf("the caller brings the outcome under lease %d", s.token), t)
		}
	case 's':
		switch {
		case s.used != 0 || s.stored > s.token: // there is an outcome: is it this caller's?
			t := s
			t.call = 0
			if d.forgets && s.settled != s.token && s.status == 's' || d.forgets && s.stored != s.token {
				t.fault = "a caller was refused whose outcome counts"
			} else if s.status != 'c' {
				t.acked = s.token
			}
			do("the caller is told that its outcome was stored before", t)
		case s.stored == s.token && s.status == 'l':
			t := s
			t.call, t.acked = 0, s.token
			do("the caller is told that its outcome was stored before", t)
		case valid && d.store == "table":
			t := s
			t.call = 'c'
			do("the token is looked at", t)
		case valid:
			d.keep(s, do)
		default:
			t := s
			t.call, t.token = 0, 0
			do("the caller is refused: the lease is gone", t)
		}
	case 'c':
		d.keep(s, do)
	}
}

func (d eDesign) keep(s eState, do func(string, eState)) {
	t := s
	t.stored, t.call = s.token, 0
	if s.lease != s.token && d.store != "table" {
		t.fault = "an outcome was stored under a lost lease"
	}
	if s.losses > 0 {
		t := t
		t.losses--
		do("the outcome is stored and the answer lost", t)
	}
	t.acked = s.token
	do("the outcome is stored and acknowledged", t)
}
