package graph

import (
	"fmt"
	"strings"
	"unicode"
)

// A Mark is what a picture shows of a node in one instance.
type Mark struct {
	Visits int    // how often a token came, as far as that is known
	Live   int    // tokens that are here now
	State  string // of those, such as Waiting, or how the last visit ended: succeeded, failed, cancelled, undone
}

// String is what the node's label says.
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

// class is how the node is painted.
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

// looks is the kind of a node, and what its label says of it.
func (n *Node) looks() (kind, string) {
	verbs := n.verbs()
	if len(verbs) == 0 {
		return "", "no verb"
	}
	switch k := verbs[0]; k {
	case do:
		return k, n.Do
	case join:
		switch {
		case n.Join.Need > 0 && n.Join.Cancel:
			return k, fmt.Sprintf("join %d, cancel the rest", n.Join.Need)
		case n.Join.Need > 0:
			return k, fmt.Sprintf("join %d", n.Join.Need)
		case n.Join.Taken:
			return k, "join taken"
		}
		return k, "join"
	case wait:
		if n.Wait.Until != "" {
			return k, "until " + n.Wait.Until
		}
		return k, "wait " + n.Wait.For.String()
	case await:
		if n.Await.Signal != "" {
			return k, "signal " + n.Await.Signal
		}
		return k, fmt.Sprintf("message %s, key %s", n.Await.Message, n.Await.Key)
	case human:
		return k, strings.Join(append([]string{"human"}, n.Human.Groups...), " ")
	case call:
		if n.Call.Version > 0 {
			return k, fmt.Sprintf("call %s version %d", n.Call.Process, n.Call.Version)
		}
		return k, "call " + n.Call.Process
	case each:
		return k, fmt.Sprintf("%s for each of %s", n.Each.Do, n.Each.List)
	case throw:
		if n.Throw.Compensate {
			return k, "compensate"
		}
		return k, "throw " + n.Throw.Error
	case scope: // the box says it
		return k, ""
	default:
		return k, string(k)
	}
}

// maxLabel is how many characters of a text are drawn.
const maxLabel = 80

// escape writes text for a label between quotes. Only what means nothing to Mermaid, HTML and
// Markdown stays as it is.
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

// label is what the edge says.
func (h Handler) label() string {
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
