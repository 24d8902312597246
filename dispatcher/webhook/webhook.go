// Package webhook is a sink that sends events to a URL over HTTP, one a request.
//
// An event is acknowledged by a status of 200 to 299 and the end of the answer's body, of which at
// most 64 KiB are read. It is sent in the structured mode of the CloudEvents HTTP binding, or in
// the binary mode.
package webhook

import (
	"bytes"
	"context"
	"crypto/hmac"
	"crypto/sha256"
	"encoding/base64"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/netip"
	"net/url"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"time"
	"unicode"
	"unicode/utf8"

	"github.com/cloudevents/sdk-go/v2/event"

	"github.com/simple-workflow/simple-workflow/dispatcher"
)

const (
	maxAnswer  = 64 << 10
	maxExcerpt = 300
)

// DefaultTimeout is how long a request may take.
const DefaultTimeout = 10 * time.Second

// MinSecret is the length in bytes of the shortest secret that is accepted.
const MinSecret = 24

// A Config says where events go.
type Config struct {
	URL    string
	Binary bool // attributes as headers, the payload as the body
	AtOnce int  // requests at once for each batch; 0: 16
	// Timeout is for a request, its answer included; 0: DefaultTimeout.
	Timeout time.Duration

	// Secret signs each request as Standard Webhooks 1.0 has it: the header webhook-signature is
	// "v1," and the base64 of HMAC-SHA256(secret, id.timestamp.body). After whsec_ it is the base64
	// of the secret, otherwise the secret itself. Empty: no signature.
	Secret string
	// KeyID names the secret in the header webhook-key-id, so that it can be changed.
	KeyID string

	// Allow are the private addresses that may be dialled. Others that are not public are refused
	// after the name was resolved: loopback, private and link-local ones, those of carriers'
	// networks, multicast, and whatever leads to them.
	Allow []netip.Prefix
	// Client replaces the HTTP client, for certificates of one's own say. Then Allow means nothing.
	Client *http.Client
}

// A Sink sends events to a URL.
type Sink struct {
	config Config
	client *http.Client
	key    []byte // signs; nil: no signature
	masked *strings.Replacer
}

// New returns a sink, or an error that says what is wrong with the configuration.
func New(c Config) (*Sink, error) {
	u, err := url.Parse(c.URL)
	if err != nil || u.Scheme != "http" && u.Scheme != "https" || u.Host == "" {
		return nil, errors.New("webhook: URL: use http://host/path or https://host/path")
	}
	key, err := Key(c.Secret)
	if err != nil {
		return nil, fmt.Errorf("webhook: Secret: %w", err)
	}
	if c.AtOnce <= 0 {
		c.AtOnce = 16
	}
	if c.Timeout <= 0 {
		c.Timeout = DefaultTimeout
	}
	s := &Sink{config: c, client: c.Client, key: key, masked: mask(u)}
	if s.client == nil {
		if err := c.admitHost(u.Hostname()); err != nil {
			return nil, fmt.Errorf("webhook: URL: %w", err)
		}
		s.client = c.newClient()
	}
	return s, nil
}

// Key returns the bytes that a secret signs with; nil for none.
func Key(secret string) ([]byte, error) {
	if secret == "" {
		return nil, nil
	}
	key := []byte(secret)
	if coded, ok := strings.CutPrefix(secret, "whsec_"); ok {
		var err error
		if key, err = base64.StdEncoding.DecodeString(coded); err != nil {
			return nil, errors.New("what follows whsec_ is not base64; see: echo whsec_$(openssl rand -base64 24)")
		}
	}
	if len(key) < MinSecret {
		return nil, fmt.Errorf("it has %d bytes; use at least %d, for example from: openssl rand -hex 24", len(key), MinSecret)
	}
	return key, nil
}

// mask hides what may be secret of a URL in what the sink answers: servers like to quote it.
func mask(u *url.URL) *strings.Replacer {
	secrets := []string{u.String(), u.RequestURI(), u.EscapedPath(), u.Path, u.RawQuery}
	for _, values := range u.Query() {
		secrets = append(secrets, values...)
	}
	secrets = append(secrets, strings.Split(u.Path, "/")...)
	if password, ok := u.User.Password(); ok {
		secrets = append(secrets, password, u.User.String(), base64.StdEncoding.EncodeToString([]byte(u.User.Username()+":"+password)))
	}
	slices.SortFunc(secrets, func(a, b string) int { return len(b) - len(a) })
	var pairs []string
	for _, secret := range secrets {
		if len(secret) >= 4 { // what is shorter is no secret, and part of other words
			pairs = append(pairs, secret, "…")
		}
	}
	return strings.NewReplacer(pairs...)
}

