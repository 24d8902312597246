package settling_test

import (
	"errors"
	"fmt"
	"testing"

	"github.com/simple-workflow/simple-workflow/internal/settling"
	"github.com/simple-workflow/simple-workflow/run"
)

// A code that was set with run.WithCode overrides that of a panic, anywhere in the chain of errors. The stack is
// stored in both cases.
func TestFailureCode(t *testing.T) {
	err := errors.New("no")
	caught := &run.PanicError{Value: "ouch", Stack: []byte("goroutine 1")}
	for _, test := range []struct {
		err         error
		code, stack string
	}{
		{err, settling.CodeHandler, ""},
		{run.WithCode("mine", err), "mine", ""},
		{caught, settling.CodePanic, "goroutine 1"},
		{fmt.Errorf("charge: %w", caught), settling.CodePanic, "goroutine 1"},
		{run.WithCode("mine", caught), "mine", "goroutine 1"},
		{run.Permanent(fmt.Errorf("charge: %w", run.WithCode("mine", fmt.Errorf("call: %w", caught)))), "mine", "goroutine 1"},
	} {
		if f := settling.NewFailure(test.err, run.Info{}); f.Code != test.code || f.Stack != test.stack || f.Message != test.err.Error() {
			t.Errorf("%v: %+v, want code %s and stack %q", test.err, f, test.code, test.stack)
		}
	}
}
