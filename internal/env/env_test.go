package env_test

import (
	"slices"
	"strings"
	"testing"
	"time"
	"unicode"
	"unicode/utf8"

	"github.com/simple-workflow/simple-workflow/internal/env"
)

// A spec has a setting of each kind.
type spec struct {
	Wait  env.Duration `envconfig:"FUZZ_WAIT" default:"30s" min:"2s" max:"24h" none:"no limit" zero:"at once"`
	Count env.Int      `envconfig:"FUZZ_COUNT" default:"100" min:"-5" max:"100000"`
	Flag  env.Bool     `envconfig:"FUZZ_FLAG" default:"true"`
	Level env.String   `envconfig:"FUZZ_LEVEL" default:"info" oneof:"debug|info"`
	Names env.List     `envconfig:"FUZZ_NAMES" default:"a" empty:"refuse"`
	Token env.String   `envconfig:"FUZZ_TOKEN" secret:"true" oneof:"one"`
}

// With any environment each setting either has a value within its bounds, or is refused in one clean line that
// starts with its name. A secret is never shown.
func FuzzLoad(f *testing.F) {
	f.Add("", "", "", "", "", "", "FUZZ_WAITS")
	f.Add("25h", "5", "false", "DEBUG", "a,b", "one", "FUZZ_")
	f.Add("none", "-6", "T", "loud", " , ", "two", "FUZZ_WAIT_SERVICE_PORT")
	f.Add("0", "1e9", "yes", "debug|info", "\t", "", "FUZZ_CUONT")
	f.Add("-1ns", "99999999999999999999", "1", "İ", "é", "one|", strings.Repeat("FUZZ_", 100))
	f.Add("1e400s", "0x10", "tRUE", "info\x00", "a\nb", "ONE", "FUZZ_\x7f\xff")
	f.Fuzz(func(t *testing.T, wait, count, flag, level, names, token, stranger string) {
		const canary = "CANARY"
		for name, value := range map[string]string{
			"FUZZ_WAIT": wait, "FUZZ_COUNT": count, "FUZZ_FLAG": flag, "FUZZ_LEVEL": level, "FUZZ_NAMES": names,
			"FUZZ_TOKEN": canary + token, stranger: "x",
		} {
			if name == "" || strings.ContainsAny(name, "=\x00") || strings.Contains(value, "\x00") {
				return // no environment can contain it
			}
			if name != stranger || strings.HasPrefix(name, "FUZZ_") { // it may also be PATH
				t.Setenv(name, value)
			}
		}
		var s spec
		report := env.Load(&s, "FUZZ_")
		for _, line := range slices.Concat(report.Problems, report.Warnings) {
			if !strings.HasPrefix(line, "FUZZ_") || !utf8.ValidString(line) || len(line) > 2000 || strings.ContainsFunc(line, unicode.IsControl) {
				t.Errorf("unfit line %q", line)
			}
			if strings.Contains(line, canary) {
				t.Errorf("a secret is shown: %s", line)
			}
		}
		bad := 0
		for name, setting := range map[string]struct{ good, holds bool }{
			"FUZZ_WAIT":  {s.Wait.Good(), s.Wait.Value == env.None || s.Wait.Value == 0 || s.Wait.Value >= 2*time.Second && s.Wait.Value <= 24*time.Hour},
			"FUZZ_COUNT": {s.Count.Good(), s.Count.Value >= -5 && s.Count.Value <= 100_000},
			"FUZZ_FLAG":  {s.Flag.Good(), true},
			"FUZZ_LEVEL": {s.Level.Good(), s.Level.Value == "debug" || s.Level.Value == "info"},
			"FUZZ_NAMES": {s.Names.Good(), len(s.Names.Value) > 0},
			"FUZZ_TOKEN": {s.Token.Good(), false},
		} {
			if !setting.good {
				bad++
			} else if !setting.holds {
				t.Errorf("%s is accepted with a value that is not allowed", name)
			}
		}
		if bad != len(report.Problems) {
			t.Errorf("%d settings are bad, but there are %d problems: %q", bad, len(report.Problems), report.Problems)
		}
	})
}
