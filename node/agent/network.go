package agent

import (
	"context"
	"net/netip"

	"github.com/cove-sandbox/cove/egress"
	"github.com/cove-sandbox/cove/egress/netns"
	"github.com/cove-sandbox/cove/egress/policy"
	"github.com/cove-sandbox/cove/egress/proxy"
	"github.com/cove-sandbox/cove/runtime"
	"github.com/cove-sandbox/cove/sandbox"
)

// A network belongs to a kernel: it is made right before the kernel is given
// its container, or goes on from a checkpoint, and removed after the kernel is
// gone. A sandbox that changes its kernel gets a new one with the same addresses
// and the policy of the sandbox.

// networked says whether a sandbox has a device. One that replays has, and
// nothing leaves by it.
func networked(s sandbox.Network) bool {
	return s.Mode != "" && s.Mode != sandbox.NetworkNone || s.Replay != nil
}

func resolvers(s sandbox.Network) []netip.Addr {
	if !networked(s) {
		return nil
	}
	return egress.Resolver
}

// connected calls f with b's container and, if b has a network, its device for
// a kernel. Without the network that the policy asks for, f is not called.
func (n *Node) connected(ctx context.Context, b *box, kernel string, f func(runtime.Container) error) error {
	n.mu.Lock()
	c, sb := b.container, b.sb
	n.mu.Unlock()
	if !networked(sb.Spec.Network) {
		return f(c)
	}
	p, err := n.policyOf(b)
	if err != nil {
		return err
	}
	d, err := n.device(ctx, b.class, kernel, sb, p)
	if err != nil {
		return err
	}
	defer d.File.Close()
	c.Device = d
	return f(c)
}

// policyOf is what the network of b is compiled to: by whoever set it, or here for
// one that was taken back at a start.
func (n *Node) policyOf(b *box) (*policy.Policy, error) {
	n.mu.Lock()
	defer n.mu.Unlock()
	var err error
	if b.policy == nil {
		b.policy, err = policy.Compile(b.sb.Spec.Network)
	}
	return b.policy, err
}

// device makes the network of a sandbox's kernel.
func (n *Node) device(ctx context.Context, class *kernelClass, kernel string, sb sandbox.Sandbox, p *policy.Policy) (*runtime.Device, error) {
	if n.cfg.Networks == nil || !class.can.Network {
		return nil, sandbox.Errorf(sandbox.Unsupported, "node.network", "this node has no networks for sandboxes").WithHint("create it with network none")
	}
	i, err := n.interception(sb)
	if err != nil {
		return nil, err
	}
	d, err := n.cfg.Networks.Take(ctx, kernel, p, sb.NetworkGeneration, i)
	if err != nil {
		return nil, err
	}
	return &runtime.Device{File: d.File, GSO: d.GSO, MTU: netns.MTU, MAC: netns.InnerMAC, GateMAC: netns.GateMAC,
		Addresses: []netip.Prefix{netns.Inner4, netns.Inner6}, Gateways: []netip.Addr{netns.Gateway4.Addr(), netns.Gateway6.Addr()}}, nil
}

// adoptNetwork serves the network of a kernel that was taken back. Where that
// fails the sandbox goes on without: nothing leaves it.
func (n *Node) adoptNetwork(ctx context.Context, b *box, kernel string) {
	if n.cfg.Networks == nil {
		return
	}
	spec := b.sb.Spec.Network
	if spec.Mode == "" { // of a journal older than networks
		spec.Mode = sandbox.NetworkNone
	}
	p, err := policy.Compile(spec)
	if err == nil {
		var i *proxy.Interception
		if i, err = n.interception(b.sb); err == nil {
			err = n.cfg.Networks.Adopt(ctx, kernel, p, b.sb.NetworkGeneration, i)
		}
	}
	if err != nil && (networked(b.sb.Spec.Network) || sandbox.ClassOf(err) != sandbox.NotFound) {
		n.log.Error("an adopted sandbox is without its network", "sandbox", b.id, "err", err)
	}
}

