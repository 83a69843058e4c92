package agent

import (
	"context"
	"errors"
	"sync"
	"time"

	"github.com/cove-sandbox/cove/egress/proxy"
	"github.com/cove-sandbox/cove/egress/recording"
	"github.com/cove-sandbox/cove/node"
	"github.com/cove-sandbox/cove/runtime"
	"github.com/cove-sandbox/cove/sandbox"
)

// A recording belongs to a sandbox and not to a kernel: it goes on over standby and
// restore. It is opened before the sandbox has its first kernel and closed when
// the last is gone.

// boxRecordings are the recordings of sandboxes. Whose turn it is to change one is who has
// the sandbox's op.
type boxRecordings struct {
	mu struct {
		sync.Mutex
		of map[string]boxRecording // by sandbox
	}
}

// boxRecording is what the requests of a sandbox go through; at most one is set, and
// none for most.
type boxRecording struct {
	rec    *recording.Recorder
	player *recording.Player
}

func (b *boxRecordings) get(id string) boxRecording {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.mu.of[id]
}

func (b *boxRecordings) put(id string, t boxRecording) {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.mu.of == nil {
		b.mu.of = map[string]boxRecording{}
	}
	if t == (boxRecording{}) {
		delete(b.mu.of, id)
	} else {
		b.mu.of[id] = t
	}
}

func (t boxRecording) status(s *sandbox.NetworkStatus) {
	if t.rec != nil {
		is := t.rec.Status()
		s.Recording = &is
	}
	if t.player != nil {
		is := t.player.Status()
		s.Replay, s.Missed = &is, is.Missed
	}
}

func (t boxRecording) position() string {
	if t.player == nil {
		return ""
	}
	return t.player.Position()
}

// through adds a sandbox's recording to what is done with its requests.
func (t boxRecording) through(i *proxy.Interception) {
	switch {
	case t.rec != nil:
		i.All, i.Recording, i.Unfound = true, t.rec.Over, t.rec.Unfound
	case t.player != nil:
		i.All, i.Recording, i.Replay = true, t.player.Over, t.player
	}
}

// openRecording begins what a network asks for, or goes on with it. position is that
// of the snapshot that a replay is to go on from.
func (n *Node) openRecording(ctx context.Context, sb sandbox.Sandbox, position string) (t boxRecording, err error) {
	spec := sb.Spec.Network
	if !spec.UsesRecording() {
		return t, nil
	}
	if n.cfg.Recordings == nil {
		return t, sandbox.Errorf(sandbox.Unsupported, "node.record", "this node keeps no recordings")
	}
	if r := spec.Record; r != nil {
		t.rec, err = n.cfg.Recordings.Record(recording.Header{ID: r.ID, Sandbox: sb.ID, Created: time.Now().UTC()})
		return t, err
	}
	r := spec.Replay
	t.player, err = n.cfg.Recordings.Play(ctx, sb.ID, r.Recording, recording.RulesOf(*r), recording.UsedAt(position, r.Recording))
	return t, err
}

