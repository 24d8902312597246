package webhook

import (
	"context"
	"encoding/base64"
	"errors"
	"fmt"
	"net"
	"net/http"
	"net/url"
	"slices"
	"strconv"
	"strings"
	"time"
	"unicode"
	"unicode/utf8"

	"github.com/simple-workflow/simple-workflow/dispatcher"
)

// trouble classifies an error of a request. It returns Unavailable if the sink cannot be reached, ErrNotTried if ctx
// has ended, and else err, which may be about the event. Secrets of the URL are masked.
func (s *sink) trouble(ctx context.Context, err error) error {
	var wrapped *url.Error
	if errors.As(err, &wrapped) {
		err = wrapped.Err // the URL may hold a token
	}
	if ctx.Err() != nil {
		return dispatcher.ErrNotTried
	}
	said := err.Error()
	hidden := errors.New(s.masked.Replace(said))
	var op *net.OpError
	if errors.As(err, &op) && op.Op == "dial" || strings.HasPrefix(said, "tls:") || strings.HasPrefix(said, "x509:") || strings.HasPrefix(said, "remote error: tls:") {
		return dispatcher.Unavailable(hidden, 0)
	}
	return hidden
}

// verdict returns the error that a response means for its event.
//
// 404, 405 and 410 are ordinary failures, because the event is most likely not the cause: if they were rejections,
// one minute of a wrong route would park every open event. 403 is an ordinary failure too: firewalls
// answer it, sometimes for single events.
func (s *sink) verdict(answer *http.Response, body []byte, size int) error {
	code := answer.StatusCode
	after, told := answer.Header.Get("Retry-After"), s.masked.Replace(excerpt(body))
	err := fmt.Errorf("status %d: %s", code, told)
	switch {
	case code >= 200 && code < 300:
		return nil
	case code >= 300 && code < 400:
		return fmt.Errorf("status %d: redirects are not followed; the sink has moved to %.200q", code, s.masked.Replace(target(answer)))
	case code == http.StatusUnauthorized:
		return dispatcher.Unavailable(fmt.Errorf("status %d: the sink does not accept our credentials", code), 0)
	case code == http.StatusTooManyRequests, after != "" && slices.Contains([]int{408, 425, 503}, code):
		return dispatcher.Unavailable(fmt.Errorf("status %d: the sink asks for a pause", code), retryAfter(after, time.Now()))
	case code == http.StatusRequestEntityTooLarge:
		return dispatcher.RejectForGood(fmt.Errorf("status %d: a payload of %d bytes is too large for the sink: %s", code, size, told))
	case code < 400 || code >= 500, slices.Contains([]int{403, 404, 405, 407, 408, 410, 421, 425}, code):
		return err
	}
	return dispatcher.Reject(err)
}

// target returns the URL that a redirect leads to, without user, query and fragment, which may be secret.
func target(answer *http.Response) string {
	u, err := url.Parse(answer.Header.Get("Location"))
	if err != nil {
		return "somewhere"
	}
	u.User, u.RawQuery, u.Fragment, u.RawFragment = nil, "", "", ""
	return u.String()
}

func excerpt(body []byte) string {
	return strings.Map(func(r rune) rune {
		if !unicode.IsPrint(r) || r == utf8.RuneError {
			return ' '
		}
		return r
	}, string(body[:min(len(body), maxExcerpt)]))
}

// retryAfter parses the header Retry-After: seconds, or a date. It returns 0 for anything else.
func retryAfter(header string, now time.Time) time.Duration {
	if seconds, err := strconv.ParseUint(header, 10, 31); err == nil {
		return time.Duration(seconds) * time.Second
	}
	if at, err := http.ParseTime(header); err == nil {
		return max(at.Sub(now), 0)
	}
	return 0
}

// mask returns a replacer that hides the parts of a URL that may be secret. Servers often quote the URL in their
// responses.
func mask(u *url.URL) *strings.Replacer {
	const long = 10 // a shorter part is taken for a word, not a secret
	secrets := []string{u.String(), u.RequestURI(), u.EscapedPath(), u.Path, u.RawQuery}
	parts := strings.Split(u.Path, "/")
	for _, values := range u.Query() {
		parts = append(parts, values...)
	}
	for _, part := range parts {
		if len(part) >= long {
			secrets = append(secrets, part)
		}
	}
	if password, ok := u.User.Password(); ok {
		secrets = append(secrets, password, u.User.String(), base64.StdEncoding.EncodeToString([]byte(u.User.Username()+":"+password)))
	}
	slices.SortFunc(secrets, func(a, b string) int { return len(b) - len(a) })
	var pairs []string
	for _, secret := range secrets {
		if len(secret) > 1 {
			pairs = append(pairs, secret, "…")
		}
	}
	return strings.NewReplacer(pairs...)
}
