package amqp

import (
	"bytes"
	"fmt"

	"github.com/cloudevents/sdk-go/v2/event"
	amqp "github.com/rabbitmq/amqp091-go"
	"github.com/simple-workflow/simple-workflow/internal/cloudevent"
)

// message converts an event to a message, in the structured or the binary mode. The CloudEvents binding is
// for AMQP 1.0; RabbitMQ converts the headers used here to the application properties of that binding.
func (s *sink) message(e event.Event) (amqp.Publishing, error) {
	m := amqp.Publishing{MessageId: e.ID(), DeliveryMode: amqp.Persistent}
	if len(e.Type()) > longestKey {
		return m, fmt.Errorf("the type has %d bytes, and a routing key at most %d", len(e.Type()), longestKey)
	}
	if s.config.Binary {
		m.Headers = amqp.Table{}
		for name, value := range cloudevent.Attributes(e) {
			m.Headers["cloudEvents_"+name] = value
		}
		m.ContentType, m.Body = e.DataContentType(), e.Data()
		return m, nil
	}
	var body bytes.Buffer
	if err := event.WriteJson(&e, &body); err != nil {
		return m, err
	}
	m.ContentType, m.Body = event.ApplicationCloudEventsJSON, body.Bytes()
	return m, nil
}
