// Package pattern says which types a prefix or a pattern is for. A pattern is a type, such as billing.charge.v1, or a prefix
// that ends with a dot, such as billing.
package pattern

import "strings"

// Covers reports whether the pattern is for the type. The SQL function workflow_covers has the same rule.
func Covers(pattern, typ string) bool {
	return pattern == typ || strings.HasSuffix(pattern, ".") && strings.HasPrefix(typ, pattern)
}

// Overlap reports whether some type can be both under the prefix and covered by the pattern. The prefix is one of a worker's:
// it need not end with a dot.
func Overlap(prefix, pattern string) bool {
	return strings.HasPrefix(pattern, prefix) || strings.HasSuffix(pattern, ".") && strings.HasPrefix(prefix, pattern)
}