func (c Config) newClient() *http.Client {
	dialer := &net.Dialer{Timeout: 5 * time.Second, Control: func(_, address string, _ syscall.RawConn) error {
		at, err := netip.ParseAddrPort(address)
		if err != nil {
			return err
		}
		return c.admit(at.Addr())
	}}
	return &http.Client{
		Timeout: c.Timeout,
		Transport: &http.Transport{ // no proxy from the environment: it would dial for us, unchecked
			DialContext: dialer.DialContext, ForceAttemptHTTP2: true, TLSHandshakeTimeout: 5 * time.Second,
			MaxIdleConnsPerHost: c.AtOnce, IdleConnTimeout: 30 * time.Second, MaxResponseHeaderBytes: maxAnswer,
		},
		CheckRedirect: func(*http.Request, []*http.Request) error { return http.ErrUseLastResponse },
	}
}

// internal are ranges that netip takes for public ones.
var internal = []netip.Prefix{
	netip.MustParsePrefix("0.0.0.0/8"),       // this network
	netip.MustParsePrefix("100.64.0.0/10"),   // shared by a carrier's customers
	netip.MustParsePrefix("192.0.0.0/24"),    // protocols
	netip.MustParsePrefix("198.18.0.0/15"),   // laboratories
	netip.MustParsePrefix("240.0.0.0/4"),     // reserved, and used
	netip.MustParsePrefix("::/96"),           // IPv4, long ago
	netip.MustParsePrefix("64:ff9b:1::/48"),  // translated locally
	netip.MustParsePrefix("fec0::/10"),       // site-local
}

// public reports whether an address is meant to be reached by anybody.
func public(ip netip.Addr) bool {
	if !ip.IsGlobalUnicast() || ip.IsPrivate() || slices.ContainsFunc(internal, func(p netip.Prefix) bool { return p.Contains(ip) }) {
		return false
	}
	if ip.Is4() {
		return true
	}
	at := ip.As16()
	switch {
	case nat64.Contains(ip):
		return public(netip.AddrFrom4([4]byte(at[12:16])))
	case sixToFour.Contains(ip):
		return public(netip.AddrFrom4([4]byte(at[2:6])))
	}
	return true
}

// Addresses that hold one of IPv4.
var (
	nat64     = netip.MustParsePrefix("64:ff9b::/96")
	sixToFour = netip.MustParsePrefix("2002::/16")
)

// number is a host that resolvers take for an address, though it does not look like one.
var number = regexp.MustCompile(`^(0[xX][0-9a-fA-F]*|[0-9]+)(\.(0[xX][0-9a-fA-F]*|[0-9]+))*\.?$`)

// admitHost refuses early what admit would refuse later anyhow.
func (c Config) admitHost(host string) error {
	name := strings.TrimSuffix(strings.ToLower(host), ".")
	ip, err := netip.ParseAddr(name)
	switch {
	case err == nil:
		return c.admit(ip)
	case number.MatchString(host):
		return fmt.Errorf("the host %.60s is an address in an unusual form; write it like 203.0.113.7", host)
	case name == "localhost" || strings.HasSuffix(name, ".localhost"):
		if c.admit(netip.IPv6Loopback()) != nil {
			return c.admit(netip.AddrFrom4([4]byte{127, 0, 0, 1}))
		}
	}
	return nil
}

// admit returns an error for an address that is not public, unless it is allowed.
func (c Config) admit(ip netip.Addr) error {
	ip = ip.Unmap().WithZone("")
	if public(ip) || slices.ContainsFunc(c.Allow, func(p netip.Prefix) bool { return p.Contains(ip) }) {
		return nil
	}
	return fmt.Errorf("address %s is not public; if it is meant, allow it, as in allow=%s", ip, netip.PrefixFrom(ip, ip.BitLen()))
}

// Publish sends each event by itself.
func (s *Sink) Publish(ctx context.Context, events []event.Event) []error {
	return dispatcher.BySubject(ctx, events, s.config.AtOnce, s.send)
}

// Close lets go of idle connections.
func (s *Sink) Close() error {
	s.client.CloseIdleConnections()
	return nil
}

func (s *Sink) send(ctx context.Context, e event.Event) error {
	request, err := s.request(ctx, e)
	if err != nil {
		return dispatcher.RejectForGood(err)
	}
	answer, err := s.client.Do(request)
	if err != nil {
		return s.trouble(ctx, err)
	}
	defer answer.Body.Close()
	body, err := io.ReadAll(io.LimitReader(answer.Body, maxAnswer))
	if err != nil {
		return s.trouble(ctx, fmt.Errorf("answer of status %d broke off: %w", answer.StatusCode, err))
	}
	return s.verdict(answer, body, len(e.Data()))
}

