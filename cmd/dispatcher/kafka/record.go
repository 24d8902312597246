package kafka

import (
	"bytes"
	"fmt"

	"github.com/cloudevents/sdk-go/v2/event"
	"github.com/simple-workflow/simple-workflow/internal/cloudevent"
	"github.com/twmb/franz-go/pkg/kgo"
)

// record converts an event to a record, in the structured or the binary mode of the CloudEvents Kafka
// binding.
func (s *sink) record(e event.Event) (*kgo.Record, error) {
	r := &kgo.Record{Topic: s.topic, Key: key(e)}
	header := func(name, value string) {
		r.Headers = append(r.Headers, kgo.RecordHeader{Key: name, Value: []byte(value)})
	}
	if s.binary {
		for name, value := range cloudevent.Attributes(e) {
			header("ce_"+name, value)
		}
		header("content-type", e.DataContentType())
		r.Value = e.Data()
		return r, nil
	}
	var body bytes.Buffer
	if err := event.WriteJson(&e, &body); err != nil {
		return nil, err
	}
	header("content-type", event.ApplicationCloudEventsJSON)
	r.Value = body.Bytes()
	return r, nil
}

// key returns the key that selects the partition of an event: its partitionkey, or its subject if it has none.
func key(e event.Event) []byte {
	if k, ok := e.Extensions()["partitionkey"]; ok {
		return fmt.Append(nil, k)
	}
	return []byte(e.Subject())
}

// size returns the size of a record before compression.
func size(r *kgo.Record) int {
	n := len(r.Key) + len(r.Value)
	for _, h := range r.Headers {
		n += len(h.Key) + len(h.Value)
	}
	return n
}
