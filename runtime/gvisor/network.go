package gvisor

import (
	"context"
	"net"
	"net/netip"
	"os"

	"gvisor.dev/gvisor/pkg/control/client"
	"gvisor.dev/gvisor/pkg/urpc"
	"gvisor.dev/gvisor/runsc/boot"
	"gvisor.dev/gvisor/runsc/config"

	"github.com/cove-sandbox/cove/runtime"
	"github.com/cove-sandbox/cove/sandbox"
)

// device is the name of the network device inside.
const device = "eth0"

// createLinks is the call by which runsc once configured networks, and with
// XDP still does. It works on a kernel that runs: a warm kernel is booted with
// its loopback alone and given a device with its sandbox, which takes 2 ms
// instead of a second pool or a namespace for every idle kernel.
const createLinks = "Network.CreateLinksAndRoutes"

// Plug gives the kernel its network device. See runtime.Plugger.
func (k *Kernel) Plug(ctx context.Context, d runtime.Device) error {
	const op = "gvisor.plug"
	k.mu.Lock()
	defer k.mu.Unlock()
	if k.mu.paused {
		return k.errPaused(op)
	}
	if err := k.plugLocked(d); err != nil {
		return k.explain(op, err)
	}
	return nil
}

func (k *Kernel) plugLocked(d runtime.Device) error {
	if k.mu.plugged {
		return sandbox.Errorf(sandbox.Precondition, "", "kernel %s has a network device", k.id)
	}
	conn, err := client.ConnectTo(k.saved.Socket)
	if err != nil {
		return err
	}
	defer conn.Close()
	if err := conn.Call(createLinks, linksOf(&d, false), nil); err != nil {
		return err
	}
	k.mu.plugged = true
	return nil
}

// linksOf is a device as the sentry is told of it. d may be nil. With loopback,
// that is made too.
//
// The call replaces the routes. Those of the loopback that is there already
// cannot be named, but netstack needs none for an address of its own.
func linksOf(d *runtime.Device, loopback bool) *boot.CreateLinksAndRoutesArgs {
	args := &boot.CreateLinksAndRoutesArgs{IsRestore: loopback}
	if loopback {
		args.LoopbackLinks = []boot.LoopbackLink{boot.DefaultLoopbackLink}
	}
	if d == nil {
		return args
	}
	link := boot.FDBasedLink{
		Name: device, MTU: d.MTU, LinkAddress: d.MAC, GSOMaxSize: d.GSO,
		RXChecksumOffload: true, // the other end is memory of the same machine, and leaves them out
		QDisc:             config.QDiscFIFO, NumChannels: 1,
		// The sentry's filter forbids what it would ask of the socket.
		PreConfigured: true, IsPacket: []bool{true},
	}
	for _, a := range d.Addresses {
		link.Addresses = append(link.Addresses, boot.IPWithPrefix{Address: a.Addr().AsSlice(), PrefixLen: a.Bits()})
		link.Routes = append(link.Routes, boot.Route{Destination: ipNet(a.Masked())})
	}
	for _, g := range d.Gateways {
		link.Neighbors = append(link.Neighbors, boot.Neighbor{IP: g.AsSlice(), HardwareAddr: d.GateMAC})
		all := netip.PrefixFrom(netip.IPv6Unspecified(), 0)
		to := &args.Defaultv6Gateway
		if g.Is4() {
			all, to = netip.PrefixFrom(netip.IPv4Unspecified(), 0), &args.Defaultv4Gateway
		}
		*to = boot.DefaultRoute{Name: device, Route: boot.Route{Destination: ipNet(all), Gateway: g.AsSlice()}}
	}
	args.FDBasedLinks = []boot.FDBasedLink{link}
	args.FilePayload = urpc.FilePayload{Files: []*os.File{d.File}}
	return args
}

func ipNet(p netip.Prefix) net.IPNet {
	return net.IPNet{IP: p.Addr().AsSlice(), Mask: net.CIDRMask(p.Bits(), p.Addr().BitLen())}
}
