package jetstream

import (
	"bytes"
	"strings"

	"github.com/cloudevents/sdk-go/v2/event"
	"github.com/nats-io/nats.go"
	"github.com/simple-workflow/simple-workflow/internal/cloudevent"
)

// message converts an event to a message, in the structured or the binary mode of the CloudEvents NATS binding. In that
// binding the header Content-Type is used in the structured mode only.
func (s *sink) message(e event.Event) (*nats.Msg, error) {
	m := nats.NewMsg(s.subject + "." + clean(e.Type()))
	m.Header[nats.MsgIdHdr] = []string{e.ID()}
	if s.config.Binary {
		for name, value := range cloudevent.Attributes(e) {
			m.Header["ce-"+name] = []string{cloudevent.Percent(value)}
		}
		m.Header["ce-datacontenttype"] = []string{cloudevent.Percent(e.DataContentType())}
		m.Data = e.Data()
		return m, nil
	}
	var body bytes.Buffer
	if err := event.WriteJson(&e, &body); err != nil {
		return nil, err
	}
	m.Header["Content-Type"] = []string{event.ApplicationCloudEventsJSON}
	m.Data = body.Bytes()
	return m, nil
}

// clean converts a text to a part of a subject. Blanks, control characters, * and > become _, as does an empty word
// between two dots.
func clean(text string) string {
	text = strings.Map(func(r rune) rune {
		if r <= ' ' || r == 0x7f || r == '*' || r == '>' {
			return '_'
		}
		return r
	}, text)
	words := strings.Split(text, ".")
	for k, word := range words {
		if word == "" {
			words[k] = "_"
		}
	}
	return strings.Join(words, ".")
}
