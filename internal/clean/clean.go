// Package clean makes the text and the code of an error safe to store and to show.
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

// Text returns s in a form that is safe in a text column, on a terminal and in front of other people:
// valid UTF-8 of at most limit bytes, without control characters other than \n and \t, and with
// passwords and tokens masked. It reads only the first 2·limit bytes of s.
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

// terminal matches sequences that colour text, move the cursor or set a window's title.
var terminal = regexp.MustCompile(`(?:\x1b\[|\x{9b})[0-?]*[ -/]*[@-~]` +
	`|\x1b[]PX^_][^\x07\x1b\n]*(?:\x07|\x1b\\)` +
	`|\x1b[ -/]*[0-~]`)

// userInfo matches a password in a URL, between the colon after the user and an @. Digits and a slash
// after the colon are a port and a path, not a password, even if an @ follows.
var userInfo = regexp.MustCompile(strings.ReplaceAll(
	`(://[^/@:~]*:)(?:[^/~]*|[^/~]*[^/0-9~][^/~]*/[^~]*)@`, "~", "\\s\"'`<>"))

// secret matches the name and value of a secret setting. The value may be quoted, even within another
// quoted string. Names such as token are too common in ordinary errors to count with only a colon after them.
var secret = regexp.MustCompile(`(?i)` +
	`(?:(\bauthorization\\*["']?\s*[=:]\s*\[?\\*["']?)[^\n"'\]}\\]+` +
	`|(\bbearer\s+)[^\s"'\]},;\\]+` +
	`|((?:(?:passw(?:or)?d|passphrase|pwd|api[_-]?key)\\*["']?\s*[=:]\s*` +
	`|(?:secret|token|access[_-]?key)(?:\\*["']?\s*=|\\*["']\s*:)\s*))` +
	`(?s:"(?:[^"\\]|\\.)*"?|'(?:[^'\\]|\\.)*'?|\\+"[^"]*"?|[^\s"']+))`)

// suspicious lists words of which at least one is in any text that secret matches.
var suspicious = []string{"pass", "pwd", "key", "secret", "token", "bearer", "authorization"}

// maskSecrets masks what looks like a credential, and rather too much than too little. cut means that s was
// cut off at its end, perhaps in the middle of a secret.
func maskSecrets(s string, cut bool) string {
	if strings.Contains(s, "://") {
		if cut {
			s += "@" // the @ after a password may have been cut off
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

// Code returns the first 100 characters of code that are ASCII letters or digits, or one of "_.-:". It drops all
// others, because the database refuses some of them, such as \x00.
func Code(code string) string {
	code = strings.Map(func(r rune) rune {
		if r == '_' || r == '.' || r == '-' || r == ':' || r < utf8.RuneSelf && (unicode.IsLetter(r) || unicode.IsDigit(r)) {
			return r
		}
		return -1
	}, code[:min(len(code), 1000)])
	return code[:min(len(code), 100)]
}
