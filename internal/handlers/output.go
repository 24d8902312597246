package handlers

import (
	"bytes"
	"strings"
)

// A capture keeps what is written until its limit is passed. After that it keeps nothing more.
type capture struct {
	limit int
	data  []byte
	over  bool
	full  chan struct{} // closed when the limit is passed
}

func (c *capture) Write(p []byte) (int, error) {
	if c.over {
		return len(p), nil
	}
	if len(c.data)+len(p) > c.limit {
		c.over = true
		close(c.full)
		return len(p), nil
	}
	c.data = append(c.data, p...)
	return len(p), nil
}

// maxTail is how many bytes of stderr go into an error, and how many of a line into the log.
const maxTail = 4 << 10

// A tail keeps the end of what is written, and passes on each line.
type tail struct {
	secrets secrets
	emit    func(line string) // nil: lines are not passed on
	last    []byte
	line    []byte
}

func (t *tail) Write(p []byte) (int, error) {
	n := len(p)
	t.last = append(t.last, p...)
	// Keep twice of what is shown, so that no secret is cut at the beginning of the shown part.
	if len(t.last) > 4*maxTail {
		t.last = append(t.last[:0], t.last[len(t.last)-2*maxTail:]...)
	}
	for t.emit != nil && len(p) > 0 {
		text, rest, ended := bytes.Cut(p, []byte("\n"))
		t.line = append(t.line, text[:min(len(text), max(maxTail-len(t.line), 0))]...)
		if ended {
			t.flush()
		}
		p = rest
	}
	return n, nil
}

// flush passes on the pending line, if any.
func (t *tail) flush() {
	if text := line(t.secrets.mask(string(t.line)), maxTail); text != "" {
		t.emit(text)
	}
	t.line = t.line[:0]
}

// text returns the end of what was written, cleaned and masked: its last line that is not empty, cut to 512
// bytes, and the text before that.
func (t *tail) text() (before, last string) {
	text := strings.TrimSpace(cutFront(clean(t.secrets.mask(string(t.last))), maxTail))
	if i := strings.LastIndexByte(text, '\n'); i >= 0 {
		before, text = strings.TrimRight(text[:i], " \n\t"), text[i+1:]
	}
	return before, line(text, maxExcerpt)
}

// cutFront returns the last most bytes of text.
func cutFront(text string, most int) string {
	const mark = "…"
	if len(text) <= most {
		return text
	}
	return mark + strings.ToValidUTF8(text[len(text)-max(most-len(mark), 0):], "")
}
