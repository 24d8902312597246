package webhook

import (
	"fmt"
	"net/netip"
	"regexp"
	"slices"
	"strings"
)

// internal are ranges that netip takes for public ones.
var internal = []netip.Prefix{
	netip.MustParsePrefix("0.0.0.0/8"),      // this network
	netip.MustParsePrefix("100.64.0.0/10"),  // shared by a carrier's customers
	netip.MustParsePrefix("192.0.0.0/24"),   // protocols
	netip.MustParsePrefix("198.18.0.0/15"),  // laboratories
	netip.MustParsePrefix("240.0.0.0/4"),    // reserved, and used
	netip.MustParsePrefix("::/96"),          // IPv4, long ago
	netip.MustParsePrefix("64:ff9b:1::/48"), // translated locally
	netip.MustParsePrefix("fec0::/10"),      // site-local
}

// public reports whether an address is meant to be reached by anybody.
func public(ip netip.Addr) bool {
	if !ip.IsGlobalUnicast() || ip.IsPrivate() || slices.ContainsFunc(internal, func(p netip.Prefix) bool { return p.Contains(ip) }) {
		return false
	}
	if ip.Is4() {
		return true
	}
	at := ip.As16()
	switch {
	case nat64.Contains(ip):
		return public(netip.AddrFrom4([4]byte(at[12:16])))
	case sixToFour.Contains(ip):
		return public(netip.AddrFrom4([4]byte(at[2:6])))
	}
	return true
}

// Addresses that hold one of IPv4.
var (
	nat64     = netip.MustParsePrefix("64:ff9b::/96")
	sixToFour = netip.MustParsePrefix("2002::/16")
)

// number is a host that resolvers take for an address, though it does not look like one.
var number = regexp.MustCompile(`^(0[xX][0-9a-fA-F]*|[0-9]+)(\.(0[xX][0-9a-fA-F]*|[0-9]+))*\.?$`)

// admitHost refuses early what admit would refuse later anyhow.
func (c Config) admitHost(host string) error {
	name := strings.TrimSuffix(strings.ToLower(host), ".")
	ip, err := netip.ParseAddr(name)
	switch {
	case err == nil:
		return c.admit(ip)
	case number.MatchString(host):
		return fmt.Errorf("the host %.60s is an address in an unusual form; write it like 203.0.113.7", host)
	case name == "localhost" || strings.HasSuffix(name, ".localhost"):
		if c.admit(netip.IPv6Loopback()) != nil {
			return c.admit(netip.AddrFrom4([4]byte{127, 0, 0, 1}))
		}
	}
	return nil
}

// admit returns an error for an address that is not public, unless it is allowed.
func (c Config) admit(ip netip.Addr) error {
	ip = ip.Unmap().WithZone("")
	if public(ip) || slices.ContainsFunc(c.Allow, func(p netip.Prefix) bool { return p.Contains(ip) }) {
		return nil
	}
	return fmt.Errorf("address %s is not public; if it is meant, allow it, as in allow=%s", ip, netip.PrefixFrom(ip, ip.BitLen()))
}
