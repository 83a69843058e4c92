package node

import (
	"context"
	"errors"
	"sync"
	"time"

	"github.com/cove-sandbox/cove/egress/proxy"
	"github.com/cove-sandbox/cove/egress/tape"
	"github.com/cove-sandbox/cove/runtime"
	"github.com/cove-sandbox/cove/sandbox"
)

// A tape belongs to a sandbox and not to a kernel: it goes on over standby and
// restore. It is opened before the sandbox has its first kernel and closed when
// the last is gone.

// tapeBook has the tapes of sandboxes. Whose turn it is to change one is who has
// the sandbox's op.
type tapeBook struct {
	mu sync.Mutex
	of map[string]boxTape // by sandbox
}

// boxTape is what the requests of a sandbox go through; at most one is set, and
// none for most.
type boxTape struct {
	rec    *tape.Recorder
	player *tape.Player
}

func (b *tapeBook) get(id string) boxTape {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.of[id]
}

func (b *tapeBook) put(id string, t boxTape) {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.of == nil {
		b.of = map[string]boxTape{}
	}
	if t == (boxTape{}) {
		delete(b.of, id)
	} else {
		b.of[id] = t
	}
}

func (t boxTape) status(s *sandbox.NetworkStatus) {
	if t.rec != nil {
		is := t.rec.Status()
		s.Recording = &is
	}
	if t.player != nil {
		is := t.player.Status()
		s.Replay, s.Missed = &is, is.Missed
	}
}

func (t boxTape) position() string {
	if t.player == nil {
		return ""
	}
	return t.player.Position()
}

// through adds a sandbox's tape to what is done with its requests.
func (t boxTape) through(i *proxy.Interception) {
	switch {
	case t.rec != nil:
		i.All, i.Tape, i.Unfound = true, t.rec.Over, t.rec.Unfound
	case t.player != nil:
		i.All, i.Tape, i.Replay = true, t.player.Over, t.player
	}
}

// openTape begins what a network asks for, or goes on with it. position is that
// of the snapshot that a replay is to go on from.
func (n *Node) openTape(ctx context.Context, sb sandbox.Sandbox, position string) (t boxTape, err error) {
	spec := sb.Spec.Network
	if !spec.Taped() {
		return t, nil
	}
	if n.cfg.Recordings == nil {
		return t, sandbox.Errorf(sandbox.Unsupported, "node.record", "this node keeps no recordings")
	}
	if r := spec.Record; r != nil {
		t.rec, err = n.cfg.Recordings.Record(tape.Header{ID: r.ID, Name: r.Name, Tenant: sb.Tenant, Sandbox: sb.ID, Created: time.Now().UTC()})
		return t, err
	}
	r := spec.Replay
	t.player, err = n.cfg.Recordings.Play(ctx, sb.ID, r.Recording, tape.RulesOf(*r), tape.UsedAt(position, r.Recording))
	return t, err
}

// closeTape ends a tape when nothing uses it any more.
func (n *Node) closeTape(id string, t boxTape, spec sandbox.Network) {
	var err error
	if t.rec != nil {
		err = n.cfg.Recordings.Finish(spec.Record.ID)
	}
	if t.player != nil {
		err = errors.Join(t.player.Close(), n.cfg.Recordings.Forget(id, spec.Replay.Recording))
	}
	if err != nil {
		n.log.Warn("the end of a recording or replay", "sandbox", id, "err", err)
	}
}

// discardTape takes back one that nothing went through.
func (n *Node) discardTape(id string, t boxTape, spec sandbox.Network) {
	if t.rec == nil {
		n.closeTape(id, t, spec)
		return
	}
	if err := n.cfg.Recordings.Discard(spec.Record.ID); err != nil {
		n.log.Warn("a recording of nothing stays", "sandbox", id, "recording", spec.Record.ID, "err", err)
	}
}

// giveTape opens that of a sandbox that is not running yet.
func (n *Node) giveTape(ctx context.Context, sb sandbox.Sandbox, position string) error {
	t, err := n.openTape(ctx, sb, position)
	n.tapes.put(sb.ID, t)
	return err
}

// takeTape goes on with the tape of a sandbox that was taken back. Without the
// one it replays nothing answers it; without the one it records on it goes on
// unrecorded, and the recording says that it was interrupted.
func (n *Node) takeTape(ctx context.Context, sb sandbox.Sandbox) {
	if err := n.giveTape(ctx, sb, ""); err != nil {
		n.log.Error("an adopted sandbox is without its recording", "sandbox", sb.ID, "err", err)
	}
}

