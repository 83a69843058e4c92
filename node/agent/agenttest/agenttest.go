// Package agenttest opens node agents over runtime/fake, for tests of whatever
// uses a node: real agents with real guests, in processes without isolation.
package agenttest

import (
	"context"
	"errors"
	"net"
	"net/netip"
	"path/filepath"

	"github.com/cove-sandbox/cove/cas/local"
	"github.com/cove-sandbox/cove/egress"
	"github.com/cove-sandbox/cove/egress/authority"
	"github.com/cove-sandbox/cove/egress/proxy"
	"github.com/cove-sandbox/cove/egress/recording"
	"github.com/cove-sandbox/cove/node/agent"
	"github.com/cove-sandbox/cove/runtime/fake"
	"github.com/cove-sandbox/cove/sandbox"
)

// Options of a machine.
type Options struct {
	// Volumes are real ones, where this host can have some (volume.Supported). The
	// fake driver mounts none of them.
	Volumes bool
	// Networks are real ones, which takes root, with nothing behind them. The fake
	// driver plugs none of them in.
	Networks bool
	// Edit changes what the agent is opened with; nil = nothing.
	Edit func(*Machine, *agent.Config)
}

// Machine is an agent with all that it stands on.
type Machine struct {
	*agent.Node
	Host       *fake.Host
	Driver     *fake.Driver
	Library    *Library
	Store      *local.Store // of snapshots
	Recorded   *recording.Library
	closeFirst []func() error // the last first
}

// Open makes a machine that keeps all it has below dir.
func Open(ctx context.Context, dir string, opts Options) (_ *Machine, err error) {
	m := &Machine{}
	defer func() {
		if err != nil {
			err = errors.Join(err, m.closeAll())
		}
	}()
	if m.Library, err = NewLibrary(filepath.Join(dir, "images")); err != nil {
		return nil, err
	}
	if m.Store, err = local.Open(filepath.Join(dir, "state"), local.Options{}); err != nil {
		return nil, err
	}
	m.closes(m.Store.Close)
	if m.Recorded, err = recording.OpenLibrary(recording.Config{Dir: filepath.Join(dir, "recordings"), Node: "n1"}); err != nil {
		return nil, err
	}
	m.closes(m.Recorded.Close)
	m.Host = fake.NewHost(filepath.Join(dir, "kernels"), fake.Options{Volumes: opts.Volumes, Network: opts.Networks, Mount: true})
	m.closes(m.Host.Close)
	m.Driver = m.Host.Open()
	m.closes(m.Driver.Close)
	cfg := agent.Config{Dir: filepath.Join(dir, "node"), Name: "n1", Classes: []agent.Class{{Driver: m.Driver, Pool: agent.PoolSettings{Min: 2, Max: 8}}},
		Images: m.Library, Recordings: m.Recorded,
		Limits: agent.Limits{MilliCPU: 1 << 30, Memory: 1 << 50, Disk: 1 << 50, MaxSandboxes: 1000, DiskReserve: 1},
		State:  &agent.StateConfig{Store: m.Store, Plain: filepath.Join(dir, "plain")}}
	if opts.Volumes {
		cfg.VolumeDir = filepath.Join(dir, "volumes")
	}
	if opts.Networks {
		if cfg.Networks, err = networks(dir); err != nil {
			return nil, err
		}
		m.closes(cfg.Networks.Close)
	}
	if opts.Edit != nil {
		opts.Edit(m, &cfg)
	}
	if m.Node, err = agent.Open(ctx, cfg); err != nil {
		return nil, err
	}
	return m, nil
}

// networks lead nowhere. None is made ahead of demand.
func networks(dir string) (*egress.Networks, error) {
	master, err := authority.Open(filepath.Join(dir, "egress.key"))
	if err != nil {
		return nil, err
	}
	nowhere := func(context.Context, string, string) (net.Conn, error) { return nil, errors.New("there is nothing") }
	return egress.Open(egress.Config{Dir: filepath.Join(dir, "networks"), Spare: -1, Authorities: master,
		Upstream: &proxy.Upstream{Dial: nowhere, Host: func(netip.Addr) bool { return false }}})
}

// Close ends every sandbox and removes the machine.
func (m *Machine) Close() error {
	return errors.Join(m.Node.Shutdown(context.Background(), true), m.closeAll())
}

func (m *Machine) closes(f func() error) { m.closeFirst = append(m.closeFirst, f) }

func (m *Machine) closeAll() (err error) {
	for i := len(m.closeFirst) - 1; i >= 0; i-- {
		err = errors.Join(err, m.closeFirst[i]())
	}
	return err
}

// Image is what a machine's sandboxes can start from.
var Image = sandbox.Image{ID: "sha256:base", Source: "tar", Platform: "linux/amd64", Size: 1, Config: sandbox.ImageConfig{Env: []string{"PATH=/usr/bin:/bin"}}}
