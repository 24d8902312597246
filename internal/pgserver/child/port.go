package child

import (
	"errors"
	"math/rand/v2"
	"net"
	"strconv"
)

// Ports are taken from below the range the system hands to outgoing
// connections, so that a server which is down for a while can have its port
// again.
const firstPort, lastPort = 15_000, 32_000

// Port returns a loopback TCP port on which nobody listens at the moment.
func Port() (int, error) {
	for range 100 {
		port := firstPort + rand.IntN(lastPort-firstPort)
		if PortFree(port) {
			return port, nil
		}
	}
	return 0, errors.New("no free port on 127.0.0.1")
}

// PortFree reports whether a server could listen on the loopback port now.
func PortFree(port int) bool {
	l, err := net.Listen("tcp", net.JoinHostPort("127.0.0.1", strconv.Itoa(port)))
	if err != nil {
		return false
	}
	return l.Close() == nil
}
