package worker

import (
	"context"
	"encoding/json"
	"errors"
	"reflect"
	"slices"
	"strings"
	"testing"
	"unicode"
	"unicode/utf8"

	"github.com/simple-workflow/simple-workflow/internal/jsondoc"
	"github.com/simple-workflow/simple-workflow/internal/naming"
	"github.com/simple-workflow/simple-workflow/internal/settling"
	"github.com/simple-workflow/simple-workflow/run"
)

// Whatever prefixes are given, they become a sorted list of which none covers another and
// which covers all of them, or they are refused in clean lines that tell the position.
func FuzzPrefixes(f *testing.F) {
	for _, seed := range []string{"", "a.", "media., email.", "a.,a.b.,a-.,a_.", "A.,*,,..,.a.", "billing", strings.Repeat("a", 199) + ".,x\x00.,\xff.,🙂."} {
		f.Add(seed)
	}
	f.Fuzz(func(t *testing.T, list string) {
		given := strings.Split(list, ",")
		got, err := naming.Prefixes(given)
		if err != nil {
			for line := range strings.SplitSeq(err.Error(), "\n") {
				if !utf8.ValidString(line) || len(line) > 2000 || strings.ContainsFunc(line, unicode.IsControl) ||
					!strings.Contains(line, " at position ") && !strings.Contains(line, "at most 100 are allowed") {
					t.Errorf("unfit line %q", line)
				}
			}
			if got != nil {
				t.Errorf("refused, but there are prefixes: %q", got)
			}
			return
		}
		again, err := naming.Prefixes(got)
		if err != nil || !slices.Equal(again, got) || !slices.IsSorted(got) {
			t.Errorf("%q become %q when they are given again, %v", got, again, err)
		}
		covers := func(prefixes []string, prefix string) bool {
			return slices.ContainsFunc(prefixes, func(p string) bool { return strings.HasPrefix(prefix, p) })
		}
		for _, g := range given {
			if !covers(got, strings.TrimSpace(g)) {
				t.Errorf("%q is not covered by %q", g, got)
			}
		}
		mux := NewMux()
		for i, p := range got {
			if covers(slices.Delete(slices.Clone(got), i, i+1), p) {
				t.Errorf("%q is there although another of %q covers it", p, got)
			}
			mux.HandleRaw(p, func(context.Context, json.RawMessage) (json.RawMessage, error) { return nil, nil })
		}
	})
}

// A payload that can be stored comes out of a handler that returns its input with the same
// meaning, to the last digit, and can be stored as a result; any other bytes are refused as
// a bad payload, not with a panic.
func FuzzHandle(f *testing.F) {
	for _, seed := range []string{
		``, `null`, `{}`, `{"a":[1.10,-0,1e-400,9223372036854775808,"é\n\u001b\ud83d\ude00<&>"],"":null}`, `{"A":1,"a":2}`,
		`{"a":1,"a":2}`, `{"a":"\ud800"}`, "\"\xff\"", `1e400`, `[[]]`, `{} {}`, "\u2028", `"\u0000"`,
	} {
		f.Add([]byte(seed))
	}
	mux := NewMux()
	Handle(mux, "test.same.v1", func(_ context.Context, in any) (any, error) { return in, nil })
	Handle(mux, "test.typed.v1", func(_ context.Context, in struct {
		A int
		B []float64
		C map[string]string
		D json.Number
		E *bool
		F json.RawMessage
		G []byte
	}) (any, error) {
		return in, nil
	})
	f.Fuzz(func(t *testing.T, payload []byte) {
		for _, typ := range []string{"test.same.v1", "test.typed.v1"} {
			before := slices.Clone(payload)
			result, err := mux.lookup(typ).handler(t.Context(), payload)
			if !slices.Equal(payload, before) {
				t.Fatalf("%s: the payload was changed", typ)
			}
			if err == nil {
				err = jsondoc.CheckResult(result)
			}
			var unfit *run.DocumentError
			switch same := typ == "test.same.v1"; {
			case jsondoc.CheckResult(payload) != nil:
				if err != nil && !run.IsPermanent(err) && !errors.As(err, &unfit) {
					t.Fatalf("%s: refused to be tried again: %v", typ, err)
				}
			case same && err != nil:
				t.Fatalf("a payload that can be stored ends in: %v", err)
			case same && !reflect.DeepEqual(meaning(t, payload), meaning(t, result)):
				t.Fatalf("%s became %s", payload, result)
			case err != nil && run.Code(err) != settling.CodePayload && !strings.HasPrefix(err.Error(), "result: $: "):
				t.Fatalf("%s: refused as %q: %v", typ, run.Code(err), err)
			}
		}
	})
}

func meaning(t *testing.T, document []byte) (v any) {
	t.Helper()
	decoder := json.NewDecoder(strings.NewReader(string(document)))
	decoder.UseNumber()
	if err := decoder.Decode(&v); err != nil {
		t.Fatal(err)
	}
	return v
}