// closeRecording ends a recording when nothing uses it any more.
func (n *Node) closeRecording(id string, t boxRecording, spec sandbox.Network) {
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

// discardRecording takes back one that nothing went through.
func (n *Node) discardRecording(id string, t boxRecording, spec sandbox.Network) {
	if t.rec == nil {
		n.closeRecording(id, t, spec)
		return
	}
	if err := n.cfg.Recordings.Discard(spec.Record.ID); err != nil {
		n.log.Warn("a recording of nothing stays", "sandbox", id, "recording", spec.Record.ID, "err", err)
	}
}

// giveRecording opens that of a sandbox that is not running yet.
func (n *Node) giveRecording(ctx context.Context, sb sandbox.Sandbox, position string) error {
	t, err := n.openRecording(ctx, sb, position)
	n.recordings.put(sb.ID, t)
	return err
}

// takeRecording goes on with the recording of a sandbox that was taken back. Without the
// one it replays nothing answers it; without the one it records on it goes on
// unrecorded, and the recording says that it was interrupted.
func (n *Node) takeRecording(ctx context.Context, sb sandbox.Sandbox) {
	if err := n.giveRecording(ctx, sb, ""); err != nil {
		n.log.Error("an adopted sandbox is without its recording", "sandbox", sb.ID, "err", err)
	}
}

func (n *Node) undoRecording(sb sandbox.Sandbox) {
	t := n.recordings.get(sb.ID)
	n.recordings.put(sb.ID, boxRecording{})
	n.discardRecording(sb.ID, t, sb.Spec.Network)
}

// endRecording is for who has op and will not give it back.
func (n *Node) endRecording(b *box) {
	n.mu.Lock()
	spec := b.sb.Spec.Network
	n.mu.Unlock()
	t := n.recordings.get(b.id)
	n.recordings.put(b.id, boxRecording{})
	n.closeRecording(b.id, t, spec)
}

// changeRecording gives a sandbox the recording of its new network, unless it keeps the
// one it has. done says whether that is in force now: then the old one is ended,
// else the new one is taken back.
func (n *Node) changeRecording(ctx context.Context, sb sandbox.Sandbox, was sandbox.Network) (done func(ok bool), err error) {
	if sameRecording(was, sb.Spec.Network) {
		return func(bool) {}, nil
	}
	t, err := n.openRecording(ctx, sb, "")
	if err != nil {
		return nil, err
	}
	old := n.recordings.get(sb.ID)
	n.recordings.put(sb.ID, t)
	return func(ok bool) {
		if ok {
			n.closeRecording(sb.ID, old, was)
			return
		}
		n.recordings.put(sb.ID, old)
		n.discardRecording(sb.ID, t, sb.Spec.Network)
	}, nil
}

// lookInside has a running sandbox trust its authority, if its new network is
// the first that looks into TLS. One that is asleep is not woken: it will when it
// wakes.
func (n *Node) lookInside(ctx context.Context, b *box, sb sandbox.Sandbox, k runtime.Kernel, was sandbox.Network) error {
	n.mu.Lock()
	container, image := b.container, b.image
	n.mu.Unlock()
	before := sb.Spec
	before.Network = was
	if !sb.Spec.Intercepted() || before.Intercepted() || k == nil {
		return nil
	}
	container.Env = n.environment(sb, image)
	err := n.thaw(b)
	if err == nil {
		err = n.trust(ctx, sb, image, k)
	}
	if err == nil {
		err = k.Guest().SetEnv(ctx, runtime.Environ(container))
	}
	return err
}

// sameRecording says whether a sandbox keeps its recording under another network.
func sameRecording(was, is sandbox.Network) bool {
	switch {
	case was.Record != nil && is.Record != nil:
		return was.Record.ID == is.Record.ID
	case was.Replay != nil && is.Replay != nil:
		return was.Replay.Recording == is.Replay.Recording && recording.RulesOf(*was.Replay).Equal(recording.RulesOf(*is.Replay))
	}
	return !was.UsesRecording() && !is.UsesRecording()
}

// seekRecording takes a replay to where a snapshot was; "" = to its start.
func (n *Node) seekRecording(id, position string) {
	p := n.recordings.get(id).player
	if p == nil {
		return
	}
	if err := p.SeekTo(position); err != nil {
		n.log.Warn("after a restart this replay will not be where it is", "sandbox", id, "err", err)
	}
}

// settleRecordings ends recordings whose sandbox did not survive.
func (n *Node) settleRecordings() error {
	if n.cfg.Recordings == nil {
		return nil
	}
	live, replays := map[string]bool{}, map[string]bool{}
	n.mu.Lock()
	for id, b := range n.mu.live {
		if r := b.sb.Spec.Network.Record; r != nil && n.recordings.get(id).rec != nil {
			live[r.ID] = true
		}
		if r := b.sb.Spec.Network.Replay; r != nil {
			replays[recording.ReplayOf(id, r.Recording)] = true
		}
	}
	n.mu.Unlock()
	return n.cfg.Recordings.Settle(live, replays)
}

// closeRecordings lets go of files when the node closes; replays go on with the next,
// and recordings are the library's.
func (n *Node) closeRecordings() (err error) {
	n.recordings.mu.Lock()
	defer n.recordings.mu.Unlock()
	for _, t := range n.recordings.mu.of {
		if t.player != nil {
			err = errors.Join(err, t.player.Close())
		}
	}
	return err
}

// Recordings of the node.
func (n *Node) Recordings() node.Recordings {
	if n.cfg.Recordings == nil {
		return node.NoRecordings{}
	}
	return n.cfg.Recordings
}
