package server

import (
	"context"
	"errors"
	"slices"
	"sync"

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
	store   store.Images
	library ImageLibrary

	mu       sync.Mutex
	cache    map[imageRef]sandbox.Image // by name as asked for, and who asked; only what exists
	gen      uint64                     // counts invalidations: a look-up that began before one is not kept
	using    map[string]int             // by image id
	deleting map[string]chan struct{}   // by image id; closed when decided
	pulls    map[pullKey]*sharedPull
	loose    map[string]bool // by image id: goes when nobody uses it
	onFree   func()          // nobody holds a loose image any more, and perhaps nobody uses it
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

func (b *imageBook) init(st store.Images, lib ImageLibrary, onFree func()) {
	b.store, b.library, b.onFree = st, lib, onFree
	b.loose = map[string]bool{}
	b.cache = map[imageRef]sandbox.Image{}
	b.using = map[string]int{}
	b.deleting = map[string]chan struct{}{}
	b.pulls = map[pullKey]*sharedPull{}
}

func (b *imageBook) invalidate() {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.invalidateLocked()
}

func (b *imageBook) invalidateLocked() {
	b.gen++
	clear(b.cache)
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

// acquire resolves a name and holds the image until release.
func (b *imageBook) acquire(ctx context.Context, name string) (img sandbox.Image, release func(), err error) {
	ref := imageRef{store.ScopeOf(ctx), name}
	for {
		b.mu.Lock()
		img, known := b.cache[ref]
		gen := b.gen
		b.mu.Unlock()
		if !known {
			if img, err = b.find(ctx, name); err != nil {
				return img, nil, err
			}
			if !b.library.Have(img.ID) {
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
	if ch := b.deleting[img.ID]; ch != nil {
		return ch, false
	}
	if b.gen != gen {
		return closed, false
	}
	// An id is in a tenant's sight only while it uses it, so that is asked anew.
	if ref.scope.All() || ref.name != img.ID {
		b.cache[ref] = img
	}
	b.using[img.ID]++
	return nil, true
}

// closed never makes anybody wait.
var closed = func() chan struct{} { c := make(chan struct{}); close(c); return c }()

func (b *imageBook) drop(id string) {
	b.mu.Lock()
	if b.using[id]--; b.using[id] == 0 {
		delete(b.using, id)
	}
	b.mu.Unlock()
	b.free(id)
}

// free has an image looked at that somebody used.
func (b *imageBook) free(id string) {
	b.mu.Lock()
	free := b.loose[id] && b.using[id] == 0
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
			b.loose[id] = true
		} else {
			delete(b.loose, id)
		}
	}
}

func (b *imageBook) anyLoose() bool {
	b.mu.Lock()
	defer b.mu.Unlock()
	return len(b.loose) > 0
}

// errContentGone says that content was pruned before it got its name.
var errContentGone = &sandbox.Error{Class: sandbox.Conflict, Msg: "the image was pruned while it was being named", Hint: "ask again"}

// reserve keeps content, there or not, from being removed until drop.
func (b *imageBook) reserve(ctx context.Context, id string) error {
	for {
		b.mu.Lock()
		wait := b.deleting[id]
		if wait == nil {
			b.using[id]++
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

// publish gives content a name, unless it was pruned meanwhile.
func (b *imageBook) publish(ctx context.Context, img sandbox.Image, name string) (sandbox.Image, error) {
	if err := b.reserve(ctx, img.ID); err != nil {
		return sandbox.Image{}, err
	}
	defer b.drop(img.ID)
	if !b.library.Have(img.ID) {
		return sandbox.Image{}, errContentGone
	}
	err := b.store.PutImage(ctx, img, name)
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
	if b.using[id] > 0 || b.deleting[id] != nil {
		b.mu.Unlock()
		return false, nil
	}
	decided := make(chan struct{})
	b.deleting[id] = decided
	b.mu.Unlock()
	defer func() {
		b.mu.Lock()
		delete(b.deleting, id)
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
	if err := b.library.Delete(context.WithoutCancel(ctx), id); err != nil && !errors.Is(err, sandbox.ErrImageNotFound) && !errors.Is(err, sandbox.ErrNotFound) {
		return false, err
	}
	b.mu.Lock()
	delete(b.loose, id)
	b.mu.Unlock()
	return true, nil
}

// join follows the pull of a reference, beginning it if there is none. The
// pull is stopped when the last follower leaves.
func (b *imageBook) join(who sandbox.RegistryAccess, ref, platform string) (p *pull, leave func()) {
	key := pullKey{who, ref, platform}
	b.mu.Lock()
	defer b.mu.Unlock()
	sp := b.pulls[key]
	if sp == nil {
		ctx, cancel := context.WithCancel(context.Background())
		sp = &sharedPull{pull: pull{cancel: cancel, done: make(chan struct{}), changed: make(chan struct{})}}
		b.pulls[key] = sp
		go func() {
			sp.img, sp.err = b.library.PullAs(ctx, who, ref, platform, sp.report)
			b.mu.Lock()
			if b.pulls[key] == sp {
				delete(b.pulls, key)
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
		if last && b.pulls[key] == sp {
			delete(b.pulls, key)
		}
		b.mu.Unlock()
		if last {
			sp.cancel()
			<-sp.done // a pull has an owner until it has stopped
		}
	}
}
