package server

import (
	"context"
	"errors"
	"sync"
	"time"

	"github.com/cove-sandbox/cove/internal/notify"
	"github.com/cove-sandbox/cove/sandbox"
)

// contentBook sees to it that content of snapshots is collected when no record
// refers to it, and never before.
//
// Content is made by the node a moment before its record is written, and used a
// moment after its record was read. Both moments are held here: what is being
// made (making) keeps a collection from beginning, what is in use (using) is
// kept by the one that runs. A lock around both would make every create from a
// snapshot wait for a sweep of the disk.
type contentBook struct {
	nudge chan struct{} // capacity 1: a collection is wanted

	mu struct {
		sync.Mutex
		making     int            // contents without a record yet
		collecting bool           // nothing new is made meanwhile
		closing    bool           // a collection has waited long enough: those who come now wait for it
		using      map[string]int // by manifest
		changed    notify.Change  // any of the above may let a waiter go on
		next       *collection    // not begun: serves whoever asks now
		rested     time.Time      // the next begins no sooner
	}
}

// collection is one sweep; freed and err are set before done is closed.
type collection struct {
	whole bool // not only of images; guarded by contentBook.mu until it is taken
	done  chan struct{}
	freed int64
	err   error
}

func (b *contentBook) init() {
	b.nudge = make(chan struct{}, 1)
	b.mu.using = map[string]int{}
}

// begin marks the start of something that makes content; end it when the record is written
// or the content given up.
func (b *contentBook) begin(ctx context.Context) (end func(), err error) {
	for {
		b.mu.Lock()
		if !b.mu.collecting && !b.mu.closing {
			b.mu.making++
			b.mu.Unlock()
			return sync.OnceFunc(func() {
				b.mu.Lock()
				defer b.mu.Unlock()
				if b.mu.making--; b.mu.making == 0 {
					b.mu.changed.Tell()
				}
			}), nil
		}
		changed := b.mu.changed.Next()
		b.mu.Unlock()
		select {
		case <-changed:
		case <-ctx.Done():
			return nil, ctx.Err()
		}
	}
}

// use keeps content until release. The caller asks the store afterwards whether
// the record is still there: a collection lists the records first and what is
// in use second, so one of the two sees it.
func (b *contentBook) use(c sandbox.Content) (release func()) {
	all := append([]string{c.Manifest}, c.Needs...)
	b.mu.Lock()
	defer b.mu.Unlock()
	for _, m := range all {
		b.mu.using[m]++
	}
	return sync.OnceFunc(func() {
		b.mu.Lock()
		defer b.mu.Unlock()
		for _, m := range all {
			if b.mu.using[m]--; b.mu.using[m] == 0 {
				delete(b.mu.using, m)
			}
		}
	})
}

func (b *contentBook) inUse() (manifests []string) {
	b.mu.Lock()
	defer b.mu.Unlock()
	for m := range b.mu.using {
		manifests = append(manifests, m)
	}
	return manifests
}

// collectPatience is how long a collection lets others go first. Snapshots are
// made in seconds; on a machine that takes one all the time there would never
// be a gap.
const collectPatience = 10 * time.Second

// restRatio times as long as it held others up, a collection leaves them alone:
// where snapshots are deleted all the time, one began when the last had ended,
// and one snapshot in ten waited 0.7 s for them with 16 clients on 2 cores.
const restRatio = 4

// rest waits until a collection may begin again; false if ctx ended.
func (b *contentBook) rest(ctx context.Context) bool {
	b.mu.Lock()
	wait := time.Until(b.mu.rested)
	b.mu.Unlock()
	if wait <= 0 {
		return true
	}
	select {
	case <-time.After(wait):
		return true
	case <-ctx.Done():
		return false
	}
}

// busy says that a collection would have to wait for others.
func (b *contentBook) busy() bool {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.mu.making > 0
}

// errBusy is what seize says that was not to insist.
var errBusy = errors.New("snapshots are being made all the time")

