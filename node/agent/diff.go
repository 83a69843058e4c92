package agent

import (
	"archive/tar"
	"cmp"
	"context"
	"crypto/sha256"
	"errors"
	"io"
	"path"
	"slices"
	"strings"
	"time"

	"github.com/cove-sandbox/cove/runtime"
	"github.com/cove-sandbox/cove/sandbox"
)

// Comparer is an Images that can say what differs between an image with one layer over
// it and with another; see image.Library.
type Comparer interface {
	Compare(ctx context.Context, id string, before, now *sandbox.UpperLayer, limit int) (d sandbox.Diff, unsure []string, err error)
}

// beginning is what is known of the files of a sandbox when nothing in it had run yet.
// The zero value is nothing: an earlier process made it.
type beginning struct {
	// at is the clock inside. What was in the layer by then is ours: names of hosts,
	// resolvers, authorities.
	at time.Time
	// layer is what came with memory; nil = the files are those of the image.
	layer *sandbox.UpperLayer
}

// ours are the files that are written into a container before anything runs, for
// sandboxes of an earlier process, of which beginning knows nothing.
var ours = []string{"/etc/hosts", "/etc/hostname", "/etc/resolv.conf"}

// marks of a sandbox are layers to compare with, one for each step under way.
const mostMarks = 64

// Diff says what changed in the files of a sandbox. See node.State.
func (n *Node) Diff(ctx context.Context, id string, r sandbox.DiffRequest) (d sandbox.Diff, err error) {
	const op = "sandbox.diff" // as its only caller calls it
	if err := n.call(); err != nil {
		return d, err
	}
	defer n.calls.Done()
	began := time.Now()
	ctx, cancel := context.WithTimeout(ctx, sandbox.DiffTime+10*time.Second) // the sentry stops by itself before
	defer cancel()
	b, release, err := n.hold(ctx, id)
	if err != nil {
		return d, err
	}
	defer release()
	comparer, ok := n.cfg.Images.(Comparer)
	if !ok {
		return d, sandbox.Errorf(sandbox.Unsupported, op, "this node cannot compare images")
	}
	n.mu.Lock()
	k, image, begin, parent := b.kernel, b.sb.ImageID, b.beginning, b.sb.Lineage.Parent
	mark := b.marks[r.Mark]
	delete(b.marks, r.Mark)
	n.mu.Unlock()

	query := runtime.LayerQuery{Most: sandbox.MaxLayer, Until: began.Add(sandbox.DiffTime), Hash: r.Hash || r.Snapshot != nil, HashMost: sandbox.MaxDiffBytes}
	var before *sandbox.UpperLayer
	switch {
	case r.Mark != "":
		if mark == nil {
			return d, sandbox.Errorf(sandbox.NotFound, op, "no mark of sandbox %s is called %.80q", id, r.Mark)
		}
		before = mark
	case r.Snapshot != nil && r.Snapshot.Content.Image == image: // it was made of it
		begin, r.Snapshot = beginning{at: begin.at}, nil
		d.Since = sandbox.SinceCreate
	case r.Snapshot != nil:
		if r.Snapshot.Content.Base != image {
			return d, sandbox.Errorf(sandbox.Precondition, op, "snapshot %s is over another image than the sandbox's files are", r.Snapshot.ID).
				WithHint("a snapshot that was taken of this sandbox since it was last restored is accepted, or the one it came from")
		}
		if before, err = n.layerOf(ctx, r.Snapshot.Content); err != nil {
			return d, sandbox.WithOp(op, err)
		}
	case r.Since != sandbox.SinceImage && begin.at.IsZero() && parent != "":
		return d, sandbox.Errorf(sandbox.Precondition, op, "the server was started again since, and what sandbox %s began with is not known any more", id).
			WithHint("ask what changed since its image (--since image), or since a filesystem snapshot")
	default:
		before = begin.layer
	}
	now, err := n.listLayer(ctx, b, k, query)
	if err != nil {
		return d, sandbox.WithOp(op, err)
	}
	if r.Mark == "" && r.Snapshot == nil {
		switch {
		case r.Since == sandbox.SinceImage:
			before = begin.untouched(&sandbox.UpperLayer{}, now)
		case begin.layer == nil:
			before = begin.untouched(&sandbox.UpperLayer{}, now)
		}
	}
	limit := cmp.Or(r.Limit, sandbox.DiffEntries)
	d, unsure, err := comparer.Compare(ctx, image, before, now, limit)
	if err == nil && len(unsure) > 0 && !query.Hash {
		query.Hash, query.Only = true, unsure
		if now, err = n.listLayer(ctx, b, k, query); err == nil {
			d, _, err = comparer.Compare(ctx, image, before, now, limit)
		}
	}
	if err != nil {
		return d, sandbox.WithOp(op, err)
	}
	d.Since, d.Took = cmp.Or(r.Since, sandbox.SinceCreate), time.Since(began)
	if r.Snapshot != nil {
		d.Since = r.Snapshot.ID
	}
	return d, nil
}

