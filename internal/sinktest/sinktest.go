// Package sinktest has helpers for the tests of sinks.
package sinktest

import (
	"fmt"
	"io"
	"net"
	"reflect"
	"strings"
	"testing"
	"time"

	"github.com/cloudevents/sdk-go/v2/event"
	"github.com/google/uuid"

	"github.com/simple-workflow/simple-workflow/dispatcher"
)

// Event returns an event like those of the dispatcher. The same n yields the same id.
func Event(n int, subject, kind, data string) event.Event {
	e := event.New()
	e.SetID(uuid.NewSHA1(uuid.NameSpaceOID, fmt.Append(nil, n)).String())
	e.SetSource("/test")
	e.SetType(kind)
	e.SetSubject(subject)
	e.SetTime(time.Date(2026, 5, 4, 3, 2, 1, 123456000, time.UTC))
	e.SetDataContentType("application/json")
	e.DataEncoded = []byte(data)
	e.SetExtension("partitionkey", subject)
	e.SetExtension("note", `5 % of "Zürich"`)
	return e
}

// Read decodes an event that a sink sent in structured mode, using the CloudEvents SDK.
func Read(t testing.TB, body []byte) (e event.Event) {
	t.Helper()
	if err := e.UnmarshalJSON(body); err != nil {
		t.Fatalf("%.200q is no CloudEvent: %v", body, err)
	}
	if err := e.Validate(); err != nil {
		t.Fatal(err)
	}
	return e
}

// Same fails the test unless two events are equal.
func Same(t testing.TB, got, want event.Event) {
	t.Helper()
	if got.String() != want.String() {
		t.Errorf("got %s\nwant %s", got, want)
	}
}

// Delivered fails the test unless errs has n elements, all nil.
func Delivered(t testing.TB, errs []error, n int) {
	t.Helper()
	if len(errs) != n {
		t.Fatalf("%d answers to %d events", len(errs), n)
	}
	for k, err := range errs {
		if err != nil {
			t.Fatalf("event %d: %v", k, err)
		}
	}
}

// The kinds of errors of Publish.
const (
	Unavailable = "unavailable"
	ForGood     = "rejected for good"
	NotTried    = "not tried"
	Plain       = "plain"
)

// Failed fails the test unless err is of the kind meaning and its text contains all words.
func Failed(t testing.TB, err error, meaning string, words ...string) {
	t.Helper()
	if err == nil {
		t.Fatalf("acknowledged; want %s", meaning)
	}
	got := Plain
	switch {
	case reflect.TypeOf(err) == reflect.TypeOf(dispatcher.Unavailable(err, 0)):
		got = Unavailable
	case reflect.DeepEqual(err, dispatcher.RejectForGood(unwrap(err))):
		got = ForGood
	case err == dispatcher.ErrNotTried:
		got = NotTried
	}
	if got != meaning {
		t.Fatalf("%s: %v; want %s", got, err, meaning)
	}
	for _, word := range words {
		if !strings.Contains(err.Error(), word) {
			t.Errorf("%q does not say %q", err, word)
		}
	}
}

func unwrap(err error) error {
	if u, ok := err.(interface{ Unwrap() error }); ok {
		return u.Unwrap()
	}
	return err
}

// Silent returns the address of a peer that accepts connections and sends nothing.
func Silent(t testing.TB) string {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { l.Close() })
	go func() {
		for {
			conn, err := l.Accept()
			if err != nil {
				return
			}
			go func() {
				_, _ = io.Copy(io.Discard, conn)
				conn.Close()
			}()
		}
	}()
	return l.Addr().String()
}

// Refused returns an address that refuses connections.
func Refused(t testing.TB) string {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	return l.Addr().String()
}
