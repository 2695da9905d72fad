//go:build !linux

package rawio

import "net"

// Listener returns l.
func Listener(l net.Listener) net.Listener { return l }
