// Package told parses what a program, a server or a caller of run.Complete says about a failure.
package told

import (
	"regexp"
	"time"

	jsonv2 "github.com/go-json-experiment/json"

	"github.com/simple-workflow/simple-workflow/internal/settling"
	"github.com/simple-workflow/simple-workflow/run"
)

// Told is what a program or a server itself says about its failure: a JSON object with the member error.
//
//	{"error": {"code": "CARD_DECLINED", "message": "no money left", "permanent": true}}
//
// Unknown members are ignored. The zero value says nothing.
type Told struct {
	Code        string   `json:"code"`        // 1 to 100 letters, digits and _.:- characters; any other code is ignored
	Message     string   `json:"message"`     // replaces the whole answer as the message
	Permanent   *bool    `json:"permanent"`   // whether the run fails at once; nil: the status or exit code decides
	RetryAfter  *float64 `json:"retry_after"` // seconds until the run is retried, with an attempt spent; nil: the backoff applies
	Unavailable *bool    `json:"unavailable"` // whether a service that other runs need, too, is out of reach; nil: the status or exit code decides
	AgainAfter  *float64 `json:"again_after"` // seconds until the run is started again, with no attempt spent: this is no failure, there is nothing to do yet
}

var validCode = regexp.MustCompile(`^[A-Za-z0-9_.:-]{1,100}$`)

// By parses an answer. An answer of another form says nothing.
func By(answer []byte) Told {
	var said struct {
		Error Told `json:"error"`
	}
	if jsonv2.Unmarshal(answer, &said) != nil {
		return Told{}
	}
	return said.Error
}

// Apply returns err as the answer classifies it. permanent and unavailable are what the status or exit code
// says.
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
	case permanent: // only the status or exit code says so
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

// Refusal marks an error that only a status or an exit code calls permanent.
func Refusal(err error) error {
	if run.Code(err) == "" {
		err = run.WithCode(settling.CodeRefused, err)
	}
	return settling.Technical(err)
}

// span converts seconds to a duration of a year at most. A negative number or NaN becomes 0.
func span(seconds float64) time.Duration {
	if !(seconds > 0) {
		return 0
	}
	return time.Duration(min(seconds, 365*24*3600) * float64(time.Second))
}
