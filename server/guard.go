package server

import (
	"context"
	"io"
	"net"
	"os"
	"sync"
	"time"

	"github.com/cove-sandbox/cove/guest"
	"github.com/cove-sandbox/cove/sandbox"
	"github.com/cove-sandbox/cove/snapshot"
	"github.com/cove-sandbox/cove/store"
)

// guard is a node that serves a caller's own sandboxes and volumes only. The
// calls that go straight to the node (an exec, a file, statistics) ask no store,
// so this is where a foreign id ends: as one the node does not have.
//
// Every method is written out and none is promoted: a method that Node gains is
// a compile error here until somebody has said whose it is.
type guard struct {
	node   Node
	store  store.Sandboxes
	owners ownerBook
}

func newGuard(n Node, st store.Sandboxes) *guard {
	g := &guard{node: n, store: st}
	g.owners.of = map[string]string{}
	return g
}

// ownerBook remembers whose sandboxes are, which never changes, so that an exec
// costs a map look-up. It is emptied when it is full: those in use are back with
// one query each.
type ownerBook struct {
	mu sync.RWMutex
	of map[string]string // sandbox id → tenant
}

const maxOwners = 100_000

func (b *ownerBook) get(id string) string {
	b.mu.RLock()
	defer b.mu.RUnlock()
	return b.of[id]
}

func (b *ownerBook) put(id, tenant string) {
	b.mu.Lock()
	defer b.mu.Unlock()
	if len(b.of) >= maxOwners {
		clear(b.of)
	}
	b.of[id] = tenant
}

// may is nil if the sandbox is in the scope of ctx.
func (g *guard) may(ctx context.Context, id string) error {
	scope := store.ScopeOf(ctx)
	if err := scope.Check(); err != nil {
		return err
	}
	if scope.All() {
		return nil
	}
	if owner := g.owners.get(id); owner != "" {
		if scope.Sees(owner) {
			return nil
		}
		return noSandbox(id)
	}
	sb, err := g.store.GetSandbox(ctx, id)
	if err != nil {
		return err
	}
	g.owners.put(id, sb.Tenant)
	return nil
}

func (g *guard) Name() string { return g.node.Name() }

func (g *guard) Create(ctx context.Context, sb sandbox.Sandbox, img sandbox.Image) (time.Duration, error) {
	sb, err := g.own(ctx, sb)
	if err != nil {
		return 0, err
	}
	took, err := g.node.Create(ctx, sb, img)
	return took, plainNames(err)
}

func (g *guard) CreateFrom(ctx context.Context, sb sandbox.Sandbox, img sandbox.Image, from sandbox.Snapshot) (time.Duration, error) {
	sb, err := g.own(ctx, sb)
	if err != nil {
		return 0, err
	}
	took, err := g.node.CreateFrom(ctx, sb, img, from)
	return took, plainNames(err)
}

// own is a new sandbox of the scope's tenant, with its volumes by id.
func (g *guard) own(ctx context.Context, sb sandbox.Sandbox) (sandbox.Sandbox, error) {
	scope := store.ScopeOf(ctx)
	if err := scope.Check(); err != nil {
		return sb, err
	}
	if !scope.Sees(sb.Tenant) {
		return sb, &sandbox.Error{Class: sandbox.Internal, Op: "server.guard", Msg: "a sandbox for another tenant"}
	}
	if len(sb.Spec.Volumes) > 0 {
		set := g.Volumes()
		if set == nil {
			return sb, sandbox.InvalidField("spec.volumes", "node %s keeps no volumes", g.Name())
		}
		mounts := make([]sandbox.VolumeMount, len(sb.Spec.Volumes))
		for i, m := range sb.Spec.Volumes {
			v, err := set.Get(store.In(ctx, sb.Tenant), m.Volume)
			if err != nil {
				return sb, err
			}
			mounts[i] = m
			mounts[i].Volume = v.ID
		}
		sb.Spec.Volumes = mounts
	}
	if r := sb.Spec.Network.Replay; r != nil {
		if err := g.mayReplay(store.In(ctx, sb.Tenant), r.Recording); err != nil {
			return sb, err
		}
	}
	g.owners.put(sb.ID, sb.Tenant)
	return sb, nil
}

// mayReplay is nil if a recording is in the scope of ctx.
func (g *guard) mayReplay(ctx context.Context, id string) error {
	set := g.Recordings()
	if set == nil {
		return noRecordings(g)
	}
	_, err := set.Get(ctx, id)
	return err
}

func (g *guard) Reset(ctx context.Context, id string) (int64, time.Duration, error) {
	if err := g.may(ctx, id); err != nil {
		return 0, 0, err
	}
	return g.node.Reset(ctx, id)
}

func (g *guard) Dial(ctx context.Context, id string, port int) (net.Conn, func(), error) {
	if err := g.may(ctx, id); err != nil {
		return nil, nil, err
	}
	return g.node.Dial(ctx, id, port)
}

func (g *guard) Listen(ctx context.Context, id string, port int) (net.Listener, error) {
	if err := g.may(ctx, id); err != nil {
		return nil, err
	}
	return g.node.Listen(ctx, id, port)
}

func (g *guard) SetNetwork(ctx context.Context, id string, n sandbox.Network) (int64, error) {
	if err := g.may(ctx, id); err != nil {
		return 0, err
	}
	if n.Replay != nil {
		if err := g.mayReplay(ctx, n.Replay.Recording); err != nil {
			return 0, err
		}
	}
	return g.node.SetNetwork(ctx, id, n)
}

