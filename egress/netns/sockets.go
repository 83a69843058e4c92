package netns

import (
	"context"
	"errors"
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

// Sockets are what everything the sandbox sends is handed to.
type Sockets struct {
	TCP  *net.TCPListener // LocalAddr of an accepted connection is what the sandbox meant to reach
	UDP  *net.UDPConn     // control messages tell where a datagram was meant for
	Door *Door            // where TCP connections wait until they are admitted
	DNS  *net.UDPConn     // for SendAs from port 53: a socket for each answer would be one that floods can make us open
}

// Close closes all of them.
func (s *Sockets) Close() error {
	return errors.Join(s.Door.Close(), s.TCP.Close(), s.UDP.Close(), s.DNS.Close())
}

// SendAs sends a datagram from a socket as if it were that of another address,
// with its port.
func SendAs(c *net.UDPConn, from netip.Addr, to netip.AddrPort, data []byte) error {
	info := unix.Inet6Pktinfo{Addr: from.As16()} // IPv4 as mapped, which the kernel takes on such a socket
	to = netip.AddrPortFrom(netip.AddrFrom16(to.Addr().As16()), to.Port())
	_, _, err := c.WriteMsgUDPAddrPort(data, unix.PktInfo6(&info), to)
	return err
}

// Listen opens the sockets of a namespace.
func (n *Namespace) Listen(ctx context.Context) (s *Sockets, err error) {
	lc := net.ListenConfig{Control: transparent}
	lc.SetMultipathTCP(false)
	err = n.Do(func() error {
		var opened []interface{ Close() error }
		fail := func(err error) error {
			for _, c := range opened {
				c.Close()
			}
			return err
		}
		l, err := lc.Listen(ctx, "tcp", fmt.Sprintf("[::]:%d", port))
		if err != nil {
			return err
		}
		opened = append(opened, l)
		p, err := lc.ListenPacket(ctx, "udp", fmt.Sprintf("[::]:%d", port))
		if err != nil {
			return fail(err)
		}
		opened = append(opened, p)
		d, err := lc.ListenPacket(ctx, "udp", "[::]:53")
		if err != nil {
			return fail(err)
		}
		opened = append(opened, d)
		door, err := openDoor()
		if err != nil {
			return fail(err)
		}
		s = &Sockets{TCP: l.(*net.TCPListener), UDP: p.(*net.UDPConn), DNS: d.(*net.UDPConn), Door: door}
		return nil
	})
	return s, err
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
