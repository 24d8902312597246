// Package lines is a sink that writes events to a file or a terminal, a line of JSON each.
package lines

import (
	"bufio"
	"context"
	"io"
	"sync"

	"github.com/cloudevents/sdk-go/v2/event"

	"github.com/simple-workflow/simple-workflow/dispatcher"
)

// A Sink writes each event as a line in the CloudEvents JSON format. An event is acknowledged when
// Write has returned for it: what a pipe or a disk does with it then is not known.
type Sink struct {
	mu sync.Mutex
	w  io.Writer
}

// New returns a sink that writes to w.
func New(w io.Writer) *Sink { return &Sink{w: w} }

// Publish writes the events in their order.
func (s *Sink) Publish(_ context.Context, events []event.Event) []error {
	errs := make([]error, len(events))
	s.mu.Lock()
	defer s.mu.Unlock()
	out := bufio.NewWriterSize(s.w, 64<<10)
	for k := range events {
		if err := event.WriteJson(&events[k], out); err != nil {
			errs[k] = err
			continue
		}
		_ = out.WriteByte('\n') // its error stays, for Flush
	}
	if err := out.Flush(); err != nil {
		for k := range errs {
			errs[k] = dispatcher.Unavailable(err, 0)
		}
	}
	return errs
}

// Close does nothing: whoever opened the writer closes it.
func (s *Sink) Close() error { return nil }