func (g *guard) PutSecrets(ctx context.Context, tenant string, secrets []sandbox.Secret) error {
	scope := store.ScopeOf(ctx)
	if err := scope.Check(); err != nil {
		return err
	}
	if !scope.Sees(tenant) {
		return &sandbox.Error{Class: sandbox.Internal, Op: "server.guard", Msg: "secrets for another tenant"}
	}
	return g.node.PutSecrets(ctx, tenant, secrets)
}

func (g *guard) UseSecrets(ctx context.Context, id string, names []string) (string, error) {
	if err := g.may(ctx, id); err != nil {
		return "", err
	}
	return g.node.UseSecrets(ctx, id, names)
}

func (g *guard) NetworkStatus(ctx context.Context, id string, flows int) (sandbox.NetworkStatus, error) {
	if err := g.may(ctx, id); err != nil {
		return sandbox.NetworkStatus{}, err
	}
	return g.node.NetworkStatus(ctx, id, flows)
}

func (g *guard) Kill(ctx context.Context, id string, end sandbox.End) error {
	if err := g.may(ctx, id); err != nil {
		return err
	}
	return g.node.Kill(ctx, id, end)
}

func (g *guard) SetExpiry(ctx context.Context, id string, at time.Time) error {
	if err := g.may(ctx, id); err != nil {
		return err
	}
	return g.node.SetExpiry(ctx, id, at)
}

func (g *guard) Stats(ctx context.Context, id string) (sandbox.Stats, error) {
	if err := g.may(ctx, id); err != nil {
		return sandbox.Stats{}, err
	}
	return g.node.Stats(ctx, id)
}

func (g *guard) Guest(ctx context.Context, id string) (Guest, func(), error) {
	if err := g.may(ctx, id); err != nil {
		return nil, nil, err
	}
	return g.node.Guest(ctx, id)
}

func (g *guard) Bulk(ctx context.Context, id string, op guest.BulkOp, stdin, stdout *os.File) error {
	if err := g.may(ctx, id); err != nil {
		return err
	}
	return g.node.Bulk(ctx, id, op, stdin, stdout)
}

func (g *guard) Pause(ctx context.Context, id string, cold bool) error {
	if err := g.may(ctx, id); err != nil {
		return err
	}
	return g.node.Pause(ctx, id, cold)
}

func (g *guard) Resume(ctx context.Context, id string) (time.Duration, error) {
	if err := g.may(ctx, id); err != nil {
		return 0, err
	}
	return g.node.Resume(ctx, id)
}

func (g *guard) Snapshot(ctx context.Context, id string, r SnapshotRequest) (sandbox.Content, time.Duration, error) {
	if err := g.may(ctx, id); err != nil {
		return sandbox.Content{}, 0, err
	}
	return g.node.Snapshot(ctx, id, r)
}

func (g *guard) Restore(ctx context.Context, id string, img sandbox.Image, from sandbox.Snapshot) (int64, time.Duration, error) {
	if err := g.may(ctx, id); err != nil {
		return 0, 0, err
	}
	return g.node.Restore(ctx, id, img, from)
}

func (g *guard) Mount(ctx context.Context, id string, from sandbox.Snapshot, path string, unpack bool) error {
	if err := g.may(ctx, id); err != nil {
		return err
	}
	return g.node.Mount(ctx, id, from, path, unpack)
}

// What follows is about content that a record in scope has led to, or about all
// of the node for the server's own work.

func (g *guard) PrepareImage(ctx context.Context, from sandbox.Snapshot, base sandbox.Image, progress func(sandbox.Progress)) (sandbox.Image, error) {
	return g.node.PrepareImage(ctx, from, base, progress)
}
func (g *guard) Tar(ctx context.Context, c sandbox.Content, w io.Writer) error {
	return g.node.Tar(ctx, c, w)
}
func (g *guard) Release(ctx context.Context, c sandbox.Content) error { return g.node.Release(ctx, c) }
func (g *guard) Verify(ctx context.Context, c sandbox.Content) (int64, error) {
	return g.node.Verify(ctx, c)
}
func (g *guard) Blobs(ctx context.Context, manifests []string) (map[string][]snapshot.Blob, error) {
	if err := store.ScopeOf(ctx).Check(); err != nil {
		return nil, err
	}
	return g.node.Blobs(ctx, manifests)
}
func (g *guard) Collect(ctx context.Context, keep []string) (int64, error) {
	if err := store.ScopeOf(ctx).CheckAll(); err != nil {
		return 0, err
	}
	return g.node.Collect(ctx, keep)
}
func (g *guard) Live(ctx context.Context) ([]sandbox.Sandbox, error) {
	if err := store.ScopeOf(ctx).CheckAll(); err != nil {
		return nil, err
	}
	return g.node.Live(ctx)
}
func (g *guard) AckEnd(ctx context.Context, id string) error {
	if err := store.ScopeOf(ctx).CheckAll(); err != nil {
		return err
	}
	return g.node.AckEnd(ctx, id)
}
func (g *guard) Ends(ctx context.Context) (map[string]sandbox.End, error) { return g.node.Ends(ctx) }
func (g *guard) Ended() <-chan string                                     { return g.node.Ended() }
func (g *guard) Capacity() Capacity                                       { return g.node.Capacity() }
func (g *guard) Images() ImageLibrary                                     { return g.node.Images() }
func (g *guard) Standby() map[string]sandbox.Standby                      { return g.node.Standby() }
func (g *guard) Litter() bool                                             { return g.node.Litter() }
func (g *guard) Sealed() bool                                             { return g.node.Sealed() }

func (g *guard) Volumes() VolumeSet {
	if v := g.node.Volumes(); v != nil {
		return tenantVolumes{v}
	}
	return nil
}

func (g *guard) Recordings() RecordingSet {
	if r := g.node.Recordings(); r != nil {
		return tenantRecordings{r}
	}
	return nil
}
