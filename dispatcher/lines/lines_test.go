package lines_test

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"strings"
	"testing"
	"time"

	"github.com/cloudevents/sdk-go/v2/event"

	"github.com/simple-workflow/simple-workflow/dispatcher"
	"github.com/simple-workflow/simple-workflow/dispatcher/lines"
)

func newEvent(id, data string) event.Event {
	e := event.New()
	e.SetID(id)
	e.SetSource("/test")
	e.SetType("test.told")
	e.SetSubject("a")
	e.SetDataContentType("application/json")
	e.DataEncoded = []byte(data)
	return e
}

// Each event is written as one line, which decodes to the same event.
func TestLines(t *testing.T) {
	var out bytes.Buffer
	sent := []event.Event{newEvent("1", `{"text": "two\nlines  é"}`), newEvent("2", `[1, 2]`), newEvent("3", `null`)}
	for _, err := range lines.New(&out).Publish(t.Context(), sent) {
		if err != nil {
			t.Error(err)
		}
	}
	got := strings.Split(strings.TrimSuffix(out.String(), "\n"), "\n")
	if len(got) != len(sent) {
		t.Fatalf("%d lines for %d events", len(got), len(sent))
	}
	for k, line := range got {
		e := event.New()
		if err := json.Unmarshal([]byte(line), &e); err != nil || e.String() != sent[k].String() {
			t.Errorf("got  %s, %v\nwant %s", e, err, sent[k])
		}
	}
}

// A full is a writer that fails once it has written room bytes.
type full struct {
	bytes.Buffer
	room int
}

var errFull = errors.New("no space left on device")

func (f *full) Write(p []byte) (int, error) {
	n := min(len(p), f.room)
	f.room -= n
	_, _ = f.Buffer.Write(p[:n])
	if n < len(p) {
		return n, errFull
	}
	return n, nil
}

// K43, K44: while the disk is full, no event is acknowledged. Later events start on a new line, so that only the
// incomplete line cannot be read.
func TestTornLine(t *testing.T) {
	disk := &full{room: 30}
	s := lines.New(disk)
	for _, err := range s.Publish(t.Context(), []event.Event{newEvent("1", `{}`), newEvent("2", `{}`)}) {
		if fmt.Sprintf("%T", err) != "*dispatcher.unavailable" || !errors.Is(err, errFull) {
			t.Errorf("%T %v", err, err)
		}
	}
	disk.room = 1 << 20
	if errs := s.Publish(t.Context(), []event.Event{newEvent("1", `{}`), newEvent("2", `{}`)}); errors.Join(errs...) != nil {
		t.Error(errs)
	}
	got := strings.Split(strings.TrimSuffix(disk.String(), "\n"), "\n")
	if len(got) != 3 || json.Valid([]byte(got[0])) || !json.Valid([]byte(got[1])) || !json.Valid([]byte(got[2])) {
		t.Errorf("%q", got)
	}
}

// On a pipe that nobody reads, Publish returns when its context ends and acknowledges nothing. Once the pipe is read,
// lines are complete.
func TestBlockedPipe(t *testing.T) {
	r, w := io.Pipe()
	s := lines.New(w)
	for id := range 2 {
		ctx, done := context.WithTimeout(t.Context(), 20*time.Millisecond)
		if errs := s.Publish(ctx, []event.Event{newEvent(fmt.Sprint(id), `{}`)}); errs[0] != dispatcher.ErrNotTried {
			t.Errorf("%v", errs)
		}
		done()
	}
	read := make(chan []byte, 1)
	go func() {
		text, _ := io.ReadAll(r)
		read <- text
	}()
	if errs := s.Publish(t.Context(), []event.Event{newEvent("2", `{}`)}); errs[0] != nil {
		t.Error(errs)
	}
	_ = w.Close()
	got := strings.Split(strings.TrimSuffix(string(<-read), "\n"), "\n")
	if len(got) != 2 || !strings.Contains(got[0], `"id":"0"`) || !strings.Contains(got[1], `"id":"2"`) {
		t.Errorf("%q", got)
	}
}
