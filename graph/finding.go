package graph

import (
	"fmt"
	"strings"
)

// A Finding is an error in a definition, or a note about something that its author may not have intended.
type Finding struct {
	Code   string `json:"code"`   // such as UNKNOWN_NODE
	Path   string `json:"path"`   // the place, as a JSON pointer such as /nodes/pay/to; empty: the whole definition
	Reason string `json:"reason"` // what is wrong
	Fix    string `json:"fix"`    // what to do
	Note   bool   `json:"note"`   // a note: the definition is valid
}

func (f Finding) String() string {
	text := fmt.Sprintf("%s: %s; %s", f.Code, f.Reason, f.Fix)
	if f.Path == "" {
		return text
	}
	return f.Path + ": " + text
}

// An InvalidError lists everything that makes a definition invalid.
type InvalidError struct {
	Process  string
	Version  int
	Findings []Finding // without notes
}

func (e *InvalidError) Error() string {
	lines := make([]string, len(e.Findings))
	for i, f := range e.Findings {
		lines[i] = "  " + f.String()
	}
	return fmt.Sprintf("graph: process %q version %d cannot be used:\n%s", e.Process, e.Version, strings.Join(lines, "\n"))
}
