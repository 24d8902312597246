package env

import (
	"cmp"
	"fmt"
	"maps"
	"regexp"
	"slices"
	"strings"

	"github.com/simple-workflow/simple-workflow/internal/spelling"
)

// serviceLink matches the variables that Kubernetes sets in every container for each service.
var serviceLink = regexp.MustCompile(`^[A-Z0-9_]*?_(SERVICE_HOST|SERVICE_PORT(_[A-Z0-9_]+)?|PORT|PORT_\d+_(TCP|UDP|SCTP)(_(PROTO|PORT|ADDR))?)$`)

// strangers returns a warning for each variable that starts with prefix and is not known. Most are misspelled,
// and would silently leave a setting at its default.
func strangers(environ []string, prefix string, known map[string]bool) []string {
	var warnings []string
	for _, entry := range environ {
		name, _, _ := strings.Cut(entry, "=")
		if !strings.HasPrefix(name, prefix) || known[name] || serviceLink.MatchString(name) {
			continue
		}
		warning := fmt.Sprintf("%s: there is no such variable; remove it", cut(name))
		if near := nearest(name, known); near != "" {
			warning += ", or write " + near + " if that is meant"
		}
		warnings = append(warnings, warning)
	}
	slices.Sort(warnings)
	return warnings
}

func cut(name string) string {
	quoted := Quote(name)
	return quoted[1 : len(quoted)-1]
}

// nearest returns the known name that is the fewest edits away, if these are few. Otherwise it returns the
// longest known name of which name is an extension, or "".
func nearest(name string, known map[string]bool) string {
	const most = 200
	if len(name) > most {
		return ""
	}
	near, fewest := "", len(name)/4+1
	stem := ""
	for _, k := range slices.Sorted(maps.Keys(known)) {
		if d := spelling.Distance(name, k); d < fewest {
			near, fewest = k, d
		}
		if strings.HasPrefix(name, k+"_") {
			stem = k // in sorted order, so the longest comes last
		}
	}
	return cmp.Or(near, stem)
}
