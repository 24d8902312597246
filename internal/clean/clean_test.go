package clean

import (
	"strings"
	"testing"
	"time"
	"unicode/utf8"

	"github.com/jackc/pgx/v5"

	"github.com/simple-workflow/simple-workflow/internal/pgtest"
)

// Text leaves ordinary errors unchanged, and removes what is not safe in a text column or on a terminal.
func TestCleanText(t *testing.T) {
	const same = "\x00"
	tests := []struct{ name, text, want string }{
		{"ordinary", "charge invoice 4711: dial tcp 10.0.0.1:443: connection refused", same},
		{"lines", "first\n\tsecond", same},
		{"other languages", "Überweisung fehlgeschlagen: 残高不足 😀 \uFFFD", same},
		{"empty", "", "(empty error)"},
		{"blank", " \n\t ", "(empty error)"},
		{"nothing left", "\x00\x1b[0m\x07", "(empty error)"},
		{"NUL", "a\x00b", "ab"},
		{"H5 all at once", "\x00\xff\x1b[31mred\x1b[0m", "\uFFFDred"},
		{"invalid UTF-8", "a\xff\xfeb\xe2\x82", "a\uFFFDb\uFFFD"},
		{"colours", "\x1b[1;38;5;196mFAIL\x1b[0m: x", "FAIL: x"},
		{"cursor and title", "\x1b[2J\x1b]0;owned\x07a\x1b]8;;http://x\x1b\\b\x1b(Bc\x1b7d", "abcd"},
		{"lone escapes", "a\x1b", "a"},
		{"open sequence", "a\x1b]0;b", "a0;b"},
		{"one-character escapes", "a\u009b31mb\u0085c\x7fd", "abcd"},
		{"line ends", "a\r\nb\rc", "a\nb\nc"},
		{"backspace", "a\bb\vc", "abc"},
	}
	for _, test := range tests {
		t.Run(test.name, func(t *testing.T) {
			if test.want == same {
				test.want = test.text
			}
			if got := Text(test.text, 4096); got != test.want {
				t.Errorf("Text(%q) = %q, want %q", test.text, got, test.want)
			}
		})
	}
}

// Passwords and tokens are masked in the forms in which errors tend to show them. Text that only resembles
// them is left unchanged.
func TestCleanTextMasks(t *testing.T) {
	const same = "\x00"
	tests := []struct{ name, text, want string }{
		{"DSN", "dial postgres://u:p@h:5432/db: timeout", "dial postgres://u:xxxxx@h:5432/db: timeout"},
		{"no user", "redis://:p@h/0", "redis://:xxxxx@h/0"},
		{"two URLs", "postgres://a:b@c,amqp://d:e@f/", "postgres://a:xxxxx@c,amqp://d:xxxxx@f/"},
		{"two URLs apart", "postgres://a:b@c or amqp://d:e@f/", "postgres://a:xxxxx@c or amqp://d:xxxxx@f/"},
		{"@ and slash in it", "x://u:p@ss@h/db x://u:p/w@h", "x://u:xxxxx@h/db x://u:xxxxx@h"},
		{"no password", "https://api.example.com/v1/a@b postgres://u@h/db", same},
		{"port and path", "http://localhost:8080/users/me@example.com", same},
		{"key and value", "host=h user=u password=p,q&r dbname=d", "host=h user=u password=xxxxx dbname=d"},
		{"quoted value", `password = 'it\'s me' x`, `password = xxxxx x`},
		{"in JSON", `{"user":"u","Password": "a\"b","n":1}`, `{"user":"u","Password": xxxxx,"n":1}`},
		{"in a quoted JSON", `body "{\"password\":\"p q\",\"n\":1}"`, `body "{\"password\":xxxxx,\"n\":1}"`},
		{"in a struct", "{User:u DB_PASSWORD:p}", "{User:u DB_PASSWORD:xxxxx"},
		{"environment", "PGPASSWORD=p psql", "PGPASSWORD=xxxxx psql"},
		{"query", "GET /x?access_token=abc: 403", "GET /x?access_token=xxxxx 403"},
		{"client secret", `client_secret=abc "api_key":"k" X-Api-Key: k`, `client_secret=xxxxx "api_key":xxxxx X-Api-Key: xxxxx`},
		{"bearer", "got 401 for Bearer eyJ.abc-_1: expired", "got 401 for Bearer xxxxx expired"},
		{"header", "Authorization: Basic dTpw\nAccept: */*", "Authorization: xxxxx\nAccept: */*"},
		{"header dump", "map[Accept:[*/*] Authorization:[Bearer abc]]", "map[Accept:[*/*] Authorization:[xxxxx]]"},
		{"header as JSON", `{"authorization": "Token abc", "n": 1}`, `{"authorization": "xxxxx", "n": 1}`},
		{"signature", "authorization: AWS4-HMAC-SHA256 Credential=A/b, Signature=c", "authorization: xxxxx"},
		{"hidden by an escape", "pass\x1b[0mword=p\x00q", "password=xxxxx"},
		{"ordinary words", "unexpected token: } at line 1; secret: not found; missing key: a", same},
		{"no value", "password is wrong, passwords differ, authorization failed", same},
	}
	for _, test := range tests {
		t.Run(test.name, func(t *testing.T) {
			if test.want == same {
				test.want = test.text
			}
			if got := Text(test.text, 4096); got != test.want {
				t.Errorf("Text(%q)\n got %q\nwant %q", test.text, got, test.want)
			}
		})
	}
}

