package main

import (
	"crypto/tls"
	"errors"
	"fmt"
	"maps"
	"net/netip"
	"net/url"
	"os"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/simple-workflow/simple-workflow/dispatcher"
	"github.com/simple-workflow/simple-workflow/dispatcher/lines"
	"github.com/simple-workflow/simple-workflow/dispatcher/program"
	"github.com/simple-workflow/simple-workflow/dispatcher/webhook"
	"github.com/simple-workflow/simple-workflow/internal/address"
	"github.com/simple-workflow/simple-workflow/internal/shipped"
)

// A sinkSpec is one element of DISPATCHER_SINKS.
type sinkSpec struct {
	name    string
	url     *url.URL // without options
	options url.Values
}

// A scheme opens sinks of one kind.
type scheme struct {
	form, about string
	options     []string // in addition to types and rate
	open        func(s *settings, spec sinkSpec) (dispatcher.Sink, error)
}

// kinds maps URL schemes to the sinks that this program knows. Files with a build tag add theirs.
var kinds = map[string]scheme{
	"stdout": {"stdout:", "a line of JSON each, to standard output", nil, func(_ *settings, spec sinkSpec) (dispatcher.Sink, error) {
		if spec.url.String() != "stdout:" {
			return nil, errors.New("nothing may follow stdout: but options")
		}
		return lines.New(os.Stdout), nil
	}},
	"http":  {"http://…", "a request each; see DISPATCHER_WEBHOOK_SECRET", webhookOptions, openWebhook},
	"https": {"https://…", "", append(webhookOptions, tlsOptions...), openWebhook},
	"exec":  {"exec:PROGRAM", "a program: a line in, an answer out", []string{"env"}, openProgram},
}

// quiet has the schemes whose sinks contact nobody when they are opened, and how long each waits for an answer.
var quiet = map[string]time.Duration{
	"stdout": 0, "http": shipped.WebhookTimeout, "https": shipped.WebhookTimeout, "exec": shipped.ProgramPatience,
}

var webhookOptions = slices.Clip([]string{"mode", "allow"})

// schemes returns the description of kinds for --help.
func schemes() string {
	var b strings.Builder
	for _, name := range slices.Sorted(maps.Keys(kinds)) {
		if k := kinds[name]; k.about != "" {
			fmt.Fprintf(&b, "    %-24s  %s\n", k.form, k.about)
		}
	}
	return b.String()
}

var typePrefix = regexp.MustCompile(`^[A-Za-z0-9_.:/-]{1,200}$`)

var sinkName = regexp.MustCompile(`^[a-z0-9_-]{1,40}$`)

// parseSinks parses DISPATCHER_SINKS. Its errors name the element by its position and quote nothing that may be secret.
func parseSinks(text string) (specs []sinkSpec, problems []string) {
	bad := func(k int, format string, args ...any) {
		problems = append(problems, fmt.Sprintf("element %d: ", k+1)+fmt.Sprintf(format, args...))
	}
	names := map[string]bool{}
	for k, element := range strings.Fields(text) {
		name, address, ok := strings.Cut(element, "=")
		if !ok || strings.ContainsAny(name, ":/") {
			name, address = "", element
		} else if !sinkName.MatchString(name) {
			bad(k, "%.60q cannot be a name; use a to z, 0 to 9, _ and -, at most 40 of them", name)
			continue
		}
		u, err := url.Parse(address)
		if err != nil || u.Scheme == "" {
			bad(k, "it is no URL; write it like crm=https://crm.example/events")
			continue
		}
		kind, ok := kinds[u.Scheme]
		if !ok {
			bad(k, "there is no sink for %s:; use one of %s", u.Scheme, strings.Join(slices.Sorted(maps.Keys(kinds)), ", "))
			continue
		}
		if name == "" {
			name = u.Scheme
		}
		if names[name] {
			bad(k, "a sink before it has the name %s, too; give each a name of its own, as in other=%s:…", name, u.Scheme)
		}
		names[name] = true
		options, err := url.ParseQuery(u.EscapedFragment())
		if err != nil {
			bad(k, "the options after # cannot be read; write them like #types=billing.&rate=100")
			continue
		}
		for option, values := range options {
			if option != "types" && option != "rate" && !slices.Contains(kind.options, option) {
				bad(k, "%s: has no option %.40q; it has %s", name, option, strings.Join(append([]string{"types", "rate"}, kind.options...), ", "))
			} else if len(values) > 1 {
				bad(k, "%s: the option %s is given twice", name, option)
			}
		}
		u.Fragment, u.RawFragment = "", ""
		specs = append(specs, sinkSpec{name, u, options})
	}
	if len(specs) == 0 && problems == nil {
		problems = append(problems, "it names no sink; write one like stdout: or crm=https://crm.example/events")
	}
	return specs, problems
}

