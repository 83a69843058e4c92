package remote

import (
	"context"
	"io"
	"iter"
	"time"

	"github.com/cove-sandbox/cove/node"
	"github.com/cove-sandbox/cove/sandbox"
	"github.com/cove-sandbox/cove/snapshot"
)

// The contract, one line each: what a method is called there, its arguments, its
// results.

func with(args ...any) []any { return args }

func (cl *Client) Info(ctx context.Context) (v node.Info, err error) {
	err = cl.call(ctx, "Info", nil, &v)
	return v, err
}

func (cl *Client) Capacity(ctx context.Context) (v sandbox.Capacity, err error) {
	err = cl.call(ctx, "Capacity", nil, &v)
	return v, err
}

func (cl *Client) Progress(ctx context.Context, op string) iter.Seq2[sandbox.Progress, error] {
	return stream[sandbox.Progress](cl, ctx, "Progress", op)
}

func (cl *Client) Create(ctx context.Context, sb sandbox.Sandbox, img sandbox.Image) (took time.Duration, err error) {
	err = cl.call(ctx, "Create", with(sb, img), &took)
	return took, err
}

func (cl *Client) CreateFrom(ctx context.Context, sb sandbox.Sandbox, img sandbox.Image, from sandbox.Snapshot) (took time.Duration, err error) {
	err = cl.call(ctx, "CreateFrom", with(sb, img, from), &took)
	return took, err
}

func (cl *Client) Reset(ctx context.Context, id string) (episode int64, took time.Duration, err error) {
	err = cl.call(ctx, "Reset", with(id), &episode, &took)
	return episode, took, err
}

func (cl *Client) Restore(ctx context.Context, id string, img sandbox.Image, from sandbox.Snapshot) (episode int64, took time.Duration, err error) {
	err = cl.call(ctx, "Restore", with(id, img, from), &episode, &took)
	return episode, took, err
}

func (cl *Client) Kill(ctx context.Context, id string, end sandbox.End) error {
	return cl.call(ctx, "Kill", with(id, end))
}

func (cl *Client) SetExpiry(ctx context.Context, id string, at time.Time) error {
	return cl.call(ctx, "SetExpiry", with(id, at))
}

func (cl *Client) Stats(ctx context.Context, id string) (v sandbox.Stats, err error) {
	err = cl.call(ctx, "Stats", with(id), &v)
	return v, err
}

func (cl *Client) Pause(ctx context.Context, id string, cold bool) error {
	return cl.call(ctx, "Pause", with(id, cold))
}

func (cl *Client) Resume(ctx context.Context, id string) (took time.Duration, err error) {
	err = cl.call(ctx, "Resume", with(id), &took)
	return took, err
}

func (cl *Client) Standby(ctx context.Context) (v map[string]sandbox.Standby, err error) {
	err = cl.call(ctx, "Standby", nil, &v)
	return v, err
}

func (cl *Client) Hold(ctx context.Context, id string, ttl time.Duration) (v node.Hold, err error) {
	err = cl.call(ctx, "Hold", with(id, ttl), &v)
	return v, err
}

func (cl *Client) Expect(ctx context.Context, name string, e node.Expectation) (v node.Expected, err error) {
	err = cl.call(ctx, "Expect", with(name, e), &v)
	return v, err
}

func (cl *Client) RenewHold(ctx context.Context, token string, ttl time.Duration) (v node.Hold, err error) {
	err = cl.call(ctx, "RenewHold", with(token, ttl), &v)
	return v, err
}

func (cl *Client) ReleaseHold(ctx context.Context, token string) error {
	return cl.call(ctx, "ReleaseHold", with(token))
}

func (cl *Client) Live(ctx context.Context) (v []sandbox.Sandbox, err error) {
	err = cl.call(ctx, "Live", nil, &v)
	return v, err
}

func (cl *Client) Ends(ctx context.Context) (v map[string]sandbox.End, err error) {
	err = cl.call(ctx, "Ends", nil, &v)
	return v, err
}

func (cl *Client) Ended(ctx context.Context) iter.Seq2[node.Ended, error] {
	return stream[node.Ended](cl, ctx, "Ended")
}

func (cl *Client) AckEnd(ctx context.Context, id string) error {
	return cl.call(ctx, "AckEnd", with(id))
}

func (cl *Client) Start(ctx context.Context, id string, spec sandbox.ProcessSpec, offset int64) iter.Seq2[sandbox.ProcessEvent, error] {
	return stream[sandbox.ProcessEvent](cl, ctx, "Start", id, spec, offset)
}

func (cl *Client) Attach(ctx context.Context, id, execID string, offset int64) iter.Seq2[sandbox.ProcessEvent, error] {
	return stream[sandbox.ProcessEvent](cl, ctx, "Attach", id, execID, offset)
}

