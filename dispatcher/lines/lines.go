// Package lines is a sink that writes events to a file or a terminal, a line of JSON each.
package lines

import (
	"bufio"
	"context"
	"io"

	"github.com/cloudevents/sdk-go/v2/event"

	"github.com/simple-workflow/simple-workflow/dispatcher"
)

// A sink writes each event as a line in the CloudEvents JSON format. An event is acknowledged when
// Write has returned for it: what a pipe or a disk does with it then is not known.
type sink struct {
	writing chan struct{} // holds one while somebody writes
	w       io.Writer
	torn    bool // the last line may have no end
}

// New returns a sink that writes each event to w as a line in the CloudEvents JSON format. An event is acknowledged when Write has
// returned for it: what a pipe or a disk does with it then is not known.
func New(w io.Writer) dispatcher.Sink { return &sink{writing: make(chan struct{}, 1), w: w} }

// Publish writes the events in their order. A writer that blocks, such as a pipe that nobody reads,
// goes on with what it was given after ctx has ended.
func (s *sink) Publish(ctx context.Context, events []event.Event) []error {
	select {
	case s.writing <- struct{}{}:
	case <-ctx.Done():
		return all(events, dispatcher.ErrNotTried)
	}
	written := make(chan []error, 1)
	go func() {
		errs := s.write(events)
		<-s.writing
		written <- errs
	}()
	select {
	case errs := <-written:
		return errs
	case <-ctx.Done():
		return all(events, dispatcher.ErrNotTried)
	}
}

func (s *sink) write(events []event.Event) []error {
	errs := make([]error, len(events))
	out := bufio.NewWriterSize(s.w, 64<<10)
	if s.torn {
		_ = out.WriteByte('\n') // its error stays, for Flush
	}
	for k := range events {
		if err := event.WriteJson(&events[k], out); err != nil {
			errs[k] = dispatcher.RejectForGood(err) // and a line of its own for what there is of it
		}
		_ = out.WriteByte('\n')
	}
	err := out.Flush()
	if s.torn = err != nil; s.torn {
		return all(events, dispatcher.Unavailable(err, 0))
	}
	return errs
}

func all(events []event.Event, err error) []error {
	errs := make([]error, len(events))
	for k := range errs {
		errs[k] = err
	}
	return errs
}

// Close does nothing: whoever opened the writer closes it.
func (s *sink) Close() error { return nil }
