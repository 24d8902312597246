// Package lines is a sink that writes events to a file or a terminal, one line of JSON per event.
package lines

import (
	"bufio"
	"context"
	"io"
	"slices"

	"github.com/cloudevents/sdk-go/v2/event"

	"github.com/simple-workflow/simple-workflow/dispatcher"
)

// A sink writes each event as a line in the CloudEvents JSON format. An event is acknowledged when
// Write has returned without an error. Whether the data then reaches a disk or the reader of a pipe is not known.
type sink struct {
	writing chan struct{} // a mutex of capacity one
	w       io.Writer
	torn    bool // the last line may be incomplete
}

// New returns a sink that writes each event to w as a line in the CloudEvents JSON format. An event is acknowledged when Write has
// returned for it: what a pipe or a disk does with it then is not known.
func New(w io.Writer) dispatcher.Sink { return &sink{writing: make(chan struct{}, 1), w: w} }

// Publish writes the events in order. If the writer blocks, for example on a pipe that nobody reads, Publish returns
// when ctx ends; the write continues in the background.
func (s *sink) Publish(ctx context.Context, events []event.Event) []error {
	select {
	case s.writing <- struct{}{}:
	case <-ctx.Done():
		return slices.Repeat([]error{dispatcher.ErrNotTried}, len(events))
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
		return slices.Repeat([]error{dispatcher.ErrNotTried}, len(events))
	}
}

func (s *sink) write(events []event.Event) []error {
	errs := make([]error, len(events))
	out := bufio.NewWriterSize(s.w, 64<<10)
	if s.torn {
		_ = out.WriteByte('\n') // Flush returns its error
	}
	for k := range events {
		if err := event.WriteJson(&events[k], out); err != nil {
			errs[k] = dispatcher.RejectForGood(err) // what was written of it stays on a line of its own
		}
		_ = out.WriteByte('\n')
	}
	err := out.Flush()
	if s.torn = err != nil; s.torn {
		return slices.Repeat([]error{dispatcher.Unavailable(err, 0)}, len(events))
	}
	return errs
}

// Close does nothing. The caller of New closes the writer.
func (s *sink) Close() error { return nil }