func (cl *Client) SendInput(ctx context.Context, id, execID string, data []byte) error {
	return cl.call(ctx, "SendInput", with(id, execID, data))
}

func (cl *Client) CloseInput(ctx context.Context, id, execID string) error {
	return cl.call(ctx, "CloseInput", with(id, execID))
}

func (cl *Client) Signal(ctx context.Context, id, execID, signal string, processOnly bool) error {
	return cl.call(ctx, "Signal", with(id, execID, signal, processOnly))
}

func (cl *Client) Resize(ctx context.Context, id, execID string, size sandbox.TermSize) error {
	return cl.call(ctx, "Resize", with(id, execID, size))
}

func (cl *Client) Processes(ctx context.Context, id string) (v []sandbox.Process, info []sandbox.Task, err error) {
	err = cl.call(ctx, "Processes", with(id), &v, &info)
	return v, info, err
}

func (cl *Client) Wait(ctx context.Context, id, execID string) (v sandbox.ProcessEnd, err error) {
	err = cl.call(ctx, "Wait", with(id, execID), &v)
	return v, err
}

func (cl *Client) ReadFile(ctx context.Context, id, path string, offset, length int64) (v []byte, info sandbox.FileInfo, err error) {
	err = cl.call(ctx, "ReadFile", with(id, path, offset, length), &v, &info)
	return v, info, err
}

func (cl *Client) WriteFile(ctx context.Context, id, path string, data []byte, opt sandbox.WriteOptions) (v sandbox.FileInfo, err error) {
	err = cl.call(ctx, "WriteFile", with(id, path, data, opt), &v)
	return v, err
}

func (cl *Client) StatFile(ctx context.Context, id, path string) (v sandbox.FileInfo, err error) {
	err = cl.call(ctx, "StatFile", with(id, path), &v)
	return v, err
}

func (cl *Client) ListFiles(ctx context.Context, id, path string, opt sandbox.ListOptions) (files []sandbox.FileInfo, truncated bool, err error) {
	err = cl.call(ctx, "ListFiles", with(id, path, opt), &files, &truncated)
	return files, truncated, err
}

func (cl *Client) MakeDir(ctx context.Context, id, path string, opt sandbox.WriteOptions) (v sandbox.FileInfo, err error) {
	err = cl.call(ctx, "MakeDir", with(id, path, opt), &v)
	return v, err
}

func (cl *Client) MoveFile(ctx context.Context, id, from, to string) (v sandbox.FileInfo, err error) {
	err = cl.call(ctx, "MoveFile", with(id, from, to), &v)
	return v, err
}

func (cl *Client) RemoveFile(ctx context.Context, id, path string, recursive bool) error {
	return cl.call(ctx, "RemoveFile", with(id, path, recursive))
}

func (cl *Client) Chmod(ctx context.Context, id, path string, mode uint32, recursive bool) error {
	return cl.call(ctx, "Chmod", with(id, path, mode, recursive))
}

func (cl *Client) SetAttributes(ctx context.Context, id, path string, attrs map[string]string) (fi sandbox.FileInfo, err error) {
	err = cl.call(ctx, "SetAttributes", with(id, path, attrs), &fi)
	return fi, err
}

func (cl *Client) Chown(ctx context.Context, id, path, owner string, recursive bool) error {
	return cl.call(ctx, "Chown", with(id, path, owner, recursive))
}

func (cl *Client) Watch(ctx context.Context, id, path string, recursive bool) iter.Seq2[sandbox.FileChange, error] {
	return stream[sandbox.FileChange](cl, ctx, "Watch", id, path, recursive)
}

func (cl *Client) Upload(ctx context.Context, id string, to node.Upload, r io.Reader) error {
	return cl.upload(ctx, "Upload", with(id, to), r)
}

func (cl *Client) Download(ctx context.Context, id string, from node.Download, w io.Writer) error {
	return cl.download(ctx, "Download", with(id, from), w)
}

func (cl *Client) Dial(ctx context.Context, id string, port int) (node.Conn, error) {
	return cl.connect(ctx, "Dial", id, port)
}

func (cl *Client) Callbacks(ctx context.Context, id string, port int) iter.Seq2[node.Callback, error] {
	return stream[node.Callback](cl, ctx, "Callbacks", id, port)
}

func (cl *Client) OpenCallback(ctx context.Context, callback string) (node.Conn, error) {
	return cl.connect(ctx, "OpenCallback", callback)
}

func (cl *Client) PrepareSnapshot(ctx context.Context, id string, r node.SnapshotRequest) (v node.Prepared, err error) {
	err = cl.call(ctx, "PrepareSnapshot", with(id, r), &v)
	return v, err
}

