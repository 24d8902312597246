package handlers

import (
	"fmt"
	"net"
	"net/netip"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"syscall"
)

// An allowList says which addresses may be dialled for one URL.
type allowList struct {
	host  string // of the URL: a name in lower case, or an address
	port  uint16 // of the URL
	rules []rule
}

// A rule allows a name or a network.
type rule struct {
	name   string // empty: the network counts
	prefix netip.Prefix
	port   uint16 // 0: any
}

// An addressError is a refused dial.
type addressError struct{ host, address string }

func (e *addressError) Error() string {
	return fmt.Sprintf("host %s has address %s, which its allow list does not cover", e.host, e.address)
}

// control is a net.Dialer's Control: it sees the address after the name was resolved, the
// very one that is about to be dialled.
func (a *allowList) control(_, address string, _ syscall.RawConn) error {
	addr, err := netip.ParseAddrPort(address)
	if err != nil || !a.permits(addr) {
		return &addressError{a.host, address}
	}
	return nil
}

// permits reports whether a rule for networks covers addr, or one for names the URL's host.
// What a name resolves to is up to whoever runs its DNS, so a name alone never opens the way
// to private addresses.
func (a *allowList) permits(addr netip.AddrPort) bool {
	ip := addr.Addr().WithZone("").Unmap()
	return slices.ContainsFunc(a.rules, func(r rule) bool {
		switch {
		case r.port != 0 && r.port != addr.Port():
			return false
		case r.name == "":
			return r.prefix.Contains(ip)
		case r.name != a.host:
			return false
		case r.name == "localhost":
			return ip.IsLoopback()
		}
		return public(ip)
	})
}

// possible reports whether any address at all could be dialled.
func (a *allowList) possible() bool {
	ip, err := netip.ParseAddr(a.host)
	return slices.ContainsFunc(a.rules, func(r rule) bool {
		switch {
		case r.port != 0 && r.port != a.port:
			return false
		case r.name != "":
			return r.name == a.host
		}
		return err != nil || r.prefix.Contains(ip.Unmap())
	})
}

func prefixes(all ...string) (list []netip.Prefix) {
	for _, p := range all {
		list = append(list, netip.MustParsePrefix(p))
	}
	return list
}

var (
	// This network, private, shared (carrier NAT), loopback, link-local with the clouds'
	// metadata, protocol use, documentation, benchmarks, multicast, reserved.
	special4 = prefixes("0.0.0.0/8", "10.0.0.0/8", "100.64.0.0/10", "127.0.0.0/8", "169.254.0.0/16",
		"172.16.0.0/12", "192.0.0.0/24", "192.0.2.0/24", "192.168.0.0/16", "198.18.0.0/15",
		"198.51.100.0/24", "203.0.113.0/24", "224.0.0.0/3")

	// Only global unicast is public, and of that not protocol use (Teredo), documentation
	// and 6to4.
	global6  = netip.MustParsePrefix("2000::/3")
	special6 = prefixes("2001::/23", "2001:db8::/32", "2002::/16", "3fff::/20")

	// NAT64: the last four bytes are the IPv4 address that is reached.
	nat64 = netip.MustParsePrefix("64:ff9b::/96")
)

// public reports whether ip is an address of the open internet.
func public(ip netip.Addr) bool {
	covers := func(p netip.Prefix) bool { return p.Contains(ip) }
	switch {
	case ip.Is4():
		return !slices.ContainsFunc(special4, covers)
	case nat64.Contains(ip):
		b := ip.As16()
		return public(netip.AddrFrom4([4]byte(b[12:])))
	}
	return global6.Contains(ip) && !slices.ContainsFunc(special6, covers)
}

var (
	validName = regexp.MustCompile(`^[a-z0-9_-]+(\.[a-z0-9_-]+)*$`)
	// What C libraries and browsers read as an IPv4 address: 2130706433, 0x7f.1, 127.1.
	numericEnd = regexp.MustCompile(`(^|\.)([0-9]+|0x[0-9a-f]*)$`)
)

// parseHost normalises the host of a URL or an allow entry; why says what is wrong with it.
func parseHost(text string) (host, why string) {
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

// parseRule reads host, host:port, address, [address]:port or a network in CIDR notation.
func parseRule(text string) (r rule, why string) {
	if strings.Contains(text, "/") {
		return parseNetwork(text)
	}
	if _, err := netip.ParseAddr(strings.Trim(text, "[]")); err == nil {
		text = strings.Trim(text, "[]")
	} else if host, port, err := net.SplitHostPort(text); err == nil {
		n, err := strconv.ParseUint(port, 10, 16)
		if err != nil || n == 0 {
			return rule{}, "an entry whose port is not a number from 1 to 65535; correct or remove it"
		}
		text, r.port = host, uint16(n)
	}
	host, why := parseHost(text)
	if ip, err := netip.ParseAddr(host); err == nil {
		r.prefix = netip.PrefixFrom(ip, ip.BitLen())
	} else {
		r.name = host
	}
	return r, why
}

func parseNetwork(text string) (r rule, why string) {
	p, err := netip.ParsePrefix(text)
	switch {
	case err != nil:
		why = "not a network; write it as 10.1.0.0/16, or a host without path"
	case p.Addr().Is4In6():
		why = "an IPv4 network in IPv6 notation; write it as 10.1.0.0/16"
	case p.Bits() == 0:
		why = "everything; name the networks that are meant"
	case p != p.Masked():
		why = fmt.Sprintf("not the start of a network; write %s", p.Masked())
	}
	return rule{prefix: p}, why
}
