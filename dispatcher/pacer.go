package dispatcher

import "time"

// A pacer keeps work that is repeated from taking all the time of a slow server. Its zero value is ready.
type pacer struct{ before time.Duration }

// longRest is the longest rest, unless the work takes longer than that.
const longRest = 10 * time.Second

// rest returns how long to leave the server alone after work that took so long: ten times as long, but longRest or as
// long as the work at most. It goes by the quicker of the last two turns, because a server that stood still once is no
// slow one, and what came meanwhile should not wait for ten times as long.
func (p *pacer) rest(took time.Duration) time.Duration {
	slow := min(took, p.before)
	p.before = took
	return min(10*slow, max(slow, longRest))
}
