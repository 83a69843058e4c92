package agent

import (
	"context"
	"errors"
	"io"
	"net"
	"net/netip"
	"slices"

	"github.com/cove-sandbox/cove/egress/policy"
	"github.com/cove-sandbox/cove/node"
	"github.com/cove-sandbox/cove/sandbox"
	"github.com/cove-sandbox/cove/snapshot"
)

// Library is an Images that gets content from elsewhere.
type Library interface {
	PullAs(ctx context.Context, who sandbox.RegistryAccess, ref, platform string, progress func(sandbox.Progress)) (sandbox.Image, error)
	ImportTar(ctx context.Context, r io.Reader, progress func(sandbox.Progress)) (sandbox.Image, error)
	Get(id string) (sandbox.Image, error)
	Delete(ctx context.Context, id string) error
	Contents(ctx context.Context) (map[string]int64, error)
}

// Builder is a Library that makes images step by step. Contents are the node's,
// so it is given how to read them; where it may fetch from is the node's to say.
type Builder interface {
	CopyLayer(ctx context.Context, c sandbox.Copying, open func(sandbox.Content) (io.ReadCloser, error),
		allow func(name string, to netip.AddrPort) bool, w io.Writer) (digest string, err error)
	Compose(ctx context.Context, c sandbox.Composition, open func(sandbox.Content) (io.ReadCloser, error), progress func(sandbox.Progress)) (sandbox.Image, error)
	Unpacked(r io.Reader) (io.ReadCloser, error)
	Push(ctx context.Context, who sandbox.RegistryAccess, id, ref string, progress func(sandbox.Progress)) (digest string, err error)
}

// Images are the node's.
func (n *Node) Images() node.Images { return images{n} }

type images struct{ n *Node }

// library is an error where images can only be used.
func (i images) library() (Library, error) {
	if l, ok := i.n.cfg.Images.(Library); ok {
		return l, nil
	}
	return nil, sandbox.Errorf(sandbox.Unsupported, "node.images", "this node gets no images")
}

func (i images) Pull(ctx context.Context, who sandbox.RegistryAccess, ref, platform, op string) (sandbox.Image, error) {
	l, err := i.library()
	if err != nil {
		return sandbox.Image{}, err
	}
	report, end := i.n.progress.begin(op)
	defer end()
	return l.PullAs(ctx, who, ref, platform, report)
}

func (i images) Import(ctx context.Context, r io.Reader, op string) (sandbox.Image, error) {
	l, err := i.library()
	if err != nil {
		return sandbox.Image{}, err
	}
	report, end := i.n.progress.begin(op)
	defer end()
	return l.ImportTar(ctx, r, report)
}

func (i images) Get(_ context.Context, id string) (sandbox.Image, error) {
	l, err := i.library()
	if err != nil {
		return sandbox.Image{}, err
	}
	return l.Get(id)
}

func (i images) Delete(ctx context.Context, id string) error {
	l, err := i.library()
	if err != nil {
		return err
	}
	return l.Delete(ctx, id)
}

func (i images) Contents(ctx context.Context) (map[string]int64, error) {
	l, err := i.library()
	if err != nil {
		return nil, err
	}
	return l.Contents(ctx)
}

// builder is an error where no image can be made step by step.
func (i images) builder(op string) (Builder, error) {
	b, ok := i.n.cfg.Images.(Builder)
	if !ok || i.n.states == nil {
		return nil, sandbox.Errorf(sandbox.Unsupported, op, "this node builds no images")
	}
	return b, nil
}

func (i images) Keep(ctx context.Context, r io.Reader) (sandbox.Content, error) {
	const op = "node.keep"
	b, err := i.builder(op)
	if err != nil {
		return sandbox.Content{}, err
	}
	plain, err := b.Unpacked(r)
	if err != nil {
		return sandbox.Content{}, sandbox.WithOp(op, err)
	}
	defer plain.Close()
	c, err := i.store(ctx, plain)
	return c, sandbox.WithOp(op, err)
}

// store puts a plain tar into the content store.
func (i images) store(ctx context.Context, r io.Reader) (sandbox.Content, error) {
	states := i.n.states
	c, err := states.pack(sandbox.Content{}, func() (snapshot.Manifest, error) {
		return snapshot.Filesystem{SpoolDir: states.cfg.Plain}.Pack(ctx, states.cfg.Store, r)
	})
	if err != nil {
		i.n.litter.Store(true)
	}
	return c, err
}

// open reads content as a tar.
func (i images) open(ctx context.Context) func(sandbox.Content) (io.ReadCloser, error) {
	return func(c sandbox.Content) (io.ReadCloser, error) {
		pr, pw := io.Pipe()
		go func() { pw.CloseWithError(i.n.states.tar(ctx, c, pw)) }()
		return pr, nil
	}
}

func (i images) Copy(ctx context.Context, c sandbox.Copying) (layer sandbox.Content, digest string, err error) {
	const op = "node.copy"
	b, err := i.builder(op)
	if err != nil {
		return layer, "", err
	}
	allow := func(string, netip.AddrPort) bool { return false }
	if c.Fetch != nil {
		p, err := policy.Compile(c.Fetch.Network)
		if err != nil {
			return layer, "", sandbox.WithOp(op, err)
		}
		allow = func(name string, to netip.AddrPort) bool {
			return p.Decide(policy.Flow{Name: policy.Name(name), Addr: to.Addr(), Port: to.Port(), Protocol: sandbox.TCP}, ownAddress).Allow
		}
	}
	pr, pw := io.Pipe()
	copied := make(chan error, 1)
	go func() {
		var err error
		digest, err = b.CopyLayer(ctx, c, i.open(ctx), allow, pw)
		pw.CloseWithError(err)
		copied <- err
	}()
	layer, err = i.store(ctx, pr)
	pr.CloseWithError(errStopped)
	if cerr := <-copied; cerr != nil && !errors.Is(cerr, errStopped) {
		err = cerr // why the tar broke off
	}
	if err != nil {
		i.n.letGo(layer)
		return sandbox.Content{}, "", sandbox.WithOp(op, err)
	}
	return layer, digest, nil
}

// ownAddress says whether an address is this machine's. Where that cannot be
// told, every one could be.
func ownAddress(a netip.Addr) bool {
	own, err := net.InterfaceAddrs()
	return err != nil || slices.ContainsFunc(own, func(n net.Addr) bool {
		p, err := netip.ParsePrefix(n.String())
		return err == nil && p.Addr().Unmap() == a
	})
}

func (i images) Compose(ctx context.Context, c sandbox.Composition, work string) (sandbox.Image, error) {
	const op = "node.compose"
	b, err := i.builder(op)
	if err != nil {
		return sandbox.Image{}, err
	}
	report, end := i.n.progress.begin(work)
	defer end()
	img, err := b.Compose(ctx, c, i.open(ctx), report)
	return img, sandbox.WithOp(op, err)
}

func (i images) Push(ctx context.Context, who sandbox.RegistryAccess, id, ref, work string) (string, error) {
	const op = "node.push"
	b, err := i.builder(op)
	if err != nil {
		return "", err
	}
	report, end := i.n.progress.begin(work)
	defer end()
	digest, err := b.Push(ctx, who, id, ref, report)
	return digest, sandbox.WithOp(op, err)
}

var _ node.Node = (*Node)(nil)
