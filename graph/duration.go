package graph

import (
	"fmt"
	"math"
	"regexp"
	"strconv"
	"time"
)

// iso matches the durations of ISO 8601 that have a fixed length: without years and months.
var iso = regexp.MustCompile(`^P(?:(\d+)W)?(?:(\d+)D)?(?:T(?:(\d+)H)?(?:(\d+)M)?(?:(\d+(?:\.\d+)?)S)?)?$`)

// A Duration is a time.Duration that is written in the form of ISO 8601, such as PT5M, and read in that form or in
// Go's, such as 5m. It is at most ten years and is truncated to microseconds, the precision of Postgres.
type Duration time.Duration

// String returns the canonical form: days, hours, minutes and seconds of ISO 8601, each as far as it is not 0.
func (d Duration) String() string { return isoDuration(time.Duration(d)) }

// MarshalText writes the canonical form.
func (d Duration) MarshalText() ([]byte, error) { return []byte(d.String()), nil }

// UnmarshalText reads either form.
func (d *Duration) UnmarshalText(text []byte) error {
	parsed, err := parseDuration(string(text))
	*d = Duration(parsed)
	return err
}

const maxDuration = 10 * 365 * 24 * time.Hour

// parseDuration reads a duration in the form of ISO 8601 (PT5M, P1DT12H) or of Go (5m).
func parseDuration(text string) (time.Duration, error) {
	d, err := time.ParseDuration(text)
	if part := iso.FindStringSubmatch(text); part != nil && text != "P" && text[len(text)-1] != 'T' {
		d, err = 0, nil
		for i, unit := range []time.Duration{7 * 24 * time.Hour, 24 * time.Hour, time.Hour, time.Minute, time.Second} {
			if part[i+1] == "" {
				continue
			}
			n, parseErr := strconv.ParseFloat(part[i+1], 64)
			if parseErr != nil || n > float64(maxDuration/unit) {
				return 0, noDuration(text, "use at most ten years")
			}
			d += time.Duration(math.Round(n * float64(unit)))
		}
	}
	switch {
	case err != nil:
		return 0, noDuration(text, "use a form such as PT5M, P1DT12H or 5m")
	case d < 0 || d > maxDuration:
		return 0, noDuration(text, "use 0 to ten years")
	}
	return d.Truncate(time.Microsecond), nil
}

func noDuration(text, fix string) error {
	return &misfit{"DURATION", fmt.Sprintf("duration %.40q", text), fix}
}

// isoDuration returns the canonical form of a duration: PT90M becomes PT1H30M.
func isoDuration(d time.Duration) string {
	if d == 0 {
		return "PT0S"
	}
	text, time24 := "P", 24*time.Hour
	if days := d / time24; days > 0 {
		text += strconv.FormatInt(int64(days), 10) + "D"
	}
	rest := d % time24
	if rest == 0 {
		return text
	}
	text += "T"
	if h := rest / time.Hour; h > 0 {
		text += strconv.FormatInt(int64(h), 10) + "H"
	}
	if m := rest % time.Hour / time.Minute; m > 0 {
		text += strconv.FormatInt(int64(m), 10) + "M"
	}
	if s := rest % time.Minute; s > 0 {
		text += strconv.FormatFloat(s.Seconds(), 'f', -1, 64) + "S"
	}
	return text
}
