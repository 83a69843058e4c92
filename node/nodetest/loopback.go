package nodetest

import (
	"io"
	"net"
	"strconv"
	"testing"

	"github.com/cove-sandbox/cove/guest/wire"
)

// Loopback fills in what a World needs of ports where sandboxes share the loopback
// of this machine, as the fake driver's do.
func (w *World) Loopback() {
	w.Echo = func(t *testing.T, _ string) int {
		l, err := net.Listen("tcp4", "127.0.0.1:0")
		must(t, "listen", err)
		t.Cleanup(func() { l.Close() })
		go func() {
			for {
				c, err := l.Accept()
				if err != nil {
					return
				}
				go func() {
					defer c.Close()
					if _, err := io.Copy(c, c); err == nil {
						_ = c.(*net.TCPConn).CloseWrite()
					}
				}()
			}
		}()
		return l.Addr().(*net.TCPAddr).Port
	}
	at := func(port int) string { return net.JoinHostPort(wire.CallbackAddr, strconv.Itoa(port)) }
	w.Free = func(t *testing.T) int {
		l, err := net.Listen("tcp4", at(0))
		must(t, "listen", err)
		defer l.Close()
		return l.Addr().(*net.TCPAddr).Port
	}
	w.Call = func(t *testing.T, _ string, port int) net.Conn {
		c, err := net.Dial("tcp4", at(port))
		must(t, "call", err)
		return c
	}
	w.Occupy = func(t *testing.T, _ string, port int) func() {
		l, err := net.Listen("tcp4", at(port))
		must(t, "occupy", err)
		return func() { l.Close() }
	}
}
