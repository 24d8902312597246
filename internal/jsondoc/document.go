// Package jsondoc checks the JSON documents of a run (payload, metadata, result) before they are sent, so that the
// database does not refuse them.
package jsondoc

import (
	"bytes"
	"fmt"
	"strconv"
	"sync"

	"github.com/go-json-experiment/json/jsontext"
)

// Limits of the documents of a run. Bytes are counted twice: as given, and as Postgres writes the
// document, with a space after each colon and comma, and without exponents.
const (
	MaxPayload  = 256 << 10 // bytes of a payload
	MaxMetadata = 16 << 10  // bytes of metadata
	MaxResult   = 1 << 20   // bytes of a result
	MaxDepth    = 64        // levels of objects and arrays, including the outermost
	MaxMembers  = 10_000    // members of one object
	MaxKey      = 512       // bytes of a member's name
)

// A Error says why a payload, metadata or a result cannot be stored.
type Error struct {
	Document string // "payload", "metadata" or "result"
	Path     string // where the error is, such as $.lines[2].amount; long paths are cut
	Reason   string // what is wrong
	Fix      string // what to do about it
}

func (e *Error) Error() string {
	return e.Document + ": " + e.Path + ": " + e.Reason + "; " + e.Fix
}

// CheckResult returns an *Error if data cannot be stored as a handler's result. A result is one JSON value of any
// kind, in UTF-8, of at most MaxResult bytes. It has no duplicate keys, no \u0000 and no lone surrogates. Its numbers
// are within ±1e308, and it is within MaxDepth, MaxMembers and MaxKey.
func CheckResult(data []byte) error {
	return Check("result", data, MaxResult, false)
}

// CheckPayload returns an *Error if data cannot be the payload of a run. A payload is a JSON object of at most
// MaxPayload bytes. The other limits are those of CheckResult.
func CheckPayload(data []byte) error {
	return Check("payload", data, MaxPayload, true)
}

// Check returns an *Error if data cannot be stored as a document of at most limit bytes. document is the name that the
// error has for it. With object, the outermost value must be an object. Check neither changes nor keeps data.
func Check(document string, data []byte, limit int, object bool) error {
	var e *Error
	if len(data) > limit {
		e = tooLong(document, strconv.Itoa(len(data))+" bytes", limit)
	} else {
		s := scanners.Get().(*scanner)
		e = s.scan(document, data, limit, object)
		s.reset(nil)
		scanners.Put(s)
	}
	if e == nil {
		return nil
	}
	e.Document = document
	return e
}

var scanners = sync.Pool{New: func() any {
	s := new(scanner)
	s.decoder = jsontext.NewDecoder(&s.buffer)
	return s
}}

// A scanner checks one document. Scanners are reused, because a decoder is large.
type scanner struct {
	data    []byte
	buffer  bytes.Buffer // holds data; the decoder reads a bytes.Buffer without copying
	decoder *jsontext.Decoder
	stored  int // bytes so far, as Postgres writes them
}

func (s *scanner) reset(data []byte) {
	s.data, s.stored = data, 0
	s.buffer = *bytes.NewBuffer(data)
	s.decoder.Reset(&s.buffer)
}

func (s *scanner) scan(document string, data []byte, limit int, object bool) *Error {
	s.reset(data)
	if root := s.decoder.PeekKind(); object && root != '{' {
		return s.refuseRoot(root)
	}
	for {
		if e := s.next(); e != nil {
			return e
		}
		if s.decoder.StackDepth() == 0 {
			break
		}
	}
	end := s.decoder.InputOffset()
	if rest := bytes.TrimLeft(data[end:], " \t\r\n"); len(rest) > 0 {
		return refuse("$", "trailing data at "+s.place(len(data)-len(rest)), "send one document at a time")
	}
	if s.stored > limit {
		return tooLong(document, strconv.Itoa(s.stored)+" bytes as Postgres writes it (': ', ', ', no exponents)", limit)
	}
	return nil
}

