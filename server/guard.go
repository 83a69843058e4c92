package server

import (
	"context"
	"io"
	"iter"
	"sync"
	"time"

	"github.com/cove-sandbox/cove/node"
	"github.com/cove-sandbox/cove/sandbox"
	"github.com/cove-sandbox/cove/snapshot"
	"github.com/cove-sandbox/cove/store"
)

// guard is a node that serves a caller's own sandboxes only. The
// calls that go straight to the node (an exec, a file, statistics) ask no store,
// so this is where a foreign id ends: as one the node does not have.
//
// Every method is written out and none is promoted: a method that node.Node gains
// is a compile error here until somebody has said whose it is.
type guard struct {
	node   node.Node
	store  store.Store
	owners ownerBook
}

func newGuard(n node.Node, st store.Store) *guard {
	g := &guard{node: n, store: st}
	g.owners.mu.of = map[string]string{}
	return g
}

// ownerBook remembers whose sandboxes are, which never changes, so that an exec
// costs a map look-up. It is emptied when it is full: those in use are back with
// one query each.
type ownerBook struct {
	mu struct {
		sync.RWMutex
		of map[string]string // sandbox id → tenant
	}
}

const maxOwners = 100_000

func (b *ownerBook) get(id string) string {
	b.mu.RLock()
	defer b.mu.RUnlock()
	return b.mu.of[id]
}

