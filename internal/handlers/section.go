package handlers

import (
	"slices"
	"strconv"
	"strings"
	"time"

	"go.yaml.in/yaml/v3"
)

// A section is the mapping of one pattern in the file. Its methods record mistakes and then return a zero
// value.
type section struct {
	*parser
	pattern  string
	node     *yaml.Node
	settings map[string]*yaml.Node
}

// A pair is one member of a mapping.
type pair struct {
	name  string
	value string
	node  *yaml.Node
}

// bad records what is wrong with a setting.
func (s *section) bad(name, format string, args ...any) {
	s.badAt(s.settings[name], name, format, args...)
}

func (s *section) badAt(n *yaml.Node, name, format string, args ...any) {
	s.problem(n, "%s: %s: "+format, append([]any{s.pattern, name}, args...)...)
}

// open finds the settings. It reports false if the section is not a mapping.
func (s *section) open() bool {
	s.settings = map[string]*yaml.Node{}
	if s.node.Kind != yaml.MappingNode {
		s.problem(s.node, "%s: not a mapping; write {program: /path} or {url: https://…}", s.pattern)
		return false
	}
	for i := 0; i < len(s.node.Content); i += 2 {
		key := s.node.Content[i]
		if s.settings[key.Value] != nil {
			s.badAt(key, quote(key.Value), "written twice; remove one")
		}
		s.settings[key.Value] = s.node.Content[i+1]
	}
	return true
}

// refuse records each setting that is not among the known ones.
func (s *section) refuse(known []string) {
	for i := 0; i < len(s.node.Content); i += 2 {
		key := s.node.Content[i]
		switch {
		case slices.Contains(known, key.Value):
		case slices.Contains(webKeys, key.Value):
			s.badAt(key, key.Value, "goes with url, not with program; remove it")
		case slices.Contains(programKeys, key.Value):
			s.badAt(key, key.Value, "goes with program, not with url; remove it")
		default:
			s.badAt(key, quote(key.Value), "unknown key; there are %s", strings.Join(known, ", "))
		}
	}
}

func (s *section) is(name, value string) bool {
	n := s.settings[name]
	return n != nil && n.Kind == yaml.ScalarNode && n.Value == value
}

func (s *section) text(name string) string {
	n := s.settings[name]
	if n == nil {
		return ""
	}
	return s.scalar(n, name)
}

// scalar returns a value as written, so that 010 and yes stay 010 and yes.
func (s *section) scalar(n *yaml.Node, name string) string {
	switch {
	case n.Kind == yaml.AliasNode:
		s.badAt(n, name, "an alias; write the value itself")
	case n.Kind != yaml.ScalarNode:
		s.badAt(n, name, "not a single value; write one")
	case n.Value == "" || n.ShortTag() == "!!null":
		s.badAt(n, name, "empty; give it a value or remove it")
	case strings.ContainsRune(n.Value, 0):
		s.badAt(n, name, "contains a NUL character; remove it")
	default:
		return n.Value
	}
	return ""
}

func (s *section) duration(name string) time.Duration {
	text := s.text(name)
	if text == "" {
		return 0
	}
	d, err := time.ParseDuration(text)
	if _, digits := strconv.Atoi(text); err != nil && digits == nil {
		s.bad(name, "%s has no unit; write %ss if seconds are meant", quote(text), text)
		return 0
	}
	if err != nil {
		s.bad(name, "%s is not a duration; write it as 500ms, 30s, 5m or 1h30m", quote(text))
		return 0
	}
	if d <= 0 {
		s.bad(name, "%s is not above 0; write a longer one, or remove it for the default", quote(text))
		return 0
	}
	return d
}

// number returns a whole number from 1 to most, or otherwise if the setting is missing or wrong.
func (s *section) number(name string, most, otherwise int) int {
	text := s.text(name)
	if text == "" {
		return otherwise
	}
	n, err := strconv.Atoi(text)
	if err != nil || n < 1 || n > most {
		s.bad(name, "%s is not a whole number from 1 to %d; write one", quote(text), most)
		return otherwise
	}
	return n
}

// list returns the members of a list.
func (s *section) list(name string) []pair {
	n := s.settings[name]
	if n == nil {
		return nil
	}
	if n.Kind != yaml.SequenceNode {
		s.bad(name, "not a list; write [one, two]")
		return nil
	}
	var all []pair
	for i, item := range n.Content {
		at := name + "[" + strconv.Itoa(i) + "]"
		if text := s.scalar(item, at); text != "" {
			all = append(all, pair{name: at, value: text, node: item})
		}
	}
	return all
}

// table returns the members of a mapping of values.
func (s *section) table(name string) []pair {
	n := s.settings[name]
	if n == nil {
		return nil
	}
	if n.Kind != yaml.MappingNode {
		s.bad(name, "not a mapping; write {Name: value}")
		return nil
	}
	var all []pair
	for i := 0; i < len(n.Content); i += 2 {
		key, value := n.Content[i], n.Content[i+1]
		if text := s.scalar(value, name+" "+quote(key.Value)); text != "" {
			all = append(all, pair{name: key.Value, value: text, node: key})
		}
	}
	return all
}
