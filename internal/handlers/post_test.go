package handlers_test

import (
	"context"
	"encoding/base64"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"
	"time"

	"github.com/simple-workflow/simple-workflow/internal/settling"
	"github.com/simple-workflow/simple-workflow/run"
)

// serve starts a server and returns its URL.
func serve(t *testing.T, h http.HandlerFunc) string {
	t.Helper()
	s := httptest.NewServer(h)
	t.Cleanup(s.Close)
	return s.URL
}

// answer serves one fixed answer.
func answer(t *testing.T, status int, body string, header ...string) string {
	t.Helper()
	return serve(t, func(w http.ResponseWriter, _ *http.Request) {
		for i := 0; i < len(header); i += 2 {
			w.Header().Set(header[i], header[i+1])
		}
		w.WriteHeader(status)
		_, _ = io.WriteString(w, body)
	})
}

func post(t *testing.T, url string) (string, error) {
	t.Helper()
	return call(t, handler(t, "a.b: {url: "+url+"}"), `{"a":1}`)
}

// The server gets the payload as it is, as JSON, with all there is to know about the run and
// the headers of the file; the answer's body is the result.
func TestPost(t *testing.T) {
	t.Setenv("BILLING_TOKEN", "Bearer s3cret-token")
	url := serve(t, func(w http.ResponseWriter, r *http.Request) {
		body, _ := io.ReadAll(r.Body)
		if got, want := string(body), "{ \"a\": 1.10,\n\"a b\":\"\\n$(x)\" }"; got != want {
			t.Errorf("body = %q, want %q", got, want)
		}
		for name, want := range map[string]string{
			"Content-Type":          "application/json",
			"Workflow-Run-Id":       info.ID.String(),
			"Workflow-Type":         "media.thumb.v1",
			"Workflow-Attempt":      "2",
			"Workflow-Max-Attempts": "5",
			"Workflow-Lease-No":     "7",
			"Workflow-Tenant":       "acme",
			"Idempotency-Key":       "order 17",
			"Traceparent":           "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01",
			"Authorization":         "Bearer s3cret-token",
			"X-Team":                "media",
			"Accept-Encoding":       "",
		} {
			if got := r.Header.Get(name); got != want {
				t.Errorf("%s = %q, want %q", name, got, want)
			}
		}
		if got, want := r.Method+" "+r.RequestURI, "POST /charge?v=1"; got != want {
			t.Errorf("request is %q, want %q", got, want)
		}
		_, _ = io.WriteString(w, " {\"id\":18446744073709551615}\n")
	})
	h := handler(t, `
a.b:
  url: `+url+`/charge?v=1
  headers: {authorization: "env:BILLING_TOKEN", X-Team: media}`)
	got, err := call(t, h, "{ \"a\": 1.10,\n\"a b\":\"\\n$(x)\" }")
	if want := `{"id":18446744073709551615}`; got != want || err != nil {
		t.Errorf("result = %s, %v, want %s", got, err, want)
	}
}

// Without a usable key the run's id is the idempotency key; a broken traceparent is left
// out. Nothing in the run can add a header.
func TestPostHeaderValues(t *testing.T) {
	for _, key := range []string{"", "a\r\nX-Evil: 1", "schlüssel", " a"} {
		url := serve(t, func(_ http.ResponseWriter, r *http.Request) {
			if got := r.Header.Get("Idempotency-Key"); got != info.ID.String() {
				t.Errorf("key %q is sent as %q", key, got)
			}
			if r.Header["Traceparent"] != nil || r.Header["X-Evil"] != nil {
				t.Errorf("headers = %v", r.Header)
			}
		})
		i := info
		i.IdempotencyKey, i.Metadata = key, []byte(`{"traceparent":"x\r\nX-Evil: 1"}`)
		if _, err := handler(t, "a.b: {url: "+url+"}")(run.NewContext(t.Context(), i), nil); err != nil {
			t.Errorf("key %q: %v", key, err)
		}
	}
}

// User and password of the URL become the Authorization header.
func TestPostCredentials(t *testing.T) {
	url := serve(t, func(_ http.ResponseWriter, r *http.Request) {
		if user, password, _ := r.BasicAuth(); user != "me" || password != "p@ss" {
			t.Errorf("credentials are %q, %q", user, password)
		}
	})
	if _, err := post(t, strings.Replace(url, "://", "://me:p%40ss@", 1)); err != nil {
		t.Error(err)
	}
}

// An answer without a body is a success without a result.
func TestPostNoResult(t *testing.T) {
	for _, url := range []string{answer(t, 204, ""), answer(t, 200, ""), answer(t, 201, " \n")} {
		if got, err := post(t, url); got != "" || err != nil {
			t.Errorf("result = %q, %v", got, err)
		}
	}
}

// An answer that cannot be stored ends the run: its work is done and is not done again.
func TestPostResultRejected(t *testing.T) {
	for _, body := range []string{"<html>", "{", "{}{}", `{"a":1,"a":2}`, "\xff", `"\u0000"`, `"` + strings.Repeat("x", 1<<20) + `"`} {
		_, err := post(t, answer(t, 200, body))
		want(t, err, true, settling.CodeResult, "POST http://127.0.0.1")
	}
}

// max_result_bytes is exact, and an endless answer is not read beyond it.
func TestPostLimit(t *testing.T) {
	cut := make(chan bool, 1)
	endless := serve(t, func(w http.ResponseWriter, _ *http.Request) {
		for {
			if _, err := w.Write(make([]byte, 1<<16)); err != nil {
				cut <- true
				return
			}
		}
	})
	if got, err := call(t, handler(t, "a.b: {url: "+answer(t, 200, `"123"`)+", max_result_bytes: 5}"), "{}"); got != `"123"` || err != nil {
		t.Errorf("at the limit: %q, %v", got, err)
	}
	for _, url := range []string{answer(t, 200, `"1234"`), endless} {
		_, err := call(t, handler(t, "a.b: {url: "+url+", max_result_bytes: 5}"), "{}")
		want(t, err, true, settling.CodeResult, "more than 5 bytes")
	}
	<-cut
}

