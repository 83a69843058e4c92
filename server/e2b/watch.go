package e2b

import (
	"context"
	"crypto/rand"
	"errors"
	"strings"
	"sync"
	"time"

	"connectrpc.com/connect"
	"google.golang.org/protobuf/proto"

	"github.com/cove-sandbox/cove/sandbox"
	"github.com/cove-sandbox/cove/server/e2b/envd/filesystem"
)

const (
	maxWatchers = 64        // of one sandbox that are polled
	maxEvents   = 4096      // held for one of them; older ones go first
	maxHeld     = 256 << 10 // bytes of them: code inside chooses names, of up to 4096 each
	unpolled    = 10 * time.Minute
	watchQuiet  = 30 * time.Second // after which a stream says it is alive
	// underWay is how long a poll waits where nothing is held: who has just written asks
	// what was seen of it, and that comes by another way.
	underWay = 100 * time.Millisecond
)

// event is a change as E2B has it, by its name below what is watched; nil for what
// it has no word for.
func (s files) event(ctx context.Context, root string, c sandbox.FileChange, withEntry bool) *filesystem.FilesystemEvent {
	types := map[string]filesystem.EventType{"create": filesystem.EventType_EVENT_TYPE_CREATE, "write": filesystem.EventType_EVENT_TYPE_WRITE,
		"remove": filesystem.EventType_EVENT_TYPE_REMOVE, "rename": filesystem.EventType_EVENT_TYPE_RENAME, "chmod": filesystem.EventType_EVENT_TYPE_CHMOD}
	t, known := types[c.Op]
	name, below := strings.CutPrefix(c.Path, strings.TrimSuffix(root, "/")+"/")
	if !known || !below {
		return nil
	}
	ev := &filesystem.FilesystemEvent{Name: name, Type: t}
	if withEntry {
		if info, err := s.server.StatFile(ctx, meant(ctx).sandbox.ID, c.Path); err == nil {
			ev.Entry = s.entry(ctx, info)
		}
	}
	return ev
}

func (s files) WatchDir(ctx context.Context, r *connect.Request[filesystem.WatchDirRequest], out *connect.ServerStream[filesystem.WatchDirResponse]) error {
	root, err := s.directory(ctx, r.Msg.GetPath())
	if err != nil {
		return err
	}
	var mu sync.Mutex // guards sends on out
	send := func(m *filesystem.WatchDirResponse) error {
		mu.Lock()
		defer mu.Unlock()
		return out.Send(m)
	}
	ctx, cancel := context.WithCancel(ctx)
	var alive sync.WaitGroup
	defer alive.Wait()
	defer cancel()
	alive.Go(func() {
		tick := time.NewTicker(watchQuiet)
		defer tick.Stop()
		for {
			select {
			case <-ctx.Done():
				return
			case <-tick.C:
				if send(&filesystem.WatchDirResponse{Event: &filesystem.WatchDirResponse_Keepalive{Keepalive: &filesystem.WatchDirResponse_KeepAlive{}}}) != nil {
					cancel()
				}
			}
		}
	})
	return s.server.WatchFiles(ctx, meant(ctx).sandbox.ID, root, r.Msg.GetRecursive(), func(c sandbox.FileChange) error {
		if c.Op == "ready" {
			return send(&filesystem.WatchDirResponse{Event: &filesystem.WatchDirResponse_Start{Start: &filesystem.WatchDirResponse_StartEvent{}}})
		}
		if ev := s.event(ctx, root, c, r.Msg.GetIncludeEntry()); ev != nil {
			return send(&filesystem.WatchDirResponse{Event: &filesystem.WatchDirResponse_Filesystem{Filesystem: ev}})
		}
		return nil
	})
}

// watchers are those that are polled: the Python SDK has no streams for them. They
// end with this process, with their sandbox, or when nobody polls.
type watchers struct {
	clock func() time.Time

	mu struct {
		sync.Mutex
		byID map[string]*watcher
	}
}

// watcher holds the events of one watch until they are asked for. Its fields below
// end are guarded by watchers.mu.
type watcher struct {
	sandbox string
	end     context.CancelFunc
	came    chan struct{} // of one: that there are events

	events []*filesystem.FilesystemEvent
	held   int // bytes of events
	polled time.Time
}

func newWatchers(clock func() time.Time) *watchers {
	w := &watchers{clock: clock}
	w.mu.byID = map[string]*watcher{}
	return w
}

