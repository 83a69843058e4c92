package server

import (
	"cmp"
	"context"
	"crypto/rand"
	"errors"
	"slices"
	"sync"

	"github.com/cove-sandbox/cove/node"
	"github.com/cove-sandbox/cove/sandbox"
	"github.com/cove-sandbox/cove/store"
)

// imageBook resolves names to images for Create without a query, shares pulls,
// and sees to it that content is never deleted under a sandbox being made.
//
// A create holds its image (using) from the moment it has resolved it until
// its record is in the store, which from then on protects it. Content goes
// only while nobody holds it, and whoever wants it meanwhile waits (deleting)
// and then asks the store again. A lock around both would have made every
// create wait for a prune.
type imageBook struct {
	store store.Images
	node  node.Node                                // whose the content is
	bound func(ctx context.Context) (int64, error) // bytes of images that the tenant in scope may name

	onFree func() // nobody holds a loose image any more, and perhaps nobody uses it

	mu struct {
		sync.Mutex
		cache    map[imageRef]sandbox.Image // by name as asked for, and who asked; only what exists
		gen      uint64                     // counts invalidations: a look-up that began before one is not kept
		using    map[string]int             // by image id
		deleting map[string]chan struct{}   // by image id; closed when decided
		pulls    map[pullKey]*sharedPull
		loose    map[string]bool // by image id: goes when nobody uses it
	}
}

// imageRef is a name as one scope knows it.
type imageRef struct {
	scope store.Scope
	name  string
}

// pullKey is what pulls are shared by. Who one is to the registry is part of it:
// nobody gets an image by the credentials of another.
type pullKey struct {
	who           sandbox.RegistryAccess
	ref, platform string
}

type sharedPull struct {
	pull
	waiters int // guarded by imageBook.mu
}

func (b *imageBook) init(st store.Images, n node.Node, bound func(context.Context) (int64, error), onFree func()) {
	b.store, b.node, b.bound, b.onFree = st, n, bound, onFree
	b.mu.loose = map[string]bool{}
	b.mu.cache = map[imageRef]sandbox.Image{}
	b.mu.using = map[string]int{}
	b.mu.deleting = map[string]chan struct{}{}
	b.mu.pulls = map[pullKey]*sharedPull{}
}

func (b *imageBook) invalidate() {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.invalidateLocked()
}

func (b *imageBook) invalidateLocked() {
	b.mu.gen++
	clear(b.mu.cache)
}

// find asks the store, and on a miss says what was probably meant.
func (b *imageBook) find(ctx context.Context, name string) (sandbox.Image, error) {
	img, err := b.store.GetImage(ctx, name)
	if err == nil || !errors.Is(err, sandbox.ErrImageNotFound) {
		return img, err
	}
	e := &sandbox.Error{Class: sandbox.ImageNotFound, Msg: "no image '" + name + "'",
		Hint: `"cove image ls" lists what is here; "cove image pull ` + name + `" fetches it from its registry`}
	var names []string
	if imgs, lerr := b.store.ListImages(ctx); lerr == nil {
		for _, i := range imgs {
			names = append(names, i.Names...)
		}
	}
	slices.Sort(names)
	if did := sandbox.DidYouMean(name, names); did != "" {
		e.Msg += "; " + did
	}
	return sandbox.Image{}, e
}

// acquire resolves a name, for the server itself an id, and holds the image until
// release.
func (b *imageBook) acquire(ctx context.Context, name string) (img sandbox.Image, release func(), err error) {
	ref := imageRef{store.ScopeOf(ctx), name}
	for {
		b.mu.Lock()
		img, known := b.mu.cache[ref]
		gen := b.mu.gen
		b.mu.Unlock()
		if !known {
			if img, err = b.find(ctx, name); err != nil {
				return img, nil, err
			}
			if ref.scope.All() && img.ID != name { // the server means ids, whatever somebody called an image of theirs
				return img, nil, &sandbox.Error{Class: sandbox.ImageNotFound, Msg: "no image " + name}
			}
			here, err := b.has(ctx, img.ID)
			if err != nil {
				return img, nil, err
			}
			if !here {
				return img, nil, &sandbox.Error{Class: sandbox.ImageNotFound, Msg: "the content of image '" + name + "' is not on this node",
					Hint: `fetch it again with "cove image pull ` + name + `"`}
			}
		}
		wait, ok := b.hold(ref, img, gen)
		if ok {
			return img, func() { b.drop(img.ID) }, nil
		}
		select {
		case <-wait:
		case <-ctx.Done():
			return img, nil, ctx.Err()
		}
	}
}

// hold counts a user of img if what was looked up at gen still holds;
// otherwise the caller waits and looks again.
func (b *imageBook) hold(ref imageRef, img sandbox.Image, gen uint64) (wait <-chan struct{}, ok bool) {
	b.mu.Lock()
	defer b.mu.Unlock()
	if ch := b.mu.deleting[img.ID]; ch != nil {
		return ch, false
	}
	if b.mu.gen != gen {
		return closed, false
	}
	// An id is in a tenant's sight only while it uses it, so that is asked anew.
	if ref.scope.All() || ref.name != img.ID {
		b.mu.cache[ref] = img
	}
	b.mu.using[img.ID]++
	return nil, true
}

// closed never makes anybody wait.
var closed = func() chan struct{} { c := make(chan struct{}); close(c); return c }()

func (b *imageBook) drop(id string) {
	b.mu.Lock()
	if b.mu.using[id]--; b.mu.using[id] == 0 {
		delete(b.mu.using, id)
	}
	b.mu.Unlock()
	b.free(id)
}

