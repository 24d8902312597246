// Package told reads what is said of a failure from outside: by a program, a server, or whoever completes a run.
package told

import (
	"regexp"
	"time"

	jsonv2 "github.com/go-json-experiment/json"

	"github.com/simple-workflow/simple-workflow/internal/settling"
	"github.com/simple-workflow/simple-workflow/run"
)

// Told is what a program or a server says itself of why it has failed: a JSON object with the member error.
//
//	{"error": {"code": "CARD_DECLINED", "message": "no money left", "permanent": true}}
//
// Members that are unknown here are passed over. The zero value says nothing.
type Told struct {
	Code        string   `json:"code"`        // of letters, digits and _.:-, at most 100; any other is passed over
	Message     string   `json:"message"`     // instead of the whole answer
	Permanent   *bool    `json:"permanent"`   // whether it fails at once; nil: as the status or the exit code says
	RetryAfter  *float64 `json:"retry_after"` // seconds until it is tried again, an attempt spent; nil: as always
	Unavailable *bool    `json:"unavailable"` // whether what it needs is out of reach, for other runs, too; nil: as the status or the exit code says
	AgainAfter  *float64 `json:"again_after"` // seconds until it is started again, no attempt spent: it is no failure, there is nothing to do yet
}

var validCode = regexp.MustCompile(`^[A-Za-z0-9_.:-]{1,100}$`)

// By reads what an answer says; one that is not of that form says nothing.
func By(answer []byte) Told {
	var said struct {
		Error Told `json:"error"`
	}
	if jsonv2.Unmarshal(answer, &said) != nil {
		return Told{}
	}
	return said.Error
}

// Apply makes of err what the answer says. permanent and unavailable are what the status or the exit code says.
func (t Told) Apply(err error, permanent, unavailable bool) error {
	if t.AgainAfter != nil {
		return run.Again(span(*t.AgainAfter))
	}
	if validCode.MatchString(t.Code) {
		err = run.WithCode(t.Code, err)
	}
	switch {
	case t.Permanent != nil:
		permanent = *t.Permanent
	case permanent: // it is the status or the exit code that says so, and not the work
		err = Refusal(err)
	}
	if t.Unavailable != nil {
		unavailable = *t.Unavailable
	}
	if unavailable && !permanent {
		err = run.Unavailable(err)
	}
	switch {
	case permanent:
		return run.Permanent(err)
	case t.RetryAfter != nil:
		return run.RetryAfter(err, span(*t.RetryAfter))
	}
	return err
}

// Refusal marks what a status or an exit code alone says.
func Refusal(err error) error {
	if run.Code(err) == "" {
		err = run.WithCode(settling.CodeRefused, err)
	}
	return settling.Technical(err)
}

// span is a number of seconds; of one below zero, or none that is a number, 0.
func span(seconds float64) time.Duration {
	if !(seconds > 0) {
		return 0
	}
	return time.Duration(min(seconds, 365*24*3600) * float64(time.Second))
}
