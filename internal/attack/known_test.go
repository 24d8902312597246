//go:build attack

package attack

import (
	"slices"
	"strings"
)

// An open finding is known, and waits for a fix. The short run leaves it out. The whole run tries it, prints it, and
// reports if it no longer fails.
type open struct {
	by     string // actors; here and below, | separates several, and * stands for all
	op     string
	class  string // prefixes of the names of classes
	on     string
	column string
	value  string
	what   string // what happens
}

// known has a line for each open finding. Nothing else may fail.
var known = []open{}

func among(list, name string) bool {
	return list == "*" || slices.Contains(strings.Split(list, "|"), name)
}

// knownOf returns the index in known of the entry that a mutation by an actor matches, or -1.
func knownOf(by string, m *mutation) int {
	return slices.IndexFunc(known, func(o open) bool {
		return o.on == m.on && among(o.op, m.op) && among(o.by, by) && among(o.column, m.column) && among(o.value, m.value) &&
			(o.class == "*" || slices.ContainsFunc(strings.Split(o.class, "|"), func(begin string) bool { return strings.HasPrefix(m.class, m.on+" "+begin) }))
	})
}

func (o open) String() string {
	return strings.Join([]string{o.by + ": " + o.op, o.on, o.class, o.column, o.value}, " | ") + ": " + o.what
}
