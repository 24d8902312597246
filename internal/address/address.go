// Package address decides which addresses may be dialled when a configuration names them: one policy
// for webhooks and for handlers from a file.
package address

import (
	"fmt"
	"net/netip"
	"regexp"
	"slices"
	"strconv"
	"strings"
)

func prefixes(all ...string) (list []netip.Prefix) {
	for _, p := range all {
		list = append(list, netip.MustParsePrefix(p))
	}
	return list
}

var (
	// This network, private, shared (carrier NAT), loopback, link-local (where clouds serve
	// metadata), protocol assignments, documentation, benchmarks, multicast, reserved.
	special4 = prefixes("0.0.0.0/8", "10.0.0.0/8", "100.64.0.0/10", "127.0.0.0/8", "169.254.0.0/16",
		"172.16.0.0/12", "192.0.0.0/24", "192.0.2.0/24", "192.168.0.0/16", "198.18.0.0/15",
		"198.51.100.0/24", "203.0.113.0/24", "224.0.0.0/3")

	// Only global unicast is public, without protocol assignments (Teredo), documentation
	// and 6to4.
	global6  = netip.MustParsePrefix("2000::/3")
	special6 = prefixes("2001::/23", "2001:db8::/32", "2002::/16", "3fff::/20")

	// NAT64: the last four bytes are the IPv4 address that a connection reaches.
	nat64 = netip.MustParsePrefix("64:ff9b::/96")
)

// Public reports whether ip is a public address of the internet.
func Public(ip netip.Addr) bool {
	covers := func(p netip.Prefix) bool { return p.Contains(ip) }
	switch {
	case ip.Is4():
		return !slices.ContainsFunc(special4, covers)
	case nat64.Contains(ip):
		b := ip.As16()
		return Public(netip.AddrFrom4([4]byte(b[12:])))
	}
	return global6.Contains(ip) && !slices.ContainsFunc(special6, covers)
}

var (
	validName = regexp.MustCompile(`^[a-z0-9_-]+(\.[a-z0-9_-]+)*$`)
	// Host names that C libraries and browsers read as an IPv4 address: 2130706433, 0x7f.1, 127.1.
	numericEnd = regexp.MustCompile(`(^|\.)([0-9]+|0x[0-9a-f]*)$`)
)

// Host normalises the host of a URL or of an allow list. why says what is wrong with it; "" if nothing is.
func Host(text string) (host, why string) {
	host = strings.ToLower(strings.TrimSuffix(text, "."))
	if ip, err := netip.ParseAddr(host); err == nil {
		if ip.Zone() != "" {
			return host, "an address with a zone; use one without"
		}
		return ip.Unmap().String(), ""
	}
	switch {
	case host == "":
		why = "missing; name one"
	case numericEnd.MatchString(host):
		why = "a number that only some programs read as an address; write it as four decimals such as 192.0.2.1"
	case strings.Contains(host, "*"):
		why = "a wildcard; name each host"
	case len(host) > 253 || !validName.MatchString(host):
		why = "neither a host name nor an address; use letters, digits, - and dots (IDN as xn--…)"
	}
	return host, why
}

// Port parses a port. why says what is wrong with it; "" if nothing is.
func Port(text string) (port uint16, why string) {
	n, err := strconv.ParseUint(text, 10, 16)
	if err != nil || n == 0 {
		return 0, "not a number from 1 to 65535; correct or remove it"
	}
	return uint16(n), ""
}

// Network parses a network in CIDR notation. why says what is wrong with it; "" if nothing is.
func Network(text string) (p netip.Prefix, why string) {
	p, err := netip.ParsePrefix(text)
	if err != nil {
		return p, "not a network; write it as 10.1.0.0/16"
	}
	return p, Meant(p)
}

// Meant returns what is wrong with p as an entry of an allow list; "" if nothing is.
func Meant(p netip.Prefix) (why string) {
	switch {
	case !p.IsValid():
		why = "not a network"
	case p.Addr().Is4In6():
		why = "an IPv4 network in IPv6 notation; write it as 10.1.0.0/16"
	case p.Bits() == 0:
		why = "everything; name the networks that are meant"
	case p != p.Masked():
		why = fmt.Sprintf("not the start of a network; write %s", p.Masked())
	}
	return why
}
