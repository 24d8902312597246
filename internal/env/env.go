// Package env reads settings from environment variables into a struct, and finds all that
// is wrong with them at once.
//
//	type config struct {
//		Lease env.Duration `envconfig:"WORKER_LEASE" default:"30s" min:"2s" max:"24h" help:"…"`
//	}
//	var c config
//	report := env.Load(&c, "WORKER_")
//
// Tags: default, used also for an empty value; min and max; none, the meaning of the word
// none; zero, the meaning of 0; oneof, the words allowed; empty:"refuse"; secret, never
// shown; because, added to what is said about bounds;
// bounds and otherwise, text for people in place of bounds and default; help.
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

// A Setting is one variable. Its Value is of use only if Load reported nothing about it.
type Setting[T any] struct {
	Value T
	variable
}

// A variable is a Setting without its type.
type variable struct {
	name   string
	text   string // as found, or the default; trimmed
	preset string // the program's default, in place of the tag's
	show   string // in place of text, if not empty
	secret bool
	bad    bool
}

// Decode takes the text of the variable. It never fails, so that Load sees all of them.
func (v *variable) Decode(text string) error {
	v.text = strings.TrimSpace(text)
	return nil
}

// Name returns the name of the variable.
func (v *variable) Name() string { return v.name }

// Preset gives the variable another default than its tag does. It is called before Load.
func (v *variable) Preset(text string) { v.preset = text }

// Good reports whether nothing is wrong with the variable, as far as is known.
func (v *variable) Good() bool { return !v.bad }

// Show has messages contain text in place of the value, which is secret in part.
func (v *variable) Show(text string) { v.show = text }

func (v *variable) self() *variable { return v }

// A Named is a pointer to a Setting of any type.
type Named interface{ self() *variable }

// A Report lists what is wrong with settings, a sentence each.
type Report struct {
	Problems []string // the program must not start
	Warnings []string // it may
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

// Note adds what is good to know about a setting.
func (r *Report) Note(n Named, text string, args ...any) {
	r.Notes = append(r.Notes, n.self().shown()+": "+fmt.Sprintf(text, args...))
}

// Refuse tells how a program or command was called or set up wrongly, a line for each problem, in the one form that all programs have.
func Refuse(w io.Writer, command string, problems []string) {
	program, _, _ := strings.Cut(command, " ")
	for _, problem := range problems {
		fmt.Fprintf(w, "%s: %s\n", program, problem)
	}
	fmt.Fprintf(w, "See %s --help.\n", command)
}

// Load fills spec, a pointer to a struct of Settings, from the environment. Variables that
// start with prefix but that spec does not have are warned about.
func Load(spec any, prefix string) *Report {
	report := &Report{}
	if err := envconfig.Process("", spec); err != nil {
		panic(err) // Decode never fails, so spec is not what it should be
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

// shown returns the variable with its value, cut, without secrets.
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

// Quote returns text for a message: quoted, and cut to 120 characters.
func Quote(text string) string {
	if short := []rune(text); len(short) > 120 {
		text = string(short[:120]) + "…"
	}
	return fmt.Sprintf("%q", text)
}
