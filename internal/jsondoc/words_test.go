package jsondoc

import (
	"encoding/json"
	"errors"
	"fmt"
	"strings"
	"testing"
	"unicode/utf8"
)

// Documents that Postgres would refuse or change silently, or that would overload it, are refused before they
// are sent, with the path, the reason and a fix. The same holds for results, except for the rule about the
// outermost value.
func TestRefusedDocuments(t *testing.T) {
	tests := []struct {
		name, document, want string
	}{
		{"J1 empty", ``, `payload: $: object expected, got nothing; send {} if there is nothing to say`},
		{"J1 blank", " \n", `payload: $: object expected, got nothing; send {} if there is nothing to say`},
		{"J2 null", `null`, `payload: $: object expected, got null; wrap the value: {"value": …}`},
		{"J2 boolean", `true`, `payload: $: object expected, got a boolean; wrap the value: {"value": …}`},
		{"J2 number", `42`, `payload: $: object expected, got a number; wrap the value: {"value": …}`},
		{"J2 string", `"text"`, `payload: $: object expected, got a string; wrap the value: {"value": …}`},
		{"J2 array", `[1]`, `payload: $: object expected, got an array; wrap the value: {"value": …}`},
		{"J3 cut off", `{`, `payload: $: offset 1 (line 1, column 2): the document ends too early; send it whole and close all brackets and quotes`},
		{"J3 cut off in string", `{"a":"b`, `payload: $.a: offset 7 (line 1, column 8): the document ends too early; send it whole and close all brackets and quotes`},
		{"J3 cut off word", `nul`, `payload: $: offset 3 (line 1, column 4): the document ends too early; send it whole and close all brackets and quotes`},
		{"J3 no value", `{"a":}`, `payload: $.a: offset 5 (line 1, column 6): missing value after object name; make it with a JSON encoder, not by hand`},
		{"J3 trailing comma", `{"a":1,}`, `payload: $: offset 6 (line 1, column 7): invalid character ',' at start of value; remove this comma: one stands between two members or elements, none after the last`},
		{"J3 single quotes", `{'a':1}`, `payload: $: offset 1 (line 1, column 2): invalid character '\'' at start of value; use double quotes`},
		{"J3 later line", "{\n \"é\": {\n\"ü\": x}}", `payload: $["é"]["ü"]: offset 17 (line 3, column 6): invalid character 'x' at start of value; put strings and keys into double quotes; the only words are true, false and null`},
		{"J4 two documents", `{}{}`, `payload: $: trailing data at offset 2 (line 1, column 3); send one document at a time`},
		{"J4 after white space", "{} \n;", `payload: $: trailing data at offset 4 (line 2, column 1); send one document at a time`},
		{"J5 BOM", "\ufeff{}", `payload: $: the document starts with a byte order mark (BOM); send UTF-8 without a byte order mark`},
		{"J6 UTF-16 little endian", "\xff\xfe{\x00}\x00", `payload: $: the document is UTF-16, UTF-8 is required; send UTF-8 without a byte order mark`},
		{"J6 UTF-16 big endian", "\xfe\xff\x00{\x00}", `payload: $: the document is UTF-16, UTF-8 is required; send UTF-8 without a byte order mark`},
		{"J6 UTF-16 without BOM", "{\x00}\x00", `payload: $: the document is UTF-16, UTF-8 is required; send UTF-8 without a byte order mark`},
		{"J7 invalid UTF-8", "{\"a\":\"x\xffy\"}", `payload: $.a: offset 7 (line 1, column 8): invalid UTF-8, byte \xff; encode the text as UTF-8, binary data with base64`},
		{"J7 in a key", "{\"a\xff\":1}", `payload: $: offset 3 (line 1, column 4): invalid UTF-8, byte \xff; encode the text as UTF-8, binary data with base64`},
		{"J8 NUL in a value", `{"b":1,"a":"x\\\u0000"}`, `payload: $.a: the character \u0000 cannot be stored by Postgres; remove it, or encode the text with base64`},
		{"J9 NUL in a key", `{"a\u0000":1}`, `payload: $["a\x00"]: the character \u0000 cannot be stored by Postgres; remove it, or encode the text with base64`},
		{"J10 lone surrogate", `{"a":"\ud800"}`, `payload: $.a: offset 6 (line 1, column 7): lone surrogate \ud800; use pairs such as \ud83d\ude00, or the character itself`},
		{"J10 second half", `{"a":"\uDC00"}`, `payload: $.a: offset 6 (line 1, column 7): lone surrogate \uDC00; use pairs such as \ud83d\ude00, or the character itself`},
		{"J10 no pair", `{"a":"\ud800\u0041"}`, `payload: $.a: offset 6 (line 1, column 7): lone surrogate \ud800; use pairs such as \ud83d\ude00, or the character itself`},
		{"J10 half an escape", `{"a":"\ud80` + "\u0096" + `x"}`, `payload: $.a: offset 6 (line 1, column 7): invalid escape sequence "\\ud80\xc2" in string; the escapes are \" \\ \/ \b \f \n \r \t and \u with four digits`},
		{"J11 duplicate key", `{"a":1,"a":2}`, `payload: $.a: this key is there twice, again at offset 7 (line 1, column 8); remove one: Postgres would silently keep the last`},
		{"J11 deep and escaped", `{"x":[0,{"a b":1,"a\u0020b":2}]}`, `payload: $.x[1]["a b"]: this key is there twice, again at offset 17 (line 1, column 18); remove one: Postgres would silently keep the last`},
		{"J13 huge", `{"a":[{"b":1},{"b":1e400}]}`, `payload: $.a[1].b: number 1e400 is beyond ±1e308; round it, or send it as a string`},
		{"J13 huge negative", `{"a":-1e400}`, `payload: $.a: number -1e400 is beyond ±1e308; round it, or send it as a string`},
		{"J13 just too much", `{"a":1.1E308}`, `payload: $.a: number 1.1E308 is beyond ±1e308; round it, or send it as a string`},
		{"J13 digits", `{"a":1` + strings.Repeat("0", 309) + `}`, `payload: $.a: number 1` + strings.Repeat("0", 119) + `… is beyond ±1e308; round it, or send it as a string`},
		{"J14 absurd", `{"a":1e400000}`, `payload: $.a: number 1e400000 is beyond ±1e308; round it, or send it as a string`},
		{"J14 absurd zero", `{"a":0e99999999999999999999}`, `payload: $.a: number 0e99999999999999999999 has an exponent beyond ±16383; round it, or send it as a string`},
		{"J14 absurdly small", `{"a":1e-16384}`, `payload: $.a: number 1e-16384 has an exponent beyond ±16383; round it, or send it as a string`},
		{"J14 too fine", `{"a":1.5e-16383}`, `payload: $.a: number 1.5e-16383 has 16384 digits after the point, Postgres takes 16383; round it, or send it as a string`},
		{"J15 NaN", `{"a":NaN}`, `payload: $.a: offset 5 (line 1, column 6): invalid character 'N' at start of value; use null or a string instead of NaN and Infinity`},
		{"J15 infinity", `{"a":-Infinity}`, `payload: $.a: offset 6 (line 1, column 7): invalid character 'I' in number (expecting digit); use null or a string instead of NaN and Infinity`},
		{"J18 leading zero", `{"a":0123}`, `payload: $: offset 6 (line 1, column 7): invalid character '1' after object value (expecting ',' or '}'); write numbers like 12, -0.5 or 1e6: no leading zero, plus sign or hexadecimal`},
		{"J18 plus", `{"a":+1}`, `payload: $.a: offset 5 (line 1, column 6): invalid character '+' at start of value; write numbers like 12, -0.5 or 1e6: no leading zero, plus sign or hexadecimal`},
		{"J18 point", `{"a":.5}`, `payload: $.a: offset 5 (line 1, column 6): invalid character '.' at start of value; write numbers like 12, -0.5 or 1e6: no leading zero, plus sign or hexadecimal`},
		{"J18 hexadecimal", `{"a":0x10}`, `payload: $: offset 6 (line 1, column 7): invalid character 'x' after object value (expecting ',' or '}'); write numbers like 12, -0.5 or 1e6: no leading zero, plus sign or hexadecimal`},
		{"J19 comment", `{"a":1 // why
			}`, `payload: $: offset 7 (line 1, column 8): invalid character '/' after object value (expecting ',' or '}'); remove comments`},
		{"J19 trailing comma", `{"a":[1,]}`, `payload: $.a: offset 7 (line 1, column 8): invalid character ',' at start of value; remove this comma: one stands between two members or elements, none after the last`},
		{"J19 bare key", `{a:1}`, `payload: $: offset 1 (line 1, column 2): invalid character 'a' at start of value; put strings and keys into double quotes; the only words are true, false and null`},
		{"line break", "{\"a\":\"x\ny\"}", `payload: $.a: offset 7 (line 1, column 8): invalid character '\n' in string (expecting non-control character); write line breaks and other control characters in strings as escapes such as \n`},
		{"escape", `{"a":"C:\x"}`, `payload: $.a: offset 8 (line 1, column 9): invalid escape sequence ` + "`\\x`" + ` in string; the escapes are \" \\ \/ \b \f \n \r \t and \u with four digits`},
		{"J20 depth 65", nested(65), `payload: $` + strings.Repeat(".a", 59) + `.…: nested deeper than 64 levels; flatten the document`},
		{"J22 long key", `{"b":{"` + strings.Repeat("k", 100_000) + `":1}}`, `payload: $.b: key "` + strings.Repeat("k", 120) + `…" has 100000 bytes, the limit is 512; shorten it, or make it a value`},
		{"J27 too long", `{"a": "` + strings.Repeat("x", MaxPayload-8) + `"}`, `payload: $: 262145 bytes, the limit is 262144; store large data elsewhere and put a reference into the payload`},
		{"J27 too long when stored", `{"a":"` + strings.Repeat("x", MaxPayload-8) + `"}`, `payload: $: 262145 bytes as Postgres writes it (': ', ', ', no exponents), the limit is 262144; store large data elsewhere and put a reference into the payload`},
		{"J27 exponents", `{"a": [` + strings.Repeat("1e-9999, ", 1000) + `0]}`, `payload: $: 10003010 bytes as Postgres writes it (': ', ', ', no exponents), the limit is 262144; store large data elsewhere and put a reference into the payload`},
	}
	for _, test := range tests {
		t.Run(test.name, func(t *testing.T) {
			err := Check("payload", []byte(test.document), MaxPayload, true)
			var e *Error
			if !errors.As(err, &e) || err.Error() != test.want {
				t.Fatalf("got  %v\nwant %s", err, test.want)
			}
			if e.Document != "payload" || e.Path == "" || e.Reason == "" || e.Fix == "" {
				t.Errorf("incomplete: %+v", e)
			}
		})
	}
}