// target opens a sink.
func (spec sinkSpec) target(s *settings) (t dispatcher.Target, err error) {
	t.Name = spec.name
	if types := spec.options.Get("types"); types != "" {
		t.Types = strings.Split(types, ",")
		for _, prefix := range t.Types { // with a prefix that matches nothing, its events would count as unwanted and be marked published
			if !typePrefix.MatchString(prefix) {
				return t, fmt.Errorf("%s: types: %.60q is no prefix of a type; use letters, digits and _ . : / - without wildcards, or leave the option away for all types", spec.name, prefix)
			}
		}
	}
	if text := spec.options.Get("rate"); text != "" {
		if t.Rate, err = strconv.ParseFloat(text, 64); err != nil || !(t.Rate >= 0.001 && t.Rate <= 1e9) {
			return t, fmt.Errorf("%s: rate: %.40q is no number of events a second; use 0.001 to 1000000000", spec.name, text)
		}
	}
	if t.Sink, err = kinds[spec.url.Scheme].open(s, spec); err != nil {
		return t, fmt.Errorf("%s: %w", spec.name, err)
	}
	return t, nil
}

// wire reads the options of sinks that have a connection: mode, and those of TLS.
func (spec sinkSpec) wire() (binary bool, secure *tls.Config, err error) {
	if binary, err = spec.binary(); err != nil {
		return false, nil, err
	}
	secure, err = spec.tls()
	return binary, secure, err
}

// binary reports whether the option mode asks for the binary mode.
func (spec sinkSpec) binary() (bool, error) {
	switch mode := spec.options.Get("mode"); mode {
	case "", "structured":
		return false, nil
	case "binary":
		return true, nil
	default:
		return false, fmt.Errorf("mode: %.40q; use structured or binary", mode)
	}
}

func openWebhook(s *settings, spec sinkSpec) (dispatcher.Sink, error) {
	binary, secure, err := spec.wire()
	if err != nil {
		return nil, err
	}
	var allow []netip.Prefix
	if text := spec.options.Get("allow"); text != "" {
		for _, part := range strings.Split(text, ",") {
			prefix, why := address.Network(part)
			if why != "" {
				return nil, fmt.Errorf("allow: %.60q is %s", part, why)
			}
			allow = append(allow, prefix)
		}
	}
	secret := s.WebhookSecret.Value
	if !s.WebhookSecret.Good() {
		secret = "" // reported already
	}
	return webhook.New(webhook.Config{
		URL: spec.url.String(), Binary: binary, Secret: secret, KeyID: s.WebhookKeyID.Value, Allow: allow, TLS: secure,
	})
}

func openProgram(_ *settings, spec sinkSpec) (dispatcher.Sink, error) {
	if spec.url.Host != "" || spec.url.RawQuery != "" {
		return nil, errors.New("write it like exec:/usr/local/bin/forward; arguments cannot be given")
	}
	path, err := url.PathUnescape(spec.url.Opaque)
	if err != nil {
		return nil, errors.New("the path cannot be read; write % as %25")
	}
	c := program.Config{Path: path + spec.url.Path}
	if names := spec.options.Get("env"); names != "" {
		for _, name := range strings.Split(names, ",") {
			value, ok := os.LookupEnv(name)
			if !ok {
				return nil, fmt.Errorf("env: there is no variable %.60q; set it, or take it out", name)
			}
			c.Env = append(c.Env, name+"="+value)
		}
	}
	return program.New(c)
}
