package handlers

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"os"
	"regexp"
	"slices"
	"strings"

	"go.yaml.in/yaml/v3"

	"github.com/simple-workflow/simple-workflow/internal/shipped"
	"github.com/simple-workflow/simple-workflow/run"
	"github.com/simple-workflow/simple-workflow/worker"
)

var (
	commonKeys  = []string{"timeout", "lease", "concurrency", "max_attempts", "backoff_base", "backoff_cap", "max_result_bytes"}
	webKeys     = []string{"url", "allow", "headers"}
	programKeys = []string{"program", "args", "env", "dir"}

	validPattern = regexp.MustCompile(`^([a-z0-9_-]+\.)+([a-z0-9_-]+)?$`)
)

const (
	maxPattern  = 200
	maxAttempts = 1000
)

// A parser reads one handlers file and collects what is wrong with it.
type parser struct {
	file     string
	lookup   func(name string) (value string, ok bool) // the environment
	problems []error
}

func parse(file string, data []byte) ([]Binding, error) {
	p := &parser{file: file, lookup: os.LookupEnv}
	root, err := document(data)
	if err != nil {
		return nil, fmt.Errorf("%s: %w", file, err)
	}
	bindings := p.bindings(root)
	if len(p.problems) > 0 {
		return nil, errors.Join(p.problems...)
	}
	return bindings, nil
}

// document returns the root of the only YAML document in data.
func document(data []byte) (*yaml.Node, error) {
	decoder := yaml.NewDecoder(bytes.NewReader(data))
	var doc, more yaml.Node
	if err := decoder.Decode(&doc); errors.Is(err, io.EOF) {
		return nil, errors.New("empty; write a line such as media.: {program: /opt/handlers/thumb.py}")
	} else if err != nil {
		return nil, err
	}
	if err := decoder.Decode(&more); !errors.Is(err, io.EOF) {
		return nil, errors.New("more than one YAML document; remove the --- lines")
	}
	root := doc.Content[0]
	if root.Kind != yaml.MappingNode || len(root.Content) == 0 {
		return nil, errors.New("not a mapping; write a line such as media.: {program: /opt/handlers/thumb.py}")
	}
	return root, nil
}

func (p *parser) bindings(root *yaml.Node) []Binding {
	var all []Binding
	seen := map[string]bool{}
	for i := 0; i < len(root.Content); i += 2 {
		key, value := root.Content[i], root.Content[i+1]
		pattern := key.Value
		switch {
		case key.Kind != yaml.ScalarNode || !validPattern.MatchString(pattern):
			p.problem(key, "%s: not a type such as billing.charge.v1 nor a prefix such as billing.%s", quote(pattern), dotHint(pattern))
			continue
		case len(pattern) > maxPattern:
			p.problem(key, "%s: %d characters; a type has at most %d", quote(pattern), len(pattern), maxPattern)
			continue
		case seen[pattern]:
			p.problem(key, "%s: written twice; remove one", quote(pattern))
			continue
		}
		seen[pattern] = true
		all = append(all, p.binding(pattern, key, value))
	}
	return all
}

func dotHint(pattern string) string {
	if validPattern.MatchString(pattern + ".") {
		return fmt.Sprintf("; write %q for all types under it", pattern+".")
	}
	return ""
}

func (p *parser) binding(pattern string, key, value *yaml.Node) Binding {
	s := &section{parser: p, pattern: pattern, node: value}
	b := Binding{Pattern: pattern, where: fmt.Sprintf("%s:%d", p.file, key.Line)}
	if !s.open() {
		return b
	}
	_, hasURL := s.settings["url"]
	_, hasProgram := s.settings["program"]
	switch {
	case hasURL && hasProgram:
		s.refuse(append(slices.Concat(commonKeys, webKeys), programKeys...))
		s.bad("program", "url is there, too; keep one of the two")
	case hasURL:
		s.refuse(slices.Concat(webKeys, commonKeys))
		b.target = s.web()
	case hasProgram:
		s.refuse(slices.Concat(programKeys, commonKeys))
		b.target = s.program()
	default:
		s.refuse(append(slices.Concat(commonKeys, webKeys), programKeys...))
		p.problem(value, "%s: neither url nor program; add the one to call", pattern)
	}
	b.Options = s.options()
	return b
}

func (s *section) options() worker.Options {
	o := worker.Options{
		Lease:       s.duration("lease"),
		Concurrency: s.number("concurrency", shipped.MaxConcurrency, 0),
		MaxAttempts: s.number("max_attempts", maxAttempts, 0),
		Backoff:     run.Backoff{Base: s.duration("backoff_base"), Cap: s.duration("backoff_cap")},
	}
	if s.is("timeout", "none") {
		o.Timeout = worker.NoTimeout
	} else {
		o.Timeout = s.duration("timeout")
	}
	if o.Lease != 0 && (o.Lease < shipped.MinLease || o.Lease > shipped.MaxLease) {
		s.bad("lease", "%s is outside %s to %s; choose one between", o.Lease, shipped.MinLease, shipped.MaxLease)
	}
	limit := o.Backoff.Cap
	if limit == 0 {
		limit = shipped.BackoffCap
	}
	if o.Backoff.Base > limit {
		s.bad("backoff_base", "%s is above backoff_cap, which is %s; lower it or raise backoff_cap", o.Backoff.Base, limit)
	}
	return o
}

func (p *parser) problem(n *yaml.Node, format string, args ...any) {
	p.problems = append(p.problems, fmt.Errorf("%s:%d: %s", p.file, n.Line, fmt.Sprintf(format, args...)))
}

// quote returns s for an error message: quoted and not endless.
func quote(s string) string {
	const most = 120
	if len(s) > most {
		s = strings.ToValidUTF8(s[:most], "") + "…"
	}
	return fmt.Sprintf("%q", s)
}
