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
	"strconv"
	"strings"
	"syscall"
	"time"

	"github.com/cloudevents/sdk-go/v2/event"

	"github.com/simple-workflow/simple-workflow/dispatcher"
)

const (
	requestTimeout = 10 * time.Second // for an event, its answer included
	maxAnswer      = 64 << 10
	maxExcerpt     = 300
)

// MinSecret is the length in bytes of the shortest secret that is accepted.
const MinSecret = 24

// A Config says where events go.
type Config struct {
	URL    string
	Binary bool // attributes as headers, the payload as the body
	AtOnce int  // requests at once for each batch; 0: 16

	// Secret signs each request as Standard Webhooks 1.0 has it: the header webhook-signature is
	// "v1," and the base64 of HMAC-SHA256(secret, id.timestamp.body). Empty: no signature.
	Secret string
	// KeyID names the secret in the header webhook-key-id, so that it can be changed.
	KeyID string

	// Allow are the private addresses that may be dialled. Others that are not public are refused
	// after the name was resolved: loopback, private and link-local ones, those of carriers'
	// networks, multicast.
	Allow []netip.Prefix
	// Client replaces the HTTP client, for certificates of one's own say. Then Allow means nothing.
	Client *http.Client
}

// A Sink sends events to a URL.
type Sink struct {
	config Config
	client *http.Client
}

// New returns a sink, or an error that says what is wrong with the configuration.
func New(c Config) (*Sink, error) {
	u, err := url.Parse(c.URL)
	if err != nil || u.Scheme != "http" && u.Scheme != "https" || u.Host == "" {
		return nil, errors.New("webhook: URL: use http://host/path or https://host/path")
	}
	if c.Secret != "" && len(c.Secret) < MinSecret {
		return nil, fmt.Errorf("webhook: Secret: it has %d bytes; use at least %d, for example from: openssl rand -hex 24", len(c.Secret), MinSecret)
	}
	if c.AtOnce <= 0 {
		c.AtOnce = 16
	}
	s := &Sink{config: c, client: c.Client}
	if s.client == nil {
		s.client = c.newClient()
	}
	return s, nil
}

func (c Config) newClient() *http.Client {
	dialer := &net.Dialer{Timeout: 5 * time.Second, Control: func(_, address string, _ syscall.RawConn) error { return c.admit(address) }}
	return &http.Client{
		Timeout: requestTimeout,
		Transport: &http.Transport{ // no proxy from the environment: it would dial for us, unchecked
			DialContext: dialer.DialContext, ForceAttemptHTTP2: true, TLSHandshakeTimeout: 5 * time.Second,
			MaxIdleConnsPerHost: c.AtOnce, IdleConnTimeout: 30 * time.Second, MaxResponseHeaderBytes: maxAnswer,
		},
		CheckRedirect: func(*http.Request, []*http.Request) error { return http.ErrUseLastResponse },
	}
}

// carriers is the address space that carriers share among customers (RFC 6598).
var carriers = netip.MustParsePrefix("100.64.0.0/10")

// admit returns an error for an address that is not public, unless it is allowed.
func (c Config) admit(address string) error {
	at, err := netip.ParseAddrPort(address)
	if err != nil {
		return err
	}
	ip := at.Addr().Unmap().WithZone("")
	for _, p := range c.Allow {
		if p.Contains(ip) {
			return nil
		}
	}
	if !ip.IsGlobalUnicast() || ip.IsPrivate() || carriers.Contains(ip) {
		return fmt.Errorf("address %s is not public; if it is meant, allow it, as in allow=%s", ip, netip.PrefixFrom(ip, ip.BitLen()))
	}
	return nil
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
	return verdict(answer, body, len(e.Data()))
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
func verdict(answer *http.Response, body []byte, size int) error {
	code := answer.StatusCode
	err := fmt.Errorf("status %d: %s", code, excerpt(body))
	switch {
	case code >= 200 && code < 300:
		return nil
	case code >= 300 && code < 400:
		return dispatcher.Reject(fmt.Errorf("status %d: redirects are not followed; the sink has moved to %.200q", code, answer.Header.Get("Location")))
	case code == http.StatusUnauthorized || code == http.StatusForbidden:
		return dispatcher.Unavailable(fmt.Errorf("status %d: the sink does not accept our credentials", code), 0)
	case code == http.StatusTooManyRequests || code == http.StatusServiceUnavailable && answer.Header.Get("Retry-After") != "":
		return dispatcher.Unavailable(fmt.Errorf("status %d: the sink wants to be left alone", code), retryAfter(answer.Header.Get("Retry-After"), time.Now()))
	case code == http.StatusRequestEntityTooLarge:
		return dispatcher.RejectForGood(fmt.Errorf("status %d: %d bytes are too many for the sink: %s", code, size, excerpt(body)))
	case code == http.StatusRequestTimeout || code == http.StatusTooEarly || code < 400 || code >= 500:
		return err
	}
	return dispatcher.Reject(err)
}

func excerpt(body []byte) string {
	text := strings.Map(func(r rune) rune {
		if r < ' ' {
			return ' '
		}
		return r
	}, string(body[:min(len(body), maxExcerpt)]))
	return strings.ToValidUTF8(text, "")
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
	if s.config.Secret != "" {
		stamp := strconv.FormatInt(time.Now().Unix(), 10)
		header.Set("webhook-id", e.ID())
		header.Set("webhook-timestamp", stamp)
		header.Set("webhook-signature", sign(s.config.Secret, e.ID(), stamp, body.Bytes()))
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
func sign(secret, id, stamp string, body []byte) string {
	mac := hmac.New(sha256.New, []byte(secret))
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
