package dispatcher

import (
	"maps"
	"slices"
	"strings"

	"github.com/cloudevents/sdk-go/v2/event"

	"github.com/simple-workflow/simple-workflow/internal/delivery"
)

// toEvent converts a row to a CloudEvent. The same row always yields the same attributes and bytes. The subject and
// the partitionkey are the aggregate.
func toEvent(row delivery.Row, source string) event.Event {
	e := event.New()
	e.SetID(row.UUID.String())
	e.SetSource(source)
	e.SetType(row.Type)
	e.SetSubject(row.Aggregate.String())
	e.SetTime(row.Created.UTC())
	e.SetDataContentType("application/json")
	e.DataEncoded = row.Payload
	e.SetExtension("partitionkey", row.Aggregate.String())
	for _, header := range slices.Backward(slices.Sorted(maps.Keys(row.Headers))) { // if two headers map to one attribute, the first in order wins, every time
		if name := attribute(header); name != "" {
			e.SetExtension(name, row.Headers[header])
		}
	}
	return e
}

// attribute converts the name of a header to the name of an extension attribute: lower-case letters and
// digits, at most 20 (CloudEvents 1.0, "Naming Conventions"). It returns "" if the name is that of a standard
// attribute, or if no letter or digit is left.
func attribute(header string) string {
	name := strings.Map(func(r rune) rune {
		switch {
		case 'A' <= r && r <= 'Z':
			return r + 'a' - 'A'
		case 'a' <= r && r <= 'z', '0' <= r && r <= '9':
			return r
		}
		return -1
	}, header)
	switch name = name[:min(len(name), 20)]; name {
	case "specversion", "id", "source", "type", "subject", "time", "datacontenttype", "dataschema", "data", "partitionkey":
		return ""
	}
	return name
}