// SetNetwork puts another policy in force, and returns its generation when it
// is: nothing that it denies is open any more. A sandbox that had no network is
// given one. One that is asleep is not woken.
func (n *Node) SetNetwork(ctx context.Context, id string, spec sandbox.Network) (generation int64, err error) {
	const op = "node.set_network"
	if err := n.call(); err != nil {
		return 0, err
	}
	defer n.calls.Done()
	p, err := policy.Compile(spec)
	if err != nil {
		return 0, sandbox.WithOp(op, err)
	}
	b, err := n.find(ctx, id)
	if err != nil {
		return 0, err
	}
	giveBack, err := n.own(ctx, b)
	if err != nil {
		return 0, err
	}
	defer giveBack()
	n.mu.Lock()
	sb, k, was, generation := b.sb, b.kernel, b.sb.Spec.Network, b.sb.NetworkGeneration+1
	n.mu.Unlock()
	sb.Spec.Network, sb.NetworkGeneration = spec, generation
	done, err := n.changeRecording(ctx, sb, was)
	if err != nil {
		return 0, sandbox.WithOp(op, err)
	}
	defer func() { done(err == nil) }()
	if err := n.lookInside(ctx, b, sb, k, was); err != nil {
		return 0, sandbox.WithOp(op, err)
	}
	record := func(s sandbox.Network) error {
		return n.journal.append(record{Kind: recNetwork, ID: id, Network: &s, Nth: generation})
	}
	if err := record(spec); err != nil {
		return 0, sandbox.WithOp(op, err)
	}
	// From here on it is what a restart would enforce; so is now.
	if err := n.enforce(ctx, b, sb, k, p); err != nil {
		if rerr := record(was); rerr != nil {
			n.log.Error("a policy that was not put in force is in the journal", "sandbox", id, "err", rerr)
		}
		return 0, sandbox.WithOp(op, err)
	}
	n.mu.Lock()
	defer n.mu.Unlock()
	b.sb.Spec.Network, b.sb.NetworkGeneration, b.policy = spec, generation, p
	b.sb.Spec = b.sb.Spec.WithAuthority(id)
	b.container.Resolvers = resolvers(spec)
	n.setEnvLocked(b)
	return generation, nil
}

// enforce makes a policy, of sb as it is to be, that of a kernel; nil = of none,
// the next gets it.
func (n *Node) enforce(ctx context.Context, b *box, sb sandbox.Sandbox, k runtime.Kernel, p *policy.Policy) error {
	if k == nil {
		return nil
	}
	if n.cfg.Networks != nil {
		if box := n.cfg.Networks.Box(k.ID()); box != nil {
			box.Set(p, sb.NetworkGeneration)
			return n.intercept(sb, k)
		}
	}
	if !networked(p.Spec()) {
		return nil
	}
	if err := n.thaw(b); err != nil {
		return err
	}
	plugger, ok := k.(runtime.Plugger)
	if !ok {
		return b.class.unsupported("give a running sandbox a network")
	}
	d, err := n.device(ctx, b.class, k.ID(), sb, p)
	if err != nil {
		return err
	}
	defer d.File.Close()
	if err = plugger.Plug(ctx, *d); err == nil {
		err = runtime.WriteResolvers(ctx, k.Guest(), egress.Resolver)
	}
	if err != nil {
		if rerr := n.cfg.Networks.Remove(k.ID()); rerr != nil {
			n.log.Error("a network that was not taken stays", "sandbox", b.id, "err", rerr)
		}
		return n.explain(b, k, err)
	}
	return nil
}

// traffic is the bytes that left a kernel and came to it.
func (n *Node) traffic(k runtime.Kernel) (sent, received int64) {
	if n.cfg.Networks == nil {
		return 0, 0
	}
	box := n.cfg.Networks.Box(k.ID())
	if box == nil {
		return 0, 0
	}
	s := box.Status(0)
	return s.Sent, s.Received
}

// NetworkStatus is the policy in force and the last flows, at most so many.
func (n *Node) NetworkStatus(ctx context.Context, id string, flows int) (sandbox.NetworkStatus, error) {
	b, err := n.find(ctx, id)
	if err != nil {
		return sandbox.NetworkStatus{}, err
	}
	n.mu.Lock()
	s := sandbox.NetworkStatus{Network: b.sb.Spec.Network, Generation: b.sb.NetworkGeneration}
	k := b.kernel
	n.mu.Unlock()
	if k != nil && n.cfg.Networks != nil {
		if box := n.cfg.Networks.Box(k.ID()); box != nil {
			s = box.Status(flows)
		}
	}
	n.recordings.get(id).status(&s)
	return s, nil
}
