package jsondoc

import (
	"bytes"
	"encoding/json"
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

// Valid documents are accepted, however odd they are.
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
			if err := Check("payload", data, MaxPayload, true); err != nil {
				t.Error(err)
			}
			if string(data) != test.document {
				t.Error("the document was changed")
			}
		})
	}
}

// For an accepted document the error is nil, not an error that holds a nil *Error.
func TestAcceptedIsNil(t *testing.T) {
	if err := Check("metadata", []byte(`{}`), MaxMetadata, true); err != nil {
		t.Errorf("err = %v, want nil", err)
	}
	err := Check("metadata", []byte(`[]`), MaxMetadata, true)
	if want := "metadata: $: object expected, got an array; wrap the value: {\"value\": …}"; err == nil || err.Error() != want {
		t.Errorf("err = %v, want %s", err, want)
	}
}

// Postgres accepts all documents that are accepted here, and writes them in no more bytes than were counted.
// Without escapes and exponents it writes exactly as many.
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

// The database has the same limits as Check: it accepts the largest and the deepest document that pass Check. One more
// byte or level is refused by both.
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
		here := Check("payload", []byte(document), MaxPayload, true)
		_, there := pool.Exec(t.Context(), `INSERT INTO workflow_run (type, payload) VALUES ('a.b', $1::text::jsonb)`, document)
		if (here == nil) != (there == nil) {
			t.Errorf("%.20q… of %d bytes: here %v, there %v", document, len(document), here, there)
		}
	}
}

// Concurrent checks do not mix up their documents.
func TestCheckConcurrently(t *testing.T) {
	var all sync.WaitGroup
	for i := range 8 {
		all.Go(func() {
			want := fmt.Sprintf(`payload: $.a%d: number 1e999 is beyond ±1e308; round it, or send it as a string`, i)
			for range 200 {
				err := Check("payload", fmt.Appendf(nil, `{"b":[{}],"a%d":1e999}`, i), MaxPayload, true)
				if err == nil || err.Error() != want {
					t.Errorf("got  %v\nwant %s", err, want)
					return
				}
			}
		})
	}
	all.Wait()
}

// encoding/json accepts every document that Check accepts. A second check has the same result, even
// after the document was encoded again. The data is not changed. The size that is compared with the
// limit is at least that of the compact form.
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
		err := Check("payload", data, 4096, true)
		again := Check("payload", data, 4096, true)
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
		if err := Check("payload", written, 1<<20, true); err != nil {
			t.Fatalf("accepted, but not when written anew: %v", err)
		}
		if got := Check("payload", data, len(compact(t, data))-1, true); got == nil {
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

// randomDocument returns a JSON object that may break any of the rules, but usually does not.
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
				_ = Check("payload", data, MaxPayload, true)
			}
		})
	}
}
