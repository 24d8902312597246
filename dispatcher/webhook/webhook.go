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
	"crypto/tls"
	"encoding/base64"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/netip"
	"net/url"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"time"

	"github.com/cloudevents/sdk-go/v2/event"

	"github.com/simple-workflow/simple-workflow/dispatcher"
	"github.com/simple-workflow/simple-workflow/internal/address"
	"github.com/simple-workflow/simple-workflow/internal/clock"
	"github.com/simple-workflow/simple-workflow/internal/cloudevent"
	"github.com/simple-workflow/simple-workflow/internal/secret"
	"github.com/simple-workflow/simple-workflow/internal/shipped"
)

const (
	maxAnswer  = 64 << 10
	maxExcerpt = 300
)

// A Config says where events go.
type Config struct {
	URL    string
	Binary bool // attributes as headers, the payload as the body
	AtOnce int  // requests at once for each batch; 0: 16
	// Timeout is for a request, its answer included; 0: 10 s.
	Timeout time.Duration

	// Secret signs each request. In the structured mode it does so as Standard Webhooks 1.0 has it: the
	// header webhook-signature is "v1," and the base64 of HMAC-SHA256(secret, id.timestamp.body). In the binary
	// mode, where the body is not all, it is "v2," and that of id.timestamp.attributes.body, as docs/sinks/webhook.md has it. After
	// whsec_ it is the base64 of the secret, otherwise the secret itself. It has at least 24 bytes. Empty: no signature.
	Secret string
	// KeyID names the secret in the header webhook-key-id, so that it can be changed.
	KeyID string

	// Allow are the private addresses that may be dialled. Others that are not public are refused
	// after the name was resolved: loopback, private and link-local ones, those of carriers'
	// networks, multicast, and whatever leads to them.
	Allow []netip.Prefix
	TLS   *tls.Config // for https://; nil: the system's certificates
	// Client replaces the HTTP client. Then Allow and TLS mean nothing.
	Client *http.Client
}

// A sink sends events to a URL.
type sink struct {
	config Config
	client *http.Client
	key    []byte // signs; nil: no signature
	masked *strings.Replacer
}

// New returns a sink, or an error that says what is wrong with the configuration.
func New(c Config) (dispatcher.Sink, error) {
	u, err := url.Parse(c.URL)
	if err != nil || u.Scheme != "http" && u.Scheme != "https" || u.Host == "" {
		return nil, errors.New("webhook: URL: use http://host/path or https://host/path")
	}
	key, err := secret.Key(c.Secret)
	if err != nil {
		return nil, fmt.Errorf("webhook: Secret: %w", err)
	}
	if c.AtOnce <= 0 {
		c.AtOnce = 16
	}
	if c.Timeout <= 0 {
		c.Timeout = shipped.WebhookTimeout
	}
	s := &sink{config: c, client: c.Client, key: key, masked: mask(u)}
	if s.client == nil {
		for _, network := range c.Allow {
			if why := address.Meant(network); why != "" {
				return nil, fmt.Errorf("webhook: Allow: %s is %s", network, why)
			}
		}
		if err := c.admitURL(u); err != nil {
			return nil, fmt.Errorf("webhook: URL: %w", err)
		}
		s.client = c.newClient()
	}
	return s, nil
}

func (c Config) newClient() *http.Client {
	dialer := &net.Dialer{Timeout: 5 * time.Second, Control: func(_, to string, _ syscall.RawConn) error {
		at, err := netip.ParseAddrPort(to)
		if err != nil {
			return err
		}
		return c.admit(at.Addr())
	}}
	return &http.Client{
		Timeout: c.Timeout,
		Transport: &http.Transport{ // no proxy from the environment: it would dial for us, unchecked
			DialContext: dialer.DialContext, TLSClientConfig: c.TLS.Clone(), ForceAttemptHTTP2: true, TLSHandshakeTimeout: 5 * time.Second,
			MaxIdleConnsPerHost: c.AtOnce, IdleConnTimeout: 30 * time.Second, MaxResponseHeaderBytes: maxAnswer,
		},
		CheckRedirect: func(*http.Request, []*http.Request) error { return http.ErrUseLastResponse },
	}
}

// Publish sends each event by itself.
func (s *sink) Publish(ctx context.Context, events []event.Event) []error {
	return dispatcher.BySubject(ctx, events, s.config.AtOnce, s.send)
}

// Close lets go of idle connections.
func (s *sink) Close() error {
	s.client.CloseIdleConnections()
	return nil
}

func (s *sink) send(ctx context.Context, e event.Event) error {
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

func (s *sink) request(ctx context.Context, e event.Event) (*http.Request, error) {
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
		stamp := strconv.FormatInt(clock.Now(ctx).Unix(), 10)
		header.Set("webhook-id", e.ID())
		header.Set("webhook-timestamp", stamp)
		header.Set("webhook-signature", s.sign(header, e.ID(), stamp, body.Bytes()))
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

// sign returns the signature: of version 1 is that of Standard Webhooks 1.0, of the body alone. Where
// attributes are headers, version 2 covers these, too, and no other is sent: who takes either could be given an
// event with another type.
func (s *sink) sign(header http.Header, id, stamp string, body []byte) string {
	mac := hmac.New(sha256.New, s.key)
	fmt.Fprintf(mac, "%s.%s.", id, stamp)
	version := "v1,"
	if s.config.Binary {
		version = "v2,"
		fmt.Fprintf(mac, "%s.", attributesOf(header))
	}
	mac.Write(body)
	return version + base64.StdEncoding.EncodeToString(mac.Sum(nil))
}

// attributesOf is what the second version of the signature covers of the headers: each that begins
// with ce-, and content-type, as name:value and a line feed, names in lower case, in order of name.
func attributesOf(header http.Header) string {
	var lines []string
	for name, values := range header {
		if name = strings.ToLower(name); strings.HasPrefix(name, "ce-") || name == "content-type" {
			lines = append(lines, name+":"+values[0]+"\n")
		}
	}
	slices.Sort(lines)
	return strings.Join(lines, "")
}

// binaryHeaders sets an event's attributes as the binary mode of the CloudEvents HTTP binding 1.0
// has them (section 3.1.3).
func binaryHeaders(header http.Header, e event.Event) {
	for name, value := range cloudevent.Attributes(e) {
		header.Set("ce-"+name, cloudevent.Percent(value))
	}
	header.Set("Content-Type", e.DataContentType())
}
