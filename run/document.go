package run

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"strconv"
	"strings"
	"sync"
	"unicode/utf8"

	"github.com/go-json-experiment/json/jsontext"
)

// Limits of the documents that a run carries. Bytes are counted both as given and as
// Postgres writes the document, which is with a space after each colon and comma and with
// exponents spelled out.
const (
	MaxPayload  = 256 << 10 // bytes of a payload
	MaxMetadata = 16 << 10  // bytes of metadata
	MaxResult   = 1 << 20   // bytes of a result
	MaxDepth    = 64        // levels of objects and arrays, the outermost counted
	MaxMembers  = 10_000    // members of one object
	MaxKey      = 512       // bytes of a member's name
)

// A DocumentError says why a payload, metadata or a result cannot be stored.
type DocumentError struct {
	Document string // "payload", "metadata" or "result"
	Path     string // of the culprit, such as $.lines[2].amount; long ones are cut
	Reason   string // what is wrong
	Fix      string // what to do about it
}

func (e *DocumentError) Error() string {
	return e.Document + ": " + e.Path + ": " + e.Reason + "; " + e.Fix
}

// CheckResult reports whether a handler's result can be stored, as a *DocumentError if not.
// A result is any one JSON value of at most MaxResult bytes in UTF-8, without duplicate
// keys, \u0000 or lone surrogates, with numbers of at most 1e308, and within MaxDepth,
// MaxMembers and MaxKey.
func CheckResult(data []byte) error {
	return checkResult(data, MaxResult)
}

func checkResult(data []byte, limit int) error {
	return check("result", data, limit, false)
}

// checkDocument is CheckResult for payloads, which must be objects. For metadata, call check.
func checkDocument(data []byte, limit int) error {
	return check("payload", data, limit, true)
}