// seize waits until nothing is being made and keeps it so until release. One
// that insists has others wait once its patience ends.
func (b *contentBook) seize(ctx context.Context, insist bool) (release func(), err error) {
	patience := time.NewTimer(collectPatience)
	defer patience.Stop()
	for {
		b.mu.Lock()
		if b.mu.making == 0 && !b.mu.collecting {
			b.mu.collecting = true
			b.mu.Unlock()
			began := time.Now()
			return func() {
				b.mu.Lock()
				defer b.mu.Unlock()
				b.mu.rested = time.Now().Add(min(restRatio*time.Since(began), collectPatience))
				b.mu.collecting, b.mu.closing = false, false
				b.mu.changed.Tell()
			}, nil
		}
		changed := b.mu.changed.Next()
		b.mu.Unlock()
		select {
		case <-changed:
		case <-patience.C:
			if !insist {
				return nil, errBusy
			}
			b.mu.Lock()
			b.mu.closing = true
			b.mu.Unlock()
		case <-ctx.Done():
			b.mu.Lock()
			b.mu.closing = false
			b.mu.changed.Tell()
			b.mu.Unlock()
			return nil, ctx.Err()
		}
	}
}

// want asks for a collection that begins after now.
func (b *contentBook) want() *collection { return b.ask(true) }

// wantImages asks for one of prepared images alone. Sandboxes end all the time,
// and a whole one reads every manifest there is.
func (b *contentBook) wantImages() *collection { return b.ask(false) }

func (b *contentBook) ask(whole bool) *collection {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.mu.next == nil {
		b.mu.next = &collection{done: make(chan struct{})}
	}
	b.mu.next.whole = b.mu.next.whole || whole
	select {
	case b.nudge <- struct{}{}:
	default:
	}
	return b.mu.next
}

func (b *contentBook) take() *collection {
	b.mu.Lock()
	defer b.mu.Unlock()
	c := b.mu.next
	b.mu.next = nil
	return c
}

// extent is what a collection looks at.
type extent int

const (
	onlyImages extent = iota // that were prepared of snapshots
	everything               // and content
	atStart                  // and images that never got a record: nothing is being made yet
)

// collect removes content and prepared images that no record refers to and
// nobody uses. A node that keeps no content has nothing to remove.
func (s *Server) collect(ctx context.Context, what extent) (freed int64, err error) {
	ctx = asServer(ctx)
	release, err := s.content.seize(ctx, what != onlyImages)
	if errors.Is(err, errBusy) {
		return 0, nil // they are looked for again every half a minute
	}
	if err != nil {
		return 0, err
	}
	defer release()
	// First, and whatever comes of the rest: content whose key is not here
	// cannot be collected, and its images must go all the same.
	freed, ierr := s.collectImages(ctx, what == atStart)
	if what == onlyImages {
		return freed, ierr
	}
	keep, err := s.store.Manifests(ctx)
	if err != nil {
		return freed, errors.Join(ierr, err)
	}
	content, err := s.node.Collect(ctx, append(keep, s.content.inUse()...))
	if errors.Is(err, sandbox.ErrUnsupported) {
		err = nil
	}
	return freed + content, errors.Join(ierr, err)
}

