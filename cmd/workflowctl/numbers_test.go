package main

import (
	"slices"
	"testing"
)

// A negative number is taken as an argument, and not as a flag, wherever flags are and whether or not they take
// values.
func TestNegativeNumbers(t *testing.T) {
	for _, c := range []struct{ given, want []string }{
		{[]string{"prioritize", "id", "-50"}, []string{"prioritize", "--", "id", "-50"}},
		{[]string{"correct", "id", "n", "-5", "she typed"}, []string{"correct", "--", "id", "n", "-5", "she typed"}},
		{[]string{"correct", "id", "n", "-5", "17", "--schema", "s"}, []string{"correct", "--schema", "s", "--", "id", "n", "-5", "17"}},
		{[]string{"message", "-5", "key", "--payload={}", "--wait", "0"}, []string{"message", "--payload={}", "--wait", "0", "--", "-5", "key"}},
		{[]string{"start", "order", "--priority", "-5"}, []string{"start", "order", "--priority", "-5"}},
		{[]string{"correct", "id", "n", "-1.5", "why"}, []string{"correct", "--", "id", "n", "-1.5", "why"}},
		{[]string{"redrive", "--do", "-5"}, []string{"redrive", "--do", "--", "-5"}},
		{[]string{"prioritize", "id", "--", "-50"}, []string{"prioritize", "id", "--", "-50"}},
		{[]string{"show", "lag", "--json"}, []string{"show", "lag", "--json"}},
		{[]string{"nonsense", "-5"}, []string{"nonsense", "-5"}},
	} {
		if got := numbers(newRoot(), c.given); !slices.Equal(got, c.want) {
			t.Errorf("%q becomes %q, want %q", c.given, got, c.want)
		}
	}
}
