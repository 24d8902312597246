package cmdtest

import (
	"io"
	"net"
	"net/url"
	"sync/atomic"
	"testing"
)

// Forward returns an address that leads to the database at address, and counts the connections made through it.
func Forward(t testing.TB, address string) (through string, connections func() int) {
	t.Helper()
	u, err := url.Parse(address)
	if err != nil {
		t.Fatal(err)
	}
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = listener.Close() })
	var count atomic.Int64
	target := u.Host
	go func() {
		for {
			client, err := listener.Accept()
			if err != nil {
				return
			}
			count.Add(1)
			go func() {
				defer client.Close()
				server, err := net.Dial("tcp", target)
				if err != nil {
					return
				}
				defer server.Close()
				go func() { _, _ = io.Copy(client, server); _ = client.Close() }()
				_, _ = io.Copy(server, client)
			}()
		}
	}()
	u.Host = listener.Addr().String()
	return u.String(), func() int { return int(count.Load()) }
}
