package handlers

import (
	"bytes"
	"encoding/json"
	"fmt"
	"slices"
	"strings"
	"unicode"

	"github.com/simple-workflow/simple-workflow/internal/jsondoc"
	"github.com/simple-workflow/simple-workflow/internal/settling"
	"github.com/simple-workflow/simple-workflow/run"
)

// secrets are values that must not appear in errors and logs, even if a server or program repeats them.
type secrets []string

func (s *secrets) add(value string) {
	const least = 4 // masking shorter ones would hide ordinary text, and give the secret away
	if len(value) < least {
		return
	}
	*s = append(*s, value)
	// Longest first, since one may contain another.
	slices.SortFunc(*s, func(a, b string) int { return len(b) - len(a) })
}

// with returns a copy of s with one more value.
func (s secrets) with(value string) secrets {
	all := slices.Clone(s)
	all.add(value)
	return all
}

func (s secrets) mask(text string) string {
	for _, secret := range s {
		text = strings.ReplaceAll(text, secret, "***")
	}
	return text
}

// clean replaces invalid UTF-8, and control characters other than newlines and tabs.
func clean(text string) string {
	return strings.Map(func(r rune) rune {
		if r == '\n' || r == '\t' || unicode.IsPrint(r) {
			return r
		}
		return ' '
	}, strings.ToValidUTF8(text, "\uFFFD"))
}

// line returns text as one clean line of at most most bytes; an ellipsis at its end says that it was cut.
func line(text string, most int) string {
	text = strings.Join(strings.Fields(clean(text)), " ")
	if len(text) > most {
		const more = "…"
		text = strings.ToValidUTF8(text[:most-len(more)], "") + more
	}
	return text
}

// result checks the answer of a handler: it is empty, or one JSON value that can be stored.
func result(data []byte) (json.RawMessage, error) {
	data = bytes.TrimSpace(data)
	if len(data) == 0 {
		return nil, nil
	}
	if err := jsondoc.CheckResult(data); err != nil {
		return nil, rejected(err)
	}
	return data, nil
}

// tooLong is the error for a result over the limit.
func tooLong(limit int) error {
	return rejected(fmt.Errorf("result: more than %d bytes; keep it elsewhere and return a reference", limit))
}

// rejected marks an answer that cannot be stored. The run fails at once: its work is done, and must not be done
// again.
func rejected(err error) error {
	return run.Permanent(settling.Technical(run.WithCode(settling.CodeResult, err)))
}
