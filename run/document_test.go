package run

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"regexp"
	"strings"
	"sync"
	"testing"
	"unicode/utf8"

	"github.com/jackc/pgx/v5"

	"github.com/simple-workflow/simple-workflow/internal/pgtest"
)

// Documents that Postgres would refuse, change silently or choke on are refused before they
// are sent, with the path, the reason and the fix. The rows are named after the table of bad
// payloads; all hold for results too, unless it is about the outermost value.
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
			err := checkDocument([]byte(test.document), MaxPayload)
			var e *DocumentError
			if !errors.As(err, &e) || err.Error() != test.want {
				t.Fatalf("got  %v\nwant %s", err, test.want)
			}
			if e.Document != "payload" || e.Path == "" || e.Reason == "" || e.Fix == "" {
				t.Errorf("incomplete: %+v", e)
			}
		})
	}
}

// Whatever is valid goes through, odd or not: nothing else is judged.
func TestAcceptedDocuments(t *testing.T) {
	tests := []struct{ name, document string }{
		{"empty object", `{}`},
		{"white space", " \t\r\n{ \"a\" : [ ] } \n"},
		{"J8 backslash before u0000", `{"a":"\\u0000"}`},
		{"J10 pair", `{"a":"\ud83d\ude00\uD83D\uDE00"}`},
		{"J12 case", `{"A":5,"a":6}`},
		{"J13 the most", `{"a":1e308,"b":-1E+308}`},
		{"J16 integers", `{"a":9007199254740993,"b":9223372036854775807,"c":12345678901234567890}`},
		{"J17 spellings", `{"a":1.10,"b":1e2,"c":-0,"d":1e-400,"e":0e400,"f":0.0}`},
		{"J17 finest", `{"a":1e-16383}`},
		{"J20 depth 64", nested(64)},
		{"J21 10,000 members", members(MaxMembers)},
		{"J22 key of 512 bytes", `{"` + strings.Repeat("k", MaxKey) + `":1}`},
		{"J22 the same, escaped", `{"` + strings.Repeat(`\u006b`, MaxKey) + `":1}`},
		{"J23 empty key", `{"":1}`},
		{"J24 prototype", `{"__proto__":1,"constructor":2}`},
		{"J25 script", `{"a":"<script>alert(1)</script>"}`},
		{"J26 terminal", `{"a":"\u001b[31m","b":"` + "\u202e\u200b" + `"}`},
		{"J27 exactly the limit", `{"a": "` + strings.Repeat("x", MaxPayload-9) + `"}`},
		{"J30 base64", `{"a": "` + strings.Repeat("QUJD", 50_000) + `"}`},
		{"J31 secrets", `{"password":"x","authorization":"Bearer y"}`},
		{"J37 many numbers", `{"a":[1` + strings.Repeat(",1", 80_000) + `]}`},
		{"J39 templates", `{"a":"{{.B}} ${C}"}`},
		{"J40 code", `{"a":"'; DROP TABLE workflow_run; --"}`},
	}
	for _, test := range tests {
		t.Run(test.name, func(t *testing.T) {
			data := []byte(test.document)
			if err := checkDocument(data, MaxPayload); err != nil {
				t.Error(err)
			}
			if string(data) != test.document {
				t.Error("the document was changed")
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

// An accepted document is a nil error, not a nil *DocumentError in one.
func TestAcceptedIsNil(t *testing.T) {
	if err := check("metadata", []byte(`{}`), MaxMetadata, true); err != nil {
		t.Errorf("err = %v, want nil", err)
	}
	err := check("metadata", []byte(`[]`), MaxMetadata, true)
	if want := "metadata: $: object expected, got an array; wrap the value: {\"value\": …}"; err == nil || err.Error() != want {
		t.Errorf("err = %v, want %s", err, want)
	}
}

// Postgres takes whatever is accepted here, and writes it in no more bytes than were counted;
// without escapes and exponents in exactly as many.
func TestPostgresTakesAccepted(t *testing.T) {
	pool := pgtest.New(t)
	respelled := regexp.MustCompile(`\\|[0-9][eE]|-0`)
	r := rand.New(rand.NewPCG(1, 2))
	accepted, refused := 0, 0
	for range 600 {
		document := randomDocument(r)
		s := scanners.Get().(*scanner)
		if e := s.scan("payload", []byte(document), MaxPayload, true); e != nil {
			refused++
			continue
		}
		accepted++
		rows, _ := pool.Query(t.Context(), `SELECT octet_length($1::text::jsonb::text)`, document)
		size, err := pgx.CollectExactlyOneRow(rows, pgx.RowTo[int])
		if err != nil {
			t.Errorf("%q: %v", document, err)
		}
		if size > s.stored || size != s.stored && !respelled.MatchString(document) {
			t.Errorf("%q: %d bytes, counted %d", document, size, s.stored)
		}
	}
	t.Logf("%d accepted, %d refused", accepted, refused)
	if accepted < 200 || refused < 50 {
		t.Errorf("%d accepted, %d refused: no fair sample", accepted, refused)
	}
}

// The database draws the lines where checkDocument does: the largest and deepest documents
// that pass here pass its guard, one more of either is refused by both.
func TestGuardAgrees(t *testing.T) {
	pool := pgtest.New(t)
	for _, document := range []string{
		`{"a":"` + strings.Repeat("x", MaxPayload-9) + `"}`,
		`{"a":"` + strings.Repeat("x", MaxPayload-8) + `"}`,
		`{"a":[` + strings.Repeat("1e300,", 870) + `1]}`,
		`{"a":[` + strings.Repeat("1e300,", 872) + `1]}`,
		nested(MaxDepth),
		nested(MaxDepth + 1),
	} {
		here := checkDocument([]byte(document), MaxPayload)
		_, there := pool.Exec(t.Context(), `INSERT INTO workflow_run (type, payload) VALUES ('a.b', $1::text::jsonb)`, document)
		if (here == nil) != (there == nil) {
			t.Errorf("%.20q… of %d bytes: here %v, there %v", document, len(document), here, there)
		}
	}
}

// However large or odd the document, its error is short enough to store.
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
		err := check("payload", []byte(document), 10<<20, true)
		if err == nil || len(err.Error()) > 1000 || !utf8.ValidString(err.Error()) || strings.Contains(err.Error(), "\x1b") {
			t.Errorf("%.40q…: error of %d bytes: %.200q", document, len(fmt.Sprint(err)), fmt.Sprint(err))
		}
	}
}

// Checks run side by side without mixing up each other's documents.
func TestCheckConcurrently(t *testing.T) {
	var all sync.WaitGroup
	for i := range 8 {
		all.Go(func() {
			want := fmt.Sprintf(`payload: $.a%d: number 1e999 is beyond ±1e308; round it, or send it as a string`, i)
			for range 200 {
				err := checkDocument(fmt.Appendf(nil, `{"b":[{}],"a%d":1e999}`, i), MaxPayload)
				if err == nil || err.Error() != want {
					t.Errorf("got  %v\nwant %s", err, want)
					return
				}
			}
		})
	}
	all.Wait()
}

// What checkDocument accepts, encoding/json accepts too; checking again gives the same
// answer, also after the document was written anew; the data stays as it is; and the size
// that is held against the limit is at least that of the compact form.
func FuzzCheckDocument(f *testing.F) {
	for _, seed := range []string{
		``, `{}`, `{"a":[1,{"b":"c\u00e9\n"},null,true]}`, `{"a":1,"a":2}`, `{"a":"\u0000"}`, `{"a":"\ud800"}`,
		`{"a":1e-400,"b":-0.10E+2}`, `{"a":1e400}`, `{"a":NaN}`, "\ufeff{}", "{\"a\":\"\xff\"}", `{}{}`, `{"":{"":[[]]}}`, small,
		nested(64), nested(65),
	} {
		f.Add([]byte(seed))
	}
	f.Fuzz(func(t *testing.T, data []byte) {
		before := bytes.Clone(data)
		err := checkDocument(data, 4096)
		again := checkDocument(data, 4096)
		if fmt.Sprint(err) != fmt.Sprint(again) {
			t.Fatalf("first %v, then %v", err, again)
		}
		if !bytes.Equal(data, before) {
			t.Fatal("the data was changed")
		}
		if err != nil {
			if !utf8.ValidString(err.Error()) || len(err.Error()) > 2000 {
				t.Fatalf("unfit error %q", err)
			}
			return
		}
		decoder := json.NewDecoder(bytes.NewReader(data))
		decoder.UseNumber()
		var object map[string]any
		if err := decoder.Decode(&object); err != nil || object == nil {
			t.Fatalf("accepted, but encoding/json says %v", err)
		}
		if _, err := decoder.Token(); err != io.EOF {
			t.Fatalf("accepted, but encoding/json finds more: %v", err)
		}
		if err := CheckResult(data); err != nil {
			t.Fatalf("accepted as a payload, but not as a result: %v", err)
		}
		written, err := json.Marshal(object)
		if err != nil {
			t.Fatal(err)
		}
		if err := checkDocument(written, 1<<20); err != nil {
			t.Fatalf("accepted, but not when written anew: %v", err)
		}
		if got := checkDocument(data, len(compact(t, data))-1); got == nil {
			t.Fatal("accepted below the size of the compact form")
		}
	})
}

func compact(t *testing.T, data []byte) []byte {
	var b bytes.Buffer
	if err := json.Compact(&b, data); err != nil {
		t.Fatal(err)
	}
	return b.Bytes()
}

func nested(depth int) string {
	return strings.Repeat(`{"a":`, depth-1) + "{}" + strings.Repeat("}", depth-1)
}

func members(n int) string {
	var b strings.Builder
	for i := range n {
		fmt.Fprintf(&b, `,"k%d":1`, i)
	}
	return "{" + b.String()[1:] + "}"
}

// randomDocument is a JSON object that may break any of the rules, but usually does not.
func randomDocument(r *rand.Rand) string {
	return "{" + randomMembers(r, 3) + "}"
}

func randomMembers(r *rand.Rand, depth int) string {
	var b strings.Builder
	for i := range r.IntN(5) {
		if i > 0 {
			b.WriteByte(',')
		}
		b.WriteString(randomString(r) + randomSpace(r) + ":" + randomSpace(r) + randomValue(r, depth-1))
	}
	return b.String()
}

func randomSpace(r *rand.Rand) string {
	return strings.Repeat([]string{" ", "\t", "\n", "\r\n"}[r.IntN(4)], max(0, r.IntN(6)-3))
}

func randomValue(r *rand.Rand, depth int) string {
	n := r.IntN(9)
	if depth == 0 {
		n = r.IntN(6)
	}
	switch n {
	case 0:
		return []string{"null", "true", "false", "[]", "{}"}[r.IntN(5)]
	case 1, 2:
		return randomString(r)
	case 3, 4, 5:
		return randomNumber(r)
	case 6:
		return "{" + randomMembers(r, depth) + "}"
	}
	elements := make([]string, r.IntN(4))
	for i := range elements {
		elements[i] = randomValue(r, depth-1) + randomSpace(r)
	}
	return "[" + strings.Join(elements, ",") + "]"
}

func randomString(r *rand.Rand) string {
	pieces := []string{"a", "é", "😀", `\n`, `\"`, `\\`, `\/`, `\u0001`, `\u001b`, `\u00e9`, `\u0022`, `\ud83d\ude00`, "\u007f", "\u2028", `\\u0000`, "x y"}
	if r.IntN(50) == 0 {
		pieces = append(pieces, `\u0000`, `\ud800`, "\xff", "\n")
	}
	var b strings.Builder
	for range r.IntN(8) {
		b.WriteString(pieces[r.IntN(len(pieces))])
	}
	return `"` + b.String() + `"`
}

func randomNumber(r *rand.Rand) string {
	n := []string{"", "-"}[r.IntN(2)] + fmt.Sprint(r.IntN(1000))
	if r.IntN(3) == 0 {
		n += fmt.Sprintf(".%03d", r.IntN(1000))
	}
	if r.IntN(3) == 0 {
		n += []string{"e", "E", "e+", "e-"}[r.IntN(4)] + fmt.Sprint(r.IntN([]int{4, 320, 17_000, 200_000}[r.IntN(4)]))
	}
	return n
}

const small = `{"order":4711,"amount":"12.50","lines":[1,2,3]}`

func BenchmarkCheckDocument(b *testing.B) {
	for name, document := range map[string]string{
		"50 bytes":  small,
		"1 kB":      `{"lines":[` + strings.Repeat(`{"sku":"ab-12","count":3,"price":1.10},`, 26) + `{}]}`,
		"200 kB":    `{"blob":"` + strings.Repeat("x", 200_000) + `"}`,
		"bad":       `{"order":4711,"amount":1e400}`,
		"1000 keys": members(1000),
	} {
		b.Run(name, func(b *testing.B) {
			data := []byte(document)
			b.SetBytes(int64(len(data)))
			b.ReportAllocs()
			for b.Loop() {
				_ = checkDocument(data, MaxPayload)
			}
		})
	}
}
