package handlers_test

import (
	"fmt"
	"net"
	"testing"

	"github.com/simple-workflow/simple-workflow/run"
)

// A status or an exit code can say that a service is out of reach, and the answer itself overrides it. A
// permanent error never says so.
func TestToldUnavailable(t *testing.T) {
	for _, c := range []struct {
		status int
		exit   int
		says   string
		want   bool
	}{
		{503, 75, ``, true},
		{429, 75, `{"error": {"code": "BUSY", "retry_after": 3}}`, true},
		{502, 75, `{"error": {"unavailable": true}}`, true},
		{503, 75, `{"error": {"unavailable": false}}`, false},
		{503, 75, `{"error": {"permanent": true}}`, false},
		{503, 75, `{"error": {"again_after": 1}}`, false},
		{500, 1, ``, false},
		{504, 1, ``, false},
		{408, 2, ``, false},
		{404, 65, ``, false},
		{404, 64, `{"error": {"unavailable": true}}`, false},
		{500, 1, `{"error": {"unavailable": true}}`, true},
		{500, 1, `{"error": {"unavailable": "yes"}}`, false},
	} {
		_, posted := post(t, answer(t, c.status, c.says))
		_, executed := execute(t, fmt.Sprintf("cat <<'END'\n%s\nEND\nexit %d", c.says, c.exit), "{}")
		for how, err := range map[string]error{"url": posted, "program": executed} {
			if err == nil || run.IsUnavailable(err) != c.want {
				t.Errorf("%s, status %d, exit code %d, %s: unavailable %t, want %t: %v", how, c.status, c.exit, c.says, run.IsUnavailable(err), c.want, err)
			}
		}
	}
}

// A URL to which no connection can be made is out of reach. One that breaks off a connection is not, since the
// run may be the cause.
func TestUnreached(t *testing.T) {
	nobody, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	refusing := "http://" + nobody.Addr().String()
	nobody.Close()
	breaking, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer breaking.Close()
	go func() {
		for {
			conn, err := breaking.Accept()
			if err != nil {
				return
			}
			conn.Close()
		}
	}()
	for url, want := range map[string]bool{refusing: true, "http://nowhere.invalid": true, "http://" + breaking.Addr().String(): false} {
		if _, err := post(t, url); err == nil || run.IsUnavailable(err) != want {
			t.Errorf("%s: unavailable %t, want %t: %v", url, run.IsUnavailable(err), want, err)
		}
	}
}
