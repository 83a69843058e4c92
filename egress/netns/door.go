package netns

import (
	"encoding/binary"
	"errors"
	"fmt"
	"net/netip"
	"os"
	"unsafe"

	"github.com/vishvananda/netlink"
	"golang.org/x/net/bpf"
	"golang.org/x/sys/unix"
)

// A listener answers a SYN before anybody can decide about it: every connect
// inside would succeed, whatever is behind it. So the namespace drops the SYNs
// that a sandbox sends, a packet socket shows them to us, and when it is known
// what becomes of the connection the SYN is either put on the way again, from a
// raw socket and marked, and the kernel's TCP takes it from there; or it is
// answered in place of the host it was for.
//
// NFQUEUE does the same in principle. It is not built into every kernel (nft's
// part of it often is not), and its queues would be one more thing to bound.

// Door is where connections of a sandbox wait.
type Door struct {
	tap        *os.File
	raw4, raw6 *os.File
}

// Syn is the beginning of a connection.
type Syn struct {
	From, To netip.AddrPort
	segment  []byte // the header of TCP with its options
}

// Refusal is how a connection is answered that does not come about.
type Refusal int

const (
	Reset              Refusal = iota // ECONNREFUSED inside
	NetworkUnreachable                // ENETUNREACH
	HostUnreachable                   // EHOSTUNREACH
)

const (
	tcpHeader = 20
	flagSYN   = 0x02
	flagRST   = 0x04
	flagACK   = 0x10
)

// onlySyns lets packets pass that begin a connection. Fragments and extension
// headers do not: the table drops such SYNs all the same.
var onlySyns = []bpf.Instruction{
	bpf.LoadAbsolute{Off: 0, Size: 1},
	bpf.ALUOpConstant{Op: bpf.ALUOpShiftRight, Val: 4},
	bpf.JumpIf{Cond: bpf.JumpEqual, Val: 6, SkipTrue: 7}, // to IPv6
	bpf.LoadAbsolute{Off: 9, Size: 1},
	bpf.JumpIf{Cond: bpf.JumpNotEqual, Val: unix.IPPROTO_TCP, SkipTrue: 11},
	bpf.LoadAbsolute{Off: 6, Size: 2},
	bpf.JumpIf{Cond: bpf.JumpBitsSet, Val: 0x3fff, SkipTrue: 9}, // a fragment
	bpf.LoadMemShift{Off: 0},
	bpf.LoadIndirect{Off: 13, Size: 1},
	bpf.Jump{Skip: 3},
	bpf.LoadAbsolute{Off: 6, Size: 1}, // IPv6
	bpf.JumpIf{Cond: bpf.JumpNotEqual, Val: unix.IPPROTO_TCP, SkipTrue: 4},
	bpf.LoadAbsolute{Off: 40 + 13, Size: 1},
	bpf.ALUOpConstant{Op: bpf.ALUOpAnd, Val: flagSYN | flagACK},
	bpf.JumpIf{Cond: bpf.JumpNotEqual, Val: flagSYN, SkipTrue: 1},
	bpf.RetConstant{Val: maxSyn},
	bpf.RetConstant{Val: 0},
}

const maxSyn = 1500

