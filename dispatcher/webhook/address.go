package webhook

import (
	"errors"
	"fmt"
	"net/netip"
	"net/url"
	"slices"
	"strings"

	"github.com/simple-workflow/simple-workflow/internal/address"
)

// admitURL returns an error for a URL that could never be dialled: one with an invalid host or port, or with
// an address that is not admitted.
func (c Config) admitURL(u *url.URL) error {
	host, why := address.Host(u.Hostname())
	if why != "" {
		return fmt.Errorf("the host %.60s is %s", u.Hostname(), why)
	}
	if u.Port() != "" || strings.HasSuffix(u.Host, ":") {
		if _, why := address.Port(u.Port()); why != "" {
			return fmt.Errorf("the port %.20s is %s", u.Port(), why)
		}
	}
	if u.Opaque != "" || u.Fragment != "" {
		return errors.New("use http://host/path or https://host/path")
	}
	if ip, err := netip.ParseAddr(host); err == nil {
		return c.admit(ip)
	}
	if host == "localhost" || strings.HasSuffix(host, ".localhost") {
		if c.admit(netip.IPv6Loopback()) != nil {
			return c.admit(netip.AddrFrom4([4]byte{127, 0, 0, 1}))
		}
	}
	return nil
}

// admit returns an error for an address that is neither public nor in Allow.
func (c Config) admit(ip netip.Addr) error {
	ip = ip.Unmap().WithZone("")
	if address.Public(ip) || slices.ContainsFunc(c.Allow, func(p netip.Prefix) bool { return p.Contains(ip) }) {
		return nil
	}
	return fmt.Errorf("address %s is not public; if it is meant, allow it, as in allow=%s", ip, netip.PrefixFrom(ip, ip.BitLen()))
}