// A result may be any value; the other rules are those of payloads.
func TestCheckResult(t *testing.T) {
	tests := []struct{ name, document, want string }{
		{"null", `null`, ``},
		{"boolean", `true`, ``},
		{"number", ` 42 `, ``},
		{"string", `"text"`, ``},
		{"array", `[1,[2]]`, ``},
		{"object", `{"a":1}`, ``},
		{"the limit", `"` + strings.Repeat("x", MaxResult-2) + `"`, ``},
		{"over the limit", `"` + strings.Repeat("x", MaxResult-1) + `"`, `result: $: 1048577 bytes, the limit is 1048576; store large data elsewhere and put a reference into the result`},
		{"nothing", ``, `result: $: value expected, got nothing; send null if there is nothing to say`},
		{"two", `1 2`, `result: $: trailing data at offset 2 (line 1, column 3); send one document at a time`},
		{"NUL", `["",["\u0000"]]`, `result: $[1][0]: the character \u0000 cannot be stored by Postgres; remove it, or encode the text with base64`},
		{"number too large", `1e309`, `result: $: number 1e309 is beyond ±1e308; round it, or send it as a string`},
		{"depth", strings.Repeat("[", 100_000), `result: $` + strings.Repeat("[0]", 39) + `[0…: nested deeper than 64 levels; flatten the document`},
		{"J21 members", `[` + members(50_000) + `]`, `result: $[0]: more than 10000 members in one object; use an array, or several objects`},
		{"BOM", "\ufeff1", `result: $: the document starts with a byte order mark (BOM); send UTF-8 without a byte order mark`},
	}
	for _, test := range tests {
		t.Run(test.name, func(t *testing.T) {
			got := ""
			if err := CheckResult([]byte(test.document)); err != nil {
				got = err.Error()
			}
			if got != test.want {
				t.Errorf("got  %s\nwant %s", got, test.want)
			}
		})
	}
}

// The error of any document, however large or odd, is at most 1000 bytes long.
func TestErrorsAreShort(t *testing.T) {
	long := strings.Repeat("é\x1b", 100_000)
	quoted, _ := json.Marshal(long)
	for _, document := range []string{
		fmt.Sprintf(`{%s:1}`, quoted),
		fmt.Sprintf(`{%s:1,%s:2}`, quoted, quoted),
		strings.Repeat(`{"`+strings.Repeat("k", 500)+`":`, 65),
		`{"a":1` + strings.Repeat("1", 100_000) + `}`,
		`{"a":"\` + long + `"}`,
		long,
	} {
		err := Check("payload", []byte(document), 10<<20, true)
		if err == nil || len(err.Error()) > 1000 || !utf8.ValidString(err.Error()) || strings.Contains(err.Error(), "\x1b") {
			t.Errorf("%.40q…: error of %d bytes: %.200q", document, len(fmt.Sprint(err)), fmt.Sprint(err))
		}
	}
}