func (cl *Client) CommitSnapshot(ctx context.Context, token string) error {
	return cl.call(ctx, "CommitSnapshot", with(token))
}

func (cl *Client) AbortSnapshot(ctx context.Context, token string) error {
	return cl.call(ctx, "AbortSnapshot", with(token))
}

func (cl *Client) PrepareImage(ctx context.Context, from sandbox.Snapshot, base sandbox.Image, op string) (v sandbox.Image, err error) {
	err = cl.call(ctx, "PrepareImage", with(from, base, op), &v)
	return v, err
}

func (cl *Client) Diff(ctx context.Context, id string, r sandbox.DiffRequest) (v sandbox.Diff, err error) {
	err = cl.call(ctx, "Diff", with(id, r), &v)
	return v, err
}

func (cl *Client) MarkFiles(ctx context.Context, id, mark string) error {
	return cl.call(ctx, "MarkFiles", with(id, mark))
}

func (cl *Client) Mount(ctx context.Context, id string, from sandbox.Snapshot, path string, unpack bool) error {
	return cl.call(ctx, "Mount", with(id, from, path, unpack))
}

func (cl *Client) Tar(ctx context.Context, c sandbox.Content, w io.Writer) error {
	return cl.download(ctx, "Tar", with(c), w)
}

func (cl *Client) Release(ctx context.Context, c sandbox.Content) error {
	return cl.call(ctx, "Release", with(c))
}

func (cl *Client) Verify(ctx context.Context, c sandbox.Content) (bytes int64, err error) {
	err = cl.call(ctx, "Verify", with(c), &bytes)
	return bytes, err
}

func (cl *Client) Blobs(ctx context.Context, manifests []string) (v map[string][]snapshot.Blob, err error) {
	err = cl.call(ctx, "Blobs", with(manifests), &v)
	return v, err
}

func (cl *Client) Collect(ctx context.Context, keep []string) (freed int64, err error) {
	err = cl.call(ctx, "Collect", with(keep), &freed)
	return freed, err
}

func (cl *Client) SetNetwork(ctx context.Context, id string, n sandbox.Network) (generation int64, err error) {
	err = cl.call(ctx, "SetNetwork", with(id, n), &generation)
	return generation, err
}

func (cl *Client) NetworkStatus(ctx context.Context, id string, flows int) (v sandbox.NetworkStatus, err error) {
	err = cl.call(ctx, "NetworkStatus", with(id, flows), &v)
	return v, err
}

func (cl *Client) PutSecrets(ctx context.Context, tenant string, secrets []sandbox.Secret) error {
	return cl.call(ctx, "PutSecrets", with(tenant, secrets))
}

func (cl *Client) UseSecrets(ctx context.Context, id string, names []string) (authority string, err error) {
	err = cl.call(ctx, "UseSecrets", with(id, names), &authority)
	return authority, err
}

func (cl *Client) Volumes() node.Volumes       { return volumes{cl} }
func (cl *Client) Recordings() node.Recordings { return recordings{cl} }
func (cl *Client) Images() node.Images         { return images{cl} }

type (
	volumes    struct{ *Client }
	recordings struct{ *Client }
	images     struct{ *Client }
)

func (cl volumes) Create(ctx context.Context, id string, size int64) error {
	return cl.call(ctx, "Volumes.Create", with(id, size))
}

func (cl volumes) CreateFrom(ctx context.Context, id string, size int64, c sandbox.Content) error {
	return cl.call(ctx, "Volumes.CreateFrom", with(id, size, c))
}

func (cl volumes) Clone(ctx context.Context, from, id string) error {
	return cl.call(ctx, "Volumes.Clone", with(from, id))
}

func (cl volumes) Snapshot(ctx context.Context, id string) (v sandbox.Content, err error) {
	err = cl.call(ctx, "Volumes.Snapshot", with(id), &v)
	return v, err
}

func (cl volumes) Status(ctx context.Context, ids []string) (v map[string]sandbox.VolumeContent, err error) {
	err = cl.call(ctx, "Volumes.Status", with(ids), &v)
	return v, err
}

func (cl volumes) List(ctx context.Context) (v []sandbox.VolumeContent, err error) {
	err = cl.call(ctx, "Volumes.List", nil, &v)
	return v, err
}

func (cl volumes) Delete(ctx context.Context, id string) error {
	return cl.call(ctx, "Volumes.Delete", with(id))
}

func (cl volumes) Resize(ctx context.Context, id string, size int64) (v int64, err error) {
	err = cl.call(ctx, "Volumes.Resize", with(id, size), &v)
	return v, err
}

