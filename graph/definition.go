package graph

import (
	"errors"
	"fmt"
	"strings"
	"time"

	"github.com/go-json-experiment/json"
	"github.com/go-json-experiment/json/jsontext"
)

// A Definition is a process as its author wrote it: named nodes, each with the edges that leave
// it. It never changes; an edited process is another version.
type Definition struct {
	Process string           `json:"process"`         // its name, such as order
	Version int              `json:"version"`         // from 1
	Lang    string           `json:"lang,omitzero"`   // of its expressions: cel, the default
	Start   string           `json:"start"`           // the node where an instance starts
	Output  string           `json:"output,omitzero"` // of an instance that completes: an expression; none: null
	Nodes   map[string]*Node `json:"nodes"`
}

// A Node has exactly one verb, which says what it is.
type Node struct {
	Do        string   `json:"do,omitzero"`        // a step: the type of the run that does it
	Choose    []Way    `json:"choose,omitzero"`    // the first way whose condition is true, or Else
	Any       []Way    `json:"any,omitzero"`       // all ways whose conditions are true, at once, or Else
	Fork      []string `json:"fork,omitzero"`      // all of these nodes, at once
	Join      *Join    `json:"join,omitzero"`      // where branches meet
	Wait      *Wait    `json:"wait,omitzero"`      // lets time pass
	Throw     *Throw   `json:"throw,omitzero"`     // fails the instance
	End       bool     `json:"end,omitzero"`       // ends its token; with the last one the instance completes
	Terminate bool     `json:"terminate,omitzero"` // completes the instance, whatever else moves in it

	In       map[string]string `json:"in,omitzero"`       // of a step: its payload, by key, as expressions; none: the instance's input
	Out      map[string]string `json:"out,omitzero"`      // of a step: what is kept, by key, as expressions over result; none: the result
	Attempts int               `json:"attempts,omitzero"` // of a step: the most starts, 1 to 1000; 0: 3
	On       []Handler         `json:"on,omitzero"`       // of a step: where its failure leads; the first that fits
	Else     string            `json:"else,omitzero"`     // of choose and any: where to go if no condition is true
	To       string            `json:"to,omitzero"`       // the next node; none: the token ends here
}

// A Way leads on if its condition is true.
type Way struct {
	If string `json:"if"`
	To string `json:"to"`
}

// A Handler leads on when a step has failed for good with the code, or with any if Error is *.
type Handler struct {
	Error string `json:"error"`
	To    string `json:"to"`
}

// A Throw fails the instance with a code.
type Throw struct {
	Error string `json:"error"`
}

// A Join waits for tokens. The zero Join waits for one over each of its edges. In JSON it is
// "all", "taken", or an object with need.
type Join struct {
	Taken  bool // for those that can still come
	Need   int  // for so many, whichever they are; those that come later are absorbed
	Cancel bool // with Need: the branches that are not needed any more are ended
}

// A Wait lasts for a time, or until one. In JSON it is a duration such as PT5M or 5m, or an
// object with until.
type Wait struct {
	For   time.Duration
	Until string // an expression: a time in RFC 3339
}

// Parse reads a definition from JSON. Keys that do not exist or come twice, and shapes that
// cannot be, are errors that name the place. Whether the process makes sense is for Compile to
// say.
func Parse(text []byte) (*Definition, error) {
	var d Definition
	if err := json.Unmarshal(text, &d, json.RejectUnknownMembers(true)); err != nil {
		return nil, fmt.Errorf("graph: %s", inWords(err))
	}
	return &d, nil
}

func inWords(err error) string {
	var semantic *json.SemanticError
	if !errors.As(err, &semantic) {
		return strings.TrimPrefix(err.Error(), "jsontext: ")
	}
	where := "the definition"
	if semantic.JSONPointer != "" {
		where = string(semantic.JSONPointer)
	}
	switch {
	case errors.Is(err, json.ErrUnknownName):
		return fmt.Sprintf("%s: there is no such key", where)
	case semantic.Err != nil:
		return fmt.Sprintf("%s: %v", where, semantic.Err)
	}
	return fmt.Sprintf("%s: a JSON %v does not fit here", where, semantic.JSONKind)
}

// MarshalJSONTo writes the shortest form.
func (j *Join) MarshalJSONTo(out *jsontext.Encoder) error {
	switch {
	case j.Need > 0 && j.Cancel:
		return json.MarshalEncode(out, map[string]any{"need": j.Need, "rest": "cancel"}, json.Deterministic(true))
	case j.Need > 0:
		return json.MarshalEncode(out, map[string]any{"need": j.Need})
	case j.Taken:
		return out.WriteToken(jsontext.String("taken"))
	}
	return out.WriteToken(jsontext.String("all"))
}

// UnmarshalJSONFrom reads either form.
func (j *Join) UnmarshalJSONFrom(in *jsontext.Decoder) error {
	if in.PeekKind() == '{' {
		var form struct {
			Need int    `json:"need"`
			Rest string `json:"rest"`
		}
		if err := json.UnmarshalDecode(in, &form, json.RejectUnknownMembers(true)); err != nil {
			return err
		}
		if form.Need < 1 || form.Rest != "" && form.Rest != "cancel" {
			return errors.New(`a join is "all", "taken", {"need": 1} or {"need": 1, "rest": "cancel"}`)
		}
		*j = Join{Need: form.Need, Cancel: form.Rest == "cancel"}
		return nil
	}
	var word string
	if err := json.UnmarshalDecode(in, &word); err != nil {
		return err
	}
	if word != "all" && word != "taken" {
		return fmt.Errorf(`join %q: use "all", "taken" or {"need": 1}`, word)
	}
	*j = Join{Taken: word == "taken"}
	return nil
}

// MarshalJSONTo writes the shortest form.
func (w *Wait) MarshalJSONTo(out *jsontext.Encoder) error {
	if w.Until != "" {
		return json.MarshalEncode(out, map[string]string{"until": w.Until})
	}
	return out.WriteToken(jsontext.String(isoDuration(w.For)))
}

// UnmarshalJSONFrom reads either form.
func (w *Wait) UnmarshalJSONFrom(in *jsontext.Decoder) error {
	if in.PeekKind() == '{' {
		var form struct {
			Until string `json:"until"`
		}
		if err := json.UnmarshalDecode(in, &form, json.RejectUnknownMembers(true)); err != nil {
			return err
		}
		if form.Until == "" {
			return errors.New(`a wait is a duration, or {"until": expression}`)
		}
		*w = Wait{Until: form.Until}
		return nil
	}
	var text string
	if err := json.UnmarshalDecode(in, &text); err != nil {
		return err
	}
	d, err := parseDuration(text)
	*w = Wait{For: d}
	return err
}

// JSON returns the canonical form: keys in order, no blanks, durations in one form.
func (d *Definition) JSON() ([]byte, error) {
	return json.Marshal(d, json.Deterministic(true))
}
