// Package cloudevent writes the attributes of CloudEvents for protocols that carry them as headers.
package cloudevent

import (
	"fmt"
	"iter"
	"maps"
	"slices"
	"strings"
	"time"

	"github.com/cloudevents/sdk-go/v2/event"
)

// Attributes yields the names and values of an event's attributes as text, always in the same order. A sink
// in binary mode puts them into headers. datacontenttype is left out: most protocol bindings have
// a separate place for it.
func Attributes(e event.Event) iter.Seq2[string, string] {
	return func(yield func(name, value string) bool) {
		fixed := [][2]string{
			{"specversion", e.SpecVersion()}, {"id", e.ID()}, {"source", e.Source()}, {"type", e.Type()},
			{"subject", e.Subject()}, {"time", e.Time().Format(time.RFC3339Nano)},
		}
		for _, a := range fixed {
			if !yield(a[0], a[1]) {
				return
			}
		}
		extensions := e.Extensions()
		for _, name := range slices.Sorted(maps.Keys(extensions)) {
			if !yield(name, fmt.Sprint(extensions[name])) {
				return
			}
		}
	}
}

// Percent percent-encodes the bytes that an HTTP or NATS header must not contain: spaces, double quotes, percent
// signs, and all that is not printable ASCII (CloudEvents HTTP binding 1.0, section 3.1.3.2).
func Percent(value string) string {
	var b strings.Builder
	for _, c := range []byte(value) {
		if c <= ' ' || c >= 0x7f || c == '"' || c == '%' {
			fmt.Fprintf(&b, "%%%02X", c)
		} else {
			b.WriteByte(c)
		}
	}
	return b.String()
}
