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

// Reading stops at the first thing that does not fit. To tell all of them, what does not fit is taken out of
// the text, which is then read again; what is left is checked as if its author had written it.

// maxMistakes is how many are told: for each of them the text is read once more.
const maxMistakes = 100

// A misfit is a value that is written in a form which does not exist.
type misfit struct{ code, reason, fix string }

func (m *misfit) Error() string { return m.reason + ": " + m.fix }

// mistakes finds everything that is wrong with a text that cannot be read.
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

// A correction is a text on its way to one that can be read.
type correction struct {
	tree   any // objects and lists of raw values
	found  []Finding
	misfit []string // where something was taken out
	broken error    // it is no JSON
}

// read reads a value, and finds names that come twice: the last one counts.
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

// mend takes out what does not fit until the rest can be read.
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

// take takes out what stands at a place: a key with its value, or the value alone.
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

// follows reports whether a finding comes from what was taken out.
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
