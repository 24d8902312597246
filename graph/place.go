package graph

import (
	"fmt"
	"time"
)

// A Place is a node of a Builder, and what edges lead to. All methods return the node itself, so
// that they can be chained; what means nothing at a node of its kind, Definition tells.
type Place struct {
	part *Part
	name string
	path string
	node *Node
}

// Then leads to the next node.
func (p *Place) Then(next *Place) *Place {
	if p.node.To != "" {
		p.mistake("TWO_EDGES", "to", fmt.Sprintf("it leads to %q already", p.node.To), "use a fork for both, or choose for one of them")
	}
	p.node.To = p.target("to", next)
	return p
}

// When leads to a node if the condition is true. Of choose the first such way counts, of any
// all do.
func (p *Place) When(condition string, to *Place) *Place {
	ways, key := &p.node.Choose, "choose"
	if p.node.Any != nil {
		ways, key = &p.node.Any, "any"
	}
	if *ways == nil {
		return p.misplaced("When", "choose or any")
	}
	*ways = append(*ways, Way{If: condition, To: p.target(fmt.Sprintf("%s/%d/to", key, len(*ways)), to)})
	return p
}

// Else says where to go if no condition is true.
func (p *Place) Else(to *Place) *Place {
	if p.node.Else != "" {
		p.mistake("TWO_EDGES", "else", fmt.Sprintf("it leads to %q already", p.node.Else), "remove one of them")
	}
	p.node.Else = p.target("else", to)
	return p
}

// Taken has a join wait only for the tokens that can still come.
func (p *Place) Taken() *Place {
	if p.node.Join == nil || p.node.Join.Need > 0 {
		return p.misplaced("Taken", "a join without Need")
	}
	p.node.Join.Taken = true
	return p
}

// Need has a join wait for n tokens only, whichever they are, or an each for n results.
func (p *Place) Need(n int) *Place {
	switch {
	case n < 1:
		p.mistake("NEED", "", fmt.Sprintf("it needs %d", n), "use 1 or more")
	case p.node.Join != nil && !p.node.Join.Taken:
		p.node.Join.Need = n
	case p.node.Each != nil:
		p.node.Each.Need = n
	default:
		p.misplaced("Need", "a join without Taken, or an each")
	}
	return p
}

// CancelRest ends what a join or an each does not need any more. Need comes first.
func (p *Place) CancelRest() *Place {
	switch n := p.node; {
	case n.Join != nil && n.Join.Need > 0:
		n.Join.Cancel = true
	case n.Each != nil && n.Each.Need > 0:
		n.Each.Rest = "cancel"
	default:
		return p.misplaced("CancelRest", "a join or an each after Need")
	}
	return p
}

// In gives what the node does a value under a key: an expression. Without any, it is given the
// instance's input.
func (p *Place) In(key, expression string) *Place { return p.put("in", &p.node.In, key, expression) }

// Out keeps a value under a key: an expression over result. Without any, the result is kept.
func (p *Place) Out(key, expression string) *Place { return p.put("out", &p.node.Out, key, expression) }

func (p *Place) put(field string, into *map[string]string, key, expression string) *Place {
	if *into == nil {
		*into = map[string]string{}
	}
	if _, there := (*into)[key]; there {
		p.mistake("DUPLICATE_KEY", field+"/"+key, "it has an expression already", "remove one of them")
	}
	(*into)[key] = expression
	return p
}

// Retry is how often a step may be started, and the pauses before the second attempt and at most. What is 0, the policy of
// the step's type says.
func (p *Place) Retry(r RetryPolicy) *Place {
	p.node.Retry = &r
	return p
}

// Attempts is how often a step may be started, 1 to 1000. Without, or with 3, it is what the policy of its type says.
func (p *Place) Attempts(n int) *Place {
	if n == 0 {
		p.mistake("ATTEMPTS", "attempts", "0 is outside 1 to 1000", "say how often the step may be started")
	}
	p.node.Attempts = n
	return p
}

