// Package netns makes the network namespaces that sandboxes send into. A
// namespace has no way out: no uplink, no forwarding, nothing but a veth pair
// and lo. What the sandbox sends, to whatever address, is handed by TPROXY to
// two sockets of ours in the namespace (one TCP, one UDP), and what those do not
// take goes nowhere. So:
//
//   - the host's own tables, routes, devices and conntrack are not touched;
//   - a connection of TCP waits at the [Door] until it is decided;
//   - when our process dies the sockets go with it and nothing leaves any more;
//     the next process opens them again;
//   - removing the namespace removes everything.
//
// A namespace per sandbox behind NAT with a table of nftables rules per policy
// was the other way. It needs host routes, forwarding and conntrack, rules that
// must be swept, and domains still need a proxy; and rules in the kernel would
// let packets of a sandbox pass while nobody watches.
//
// Every sandbox has the same addresses: who sent a packet is told by the
// namespace. A sandbox restored elsewhere keeps its address.
package netns

import (
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"runtime"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"
)

// Addresses of every namespace. The sandbox has .2 and ::2; .1 and ::1 are its
// gateway and its resolver.
var (
	Inner4   = netip.MustParsePrefix("10.200.0.2/30")
	Gateway4 = netip.MustParsePrefix("10.200.0.1/30")
	Inner6   = netip.MustParsePrefix("fd00:c0e:200::2/126")
	Gateway6 = netip.MustParsePrefix("fd00:c0e:200::1/126")
	InnerMAC = net.HardwareAddr{0x02, 0xc0, 0x0e, 0, 0, 2}
	GateMAC  = net.HardwareAddr{0x02, 0xc0, 0x0e, 0, 0, 1}
)

const (
	inner = "inner" // packet sockets of the sandbox's kernel are bound here; no address, no IP
	gate  = "gate"  // the other end, where the addresses .1 and ::1 are
	// MTU is that of a usual path; larger segments cross the pair by GSO.
	MTU  = 1500
	mark = 0xc0e
	// port of the sockets that everything is handed to. Of no meaning outside.
	port  = 1
	table = 100
)

// Namespace is one network namespace, named by a file it is mounted on.
type Namespace struct {
	path string
	ns   *os.File
}

// Make makes a namespace, ready to be used, mounted on dir/name. On error
// nothing is left.
func Make(dir, name string) (_ *Namespace, err error) {
	path := filepath.Join(dir, name)
	f, err := os.OpenFile(path, os.O_CREATE|os.O_EXCL|os.O_RDONLY, 0o400)
	if err != nil {
		return nil, err
	}
	f.Close()
	defer func() {
		if err != nil {
			err = errors.Join(fmt.Errorf("network namespace %s: %w", name, err), Remove(path))
		}
	}()
	made := make(chan error)
	go func() {
		// Never unlocked: the thread ends with the goroutine instead of going
		// back to others in the wrong namespace.
		runtime.LockOSThread()
		if err := unix.Unshare(unix.CLONE_NEWNET); err != nil {
			made <- fmt.Errorf("unshare: %w", err)
			return
		}
		if err := unix.Mount("/proc/thread-self/ns/net", path, "", unix.MS_BIND, ""); err != nil {
			made <- fmt.Errorf("mount: %w", err)
			return
		}
		made <- setUp()
	}()
	if err := <-made; err != nil {
		return nil, err
	}
	return Open(path)
}

// Open finds a namespace that an earlier process made.
func Open(path string) (*Namespace, error) {
	f, err := os.Open(path)
	if err != nil {
		return nil, err
	}
	var st unix.Statfs_t
	if err := unix.Fstatfs(int(f.Fd()), &st); err != nil || st.Type != unix.NSFS_MAGIC {
		f.Close()
		return nil, fmt.Errorf("%s is not a namespace (%v)", path, err)
	}
	return &Namespace{path: path, ns: f}, nil
}

