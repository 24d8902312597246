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
// it. A deployed definition never changes; an edited one is deployed as a higher version.
type Definition struct {
	Process string           `json:"process"`          // its name, such as order
	Version int              `json:"version"`          // from 1
	Lang    string           `json:"lang,omitzero"`    // the language of its expressions: cel, which is also the default
	Start   string           `json:"start"`            // the node where an instance starts
	Output  string           `json:"output,omitzero"`  // an expression, the output of an instance that completes; empty: null
	Failure Failure          `json:"failure,omitzero"` // what a failure does that no error edge takes; empty: OpenIncident
	Nodes   map[string]*Node `json:"nodes"`

	zeros []string // JSON pointers of the numbers that are 0 in the text, see zeros
}

// A Node has exactly one verb, the key that says what the node is. The verbs are Do to Terminate; the other keys refine
// it.
type Node struct {
	Do        string   `json:"do,omitzero"`        // a step: the type of the run that does it
	Choose    []Way    `json:"choose,omitzero"`    // exclusive gateway: the first way whose condition is true, or Else
	Any       []Way    `json:"any,omitzero"`       // inclusive gateway: all ways whose conditions are true, at once, or Else
	Fork      []string `json:"fork,omitzero"`      // parallel gateway: all of these nodes, at once
	Join      *Join    `json:"join,omitzero"`      // where branches meet
	Wait      *Wait    `json:"wait,omitzero"`      // waits for a time
	Await     *Await   `json:"await,omitzero"`     // waits for a message or a signal
	Race      []string `json:"race,omitzero"`      // event-based gateway: waits for the first of several wait and await nodes
	Human     *Human   `json:"human,omitzero"`     // a task for a person
	Call      *Call    `json:"call,omitzero"`      // starts an instance of another process and waits for its end
	Each      *Each    `json:"each,omitzero"`      // a step for each element of a list
	Scope     *Scope   `json:"scope,omitzero"`     // a part of the process that can be interrupted as a whole
	Throw     *Throw   `json:"throw,omitzero"`     // undoes what was done, or raises an error
	End       bool     `json:"end,omitzero"`       // ends its token; the instance completes with its last token
	Terminate bool     `json:"terminate,omitzero"` // completes its scope, or the instance, and ends all other tokens there

	In       map[string]string `json:"in,omitzero"`       // what a step, task or call is given: expressions by key; empty: the instance's input, in an each the element
	Out      map[string]string `json:"out,omitzero"`      // what is kept of the result: expressions over result, by key; empty: all of it
	Attempts int               `json:"attempts,omitzero"` // of a step or each: short for a Retry with Attempts alone
	Retry    *RetryPolicy      `json:"retry,omitzero"`    // of a step or each: how often it is tried; nil: as the policy of its type says
	Failure  Failure           `json:"failure,omitzero"`  // of a step, call or each: what a failure does that no error edge takes; empty: as the definition says
	Undo     string            `json:"undo,omitzero"`     // of a step: the type of the run that undoes it
	On       []Boundary        `json:"on,omitzero"`       // boundary events: what else may happen while the token is here
	Else     string            `json:"else,omitzero"`     // of choose and any: where to go if no condition is true
	To       string            `json:"to,omitzero"`       // the next node; empty: the token ends here
}

// A Failure says what becomes of an instance when something in it fails for good and no error edge takes the error. An
// error that a handler marks with run.Permanent always fails the instance.
type Failure string

// The values of Failure.
const (
	OpenIncident Failure = "incident" // the token stays where it is until an operator retries it; all other tokens continue
	FailInstance Failure = "fail"     // the instance undoes what it has done and becomes FAILED
)

// A RetryPolicy says how often a step is tried. A field that is zero is taken from the policy of the step's type.
type RetryPolicy struct {
	Attempts int      `json:"attempts,omitzero"` // the maximum number of starts, 1 to 1000; 3, the default of runs, also means the policy's
	Base     Duration `json:"base,omitzero"`     // the pause before the second attempt; later ones grow as the policy says, by default to twice the last one
	Cap      Duration `json:"cap,omitzero"`      // the longest pause; jitter adds up to half of a pause
}

// A Way is an edge that is taken if its condition, an expression, is true.
type Way struct {
	If string `json:"if"`
	To string `json:"to"`
}

// A Boundary is a boundary event: an edge that is taken when something happens while a token is at a node. It has
// exactly one of Error, After, Every and Message.
type Boundary struct {
	Error   string   `json:"error,omitzero"`   // the node has failed for good with this code; * is any code
	After   Duration `json:"after,omitzero"`   // the token has been here for this long
	Every   Duration `json:"every,omitzero"`   // repeatedly, at this interval; implies Keep
	Times   int      `json:"times,omitzero"`   // with Every: how often it happens at most; 0: no limit
	Message string   `json:"message,omitzero"` // a message of this name has arrived
	Key     string   `json:"key,omitzero"`     // with Message: an expression, the key that the message is correlated by
	Keep    bool     `json:"keep,omitzero"`    // the token stays and another one takes the edge (non-interrupting)
	To      string   `json:"to"`
}

