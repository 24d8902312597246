package handlers

import (
	"fmt"
	"net"
	"net/netip"
	"slices"
	"strings"
	"syscall"

	"github.com/simple-workflow/simple-workflow/internal/address"
)

// An allowList says which addresses may be dialled for one URL.
type allowList struct {
	host  string // of the URL: a name in lower case, or an IP address
	port  uint16 // of the URL
	rules []rule
}

// A rule allows a name or a network.
type rule struct {
	name   string // empty: the rule is for the network
	prefix netip.Prefix
	port   uint16 // 0: any
}

// An addressError is a refused dial.
type addressError struct{ host, address string }

func (e *addressError) Error() string {
	return fmt.Sprintf("host %s has address %s, which its allow list does not cover", e.host, e.address)
}

// control is the Control function of a net.Dialer. It sees the address after name resolution, exactly as it is
// dialled.
func (a *allowList) control(_, to string, _ syscall.RawConn) error {
	addr, err := netip.ParseAddrPort(to)
	if err != nil || !a.permits(addr) {
		return &addressError{a.host, to}
	}
	return nil
}

// permits reports whether a rule for networks covers addr, or a rule for names covers the URL's host. DNS
// decides what a name resolves to, so a rule for a name permits public addresses only, and localhost the
// loopback ones.
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
		return address.Public(ip)
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

// parseRule parses host, host:port, address, [address]:port or a network in CIDR notation. why says what is
// wrong.
func parseRule(text string) (r rule, why string) {
	if strings.Contains(text, "/") {
		if _, err := netip.ParsePrefix(text); err != nil {
			return r, "not a network; write it as 10.1.0.0/16, or a host without path"
		}
		r.prefix, why = address.Network(text)
		return r, why
	}
	if _, err := netip.ParseAddr(strings.Trim(text, "[]")); err == nil {
		text = strings.Trim(text, "[]")
	} else if host, port, err := net.SplitHostPort(text); err == nil {
		if r.port, why = address.Port(port); why != "" {
			return rule{}, "an entry whose port is " + why
		}
		text = host
	}
	host, why := address.Host(text)
	if ip, err := netip.ParseAddr(host); err == nil {
		r.prefix = netip.PrefixFrom(ip, ip.BitLen())
	} else {
		r.name = host
	}
	return r, why
}