// Refresh loads the table of this version into a namespace that another may
// have made. What is open goes on.
func (n *Namespace) Refresh() error { return n.Do(filter) }

// Path of the file the namespace is mounted on.
func (n *Namespace) Path() string { return n.path }

// Rename mounts the namespace on another file of the same directory as well,
// and returns what takes the old one away, which need not be waited for.
func (n *Namespace) Rename(name string) (old func() error, err error) {
	was, path := n.path, filepath.Join(filepath.Dir(n.path), name)
	f, err := os.OpenFile(path, os.O_CREATE|os.O_EXCL|os.O_RDONLY, 0o400)
	if err != nil {
		return nil, err
	}
	f.Close()
	if err := unix.Mount(was, path, "", unix.MS_BIND, ""); err != nil {
		return nil, errors.Join(fmt.Errorf("mounting %s: %w", path, err), os.Remove(path))
	}
	n.path = path
	return func() error { return Remove(was) }, nil
}

// Close lets go of the namespace, which lives on.
func (n *Namespace) Close() error { return n.ns.Close() }

// Remove removes a namespace by its file. Devices and sockets in it are gone
// when the last who holds it, the sandbox's kernel, is.
func Remove(path string) error {
	if err := unix.Unmount(path, unix.MNT_DETACH); err != nil && err != unix.EINVAL && err != unix.ENOENT {
		return fmt.Errorf("unmounting %s: %w", path, err)
	}
	if err := os.Remove(path); err != nil && !errors.Is(err, os.ErrNotExist) {
		return err
	}
	return nil
}

// Do runs f on a thread in the namespace.
func (n *Namespace) Do(f func() error) error {
	done := make(chan error)
	go func() {
		runtime.LockOSThread()
		if err := unix.Setns(int(n.ns.Fd()), unix.CLONE_NEWNET); err != nil {
			runtime.UnlockOSThread()
			done <- fmt.Errorf("entering %s: %w", n.path, err)
			return
		}
		done <- f() // and the thread ends here
	}()
	return <-done
}

