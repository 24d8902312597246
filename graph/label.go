package graph

import (
	"fmt"
	"strings"
	"unicode"
)

// A Mark is the state of a node in one instance, as a picture shows it.
type Mark struct {
	Visits int    // how often a token entered the node, as far as that is known
	Live   int    // tokens that are here now
	State  string // the state of these, such as Waiting, or how the last visit ended: succeeded, failed, cancelled, undone
}

// String returns the text for the node's label.
func (m Mark) String() string {
	var parts []string
	switch {
	case m.Visits == 1:
		parts = append(parts, "1 visit")
	case m.Visits > 1:
		parts = append(parts, fmt.Sprintf("%d visits", m.Visits))
	}
	if m.Live > 0 {
		parts = append(parts, fmt.Sprintf("%d live", m.Live))
	}
	if m.State != "" {
		parts = append(parts, m.State)
	}
	return strings.Join(parts, ", ")
}

// class returns the style of the node, a class that Mermaid defines; empty: none.
func (m Mark) class() string {
	switch {
	case m.State == "Failed" || m.State == "failed" || m.State == "Incident":
		return "failed"
	case m.Live > 0:
		return "live"
	case m.State == "cancelled" || m.State == "undone":
		return "undone"
	case m.Visits > 0:
		return "visited"
	}
	return ""
}

func (j *Join) label() string {
	switch {
	case j.Need > 0 && j.Cancel:
		return fmt.Sprintf("join %d, cancel the rest", j.Need)
	case j.Need > 0:
		return fmt.Sprintf("join %d", j.Need)
	case j.Taken:
		return "join taken"
	}
	return "join"
}

func (w *Wait) label() string {
	if w.Until != "" {
		return "until " + w.Until
	}
	return "wait " + w.For.String()
}

func (a *Await) label() string {
	if a.Signal != "" {
		return "signal " + a.Signal
	}
	return fmt.Sprintf("message %s, key %s", a.Message, a.Key)
}

func (c *Call) label() string {
	if c.Version > 0 {
		return fmt.Sprintf("call %s version %d", c.Process, c.Version)
	}
	return "call " + c.Process
}

func (t *Throw) label() string {
	if t.Compensate {
		return "compensate"
	}
	return "throw " + t.Error
}

// maxLabel is the maximum length of a text in a picture, in characters.
const maxLabel = 80

// escape returns text for a label between quotes. Only characters without a meaning in Mermaid, HTML and Markdown stay
// as they are; other printable ones become entities.
func escape(text string) string {
	var out strings.Builder
	n := 0
	for _, r := range text {
		if n++; n > maxLabel {
			out.WriteString("…")
			break
		}
		switch {
		case unicode.IsLetter(r) || unicode.IsDigit(r) || strings.ContainsRune(" .,:_+-=/()?!'", r):
			out.WriteRune(r)
		case unicode.IsPrint(r):
			fmt.Fprintf(&out, "#%d;", r)
		default:
			out.WriteByte(' ')
		}
	}
	return out.String()
}

// label returns the text of the handler's edge.
func (h Boundary) label() string {
	var text string
	switch {
	case h.Error == "*":
		text = "any error"
	case h.Error != "":
		text = "error " + h.Error
	case h.After != 0:
		text = "after " + h.After.String()
	case h.Every != 0:
		text = "every " + h.Every.String()
	case h.Message != "":
		text = fmt.Sprintf("message %s, key %s", h.Message, h.Key)
	}
	if h.Times > 0 {
		text += fmt.Sprintf(", %d times", h.Times)
	}
	if h.Keep {
		text += ", and stays"
	}
	return text
}
