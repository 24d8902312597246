package handlers_test

import (
	"fmt"
	"net/http"
	"strings"
	"testing"
	"time"

	"github.com/simple-workflow/simple-workflow/run"
)

// For answers that mean "later", Retry-After is obeyed in both its forms, up to an hour. Nonsense and times in
// the past leave the pause to the type's backoff.
func TestRetryAfter(t *testing.T) {
	for _, test := range []struct {
		code   int
		header string
		want   time.Duration // 0: no pause is asked for
	}{
		{408, "120", 2 * time.Minute},
		{409, "120", 2 * time.Minute},
		{425, "120", 2 * time.Minute},
		{429, "120", 2 * time.Minute},
		{503, "120", 2 * time.Minute},
		{500, "120", 0},
		{502, "120", 0},
		{404, "120", 0},
		{429, "", 0},
		{429, "0", 0},
		{429, "1", time.Second},
		{429, "3600", time.Hour},
		{429, "3601", time.Hour},
		{429, "99999999999999999999999", time.Hour},
		{429, "-5", 0},
		{429, "+5", 0},
		{429, "1.5", 0},
		{429, "5s", 0},
		{429, "banana", 0},
		{429, "NaN", 0},
		{429, "Fri, 01 Jan 2100 00:01:30 GMT", 90 * time.Second},
		{429, "Friday, 01-Jan-99 00:01:30 GMT", 0},
		{429, "Fri Jan  1 00:01:30 2100", 90 * time.Second},
		{429, "Fri, 31 Dec 2099 23:59:59 GMT", 0},
		{429, "Sat, 01 Jan 2150 00:00:00 GMT", time.Hour},
	} {
		// The date is relative to the server's clock, whatever our clock shows.
		_, err := post(t, answer(t, test.code, "", "Retry-After", test.header, "Date", "Fri, 01 Jan 2100 00:00:00 GMT"))
		want(t, err, test.code == 404, "", fmt.Sprintf("status %d", test.code))
		got, free, ok := run.Delay(err)
		if got != test.want || ok != (test.want > 0) || free {
			t.Errorf("%d, %q: delay %s, free %t, given %t, want %s", test.code, test.header, got, free, ok, test.want)
		}
	}
}

// A date in an answer without a Date header is relative to our clock.
func TestRetryAfterOwnClock(t *testing.T) {
	until := time.Now().Add(30 * time.Minute).UTC().Format(http.TimeFormat)
	_, err := post(t, hijack(t, "HTTP/1.1 429 Later\r\nContent-Length: 0\r\nRetry-After: "+until+"\r\n\r\n"))
	if got, _, _ := run.Delay(err); got < 29*time.Minute || got > 30*time.Minute {
		t.Errorf("delay = %s", got)
	}
}

// Redirects are not followed. The error names the host of the redirect, and nothing more of it.
func TestRedirect(t *testing.T) {
	elsewhere := serve(t, func(http.ResponseWriter, *http.Request) { t.Error("the redirect was followed") })
	for _, test := range []struct{ location, want string }{
		{elsewhere + "/canary", "to host \"" + strings.TrimPrefix(elsewhere, "http://") + "\""},
		{"/canary", "to the same host"},
		{"//169.254.169.254/canary", `to host "169.254.169.254"`},
		{"http://user:canary@x.test/", `to host "x.test"`},
		{"://canary", "to an unreadable location"},
		{"", "to the same host"},
	} {
		for _, code := range []int{300, 301, 302, 303, 304, 305, 307, 308, 399} {
			_, err := post(t, answer(t, code, "", "Location", test.location))
			want(t, err, true, "", fmt.Sprintf("status %d", code), test.want, "!canary")
		}
	}
}