// A Throw has exactly one of Compensate and Error. With Compensate it undoes, in reverse order, each completed step
// with an Undo in its own scope and in the finished scopes within it, and then leads on. With Error it fails with this
// code, which the error edge of a scope around it may take.
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

// A Human is a task for a person. The engine stores its fields for people and programs to read, and does not act on them.
type Human struct {
	Assignee string   `json:"assignee,omitzero"` // an expression
	Groups   []string `json:"groups,omitzero"`   // who may claim it
	Due      Duration `json:"due,omitzero"`      // nothing happens when it is over; use a Boundary with After to act
}

// A Call starts an instance of another process, or of this one, and waits for its end.
type Call struct {
	Process string `json:"process"`
	Version int    `json:"version,omitzero"` // 0: the highest that is deployed at the time of the call
	Undo    string `json:"undo,omitzero"`    // propagate: what the child has done is undone with what its caller has done; none, the default: it is kept
}

// propagate is the value of Call.Undo with which the child is undone with its caller.
const propagate = "propagate"

// An Each does a step for each element of a list. It evaluates and stores the list when a token enters, so later
// changes of facts do not change it. Its result is the list of the steps' results, in the order of the elements.
type Each struct {
	List  string `json:"list"`           // an expression; Node.In reads an element as item
	Do    string `json:"do"`             // the type of the runs
	Limit int    `json:"limit,omitzero"` // the maximum number of elements under way at once; 1: one after the other; 0: 100
	Need  int    `json:"need,omitzero"`  // the number of successes after which the token leads on; 0: all
	Rest  string `json:"rest,omitzero"`  // with Need, what happens to the elements then under way; cancel: they end; empty: they continue, and their results are ignored
}

// A Scope is a part of the process with a start of its own.
type Scope struct {
	Start string           `json:"start"`
	Nodes map[string]*Node `json:"nodes"`
}

// A Join waits for tokens. The zero Join waits for one over each of the edges that lead to it. In JSON a Join is "all",
// "taken", or an object with need and, optionally, rest.
type Join struct {
	Taken  bool // waits until no other token can still arrive
	Need   int  // waits for this many tokens, over any of the edges; later ones are absorbed
	Cancel bool // with Need: the branches that are no longer needed are ended
}

// A Wait lasts for a duration, or until a point in time. In JSON it is a duration such as PT5M or 5m, or an
// object with until.
type Wait struct {
	For   Duration
	Until string // an expression that gives a time in RFC 3339
}

// Parse reads a definition from JSON of at most 1 MiB. Its error is an *InvalidError: the text is too long or is not
// JSON, a key is unknown or appears twice, or a value has the wrong form. Unless the text is too long or is not JSON,
// the error also lists all errors that Compile would find, so that an author sees all mistakes at once. Parse does not
// check whether a definition that it can read makes sense. Compile does.
func Parse(text []byte) (*Definition, error) {
	if len(text) > maxText {
		return nil, &InvalidError{Findings: []Finding{{Code: "SIZE", Reason: fmt.Sprintf("the definition has more than %d bytes", maxText), Fix: "move parts into processes of their own and call them"}}}
	}
	return parse(text)
}

// parse is Parse without the limit. It also reads deployed definitions, which may exceed the limit because Postgres adds
// blanks to jsonb.
func parse(text []byte) (*Definition, error) {
	var d Definition
	if err := json.Unmarshal(text, &d, json.RejectUnknownMembers(true)); err != nil {
		return nil, mistakes(text)
	}
	d.zeros = zeros(text)
	return &d, nil
}

// zeros returns the JSON pointers of all numbers that are 0, except /version, which header checks. In a Definition a
// number that is 0 means that the key was left out. So without this list an author's 0 would silently mean the default.
func zeros(text []byte) (paths []string) {
	in := jsontext.NewDecoder(bytes.NewReader(text))
	for {
		token, err := in.ReadToken()
		if err != nil {
			return paths // the end of the text: it was parsed before, so there is no other error
		}
		if token.Kind() != '0' || in.StackPointer() == "/version" {
			continue
		}
		if n, err := token.Float(); err == nil && n == 0 {
			paths = append(paths, string(in.StackPointer()))
		}
	}
}

// inWords returns the message of a decoding error: where the value is, and what is wrong with it.
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

// JSON returns the canonical form: keys in order, no blanks, durations as Duration.String writes them.
func (d *Definition) JSON() ([]byte, error) {
	return json.Marshal(d, json.Deterministic(true))
}
