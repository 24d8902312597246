package webhook_test

import (
	"context"
	"crypto/hmac"
	"crypto/sha256"
	"encoding/base64"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"net/netip"
	"net/url"
	"reflect"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/cloudevents/sdk-go/v2/binding"
	"github.com/cloudevents/sdk-go/v2/event"
	cehttp "github.com/cloudevents/sdk-go/v2/protocol/http"

	"github.com/simple-workflow/simple-workflow/dispatcher"
	"github.com/simple-workflow/simple-workflow/dispatcher/webhook"
)

var loopback = []netip.Prefix{netip.MustParsePrefix("127.0.0.0/8")}

// sink returns a sink that may dial loopback addresses.
func sink(t *testing.T, c webhook.Config) dispatcher.Sink {
	t.Helper()
	if c.Allow == nil {
		c.Allow = loopback
	}
	s, err := webhook.New(c)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = s.Close() })
	return s
}

func newEvent(id, subject string) event.Event {
	e := event.New()
	e.SetID(id)
	e.SetSource("https://shop.example/billing")
	e.SetType("invoice.charged.v1")
	e.SetSubject(subject)
	e.SetTime(time.Date(2026, 1, 2, 3, 4, 5, 678901000, time.UTC))
	e.SetDataContentType("application/json")
	e.DataEncoded = []byte(`{"cents": 700, "for": "Käse & \"more\"", "at": null}`)
	e.SetExtension("partitionkey", subject)
	return e
}

// publish publishes one event.
func publish(t *testing.T, s dispatcher.Sink, e event.Event) error {
	t.Helper()
	errs := s.Publish(t.Context(), []event.Event{e})
	if len(errs) != 1 {
		t.Fatalf("%d answers for one event", len(errs))
	}
	return errs[0]
}

// kind returns what an error means to the dispatcher.
func kind(err error) string {
	switch fmt.Sprintf("%T", err) {
	case "<nil>":
		return "acknowledged"
	case "*dispatcher.rejection":
		if reflect.ValueOf(err).Elem().FieldByName("final").Bool() {
			return "rejected for good"
		}
		return "rejected"
	case "*dispatcher.unavailable":
		return strings.TrimSuffix(fmt.Sprintf("unavailable %s", time.Duration(reflect.ValueOf(err).Elem().FieldByName("after").Int())), " 0s")
	}
	if err.Error() == "not tried" {
		return "not tried"
	}
	return "later"
}

// In both modes the CloudEvents SDK reads the same event that was sent, also with a subject and an extension that no
// header could hold without encoding.
func TestModes(t *testing.T) {
	got := make(chan *event.Event, 1)
	mode := make(chan binding.Encoding, 1)
	server := httptest.NewServer(http.HandlerFunc(func(_ http.ResponseWriter, r *http.Request) {
		message := cehttp.NewMessageFromHttpRequest(r)
		mode <- message.ReadEncoding()
		e, err := binding.ToEvent(r.Context(), message)
		if err != nil {
			t.Error(err)
		}
		got <- e
	}))
	defer server.Close()
	for name, want := range map[string]binding.Encoding{"structured": binding.EncodingStructured, "binary": binding.EncodingBinary} {
		t.Run(name, func(t *testing.T) {
			s := sink(t, webhook.Config{URL: server.URL + "/events?of=billing", Binary: want == binding.EncodingBinary})
			for _, subject := range []string{"7d0c5a2e-0000-4000-8000-000000000001", `a "b" %41 é 漢 🙂`, "100%", "tab\tand\x7f"} {
				sent := newEvent("id-1", subject)
				sent.SetExtension("traceparent", "00-a b%-é-01")
				if err := publish(t, s, sent); err != nil {
					t.Fatal(err)
				}
				m := <-mode
				if m != want {
					t.Errorf("it came in mode %s", m)
				}
				e := <-got
				if e == nil {
					t.Fatal("it could not be read")
				}
				if err := e.Validate(); err != nil {
					t.Error(err)
				}
				if m == binding.EncodingBinary {
					decode(t, e)
				}
				if e.String() != sent.String() {
					t.Errorf("got  %s\nwant %s", e, sent)
				}
				if !reflect.DeepEqual(e.Extensions(), sent.Extensions()) || string(e.Data()) != string(sent.Data()) || !e.Time().Equal(sent.Time()) || e.Subject() != subject {
					t.Errorf("got  %v %s\nwant %v %s", e.Extensions(), e.Data(), sent.Extensions(), sent.Data())
				}
			}
		})
	}
}

