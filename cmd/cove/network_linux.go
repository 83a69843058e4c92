package main

import (
	"errors"
	"io/fs"
	"log/slog"
	"net/netip"
	"os"
	"path/filepath"

	"github.com/cove-sandbox/cove/cli"
	"github.com/cove-sandbox/cove/egress"
	"github.com/cove-sandbox/cove/egress/authority"
	"github.com/cove-sandbox/cove/egress/netns"
	"github.com/cove-sandbox/cove/egress/proxy"
	"github.com/cove-sandbox/cove/egress/recording"
	"github.com/cove-sandbox/cove/runtime"
	"github.com/cove-sandbox/cove/sandbox"
)

func (p places) networks() string { return filepath.Join(p.dir, "networks") }

// openNetworks is nil where the runtime has no use for them.
func openNetworks(c cli.ServeConfig, ca []byte, at places, driver runtime.Driver, log *slog.Logger) (*egress.Networks, error) {
	switch sandbox.NetworkMode(c.Network) {
	case "", sandbox.NetworkNone, sandbox.NetworkPublic:
	default:
		return nil, sandbox.InvalidField("network-default", "%q; none or public", c.Network)
	}
	var resolvers []netip.AddrPort
	for _, r := range c.Resolvers {
		a, err := netip.ParseAddrPort(r)
		if err != nil {
			var addr netip.Addr
			addr, err = netip.ParseAddr(r)
			a = netip.AddrPortFrom(addr, 53)
		}
		if err != nil {
			return nil, sandbox.InvalidField("dns", "%q is not ADDRESS or ADDRESS:PORT", r)
		}
		resolvers = append(resolvers, a)
	}
	if !driver.Capabilities().Network {
		return nil, nil
	}
	up, err := proxy.NewUpstream(resolvers)
	if err != nil {
		return nil, &sandbox.Error{Class: sandbox.Precondition, Err: err, Hint: "--dns names the resolvers"}
	}
	if up.Roots, err = roots(ca, c.EgressRoots); err != nil {
		return nil, err
	}
	master, err := authority.Open(at.egressKey())
	if err != nil {
		return nil, err
	}
	return egress.Open(egress.Config{Dir: at.networks(), Upstream: up, Authorities: master, Logger: log})
}

func (p places) recordings() string { return filepath.Join(p.dir, "recordings") }

// openRecordings keeps recordings as safe as the state of sandboxes.
func openRecordings(c cli.ServeConfig, at places, log *slog.Logger) (*recording.Library, error) {
	keys, err := stateKeys(c, at)
	if err != nil {
		return nil, err
	}
	return recording.OpenLibrary(recording.Config{Dir: at.recordings(), Node: nodeName(c), Logger: log, Sealer: func(id string) recording.Sealer {
		if s := keys.Stream("recording " + id); s != nil {
			return s
		}
		return nil
	}})
}

// removeNetworks removes what a server that is not running left.
func (p places) removeNetworks() error {
	ents, err := os.ReadDir(p.networks())
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	for _, e := range ents {
		err = errors.Join(err, netns.Remove(filepath.Join(p.networks(), e.Name())))
	}
	return err
}
