package webhook_test

import (
	"errors"
	"fmt"
	"io"
	"log"
	"net"
	"net/http"
	"net/http/httptest"
	"net/netip"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/simple-workflow/simple-workflow/dispatcher/webhook"
)

// raw accepts connections, reads a request and passes the connection to serve.
func raw(t *testing.T, serve func(net.Conn)) (url string) {
	t.Helper()
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = listener.Close() })
	go func() {
		for {
			conn, err := listener.Accept()
			if errors.Is(err, net.ErrClosed) {
				return
			}
			go func() {
				defer conn.Close()
				_, _ = conn.Read(make([]byte, 4096))
				serve(conn)
			}()
		}
	}()
	return "http://" + listener.Addr().String()
}

func says(text string) func(*testing.T) string {
	return func(t *testing.T) string {
		return raw(t, func(c net.Conn) { _, _ = io.WriteString(c, text) })
	}
}

// answers returns a server that responds with a status, a body, and headers given as pairs of name and value.
func answers(status int, body string, headers ...string) func(*testing.T) string {
	return func(t *testing.T) string {
		server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
			for k := 0; k < len(headers); k += 2 {
				w.Header().Set(headers[k], headers[k+1])
			}
			w.WriteHeader(status)
			_, _ = io.WriteString(w, body)
		}))
		t.Cleanup(server.Close)
		return server.URL
	}
}

// tricklesForever writes one byte of the body every 20 ms.
func tricklesForever(t *testing.T) string {
	return raw(t, func(c net.Conn) {
		_, err := io.WriteString(c, "HTTP/1.1 200 OK\r\nContent-Length: 100000\r\n\r\n")
		for err == nil {
			time.Sleep(20 * time.Millisecond)
			_, err = io.WriteString(c, "x")
		}
	})
}

// Each response of a server, or its absence, leads to the error in the table: the sink matrix of the outbox, K1 to K20.
func TestAnswers(t *testing.T) {
	unreachable := func(t *testing.T) string {
		server := httptest.NewServer(nil)
		server.Close()
		return server.URL
	}
	silent := func(t *testing.T) string { return raw(t, func(c net.Conn) { _, _ = io.Copy(io.Discard, c) }) }
	resets := func(t *testing.T) string {
		return raw(t, func(c net.Conn) {
			_, _ = io.WriteString(c, "HTTP/1.1 200 OK\r\nContent-Length: 1000\r\n\r\nhalf of")
			_ = c.(*net.TCPConn).SetLinger(0)
		})
	}
	untrusted := func(t *testing.T) string {
		server := httptest.NewUnstartedServer(nil)
		server.Config.ErrorLog = log.New(io.Discard, "", 0)
		server.StartTLS()
		t.Cleanup(server.Close)
		return server.URL
	}
	past := time.Now().Add(-time.Hour).UTC().Format(http.TimeFormat)
	for _, row := range []struct {
		name   string
		server func(*testing.T) string
		want   string
		says   string // in the error
	}{
		{"K1 connection refused", unreachable, "unavailable", "connection refused"},
		{"K3 accepts and never answers", silent, "later", "Timeout exceeded"},
		{"K4 a byte now and then", tricklesForever, "later", "broke off"},
		{"K5 200, then a reset within the body", resets, "later", "answer of status 200 broke off"},
		{"K7 200", answers(200, "thanks"), "acknowledged", ""},
		{"K7 202", answers(202, ""), "acknowledged", ""},
		{"K7 204", answers(204, ""), "acknowledged", ""},
		{"K8 301", answers(301, "", "Location", "https://new.example/in"), "later", `redirects are not followed; the sink has moved to "https://new.example/in"`},
		{"K8 302", answers(302, "", "Location", "/login"), "later", `moved to "/login"`},
		{"K8 307", answers(307, "", "Location", "http://169.254.169.254/"), "later", "169.254.169.254"},
		{"K8 308", answers(308, "", "Location", "https://new.example/in?token=SECRET"), "later", `"https://new.example/in"`},
		{"K8 304", answers(304, ""), "later", "redirects are not followed"},
		{"K9 400", answers(400, "no such\x1b[31m currency\n"), "rejected", "status 400: no such [31m currency"},
		{"K9 404", answers(404, "no such page"), "later", "status 404: no such page"},
		{"K9 405", answers(405, ""), "later", "405"},
		{"K9 410", answers(410, "gone"), "later", "status 410: gone"},
		{"K9 409", answers(409, "have it already"), "rejected", "409"},
		{"K9 415", answers(415, "text, please"), "rejected", "status 415: text, please"},
		{"K9 422", answers(422, strings.Repeat("é", 1000)), "rejected", "status 422: ééé"},
		{"K10 401", answers(401, "no"), "unavailable", "credentials"},
		{"K10 403", answers(403, "firewall"), "later", "status 403: firewall"},
		{"K11 408", answers(408, ""), "later", "408"},
		{"K11 408, two minutes", answers(408, "", "Retry-After", "120"), "unavailable 2m0s", "408"},
		{"K11 425", answers(425, ""), "later", "425"},
		{"K11 429", answers(429, ""), "unavailable", "429"},
		{"K11 429, two minutes", answers(429, "", "Retry-After", "120"), "unavailable 2m0s", "429"},
		{"K11 429, a past date", answers(429, "", "Retry-After", past), "unavailable", "429"},
		{"K11 429, banana", answers(429, "", "Retry-After", "banana"), "unavailable", "429"},
		{"K11 429, negative", answers(429, "", "Retry-After", "-5"), "unavailable", "429"},
		{"K11 429, a week", answers(429, "", "Retry-After", "604800"), "unavailable 1h0m0s", "429"},
		{"K11 429, centuries", answers(429, "", "Retry-After", "99999999999"), "unavailable", "429"},
		{"K12 500", answers(500, "sorry"), "later", "status 500: sorry"},
		{"K12 502", answers(502, ""), "later", "502"},
		{"K12 503", answers(503, ""), "later", "503"},
		{"K12 503, two minutes", answers(503, "", "Retry-After", "120"), "unavailable 2m0s", "503"},
		{"K12 504", answers(504, ""), "later", "504"},
		{"K13 status 600", says("HTTP/1.1 600 What\r\nContent-Length: 0\r\n\r\n"), "later", "600"},
		{"K13 no status line", says("this is no HTTP\r\n\r\n"), "later", "malformed HTTP"},
		{"K13 nothing at all", says(""), "later", "EOF"},
		{"K13 headers without end", says("HTTP/1.1 200 OK\r\nX: " + strings.Repeat("x", 200_000)), "later", ""},
		{"K15 TLS of an unknown authority", untrusted, "unavailable", "certificate"},
		{"K17 plain HTTP on a TLS port", func(t *testing.T) string { return strings.Replace(answers(200, "")(t), "http:", "https:", 1) }, "later", "HTTP response to HTTPS"},
		{"K20 413", answers(413, "4 MB at most"), "rejected for good", "a payload of 53 bytes is too large for the sink: 4 MB at most"},
	} {
		t.Run(row.name, func(t *testing.T) {
			t.Parallel()
			err := publish(t, sink(t, webhook.Config{URL: row.server(t), Timeout: time.Second}), newEvent("1", "a"))
			if got := kind(err); got != row.want {
				t.Fatalf("%s, want %s: %v", got, row.want, err)
			}
			if text := fmt.Sprint(err); row.says != "" && !strings.Contains(text, row.says) || strings.Contains(text, "SECRET") || len(text) > 4500 {
				t.Errorf("it lacks %q: %.1000s", row.says, text)
			}
		})
	}
}

