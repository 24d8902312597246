package database_test

import (
	"net/url"
	"strings"
	"testing"
	"unicode"
	"unicode/utf8"

	"github.com/simple-workflow/simple-workflow/internal/database"
)

// However a password is written into an address, correctly or not, and whatever follows it: neither the error
// about the address nor the shown address reveals the password, and neither has characters that are not
// printable.
func FuzzParse(f *testing.F) {
	f.Add("postgres", "", "", "h/db")
	f.Add("postgres", "a@b", "%zz", "h:5432/db?sslmode=disable")
	f.Add("postgresql", "12/", "#", "h")
	f.Add("postgres", "12?", "", "h/db?password=x")
	f.Add("mysql", "x@", ":y", "[::1")
	f.Add("postgres\n", `'\`, "\x1b", "h/db?connect_timeout=x&pool_max_conns=0")
	f.Fuzz(func(t *testing.T, scheme, before, after, rest string) {
		const canary = "CANARY"
		password := before + canary + after
		if strings.Contains(before, "=") || strings.Contains(scheme+before+after+rest, canary) {
			return // after a ? in the password, a = makes the rest look like a setting, and nothing tells the two apart
		}
		for _, address := range []string{
			scheme + "://u:" + password + "@" + rest,
			scheme + "://" + url.UserPassword("u", password).String() + "@" + rest,
			scheme + "://h/db?password=" + url.QueryEscape(password) + "&" + rest,
			"host=h password='" + strings.NewReplacer(`\`, `\\`, `'`, `\'`).Replace(password) + "' " + rest,
		} {
			texts := []string{database.Shown(address)}
			if config, err := database.Parse(address); err != nil {
				texts = append(texts, err.Error())
			} else {
				_ = database.Plaintext(config)
			}
			for _, text := range texts {
				if strings.Contains(text, canary) {
					t.Errorf("%q: the password is shown: %s", address, text)
				}
				if !utf8.ValidString(text) || strings.ContainsFunc(text, unicode.IsControl) {
					t.Errorf("%q: unfit for a terminal: %q", address, text)
				}
			}
		}
	})
}