// hijack serves raw bytes and then resets the connection.
func hijack(t *testing.T, raw string) string {
	return serve(t, func(w http.ResponseWriter, _ *http.Request) {
		conn, _, err := w.(http.Hijacker).Hijack()
		if err != nil {
			t.Error(err)
			return
		}
		_, _ = io.WriteString(conn, raw)
		_ = conn.(*net.TCPConn).SetLinger(0)
		conn.Close()
	})
}

// Whatever cuts a call short is an ordinary failure, even if what did arrive would be JSON:
// the run is tried again.
func TestPostBroken(t *testing.T) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	l.Close()
	untrusted := httptest.NewTLSServer(http.NotFoundHandler())
	t.Cleanup(untrusted.Close)
	for name, url := range map[string]string{
		"refused":        "http://" + l.Addr().String(),
		"no answer":      hijack(t, ""),
		"no status line": hijack(t, "hello\r\n\r\n"),
		"in the headers": hijack(t, "HTTP/1.1 200 OK\r\nContent-"),
		"in the body":    hijack(t, "HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\n{\"a\":1}"),
		"in a chunk":     hijack(t, "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n7\r\n{\"a\":1}\r\n"),
		"long headers":   answer(t, 200, "{}", "X", strings.Repeat("x", 100_000)),
		"untrusted":      untrusted.URL,
	} {
		t.Run(name, func(t *testing.T) {
			got, err := post(t, url)
			want(t, err, false, "")
			if got != "" {
				t.Errorf("result = %q", got)
			}
		})
	}
}

// A slow server costs no more than the context allows, whether it is late with its headers or
// with its body; the error says why the context ended.
func TestPostSlow(t *testing.T) {
	for _, begin := range []string{"", `{"a":`} {
		arrived := make(chan bool)
		url := serve(t, func(w http.ResponseWriter, r *http.Request) {
			_, _ = io.Copy(io.Discard, r.Body)
			if begin != "" {
				_, _ = io.WriteString(w, begin)
				w.(http.Flusher).Flush()
			}
			arrived <- true
			<-r.Context().Done()
		})
		ctx, cancel := context.WithCancelCause(t.Context())
		go func() {
			<-arrived
			cancel(run.ErrDeadline)
		}()
		_, err := callContext(ctx, handler(t, "a.b: {url: "+url+"}"), "{}")
		want(t, err, false, "")
		if !errors.Is(err, run.ErrDeadline) {
			t.Errorf("error = %v", err)
		}
	}
}

// The explanation of a failure may not last for ever either: what came of it is shown.
func TestPostSlowRefusal(t *testing.T) {
	url := serve(t, func(w http.ResponseWriter, r *http.Request) {
		_, _ = io.Copy(io.Discard, r.Body)
		w.WriteHeader(500)
		_, _ = io.WriteString(w, "because")
		w.(http.Flusher).Flush()
		<-r.Context().Done()
	})
	b := load(t, "a.b: {url: "+url+"}")
	b.SetPatience(50 * time.Millisecond)
	_, err := call(t, b.Handler(nil), "{}")
	want(t, err, false, "", "status 500: because")
}

// What a status means: the table in docs/handlers-file.md.
func TestPostStatus(t *testing.T) {
	permanent := map[int]bool{400: true, 401: true, 403: true, 404: true, 410: true, 413: true, 418: true, 422: true, 451: true, 499: true}
	for _, code := range []int{400, 401, 403, 404, 408, 409, 410, 413, 418, 422, 425, 429, 451, 499, 500, 501, 502, 503, 504, 599, 600, 999} {
		_, err := post(t, answer(t, code, "out\x1b[31m of\r\n ink\x00"))
		want(t, err, permanent[code], "", fmt.Sprintf("status %d: out [31m of ink", code))
	}
}

// An explanation is cut to 512 bytes, and secrets that come back in it are masked.
func TestPostExcerpt(t *testing.T) {
	t.Setenv("API_KEY", "canary-1234")
	url := serve(t, func(w http.ResponseWriter, r *http.Request) {
		w.WriteHeader(401)
		_, _ = io.WriteString(w, r.Header.Get("X-Key")+r.Header.Get("Authorization")+"canary-5678"+strings.Repeat("ä", 5000))
	})
	url = strings.Replace(url, "://", "://user:canary-5678@", 1) + "/p?key=canary-query"
	_, err := call(t, handler(t, "a.b: {url: '"+url+"', headers: {X-Key: 'env:API_KEY'}}"), "{}")
	encoded := base64.StdEncoding.EncodeToString([]byte("user:canary-5678"))
	want(t, err, true, "", "status 401: ***Basic ******ä", "ä…", "!canary", "!"+encoded, "!\uFFFD")
	if len(err.Error()) > 600 {
		t.Errorf("error has %d bytes", len(err.Error()))
	}
}

// Calls share connections: a hundred runs do not cost a hundred handshakes.
func TestPostKeepsConnections(t *testing.T) {
	remote := map[string]bool{}
	url := serve(t, func(w http.ResponseWriter, r *http.Request) {
		remote[r.RemoteAddr] = true
		_, _ = io.WriteString(w, "{}")
	})
	h := handler(t, "a.b: {url: "+url+"}")
	for range 20 {
		if _, err := call(t, h, "{}"); err != nil {
			t.Fatal(err)
		}
	}
	if len(remote) != 1 {
		t.Errorf("%d connections", len(remote))
	}
}