// check names the document in its errors as given. With object, the outermost value must be
// one. It never changes or keeps data.
func check(document string, data []byte, limit int, object bool) error {
	var e *DocumentError
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

func tooLong(document, size string, limit int) *DocumentError {
	return &DocumentError{
		Path:   "$",
		Reason: fmt.Sprintf("%s, the limit is %d", size, limit),
		Fix:    "store large data elsewhere and put a reference into the " + document,
	}
}

var scanners = sync.Pool{New: func() any {
	s := new(scanner)
	s.decoder = jsontext.NewDecoder(&s.buffer)
	return s
}}

// A scanner walks over one document. It is reused, as a decoder is large.
type scanner struct {
	data    []byte
	buffer  bytes.Buffer // over data; the decoder reads such a buffer in place
	decoder *jsontext.Decoder
	stored  int // bytes so far, as Postgres writes them
}

func (s *scanner) reset(data []byte) {
	s.data, s.stored = data, 0
	s.buffer = *bytes.NewBuffer(data)
	s.decoder.Reset(&s.buffer)
}

func (s *scanner) scan(document string, data []byte, limit int, object bool) *DocumentError {
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
func (s *scanner) next() *DocumentError {
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

func (s *scanner) skip() *DocumentError {
	if _, err := s.decoder.ReadToken(); err != nil {
		return s.refuseSyntax(err)
	}
	return nil
}

func (s *scanner) checkKey(key jsontext.Value, members int) *DocumentError {
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

func (s *scanner) checkText(text jsontext.Value) *DocumentError {
	s.stored += len(text) // escapes only ever become shorter
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

// checkNumber refuses what does not fit a float64, as most readers use one, and what does
// not fit Postgres' numeric, which has at most maxScale digits after the point.
func (s *scanner) checkNumber(number jsontext.Value) *DocumentError {
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

func (s *scanner) refuseNumber(number []byte, reason string) *DocumentError {
	return refuse(s.path(), "number "+clip(string(number))+" "+reason, "round it, or send it as a string")
}

func (s *scanner) refuseRoot(root jsontext.Kind) *DocumentError {
	if root != '[' {
		if _, err := s.decoder.ReadValue(); err == io.EOF {
			return refuse("$", "object expected, got nothing", "send {} if there is nothing to say")
		} else if err != nil {
			return s.refuseSyntax(err)
		}
	}
	names := map[jsontext.Kind]string{
		'n': "null", 't': "a boolean", 'f': "a boolean", '0': "a number", '"': "a string", '[': "an array",
	}
	return refuse("$", "object expected, got "+names[root], `wrap the value: {"value": …}`)
}

// refuseSyntax puts the decoder's error into our words.
func (s *scanner) refuseSyntax(err error) *DocumentError {
	if name := encodingOf(s.data); name != "" {
		return refuse("$", "the document "+name, "send UTF-8 without a byte order mark")
	}
	var syntax *jsontext.SyntacticError
	if err == io.EOF {
		return refuse("$", "value expected, got nothing", "send null if there is nothing to say")
	}
	if !errors.As(err, &syntax) {
		return refuse("$", err.Error(), "check the document")
	}
	path, at := s.pathOf(syntax.JSONPointer), int(syntax.ByteOffset)
	if errors.Is(err, jsontext.ErrDuplicateName) {
		return refuse(path, "this key is there twice, again at "+s.place(at), "remove one: Postgres would silently keep the last")
	}
	reason, fix := explain(s.data, at, syntax.Err)
	return refuse(path, s.place(at)+": "+reason, fix)
}

// encodingOf names an encoding other than plain UTF-8 by the first bytes of a document.
func encodingOf(data []byte) string {
	switch {
	case bytes.HasPrefix(data, []byte("\xef\xbb\xbf")):
		return "starts with a byte order mark (BOM)"
	case bytes.HasPrefix(data, []byte("\xff\xfe")), bytes.HasPrefix(data, []byte("\xfe\xff")),
		len(data) > 1 && (data[0] == 0) != (data[1] == 0):
		return "is UTF-16, UTF-8 is required"
	}
	return ""
}

// explain says what is wrong at an offset, and what to do.
func explain(data []byte, at int, err error) (reason, fix string) {
	rest := data[min(at, len(data)):]
	if r, n := utf8.DecodeRune(rest); r == utf8.RuneError && n == 1 {
		return fmt.Sprintf(`invalid UTF-8, byte \x%02x`, rest[0]), "encode the text as UTF-8, binary data with base64"
	}
	reason = err.Error()
	if errors.Is(err, io.ErrUnexpectedEOF) || len(rest) == 0 {
		return "the document ends too early", "send it whole and close all brackets and quotes"
	}
	before := bytes.TrimRight(data[:len(data)-len(rest)], " \t\r\n")
	switch c := rest[0]; {
	case surrogate(rest):
		return `lone surrogate ` + string(rest[:6]), `use pairs such as \ud83d\ude00, or the character itself`
	case c == '\\':
		fix = `the escapes are \" \\ \/ \b \f \n \r \t and \u with four digits`
	case c < ' ':
		fix = `write line breaks and other control characters in strings as escapes such as \n`
	case c == '\'':
		fix = "use double quotes"
	case c == '/' || c == '#':
		fix = "remove comments"
	case c == ',':
		fix = "remove this comma: one stands between two members or elements, none after the last"
	case c == 'N' || c == 'I' || bytes.HasSuffix(before, []byte("-")):
		fix = "use null or a string instead of NaN and Infinity"
	case c == '+' || c == '.' || (c == 'x' || c == 'X' || '0' <= c && c <= '9') && bytes.HasSuffix(before, []byte("0")):
		fix = "write numbers like 12, -0.5 or 1e6: no leading zero, plus sign or hexadecimal"
	case 'a' <= c|' ' && c|' ' <= 'z' || c == '_':
		fix = "put strings and keys into double quotes; the only words are true, false and null"
	default:
		fix = "make it with a JSON encoder, not by hand"
	}
	return reason, fix
}

// surrogate reports whether text starts with the escape of half a character, such as \ud83d.
func surrogate(text []byte) bool {
	return len(text) >= 6 && bytes.HasPrefix(text, []byte(`\u`)) && text[2]|' ' == 'd' &&
		strings.IndexByte("89abcdefABCDEF", text[3]) >= 0
}

func refuse(path, reason, fix string) *DocumentError {
	return &DocumentError{Path: path, Reason: reason, Fix: fix}
}

// place is where an offset is, for people.
func (s *scanner) place(at int) string {
	before := s.data[:min(at, len(s.data))]
	start := bytes.LastIndexByte(before, '\n') + 1
	return fmt.Sprintf("offset %d (line %d, column %d)",
		at, bytes.Count(before, []byte("\n"))+1, utf8.RuneCount(before[start:])+1)
}

// path is that of the last key or value that was read.
func (s *scanner) path() string {
	return s.pathOf(s.decoder.StackPointer())
}

// pathOf writes a pointer to somewhere on the decoder's stack as $.a[2]["b c"].
func (s *scanner) pathOf(pointer jsontext.Pointer) string {
	path, level := []byte("$"), 0
	for token := range pointer.Tokens() {
		level++
		kind, _ := s.decoder.StackIndex(min(level, s.decoder.StackDepth()))
		switch {
		case kind == '[':
			path = append(append(append(path, '['), token...), ']')
		case plain(token):
			path = append(append(path, '.'), token...)
		default:
			path = append(strconv.AppendQuote(append(path, '['), clip(token)), ']')
		}
	}
	return clip(string(path))
}

func plain(name string) bool {
	for i, c := range []byte(name) {
		if c != '_' && (c|' ' < 'a' || 'z' < c|' ') && (i == 0 || c < '0' || '9' < c) {
			return false
		}
	}
	return name != ""
}

// clip cuts what is quoted in messages to 120 characters.
func clip(s string) string {
	n := 0
	for i := range s {
		if n == 120 {
			return s[:i] + "…"
		}
		n++
	}
	return s
}
