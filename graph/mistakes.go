package graph

import (
	"bytes"
	"cmp"
	"errors"
	"fmt"
	"slices"
	"strconv"
	"strings"

	"github.com/go-json-experiment/json"
	"github.com/go-json-experiment/json/jsontext"
)

// A decoder stops at the first value that does not fit. To report all such values, mend removes the value from the text
// and decodes the rest again, until nothing is left to complain about. The rest is then compiled, as if its author had
// written just that, so that the other errors are found too.

// maxMistakes is the maximum number of mistakes that are reported: the text is decoded once for each.
const maxMistakes = 100

// A misfit is the error of a value in a form that does not exist, such as a join "some".
type misfit struct{ code, reason, fix string }

func (m *misfit) Error() string { return m.reason + ": " + m.fix }

// mistakes returns an *InvalidError with all that is wrong with a text that cannot be decoded.
func mistakes(text []byte) error {
	c := &correction{}
	in := jsontext.NewDecoder(bytes.NewReader(text), jsontext.AllowDuplicateNames(true))
	c.tree = c.read(in)
	if _, err := in.ReadToken(); c.broken == nil && (err == nil || in.InputOffset() < int64(len(bytes.TrimRight(text, " \t\r\n")))) {
		c.broken = errors.New("there is something after the definition")
	}
	var d Definition
	if c.broken == nil {
		d = c.mend()
	}
	if c.broken != nil {
		c.found = append(c.found, Finding{Code: "JSON", Path: string(in.StackPointer()), Reason: strings.TrimPrefix(c.broken.Error(), "jsontext: "), Fix: "write it as JSON"})
	} else {
		d.zeros = zeros(text)
		_, found, _ := compileAll(&d, false)
		for _, f := range found {
			if !f.Note && !c.follows(f, &d) {
				c.found = append(c.found, f)
			}
		}
	}
	slices.SortStableFunc(c.found, func(a, b Finding) int { return cmp.Compare(a.Path, b.Path) })
	return &InvalidError{Process: d.Process, Version: d.Version, Findings: c.found}
}

// A correction is a text from which values are removed until it can be decoded.
type correction struct {
	tree   any // the text, as objects and lists of raw values
	found  []Finding
	misfit []string // JSON pointers of what was removed
	broken error    // why the text is not JSON; nil: it is
}

// read reads a value, and finds keys that appear twice. The last one counts.
func (c *correction) read(in *jsontext.Decoder) any {
	if kind := in.PeekKind(); kind != '{' && kind != '[' {
		value, err := in.ReadValue()
		if err != nil && c.broken == nil {
			c.broken = err
		}
		return value.Clone()
	}
	open, err := in.ReadToken()
	if err != nil {
		c.broken = err
		return nil
	}
	object, list := map[string]any{}, []any{}
	for c.broken == nil && in.PeekKind() != '}' && in.PeekKind() != ']' {
		if open.Kind() == '[' {
			list = append(list, c.read(in))
			continue
		}
		name, err := in.ReadToken()
		if err != nil {
			c.broken = err
			break
		}
		key, at := name.String(), string(in.StackPointer())
		if _, there := object[key]; there {
			c.found = append(c.found, Finding{Code: "DUPLICATE_KEY", Path: at, Reason: fmt.Sprintf("%.120q comes twice", key), Fix: "remove one of them"})
		}
		object[key] = c.read(in)
	}
	if c.broken == nil {
		_, c.broken = in.ReadToken()
	}
	if open.Kind() == '[' {
		return list
	}
	return object
}

// mend removes values that do not fit until the rest can be decoded, and returns that.
func (c *correction) mend() (d Definition) {
	for len(c.found) < maxMistakes {
		text, err := json.Marshal(c.tree)
		if err != nil {
			c.broken = err
			return d
		}
		d = Definition{}
		err = json.Unmarshal(text, &d, json.RejectUnknownMembers(true))
		var semantic *json.SemanticError
		switch {
		case err == nil:
			return d
		case !errors.As(err, &semantic):
			c.broken = err
			return d
		}
		at := string(semantic.JSONPointer)
		f := Finding{Code: "TYPE", Path: at, Reason: fmt.Sprintf("a JSON %v does not fit here", semantic.JSONKind), Fix: "see docs/processes.md for what does"}
		var form *misfit
		switch {
		case errors.Is(err, json.ErrUnknownName):
			f.Code, f.Reason, f.Fix = "UNKNOWN_KEY", "there is no such key", "remove it, or correct its name"
		case errors.As(err, &form):
			f.Code, f.Reason, f.Fix = form.code, form.reason, form.fix
		case semantic.Err != nil:
			f.Reason = fmt.Sprintf("a JSON %v does not fit here: %v", semantic.JSONKind, semantic.Err)
		}
		c.found = append(c.found, f)
		c.misfit = append(c.misfit, at)
		if !take(c.tree, semantic.JSONPointer, f.Code == "UNKNOWN_KEY") {
			return d
		}
	}
	return d
}

// take removes the value at a JSON pointer: with whole, its key too; otherwise it replaces the value by null. It
// reports whether that changed anything; if not, decoding again would find the same mistake.
func take(tree any, at jsontext.Pointer, whole bool) bool {
	parent := tree
	for token := range at.Parent().Tokens() {
		switch of := parent.(type) {
		case map[string]any:
			parent = of[token]
		case []any:
			k, err := strconv.Atoi(token)
			if err != nil || k >= len(of) {
				return false
			}
			parent = of[k]
		}
	}
	null, last := jsontext.Value("null"), at.LastToken()
	switch of := parent.(type) {
	case map[string]any:
		before, there := of[last]
		if text, raw := before.(jsontext.Value); !there || !whole && raw && string(text) == "null" {
			return false
		}
		if of[last] = null; whole {
			delete(of, last)
		}
		return true
	case []any:
		if k, err := strconv.Atoi(last); err == nil && k < len(of) {
			text, raw := of[k].(jsontext.Value)
			of[k] = null
			return !raw || string(text) != "null"
		}
	}
	return false
}

// follows reports whether a finding of the compiler may be only a consequence of what was removed.
func (c *correction) follows(f Finding, d *Definition) bool {
	for _, at := range c.misfit {
		switch {
		case at == f.Path || strings.HasPrefix(f.Path, at+"/"):
			return true
		case strings.HasPrefix(at, f.Path+"/") && slices.Contains([]string{"VERB", "HANDLER", "AWAIT", "RACE", "EACH", "CALL", "NO_CODE", "EMPTY_SCOPE"}, f.Code):
			return true
		case f.Code == "NO_START" && d.Nodes[d.Start] != nil || f.Code == "NO_START" && strings.HasPrefix(at, "/nodes/"+d.Start):
			return true
		}
	}
	return len(c.found) >= maxMistakes // the rest could not be looked at
}
