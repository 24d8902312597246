// Package naming has the rules for the names of types and prefixes, and for which types a prefix or a pattern covers. A
// pattern is a type, such as billing.charge.v1, or a prefix that ends with a dot, such as billing.
package naming

import (
	"errors"
	"fmt"
	"regexp"
	"slices"
	"strings"
	"unicode/utf8"
)

// Engine is the prefix of the process engine's own types.
const Engine = "graph."

var (
	aType   = regexp.MustCompile(`^[a-z0-9_-]+(\.[a-z0-9_-]+)+$`)
	aPrefix = regexp.MustCompile(`^([a-z0-9_-]+\.)+$`)
)

// IsType reports whether s is a type: at least two segments of a-z, 0-9, _ and -, with dots between them.
func IsType(s string) bool { return aType.MatchString(s) }

// IsPrefix reports whether s is a prefix: segments as in a type, each followed by a dot.
func IsPrefix(s string) bool { return aPrefix.MatchString(s) }

// Covers reports whether the pattern covers the type. The SQL function workflow_covers has the same rule.
func Covers(pattern, typ string) bool {
	return pattern == typ || strings.HasSuffix(pattern, ".") && strings.HasPrefix(typ, pattern)
}

// Overlap reports whether some type can be both under the prefix and covered by the pattern. The prefix, unlike the
// pattern, need not end with a dot.
func Overlap(prefix, pattern string) bool {
	return strings.HasPrefix(pattern, prefix) || strings.HasSuffix(pattern, ".") && strings.HasPrefix(prefix, pattern)
}

// maxPrefixes is the most prefixes that a worker may have.
const maxPrefixes = 100

// Prefixes checks type prefixes, and returns them trimmed and sorted, without duplicates and
// without prefixes that another one covers. The error names each bad element and its position.
func Prefixes(elements []string) ([]string, error) {
	var problems []error
	bad := func(i int, e, fix string) {
		problems = append(problems, fmt.Errorf("type prefix %.120q at position %d: %s", e, i+1, fix))
	}
	var good []string
	for i, e := range elements {
		e = strings.TrimSpace(e)
		lower := strings.TrimSuffix(strings.ToLower(e), ".") + "."
		switch {
		case e == "":
			bad(i, e, "it is empty; remove it, or name a prefix such as billing.")
		case strings.ContainsAny(e, "*%?"):
			bad(i, e, "prefixes are literal, without wildcards; write billing. for all of billing")
		case utf8.RuneCountInString(e) > 200:
			bad(i, e, "it is longer than any type, which has at most 200 characters")
		case strings.ToLower(e) != e && IsPrefix(lower):
			bad(i, e, fmt.Sprintf("types are lower case; did you mean %q?", lower))
		case IsPrefix(e + "."):
			bad(i, e, fmt.Sprintf("a prefix ends with a dot; did you mean %q?", e+"."))
		case !IsPrefix(e):
			bad(i, e, "use segments of a-z, 0-9, _ and -, each followed by a dot, such as billing. or media.video.")
		default:
			good = append(good, e)
		}
	}
	switch {
	case len(elements) == 0:
		problems = append(problems, errors.New("no type prefix is given; name at least one, such as billing."))
	case len(elements) > maxPrefixes:
		problems = append(problems, fmt.Errorf("%d type prefixes are given; at most %d are allowed", len(elements), maxPrefixes))
	}
	if len(problems) > 0 {
		return nil, errors.Join(problems...)
	}
	slices.Sort(good)
	var all []string
	for _, p := range good {
		// In sorted order, a prefix comes directly before all that it covers.
		if len(all) == 0 || !strings.HasPrefix(p, all[len(all)-1]) {
			all = append(all, p)
		}
	}
	return all, nil
}