func (b *ownerBook) put(id, tenant string) {
	b.mu.Lock()
	defer b.mu.Unlock()
	if len(b.mu.of) >= maxOwners {
		clear(b.mu.of)
	}
	b.mu.of[id] = tenant
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

func (g *guard) Create(ctx context.Context, sb sandbox.Sandbox, img sandbox.Image) (time.Duration, error) {
	sb, err := g.own(ctx, sb)
	if err != nil {
		return 0, err
	}
	return g.node.Create(ctx, sb, img)
}

func (g *guard) CreateFrom(ctx context.Context, sb sandbox.Sandbox, img sandbox.Image, from sandbox.Snapshot) (time.Duration, error) {
	sb, err := g.own(ctx, sb)
	if err != nil {
		return 0, err
	}
	return g.node.CreateFrom(ctx, sb, img, from)
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
	own := store.In(ctx, sb.Tenant)
	if len(sb.Spec.Volumes) > 0 {
		mounts := make([]sandbox.VolumeMount, len(sb.Spec.Volumes))
		for i, m := range sb.Spec.Volumes {
			v, err := findVolume(own, g.store, m.Volume)
			if err != nil {
				return sb, err
			}
			mounts[i] = m
			mounts[i].Volume = v.ID
		}
		sb.Spec.Volumes = mounts
	}
	if r := sb.Spec.Network.Replay; r != nil {
		if _, err := g.store.GetRecording(own, r.Recording); err != nil {
			return sb, err
		}
	}
	g.owners.put(sb.ID, sb.Tenant)
	return sb, nil
}

func (g *guard) Reset(ctx context.Context, id string) (int64, time.Duration, error) {
	if err := g.may(ctx, id); err != nil {
		return 0, 0, err
	}
	return g.node.Reset(ctx, id)
}

func (g *guard) Restore(ctx context.Context, id string, img sandbox.Image, from sandbox.Snapshot) (int64, time.Duration, error) {
	if err := g.may(ctx, id); err != nil {
		return 0, 0, err
	}
	return g.node.Restore(ctx, id, img, from)
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

func (g *guard) Hold(ctx context.Context, id string, ttl time.Duration) (node.Hold, error) {
	if err := g.may(ctx, id); err != nil {
		return node.Hold{}, err
	}
	return g.node.Hold(ctx, id, ttl)
}

// Expect is the server's own: what is expected is nobody's, and a name is not told.
func (g *guard) Expect(ctx context.Context, name string, e node.Expectation) (node.Expected, error) {
	return g.node.Expect(ctx, name, e)
}

func (g *guard) Start(ctx context.Context, id string, spec sandbox.ProcessSpec, offset int64) iter.Seq2[sandbox.ProcessEvent, error] {
	return guarded(g.may(ctx, id), g.node.Start(ctx, id, spec, offset))
}

func (g *guard) Attach(ctx context.Context, id, execID string, offset int64) iter.Seq2[sandbox.ProcessEvent, error] {
	return guarded(g.may(ctx, id), g.node.Attach(ctx, id, execID, offset))
}

func (g *guard) SendInput(ctx context.Context, id, execID string, data []byte) error {
	if err := g.may(ctx, id); err != nil {
		return err
	}
	return g.node.SendInput(ctx, id, execID, data)
}

func (g *guard) CloseInput(ctx context.Context, id, execID string) error {
	if err := g.may(ctx, id); err != nil {
		return err
	}
	return g.node.CloseInput(ctx, id, execID)
}

func (g *guard) Signal(ctx context.Context, id, execID, signal string, processOnly bool) error {
	if err := g.may(ctx, id); err != nil {
		return err
	}
	return g.node.Signal(ctx, id, execID, signal, processOnly)
}

func (g *guard) Resize(ctx context.Context, id, execID string, size sandbox.TermSize) error {
	if err := g.may(ctx, id); err != nil {
		return err
	}
	return g.node.Resize(ctx, id, execID, size)
}

func (g *guard) Processes(ctx context.Context, id string) ([]sandbox.Process, []sandbox.Task, error) {
	if err := g.may(ctx, id); err != nil {
		return nil, nil, err
	}
	return g.node.Processes(ctx, id)
}

func (g *guard) Wait(ctx context.Context, id, execID string) (sandbox.ProcessEnd, error) {
	if err := g.may(ctx, id); err != nil {
		return sandbox.ProcessEnd{}, err
	}
	return g.node.Wait(ctx, id, execID)
}

func (g *guard) ReadFile(ctx context.Context, id, path string, offset, length int64) ([]byte, sandbox.FileInfo, error) {
	if err := g.may(ctx, id); err != nil {
		return nil, sandbox.FileInfo{}, err
	}
	return g.node.ReadFile(ctx, id, path, offset, length)
}

func (g *guard) WriteFile(ctx context.Context, id, path string, data []byte, opt sandbox.WriteOptions) (sandbox.FileInfo, error) {
	if err := g.may(ctx, id); err != nil {
		return sandbox.FileInfo{}, err
	}
	return g.node.WriteFile(ctx, id, path, data, opt)
}

func (g *guard) StatFile(ctx context.Context, id, path string) (sandbox.FileInfo, error) {
	if err := g.may(ctx, id); err != nil {
		return sandbox.FileInfo{}, err
	}
	return g.node.StatFile(ctx, id, path)
}

func (g *guard) ListFiles(ctx context.Context, id, path string, opt sandbox.ListOptions) ([]sandbox.FileInfo, bool, error) {
	if err := g.may(ctx, id); err != nil {
		return nil, false, err
	}
	return g.node.ListFiles(ctx, id, path, opt)
}

func (g *guard) MakeDir(ctx context.Context, id, path string, opt sandbox.WriteOptions) (sandbox.FileInfo, error) {
	if err := g.may(ctx, id); err != nil {
		return sandbox.FileInfo{}, err
	}
	return g.node.MakeDir(ctx, id, path, opt)
}

func (g *guard) MoveFile(ctx context.Context, id, from, to string) (sandbox.FileInfo, error) {
	if err := g.may(ctx, id); err != nil {
		return sandbox.FileInfo{}, err
	}
	return g.node.MoveFile(ctx, id, from, to)
}

func (g *guard) RemoveFile(ctx context.Context, id, path string, recursive bool) error {
	if err := g.may(ctx, id); err != nil {
		return err
	}
	return g.node.RemoveFile(ctx, id, path, recursive)
}

func (g *guard) Chmod(ctx context.Context, id, path string, mode uint32, recursive bool) error {
	if err := g.may(ctx, id); err != nil {
		return err
	}
	return g.node.Chmod(ctx, id, path, mode, recursive)
}

func (g *guard) SetAttributes(ctx context.Context, id, path string, attrs map[string]string) (sandbox.FileInfo, error) {
	if err := g.may(ctx, id); err != nil {
		return sandbox.FileInfo{}, err
	}
	return g.node.SetAttributes(ctx, id, path, attrs)
}

func (g *guard) Chown(ctx context.Context, id, path, owner string, recursive bool) error {
	if err := g.may(ctx, id); err != nil {
		return err
	}
	return g.node.Chown(ctx, id, path, owner, recursive)
}

func (g *guard) Watch(ctx context.Context, id, path string, recursive bool) iter.Seq2[sandbox.FileChange, error] {
	return guarded(g.may(ctx, id), g.node.Watch(ctx, id, path, recursive))
}

func (g *guard) Upload(ctx context.Context, id string, to node.Upload, r io.Reader) error {
	if err := g.may(ctx, id); err != nil {
		return err
	}
	return g.node.Upload(ctx, id, to, r)
}

func (g *guard) Download(ctx context.Context, id string, from node.Download, w io.Writer) error {
	if err := g.may(ctx, id); err != nil {
		return err
	}
	return g.node.Download(ctx, id, from, w)
}

func (g *guard) Dial(ctx context.Context, id string, port int) (node.Conn, error) {
	if err := g.may(ctx, id); err != nil {
		return nil, err
	}
	return g.node.Dial(ctx, id, port)
}

func (g *guard) Callbacks(ctx context.Context, id string, port int) iter.Seq2[node.Callback, error] {
	return guarded(g.may(ctx, id), g.node.Callbacks(ctx, id, port))
}

func (g *guard) PrepareSnapshot(ctx context.Context, id string, r node.SnapshotRequest) (node.Prepared, error) {
	if err := g.may(ctx, id); err != nil {
		return node.Prepared{}, err
	}
	return g.node.PrepareSnapshot(ctx, id, r)
}

func (g *guard) Diff(ctx context.Context, id string, r sandbox.DiffRequest) (sandbox.Diff, error) {
	if err := g.may(ctx, id); err != nil {
		return sandbox.Diff{}, err
	}
	return g.node.Diff(ctx, id, r)
}

func (g *guard) MarkFiles(ctx context.Context, id, mark string) error {
	if err := g.may(ctx, id); err != nil {
		return err
	}
	return g.node.MarkFiles(ctx, id, mark)
}

func (g *guard) Mount(ctx context.Context, id string, from sandbox.Snapshot, path string, unpack bool) error {
	if err := g.may(ctx, id); err != nil {
		return err
	}
	return g.node.Mount(ctx, id, from, path, unpack)
}

func (g *guard) NetworkStatus(ctx context.Context, id string, flows int) (sandbox.NetworkStatus, error) {
	if err := g.may(ctx, id); err != nil {
		return sandbox.NetworkStatus{}, err
	}
	return g.node.NetworkStatus(ctx, id, flows)
}

func (g *guard) UseSecrets(ctx context.Context, id string, names []string) (string, error) {
	if err := g.may(ctx, id); err != nil {
		return "", err
	}
	return g.node.UseSecrets(ctx, id, names)
}

func (g *guard) SetNetwork(ctx context.Context, id string, n sandbox.Network) (int64, error) {
	if err := g.may(ctx, id); err != nil {
		return 0, err
	}
	if n.Replay != nil {
		if _, err := g.store.GetRecording(ctx, n.Replay.Recording); err != nil {
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

// guarded is a stream that is refused, or what it is.
func guarded[T any](err error, seq iter.Seq2[T, error]) iter.Seq2[T, error] {
	if err == nil {
		return seq
	}
	return func(yield func(T, error) bool) {
		var none T
		yield(none, err)
	}
}

// What follows is about content or a token that a record in scope has led to, or
// about all of the node for the server's own work.

func (g *guard) Standby(ctx context.Context) (map[string]sandbox.Standby, error) {
	return g.node.Standby(ctx)
}
func (g *guard) RenewHold(ctx context.Context, token string, ttl time.Duration) (node.Hold, error) {
	return g.node.RenewHold(ctx, token, ttl)
}
func (g *guard) ReleaseHold(ctx context.Context, token string) error {
	return g.node.ReleaseHold(ctx, token)
}
func (g *guard) Live(ctx context.Context) ([]sandbox.Sandbox, error) {
	if err := store.ScopeOf(ctx).CheckAll(); err != nil {
		return nil, err
	}
	return g.node.Live(ctx)
}
func (g *guard) Ends(ctx context.Context) (map[string]sandbox.End, error) { return g.node.Ends(ctx) }
func (g *guard) Ended(ctx context.Context) iter.Seq2[node.Ended, error]   { return g.node.Ended(ctx) }
func (g *guard) AckEnd(ctx context.Context, id string) error {
	if err := store.ScopeOf(ctx).CheckAll(); err != nil {
		return err
	}
	return g.node.AckEnd(ctx, id)
}
func (g *guard) OpenCallback(ctx context.Context, callback string) (node.Conn, error) {
	return g.node.OpenCallback(ctx, callback)
}
func (g *guard) CommitSnapshot(ctx context.Context, token string) error {
	return g.node.CommitSnapshot(ctx, token)
}
func (g *guard) AbortSnapshot(ctx context.Context, token string) error {
	return g.node.AbortSnapshot(ctx, token)
}
func (g *guard) PrepareImage(ctx context.Context, from sandbox.Snapshot, base sandbox.Image, op string) (sandbox.Image, error) {
	return g.node.PrepareImage(ctx, from, base, op)
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
func (g *guard) Info(ctx context.Context) (node.Info, error)            { return g.node.Info(ctx) }
func (g *guard) Capacity(ctx context.Context) (sandbox.Capacity, error) { return g.node.Capacity(ctx) }
func (g *guard) Progress(ctx context.Context, op string) iter.Seq2[sandbox.Progress, error] {
	return g.node.Progress(ctx, op)
}
func (g *guard) Volumes() node.Volumes       { return g.node.Volumes() }
func (g *guard) Recordings() node.Recordings { return g.node.Recordings() }
func (g *guard) Images() node.Images         { return g.node.Images() }

var _ node.Node = (*guard)(nil)