// trouble tells a sink that cannot be reached from one that could not cope with an event.
func (s *Sink) trouble(ctx context.Context, err error) error {
	var wrapped *url.Error
	if errors.As(err, &wrapped) {
		err = wrapped.Err // the URL may hold a token
	}
	if ctx.Err() != nil {
		return dispatcher.ErrNotTried // there is no time left
	}
	var op *net.OpError
	if errors.As(err, &op) && op.Op == "dial" || strings.Contains(err.Error(), "tls:") || strings.Contains(err.Error(), "x509:") {
		return dispatcher.Unavailable(err, 0)
	}
	return err
}

// verdict says what an answer means.
//
// That there is nothing at the URL, or not any more, is most likely not the event's fault: were it
// taken for a rejection, a minute of a wrong route would park whatever is open. The same goes for
// 403, which firewalls answer to single events, too.
func (s *Sink) verdict(answer *http.Response, body []byte, size int) error {
	code := answer.StatusCode
	after, told := answer.Header.Get("Retry-After"), s.masked.Replace(excerpt(body))
	err := fmt.Errorf("status %d: %s", code, told)
	switch {
	case code >= 200 && code < 300:
		return nil
	case code >= 300 && code < 400:
		return fmt.Errorf("status %d: redirects are not followed; the sink has moved to %.200q", code, s.masked.Replace(target(answer)))
	case code == http.StatusUnauthorized:
		return dispatcher.Unavailable(fmt.Errorf("status %d: the sink does not accept our credentials", code), 0)
	case code == http.StatusTooManyRequests, after != "" && slices.Contains([]int{408, 425, 503}, code):
		return dispatcher.Unavailable(fmt.Errorf("status %d: the sink wants to be left alone", code), retryAfter(after, time.Now()))
	case code == http.StatusRequestEntityTooLarge:
		return dispatcher.RejectForGood(fmt.Errorf("status %d: a payload of %d bytes is too large for the sink: %s", code, size, told))
	case code < 400 || code >= 500, slices.Contains([]int{403, 404, 405, 407, 408, 410, 421, 425}, code):
		return err
	}
	return dispatcher.Reject(err)
}

// target returns where a redirect leads, without what may be secret.
func target(answer *http.Response) string {
	u, err := url.Parse(answer.Header.Get("Location"))
	if err != nil {
		return "somewhere"
	}
	u.User, u.RawQuery, u.Fragment, u.RawFragment = nil, "", "", ""
	return u.String()
}

func excerpt(body []byte) string {
	return strings.Map(func(r rune) rune {
		if !unicode.IsPrint(r) || r == utf8.RuneError {
			return ' '
		}
		return r
	}, string(body[:min(len(body), maxExcerpt)]))
}

// retryAfter reads the header Retry-After: seconds, or a date. What it cannot be is 0.
func retryAfter(header string, now time.Time) time.Duration {
	if seconds, err := strconv.ParseUint(header, 10, 31); err == nil {
		return time.Duration(seconds) * time.Second
	}
	if at, err := http.ParseTime(header); err == nil {
		return max(at.Sub(now), 0)
	}
	return 0
}

func (s *Sink) request(ctx context.Context, e event.Event) (*http.Request, error) {
	var body bytes.Buffer
	header := http.Header{}
	if s.config.Binary {
		body.Write(e.Data())
		binaryHeaders(header, e)
	} else {
		if err := event.WriteJson(&e, &body); err != nil {
			return nil, err
		}
		header.Set("Content-Type", event.ApplicationCloudEventsJSON+"; charset=UTF-8")
	}
	if s.key != nil {
		stamp := strconv.FormatInt(time.Now().Unix(), 10)
		header.Set("webhook-id", e.ID())
		header.Set("webhook-timestamp", stamp)
		header.Set("webhook-signature", sign(s.key, e.ID(), stamp, body.Bytes()))
		if s.config.KeyID != "" {
			header.Set("webhook-key-id", s.config.KeyID)
		}
	}
	request, err := http.NewRequestWithContext(ctx, http.MethodPost, s.config.URL, &body)
	if err != nil {
		return nil, err
	}
	header.Set("User-Agent", "simple-workflow")
	request.Header = header
	return request, nil
}

// sign returns the signature of Standard Webhooks 1.0.
func sign(key []byte, id, stamp string, body []byte) string {
	mac := hmac.New(sha256.New, key)
	fmt.Fprintf(mac, "%s.%s.", id, stamp)
	mac.Write(body)
	return "v1," + base64.StdEncoding.EncodeToString(mac.Sum(nil))
}

// binaryHeaders sets an event's attributes as the binary mode of the CloudEvents HTTP binding 1.0
// has them (section 3.1.3).
func binaryHeaders(header http.Header, e event.Event) {
	for name, value := range dispatcher.Attributes(e) {
		header.Set("ce-"+name, dispatcher.Percent(value))
	}
	header.Set("Content-Type", e.DataContentType())
}