// decode decodes header values as section 3.1.3.2 of the HTTP binding requires of receivers. The Go SDK does not.
func decode(t *testing.T, e *event.Event) {
	t.Helper()
	plain := func(text string) string {
		text, err := url.PathUnescape(text)
		if err != nil {
			t.Error(err)
		}
		return text
	}
	e.SetSubject(plain(e.Subject()))
	for name, value := range e.Extensions() {
		e.SetExtension(name, plain(fmt.Sprint(value)))
	}
}

// Requests are signed in structured mode as Standard Webhooks defines, and in binary mode with version 2. A secret
// after whsec_ is base64. Without a secret there is no header of the signature.
func TestSignature(t *testing.T) {
	requests := make(chan *http.Request, 1)
	bodies := make(chan []byte, 1)
	server := httptest.NewServer(http.HandlerFunc(func(_ http.ResponseWriter, r *http.Request) {
		body, _ := io.ReadAll(r.Body)
		requests <- r
		bodies <- body
	}))
	defer server.Close()
	raw := []byte("0123456789abcdef01234567")
	for name, secret := range map[string]string{"raw": string(raw), "coded": "whsec_" + base64.StdEncoding.EncodeToString(raw)} {
		for _, binary := range []bool{false, true} {
			t.Run(fmt.Sprintf("%s, binary %t", name, binary), func(t *testing.T) {
				s := sink(t, webhook.Config{URL: server.URL, Binary: binary, Secret: secret, KeyID: "2026-01"})
				if err := publish(t, s, newEvent("evt-1", "a")); err != nil {
					t.Fatal(err)
				}
				r, body := <-requests, <-bodies
				if got, want := r.Header.Get("webhook-signature"), signatureOf(raw, r.Header, body, binary); got != want {
					t.Errorf("signature %s, want %s", got, want)
				}
				var seconds int64
				if _, err := fmt.Sscan(r.Header.Get("webhook-timestamp"), &seconds); err != nil || time.Since(time.Unix(seconds, 0)).Abs() > time.Minute {
					t.Errorf("timestamp %q, %v", r.Header.Get("webhook-timestamp"), err)
				}
				if got := r.Header.Get("webhook-id") + " " + r.Header.Get("webhook-key-id"); got != "evt-1 2026-01" {
					t.Errorf("id and key: %s", got)
				}
			})
		}
	}
	t.Run("none", func(t *testing.T) {
		if err := publish(t, sink(t, webhook.Config{URL: server.URL}), newEvent("evt-1", "a")); err != nil {
			t.Fatal(err)
		}
		r := <-requests
		<-bodies
		for _, name := range []string{"webhook-id", "webhook-signature", "webhook-timestamp", "webhook-key-id"} {
			if r.Header.Get(name) != "" {
				t.Errorf("%s without a secret", name)
			}
		}
	})
}

// signatureOf computes the signature as a receiver does, independently of the sink's code.
func signatureOf(key []byte, header http.Header, body []byte, binary bool) string {
	signed, version := header.Get("webhook-id")+"."+header.Get("webhook-timestamp")+".", "v1,"
	if binary {
		version = "v2,"
		for _, name := range []string{"ce-id", "ce-partitionkey", "ce-source", "ce-specversion", "ce-subject", "ce-time", "ce-type", "content-type"} {
			signed += name + ":" + header.Get(name) + "\n"
		}
		signed += "."
	}
	mac := hmac.New(sha256.New, key)
	mac.Write([]byte(signed + string(body)))
	return version + base64.StdEncoding.EncodeToString(mac.Sum(nil))
}

