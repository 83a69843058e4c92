package guest

import (
	"net"
	"syscall"

	"golang.org/x/sys/unix"
)

// open says whether an idle connection still has its other end. The guest
// never speaks first on one, so anything readable is its end. Connections
// without a descriptor (net.Pipe in tests) cannot be asked and count as open;
// the retry rule covers them.
func open(c net.Conn) bool {
	sc, ok := c.(syscall.Conn)
	if !ok {
		return true
	}
	rc, err := sc.SyscallConn()
	if err != nil {
		return true
	}
	alive := true
	err = rc.Control(func(fd uintptr) {
		var b [1]byte
		_, _, err := unix.Recvfrom(int(fd), b[:], unix.MSG_PEEK|unix.MSG_DONTWAIT)
		alive = err == unix.EAGAIN || err == unix.EINTR || err == unix.ENOTSOCK
	})
	return err == nil && alive
}