// openDoor runs in the namespace.
func openDoor() (d *Door, err error) {
	d = &Door{}
	defer func() {
		if err != nil {
			d.Close()
			d = nil
		}
	}()
	link, err := netlink.LinkByName(gate)
	if err != nil {
		return d, err
	}
	filter, err := bpf.Assemble(onlySyns)
	if err != nil {
		return d, err
	}
	prog := unix.SockFprog{Len: uint16(len(filter)), Filter: (*unix.SockFilter)(unsafe.Pointer(&filter[0]))}
	// Of no protocol until its filter is in place: the rest would be queued.
	d.tap, err = socket("syns", unix.AF_PACKET, unix.SOCK_DGRAM, 0, func(fd int) error {
		return errors.Join(
			unix.SetsockoptInt(fd, unix.SOL_PACKET, unix.PACKET_IGNORE_OUTGOING, 1),
			unix.SetsockoptSockFprog(fd, unix.SOL_SOCKET, unix.SO_ATTACH_FILTER, &prog),
			unix.Bind(fd, &unix.SockaddrLinklayer{Protocol: 0x0300 /* htons(ETH_P_ALL) */, Ifindex: link.Attrs().Index}))
	})
	if err != nil {
		return d, fmt.Errorf("packet socket: %w", err)
	}
	none := func(int) error { return nil }
	if d.raw4, err = socket("raw", unix.AF_INET, unix.SOCK_RAW, unix.IPPROTO_RAW, none); err != nil {
		return d, fmt.Errorf("raw socket: %w", err)
	}
	if d.raw6, err = socket("raw6", unix.AF_INET6, unix.SOCK_RAW, unix.IPPROTO_RAW, none); err != nil {
		return d, fmt.Errorf("raw socket: %w", err)
	}
	return d, nil
}

func socket(name string, family, kind, protocol int, set func(fd int) error) (*os.File, error) {
	fd, err := unix.Socket(family, kind|unix.SOCK_CLOEXEC|unix.SOCK_NONBLOCK, protocol)
	if err != nil {
		return nil, err
	}
	if err := set(fd); err != nil {
		unix.Close(fd)
		return nil, err
	}
	return os.NewFile(uintptr(fd), name), nil
}

// Close ends Next. Connections that wait are not answered any more.
func (d *Door) Close() error {
	var errs []error
	for _, f := range []*os.File{d.tap, d.raw4, d.raw6} {
		if f != nil {
			errs = append(errs, f.Close())
		}
	}
	return errors.Join(errs...)
}

// Next waits for a connection of the sandbox; os.ErrClosed after Close.
func (d *Door) Next() (Syn, error) {
	buf := make([]byte, maxSyn)
	for {
		n, err := d.tap.Read(buf)
		if err != nil {
			return Syn{}, err
		}
		if s, ok := parseSyn(buf[:n]); ok {
			return s, nil
		}
	}
}

func parseSyn(b []byte) (s Syn, ok bool) {
	var from, to netip.Addr
	var tcp []byte
	switch {
	case len(b) >= 20 && b[0]>>4 == 4:
		if n := int(b[0]&0xf) * 4; n >= 20 && n <= len(b) {
			tcp = b[n:]
		}
		from, to = netip.AddrFrom4([4]byte(b[12:16])), netip.AddrFrom4([4]byte(b[16:20]))
	case len(b) >= 40 && b[0]>>4 == 6:
		tcp = b[40:]
		from, to = netip.AddrFrom16([16]byte(b[8:24])), netip.AddrFrom16([16]byte(b[24:40]))
	}
	if len(tcp) < tcpHeader || from != Inner4.Addr() && from != Inner6.Addr() || to.Is4In6() {
		return s, false
	}
	n := int(tcp[12]>>4) * 4
	if n < tcpHeader || n > len(tcp) || tcp[13]&(flagSYN|flagACK) != flagSYN {
		return s, false
	}
	// Data in a SYN is left out: the client sends it again.
	return Syn{From: netip.AddrPortFrom(from, binary.BigEndian.Uint16(tcp)), To: netip.AddrPortFrom(to, binary.BigEndian.Uint16(tcp[2:])),
		segment: append([]byte(nil), tcp[:n]...)}, true
}

// Admit lets a connection come about: the listener accepts it.
func (d *Door) Admit(s Syn) error {
	// The mark makes it local, by the rule that TPROXY needs as well.
	oob := make([]byte, unix.CmsgSpace(4))
	h := (*unix.Cmsghdr)(unsafe.Pointer(&oob[0]))
	h.Level, h.Type = unix.SOL_SOCKET, unix.SO_MARK
	h.SetLen(unix.CmsgLen(4))
	binary.NativeEndian.PutUint32(oob[unix.CmsgLen(0):], mark)
	return d.send(packet(s.From.Addr(), s.To.Addr(), unix.IPPROTO_TCP, s.segment), s.To.Addr(), oob)
}

