//go:build !linux

package rawio

import (
	"net"
	"time"
)

// Listener returns l.
func Listener(l net.Listener, _ time.Duration) net.Listener { return l }