// K6: a huge response is not read to its end, and the connection is closed.
func TestHugeAnswer(t *testing.T) {
	wrote := make(chan int64, 1)
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		n, _ := io.Copy(w, io.LimitReader(zeros{}, 1<<30))
		wrote <- n
	}))
	defer server.Close()
	if err := publish(t, sink(t, webhook.Config{URL: server.URL}), newEvent("1", "a")); err != nil {
		t.Fatal(err)
	}
	if n := <-wrote; n > 64<<20 { // at most what the sockets buffer
		t.Errorf("the server could write %d bytes", n)
	}
}

type zeros struct{}

func (zeros) Read(p []byte) (int, error) { return len(p), nil }

// K8: a redirect is not followed.
func TestRedirectNotFollowed(t *testing.T) {
	var followed atomic.Bool
	other := httptest.NewServer(http.HandlerFunc(func(http.ResponseWriter, *http.Request) { followed.Store(true) }))
	defer other.Close()
	for _, status := range []int{301, 302, 303, 307, 308} {
		url := answers(status, "", "Location", other.URL)(t)
		if err := publish(t, sink(t, webhook.Config{URL: url}), newEvent("1", "a")); err == nil {
			t.Errorf("status %d is taken for an acknowledgement", status)
		}
	}
	if followed.Load() {
		t.Error("a redirect was followed")
	}
}