// In binary mode no header of the event can be changed without changing the signature, and no signature is sent that
// covers the body alone.
func TestSignatureCoversAll(t *testing.T) {
	raw := []byte("0123456789abcdef01234567")
	requests, bodies := make(chan *http.Request, 1), make(chan []byte, 1)
	server := httptest.NewServer(http.HandlerFunc(func(_ http.ResponseWriter, r *http.Request) {
		body, _ := io.ReadAll(r.Body)
		requests <- r
		bodies <- body
	}))
	defer server.Close()
	if err := publish(t, sink(t, webhook.Config{URL: server.URL, Binary: true, Secret: string(raw)}), newEvent("evt-1", "a")); err != nil {
		t.Fatal(err)
	}
	r, body := <-requests, <-bodies
	signed := r.Header.Get("webhook-signature")
	if strings.Contains(signed, "v1,") {
		t.Errorf("signature %s: one that covers the body alone can be had, too", signed)
	}
	covered := 0
	for name := range r.Header {
		if name = strings.ToLower(name); !strings.HasPrefix(name, "ce-") && name != "content-type" {
			continue
		}
		covered++
		forged := r.Header.Clone()
		forged.Set(name, "forged")
		if signatureOf(raw, forged, body, true) == signed {
			t.Errorf("%s can be forged", name)
		}
	}
	if covered != 8 {
		t.Errorf("%d headers are covered, want 8: %v", covered, r.Header)
	}
}

// K41: a secret that is too short, too easy to guess, or invalid base64 after whsec_, is refused, and the error does
// not contain it.
func TestBadSecrets(t *testing.T) {
	for secret, want := range map[string]string{
		"short":                            "5 bytes; use at least 24",
		"whsec_c2hvcnQ=":                   "5 bytes; use at least 24",
		"whsec_not base64 at all!!":        "base64",
		"aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa": "only 1 different",
		"abcdabcdabcdabcdabcdabcdabcd":     "only 4 different",
		"whsec_AAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAA=": "only 1 different",
	} {
		_, err := webhook.New(webhook.Config{URL: "https://crm.example", Secret: secret})
		if err == nil || !strings.Contains(err.Error(), want) || strings.Contains(err.Error(), secret) {
			t.Errorf("%s: %v", secret, err)
		}
	}
}

// An event is sent after the response to the previous one of its subject, and not at all if that one
// failed. Other subjects are not affected.
func TestOrder(t *testing.T) {
	var mu sync.Mutex
	var came []string
	under := map[string]bool{}
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		id, subject := r.Header.Get("ce-id"), r.Header.Get("ce-subject")
		mu.Lock()
		if under[subject] {
			t.Errorf("%s came while another of its subject was under way", id)
		}
		under[subject] = true
		came = append(came, id)
		mu.Unlock()
		time.Sleep(time.Millisecond)
		mu.Lock()
		under[subject] = false
		mu.Unlock()
		if id == "b3" {
			w.WriteHeader(http.StatusInternalServerError)
		}
	}))
	defer server.Close()
	var events []event.Event
	for n := range 10 {
		for _, subject := range []string{"a", "b", "c"} {
			events = append(events, newEvent(fmt.Sprint(subject, n), subject))
		}
	}
	errs := sink(t, webhook.Config{URL: server.URL, Binary: true}).Publish(t.Context(), events)
	for k, e := range events {
		want := "acknowledged"
		if e.Subject() == "b" && k/3 == 3 {
			want = "later"
		} else if e.Subject() == "b" && k/3 > 3 {
			want = "not tried"
		}
		if got := kind(errs[k]); got != want {
			t.Errorf("%s: %s, want %s", e.ID(), got, want)
		}
	}
	next := map[string]int{}
	for _, id := range came {
		if id != fmt.Sprint(id[:1], next[id[:1]]) {
			t.Errorf("%s came out of order", id)
		}
		next[id[:1]]++
	}
	if len(came) != 24 {
		t.Errorf("%d came, want 24", len(came))
	}
}

// When its context ends, Publish returns ErrNotTried for every event without a response.
func TestContextEnds(t *testing.T) {
	release := make(chan struct{})
	server := httptest.NewServer(http.HandlerFunc(func(http.ResponseWriter, *http.Request) { <-release }))
	defer server.Close()
	defer close(release)
	ctx, done := context.WithTimeout(t.Context(), 50*time.Millisecond)
	defer done()
	errs := sink(t, webhook.Config{URL: server.URL}).Publish(ctx, []event.Event{newEvent("1", "a"), newEvent("2", "a"), newEvent("3", "b")})
	for k, err := range errs {
		if kind(err) != "not tried" {
			t.Errorf("event %d: %v", k, err)
		}
	}
}
