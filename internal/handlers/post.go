package handlers

import (
	"bytes"
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"net/url"
	"regexp"
	"strconv"
	"strings"
	"time"

	jsonv2 "github.com/go-json-experiment/json"
	"github.com/google/uuid"

	"github.com/simple-workflow/simple-workflow/internal/shipped"
	"github.com/simple-workflow/simple-workflow/internal/told"
	"github.com/simple-workflow/simple-workflow/run"
	"github.com/simple-workflow/simple-workflow/worker"
)

// CodeAddress is the code of a run whose URL led to an address outside its allow list.
const CodeAddress = "address_refused"

const (
	maxRetryAfter = time.Hour
	maxExcerpt    = 512
	readExcerpt   = 4 << 10
	excerptTime   = 5 * time.Second
)

func (w *web) handler(*slog.Logger) worker.Handler {
	transport := w.transport()
	return func(ctx context.Context, payload json.RawMessage) (json.RawMessage, error) {
		own := *w
		token, _ := worker.Token(ctx) // none, if no worker calls
		own.secrets = w.secrets.with(token)
		data, err := own.post(ctx, transport, payload, token)
		if err != nil {
			return nil, fmt.Errorf("%s: %w", w, err)
		}
		return data, nil
	}
}

// post makes one call. It uses no http.Client, since that would follow redirects or look
// into them.
func (w *web) post(ctx context.Context, transport http.RoundTripper, payload json.RawMessage, token string) (json.RawMessage, error) {
	callCtx, cancel := context.WithCancel(ctx)
	defer cancel()
	req, err := w.request(callCtx, payload, token)
	if err != nil {
		return nil, err
	}
	resp, err := transport.RoundTrip(req)
	if err != nil {
		return nil, broken(ctx, err)
	}
	defer resp.Body.Close()
	if resp.StatusCode == http.StatusAccepted {
		if within := retryAfter(resp, time.Now(), shipped.MaxElsewhere); within > 0 {
			return nil, run.Elsewhere(within)
		}
		return nil, run.ErrElsewhere
	}
	if resp.StatusCode/100 == 2 {
		return w.accept(ctx, resp)
	}
	// A server in trouble may not hold the slot with an explanation that never ends.
	defer time.AfterFunc(w.patience, cancel).Stop()
	return nil, w.decline(resp)
}

var validTraceparent = regexp.MustCompile(`^[0-9a-f]{2}-[0-9a-f]{32}-[0-9a-f]{16}-[0-9a-f]{2}$`)

func (w *web) request(ctx context.Context, payload json.RawMessage, token string) (*http.Request, error) {
	req, err := http.NewRequestWithContext(ctx, http.MethodPost, w.url.String(), bytes.NewReader(payload))
	if err != nil {
		return nil, err
	}
	info := run.FromContext(ctx)
	req.Header = w.header.Clone()
	if req.Header.Get("User-Agent") == "" {
		req.Header.Set("User-Agent", "simple-workflow")
	}
	req.Header.Set("Content-Type", "application/json")
	req.Header.Set("Workflow-Run-Id", info.ID.String())
	req.Header.Set("Workflow-Type", info.Type)
	req.Header.Set("Workflow-Attempt", strconv.Itoa(info.Attempt))
	req.Header.Set("Workflow-Max-Attempts", strconv.Itoa(info.MaxAttempts))
	req.Header.Set("Workflow-Lease-No", strconv.FormatInt(info.LeaseNo, 10))
	req.Header.Set("Idempotency-Key", idempotencyKey(info))
	if info.Tenant != "" && headerSafe(info.Tenant) {
		req.Header.Set("Workflow-Tenant", info.Tenant)
	}
	if parent := traceparent(info); parent != "" {
		req.Header.Set("Traceparent", parent)
	}
	if token != "" {
		req.Header.Set("Workflow-Token", token)
	}
	if info.Instance != uuid.Nil {
		req.Header.Set("Workflow-Instance", info.Instance.String())
		req.Header.Set("Workflow-Node", info.Node)
		if info.BusinessKey != "" && headerSafe(info.BusinessKey) {
			req.Header.Set("Workflow-Business-Key", info.BusinessKey)
		}
	}
	return req, nil
}

