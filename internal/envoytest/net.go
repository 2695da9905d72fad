package envoytest

import (
	"fmt"
	"math/rand/v2"
	"net"
	"net/netip"
	"os"
	"sync"
	"testing"
	"time"
)

// Ports handed out lie below the range that kernels give to outgoing
// connections (32768 and up on Linux, 49152 and up on macOS).
const (
	firstPort = 20000
	lastPort  = 31999
)

var ports struct {
	sync.Mutex
	taken map[int]bool // at most lastPort-firstPort entries
}

// FreePort returns a TCP port that nothing listens on. The port isn't held: it
// is drawn at random from a wide range, and no port is given twice in one
// process, which makes a collision unlikely.
func FreePort(tb testing.TB) int {
	tb.Helper()
	ports.Lock()
	defer ports.Unlock()
	if ports.taken == nil {
		ports.taken = make(map[int]bool)
	}
	for range 2 * (lastPort - firstPort) {
		port := firstPort + rand.IntN(lastPort-firstPort+1)
		if ports.taken[port] {
			continue
		}
		l, err := net.Listen("tcp", fmt.Sprintf("127.0.0.1:%d", port))
		if err != nil {
			continue
		}
		l.Close()
		ports.taken[port] = true
		return port
	}
	tb.Fatalf("no free port between %d and %d", firstPort, lastPort)
	return 0
}

// FreeAddr returns a loopback address with a free port.
func FreeAddr(tb testing.TB) netip.AddrPort {
	tb.Helper()
	return netip.AddrPortFrom(netip.AddrFrom4([4]byte{127, 0, 0, 1}), uint16(FreePort(tb)))
}

// ShortTempDir is TempDir for Unix sockets: their paths must stay below about
// 100 bytes, and a test's own temporary directory holds the test's name.
func ShortTempDir(tb testing.TB) string {
	tb.Helper()
	dir, err := os.MkdirTemp("", "fl")
	if err != nil {
		tb.Fatal(err)
	}
	tb.Cleanup(func() { _ = os.RemoveAll(dir) })
	return dir
}

// eventuallyLimit is generous: tests share a loaded machine.
const eventuallyLimit = 30 * time.Second

// Eventually polls until ok returns true and fails the test when that takes
// longer than 30 s.
func Eventually(tb testing.TB, what string, ok func() bool) {
	tb.Helper()
	deadline := time.Now().Add(eventuallyLimit)
	for !ok() {
		if time.Now().After(deadline) {
			tb.Fatalf("%s: not seen in %v", what, eventuallyLimit)
		}
		time.Sleep(pollEvery)
	}
}