// Refuse answers that a connection does not come about.
func (d *Door) Refuse(s Syn, how Refusal) error {
	if how == Reset {
		tcp := make([]byte, tcpHeader)
		binary.BigEndian.PutUint16(tcp, s.To.Port())
		binary.BigEndian.PutUint16(tcp[2:], s.From.Port())
		binary.BigEndian.PutUint32(tcp[8:], binary.BigEndian.Uint32(s.segment[4:])+1)
		tcp[12], tcp[13] = tcpHeader/4<<4, flagRST|flagACK
		return d.send(packet(s.To.Addr(), s.From.Addr(), unix.IPPROTO_TCP, tcp), s.From.Addr(), nil)
	}
	// As the gateway would say it, with the packet that it is about.
	about := packet(s.From.Addr(), s.To.Addr(), unix.IPPROTO_TCP, s.segment)
	from, protocol, head := Gateway4.Addr(), byte(unix.IPPROTO_ICMP), []byte{3, 1} // destination unreachable: host
	if how == NetworkUnreachable {
		head[1] = 0
	}
	if s.From.Addr().Is6() {
		from, protocol, head = Gateway6.Addr(), unix.IPPROTO_ICMPV6, []byte{1, 3} // address unreachable
		if how == NetworkUnreachable {
			head[1] = 0 // no route
		}
	}
	return d.send(packet(from, s.From.Addr(), protocol, append(append(head, make([]byte, 6)...), about...)), s.From.Addr(), nil)
}

func (d *Door) send(p []byte, to netip.Addr, oob []byte) error {
	f, sa := d.raw4, unix.Sockaddr(&unix.SockaddrInet6{Addr: to.As16()})
	if to.Is4() {
		sa = &unix.SockaddrInet4{Addr: to.As4()}
	} else {
		f = d.raw6
	}
	c, err := f.SyscallConn()
	if err != nil {
		return err
	}
	var serr error
	err = c.Write(func(fd uintptr) bool {
		serr = unix.Sendmsg(int(fd), p, oob, sa, 0)
		return serr != unix.EAGAIN
	})
	return errors.Join(err, serr)
}

// packet puts a header of IP in front of a payload, with the checksums of both.
// That of a SYN as it was sent may be one that a device was to fill in.
func packet(from, to netip.Addr, protocol byte, payload []byte) []byte {
	payload = append([]byte(nil), payload...)
	var head, pseudo []byte
	length := binary.BigEndian.AppendUint16(nil, uint16(len(payload)))
	if from.Is4() {
		head = append([]byte{0x45, 0}, binary.BigEndian.AppendUint16(nil, uint16(20+len(payload)))...)
		head = append(head, 0, 0, 0x40, 0, 64, protocol, 0, 0)
		pseudo = []byte{0, protocol}
	} else {
		head = append([]byte{0x60, 0, 0, 0}, length...)
		head = append(head, protocol, 64)
		pseudo = []byte{0, protocol}
	}
	addrs := append(from.AsSlice(), to.AsSlice()...)
	head = append(head, addrs...)
	if from.Is4() {
		binary.BigEndian.PutUint16(head[10:], checksum(head))
	}
	pseudo = append(append(pseudo, length...), addrs...)
	at := 16 // of TCP
	switch protocol {
	case unix.IPPROTO_ICMP:
		at, pseudo = 2, nil
	case unix.IPPROTO_ICMPV6:
		at = 2
	}
	payload[at], payload[at+1] = 0, 0
	binary.BigEndian.PutUint16(payload[at:], checksum(pseudo, payload))
	return append(head, payload...)
}

// checksum of the internet, over parts of which all but the last are of even length.
func checksum(parts ...[]byte) uint16 {
	var sum uint32
	for _, p := range parts {
		for ; len(p) > 1; p = p[2:] {
			sum += uint32(p[0])<<8 | uint32(p[1])
		}
		if len(p) == 1 {
			sum += uint32(p[0]) << 8
		}
	}
	for sum > 0xffff {
		sum = sum>>16 + sum&0xffff
	}
	return ^uint16(sum)
}