// setUp runs in the namespace.
func setUp() error {
	sysctls, err := openSysctls()
	if err != nil {
		return err
	}
	defer sysctls.Close()
	// Before there is a device: each takes over what default says.
	for _, s := range []struct{ name, value string }{
		{"ipv4/ip_forward", "0"},
		{"ipv4/conf/all/rp_filter", "0"}, // what arrives is marked and local by table; rp_filter knows neither
		{"ipv4/conf/default/rp_filter", "0"},
		{"ipv4/conf/all/send_redirects", "0"},
		{"ipv4/icmp_echo_ignore_all", "1"},
		{"ipv6/conf/all/forwarding", "0"},
		{"ipv6/conf/default/accept_ra", "0"},
		{"ipv6/conf/default/accept_dad", "0"}, // an address is usable at once
		{"ipv6/conf/default/autoconf", "0"},
	} {
		if err := sysctl(sysctls, s.name, s.value); err != nil {
			return err
		}
	}
	lo, err := netlink.LinkByName("lo")
	if err != nil {
		return err
	}
	if err := netlink.LinkSetUp(lo); err != nil {
		return fmt.Errorf("lo: %w", err)
	}
	pair := &netlink.Veth{LinkAttrs: netlink.LinkAttrs{Name: gate, MTU: MTU, HardwareAddr: GateMAC, TxQLen: 1000},
		PeerName: inner, PeerHardwareAddr: InnerMAC, PeerTxQLen: 1000}
	if err := netlink.LinkAdd(pair); err != nil {
		return fmt.Errorf("veth: %w", err)
	}
	// The inner end is only for packet sockets: the kernel must not read along.
	if err := sysctl(sysctls, "ipv6/conf/"+inner+"/disable_ipv6", "1"); err != nil {
		return err
	}
	peer, err := netlink.LinkByName(inner)
	if err != nil {
		return err
	}
	if err := netlink.LinkSetARPOff(peer); err != nil {
		return err
	}
	if err := netlink.LinkSetMTU(peer, MTU); err != nil {
		return err
	}
	host, err := netlink.LinkByName(gate)
	if err != nil {
		return err
	}
	if err := filter(); err != nil { // before the pair is up
		return fmt.Errorf("nftables: %w", err)
	}
	for _, l := range []netlink.Link{peer, host} {
		if err := netlink.LinkSetUp(l); err != nil {
			return fmt.Errorf("%s: %w", l.Attrs().Name, err)
		}
	}
	for _, a := range []struct {
		own, inner netip.Prefix
		family     int
		all        string
	}{{Gateway4, Inner4, unix.AF_INET, "0.0.0.0/0"}, {Gateway6, Inner6, unix.AF_INET6, "::/0"}} {
		if err := netlink.AddrAdd(host, &netlink.Addr{IPNet: ipNet(a.own), Flags: unix.IFA_F_NODAD}); err != nil {
			return fmt.Errorf("address %s: %w", a.own, err)
		}
		if err := netlink.NeighSet(&netlink.Neigh{LinkIndex: host.Attrs().Index, Family: a.family, State: netlink.NUD_PERMANENT,
			IP: a.inner.Addr().AsSlice(), HardwareAddr: InnerMAC}); err != nil {
			return fmt.Errorf("neighbour %s: %w", a.inner, err)
		}
		// What TPROXY marked is local, whatever its address.
		rule := netlink.NewRule()
		rule.Family, rule.Mark, rule.Table = a.family, mark, table
		if err := netlink.RuleAdd(rule); err != nil {
			return fmt.Errorf("rule: %w", err)
		}
		_, all, _ := net.ParseCIDR(a.all)
		if err := netlink.RouteAdd(&netlink.Route{LinkIndex: lo.Attrs().Index, Family: a.family, Dst: all, Table: table, Type: unix.RTN_LOCAL, Scope: unix.RT_SCOPE_HOST}); err != nil {
			return fmt.Errorf("route: %w", err)
		}
	}
	return nil
}

func ipNet(p netip.Prefix) *net.IPNet {
	return &net.IPNet{IP: p.Addr().AsSlice(), Mask: net.CIDRMask(p.Bits(), p.Addr().BitLen())}
}

// openSysctls is /proc/sys/net in a /proc of its own, which goes with the file. In one that
// all share, each namespace has an entry "net" in the same directory: the kernel finds the
// one that is meant by looking through those of all networks, for each name.
func openSysctls() (*os.File, error) {
	if fs, err := unix.Fsopen("proc", unix.FSOPEN_CLOEXEC); err == nil {
		defer unix.Close(fs)
		if unix.FsconfigCreate(fs) == nil {
			if mount, err := unix.Fsmount(fs, unix.FSMOUNT_CLOEXEC, unix.MOUNT_ATTR_NOSUID|unix.MOUNT_ATTR_NODEV|unix.MOUNT_ATTR_NOEXEC); err == nil {
				defer unix.Close(mount)
				if fd, err := unix.Openat(mount, "sys/net", unix.O_PATH|unix.O_DIRECTORY|unix.O_CLOEXEC, 0); err == nil {
					return os.NewFile(uintptr(fd), "/proc/sys/net"), nil
				}
			}
		}
	}
	return os.Open("/proc/sys/net") // an old kernel, or one that lets nobody mount
}

// sysctl of the namespace of the thread.
func sysctl(dir *os.File, name, value string) error {
	fd, err := unix.Openat(int(dir.Fd()), name, unix.O_WRONLY|unix.O_CLOEXEC, 0)
	if err == nil {
		_, err = unix.Write(fd, []byte(value))
		unix.Close(fd)
	}
	if err != nil {
		return fmt.Errorf("sysctl %s: %w", name, err)
	}
	return nil
}