// collectImages removes images that were prepared of snapshots, or built and have
// no name (any more), and that neither a sandbox nor a snapshot needs. With
// unrecorded also those without a record, which a crash leaves.
//
// The snapshot an image was prepared of needs it, to start as fast the next
// time; not where content is encrypted, whose plain form it is.
func (s *Server) collectImages(ctx context.Context, unrecorded bool) (freed int64, err error) {
	contents, err := s.node.Images().Contents(ctx)
	if err != nil {
		return 0, err
	}
	imgs, err := s.store.ListImages(ctx)
	if err != nil {
		return 0, err
	}
	needed, err := s.store.SnapshotImages(ctx)
	if err != nil {
		return 0, err
	}
	sealed := s.about.Sealed
	loose, built := map[string]bool{}, map[string]bool{}
	for _, img := range imgs {
		if built[img.ID] = img.Source == sandbox.ImageBuilt; built[img.ID] || img.Source == sandbox.ImageDerived {
			loose[img.ID] = len(img.Names) == 0
		}
	}
	for _, id := range needed {
		if !sealed || built[id] {
			loose[id] = false
		}
	}
	// Known as such before it is asked who uses them: whoever ends after that
	// has them looked at again.
	s.images.setLoose(loose)
	if unrecorded {
		s.addUnrecorded(ctx, loose, contents, imgs)
	}
	live, err := s.node.Live(ctx)
	if err != nil {
		return 0, err
	}
	// The store decides in the end; but a restore is the node's first.
	for _, sb := range live {
		loose[sb.ImageID] = false
	}
	for id, is := range loose {
		if !is {
			continue
		}
		gone, cerr := s.images.collect(ctx, id, sealed && !built[id])
		if gone {
			freed += contents[id]
		}
		err = errors.Join(err, cerr)
	}
	return freed, err
}

// addUnrecorded adds the images made of snapshots and by builds that have no record. What was
// pulled or imported is left to a prune: it may be somebody's who uses the
// library beside us.
func (s *Server) addUnrecorded(ctx context.Context, loose map[string]bool, contents map[string]int64, imgs []sandbox.Image) {
	known := map[string]bool{}
	for _, img := range imgs {
		known[img.ID] = true
	}
	for id := range contents {
		if known[id] {
			continue
		}
		img, err := s.node.Images().Get(ctx, id)
		if err != nil {
			s.log.Warn("an image without a record cannot be read; an image prune removes it", "image", id, "err", err)
			continue
		}
		loose[id] = img.Source == sandbox.ImageDerived || img.Source == sandbox.ImageBuilt || img.Source == sandbox.ImageData
	}
}

// litterEvery is how often the node is asked whether it made content useless.
const litterEvery = 30 * time.Second

// collectLoop makes the collections that are wanted, one at a time, and tries a
// failed one again with growing pauses.
func (s *Server) collectLoop(ctx context.Context) {
	const firstPause, longestPause = 100 * time.Millisecond, time.Minute
	pause := time.Duration(0)
	var again <-chan time.Time // after a failure, whatever is wanted meanwhile
	look := time.NewTicker(litterEvery)
	defer look.Stop()
	for {
		what := onlyImages
		select {
		case <-ctx.Done():
			return
		case <-s.content.nudge:
		case <-again:
			what, again = everything, nil
		case <-look.C:
			if s.littered(ctx) {
				s.content.want()
			} else if s.images.anyLoose() { // whose last user left when nobody looked
				s.content.wantImages()
			}
			continue
		}
		if !s.content.rest(ctx) {
			return
		}
		c := s.content.take()
		if c == nil && what == onlyImages {
			continue
		}
		if c != nil && c.whole {
			what = everything
		}
		freed, err := s.collect(ctx, what)
		if c != nil {
			c.freed, c.err = freed, err
			close(c.done)
		}
		switch {
		case err == nil && what == everything:
			pause, again = 0, nil
		case err != nil && ctx.Err() == nil:
			pause = min(longestPause, max(firstPause, pause*2))
			again = time.After(pause)
			s.log.Warn("cannot remove content that nothing refers to; it will be tried again", "err", err)
		}
	}
}

// quickCollect is how long a delete waits to be able to say what it freed.
const quickCollect = 2 * time.Second

// collectSoon has content removed, and waits for it if it is quick: not for
// snapshots being made, for seconds on a busy server. What fails is tried again:
// the records are gone already. How much it freed is not told: that depends on
// what others hold.
func (s *Server) collectSoon(ctx context.Context) {
	c := s.content.want()
	if s.content.busy() {
		return
	}
	timer := time.NewTimer(quickCollect)
	defer timer.Stop()
	select {
	case <-c.done:
	case <-timer.C:
	case <-ctx.Done():
	}
}
