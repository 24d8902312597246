package dispatcher

import (
	"maps"
	"slices"
	"strings"

	"github.com/cloudevents/sdk-go/v2/event"

	"github.com/simple-workflow/simple-workflow/internal/delivery"
)

// toEvent makes a CloudEvent of a row: the same attributes and bytes each time. Its subject and
// its partitionkey are the aggregate.
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
	for _, header := range slices.Backward(slices.Sorted(maps.Keys(row.Headers))) { // of two that become one the first counts, each time
		if name := attribute(header); name != "" {
			e.SetExtension(name, row.Headers[header])
		}
	}
	return e
}

// attribute turns the name of a header into that of an extension attribute: lower-case letters and
// digits, at most 20 of them (CloudEvents 1.0, "Naming Conventions"). Empty: the name is taken, or
// nothing is left of it.
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
