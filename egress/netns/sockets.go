package netns

import (
	"context"
	"fmt"
	"net"
	"net/netip"
	"os"
	"syscall"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"
)

// Device opens the sandbox's end: a packet socket that a kernel reads frames
// from and writes frames to. Its GSO says how large a segment may be.
func (n *Namespace) Device() (f *os.File, gso uint32, err error) {
	err = n.Do(func() error {
		link, err := netlink.LinkByName(inner)
		if err != nil {
			return err
		}
		// Protocol 0 until it is bound: a socket for every protocol sees every
		// device first.
		fd, err := unix.Socket(unix.AF_PACKET, unix.SOCK_RAW|unix.SOCK_CLOEXEC|unix.SOCK_NONBLOCK, 0)
		if err != nil {
			return err
		}
		f = os.NewFile(uintptr(fd), "device")
		gso = link.Attrs().GSOMaxSize
		set := func(opt, value int) {
			if err == nil {
				err = unix.SetsockoptInt(fd, unix.SOL_PACKET, opt, value)
			}
		}
		set(unix.PACKET_VNET_HDR, 1)
		set(unix.PACKET_IGNORE_OUTGOING, 1)
		// 4 MiB, as runsc takes: with less, bursts are lost.
		for _, opt := range []int{unix.SO_RCVBUFFORCE, unix.SO_SNDBUFFORCE} {
			if err == nil {
				err = unix.SetsockoptInt(fd, unix.SOL_SOCKET, opt, 4<<20)
			}
		}
		if err == nil {
			err = unix.Bind(fd, &unix.SockaddrLinklayer{Protocol: 0x0300 /* htons(ETH_P_ALL) */, Ifindex: link.Attrs().Index})
		}
		if err != nil {
			f.Close()
			f = nil
			return fmt.Errorf("packet socket: %w", err)
		}
		return nil
	})
	return f, gso, err
}

// Listen opens the sockets that everything the sandbox sends is handed to.
// LocalAddr of an accepted connection is what the sandbox meant to reach.
func (n *Namespace) Listen(ctx context.Context) (tcp *net.TCPListener, udp *net.UDPConn, err error) {
	lc := net.ListenConfig{Control: transparent}
	lc.SetMultipathTCP(false)
	err = n.Do(func() error {
		l, err := lc.Listen(ctx, "tcp", fmt.Sprintf("[::]:%d", port))
		if err != nil {
			return err
		}
		p, err := lc.ListenPacket(ctx, "udp", fmt.Sprintf("[::]:%d", port))
		if err != nil {
			l.Close()
			return err
		}
		tcp, udp = l.(*net.TCPListener), p.(*net.UDPConn)
		return nil
	})
	return tcp, udp, err
}

// Reply opens a socket that sends to a sandbox as if it were what that sent to.
func (n *Namespace) Reply(ctx context.Context, from, to netip.AddrPort) (conn *net.UDPConn, err error) {
	d := net.Dialer{LocalAddr: net.UDPAddrFromAddrPort(from), Control: transparent}
	err = n.Do(func() error {
		c, err := d.DialContext(ctx, "udp", to.String())
		if err != nil {
			return err
		}
		conn = c.(*net.UDPConn)
		return nil
	})
	return conn, err
}

// transparent lets a socket have addresses that are not the machine's, and has
// the destination of each datagram come along.
func transparent(network, _ string, c syscall.RawConn) error {
	var err error
	set := func(fd, level, opt int) {
		if err == nil {
			err = unix.SetsockoptInt(fd, level, opt, 1)
		}
	}
	cerr := c.Control(func(s uintptr) {
		fd := int(s)
		set(fd, unix.SOL_SOCKET, unix.SO_REUSEADDR)
		set(fd, unix.SOL_IP, unix.IP_TRANSPARENT)
		if network == "tcp6" || network == "udp6" {
			set(fd, unix.SOL_IPV6, unix.IPV6_TRANSPARENT)
		}
		if network == "udp4" || network == "udp6" {
			set(fd, unix.SOL_IP, unix.IP_RECVORIGDSTADDR)
		}
		if network == "udp6" {
			set(fd, unix.SOL_IPV6, unix.IPV6_RECVORIGDSTADDR)
		}
	})
	if cerr != nil {
		return cerr
	}
	return err
}