// Undo names the type of the run that undoes a step. Of a call it is none or propagate: whether
// undoing it undoes the completed child.
func (p *Place) Undo(how string) *Place {
	if p.node.Call != nil {
		p.node.Call.Undo = how
	} else {
		p.node.Undo = how
	}
	return p
}

// Assignee names the person of a task: an expression.
func (p *Place) Assignee(expression string) *Place {
	if p.node.Human == nil {
		return p.misplaced("Assignee", "a human task")
	}
	p.node.Human.Assignee = expression
	return p
}

// Due says, for people's eyes, when a task should be done. After is what acts.
func (p *Place) Due(d time.Duration) *Place {
	if p.node.Human == nil {
		return p.misplaced("Due", "a human task")
	}
	p.node.Human.Due = p.duration("human/due", d, time.Microsecond)
	return p
}

// Version calls this version of a process. Without, it is the highest when it is called.
func (p *Place) Version(n int) *Place {
	if p.node.Call == nil {
		return p.misplaced("Version", "a call")
	}
	p.node.Call.Version = n
	return p
}

// Limit is how many runs an each has at once. Without, it is 100.
func (p *Place) Limit(n int) *Place {
	if p.node.Each == nil {
		return p.misplaced("Limit", "an each")
	}
	p.node.Each.Limit = n
	return p
}

// OnError leads on when the node has failed for good with the code; * is any.
func (p *Place) OnError(code string, to *Place) *Place { return p.on(Handler{Error: code}, to) }

// OnMessage leads on when a message has come while the token is here. The key is an expression.
func (p *Place) OnMessage(message, key string, to *Place) *Place {
	return p.on(Handler{Message: message, Key: key}, to)
}

// After leads on when the token has been here for so long.
func (p *Place) After(d time.Duration, to *Place) *Place {
	return p.on(Handler{After: p.duration(p.nextHandler()+"/after", d, time.Microsecond)}, to)
}

// Every sends another token on, time and again while this one is here.
func (p *Place) Every(d time.Duration, to *Place) *Place {
	return p.on(Handler{Every: p.duration(p.nextHandler()+"/every", d, time.Microsecond)}, to)
}

// Times has the Every before it act at most so often.
func (p *Place) Times(n int) *Place {
	if len(p.node.On) == 0 {
		return p.misplaced("Times", "Every, after it")
	}
	p.node.On[len(p.node.On)-1].Times = n
	return p
}

// Keep has the token stay when the After or OnMessage before it happens: another one leads on.
func (p *Place) Keep() *Place {
	if len(p.node.On) == 0 {
		return p.misplaced("Keep", "After and OnMessage, after them")
	}
	p.node.On[len(p.node.On)-1].Keep = true
	return p
}

func (p *Place) nextHandler() string { return fmt.Sprintf("on/%d", len(p.node.On)) }

func (p *Place) on(h Handler, to *Place) *Place {
	h.To = p.target(p.nextHandler()+"/to", to)
	p.node.On = append(p.node.On, h)
	return p
}

func (p *Place) target(at string, to *Place) string { return p.part.target(p.path+"/"+at, to) }

func (p *Place) targets(field string, all []*Place) []string {
	names := make([]string, len(all))
	for i, to := range all {
		names[i] = p.target(fmt.Sprintf("%s/%d", field, i), to)
	}
	return names
}

// duration is d as a definition can hold it. What is out of range is told once, here, and
// stands for a second until then.
func (p *Place) duration(at string, d, least time.Duration) Duration {
	if d < least || d > maxDuration {
		p.mistake("DURATION", at, fmt.Sprintf("%v is out of range", d), fmt.Sprintf("use %v to ten years", least))
		return Duration(time.Second)
	}
	return Duration(d.Truncate(time.Microsecond))
}

func (p *Place) misplaced(method, where string) *Place {
	p.mistake("MISPLACED", "", method+" means nothing here", "use it at "+where)
	return p
}

func (p *Place) mistake(code, at, reason, fix string) {
	if at != "" {
		at = "/" + at
	}
	p.part.mistake(code, p.path+at, reason, fix)
}
