package graph

import (
	"bytes"
	"errors"
	"fmt"
	"strings"

	"github.com/go-json-experiment/json"
	"github.com/go-json-experiment/json/jsontext"
)

// A Definition is a process as its author wrote it: named nodes, each with the edges that leave
// it. It never changes; an edited process is another version.
type Definition struct {
	Process string           `json:"process"`          // its name, such as order
	Version int              `json:"version"`          // from 1
	Lang    string           `json:"lang,omitzero"`    // of its expressions: cel, the default
	Start   string           `json:"start"`            // the node where an instance starts
	Output  string           `json:"output,omitzero"`  // of an instance that completes: an expression; none: null
	Failure Failure          `json:"failure,omitzero"` // what a step's failure does that no edge takes; none: OpenIncident
	Nodes   map[string]*Node `json:"nodes"`

	zeros []string // places where the text has a number that is 0, which would be lost
}

// A Node has exactly one verb, which says what it is.
type Node struct {
	Do        string   `json:"do,omitzero"`        // a step: the type of the run that does it
	Choose    []Way    `json:"choose,omitzero"`    // the first way whose condition is true, or Else
	Any       []Way    `json:"any,omitzero"`       // all ways whose conditions are true, at once, or Else
	Fork      []string `json:"fork,omitzero"`      // all of these nodes, at once
	Join      *Join    `json:"join,omitzero"`      // where branches meet
	Wait      *Wait    `json:"wait,omitzero"`      // lets time pass
	Await     *Await   `json:"await,omitzero"`     // waits for a message or a signal
	Race      []string `json:"race,omitzero"`      // waits for the first of several wait and await nodes
	Human     *Human   `json:"human,omitzero"`     // a task for a person
	Call      *Call    `json:"call,omitzero"`      // an instance of another process
	Each      *Each    `json:"each,omitzero"`      // a step for each element of a list
	Scope     *Scope   `json:"scope,omitzero"`     // a part of the process that can be interrupted as a whole
	Throw     *Throw   `json:"throw,omitzero"`     // undoes what was done, or fails the instance
	End       bool     `json:"end,omitzero"`       // ends its token; with the last one the instance completes
	Terminate bool     `json:"terminate,omitzero"` // completes the scope or the instance, whatever else moves in it

	In       map[string]string `json:"in,omitzero"`       // what a step, task or call is given, by key, as expressions; none: the instance's input
	Out      map[string]string `json:"out,omitzero"`      // what is kept of a result, by key, as expressions over result; none: the result
	Attempts int               `json:"attempts,omitzero"` // of a step: the short form of Retry with nothing else
	Retry    *RetryPolicy      `json:"retry,omitzero"`    // of a step: how often it is tried; nil: as the policy of its type says
	Failure  Failure           `json:"failure,omitzero"`  // of a step, call or each, that no edge takes; none: as the definition says
	Undo     string            `json:"undo,omitzero"`     // of a step: the type of the run that undoes it
	On       []Boundary        `json:"on,omitzero"`       // what else may happen while the token is here
	Else     string            `json:"else,omitzero"`     // of choose and any: where to go if no condition is true
	To       string            `json:"to,omitzero"`       // the next node; none: the token ends here
}

// A Failure says what becomes of an instance when something in it fails for good and no edge takes the error. A
// handler that returns run.Permanent fails the instance, whatever this says.
type Failure string

// What a failure may do.
const (
	OpenIncident Failure = "incident" // the token stays where it is until an operator lets it try again; all else goes on
	FailInstance Failure = "fail"     // the instance undoes what it has done, and is FAILED
)

// A RetryPolicy says how often a step is tried. What it leaves out, the policy of the step's type says.
type RetryPolicy struct {
	Attempts int      `json:"attempts,omitzero"` // the most starts, 1 to 1000; 3 means the policy, too
	Base     Duration `json:"base,omitzero"`     // the pause before the second attempt; it doubles with each one
	Cap      Duration `json:"cap,omitzero"`      // the longest pause, jitter of up to a half aside
}

// A Way leads on if its condition is true.
type Way struct {
	If string `json:"if"`
	To string `json:"to"`
}

// A Boundary leads on when something happens while a token is at a node. It has exactly one of
// Error, After, Every and Message.
type Boundary struct {
	Error   string   `json:"error,omitzero"`   // it has failed for good with this code; * is any
	After   Duration `json:"after,omitzero"`   // it has been here for so long
	Every   Duration `json:"every,omitzero"`   // time and again; implies Keep
	Times   int      `json:"times,omitzero"`   // with Every: at most so often; 0: without limit
	Message string   `json:"message,omitzero"` // a message of this name has come
	Key     string   `json:"key,omitzero"`     // with Message: an expression, what it is correlated by
	Keep    bool     `json:"keep,omitzero"`    // the token stays; another one takes the edge
	To      string   `json:"to"`
}

