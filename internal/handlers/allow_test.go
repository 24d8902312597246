package handlers_test

import (
	"context"
	"encoding/binary"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"net/netip"
	"strings"
	"sync/atomic"
	"testing"

	"github.com/simple-workflow/simple-workflow/internal/handlers"
)

// nameServer starts a DNS server that answers the nth query for an IPv4 address with the nth of the answers.
// After that it repeats the last one.
func nameServer(t *testing.T, answers ...string) *net.Resolver {
	t.Helper()
	conn, err := net.ListenPacket("udp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	done := make(chan bool)
	t.Cleanup(func() { conn.Close(); <-done })
	go func() {
		defer close(done)
		for buffer, n := make([]byte, 4096), 0; ; {
			size, from, err := conn.ReadFrom(buffer)
			if err != nil {
				return
			}
			end := 12
			for buffer[end] != 0 {
				end += int(buffer[end]) + 1
			}
			end += 5 // the zero, type and class
			reply := append([]byte{}, buffer[:min(end, size)]...)
			copy(reply[2:], []byte{0x81, 0x80, 0, 1, 0, 0, 0, 0, 0, 0})
			if binary.BigEndian.Uint16(buffer[end-4:]) == 1 {
				ip := netip.MustParseAddr(answers[min(n, len(answers)-1)]).As4()
				n++
				reply[7] = 1
				reply = append(reply, 0xc0, 12, 0, 1, 0, 1, 0, 0, 0, 0, 0, 4)
				reply = append(reply, ip[:]...)
			}
			_, _ = conn.WriteTo(reply, from)
		}
	}()
	return &net.Resolver{PreferGo: true, Dial: func(ctx context.Context, _, _ string) (net.Conn, error) {
		var d net.Dialer
		return d.DialContext(ctx, "udp", conn.LocalAddr().String())
	}}
}

// counting starts a server that closes each connection, so that each call dials.
func counting(t *testing.T) (port string, calls *atomic.Int64) {
	t.Helper()
	calls = new(atomic.Int64)
	s := httptest.NewUnstartedServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		calls.Add(1)
		_, _ = io.WriteString(w, "{}")
	}))
	s.Config.SetKeepAlivesEnabled(false)
	s.Start()
	t.Cleanup(s.Close)
	_, port, _ = net.SplitHostPort(s.Listener.Addr().String())
	return port, calls
}

// A name that resolves to a private address is not dialled, even if the list has the name. It is dialled if the
// list has the address or its network, with or without the port.
func TestDialPrivate(t *testing.T) {
	port, calls := counting(t)
	for _, allow := range []string{"", "[inner.test]", "[inner.test, 10.0.0.0/8]", "[inner.test, '127.0.0.1:1']", "['inner.test:" + port + "', 127.0.0.2]"} {
		file := "a.b: {url: 'http://Inner.test:" + port + "/'"
		if allow != "" {
			file += ", allow: " + allow
		}
		b := load(t, file+"}")
		b.SetResolver(nameServer(t, "127.0.0.1"))
		_, err := call(t, b.Handler(nil), "{}")
		want(t, err, false, handlers.CodeAddress, "host inner.test has address 127.0.0.1:"+port, "add the address to allow")
	}
	if calls.Load() != 0 {
		t.Fatal("the server was called")
	}
	for _, allow := range []string{"127.0.0.1", "127.0.0.0/8", "'127.0.0.1:" + port + "'"} {
		b := load(t, "a.b: {url: 'http://inner.test:"+port+"/', allow: ["+allow+"]}")
		b.SetResolver(nameServer(t, "127.0.0.1"))
		if _, err := call(t, b.Handler(nil), "{}"); err != nil {
			t.Errorf("allow %s: %v", allow, err)
		}
	}
}

