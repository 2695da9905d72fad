//go:build !race

package rawio

import (
	"unsafe"

	"golang.org/x/sys/unix"
)

// once makes a raw system call.
func once(number, fd uintptr, b []byte) (int, error) {
	n, _, errno := unix.RawSyscall(number, fd, uintptr(unsafe.Pointer(unsafe.SliceData(b))), uintptr(len(b)))
	if errno != 0 {
		return 0, errno
	}
	return int(n), nil
}