// A Throw undoes, in reverse order, every step with an Undo that was completed in its own scope,
// and in scopes within that are over, and then goes on; or it fails with a code, which the error edge of a scope may take.
type Throw struct {
	Compensate bool   `json:"compensate,omitzero"`
	Error      string `json:"error,omitzero"`
}

// An Await waits for a message of a name and key, or for a signal.
type Await struct {
	Message string `json:"message,omitzero"`
	Key     string `json:"key,omitzero"` // an expression; required with Message
	Signal  string `json:"signal,omitzero"`
}

// A Human is a task for one of some people. All are free text to the engine.
type Human struct {
	Assignee string   `json:"assignee,omitzero"` // an expression
	Groups   []string `json:"groups,omitzero"`   // who may claim it
	Due      Duration `json:"due,omitzero"`      // for people's eyes; an After edge acts
}

// A Call starts an instance of another process, or of this one, and waits for its end.
type Call struct {
	Process string `json:"process"`
	Version int    `json:"version,omitzero"` // 0: the highest when it is called
	Undo    string `json:"undo,omitzero"`    // propagate: what the child has done is undone with what this process has; none, the default: it is kept
}

// propagate is what Undo of a Call says when the child is undone with its caller.
const propagate = "propagate"

// An Each does a step for each element of a list, which it takes down when it begins. Its
// result is the list of their results, in the order of the elements.
type Each struct {
	List  string `json:"list"`           // an expression; elements are item in In
	Do    string `json:"do"`             // the type of the runs
	Limit int    `json:"limit,omitzero"` // at most so many at once; 1: one after the other; 0: 100
	Need  int    `json:"need,omitzero"`  // so many are enough to go on; 0: all
	Rest  string `json:"rest,omitzero"`  // with Need, of those under way then: cancel; none: they go on, and nobody reads their results
}

// A Scope is a part of the process with a start of its own.
type Scope struct {
	Start string           `json:"start"`
	Nodes map[string]*Node `json:"nodes"`
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
	For   Duration
	Until string // an expression: a time in RFC 3339
}

// Parse reads a definition from JSON of at most 1 MiB. Keys that do not exist or come twice, and shapes that
// cannot be, make an *InvalidError, which then has all else that Compile would find, too. Whether a process
// that can be read makes sense is for Compile to say.
func Parse(text []byte) (*Definition, error) {
	if len(text) > maxText {
		return nil, &InvalidError{Findings: []Finding{{Code: "SIZE", Reason: fmt.Sprintf("the definition has more than %d bytes", maxText), Fix: "have it call processes of its own for parts of it"}}}
	}
	return parse(text)
}

// parse reads one that is deployed, too: Postgres writes blanks that nobody has asked for.
func parse(text []byte) (*Definition, error) {
	var d Definition
	if err := json.Unmarshal(text, &d, json.RejectUnknownMembers(true)); err != nil {
		return nil, mistakes(text)
	}
	d.zeros = zeros(text)
	return &d, nil
}

// zeros finds numbers that are 0, but for the version, which is checked by itself: how often, how
// many at once and so on are left out where nothing is to be said.
func zeros(text []byte) (paths []string) {
	in := jsontext.NewDecoder(bytes.NewReader(text))
	for {
		token, err := in.ReadToken()
		if err != nil {
			return paths // at the end: it has been read before
		}
		if token.Kind() != '0' || in.StackPointer() == "/version" {
			continue
		}
		if n, err := token.Float(); err == nil && n == 0 {
			paths = append(paths, string(in.StackPointer()))
		}
	}
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
			return &misfit{"JOIN", "it is no join", `use "all", "taken", {"need": 1} or {"need": 1, "rest": "cancel"}`}
		}
		*j = Join{Need: form.Need, Cancel: form.Rest == "cancel"}
		return nil
	}
	var word string
	if err := json.UnmarshalDecode(in, &word); err != nil {
		return err
	}
	if word != "all" && word != "taken" {
		return &misfit{"JOIN", fmt.Sprintf("%.40q is no join", word), `use "all", "taken" or {"need": 1}`}
	}
	*j = Join{Taken: word == "taken"}
	return nil
}

// MarshalJSONTo writes the shortest form.
func (w *Wait) MarshalJSONTo(out *jsontext.Encoder) error {
	if w.Until != "" {
		return json.MarshalEncode(out, map[string]string{"until": w.Until})
	}
	return out.WriteToken(jsontext.String(w.For.String()))
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
			return &misfit{"WAIT", "it is no wait", `use a duration, or {"until": expression}`}
		}
		*w = Wait{Until: form.Until}
		return nil
	}
	var text string
	if err := json.UnmarshalDecode(in, &text); err != nil {
		return err
	}
	d, err := parseDuration(text)
	*w = Wait{For: Duration(d)}
	return err
}

// JSON returns the canonical form: keys in order, no blanks, durations in one form.
func (d *Definition) JSON() ([]byte, error) {
	return json.Marshal(d, json.Deterministic(true))
}
