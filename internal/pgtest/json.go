package pgtest

import (
	"bytes"
	"encoding/json"
	"math/big"
	"testing"
)

// SameJSON reports whether two documents mean the same: equal numbers may be written differently, and so may white space and
// escapes. It fails the test if one of them is not JSON.
func SameJSON(t testing.TB, a, b []byte) bool {
	t.Helper()
	return same(meaning(t, a), meaning(t, b))
}

func meaning(t testing.TB, document []byte) (v any) {
	t.Helper()
	decoder := json.NewDecoder(bytes.NewReader(document))
	decoder.UseNumber()
	if err := decoder.Decode(&v); err != nil {
		t.Fatalf("%q: %v", document, err)
	}
	return v
}

// same reports whether two documents mean the same. Numbers are compared by value.
func same(a, b any) bool {
	switch a := a.(type) {
	case json.Number:
		b, ok := b.(json.Number)
		x, _ := new(big.Rat).SetString(a.String())
		y, _ := new(big.Rat).SetString(b.String())
		return ok && x.Cmp(y) == 0
	case []any:
		b, ok := b.([]any)
		if !ok || len(a) != len(b) {
			return false
		}
		for i := range a {
			if !same(a[i], b[i]) {
				return false
			}
		}
		return true
	case map[string]any:
		b, ok := b.(map[string]any)
		if !ok || len(a) != len(b) {
			return false
		}
		for k := range a {
			if v, ok := b[k]; !ok || !same(a[k], v) {
				return false
			}
		}
		return true
	}
	return a == b
}
