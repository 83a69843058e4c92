package agent

import (
	"context"
	"errors"
	"io"
	"os"
	"path/filepath"
	"time"

	"github.com/cove-sandbox/cove/cas"
	"github.com/cove-sandbox/cove/runtime"
	"github.com/cove-sandbox/cove/sandbox"
	"github.com/cove-sandbox/cove/snapshot"
)

// lineage is the checkpoint that a kernel was restored from or has made last. The next
// one that is stored leaves out what that one has. A node that starts does not know it
// of the kernels it adopts: their next one is whole.
type lineage struct {
	kernel   runtime.Kernel
	pages    runtime.Pages
	manifest string
}

// spareGrowth is how much of a pages file may be there for nothing, beside as much
// again as there was: small ones are not written anew for some pages.
const spareGrowth = 64 << 20

// descend notes what k's next checkpoint may leave out. Content that is not
// stored is not named by anybody later.
func (n *Node) descend(b *box, k runtime.Kernel, cp runtime.Checkpoint, manifest string) {
	n.mu.Lock()
	defer n.mu.Unlock()
	b.lineage = nil
	if cp.Pages != nil && manifest != "" {
		b.lineage = &lineage{kernel: k, pages: *cp.Pages, manifest: manifest}
	}
}

// since is what a checkpoint of k may leave out; nil: nothing. done is called when it is stored.
// For one that is wanted soon the files of the checkpoint it would continue must be there too,
// where files are kept: else a wake would read all of it from the store.
func (n *Node) since(ctx context.Context, b *box, k runtime.Kernel, soon bool) (l *lineage, done func()) {
	n.mu.Lock()
	l = b.lineage
	n.mu.Unlock()
	none := func() {}
	if l == nil || l.kernel != k || l.pages.Size > 2*l.pages.Whole+spareGrowth {
		return nil, none
	}
	if soon && n.states.cfg.KeepPlain >= 0 && !n.states.extensible(l) {
		return nil, none
	}
	done, ok := n.states.borrow(ctx, cas.ID(l.manifest))
	if !ok {
		return nil, none
	}
	return l, done
}

// borrow holds content until done, if it is stored still.
func (c *contents) borrow(ctx context.Context, id cas.ID) (done func(), ok bool) {
	c.mu.Lock()
	was, held := c.mu.pending[id]
	c.mu.Unlock()
	if !c.holdIfStored(ctx, id) {
		return nil, false
	}
	c.mu.Lock()
	now := c.mu.pending[id]
	c.mu.Unlock()
	return func() {
		c.mu.Lock()
		defer c.mu.Unlock()
		if !c.mu.pending[id].Equal(now) { // somebody else holds it since
			return
		}
		delete(c.mu.pending, id)
		if held && time.Since(was) < pendingFor {
			c.mu.pending[id] = was
		}
	}, true
}

// continued is what cp continues, as the store names it.
func (l *lineage) continued(cp runtime.Checkpoint) *snapshot.Since {
	if cp.Pages == nil || cp.Pages.Offset == 0 {
		return nil
	}
	return &snapshot.Since{ID: cas.ID(l.manifest), Name: runtime.PagesFile, Size: cp.Pages.Offset}
}

// extensible says whether the files of l are kept, and nobody has continued them yet.
func (c *contents) extensible(l *lineage) bool {
	c.mu.Lock()
	d := c.mu.plain[l.manifest]
	c.mu.Unlock()
	if d == nil {
		return false
	}
	select {
	case <-d.ready:
	default:
		return false
	}
	st, err := os.Stat(filepath.Join(d.path, runtime.PagesFile))
	return err == nil && st.Size() == l.pages.Size
}

// extend makes the pages in dir whole: those it continues, with its own behind them, in one
// file that both checkpoints name. Kernels that have the file mapped see nothing of
// it: all they know of is before its end. Only a node writes it, one at a time. false:
// it cannot be, and dir is as it was.
func (c *contents) extend(l *lineage, dir string, cp runtime.Checkpoint) bool {
	c.mu.Lock()
	d := c.mu.plain[l.manifest]
	if d == nil {
		c.mu.Unlock()
		return false
	}
	d.refs++ // not removed meanwhile
	c.mu.Unlock()
	defer func() {
		keep := c.keepPlain()
		c.mu.Lock()
		defer c.unlock()
		d.refs--
		c.removeLocked(d)
		c.trimLocked(keep)
	}()
	if <-d.ready; d.err != nil {
		return false
	}
	c.extending.Lock()
	defer c.extending.Unlock()
	whole, own := filepath.Join(d.path, runtime.PagesFile), filepath.Join(dir, runtime.PagesFile)
	st, err := os.Stat(whole)
	if err != nil || stampOf(d.path) != d.stamp {
		return false
	}
	if err := errors.Join(appendFile(whole, own, cp.Pages.Offset), os.Chtimes(whole, time.Time{}, st.ModTime())); err != nil {
		return false
	}
	// In this order a crash leaves a directory that is emptied at the next start.
	next := own + ".whole"
	if err := os.Link(whole, next); err != nil {
		return false
	}
	return os.Rename(next, own) == nil
}

// ownPages has the pages of a fork in memory be the node's. The sentry wrote them, so that
// they were charged to the parent, for as long as a child lives.
func ownPages(dir string) error {
	path := filepath.Join(dir, runtime.PagesFile)
	if err := os.WriteFile(path+".own", nil, 0o600); err != nil {
		return err
	}
	if err := appendFile(path+".own", path, 0); err != nil {
		return err
	}
	return os.Rename(path+".own", path)
}

// appendFile puts the content of one file behind another's, which has size bytes.
func appendFile(to, from string, size int64) (err error) {
	w, err := os.OpenFile(to, os.O_WRONLY, 0)
	if err != nil {
		return err
	}
	defer func() {
		if cerr := w.Close(); err == nil {
			err = cerr
		}
	}()
	st, err := w.Stat()
	if err != nil {
		return err
	}
	if st.Size() != size {
		return sandbox.Errorf(sandbox.Conflict, "", "%s has been continued", to)
	}
	r, err := os.Open(from)
	if err != nil {
		return err
	}
	defer r.Close()
	if _, err := w.Seek(size, io.SeekStart); err != nil {
		return err
	}
	if _, err = io.Copy(w, r); err != nil {
		_ = w.Truncate(size) // nobody has it mapped beyond
	}
	return err
}