// free has an image looked at that somebody used.
func (b *imageBook) free(id string) {
	b.mu.Lock()
	free := b.mu.loose[id] && b.mu.using[id] == 0
	b.mu.Unlock()
	if free {
		b.onFree()
	}
}

// setLoose says of images whether they go when nobody uses them.
func (b *imageBook) setLoose(loose map[string]bool) {
	b.mu.Lock()
	defer b.mu.Unlock()
	for id, is := range loose {
		if is {
			b.mu.loose[id] = true
		} else {
			delete(b.mu.loose, id)
		}
	}
}

func (b *imageBook) anyLoose() bool {
	b.mu.Lock()
	defer b.mu.Unlock()
	return len(b.mu.loose) > 0
}

// errContentGone says that content was pruned before it got its name.
var errContentGone = &sandbox.Error{Class: sandbox.Conflict, Msg: "the image was pruned while it was being named", Hint: "ask again"}

// reserve keeps content, there or not, from being removed until drop.
func (b *imageBook) reserve(ctx context.Context, id string) error {
	for {
		b.mu.Lock()
		wait := b.mu.deleting[id]
		if wait == nil {
			b.mu.using[id]++
		}
		b.mu.Unlock()
		if wait == nil {
			return nil
		}
		select {
		case <-wait:
		case <-ctx.Done():
			return ctx.Err()
		}
	}
}

// publishWithin gives content a name, unless it was pruned meanwhile or its
// tenant would name more than most bytes.
func (b *imageBook) publishWithin(ctx context.Context, img sandbox.Image, name string, most int64) (sandbox.Image, error) {
	if err := b.reserve(ctx, img.ID); err != nil {
		return sandbox.Image{}, err
	}
	defer b.drop(img.ID)
	if here, err := b.has(ctx, img.ID); err != nil || !here {
		return sandbox.Image{}, cmp.Or[error](err, errContentGone)
	}
	err := b.store.PutImageWithin(ctx, img, name, most)
	b.invalidate()
	if err != nil {
		return sandbox.Image{}, err
	}
	got, err := b.store.GetImage(ctx, img.ID)
	if errors.Is(err, sandbox.ErrImageNotFound) {
		// Its name was taken away again at once: it was there.
		img.Names = []string{name}
		return img, nil
	}
	return got, err
}

// collect removes an image's record and content if no name, no sandbox and no
// snapshot uses it, and says whether it did. With prepared the snapshots that
// it was prepared of do not count.
func (b *imageBook) collect(ctx context.Context, id string, prepared bool) (gone bool, err error) {
	b.mu.Lock()
	if b.mu.using[id] > 0 || b.mu.deleting[id] != nil {
		b.mu.Unlock()
		return false, nil
	}
	decided := make(chan struct{})
	b.mu.deleting[id] = decided
	b.mu.Unlock()
	defer func() {
		b.mu.Lock()
		delete(b.mu.deleting, id)
		b.invalidateLocked()
		b.mu.Unlock()
		close(decided)
	}()

	// The store decides: it sees names and live sandboxes in one transaction.
	remove := b.store.RemoveImage
	if prepared {
		remove = b.store.RemovePreparedImage
	}
	err = remove(asServer(ctx), id)
	switch {
	case errors.Is(err, sandbox.ErrPrecondition):
		return false, nil
	case err != nil && !errors.Is(err, sandbox.ErrImageNotFound):
		return false, err
	}
	// Without a record nobody can ask for it; a crash here leaves content for
	// the next start or prune. The caller leaving does not stop half-way.
	if err := b.node.Images().Delete(context.WithoutCancel(ctx), id); err != nil && !errors.Is(err, sandbox.ErrImageNotFound) && !errors.Is(err, sandbox.ErrNotFound) {
		return false, err
	}
	b.mu.Lock()
	delete(b.mu.loose, id)
	b.mu.Unlock()
	return true, nil
}

// has says whether content is on the node.
func (b *imageBook) has(ctx context.Context, id string) (bool, error) {
	_, err := b.node.Images().Get(ctx, id)
	if errors.Is(err, sandbox.ErrImageNotFound) {
		return false, nil
	}
	return err == nil, err
}

// join follows the pull of a reference, beginning it if there is none. The
// pull is stopped when the last follower leaves.
func (b *imageBook) join(who sandbox.RegistryAccess, ref, platform string) (p *pull, leave func()) {
	key := pullKey{who, ref, platform}
	b.mu.Lock()
	defer b.mu.Unlock()
	sp := b.mu.pulls[key]
	if sp == nil {
		ctx, cancel := context.WithCancel(context.Background())
		sp = &sharedPull{pull: pull{cancel: cancel, done: make(chan struct{})}}
		b.mu.pulls[key] = sp
		go func() {
			op := "pull-" + rand.Text()
			go follow(ctx, b.node, op, sp.progress.Set)
			sp.img, sp.err = b.node.Images().Pull(ctx, who, ref, platform, op)
			b.mu.Lock()
			if b.mu.pulls[key] == sp {
				delete(b.mu.pulls, key)
			}
			b.mu.Unlock()
			close(sp.done)
		}()
	}
	sp.waiters++
	return &sp.pull, func() {
		b.mu.Lock()
		sp.waiters--
		last := sp.waiters == 0
		if last && b.mu.pulls[key] == sp {
			delete(b.mu.pulls, key)
		}
		b.mu.Unlock()
		if last {
			sp.cancel()
			<-sp.done // a pull has an owner until it has stopped
		}
	}
}
