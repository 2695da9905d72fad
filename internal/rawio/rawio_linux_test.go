package rawio

import (
	"testing"

	"golang.org/x/sys/unix"
)

// TestDeadPeersAreGivenUp: what grpc-go sets on connections that it knows is set.
func TestDeadPeersAreGivenUp(t *testing.T) {
	_, server := pair(t, "tcp")
	var got int
	var err error
	if e := server.(*conn).raw.Control(func(fd uintptr) {
		got, err = unix.GetsockoptInt(int(fd), unix.IPPROTO_TCP, unix.TCP_USER_TIMEOUT)
	}); e != nil || err != nil || got != 15000 {
		t.Errorf("TCP_USER_TIMEOUT %d ms, %v, %v; want 15 s", got, e, err)
	}
}
