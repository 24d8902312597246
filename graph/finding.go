package graph

import (
	"fmt"
	"strings"
)

// A Finding is something about a definition that its author should know.
type Finding struct {
	Code   string `json:"code"`   // such as UNKNOWN_NODE
	Path   string `json:"path"`   // the place, as a JSON pointer: /nodes/pay/to
	Reason string `json:"reason"` // what is wrong
	Fix    string `json:"fix"`    // what to do
	Note   bool   `json:"note"`   // it may be meant; the definition is valid all the same
}

func (f Finding) String() string {
	text := fmt.Sprintf("%s: %s; %s", f.Code, f.Reason, f.Fix)
	if f.Path == "" { // the whole document
		return text
	}
	return f.Path + ": " + text
}

// An InvalidError lists everything that makes a definition unusable.
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