// K38, K39: an address that is not public is refused in any notation, at the latest when it is dialled. An
// allowed address is dialled.
func TestPrivateAddresses(t *testing.T) {
	var came atomic.Int32
	server := httptest.NewServer(http.HandlerFunc(func(http.ResponseWriter, *http.Request) { came.Add(1) }))
	defer server.Close()
	_, port, _ := net.SplitHostPort(server.Listener.Addr().String())
	for _, host := range []string{
		"127.0.0.1", "127.1.2.3", "[::1]", "169.254.169.254", "10.1.2.3", "172.16.0.1", "192.168.1.1", "100.64.0.1", "0.0.0.0", "[::]",
		"0x7f000001", "2130706433", "0177.0.0.1", "127.1", "[::ffff:127.0.0.1]", "[::ffff:10.0.0.1]", "[::127.0.0.1]", "[fe80::1]", "[fd00::1]", "[fec0::1]",
		"[64:ff9b::7f00:1]", "[64:ff9b::a9fe:a9fe]", "[2002:7f00:1::]", "224.0.0.1", "255.255.255.255", "240.0.0.1", "localhost", "LOCALHOST.", "db.localhost",
	} {
		s, err := webhook.New(webhook.Config{URL: "http://" + host + ":" + port})
		if err == nil {
			err = publish(t, s, newEvent("1", "a"))
			t.Errorf("%s is not refused before it is dialled; then: %v", host, err)
		} else if text := err.Error(); !strings.Contains(text, "is not public") && !strings.Contains(text, "only some programs read") {
			t.Errorf("%s: %v", host, err)
		}
	}
	// The address of a name is known only when it is dialled.
	for _, host := range []string{"localhost", "127.0.0.1", "[::1]", "[::ffff:127.0.0.1]", "10.1.2.3", "169.254.169.254"} {
		err := publish(t, webhook.Late(webhook.Config{URL: "http://" + host + ":" + port}), newEvent("1", "a"))
		if !strings.HasPrefix(kind(err), "unavailable") || !strings.Contains(err.Error(), "is not public; if it is meant, allow it, as in allow=") {
			t.Errorf("%s: %v", host, err)
		}
	}
	if n := came.Load(); n != 0 {
		t.Errorf("%d requests came through", n)
	}
	for _, url := range []string{"http://127.0.0.1:" + port, "http://localhost:" + port, "http://[::ffff:127.0.0.1]:" + port} {
		if err := publish(t, sink(t, webhook.Config{URL: url, Allow: append(loopback, netip.MustParsePrefix("::1/128"))}), newEvent("1", "a")); err != nil {
			t.Errorf("allowed, and refused all the same: %v", err)
		}
	}
	for _, host := range []string{"8.8.8.8", "[2606:4700::1111]", "crm.example", "1password.com", "0x.org"} {
		if _, err := webhook.New(webhook.Config{URL: "https://" + host}); err != nil {
			t.Errorf("%s: %v", host, err)
		}
	}
}

// K40: no error contains the password, the token or the secret path of the URL, although servers quote them.
func TestNoSecretInErrors(t *testing.T) {
	const password, token, hook = "pa55w0rd", "t0k3n-of-the-query", "T0PSECRETHOOK"
	echo := func(status int) func(*testing.T) string {
		return func(t *testing.T) string {
			server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
				user, given, _ := r.BasicAuth()
				if user != "app" || given != password {
					t.Errorf("credentials %q %q", user, given)
				}
				w.Header().Set("Location", "https://new.example"+r.URL.String()+"/")
				w.WriteHeader(status)
				fmt.Fprintf(w, "Cannot POST %s (%s, token %s, %s)", r.URL, r.Header.Get("Authorization"), r.URL.Query().Get("token"), given)
			}))
			t.Cleanup(server.Close)
			return server.URL
		}
	}
	closed := func(t *testing.T) string {
		server := httptest.NewServer(nil)
		server.Close()
		return server.URL
	}
	for name, server := range map[string]func(*testing.T) string{
		"refused": closed, "400": echo(400), "401": echo(401), "404": echo(404), "413": echo(413), "429": echo(429), "500": echo(500), "301": echo(301), "308": echo(308),
		"broken": says("Cannot POST /hooks/" + hook + "?token=" + token), "silent": func(t *testing.T) string { return raw(t, func(c net.Conn) { _, _ = io.Copy(io.Discard, c) }) },
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			url := strings.Replace(server(t), "http://", "http://app:"+password+"@", 1) + "/hooks/" + hook + "?token=" + token
			err := publish(t, sink(t, webhook.Config{URL: url, Timeout: 200 * time.Millisecond}), newEvent("1", "a"))
			if err == nil {
				t.Fatal("acknowledged")
			}
			for _, secret := range []string{password, token, hook, "YXBwOnBh"} {
				if strings.Contains(err.Error(), secret) {
					t.Errorf("the error has %q: %v", secret, err)
				}
			}
		})
	}
	for _, url := range []string{"ftp://app:" + password + "@crm.example", "https://app:" + password + "@", "https://app:" + password + "@127.0.0.1/" + hook, "https://app:%zz" + password + "@crm.example"} {
		if _, err := webhook.New(webhook.Config{URL: url}); err == nil || strings.Contains(err.Error(), password) || strings.Contains(err.Error(), hook) {
			t.Errorf("%v", err)
		}
	}
}
