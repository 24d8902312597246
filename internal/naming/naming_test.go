package naming_test

import (
	"strings"
	"testing"

	"github.com/simple-workflow/simple-workflow/internal/naming"
)

// Prefixes are trimmed, sorted and merged. The error names each bad prefix with its position and a fix.
func TestPrefixes(t *testing.T) {
	many := make([]string, 10_000)
	for i := range many {
		many[i] = "x" + strings.Repeat("a", i%190) + "."
	}
	for _, c := range []struct {
		in   []string
		want string // the result, or part of the error
	}{
		{[]string{"default."}, "default."},
		{[]string{"media.", " email."}, "email. media."},
		{[]string{"bil_ling."}, "bil_ling."},
		{[]string{"billing.", "billing."}, "billing."},
		{[]string{"billing.", "billing.invoice.", "bill."}, "bill. billing."},
		{[]string{"media", "email."}, `type prefix "media" at position 1: a prefix ends with a dot; did you mean "media."?`},
		{[]string{"media.", "", "email."}, "at position 2: it is empty"},
		{[]string{"media.", ""}, "at position 2: it is empty"},
		{nil, "no type prefix is given"},
		{[]string{"billing.*"}, "without wildcards"},
		{[]string{"billing.%"}, "without wildcards"},
		{[]string{"."}, "use segments"},
		{[]string{".."}, "use segments"},
		{[]string{".billing."}, "use segments"},
		{[]string{"Billing."}, `did you mean "billing."?`},
		{[]string{"Billing"}, `did you mean "billing."?`},
		{[]string{"É."}, "use segments"},
		{[]string{"a\xff."}, "use segments"},
		{[]string{strings.Repeat("Z", 9000) + "."}, strings.Repeat("Z", 120) + `" at position 1: it is longer than any type`},
		{many, "10000 type prefixes are given; at most 100"},
		{[]string{"a\x00."}, `"a\x00." at position 1`},
		{[]string{"a\nb."}, `"a\nb." at position 1`},
		{[]string{"a😀."}, "at position 1"},
		{[]string{`bill\.`}, "use segments"},
		{[]string{strings.Repeat("a", 200) + "."}, "longer than any type"},
	} {
		got, err := naming.Prefixes(c.in)
		if err == nil && strings.Join(got, " ") != c.want || err != nil && !strings.Contains(err.Error(), c.want) {
			t.Errorf("Prefixes(%.80q) = %q, %v; want %q", c.in, got, err, c.want)
		}
	}
}

// A prefix and a pattern overlap if and only if some type is under the prefix and covered by the pattern.
func TestOverlap(t *testing.T) {
	types := []string{"a.b", "a.b.c", "a.bc", "a.b.c.d", "b.a", "ab.c"}
	patterns := []string{"a.", "a.b", "a.b.", "a.b.c", "ab.", "b.", "b.a"}
	for _, prefix := range []string{"a.", "a.b.", "ab.", "b."} {
		for _, p := range patterns {
			want := false
			for _, typ := range types {
				want = want || strings.HasPrefix(typ, prefix) && naming.Covers(p, typ)
			}
			if got := naming.Overlap(prefix, p); got != want {
				t.Errorf("prefix %s and pattern %s: %v", prefix, p, got)
			}
		}
	}
}