// add takes a watcher in, and ends those that nobody has polled for long.
func (w *watchers) add(one *watcher) (id string, err error) {
	w.mu.Lock()
	defer w.mu.Unlock()
	now := w.clock()
	count := 0
	for old, other := range w.mu.byID {
		if now.Sub(other.polled) > unpolled {
			other.end()
			delete(w.mu.byID, old)
		} else if other.sandbox == one.sandbox {
			count++
		}
	}
	if count >= maxWatchers {
		return "", &sandbox.Error{Class: sandbox.QuotaExceeded, Msg: "too many watchers in this sandbox", Hint: "stop those that are not needed"}
	}
	id, one.polled = sandbox.NewID(rand.Reader), now
	w.mu.byID[id] = one
	return id, nil
}

// put holds an event. One that says what the last one says is not held twice, as
// inotify(7) does not.
func (w *watchers) put(one *watcher, ev *filesystem.FilesystemEvent) {
	w.mu.Lock()
	defer w.mu.Unlock()
	select {
	case one.came <- struct{}{}:
	default:
	}
	if n := len(one.events); n > 0 && one.events[n-1].Name == ev.Name && one.events[n-1].Type == ev.Type {
		one.held -= proto.Size(one.events[n-1])
		one.events = one.events[:n-1]
	}
	one.events, one.held = append(one.events, ev), one.held+proto.Size(ev)
	for len(one.events) > 1 && (len(one.events) > maxEvents || one.held > maxHeld) {
		one.held -= proto.Size(one.events[0])
		one.events = one.events[1:]
	}
}

// take is what has come since it was asked last; ok is false for no watcher of that
// sandbox.
func (w *watchers) take(ctx context.Context, id, sandbox string) (evs []*filesystem.FilesystemEvent, ok bool) {
	w.mu.Lock()
	one := w.mu.byID[id]
	ok = one != nil && one.sandbox == sandbox
	w.mu.Unlock()
	if !ok {
		return nil, false
	}
	select {
	case <-one.came:
	case <-time.After(underWay):
	case <-ctx.Done():
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	evs, one.events, one.held, one.polled = one.events, nil, 0, w.clock()
	return evs, true
}

func (w *watchers) remove(id, sandbox string) bool {
	w.mu.Lock()
	defer w.mu.Unlock()
	one := w.mu.byID[id]
	if one == nil || one.sandbox != sandbox {
		return false
	}
	one.end()
	delete(w.mu.byID, id)
	return true
}

func (s files) CreateWatcher(ctx context.Context, r *connect.Request[filesystem.CreateWatcherRequest]) (*connect.Response[filesystem.CreateWatcherResponse], error) {
	root, err := s.directory(ctx, r.Msg.GetPath())
	if err != nil {
		return nil, err
	}
	watching, end := context.WithCancel(context.WithoutCancel(ctx)) // it outlives this call
	one := &watcher{sandbox: meant(ctx).sandbox.ID, end: end, came: make(chan struct{}, 1)}
	id, err := s.watchers.add(one)
	if err != nil {
		end()
		return nil, err
	}
	ready := make(chan error, 2) // the first of: it watches, it has ended
	go func() {
		defer end()
		ready <- s.server.WatchFiles(watching, one.sandbox, root, r.Msg.GetRecursive(), func(c sandbox.FileChange) error {
			if c.Op == "ready" {
				select {
				case ready <- nil:
				default:
				}
				return nil
			}
			if ev := s.event(watching, root, c, r.Msg.GetIncludeEntry()); ev != nil {
				s.watchers.put(one, ev)
			}
			return nil
		})
	}()
	select {
	case err = <-ready:
	case <-ctx.Done():
		err = ctx.Err()
	}
	if err != nil {
		s.watchers.remove(id, one.sandbox)
		return nil, err
	}
	return connect.NewResponse(&filesystem.CreateWatcherResponse{WatcherId: id}), nil
}

func (s files) GetWatcherEvents(ctx context.Context, r *connect.Request[filesystem.GetWatcherEventsRequest]) (*connect.Response[filesystem.GetWatcherEventsResponse], error) {
	evs, ok := s.watchers.take(ctx, r.Msg.GetWatcherId(), meant(ctx).sandbox.ID)
	if !ok {
		return nil, noWatcher(r.Msg.GetWatcherId())
	}
	return connect.NewResponse(&filesystem.GetWatcherEventsResponse{Events: evs}), nil
}

func (s files) RemoveWatcher(ctx context.Context, r *connect.Request[filesystem.RemoveWatcherRequest]) (*connect.Response[filesystem.RemoveWatcherResponse], error) {
	if !s.watchers.remove(r.Msg.GetWatcherId(), meant(ctx).sandbox.ID) {
		return nil, noWatcher(r.Msg.GetWatcherId())
	}
	return connect.NewResponse(&filesystem.RemoveWatcherResponse{}), nil
}

func noWatcher(id string) error {
	return connect.NewError(connect.CodeNotFound, errors.New("watcher with id "+id+" not found"))
}