// Each dial is checked, because a name that led to an allowed address may lead to another one the next time
// (DNS rebinding).
func TestDialRebinding(t *testing.T) {
	port, calls := counting(t)
	b := load(t, "a.b: {url: 'http://rebind.test:"+port+"/', allow: [rebind.test, 127.0.0.1]}")
	b.SetResolver(nameServer(t, "127.0.0.1", "127.0.0.2", "169.254.169.254"))
	h := b.Handler(nil)
	if _, err := call(t, h, "{}"); err != nil {
		t.Fatal(err)
	}
	_, err := call(t, h, "{}")
	want(t, err, false, handlers.CodeAddress, "127.0.0.2")
	_, err = call(t, h, "{}")
	want(t, err, false, handlers.CodeAddress, "169.254.169.254")
	if calls.Load() != 1 {
		t.Errorf("%d calls", calls.Load())
	}
}

// localhost and addresses in the URL are permitted without a list, because the author of the file meant them. If
// there is a list, only the list applies.
func TestDialLoopback(t *testing.T) {
	port, calls := counting(t)
	for _, host := range []string{"localhost", "LOCALHOST", "127.0.0.1", "[::ffff:127.0.0.1]"} {
		if _, err := post(t, "'http://"+host+":"+port+"'"); err != nil {
			t.Errorf("%s: %v", host, err)
		}
	}
	b := load(t, "a.b: {url: 'http://localhost:"+port+"', allow: [10.0.0.0/8]}")
	_, err := call(t, b.Handler(nil), "{}")
	want(t, err, false, handlers.CodeAddress)
	if calls.Load() != 4 {
		t.Errorf("%d calls", calls.Load())
	}
}

// Without an address in the list a name may lead to public addresses only, in whatever form the address is
// written.
func TestPublic(t *testing.T) {
	b := load(t, "a.b: {url: 'https://billing.example.com'}")
	for _, addr := range strings.Fields(`8.8.8.8 1.1.1.1 172.32.0.1 100.128.0.1 192.167.255.255 223.255.255.255
		::ffff:8.8.8.8 2606:4700::1111 2a00:1450::1 64:ff9b::808:808`) {
		if !b.Permits(netip.AddrPortFrom(netip.MustParseAddr(addr), 443)) {
			t.Errorf("%s is refused", addr)
		}
	}
	for _, addr := range strings.Fields(`0.0.0.0 0.1.2.3 10.1.2.3 100.64.0.1 127.0.0.1 127.8.8.8 169.254.169.254 172.16.0.1
		172.31.255.255 192.0.0.1 192.0.2.1 192.168.1.1 198.18.0.1 198.51.100.1 203.0.113.1 224.0.0.1 239.1.1.1 240.0.0.1 255.255.255.255
		:: ::1 ::7f00:1 ::ffff:127.0.0.1 ::ffff:10.0.0.1 ::ffff:169.254.169.254 64:ff9b::7f00:1 64:ff9b::a9fe:a9fe 64:ff9b:1::a00:1
		fe80::1 fe80::1%1 fec0::1 fc00::1 fd00:ec2::254 ff02::1 100::1 2001::1 2001:db8::1 2002:7f00:1:: 3fff::1`) {
		if b.Permits(netip.AddrPortFrom(netip.MustParseAddr(addr), 443)) {
			t.Errorf("%s is let through", addr)
		}
	}
	// Names of other hosts permit nothing.
	b = load(t, "a.b: {url: 'https://billing.example.com', allow: [other.example.com, 10.0.0.0/8]}")
	if b.Permits(netip.MustParseAddrPort("8.8.8.8:443")) || !b.Permits(netip.MustParseAddrPort("10.1.2.3:443")) {
		t.Error("the list does not count")
	}
	local := load(t, "a.b: {url: 'https://localhost'}")
	for _, addr := range []string{"8.8.8.8", "10.0.0.1", "169.254.169.254"} {
		if local.Permits(netip.AddrPortFrom(netip.MustParseAddr(addr), 443)) {
			t.Errorf("localhost at %s is let through", addr)
		}
	}
}

// A proxy from the environment is not used, because it would dial in the worker's place, unchecked.
func TestNoProxy(t *testing.T) {
	t.Setenv("HTTPS_PROXY", "http://127.0.0.1:1")
	if load(t, "a.b: {url: 'https://billing.example.com'}").Transport().Proxy != nil {
		t.Error("there is a proxy")
	}
}