func (cl volumes) ListFiles(ctx context.Context, id, path string, depth int) (files []sandbox.FileInfo, truncated bool, err error) {
	err = cl.call(ctx, "Volumes.ListFiles", with(id, path, depth), &files, &truncated)
	return files, truncated, err
}

func (cl volumes) ReadFile(ctx context.Context, id, path string) (v io.ReadCloser, info sandbox.FileInfo, err error) {
	v, err = cl.content(ctx, "Volumes.ReadFile", with(id, path), &info)
	return v, info, err
}

func (cl volumes) WriteFile(ctx context.Context, id, path string, r io.Reader, as sandbox.VolumeFile) (v sandbox.FileInfo, err error) {
	err = cl.upload(ctx, "Volumes.WriteFile", with(id, path, as), r, &v)
	return v, err
}

func (cl volumes) MakeDirectory(ctx context.Context, id, path string, parents bool, as sandbox.VolumeFile) (v sandbox.FileInfo, err error) {
	err = cl.call(ctx, "Volumes.MakeDirectory", with(id, path, parents, as), &v)
	return v, err
}

func (cl volumes) ChangeFile(ctx context.Context, id, path string, to sandbox.VolumeFile) (v sandbox.FileInfo, err error) {
	err = cl.call(ctx, "Volumes.ChangeFile", with(id, path, to), &v)
	return v, err
}

func (cl volumes) RemoveFile(ctx context.Context, id, path string, recursive bool) error {
	return cl.call(ctx, "Volumes.RemoveFile", with(id, path, recursive))
}

func (cl recordings) Status(ctx context.Context, ids []string) (v map[string]sandbox.Recording, err error) {
	err = cl.call(ctx, "Recordings.Status", with(ids), &v)
	return v, err
}

func (cl recordings) List(ctx context.Context) (v []sandbox.Recording, err error) {
	err = cl.call(ctx, "Recordings.List", nil, &v)
	return v, err
}

func (cl recordings) Delete(ctx context.Context, id string) error {
	return cl.call(ctx, "Recordings.Delete", with(id))
}

func (cl recordings) Exchanges(ctx context.Context, id string, after int64, limit int) (v []sandbox.RecordedExchange, err error) {
	err = cl.call(ctx, "Recordings.Exchanges", with(id, after, limit), &v)
	return v, err
}

func (cl recordings) Export(ctx context.Context, id string, har bool, w io.Writer) error {
	return cl.download(ctx, "Recordings.Export", with(id, har), w)
}

func (cl recordings) Import(ctx context.Context, id string, archive io.Reader) (v sandbox.Recording, err error) {
	err = cl.upload(ctx, "Recordings.Import", with(id), archive, &v)
	return v, err
}

func (cl images) Pull(ctx context.Context, who sandbox.RegistryAccess, ref, platform, op string) (v sandbox.Image, err error) {
	err = cl.call(ctx, "Images.Pull", with(who, ref, platform, op), &v)
	return v, err
}

func (cl images) Import(ctx context.Context, r io.Reader, op string) (v sandbox.Image, err error) {
	err = cl.upload(ctx, "Images.Import", with(op), r, &v)
	return v, err
}

func (cl images) Get(ctx context.Context, id string) (v sandbox.Image, err error) {
	err = cl.call(ctx, "Images.Get", with(id), &v)
	return v, err
}

func (cl images) Delete(ctx context.Context, id string) error {
	return cl.call(ctx, "Images.Delete", with(id))
}

func (cl images) Contents(ctx context.Context) (v map[string]int64, err error) {
	err = cl.call(ctx, "Images.Contents", nil, &v)
	return v, err
}

func (cl images) Keep(ctx context.Context, r io.Reader) (v sandbox.Content, err error) {
	err = cl.upload(ctx, "Images.Keep", nil, r, &v)
	return v, err
}

func (cl images) Copy(ctx context.Context, c sandbox.Copying) (v sandbox.Content, digest string, err error) {
	err = cl.call(ctx, "Images.Copy", with(c), &v, &digest)
	return v, digest, err
}

func (cl images) Compose(ctx context.Context, c sandbox.Composition, op string) (v sandbox.Image, err error) {
	err = cl.call(ctx, "Images.Compose", with(c, op), &v)
	return v, err
}

func (cl images) Push(ctx context.Context, who sandbox.RegistryAccess, id, ref, op string) (v string, err error) {
	err = cl.call(ctx, "Images.Push", with(who, id, ref, op), &v)
	return v, err
}

var (
	_ node.Node       = (*Client)(nil)
	_ node.Volumes    = volumes{}
	_ node.Recordings = recordings{}
	_ node.Images     = images{}
)