// idempotencyKey returns the run's key, or its id if there is none that a header can carry.
func idempotencyKey(info run.Info) string {
	if info.IdempotencyKey == "" || !headerSafe(info.IdempotencyKey) {
		return info.ID.String()
	}
	return info.IdempotencyKey
}

func traceparent(info run.Info) string {
	var metadata struct {
		Traceparent string `json:"traceparent"`
	}
	if err := jsonv2.Unmarshal(info.Metadata, &metadata); err != nil || !validTraceparent.MatchString(metadata.Traceparent) {
		return ""
	}
	return metadata.Traceparent
}

// broken is a call without an answer.
func broken(ctx context.Context, err error) error {
	if ctx.Err() != nil {
		return fmt.Errorf("no answer: %w", context.Cause(ctx))
	}
	var refused *addressError
	if errors.As(err, &refused) {
		return run.WithCode(CodeAddress, fmt.Errorf("%w; if it is meant, add the address to allow", refused))
	}
	if unreached(err) {
		return run.Unavailable(err)
	}
	return err
}

// unreached reports whether no connection came about, so that nothing of the run can be the cause: the name is not known, nobody listens, no way leads there.
func unreached(err error) bool {
	var op *net.OpError
	return errors.As(err, &op) && op.Op == "dial" || errors.As(err, new(*net.DNSError))
}

// accept reads the body of a 2xx to its end: an answer that breaks off is none.
func (w *web) accept(ctx context.Context, resp *http.Response) (json.RawMessage, error) {
	data, err := io.ReadAll(io.LimitReader(resp.Body, int64(w.limit)+1))
	if len(data) > w.limit {
		return nil, tooLong(w.limit)
	}
	if err != nil {
		return nil, broken(ctx, fmt.Errorf("status %d, but the body broke off: %w", resp.StatusCode, err))
	}
	return result(data)
}

// decline turns any other status into an error, and into what the answer says of it itself.
func (w *web) decline(resp *http.Response) error {
	code := resp.StatusCode
	if code/100 == 3 {
		return run.Permanent(told.Refusal(fmt.Errorf("status %d sends elsewhere, to %s; redirects are not followed, correct the url", code, locationHost(resp))))
	}
	body, _ := io.ReadAll(io.LimitReader(resp.Body, readExcerpt)) // what came of it will do
	said := told.By(body)
	err := w.explain(code, cmp.Or(said.Message, string(body)))
	later := code == 408 || code == 409 || code == 425 || code == 429 || code == 503
	if pause := retryAfter(resp, time.Now(), maxRetryAfter); later && pause > 0 && said.RetryAfter == nil {
		seconds := pause.Seconds()
		said.RetryAfter = &seconds
	}
	return said.Apply(err, code/100 == 4 && !later, code == 429 || code == 502 || code == 503)
}

func (w *web) explain(status int, text string) error {
	excerpt := line(w.secrets.mask(text), maxExcerpt)
	if excerpt == "" {
		return fmt.Errorf("status %d", status)
	}
	return fmt.Errorf("status %d: %s", status, excerpt)
}

// locationHost names only the host of where a redirect leads; the rest may hold secrets.
func locationHost(resp *http.Response) string {
	location, err := url.Parse(resp.Header.Get("Location"))
	if err != nil {
		return "an unreadable location"
	}
	if location.Host == "" {
		return "the same host"
	}
	return "host " + quote(location.Host)
}

// retryAfter returns the pause that an answer asks for, most at most, or 0 if there is none to follow.
func retryAfter(resp *http.Response, now time.Time, most time.Duration) time.Duration {
	text := strings.TrimSpace(resp.Header.Get("Retry-After"))
	if date, err := http.ParseTime(text); err == nil {
		// The server's own clock says what its date means.
		if sent, err := http.ParseTime(resp.Header.Get("Date")); err == nil {
			now = sent
		}
		return min(max(date.Sub(now), 0), most)
	}
	if text == "" || strings.Trim(text, "0123456789") != "" {
		return 0
	}
	seconds, err := strconv.Atoi(text)
	if err != nil || seconds > int(most/time.Second) {
		return most // more digits than a number holds are just long
	}
	return time.Duration(seconds) * time.Second
}
