// Package env reads settings from environment variables into a struct, and reports all mistakes at once.
//
//	type config struct {
//		Lease env.Duration `envconfig:"WORKER_LEASE" default:"30s" min:"2s" max:"24h" help:"…"`
//	}
//	var c config
//	report := env.Load(&c, "WORKER_")
//
// These tags are known:
//
//	default     used if the variable is unset or empty
//	min, max    bounds of a Duration or Int
//	none        what the word none means; without the tag the word is refused
//	zero        what 0 means, if it is allowed below min
//	oneof       the allowed words
//	empty       "refuse": an empty value is a mistake
//	secret      the value is never shown
//	because     added to the message about a value out of bounds
//	bounds      text for people in place of the bounds
//	otherwise   text for people in place of the default
//	help        text for people
package env

import (
	"cmp"
	"fmt"
	"io"
	"os"
	"reflect"
	"strings"
	"time"

	"github.com/kelseyhightower/envconfig"
)

type (
	// Duration is a setting such as 30s.
	Duration = Setting[time.Duration]
	// Int is a setting such as 100.
	Int = Setting[int]
	// Bool is a setting of true or false.
	Bool = Setting[bool]
	// String is a setting of any text.
	String = Setting[string]
	// List is a setting of texts separated by commas.
	List = Setting[[]string]
)

// None is the Value of a Duration that was given as the word none.
const None time.Duration = -1

// A Setting is one variable. Its Value is valid only if Load reported no problem with it.
type Setting[T any] struct {
	Value T
	variable
}

// A variable is the part of a Setting that does not depend on its type.
type variable struct {
	name   string
	text   string // as found, or the default, trimmed
	preset string // the program's default, which replaces the tag's
	show   string // shown instead of text, unless empty
	secret bool
	bad    bool
}

// Decode stores the text of the variable. It never fails, so that Load sees all variables.
func (v *variable) Decode(text string) error {
	v.text = strings.TrimSpace(text)
	return nil
}

// Name returns the name of the variable.
func (v *variable) Name() string { return v.name }

// Preset replaces the default of the variable's tag. Call it before Load.
func (v *variable) Preset(text string) { v.preset = text }

// Good reports whether no problem of the variable was reported so far.
func (v *variable) Good() bool { return !v.bad }

// Show makes messages show text instead of the value, part of which is secret.
func (v *variable) Show(text string) { v.show = text }

func (v *variable) self() *variable { return v }

// A Named is a pointer to a Setting of any type.
type Named interface{ self() *variable }

// A Report lists findings about settings, one sentence each.
type Report struct {
	Problems []string // the program must not start
	Warnings []string // the program may start
	Notes    []string // nothing is wrong
}

// Refuse adds a problem of a setting. fix says what would be right.
func (r *Report) Refuse(n Named, fix string, args ...any) {
	v := n.self()
	v.bad = true
	r.Problems = append(r.Problems, v.shown()+": "+fmt.Sprintf(fix, args...))
}

// Warn adds a warning about a setting.
func (r *Report) Warn(n Named, text string, args ...any) {
	r.Warnings = append(r.Warnings, n.self().shown()+": "+fmt.Sprintf(text, args...))
}

// Note adds something worth knowing about a setting.
func (r *Report) Note(n Named, text string, args ...any) {
	r.Notes = append(r.Notes, n.self().shown()+": "+fmt.Sprintf(text, args...))
}

// Refuse prints how a program or command was called or set up wrongly, one line for each problem. All programs
// use this form.
func Refuse(w io.Writer, command string, problems []string) {
	program, _, _ := strings.Cut(command, " ")
	for _, problem := range problems {
		fmt.Fprintf(w, "%s: %s\n", program, problem)
	}
	fmt.Fprintf(w, "See %s --help.\n", command)
}

// Load fills spec, a pointer to a struct of Settings, from the environment. It warns of variables that start
// with prefix and are not in spec.
func Load(spec any, prefix string) *Report {
	report := &Report{}
	if err := envconfig.Process("", spec); err != nil {
		panic(err) // Decode never fails, so spec is of the wrong type
	}
	fields := reflect.ValueOf(spec).Elem()
	known := map[string]bool{}
	for i := range fields.NumField() {
		tag := fields.Type().Field(i).Tag
		setting := fields.Field(i).Addr().Interface().(parser)
		v := setting.self()
		v.name, v.secret = tag.Get("envconfig"), tag.Get("secret") != ""
		known[v.name] = true
		otherwise := cmp.Or(v.preset, tag.Get("default"))
		_, set := os.LookupEnv(v.name)
		if set && v.text == "" && tag.Get("empty") == "refuse" {
			report.Refuse(setting, "it is set but empty; give it a value, or unset it for %s", otherwise)
			continue
		}
		if !set || v.text == "" {
			v.text = otherwise
		}
		if v.text == "" {
			continue
		}
		if fix := setting.parse(tag); fix != "" {
			report.Refuse(setting, "%s", fix)
		}
	}
	report.Warnings = append(report.Warnings, strangers(os.Environ(), prefix, known)...)
	return report
}

// shown returns the variable with its value for messages: without secrets, and cut to 120 characters.
func (v *variable) shown() string {
	switch {
	case v.text == "":
		return v.name
	case v.secret:
		return v.name + "=(hidden)"
	case v.show != "":
		return v.name + "=" + Quote(v.show)
	}
	return v.name + "=" + Quote(v.text)
}

// Quote returns text quoted for a message, cut to 120 characters.
func Quote(text string) string {
	if short := []rune(text); len(short) > 120 {
		text = string(short[:120]) + "…"
	}
	return fmt.Sprintf("%q", text)
}
