// Package webhook is a sink that sends events to a URL over HTTP, one event per request.
//
// An event is acknowledged when the response has a status of 200 to 299 and its body has been read to the end, or
// to 64 KiB. Events are sent in the structured or the binary mode of the CloudEvents HTTP binding.
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
	maxAnswer  = 64 << 10 // most bytes of a response that are read
	maxExcerpt = 300      // most bytes of a response that an error quotes
)

// A Config configures a sink. URL is required.
type Config struct {
	URL    string
	Binary bool // attributes as headers, the payload as the body
	AtOnce int  // most concurrent requests for each batch; 0: 16
	// Timeout limits a request, including reading the response; 0: 10 s.
	Timeout time.Duration

	// Secret signs each request. In the structured mode the signature follows Standard Webhooks 1.0: the header
	// webhook-signature is "v1," and the base64 of HMAC-SHA256(secret, id.timestamp.body). In the binary mode the body
	// does not contain the attributes, so the header is "v2," and the base64 of HMAC-SHA256(secret,
	// id.timestamp.attributes.body), see docs/sinks/webhook.md. If Secret starts with whsec_, the rest is the base64 of
	// the secret; otherwise Secret is the secret itself. It has at least 24 bytes. Empty: no signature.
	Secret string
	// KeyID names the secret in the header webhook-key-id, so that receivers can tell an old secret from a new one.
	KeyID string

	// Allow lists the addresses that may be dialled although they are not public. All others that are not public are
	// refused after the name was resolved: loopback, private, link-local, shared (carrier NAT) and multicast
	// addresses, and IPv6 addresses that translate to one of these.
	Allow []netip.Prefix
	TLS   *tls.Config // for https://; nil: the system's certificates
	// Client replaces the HTTP client. Allow, TLS and Timeout are then ignored.
	Client *http.Client
}

// A sink sends events to a URL.
type sink struct {
	config Config
	client *http.Client
	key    []byte // signs; nil: no signature
	masked *strings.Replacer
}

// New returns a sink, or an error that describes what is wrong with the configuration.
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
		Transport: &http.Transport{ // without the environment's proxy, which would dial addresses that nobody has checked
			DialContext: dialer.DialContext, TLSClientConfig: c.TLS.Clone(), ForceAttemptHTTP2: true, TLSHandshakeTimeout: 5 * time.Second,
			MaxIdleConnsPerHost: c.AtOnce, IdleConnTimeout: 30 * time.Second, MaxResponseHeaderBytes: maxAnswer,
		},
		CheckRedirect: func(*http.Request, []*http.Request) error { return http.ErrUseLastResponse },
	}
}

// Publish sends each event as one request.
func (s *sink) Publish(ctx context.Context, events []event.Event) []error {
	return dispatcher.BySubject(ctx, events, s.config.AtOnce, s.send)
}

// Close closes idle connections.
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

// sign returns the signature. Version 1 is that of Standard Webhooks 1.0 and covers the body alone. In the binary
// mode, where attributes are headers, only version 2 is sent, which covers them too: with both versions,
// an attacker could drop version 2 and change the event's type.
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

// attributesOf returns the headers that version 2 of the signature covers: content-type and each header that starts
// with ce-, as name:value and a line feed, with names in lower case, sorted by name.
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

// binaryHeaders sets the headers of the binary mode (CloudEvents HTTP binding 1.0, section 3.1.3).
func binaryHeaders(header http.Header, e event.Event) {
	for name, value := range cloudevent.Attributes(e) {
		header.Set("ce-"+name, cloudevent.Percent(value))
	}
	header.Set("Content-Type", e.DataContentType())
}