// A text is cut between characters and marked with …, which counts for its length.
func TestCleanTextCuts(t *testing.T) {
	tests := []struct {
		text  string
		limit int
		want  string
	}{
		{"1234567890", 10, "1234567890"},
		{"12345678901", 10, "1234567…"},
		{"ééééé", 10, "ééééé"},
		{"éééééé", 10, "ééé…"},
		{"12345😀789", 10, "12345…"},
		{strings.Repeat("x", 100), 10, "xxxxxxx…"},
		{strings.Repeat("\x00", 15) + strings.Repeat("y", 100), 10, "yyyyy…"},
		{strings.Repeat("\xff", 100), 10, "\uFFFD…"},
		{strings.Repeat("\x80", 100), 10, "\uFFFD…"},
	}
	for _, test := range tests {
		got := Text(test.text, test.limit)
		if got != test.want || len(got) > test.limit {
			t.Errorf("Text(%q, %d) = %q, want %q", test.text, test.limit, got, test.want)
		}
	}
}

// A secret is masked even if the text is cut anywhere within it.
func TestCutSecrets(t *testing.T) {
	const secret = "SSSSSSSSSSSSSSSSSSSSSSSSSSSSSSSSSSSSSSSSSSSS"
	for _, form := range []string{
		"postgres://u:" + secret + "@h/db", "password=" + secret, "password='" + secret + "'",
		`"token":"` + secret + `"`, "Bearer " + secret, "Authorization: Basic " + secret,
	} {
		for before := range 80 {
			text := strings.Repeat("\x00", before) + form + strings.Repeat(" more", 20)
			if got := Text(text, 40); strings.Contains(got, "S") {
				t.Fatalf("%d bytes, then %s: %q", before, form, got)
			}
		}
	}
}

// H4: ten megabytes of any text cost no more than their first few kilobytes.
func TestCleanTextIsBounded(t *testing.T) {
	for _, unit := range []string{"x", "\x00\xff", "\x1b", "\x1b]", "token ", "://", "://u:", "password=\\\\", `password="\`, "Bearer \n", "é"} {
		text := "\x00\xff" + strings.Repeat(unit, 10<<20/len(unit))
		start := time.Now()
		got := Text(text, 4096)
		if took := time.Since(start); took > 10*time.Second {
			t.Errorf("%q: took %s", unit, took)
		}
		if len(got) > 4096 || !utf8.ValidString(got) {
			t.Errorf("%q: %d bytes", unit, len(got))
		}
	}
}

// W79: Postgres stores the cleaned text of any error unchanged.
func TestPostgresStoresCleanText(t *testing.T) {
	pool := pgtest.New(t)
	for _, text := range []string{"", "\x00\xff" + strings.Repeat("x", 10<<20), "\xed\xa0\x80", "\x1b[31m\r\n", strings.Repeat("\xf0\x9f\x98", 3000)} {
		want := Text(text, 4096)
		rows, _ := pool.Query(t.Context(), `SELECT $1::text`, want)
		if got, err := pgx.CollectExactlyOneRow(rows, pgx.RowTo[string]); err != nil || got != want {
			t.Errorf("%.20q: stored %.20q, %v", text, got, err)
		}
	}
}

// Any text becomes valid UTF-8 within the limit, not empty, and free of control characters.
func FuzzCleanText(f *testing.F) {
	for _, seed := range []string{"", "a\x00b", "\x1b[31mred", "postgres://u:p@h", "password='x", "\xff\xfe", "Bearer x y", "é…"} {
		f.Add(seed, 20)
	}
	f.Fuzz(func(t *testing.T, text string, limit int) {
		limit = 16 + (limit%4096+4096)%4096
		got := Text(text, limit)
		if got == "" || len(got) > limit || !utf8.ValidString(got) || strings.ContainsFunc(got, control) {
			t.Fatalf("Text(%q, %d) = %q", text, limit, got)
		}
	})
}

func BenchmarkCleanText(b *testing.B) {
	for name, text := range map[string]string{
		"ordinary":   "charge invoice 4711: post https://api.example.com/v1/charges: dial tcp 10.0.0.1:443: connect: connection refused",
		"suspicious": "decode answer: unexpected token at line 3, column 4: expected a value",
		"4 kB":       strings.Repeat("some words ", 370),
		"10 MB":      strings.Repeat("token é ", 10<<20/9),
	} {
		b.Run(name, func(b *testing.B) {
			b.ReportAllocs()
			for b.Loop() {
				Text(text, 4096)
			}
		})
	}
}
