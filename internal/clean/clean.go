// Package clean makes the text and the code of an error fit to be stored and shown.
package clean

import (
	"regexp"
	"slices"
	"strings"
	"unicode"
	"unicode/utf8"
)

// MaxMessage is the most bytes of a failure's message.
const MaxMessage = 4 << 10

// Text makes any text fit for a column of type text, for a terminal and for other
// people's eyes: valid UTF-8 of at most limit bytes, no control characters but \n and \t,
// passwords and tokens masked. Of a long s only the first 2·limit bytes are looked at.
func Text(s string, limit int) string {
	whole := len(s)
	s = cutText(s, 2*limit)
	cut := len(s) < whole
	s = maskSecrets(printable(s), cut)
	if strings.TrimSpace(s) == "" {
		return "(empty error)"
	}
	if !cut && len(s) <= limit {
		return s
	}
	const more = "…"
	return cutText(s, max(limit-len(more), 0)) + more
}

// cutText cuts s to at most limit bytes, between runes.
func cutText(s string, limit int) string {
	if len(s) <= limit {
		return s
	}
	for i := limit; i > limit-utf8.UTFMax && i > 0; i-- {
		if utf8.RuneStart(s[i]) {
			return s[:i]
		}
	}
	return s[:limit] // not UTF-8 anyway
}

// printable removes control characters and terminal sequences, and replaces invalid UTF-8.
func printable(s string) string {
	if !strings.ContainsFunc(s, unprintable) {
		return s
	}
	s = strings.ToValidUTF8(s, string(utf8.RuneError))
	s = terminal.ReplaceAllString(s, "")
	s = strings.ReplaceAll(s, "\r\n", "\n")
	return strings.Map(func(r rune) rune {
		switch {
		case r == '\r': // a progress bar, say
			return '\n'
		case control(r):
			return -1
		}
		return r
	}, s)
}

func unprintable(r rune) bool { return control(r) || r == utf8.RuneError }

func control(r rune) bool {
	return r < ' ' && r != '\n' && r != '\t' || 0x7f <= r && r < 0xa0
}

// Sequences that colour text, move the cursor or set a window's title.
var terminal = regexp.MustCompile(`(?:\x1b\[|\x{9b})[0-?]*[ -/]*[@-~]` +
	`|\x1b[]PX^_][^\x07\x1b\n]*(?:\x07|\x1b\\)` +
	`|\x1b[ -/]*[0-~]`)

// A password in a URL stands between the colon after the user and an @. What reads as a
// port and a path is none, whatever follows.
var userInfo = regexp.MustCompile(strings.ReplaceAll(
	`(://[^/@:~]*:)(?:[^/~]*|[^/~]*[^/0-9~][^/~]*/[^~]*)@`, "~", "\\s\"'`<>"))

// The value of a setting may be quoted, also inside of another string. Names such as token
// are too common in ordinary errors to count before a mere colon.
var secret = regexp.MustCompile(`(?i)` +
	`(?:(\bauthorization\\*["']?\s*[=:]\s*\[?\\*["']?)[^\n"'\]}\\]+` +
	`|(\bbearer\s+)[^\s"'\]},;\\]+` +
	`|((?:(?:passw(?:or)?d|passphrase|pwd|api[_-]?key)\\*["']?\s*[=:]\s*` +
	`|(?:secret|token|access[_-]?key)(?:\\*["']?\s*=|\\*["']\s*:)\s*))` +
	`(?s:"(?:[^"\\]|\\.)*"?|'(?:[^'\\]|\\.)*'?|\\+"[^"]*"?|[^\s"']+))`)

// Some of these words are in all that secret matches.
var suspicious = []string{"pass", "pwd", "key", "secret", "token", "bearer", "authorization"}

// maskSecrets masks what looks like a credential: rather too much than too little. With cut
// the text went on, perhaps in the middle of a secret.
func maskSecrets(s string, cut bool) string {
	if strings.Contains(s, "://") {
		if cut {
			s += "@" // for a password that goes on
		}
		s = userInfo.ReplaceAllString(s, "${1}xxxxx@")
		if cut {
			s = strings.TrimSuffix(s, "@")
		}
	}
	lower := strings.ToLower(s)
	if slices.ContainsFunc(suspicious, func(word string) bool { return strings.Contains(lower, word) }) {
		s = secret.ReplaceAllString(s, "${1}${2}${3}xxxxx")
	}
	return s
}

// Code keeps the first 100 characters that codes are made of; \x00 and the like would be
// refused by the database.
func Code(code string) string {
	code = strings.Map(func(r rune) rune {
		if r == '_' || r == '.' || r == '-' || r == ':' || r < utf8.RuneSelf && (unicode.IsLetter(r) || unicode.IsDigit(r)) {
			return r
		}
		return -1
	}, code[:min(len(code), 1000)])
	return code[:min(len(code), 100)]
}
