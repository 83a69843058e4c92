// Package egress gives sandboxes their networks. [Networks] has namespaces ready
// ahead of demand, serves those in use by a proxy each, finds them again after a
// restart and removes what nobody knows. What may pass is package policy's to
// say, and package proxy's to see to.
package egress

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"net/netip"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"time"

	"github.com/cove-sandbox/cove/egress/authority"
	"github.com/cove-sandbox/cove/egress/netns"
	"github.com/cove-sandbox/cove/egress/policy"
	"github.com/cove-sandbox/cove/egress/proxy"
	"github.com/cove-sandbox/cove/sandbox"
)

// Config is what networks are opened with.
type Config struct {
	Dir      string // where namespaces are mounted; made if missing
	Upstream *proxy.Upstream
	// Authorities of sandboxes whose TLS is looked into; nil: none can be.
	Authorities *authority.Master
	// Spare namespaces ready for creates to come; default 4, -1 = none. One is
	// made in 15 ms, most of it the kernel's waiting, and takes 150 KiB.
	Spare  int
	Logger *slog.Logger // nil = discard
}

// spareName marks namespaces that belong to nobody yet. No id has a dash.
const spareName = "spare-"

// Networks are the networks of a node's sandboxes, by the id of their kernel.
// Safe for concurrent use.
type Networks struct {
	cfg    Config
	log    *slog.Logger
	ctx    context.Context
	cancel context.CancelFunc
	tasks  sync.WaitGroup
	wake   chan struct{} // capacity 1

	mu struct {
		sync.Mutex
		closed bool
		made   int // names of spares
		spares []*slot
		boxes  map[string]*proxy.Box
		// authorities of late: to derive one takes 0.3 ms, and it has certificates
		// ready.
		authorities map[string]*authority.Authority
	}
}

const authoritiesKept = 4096

// slot is a namespace with its sockets.
type slot struct {
	ns     *netns.Namespace
	socks  *netns.Sockets
	device *os.File
	gso    uint32
}

// Device is the sandbox's end of a network.
type Device struct {
	File *os.File // a packet socket; the caller's to close
	GSO  uint32
}

// Resolver is where sandboxes find names.
var Resolver = []netip.Addr{netns.Gateway4.Addr()}

// Open begins to make spares.
func Open(cfg Config) (*Networks, error) {
	if cfg.Logger == nil {
		cfg.Logger = slog.New(slog.DiscardHandler)
	}
	if cfg.Spare == 0 {
		cfg.Spare = 4
	}
	if err := os.MkdirAll(cfg.Dir, 0o700); err != nil {
		return nil, sandbox.Errorf(sandbox.Unavailable, "egress.open", "%w", err)
	}
	n := &Networks{cfg: cfg, log: cfg.Logger, wake: make(chan struct{}, 1)}
	n.mu.boxes = map[string]*proxy.Box{}
	n.ctx, n.cancel = context.WithCancel(context.Background())
	// Spares of a process that died. Namespaces of sandboxes stay: Adopt or
	// Sweep sees to them.
	left, err := filepath.Glob(filepath.Join(cfg.Dir, spareName+"*"))
	for _, path := range left {
		err = errors.Join(err, netns.Remove(path))
	}
	if err != nil {
		return nil, sandbox.Errorf(sandbox.Unavailable, "egress.open", "%w", err)
	}
	n.tasks.Go(n.fill)
	return n, nil
}

// Close cuts every connection and removes the spares. Networks in use stay,
// with no way out, until the next process adopts them.
func (n *Networks) Close() error {
	n.mu.Lock()
	n.mu.closed = true
	boxes := maps.Clone(n.mu.boxes)
	n.mu.Unlock()
	n.cancel()
	n.tasks.Wait()
	var errs []error
	for _, b := range boxes {
		errs = append(errs, b.Close())
	}
	for _, s := range n.mu.spares {
		errs = append(errs, s.remove())
	}
	return errors.Join(errs...)
}

// Take gives a kernel a network that is served by a policy and an interception
// (nil = none), and the device to plug into it. It fails closed: on error there is no network.
func (n *Networks) Take(ctx context.Context, id string, p *policy.Policy, generation int64, i *proxy.Interception) (Device, error) {
	const op = "egress.take"
	s, err := n.spare(ctx)
	if err != nil {
		return Device{}, sandbox.Errorf(sandbox.Unavailable, op, "%w", err)
	}
	remove, err := s.ns.Rename(id)
	if err != nil {
		return Device{}, sandbox.Errorf(sandbox.Unavailable, op, "network of kernel %s: %w", id, errors.Join(err, s.remove()))
	}
	b := proxy.Open(s.ns, s.socks, n.cfg.Upstream, p, generation, i, n.log)
	n.mu.Lock()
	if n.mu.closed || n.mu.boxes[id] != nil {
		n.mu.Unlock()
		return Device{}, sandbox.Errorf(sandbox.Unavailable, op, "network of kernel %s: closing, or it has one (%v)", id,
			errors.Join(b.Close(), s.device.Close(), remove(), netns.Remove(n.path(id))))
	}
	n.mu.boxes[id] = b
	n.tasks.Go(func() {
		if err := remove(); err != nil {
			n.log.Warn("the first name of a namespace stays", "kernel", id, "err", err)
		}
	})
	n.mu.Unlock()
	n.poke()
	return Device{File: s.device, GSO: s.gso}, nil
}

