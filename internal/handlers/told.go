package handlers

import (
	"regexp"
	"time"

	jsonv2 "github.com/go-json-experiment/json"

	"github.com/simple-workflow/simple-workflow/run"
)

// told is what a program or a server says itself of why it has failed: a JSON object with the member error.
//
//	{"error": {"code": "CARD_DECLINED", "message": "no money left", "permanent": true}}
//
// Members that are unknown here are passed over. The zero value says nothing.
type told struct {
	Code       string   `json:"code"`        // of letters, digits and _.:-, at most 100; any other is passed over
	Message    string   `json:"message"`     // instead of the whole answer
	Permanent  *bool    `json:"permanent"`   // whether it fails at once; nil: as the status or the exit code says
	RetryAfter *float64 `json:"retry_after"` // seconds until it is tried again, an attempt spent; nil: as always
	AgainAfter *float64 `json:"again_after"` // seconds until it is started again, no attempt spent: it is no failure, there is nothing to do yet
}

var validCode = regexp.MustCompile(`^[A-Za-z0-9_.:-]{1,100}$`)

// toldBy reads what an answer says; one that is not of that form says nothing.
func toldBy(answer []byte) told {
	var said struct {
		Error told `json:"error"`
	}
	if jsonv2.Unmarshal(answer, &said) != nil {
		return told{}
	}
	return said.Error
}

// apply makes of err what the answer says. permanent is what the status or the exit code says.
func (t told) apply(err error, permanent bool) error {
	if t.AgainAfter != nil {
		return run.Again(span(*t.AgainAfter))
	}
	if validCode.MatchString(t.Code) {
		err = run.WithCode(t.Code, err)
	}
	if t.Permanent != nil {
		permanent = *t.Permanent
	}
	switch {
	case permanent:
		return run.Permanent(err)
	case t.RetryAfter != nil:
		return run.RetryAfter(err, span(*t.RetryAfter))
	}
	return err
}

// span is a number of seconds; of one below zero, or none that is a number, 0.
func span(seconds float64) time.Duration {
	if !(seconds > 0) {
		return 0
	}
	return time.Duration(min(seconds, 365*24*3600) * float64(time.Second))
}
