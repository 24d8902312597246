package handlers

import (
	"net"
	"net/http"
	"net/url"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/simple-workflow/simple-workflow/internal/address"
	"github.com/simple-workflow/simple-workflow/internal/jsondoc"
)

// A web target is a URL to post to.
type web struct {
	url      *url.URL // without user and password; those are in header
	shown    string   // the URL for people: no user, password or query
	header   http.Header
	allow    allowList
	limit    int // of the answer, in bytes
	secrets  secrets
	resolver *net.Resolver // nil: the system's
	patience time.Duration // with the body of a refusal
}

var validHeader = regexp.MustCompile("^[A-Za-z0-9!#$%&'*+.^_`|~-]+$")

// Headers that the handler or net/http sets.
var ownHeaders = []string{
	"Content-Type", "Content-Length", "Transfer-Encoding", "Connection", "Host", "Trailer", "Upgrade", "Expect", "Te",
	"Idempotency-Key", "Traceparent",
	"Workflow-Run-Id", "Workflow-Attempt", "Workflow-Max-Attempts", "Workflow-Lease-No", "Workflow-Type", "Workflow-Tenant",
	"Workflow-Token", "Workflow-Instance", "Workflow-Business-Key", "Workflow-Node",
}

func (w *web) String() string { return "POST " + w.shown }

func (s *section) web() *web {
	w := &web{
		header:   http.Header{},
		limit:    s.number("max_result_bytes", jsondoc.MaxResult, jsondoc.MaxResult),
		patience: excerptTime,
	}
	s.headers(w)
	s.url(w)
	if w.url != nil {
		s.allow(w)
	}
	return w
}

func (s *section) headers(w *web) {
	for _, h := range s.table("headers") {
		at := "headers " + quote(h.name)
		name := http.CanonicalHeaderKey(h.name)
		value, secret, ok := s.resolve(h, at)
		switch {
		case !ok:
		case !validHeader.MatchString(h.name):
			s.badAt(h.node, at, "not a header name; use letters, digits and -")
		case slices.Contains(ownHeaders, name):
			s.badAt(h.node, at, "set by the worker; remove it")
		case w.header[name] != nil:
			s.badAt(h.node, at, "written twice; remove one")
		case !headerSafe(value):
			s.badAt(h.node, at, "its value has characters that a header cannot carry; use printable ASCII, no space at the ends")
		default:
			w.header.Set(name, value)
			if secret {
				w.secrets.add(value)
				// "Bearer xyz": the xyz may turn up alone.
				_, token, _ := strings.Cut(value, " ")
				w.secrets.add(token)
			}
		}
	}
}

// resolve replaces env:NAME by the variable's value, which is a secret then.
func (s *section) resolve(h pair, at string) (value string, secret, ok bool) {
	name, fromEnv := strings.CutPrefix(h.value, "env:")
	if !fromEnv {
		return h.value, false, true
	}
	value, _ = s.lookup(name)
	if value == "" {
		s.badAt(h.node, at, "the environment variable %s is not set; set it for the worker", quote(name))
		return "", true, false
	}
	return value, true, true
}

// headerSafe reports whether an HTTP header carries value unchanged.
func headerSafe(value string) bool {
	return value == strings.Trim(value, " ") &&
		!strings.ContainsFunc(value, func(r rune) bool { return r < ' ' || r > '~' })
}

func (s *section) url(w *web) {
	raw := s.text("url")
	if raw == "" {
		return
	}
	u, err := url.Parse(raw)
	if err != nil {
		// The error quotes the URL, password included.
		s.bad("url", "%s cannot be parsed; write https://host/path, special characters percent-encoded", quote(maskURL(raw)))
		return
	}
	host, why := address.Host(u.Hostname())
	_, notPort := address.Port(u.Port())
	switch {
	case u.Scheme != "http" && u.Scheme != "https":
		s.bad("url", "%s begins with neither http:// nor https://; use one of the two", quote(maskURL(raw)))
	case u.Opaque != "" || u.Host == "":
		s.bad("url", "%s has no host; write https://host/path", quote(maskURL(raw)))
	case why != "":
		s.bad("url", "%s: its host is %s", quote(maskURL(raw)), why)
	case u.Port() != "" && notPort != "", strings.HasSuffix(u.Host, ":"):
		s.bad("url", "%s: its port is not a number from 1 to 65535; correct or remove it", quote(maskURL(raw)))
	case u.Fragment != "":
		s.bad("url", "%s has a fragment, which is never sent; remove it from the # on", quote(maskURL(raw)))
	default:
		s.credentials(w, u)
		w.url, w.shown = u, u.Scheme+"://"+u.Host+u.EscapedPath()
		w.allow = allowList{host: host, port: portOf(u)}
	}
}

// credentials moves user and password from u into the header.
func (s *section) credentials(w *web, u *url.URL) {
	if u.User == nil {
		return
	}
	if w.header["Authorization"] != nil {
		s.bad("url", "%s: has user:password and there is an Authorization header; remove one", quote(maskURL(u.String())))
	}
	password, _ := u.User.Password()
	r := http.Request{Header: w.header}
	r.SetBasicAuth(u.User.Username(), password)
	w.secrets.add(password)
	_, encoded, _ := strings.Cut(w.header.Get("Authorization"), " ")
	w.secrets.add(encoded)
	u.User = nil
}

func portOf(u *url.URL) uint16 {
	if port, err := strconv.ParseUint(u.Port(), 10, 16); err == nil {
		return uint16(port)
	}
	if u.Scheme == "http" {
		return 80
	}
	return 443
}

// maskURL hides user, password and query of a URL, or of what was meant as one.
func maskURL(raw string) string {
	if i := strings.LastIndex(raw, "@"); i >= 0 {
		scheme, _, found := strings.Cut(raw[:i], "://")
		if found {
			scheme += "://"
		} else {
			scheme = ""
		}
		raw = scheme + "***" + raw[i:]
	}
	if i := strings.Index(raw, "?"); i >= 0 {
		raw = raw[:i] + "?***"
	}
	return raw
}

func (s *section) allow(w *web) {
	node := s.settings["allow"]
	if node == nil {
		own, _ := parseRule(w.allow.host)
		w.allow.rules = []rule{own}
		return
	}
	before := len(s.problems)
	for _, item := range s.list("allow") {
		r, why := parseRule(item.value)
		if why != "" {
			s.badAt(item.node, item.name, "%s is %s", quote(maskURL(item.value)), why)
		}
		w.allow.rules = append(w.allow.rules, r)
	}
	if len(s.problems) == before && !w.allow.possible() {
		s.bad("allow", "no entry fits the url's host and port; add %q", w.allow.host)
	}
}

// transport dials only what the allow list lets through.
func (w *web) transport() *http.Transport {
	dialer := &net.Dialer{
		Timeout:  connectTimeout,
		Control:  w.allow.control,
		Resolver: w.resolver,
	}
	return &http.Transport{
		Proxy:                  nil, // one from the environment would dial in our place, unchecked
		DialContext:            dialer.DialContext,
		TLSHandshakeTimeout:    connectTimeout,
		ForceAttemptHTTP2:      true,
		DisableCompression:     true,
		MaxResponseHeaderBytes: 64 << 10,
		MaxIdleConnsPerHost:    16,
		IdleConnTimeout:        90 * time.Second,
		HTTP2:                  &http.HTTP2Config{SendPingTimeout: 30 * time.Second},
	}
}

const connectTimeout = 10 * time.Second
