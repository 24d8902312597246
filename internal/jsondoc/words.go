package jsondoc

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"strconv"
	"unicode/utf8"

	"github.com/go-json-experiment/json/jsontext"
)

func tooLong(document, size string, limit int) *Error {
	return &Error{
		Path:   "$",
		Reason: fmt.Sprintf("%s, the limit is %d", size, limit),
		Fix:    "store large data elsewhere and put a reference into the " + document,
	}
}

func (s *scanner) refuseNumber(number []byte, reason string) *Error {
	return refuse(s.path(), "number "+clip(string(number))+" "+reason, "round it, or send it as a string")
}

func (s *scanner) refuseRoot(root jsontext.Kind) *Error {
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

// refuseSyntax turns the decoder's error into an Error with a path and a fix.
func (s *scanner) refuseSyntax(err error) *Error {
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

// encodingOf says which encoding other than plain UTF-8 a document has, judging by its first bytes, or "".
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
	if len(text) < 6 || !bytes.HasPrefix(text, []byte(`\u`)) {
		return false
	}
	code, err := strconv.ParseUint(string(text[2:6]), 16, 16)
	return err == nil && 0xd800 <= code && code <= 0xdfff
}

func refuse(path, reason, fix string) *Error {
	return &Error{Path: path, Reason: reason, Fix: fix}
}

// place describes an offset with its line and column.
func (s *scanner) place(at int) string {
	before := s.data[:min(at, len(s.data))]
	start := bytes.LastIndexByte(before, '\n') + 1
	return fmt.Sprintf("offset %d (line %d, column %d)",
		at, bytes.Count(before, []byte("\n"))+1, utf8.RuneCount(before[start:])+1)
}

// path returns the path of the last key or value that was read.
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
