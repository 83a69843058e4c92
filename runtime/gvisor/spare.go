package gvisor

import (
	"context"
	"errors"
	"maps"
	"slices"
	"sync"
	"time"

	"github.com/cove-sandbox/cove/runtime"
)

// spareAfter is when a kernel that was reset makes its next container ahead of
// the next reset. Late enough that the first exec of the new episode has the
// CPU to itself.
const spareAfter = 50 * time.Millisecond

// prepareTimeout bounds what takes the guest 3 ms.
const prepareTimeout = 20 * time.Second

// spare is a pristine container that waits in a kernel for the next reset,
// entered by the guest: starting it (3 of 5 ms) and entering it (another 2) are
// no part of that. Only a kernel that was reset before has one, or whose image had a
// kernel that was reset lately: whoever resets once does it again, and whoever never
// does pays nothing.
type spare struct {
	cid   string
	c     runtime.Container // what it was started from
	ready chan struct{}     // closed when the rest is set
	init  int
	err   error
}

// serves says whether the spare is what c asks for. Environment, user and
// working directory are the guest's to give when it enters.
func (s *spare) serves(c runtime.Container) bool {
	return s.err == nil && s.c.Rootfs.Path == c.Rootfs.Path && s.c.Resources.Disk == c.Resources.Disk && slices.Equal(s.c.Volumes, c.Volumes)
}

// lately is how long resets in other kernels of an image say that the next of them
// will be reset too.
const lately = 5 * time.Minute

// resets knows the images whose sandboxes are reset. It is in memory: after a restart
// the first reset of a sandbox is slow once. Safe for concurrent use.
type resets struct {
	mu struct {
		sync.Mutex
		last map[string]time.Time // by the path of the image's file
	}
}

func (r *resets) note(image string, now time.Time) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.mu.last == nil {
		r.mu.last = map[string]time.Time{}
	}
	maps.DeleteFunc(r.mu.last, func(_ string, at time.Time) bool { return now.Sub(at) > lately })
	r.mu.last[image] = now
}

func (r *resets) likely(image string, now time.Time) bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	at, ok := r.mu.last[image]
	return ok && now.Sub(at) <= lately
}

// spareSoonLocked sees to a spare after the container of an episode.
func (k *Kernel) spareSoonLocked(c runtime.Container) {
	current := k.mu.container
	k.mu.spareTimer = time.AfterFunc(spareAfter, func() {
		k.mu.Lock()
		if k.mu.destroyed || k.mu.left || k.mu.container != current || k.mu.spare != nil {
			k.mu.Unlock()
			return
		}
		s := &spare{cid: containerName(episode(current) + 1), c: c, ready: make(chan struct{})}
		k.mu.spare = s
		k.watchers.Add(1) // under mu and not destroyed: Destroy waits for it
		k.mu.Unlock()
		defer k.watchers.Done()
		defer close(s.ready)
		if s.init, s.err = k.launch(c, s.cid); s.err != nil {
			return
		}
		ctx, cancel := context.WithTimeout(context.Background(), prepareTimeout)
		defer cancel()
		s.err = k.guest.Prepare(ctx, inGuest(c, s.init))
	})
}

// restSpare keeps a spare from being made until the returned function is called. One
// that is being made is waited for; one that waits goes on waiting.
func (k *Kernel) restSpare() (again func()) {
	none := &spare{ready: make(chan struct{}), err: errors.New("no spare during a pause")}
	close(none.ready)
	k.mu.Lock()
	if k.mu.spareTimer != nil {
		k.mu.spareTimer.Stop()
	}
	s, cleaned := k.mu.spare, k.mu.cleaned
	if s == nil {
		k.mu.spare = none // for a timer that has fired
	}
	k.mu.Unlock()
	<-cleaned
	if s != nil {
		<-s.ready
	}
	return func() {
		k.mu.Lock()
		defer k.mu.Unlock()
		if k.mu.spare != none {
			return
		}
		k.mu.spare = nil
		if k.mu.spareTimer != nil && !k.mu.destroyed {
			k.mu.spareTimer.Reset(spareAfter)
		}
	}
}

// takeSpareLocked returns the spare if there is one that serves c. A spare
// being started is waited for: it is ahead of one that would be started now.
func (k *Kernel) takeSpareLocked(c runtime.Container) *spare {
	if k.mu.spareTimer != nil {
		k.mu.spareTimer.Stop()
	}
	s := k.mu.spare
	k.mu.spare = nil
	if s == nil {
		return nil
	}
	<-s.ready
	if !s.serves(c) {
		return nil
	}
	return s
}