// untouched adds to a layer what of another was there before anything ran. Removed names
// share one inode and its times: nothing of ours is one.
func (g beginning) untouched(to, of *sandbox.UpperLayer) *sandbox.UpperLayer {
	for _, e := range of.Entries {
		switch {
		case e.Whiteout:
		case g.at.IsZero() && slices.Contains(ours, e.Name), !g.at.IsZero() && e.Ctime <= g.at.UnixNano():
			to.Entries = append(to.Entries, e)
		}
	}
	return to
}

// MarkFiles remembers the files of a sandbox as they are, for a Diff by that name, which
// forgets them.
func (n *Node) MarkFiles(ctx context.Context, id, mark string) error {
	const op = "node.mark"
	if err := n.call(); err != nil {
		return err
	}
	defer n.calls.Done()
	b, release, err := n.hold(ctx, id)
	if err != nil {
		return err
	}
	defer release()
	n.mu.Lock()
	k := b.kernel
	n.mu.Unlock()
	layer, err := n.listLayer(ctx, b, k, runtime.LayerQuery{Most: sandbox.MaxLayer, Until: time.Now().Add(sandbox.DiffTime)})
	if err != nil {
		return sandbox.WithOp(op, err)
	}
	n.mu.Lock()
	defer n.mu.Unlock()
	for old := range b.marks { // of a step that never ran
		if len(b.marks) < mostMarks {
			break
		}
		delete(b.marks, old)
	}
	if b.marks == nil {
		b.marks = map[string]*sandbox.UpperLayer{}
	}
	b.marks[mark] = layer
	return nil
}

func (n *Node) listLayer(ctx context.Context, b *box, k runtime.Kernel, q runtime.LayerQuery) (*sandbox.UpperLayer, error) {
	l, ok := k.(runtime.LayerLister)
	if !ok {
		return nil, b.class.unsupported("tell what a sandbox changed")
	}
	layer, err := l.ListLayer(ctx, q)
	return layer, n.explain(b, k, err)
}

// begins notes what the files of a sandbox are before anything runs in a kernel.
// memory = they came with it.
func (n *Node) begins(ctx context.Context, b *box, k runtime.Kernel, memory bool) {
	g := beginning{at: b.clock.reading()}
	if memory {
		var err error
		if g.layer, err = n.listLayer(ctx, b, k, runtime.LayerQuery{Most: sandbox.MaxLayer, Until: time.Now().Add(sandbox.DiffTime)}); err != nil {
			if !errors.Is(err, sandbox.ErrUnsupported) {
				n.log.Warn("what a sandbox began with is not known", "sandbox", b.id, "err", err)
			}
			g = beginning{}
		}
	}
	n.mu.Lock()
	defer n.mu.Unlock()
	b.beginning, b.marks = g, nil
}

// layerOf reads the layer that a filesystem snapshot holds.
func (n *Node) layerOf(ctx context.Context, c sandbox.Content) (l *sandbox.UpperLayer, err error) {
	if n.states == nil {
		return nil, sandbox.Errorf(sandbox.Unsupported, "node.diff", "this node keeps no state")
	}
	err = n.states.piped(ctx, c, func(r io.Reader) error {
		l, err = readTarLayer(r)
		return err
	})
	return l, err
}

func readTarLayer(r io.Reader) (*sandbox.UpperLayer, error) {
	l, at, read := &sandbox.UpperLayer{}, map[string]int{}, int64(0)
	for t := tar.NewReader(r); ; {
		h, err := t.Next()
		if err == io.EOF {
			return l, nil
		}
		if err != nil {
			return nil, err
		}
		if len(l.Entries) >= sandbox.MaxLayer {
			l.Truncated = true
			return l, nil
		}
		e := sandbox.LayerEntry{Name: layerName(h.Name), Mode: uint32(h.Mode) & 0o7777, UID: uint32(h.Uid), GID: uint32(h.Gid), Size: h.Size, Mtime: h.ModTime.UnixNano(),
			Opaque: h.PAXRecords["SCHILY.xattr.trusted.overlay.opaque"] == "y"}
		switch h.Typeflag {
		case tar.TypeDir:
			e.Mode |= 0o040000
		case tar.TypeSymlink:
			e.Mode |= 0o120000
			e.Target, e.Size = h.Linkname, int64(len(h.Linkname))
		case tar.TypeFifo:
			e.Mode |= 0o010000
		case tar.TypeBlock:
			e.Mode |= 0o060000
		case tar.TypeChar:
			e.Mode |= 0o020000
			e.Whiteout = h.Devmajor == 0 && h.Devminor == 0
		case tar.TypeLink:
			i, ok := at[layerName(h.Linkname)]
			if !ok {
				return nil, sandbox.Errorf(sandbox.Corrupt, "node.diff", "%.300q is a link to nothing", h.Name)
			}
			e = l.Entries[i]
			e.Name = layerName(h.Name)
		default:
			e.Mode |= 0o100000
			if read += h.Size; read > sandbox.MaxDiffBytes {
				l.Truncated = true
				break
			}
			sum := sha256.New()
			if _, err := io.Copy(sum, t); err != nil {
				return nil, err
			}
			e.Hash = sum.Sum(nil)
		}
		at[e.Name] = len(l.Entries)
		l.Entries = append(l.Entries, e)
	}
}

func layerName(name string) string {
	name = path.Clean("/" + name)
	return strings.TrimSuffix(name, "/")
}