// next reads a key, a scalar, or the start or end of an object or array.
func (s *scanner) next() *Error {
	kind := s.decoder.PeekKind()
	parent, n := s.decoder.StackIndex(s.decoder.StackDepth())
	if kind == '}' || kind == ']' {
		s.stored++
		return s.skip()
	}
	key := parent == '{' && n%2 == 0
	if n > 0 {
		s.stored += len(", ") // or ": "
	}
	if kind == '{' || kind == '[' {
		s.stored++
		if e := s.skip(); e != nil || s.decoder.StackDepth() <= MaxDepth {
			return e
		}
		return refuse(s.path(), fmt.Sprintf("nested deeper than %d levels", MaxDepth), "flatten the document")
	}
	value, err := s.decoder.ReadValue()
	switch {
	case err != nil:
		return s.refuseSyntax(err)
	case key:
		return s.checkKey(value, int(n/2))
	case kind == '"':
		return s.checkText(value)
	case kind == '0':
		return s.checkNumber(value)
	}
	s.stored += len(value)
	return nil
}

func (s *scanner) skip() *Error {
	if _, err := s.decoder.ReadToken(); err != nil {
		return s.refuseSyntax(err)
	}
	return nil
}

func (s *scanner) checkKey(key jsontext.Value, members int) *Error {
	if members == MaxMembers {
		return refuse(s.pathOf(s.decoder.StackPointer().Parent()),
			fmt.Sprintf("more than %d members in one object", MaxMembers), "use an array, or several objects")
	}
	if len(key) > MaxKey+len(`""`) {
		if name, _ := jsontext.AppendUnquote(nil, key); len(name) > MaxKey {
			return refuse(s.pathOf(s.decoder.StackPointer().Parent()),
				fmt.Sprintf("key %s has %d bytes, the limit is %d", strconv.Quote(clip(string(name))), len(name), MaxKey),
				"shorten it, or make it a value")
		}
	}
	return s.checkText(key)
}

func (s *scanner) checkText(text jsontext.Value) *Error {
	s.stored += len(text) // at most: Postgres writes escapes as long or shorter
	if !holdsNUL(text) {
		return nil
	}
	return refuse(s.path(), `the character \u0000 cannot be stored by Postgres`, "remove it, or encode the text with base64")
}

// holdsNUL reports whether a valid JSON string has the escape \u0000 in it.
func holdsNUL(text []byte) bool {
	for {
		i := bytes.IndexByte(text, '\\')
		if i < 0 {
			return false
		}
		if bytes.HasPrefix(text[i:], []byte(`\u0000`)) {
			return true
		}
		text = text[i+2:] // past the escaped character, which may be a backslash
	}
}

// checkNumber refuses numbers that do not fit a float64, because most readers use that type, and numbers
// that do not fit the numeric type of Postgres, which has at most maxScale digits after the point.
func (s *scanner) checkNumber(number jsontext.Value) *Error {
	const maxScale = 16383
	e := bytes.IndexAny(number, "eE")
	if e < 0 && len(number) <= 308 {
		s.stored += len(number)
		return nil
	}
	if f, err := strconv.ParseFloat(string(number), 64); err != nil || max(f, -f) > 1e308 {
		return s.refuseNumber(number, "is beyond ±1e308")
	}
	digits, exponent := bytes.TrimPrefix(number, []byte("-")), 0
	if e >= 0 {
		var err error
		digits, _, _ = bytes.Cut(digits, number[e:])
		if exponent, err = strconv.Atoi(string(number[e+1:])); err != nil || max(exponent, -exponent) > maxScale {
			return s.refuseNumber(number, fmt.Sprintf("has an exponent beyond ±%d", maxScale))
		}
	}
	whole, fraction, _ := bytes.Cut(digits, []byte("."))
	scale := max(len(fraction)-exponent, 0)
	if scale > maxScale {
		return s.refuseNumber(number, fmt.Sprintf("has %d digits after the point, Postgres takes %d", scale, maxScale))
	}
	s.stored += max(len(whole)+exponent, 1) + scale
	if scale > 0 {
		s.stored += len(".")
	}
	if number[0] == '-' {
		s.stored += len("-")
	}
	return nil
}