func (n *Node) undoTape(sb sandbox.Sandbox) {
	t := n.tapes.get(sb.ID)
	n.tapes.put(sb.ID, boxTape{})
	n.discardTape(sb.ID, t, sb.Spec.Network)
}

// endTape is for who has op and will not give it back.
func (n *Node) endTape(b *box) {
	n.mu.Lock()
	spec := b.sb.Spec.Network
	n.mu.Unlock()
	t := n.tapes.get(b.id)
	n.tapes.put(b.id, boxTape{})
	n.closeTape(b.id, t, spec)
}

// changeTape gives a sandbox the tape of its new network, unless it keeps the
// one it has. done says whether that is in force now: then the old one is ended,
// else the new one is taken back.
func (n *Node) changeTape(ctx context.Context, sb sandbox.Sandbox, was sandbox.Network) (done func(ok bool), err error) {
	if sameTape(was, sb.Spec.Network) {
		return func(bool) {}, nil
	}
	t, err := n.openTape(ctx, sb, "")
	if err != nil {
		return nil, err
	}
	old := n.tapes.get(sb.ID)
	n.tapes.put(sb.ID, t)
	return func(ok bool) {
		if ok {
			n.closeTape(sb.ID, old, was)
			return
		}
		n.tapes.put(sb.ID, old)
		n.discardTape(sb.ID, t, sb.Spec.Network)
	}, nil
}

// lookInside has a running sandbox trust its authority, if its new network is
// the first that looks into TLS, and returns the container it then has. One that
// is asleep is not woken: it will when it wakes.
func (n *Node) lookInside(ctx context.Context, b *box, sb sandbox.Sandbox, k runtime.Kernel, was sandbox.Network) (runtime.Container, error) {
	n.mu.Lock()
	container, image := b.container, b.image
	n.mu.Unlock()
	before := sb.Spec
	before.Network = was
	if !intercepted(sb.Spec) || intercepted(before) {
		return container, nil
	}
	container.Env = n.environment(sb, image)
	if k == nil {
		return container, nil
	}
	err := n.thaw(b)
	if err == nil {
		err = n.trust(ctx, sb, k)
	}
	if err == nil {
		err = k.Guest().SetEnv(ctx, runtime.Environ(container))
	}
	return container, err
}

// sameTape says whether a sandbox keeps its tape under another network.
func sameTape(was, is sandbox.Network) bool {
	switch {
	case was.Record != nil && is.Record != nil:
		return was.Record.ID == is.Record.ID
	case was.Replay != nil && is.Replay != nil:
		return was.Replay.Recording == is.Replay.Recording && tape.RulesOf(*was.Replay).Equal(tape.RulesOf(*is.Replay))
	}
	return !was.Taped() && !is.Taped()
}

// seekTape takes a replay to where a snapshot was; "" = to its start.
func (n *Node) seekTape(id, position string) {
	p := n.tapes.get(id).player
	if p == nil {
		return
	}
	if err := p.SeekTo(position); err != nil {
		n.log.Warn("after a restart this replay will not be where it is", "sandbox", id, "err", err)
	}
}

// settleTapes ends recordings whose sandbox did not survive.
func (n *Node) settleTapes() error {
	if n.cfg.Recordings == nil {
		return nil
	}
	recording, replays := map[string]bool{}, map[string]bool{}
	n.mu.Lock()
	for id, b := range n.live {
		if r := b.sb.Spec.Network.Record; r != nil && n.tapes.get(id).rec != nil {
			recording[r.ID] = true
		}
		if r := b.sb.Spec.Network.Replay; r != nil {
			replays[tape.ReplayOf(id, r.Recording)] = true
		}
	}
	n.mu.Unlock()
	return n.cfg.Recordings.Settle(recording, replays)
}

// closeTapes lets go of files when the node closes; replays go on with the next,
// and recordings are the library's.
func (n *Node) closeTapes() (err error) {
	n.tapes.mu.Lock()
	defer n.tapes.mu.Unlock()
	for _, t := range n.tapes.of {
		if t.player != nil {
			err = errors.Join(err, t.player.Close())
		}
	}
	return err
}

// Recordings of the node; nil where it keeps none.
func (n *Node) Recordings() *tape.Library { return n.cfg.Recordings }