// Adopt serves the network of a kernel that an earlier process gave it.
// sandbox.NotFound if there is none.
func (n *Networks) Adopt(ctx context.Context, id string, p *policy.Policy, generation int64, i *proxy.Interception) error {
	const op = "egress.adopt"
	ns, err := netns.Open(n.path(id))
	if errors.Is(err, os.ErrNotExist) {
		return sandbox.Errorf(sandbox.NotFound, op, "kernel %s has no network", id)
	}
	if err != nil {
		return sandbox.Errorf(sandbox.Unavailable, op, "%w", err)
	}
	var socks *netns.Sockets
	if err = ns.Refresh(); err == nil {
		socks, err = ns.Listen(ctx)
	}
	if err != nil {
		ns.Close()
		return sandbox.Errorf(sandbox.Unavailable, op, "network of kernel %s: %w", id, err)
	}
	b := proxy.Open(ns, socks, n.cfg.Upstream, p, generation, i, n.log)
	n.mu.Lock()
	defer n.mu.Unlock()
	if n.mu.closed || n.mu.boxes[id] != nil {
		b.Close()
		return sandbox.Errorf(sandbox.Precondition, op, "network of kernel %s: closing, or served already", id)
	}
	n.mu.boxes[id] = b
	return nil
}

// Authority is the one of an id.
func (n *Networks) Authority(id string) (*authority.Authority, error) {
	if n == nil || n.cfg.Authorities == nil {
		return nil, sandbox.Errorf(sandbox.Unsupported, "egress.authority", "this node cannot look into TLS").WithHint("create the sandbox without secrets")
	}
	n.mu.Lock()
	a := n.mu.authorities[id]
	n.mu.Unlock()
	if a != nil {
		return a, nil
	}
	a, err := n.cfg.Authorities.Authority(id)
	if err != nil {
		return nil, err
	}
	n.mu.Lock()
	defer n.mu.Unlock()
	if n.mu.authorities == nil || len(n.mu.authorities) >= authoritiesKept {
		n.mu.authorities = map[string]*authority.Authority{}
	}
	n.mu.authorities[id] = a
	return a, nil
}

// Box serves the network of a kernel; nil if it has none.
func (n *Networks) Box(id string) *proxy.Box {
	n.mu.Lock()
	defer n.mu.Unlock()
	return n.mu.boxes[id]
}

// Remove removes the network of a kernel that is gone. One that is not there is
// no error.
func (n *Networks) Remove(id string) error {
	n.mu.Lock()
	b := n.mu.boxes[id]
	delete(n.mu.boxes, id)
	n.mu.Unlock()
	var err error
	if b != nil {
		err = b.Close()
	} else if _, serr := os.Lstat(n.path(id)); serr != nil {
		return nil // most kernels have none
	}
	return errors.Join(err, netns.Remove(n.path(id)))
}

// Sweep removes the networks of kernels not in keep.
func (n *Networks) Sweep(keep map[string]bool) (removed []string, err error) {
	ents, err := os.ReadDir(n.cfg.Dir)
	if err != nil {
		return nil, err
	}
	var errs []error
	for _, e := range ents {
		if id := e.Name(); !keep[id] && !strings.HasPrefix(id, spareName) {
			if err := n.Remove(id); err != nil {
				errs = append(errs, err)
				continue
			}
			removed = append(removed, id)
		}
	}
	return removed, errors.Join(errs...)
}

func (n *Networks) path(id string) string { return filepath.Join(n.cfg.Dir, id) }

// spare takes one that is ready, or makes one.
func (n *Networks) spare(ctx context.Context) (*slot, error) {
	n.mu.Lock()
	if last := len(n.mu.spares) - 1; last >= 0 {
		s := n.mu.spares[last]
		n.mu.spares = n.mu.spares[:last]
		n.mu.Unlock()
		return s, nil
	}
	n.mu.Unlock()
	if err := ctx.Err(); err != nil {
		return nil, err
	}
	return n.make()
}

func (n *Networks) make() (s *slot, err error) {
	n.mu.Lock()
	n.mu.made++
	name := fmt.Sprintf("%s%d", spareName, n.mu.made)
	n.mu.Unlock()
	s = &slot{}
	if s.ns, err = netns.Make(n.cfg.Dir, name); err != nil {
		return nil, err
	}
	if s.socks, err = s.ns.Listen(n.ctx); err == nil {
		s.device, s.gso, err = s.ns.Device()
	}
	if err != nil {
		return nil, errors.Join(err, s.remove())
	}
	return s, nil
}

func (s *slot) remove() error {
	if s.socks != nil {
		s.socks.Close()
	}
	if s.device != nil {
		s.device.Close()
	}
	return errors.Join(s.ns.Close(), netns.Remove(s.ns.Path()))
}

func (n *Networks) poke() {
	select {
	case n.wake <- struct{}{}:
	default:
	}
}

// fillAfter is how long after a Take the next spare is made: what comes right
// behind a create must not share its core with it.
const fillAfter = 20 * time.Millisecond

// fill makes spares, one at a time.
func (n *Networks) fill() {
	failures := 0
	for {
		n.mu.Lock()
		short := len(n.mu.spares) < n.cfg.Spare
		n.mu.Unlock()
		wait := time.Hour
		if short {
			s, err := n.make()
			if err != nil {
				failures++
				n.log.Error("a network namespace could not be made", "err", err)
				wait = min(time.Duration(failures)*time.Second, 30*time.Second)
			} else {
				failures = 0
				n.mu.Lock()
				n.mu.spares = append(n.mu.spares, s)
				n.mu.Unlock()
				wait = 0
			}
		}
		if wait == 0 && n.ctx.Err() == nil {
			continue
		}
		select {
		case <-n.ctx.Done():
			return
		case <-n.wake:
			select {
			case <-n.ctx.Done():
				return
			case <-time.After(fillAfter):
			}
		case <-time.After(wait):
		}
	}
}
