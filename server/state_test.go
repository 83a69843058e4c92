package server

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"connectrpc.com/connect"
	"google.golang.org/protobuf/types/known/durationpb"

	covev1 "github.com/cove-sandbox/cove/api/cove/v1"
	"github.com/cove-sandbox/cove/cas"
	"github.com/cove-sandbox/cove/node"
	"github.com/cove-sandbox/cove/sandbox"
	"github.com/cove-sandbox/cove/store"
	"github.com/cove-sandbox/cove/wire"
)

// snapshot takes one and returns its last event.
func (w *world) snapshot(m *covev1.CreateSnapshotRequest) (*covev1.CreateSnapshotEvent, error) {
	w.Helper()
	s, err := w.client.Snapshots.Create(w.Context(), connect.NewRequest(m))
	if err != nil {
		return nil, err
	}
	defer s.Close()
	var last *covev1.CreateSnapshotEvent
	for s.Receive() {
		last = s.Msg()
	}
	return last, s.Err()
}

func (w *world) mustSnapshot(m *covev1.CreateSnapshotRequest) *covev1.Snapshot {
	w.Helper()
	ev, err := w.snapshot(m)
	if err != nil {
		w.Fatal(err)
	}
	return ev.Snapshot
}

func (w *world) write(id, path, data string) {
	w.Helper()
	_, err := w.client.Files.Write(w.Context(), connect.NewRequest(&covev1.WriteFileRequest{SandboxId: id, Path: path, Data: []byte(data)}))
	if err != nil {
		w.Fatal(err)
	}
}

func (w *world) read(id, path string) string {
	w.Helper()
	r, err := w.client.Files.Read(w.Context(), connect.NewRequest(&covev1.ReadFileRequest{SandboxId: id, Path: path}))
	if err != nil {
		w.Fatal(err)
	}
	return string(r.Msg.Data)
}

// settled waits until what was deleted is collected.
func (w *world) settled() {
	w.Helper()
	select {
	case <-w.server.content.want().done:
	case <-time.After(time.Minute):
		w.Fatal("no collection")
	}
}

func TestASnapshotIsAPlaceInTheTree(t *testing.T) {
	w := newWorld(t)
	a := w.create(&covev1.SandboxSpec{Env: map[string]string{"A": "1", "B": "1"}, Labels: map[string]string{"run": "1"}, Resources: &covev1.Resources{Cpu: 2, Memory: 1 << 30}})
	w.write(a.Id, "/f", "one")
	s1 := w.mustSnapshot(&covev1.CreateSnapshotRequest{Sandbox: a.Id, Name: "warm"})
	if s1.Kind != "memory" || s1.Sandbox != a.Id || s1.Parent != "" || s1.Name != "warm" || s1.Spec.Resources.Cpu != 2 {
		t.Errorf("%+v", s1)
	}
	w.write(a.Id, "/f", "two")
	s2 := w.mustSnapshot(&covev1.CreateSnapshotRequest{Sandbox: a.Id, Kind: "filesystem"})
	if s2.Parent != s1.Id || !slices.Equal(w.get(a.Id).Ancestors, []string{s2.Id, s1.Id}) {
		t.Errorf("s2 under %s, the sandbox under %v", s2.Parent, w.get(a.Id).Ancestors)
	}

	// Of memory: everything goes on; what the request says comes over it.
	b := w.create(&covev1.SandboxSpec{Snapshot: "warm", Env: map[string]string{"B": "2"}, Resources: &covev1.Resources{Cpu: 1}})
	if got := w.read(b.Id, "/f"); got != "one" {
		t.Errorf("/f is %q", got)
	}
	if b.Parent != s1.Id || b.Spec.Image != "base" || b.Spec.Snapshot != "warm" || b.Spec.Resources.Cpu != 1 || b.Spec.Resources.Memory != 1<<30 ||
		b.Spec.Env["A"] != "1" || b.Spec.Env["B"] != "2" || b.Spec.Labels["run"] != "1" {
		t.Errorf("%+v", b)
	}
	// Of files: by an image that is prepared once, whoever asks.
	var wg sync.WaitGroup
	for range 5 {
		wg.Go(func() {
			c := w.create(&covev1.SandboxSpec{Snapshot: s2.Id})
			if got := w.read(c.Id, "/f"); got != "two" || c.Parent != s2.Id || !slices.Equal(w.node.lib.ids(true), []string{c.ImageId}) {
				t.Errorf("/f is %q, %+v", got, c)
			}
			w.kill(c.Id)
		})
	}
	wg.Wait()
	if w.node.saw().prepares != 1 {
		t.Errorf("prepared %d times", w.node.saw().prepares)
	}
	if snap, err := w.store.GetSnapshot(w.all(), s2.Id); err != nil || !slices.Equal(w.node.lib.ids(true), []string{snap.Content.Image}) {
		t.Errorf("remembered %q, %v", snap.Content.Image, err)
	}

	tree, err := w.client.Sandboxes.Tree(t.Context(), connect.NewRequest(&covev1.TreeRequest{Id: b.Id}))
	if err != nil {
		t.Fatal(err)
	}
	parents := map[string]string{}
	for _, n := range tree.Msg.Nodes {
		if n.Parent != "" && parents[n.Parent] == "" && n.Parent != s1.Id {
			t.Errorf("%s before its parent", n.Id)
		}
		parents[n.Id] = n.Parent + "/" + n.Kind + "/" + n.State
	}
	want := map[string]string{s1.Id: "/memory/", s2.Id: s1.Id + "/filesystem/", a.Id: s2.Id + "/sandbox/running", b.Id: s1.Id + "/sandbox/running"}
	if fmt.Sprint(parents) != fmt.Sprint(want) { // the ended children are not part of it
		t.Errorf("the tree is %v, want %v", parents, want)
	}
	// A node in the middle goes; its descendants stay where they are.
	if _, err := w.client.Snapshots.Delete(t.Context(), connect.NewRequest(&covev1.DeleteSnapshotRequest{Id: s2.Id})); err != nil {
		t.Fatal(err)
	}
	tree, err = w.client.Sandboxes.Tree(t.Context(), connect.NewRequest(&covev1.TreeRequest{Id: a.Id}))
	if err != nil || len(tree.Msg.Nodes) != 3 {
		t.Fatalf("%v, %v", tree, err)
	}
	if len(w.node.lib.ids(true)) != 0 {
		t.Error("the image prepared of a deleted snapshot is still there")
	}
}

func TestASnapshotOfNothingNewIsTheOldOne(t *testing.T) {
	w := newWorld(t)
	a := w.create(nil)
	s1 := w.mustSnapshot(&covev1.CreateSnapshotRequest{Sandbox: a.Id})
	ev, err := w.snapshot(&covev1.CreateSnapshotRequest{Sandbox: a.Id})
	if err != nil || ev.Snapshot.Id != s1.Id || !ev.Unchanged {
		t.Errorf("%+v, %v", ev, err)
	}
	// A name of its own is a record of its own over the same content.
	ev, err = w.snapshot(&covev1.CreateSnapshotRequest{Sandbox: a.Id, Name: "named"})
	if err != nil || ev.Snapshot.Id == s1.Id || !ev.Unchanged || ev.Snapshot.Name != "named" || ev.Snapshot.Stored != 0 || ev.Snapshot.Size != s1.Size {
		t.Errorf("%+v, %v", ev, err)
	}
	if got := w.node.contents(); len(got) != 1 {
		t.Errorf("content %v", got)
	}
	takes := w.node.stored()
	// One of the two goes, the content stays for the other.
	if _, err := w.client.Snapshots.Delete(t.Context(), connect.NewRequest(&covev1.DeleteSnapshotRequest{Id: s1.Id})); err != nil {
		t.Fatal(err)
	}
	w.create(&covev1.SandboxSpec{Snapshot: "named"})
	r, err := w.client.Snapshots.Delete(t.Context(), connect.NewRequest(&covev1.DeleteSnapshotRequest{Id: "named"}))
	if err != nil || r.Msg.Freed != takes || w.node.stored() != 0 {
		t.Errorf("%v, %v, %v", r, err, w.node.contents())
	}
	if ev, err := w.snapshot(&covev1.CreateSnapshotRequest{Sandbox: a.Id}); err != nil || ev.Unchanged {
		t.Errorf("after the deletion: %+v, %v", ev, err)
	}
}

// The record went, its content did not yet: a new record is made over it, and
// what was about to be collected stays.
func TestASnapshotOfWhatIsBeingCollected(t *testing.T) {
	w := newWorld(t)
	a := w.create(nil)
	s1 := w.mustSnapshot(&covev1.CreateSnapshotRequest{Sandbox: a.Id})
	if _, err := w.store.DeleteSnapshot(w.all(), s1.Id); err != nil {
		t.Fatal(err)
	}
	ev, err := w.snapshot(&covev1.CreateSnapshotRequest{Sandbox: a.Id})
	if err != nil || ev.Snapshot.Id == s1.Id || ev.Unchanged {
		t.Fatalf("%+v, %v", ev, err)
	}
	w.settled()
	w.create(&covev1.SandboxSpec{Snapshot: ev.Snapshot.Id})
}

func TestStoppedByASnapshot(t *testing.T) {
	w := newWorld(t)
	a := w.create(nil)
	s := w.start(a.Id, "p", sleeping)
	snap := w.mustSnapshot(&covev1.CreateSnapshotRequest{Sandbox: a.Id, Stop: true})
	got := w.get(a.Id)
	if got.End == nil || got.End.Cause != "killed_by_user" || got.End.Detail != "stopped by a snapshot" {
		t.Errorf("%+v", got.End)
	}
	if _, end, err := rest(s); err != nil || end.GetEnd().GetCause() != "killed_by_user" {
		t.Errorf("its process: %v, %v", end, err)
	}
	tree, err := w.client.Sandboxes.Tree(t.Context(), connect.NewRequest(&covev1.TreeRequest{Id: a.Id}))
	if err != nil || len(tree.Msg.Nodes) != 2 || tree.Msg.Nodes[0].Id != snap.Id || tree.Msg.Nodes[1].Id != a.Id || tree.Msg.Nodes[1].Parent != snap.Id {
		t.Errorf("the tree of what was stopped: %v, %v", tree, err)
	}
	// What ran goes on in the next one, and its output is where it was.
	b := w.create(&covev1.SandboxSpec{Snapshot: snap.Id})
	st, err := w.client.Processes.Attach(t.Context(), connect.NewRequest(&covev1.AttachProcessRequest{SandboxId: b.Id, ExecId: "p", Offset: 5}))
	if err != nil {
		t.Fatal(err)
	}
	defer st.Close()
	for st.Receive() {
		if o := st.Msg().GetOutput(); o != nil {
			if string(o.Data) != "ing\n" || o.Offset != 5 {
				t.Errorf("%+v", o)
			}
			break
		}
	}
}

// A record that cannot be written leaves no content, and a sandbox that was to
// be stopped for it goes on.
func TestASnapshotWithoutARecord(t *testing.T) {
	w := newWorld(t)
	a := w.create(nil)
	w.store.failing("CreateSnapshot", errStore)
	for _, stop := range []bool{false, true} {
		w.write(a.Id, "/f", "x")
		_, err := w.snapshot(&covev1.CreateSnapshotRequest{Sandbox: a.Id, Name: "last", Stop: stop})
		wantError(t, err, sandbox.ErrUnavailable, "disk on fire")
		w.settled()
		if got := w.node.contents(); len(got) != 0 {
			t.Errorf("stop %v: content %v is left", stop, got)
		}
		if end := w.get(a.Id).End; end != nil {
			t.Errorf("stop %v: it has ended: %v", stop, end)
		}
	}
	w.store.failing("CreateSnapshot", nil)
	w.mustSnapshot(&covev1.CreateSnapshotRequest{Sandbox: a.Id, Name: "last", Stop: true})
	if w.get(a.Id).End == nil {
		t.Error("the stopped sandbox has no end")
	}
}

// Of a sandbox that is stopped into a snapshot there is at every moment one of
// the two on record.
func TestTheRecordComesBeforeTheEnd(t *testing.T) {
	w := newWorld(t)
	a := w.create(nil)
	looked := false
	w.node.onCommitted = func() {
		looked = true
		if _, err := w.store.GetSnapshot(w.all(), "last"); err != nil {
			t.Errorf("no record: %v", err)
		}
		sb, err := w.store.GetSandbox(w.all(), a.Id)
		if err != nil || sb.End != nil {
			t.Errorf("the sandbox: %v, %v", sb.End, err)
		}
		// A server that dies here has its place in the tree too.
		if snap, err := w.store.GetSnapshot(w.all(), "last"); err != nil || sb.Lineage.Parent != snap.ID {
			t.Errorf("it is below %q, %v", sb.Lineage.Parent, err)
		}
	}
	w.mustSnapshot(&covev1.CreateSnapshotRequest{Sandbox: a.Id, Name: "last", Stop: true})
	if !looked {
		t.Error("nothing was committed")
	}
}

// departure is a caller that leaves in the middle: now makes it leave and returns
// when the server has noticed.
func (w *world) departure() (ctx context.Context, now func()) {
	ctx, leave := context.WithCancel(w.Context())
	gone := make(chan struct{})
	var first sync.Once
	w.onCall = func(ctx context.Context) {
		first.Do(func() { afterAll(ctx, func() { close(gone) }) })
	}
	return ctx, func() { leave(); <-gone }
}

// A caller that leaves before its snapshot is on record leaves nothing of it,
// and the sandbox goes on; one that leaves after has the whole of it.
func TestACallerLeavesASnapshot(t *testing.T) {
	kinds := map[string]*covev1.CreateSnapshotRequest{
		"memory": {}, "filesystem": {Kind: "filesystem"}, "directory": {Kind: "directory", Path: "/etc"},
		"stop": {Stop: true}, "stop filesystem": {Kind: "filesystem", Stop: true},
	}
	for name, req := range kinds {
		for _, at := range []string{"begin", "made", "committed"} {
			if at == "committed" && !req.Stop {
				continue
			}
			t.Run(name+" at "+at, func(t *testing.T) {
				w := newWorld(t)
				a := w.create(nil)
				ctx, leave := w.departure()
				switch at {
				case "begin":
					w.node.onSnapshot = func(context.Context, node.SnapshotRequest) error { leave(); return nil }
				case "made":
					w.node.onMade = leave
				case "committed":
					w.node.onCommitted = leave
				}
				m := &covev1.CreateSnapshotRequest{Sandbox: a.Id, Name: "s", Kind: req.Kind, Path: req.Path, Stop: req.Stop}
				s, err := w.client.Snapshots.Create(ctx, connect.NewRequest(m))
				if err == nil {
					for s.Receive() {
					}
					err = s.Err()
					_ = s.Close()
				}
				wantError(t, err, sandbox.ErrCanceled)
				w.settled() // which waits for what is being made
				_, err = w.store.GetSnapshot(w.all(), "s")
				if at == "committed" {
					if err != nil {
						t.Errorf("its record: %v", err)
					}
					if end := w.ended(a.Id); end.Detail != "stopped by a snapshot" {
						t.Errorf("it ended with %v", end)
					}
					return
				}
				wantError(t, err, sandbox.ErrNotFound)
				if got := w.node.contents(); len(got) != 0 {
					t.Errorf("content %v is left", got)
				}
				if released := w.node.saw().released; at == "made" && !req.Stop && len(released) != 1 {
					t.Errorf("released %v", released)
				}
				if sb := w.get(a.Id); sb.End != nil || sb.Standby != "" || len(sb.Ancestors) != 0 {
					t.Errorf("the sandbox: %+v", sb)
				}
			})
		}
	}
}

func TestACallerLeavesASnapshotOfAVolume(t *testing.T) {
	w := newWorld(t)
	w.addState()
	w.addVolume()
	ctx, leave := w.departure()
	before := w.node.contents()
	var made []string
	w.node.onMade = func() { made = w.node.contents(); leave() }
	_, err := w.client.Volumes.Snapshot(ctx, connect.NewRequest(&covev1.SnapshotVolumeRequest{Name: "data", SnapshotName: "s"}))
	wantError(t, err, sandbox.ErrCanceled)
	w.settled()
	_, err = w.store.GetSnapshot(w.all(), "s")
	wantError(t, err, sandbox.ErrNotFound)
	made = slices.DeleteFunc(made, func(m string) bool { return slices.Contains(before, m) })
	if got := w.node.contents(); !slices.Equal(got, before) || len(made) != 1 || !slices.Equal(w.node.saw().released, made) {
		t.Errorf("there is %v, was %v; released %v of %v", got, before, w.node.saw().released, made)
	}
}

// A caller that leaves while a template is frozen leaves no version and no
// sandbox.
func TestACallerLeavesABuild(t *testing.T) {
	w := newWorld(t)
	ctx, leave := w.departure()
	w.node.onMade = leave
	s, err := w.client.Templates.Build(ctx, connect.NewRequest(&covev1.BuildTemplateRequest{Name: "web"}))
	if err == nil {
		for s.Receive() {
		}
		err = s.Err()
		_ = s.Close()
	}
	wantError(t, err, sandbox.ErrCanceled)
	w.settled()
	_, err = w.store.GetTemplate(w.all(), "web", 0)
	wantError(t, err, sandbox.ErrNotFound)
	for w.node.liveCount() != 0 {
		<-tick()
	}
	if got := w.node.contents(); len(got) != 0 {
		t.Errorf("content %v is left", got)
	}
}

// The time of a build is the caller's: writing the memory is part of it.
func TestABuildTimeCountsTheFreeze(t *testing.T) {
	var ahead atomic.Int64
	w := newWorld(t, func(c *Config) { c.Clock = func() time.Time { return time.Now().Add(time.Duration(ahead.Load())) } })
	w.node.onSnapshot = func(context.Context, node.SnapshotRequest) error { ahead.Add(int64(time.Minute)); return nil }
	s, err := w.client.Templates.Build(t.Context(), connect.NewRequest(&covev1.BuildTemplateRequest{Name: "web"}))
	if err != nil {
		t.Fatal(err)
	}
	defer s.Close()
	var tpl *covev1.Template
	for s.Receive() {
		tpl = s.Msg().Template
	}
	if s.Err() != nil || tpl.GetBuildTime().AsDuration() < time.Minute {
		t.Errorf("%v, %v", tpl.GetBuildTime(), s.Err())
	}
}

// A snapshot with a ttl goes when it is over, what came of it stays; it neither
// stands for one without, nor the other way round.
func TestASnapshotExpires(t *testing.T) {
	var ahead atomic.Int64
	w := newWorld(t, func(c *Config) { c.Clock = func() time.Time { return time.Now().Add(time.Duration(ahead.Load())) } })
	a := w.create(nil)
	w.write(a.Id, "/f", "one")
	day := &covev1.CreateSnapshotRequest{Sandbox: a.Id, Name: "day", Ttl: durationpb.New(24 * time.Hour)}
	s := w.mustSnapshot(day)
	if left := time.Until(s.ExpiresAt.AsTime()); left < 23*time.Hour || left > 24*time.Hour {
		t.Errorf("expires in %v", left)
	}
	stays := w.mustSnapshot(&covev1.CreateSnapshotRequest{Sandbox: a.Id})
	if stays.Id == s.Id || stays.ExpiresAt != nil {
		t.Errorf("one that stays is %+v", stays)
	}
	b := w.create(&covev1.SandboxSpec{Snapshot: "day"})
	w.server.expireSnapshots(t.Context())
	if _, err := w.client.Snapshots.Get(t.Context(), connect.NewRequest(&covev1.GetSnapshotRequest{Id: "day"})); err != nil {
		t.Error("it went too early:", err)
	}
	info, err := w.client.System.Info(t.Context(), connect.NewRequest(&covev1.InfoRequest{}))
	if err != nil || info.Msg.Snapshots.GetCount() != 2 || info.Msg.Snapshots.GetOldest() == nil {
		t.Errorf("%v, %v", info, err)
	}

	ahead.Store(int64(25 * time.Hour))
	if info, err = w.client.System.Info(t.Context(), connect.NewRequest(&covev1.InfoRequest{})); err != nil || info.Msg.Snapshots.GetAgeSeconds() < 49*3600 {
		t.Errorf("%v, %v", info.Msg.Snapshots, err)
	}
	w.server.expireSnapshots(t.Context())
	_, err = w.client.Snapshots.Get(t.Context(), connect.NewRequest(&covev1.GetSnapshotRequest{Id: "day"}))
	wantError(t, err, sandbox.ErrNotFound)
	if got := w.read(b.Id, "/f"); got != "one" {
		t.Errorf("what came of it reads %q", got)
	}
	w.settled()
	if c := w.create(&covev1.SandboxSpec{Snapshot: stays.Id}); w.read(c.Id, "/f") != "one" {
		t.Error("the same content went with it")
	}

	for _, ttl := range []time.Duration{time.Second, -time.Hour, 11 * 365 * 24 * time.Hour} {
		_, err := w.snapshot(&covev1.CreateSnapshotRequest{Sandbox: a.Id, Ttl: durationpb.New(ttl)})
		wantError(t, err, sandbox.ErrInvalid)
	}
}

// A pause is finished without its caller: half of it is no state to be in.
func TestACallerLeavesAPause(t *testing.T) {
	w := newWorld(t)
	a := w.create(nil)
	ctx, leave := w.departure()
	w.node.onPause = leave
	_, err := w.client.Sandboxes.Pause(ctx, connect.NewRequest(&covev1.PauseRequest{Id: a.Id, Cold: true}))
	wantError(t, err, sandbox.ErrCanceled)
	for w.get(a.Id).Standby != "cold" {
		<-tick()
	}
}

// Content that is being made, or in use, outlives every collection.
func TestCollectionsSpareWhatIsUnderWay(t *testing.T) {
	w := newWorld(t)
	a := w.create(nil)
	old := w.mustSnapshot(&covev1.CreateSnapshotRequest{Sandbox: a.Id})
	w.write(a.Id, "/f", "x")
	reached, gate := make(chan struct{}), make(chan struct{})
	w.node.onCreateFrom = func(sandbox.Sandbox) error { close(reached); <-gate; return nil }
	var wg sync.WaitGroup
	wg.Go(func() {
		if got := w.create(&covev1.SandboxSpec{Snapshot: old.Id}); got.Parent != old.Id {
			t.Errorf("%+v", got)
		}
	})
	<-reached
	if _, err := w.client.Snapshots.Delete(t.Context(), connect.NewRequest(&covev1.DeleteSnapshotRequest{Id: old.Id})); err != nil {
		t.Fatal(err)
	}
	if got := w.node.contents(); len(got) != 1 {
		t.Errorf("content in use is gone: %v", got)
	}
	close(gate)
	wg.Wait()
	w.settled()
	if got := w.node.contents(); len(got) != 0 {
		t.Errorf("content %v is left", got)
	}

	// A collection waits for a snapshot that has no record yet.
	made, record := make(chan struct{}), make(chan struct{})
	w.node.onSnapshot = func(context.Context, node.SnapshotRequest) error { close(made); <-record; return nil }
	wg.Go(func() { w.mustSnapshot(&covev1.CreateSnapshotRequest{Sandbox: a.Id, Name: "new"}) })
	<-made
	c := w.server.content.want()
	select {
	case <-c.done:
		t.Error("collected while a snapshot was being made")
	case <-time.After(20 * time.Millisecond):
	}
	close(record)
	wg.Wait()
	<-c.done
	if got := w.node.contents(); len(got) != 1 {
		t.Errorf("content %v", got)
	}
}

func TestACollectionThatFailsIsTriedAgain(t *testing.T) {
	w := newWorld(t)
	a := w.create(nil)
	snap := w.mustSnapshot(&covev1.CreateSnapshotRequest{Sandbox: a.Id})
	var tries atomic.Int32
	w.node.onCollect = func(context.Context) error {
		if tries.Add(1) == 1 {
			return errStore
		}
		return nil
	}
	if _, err := w.client.Snapshots.Delete(t.Context(), connect.NewRequest(&covev1.DeleteSnapshotRequest{Id: snap.Id})); err != nil {
		t.Fatal(err)
	}
	for len(w.node.contents()) != 0 {
		<-tick()
	}
}

func TestReconcileRemovesContentWithoutARecord(t *testing.T) {
	w := newWorld(t)
	a := w.create(nil)
	w.mustSnapshot(&covev1.CreateSnapshotRequest{Sandbox: a.Id})
	kept := w.node.contents()
	if _, err := w.node.Store.Put(t.Context(), strings.NewReader("orphan")); err != nil {
		t.Fatal(err)
	}
	takes := w.node.stored()
	// And a template that was being built when the server died.
	b, _, err := w.server.makeSandbox(w.own(), plan{spec: sandbox.Spec{Image: "base", Template: "py" + buildMark}.WithDefaults(sandbox.StandardDefaults()),
		img: sandbox.Image{ID: "sha256:base"}}, storeNoKey)
	if err != nil {
		t.Fatal(err)
	}
	if err := w.server.Reconcile(t.Context()); err != nil {
		t.Fatal(err)
	}
	if got := w.node.contents(); !slices.Equal(got, kept) || len(got) != 1 || w.node.stored() >= takes {
		t.Errorf("content %v, %d bytes of %d", got, w.node.stored(), takes)
	}
	if got := w.get(b.ID); got.End == nil || got.End.Cause != "infra" || w.node.liveCount() != 1 {
		t.Errorf("the build: %+v, %d live", got, w.node.liveCount())
	}
}

func TestPrune(t *testing.T) {
	w := newWorld(t)
	now := time.Now().UTC()
	add := func(id, sb string, age time.Duration, labels map[string]string) {
		_, err := w.store.CreateSnapshot(w.all(), sandbox.Snapshot{ID: id, Kind: sandbox.MemorySnapshot, Sandbox: sb, CreatedAt: now.Add(-age), Labels: labels,
			Content: sandbox.Content{Manifest: "m" + id, Stored: 100}})
		if err != nil {
			t.Fatal(err)
		}
	}
	add("a1", "a", 4*time.Hour, map[string]string{"keep": "yes"})
	add("a2", "a", 3*time.Hour, nil)
	add("a3", "a", 2*time.Hour, nil)
	add("b1", "b", 5*time.Hour, nil)
	for _, c := range []struct {
		name string
		req  *covev1.PruneSnapshotsRequest
		want string
	}{
		{"keep last, per sandbox", &covev1.PruneSnapshotsRequest{KeepLast: 1}, "a1:keep_last a2:keep_last"},
		{"keep last and labels", &covev1.PruneSnapshotsRequest{KeepLast: 1, KeepLabels: map[string]string{"keep": "yes", "other": "x"}}, "a2:keep_last"},
		{"age", &covev1.PruneSnapshotsRequest{MaxAge: durationpb.New(150 * time.Minute)}, "a1:max_age a2:max_age b1:max_age"},
		{"age of one sandbox", &covev1.PruneSnapshotsRequest{MaxAge: durationpb.New(150 * time.Minute), Sandbox: "b"}, "b1:max_age"},
		{"age, but the last stays", &covev1.PruneSnapshotsRequest{MaxAge: durationpb.New(time.Minute), KeepLast: 1}, "a1:max_age a2:max_age"},
		{"bytes", &covev1.PruneSnapshotsRequest{MaxBytes: 250}, "a1:max_bytes b1:max_bytes"},
		{"bytes, kept ones last", &covev1.PruneSnapshotsRequest{MaxBytes: 250, KeepLabels: map[string]string{"keep": "yes"}}, "a2:max_bytes b1:max_bytes"},
	} {
		c.req.DryRun = true
		r, err := w.client.Snapshots.Prune(t.Context(), connect.NewRequest(c.req))
		if err != nil {
			t.Fatal(err)
		}
		var got []string
		for _, p := range r.Msg.Removed {
			got = append(got, p.Id+":"+p.Reason)
		}
		slices.Sort(got)
		if strings.Join(got, " ") != c.want {
			t.Errorf("%s: %v, want %s", c.name, got, c.want)
		}
	}
	if snaps, _, err := w.store.ListSnapshots(w.all(), store.SnapshotFilter{}); err != nil || len(snaps) != 4 {
		t.Fatalf("a dry run removed something: %d, %v", len(snaps), err)
	}
	r, err := w.client.Snapshots.Prune(t.Context(), connect.NewRequest(&covev1.PruneSnapshotsRequest{KeepLast: 1}))
	if err != nil || len(r.Msg.Removed) != 2 {
		t.Fatal(r, err)
	}
	if snaps, _, err := w.store.ListSnapshots(w.all(), store.SnapshotFilter{}); err != nil || len(snaps) != 2 {
		t.Errorf("%d are left, %v", len(snaps), err)
	}
}

func (w *world) fork(m *covev1.ForkRequest) (*covev1.ForkResponse, error) {
	r, err := w.client.Sandboxes.Fork(w.Context(), connect.NewRequest(m))
	if err != nil {
		return nil, err
	}
	return r.Msg, nil
}

func TestFork(t *testing.T) {
	w := newWorld(t)
	a := w.create(&covev1.SandboxSpec{Labels: map[string]string{"run": "1"}, Env: map[string]string{"A": "1"}, Timeout: durationpb.New(time.Hour)})
	w.write(a.Id, "/f", "x")
	r, err := w.fork(&covev1.ForkRequest{Id: a.Id, Count: 20, Labels: map[string]string{"child": "yes"}, Env: map[string]string{"B": "2"}})
	if err != nil || len(r.Results) != 20 || r.Paused.AsDuration() <= 0 {
		t.Fatal(r, err)
	}
	ids := map[string]bool{a.Id: true}
	for _, res := range r.Results {
		c := res.Sandbox
		if ids[c.Id] || c.Parent != a.Id || c.Spec.Labels["run"] != "1" || c.Spec.Labels["child"] != "yes" || c.Spec.Env["A"] != "1" || c.Spec.Env["B"] != "2" ||
			c.Spec.Timeout.AsDuration() != time.Hour || w.read(c.Id, "/f") != "x" {
			t.Errorf("%+v", c)
		}
		ids[c.Id] = true
	}
	if w.node.passingCount() != 0 || w.node.liveCount() != 21 {
		t.Errorf("%d contents not released, %d live", w.node.passingCount(), w.node.liveCount())
	}
	w.write(a.Id, "/f", "y")
	if got := w.read(r.Results[0].Sandbox.Id, "/f"); got != "x" {
		t.Errorf("a child sees its parent's %q", got)
	}
}

func TestForkAllOrEnough(t *testing.T) {
	w := newWorld(t)
	a := w.create(nil)
	var n atomic.Int32
	full := &sandbox.Error{Class: sandbox.NoCapacity, Msg: "full", RetryAfter: time.Second}
	fail := func(broken int32) { // of each run, this many fail
		n.Store(0)
		w.node.onCreateFrom = func(sandbox.Sandbox) error {
			if n.Add(1) <= broken {
				return full
			}
			return nil
		}
	}
	fail(1)
	_, err := w.fork(&covev1.ForkRequest{Id: a.Id, Count: 5})
	if e := wantError(t, err, sandbox.ErrNoCapacity, "4 of 5 children stood and at least 5 had to", ": full"); e.RetryAfter != time.Second {
		t.Error(e.RetryAfter)
	}
	if w.node.liveCount() != 1 || len(w.records()) != 1 || w.node.passingCount() != 0 {
		t.Errorf("a failed fork left %d sandboxes, %v, %d contents", w.node.liveCount(), w.records(), w.node.passingCount())
	}
	fail(2)
	r, err := w.fork(&covev1.ForkRequest{Id: a.Id, Count: 5, MinReady: 3})
	if err != nil || len(r.Results) != 5 {
		t.Fatal(r, err)
	}
	bad := 0
	for _, res := range r.Results {
		if res.Sandbox == nil {
			bad++
			if e := wire.ErrorFrom(res.Error, res.Message); !errors.Is(e, sandbox.ErrNoCapacity) {
				t.Error(e)
			}
		}
	}
	if bad != 2 || w.node.liveCount() != 4 {
		t.Errorf("%d failed, %d live", bad, w.node.liveCount())
	}
	fail(3)
	_, err = w.fork(&covev1.ForkRequest{Id: a.Id, Count: 5, MinReady: 3})
	wantError(t, err, sandbox.ErrNoCapacity, "2 of 5 children stood and at least 3 had to", "3 times full")
	if w.node.liveCount() != 4 || len(w.records()) != 4 {
		t.Errorf("left %d sandboxes, %d records", w.node.liveCount(), len(w.records()))
	}
}

// What is missing inside is not the sandbox: there is no end of it to wait for.
func TestAMissingPathIsNoMissingSandbox(t *testing.T) {
	w := newWorld(t, func(c *Config) { c.EndWait = time.Hour })
	w.addState()
	a := w.create(nil)
	w.node.onSnapshot = func(_ context.Context, r node.SnapshotRequest) error {
		return sandbox.Errorf(sandbox.NotFound, "guest.file", "no file %s", r.Path)
	}
	_, err := w.snapshot(&covev1.CreateSnapshotRequest{Sandbox: a.Id, Kind: "directory", Path: "/nope"})
	if e := wantError(t, err, sandbox.ErrNotFound, "no file /nope"); e.Reason != "" {
		t.Errorf("reason %q", e.Reason)
	}
	w.node.onRestore = func() error { return sandbox.Errorf(sandbox.NotFound, "node.volume", "no volume 'gone'") }
	_, err = w.client.Sandboxes.Restore(t.Context(), connect.NewRequest(&covev1.RestoreRequest{Id: a.Id, Snapshot: "warm"}))
	wantError(t, err, sandbox.ErrNotFound, "no volume 'gone'")
	_, err = w.snapshot(&covev1.CreateSnapshotRequest{Sandbox: "nosuch"})
	wantError(t, err, sandbox.ErrNoSandbox, "no sandbox 'nosuch'")
}

// Only a refusal to restore is answered with what still starts; everything else
// has a way out of its own.
func TestTheWayOutOfARefusedRestore(t *testing.T) {
	w := newWorld(t)
	w.addState()
	a := w.create(nil)
	create := func(err error) error {
		w.node.onCreateFrom = func(sandbox.Sandbox) error { return err }
		_, err = w.client.Sandboxes.Create(t.Context(), connect.NewRequest(&covev1.CreateSandboxRequest{Spec: &covev1.SandboxSpec{Snapshot: "warm"}}))
		return err
	}
	refused := sandbox.Errorf(sandbox.Precondition, "gvisor.restore", "this CPU lacks avx512")
	e := wantError(t, create(refused.WithReason(sandbox.RestoreRefused)), sandbox.ErrPrecondition, "avx512", "cove create --snapshot files")
	if e.Reason != sandbox.RestoreRefused {
		t.Errorf("reason %q", e.Reason)
	}
	for _, own := range []*sandbox.Error{
		sandbox.Errorf(sandbox.Precondition, "cas", "sealed with key k1").WithHint("add the key with id k1"),
		sandbox.Errorf(sandbox.Unsupported, "node.network", "no networks").WithHint("create it with network none"),
	} {
		if e := wantError(t, create(own), &sandbox.Error{Class: own.Class}); e.Hint != own.Hint {
			t.Errorf("%v: hint %q", own, e.Hint)
		}
	}
	w.node.onCreateFrom = func(sandbox.Sandbox) error {
		return sandbox.Errorf(sandbox.Precondition, "volume", "data is held").WithHint("mount it ro")
	}
	_, err := w.fork(&covev1.ForkRequest{Id: a.Id, Count: 1})
	if e := wantError(t, err, sandbox.ErrPrecondition); e.Hint != "mount it ro" {
		t.Errorf("hint %q", e.Hint)
	}
}

// Of many ways to fail a fork names the first few.
func TestForkNamesTheCauses(t *testing.T) {
	w := newWorld(t)
	a := w.create(nil)
	var n atomic.Int32
	w.node.onCreateFrom = func(sandbox.Sandbox) error {
		return sandbox.Errorf(sandbox.Unavailable, "node.create", "cause %d", (n.Add(1)-1)%5).WithHint("look")
	}
	_, err := w.fork(&covev1.ForkRequest{Id: a.Id, Count: 20, MinReady: 1})
	e := wantError(t, err, sandbox.ErrUnavailable, "0 of 20 children stood and at least 1 had to", "4 times cause", "and 2 other causes")
	if strings.Count(e.Msg, "4 times cause") != 3 || e.Hint != "look" {
		t.Errorf("%q, hint %q", e.Msg, e.Hint)
	}
}

func TestRestore(t *testing.T) {
	w := newWorld(t)
	a := w.create(nil)
	w.write(a.Id, "/f", "one")
	s1 := w.mustSnapshot(&covev1.CreateSnapshotRequest{Sandbox: a.Id})
	w.write(a.Id, "/f", "two")
	s2 := w.mustSnapshot(&covev1.CreateSnapshotRequest{Sandbox: a.Id, Kind: "filesystem"})
	p := w.start(a.Id, "p", sleeping)
	r, err := w.client.Sandboxes.Restore(t.Context(), connect.NewRequest(&covev1.RestoreRequest{Id: a.Id, Snapshot: s1.Id}))
	if err != nil {
		t.Fatal(err)
	}
	if got := r.Msg.Sandbox; got.Id != a.Id || got.Episode != 2 || got.Parent != s1.Id || w.read(a.Id, "/f") != "one" {
		t.Errorf("%+v", got)
	}
	if _, end, err := rest(p); err != nil || end.GetEnd().GetCause() != "reset" {
		t.Errorf("the process of the old episode: %v, %v", end, err)
	}
	r, err = w.client.Sandboxes.Restore(t.Context(), connect.NewRequest(&covev1.RestoreRequest{Id: a.Id, Snapshot: s2.Id}))
	if err != nil || !slices.Equal(w.node.lib.ids(true), []string{r.Msg.Sandbox.ImageId}) || r.Msg.Sandbox.Episode != 3 || w.read(a.Id, "/f") != "two" {
		t.Errorf("%+v, %v", r, err)
	}
	if got := w.get(a.Id); !slices.Equal(got.Ancestors, []string{s2.Id, s1.Id}) || got.ImageId != r.Msg.Sandbox.ImageId {
		t.Errorf("%+v", got)
	}

	// A failure leaves it as it was, and says what still works.
	w.node.onRestore = func() error {
		return sandbox.Errorf(sandbox.Unsupported, "node.restore", "made by build 1, this is build 2").WithReason(sandbox.RestoreRefused)
	}
	_, err = w.client.Sandboxes.Restore(t.Context(), connect.NewRequest(&covev1.RestoreRequest{Id: a.Id, Snapshot: s1.Id}))
	wantError(t, err, sandbox.ErrUnsupported, "build 1", "filesystem snapshot")
	if got := w.get(a.Id); got.Episode != 3 || got.Parent != s2.Id {
		t.Errorf("%+v", got)
	}
	w.node.onRestore = nil
	// A record that cannot be written follows later.
	w.store.failing("UpdateSandbox", errStore)
	if _, err = w.client.Sandboxes.Restore(t.Context(), connect.NewRequest(&covev1.RestoreRequest{Id: a.Id, Snapshot: s1.Id})); err == nil {
		t.Error("no error")
	}
	w.store.failing("UpdateSandbox", nil)
	for w.server.settle(t.Context()); w.get(a.Id).Episode != 4; w.server.settle(t.Context()) {
		<-tick()
	}
	if got := w.get(a.Id); got.Parent != s1.Id || got.ImageId != "sha256:base" {
		t.Errorf("%+v", got)
	}
}

// The writable layer of a memory snapshot has the size it has: no other is
// given out, and it is the one that is reported and reserved.
func TestTheDiskOfAMemorySnapshot(t *testing.T) {
	w := newWorld(t)
	disk := func(n int64) *covev1.Resources { return &covev1.Resources{Disk: n} }
	const small, large = 64 << 20, 10 << 30
	a := w.create(&covev1.SandboxSpec{Resources: disk(small)})
	mem := w.mustSnapshot(&covev1.CreateSnapshotRequest{Sandbox: a.Id, Name: "mem"})
	w.write(a.Id, "/f", "x")
	w.mustSnapshot(&covev1.CreateSnapshotRequest{Sandbox: a.Id, Name: "files", Kind: "filesystem"})
	if _, _, _, err := w.build(t.Context(), &covev1.BuildTemplateRequest{Name: "tpl", Spec: &covev1.SandboxSpec{Image: "base", Resources: disk(small)}}); err != nil {
		t.Fatal(err)
	}
	for name, spec := range map[string]*covev1.SandboxSpec{"larger": {Snapshot: "mem", Resources: disk(large)}, "smaller": {Snapshot: "mem", Resources: disk(32 << 20)}, "template": {Template: "tpl", Resources: disk(large)}} {
		_, err := w.client.Sandboxes.Create(t.Context(), connect.NewRequest(&covev1.CreateSandboxRequest{Spec: spec}))
		if e := wantError(t, err, sandbox.ErrInvalid, "64MiB", "filesystem snapshot"); e.Field != "spec.resources.disk" {
			t.Errorf("%s: the field is %s", name, e.Field)
		}
	}
	for _, c := range []struct {
		spec *covev1.SandboxSpec
		want int64
	}{
		{&covev1.SandboxSpec{Snapshot: "mem"}, small}, {&covev1.SandboxSpec{Snapshot: "mem", Resources: disk(small)}, small}, {&covev1.SandboxSpec{Template: "tpl"}, small},
		{&covev1.SandboxSpec{Snapshot: "files", Resources: disk(large)}, large},
	} {
		if sb := w.create(c.spec); sb.Spec.Resources.Disk != c.want {
			t.Errorf("%v has %d", c.spec, sb.Spec.Resources.Disk)
		}
	}

	// In place: what comes is as large as it was.
	held := func() int64 { return w.server.reservations.usage(sandbox.DefaultTenant).Disk }
	b := w.create(&covev1.SandboxSpec{Resources: disk(large)})
	big := w.mustSnapshot(&covev1.CreateSnapshotRequest{Sandbox: b.Id})
	restore := func(id, snap string) error {
		_, err := w.client.Sandboxes.Restore(t.Context(), connect.NewRequest(&covev1.RestoreRequest{Id: id, Snapshot: snap}))
		return err
	}
	before := held()
	if err := restore(b.Id, mem.Id); err != nil {
		t.Fatal(err)
	}
	if got := w.get(b.Id).Spec.Resources.Disk; got != small || before-held() != large-small {
		t.Errorf("it has %d and gave back %d", got, before-held())
	}
	fork, err := w.fork(&covev1.ForkRequest{Id: b.Id, Count: 1})
	if err != nil || fork.Results[0].Sandbox.Spec.Resources.Disk != small {
		t.Errorf("%v, %v", fork, err)
	}
	if err := restore(b.Id, "files"); err != nil {
		t.Fatal(err)
	}
	if got := w.get(b.Id).Spec.Resources.Disk; got != small {
		t.Errorf("with files it has %d", got)
	}
	// A larger one must be the tenant's to have.
	if _, err := w.client.Tenants.SetQuota(t.Context(), connect.NewRequest(&covev1.SetQuotaRequest{Name: "default", Quota: &covev1.Quota{Disk: held() + large/2}})); err != nil {
		t.Fatal(err)
	}
	before = held()
	wantError(t, restore(b.Id, big.Id), sandbox.ErrQuotaExceeded, "disk")
	if got := w.get(b.Id); got.Spec.Resources.Disk != small || held() != before || got.Episode != 3 {
		t.Errorf("%+v, %d are held", got, held())
	}
	// A server that died before the record was written takes the size from the node.
	w.node.onLive = func(all []sandbox.Sandbox) {
		for i := range all {
			if all[i].ID == b.Id {
				all[i].Spec.Resources.Disk = large
			}
		}
	}
	if err := w.server.Reconcile(t.Context()); err != nil {
		t.Fatal(err)
	}
	if got := w.get(b.Id).Spec.Resources.Disk; got != large || held() != before+large-small {
		t.Errorf("it has %d, %d are held, %d were", got, held(), before)
	}
}

func TestStandby(t *testing.T) {
	w := newWorld(t)
	a := w.create(nil)
	pause := func(cold bool, want string) {
		t.Helper()
		r, err := w.client.Sandboxes.Pause(t.Context(), connect.NewRequest(&covev1.PauseRequest{Id: a.Id, Cold: cold}))
		if err != nil || r.Msg.Sandbox.Standby != want || w.get(a.Id).Standby != want {
			t.Errorf("%v, %v", r, err)
		}
		l, err := w.client.Sandboxes.List(t.Context(), connect.NewRequest(&covev1.ListSandboxesRequest{}))
		if err != nil || l.Msg.Sandboxes[0].Standby != want {
			t.Errorf("listed as %v, %v", l, err)
		}
	}
	pause(false, "hot")
	pause(false, "hot")
	pause(true, "cold")
	tree, err := w.client.Sandboxes.Tree(t.Context(), connect.NewRequest(&covev1.TreeRequest{Id: a.Id}))
	if err != nil || tree.Msg.Nodes[0].State != "cold" {
		t.Errorf("%v, %v", tree, err)
	}
	r, err := w.client.Sandboxes.Resume(t.Context(), connect.NewRequest(&covev1.ResumeRequest{Id: a.Id}))
	if err != nil || r.Msg.Sandbox.Standby != "" || w.get(a.Id).Standby != "" {
		t.Errorf("%v, %v", r, err)
	}
	pause(true, "cold")
	w.read(a.Id, "/etc/passwd") // any call wakes it
	if got := w.get(a.Id).Standby; got != "" {
		t.Error(got)
	}
	if sb, err := w.store.GetSandbox(w.all(), a.Id); err != nil || sb.Standby != "" {
		t.Errorf("stored %q, %v", sb.Standby, err)
	}
}

// build makes a version and returns it with what its start command printed.
func (w *world) build(ctx context.Context, m *covev1.BuildTemplateRequest) (tpl *covev1.Template, steps []string, output string, err error) {
	s, err := w.client.Templates.Build(ctx, connect.NewRequest(m))
	if err != nil {
		return nil, nil, "", err
	}
	defer s.Close()
	for s.Receive() {
		ev := s.Msg()
		output += string(ev.Output)
		if len(ev.Output) == 0 {
			steps = append(steps, ev.Step)
		}
		if ev.Template != nil {
			tpl = ev.Template
		}
	}
	return tpl, steps, output, s.Err()
}

func TestTemplates(t *testing.T) {
	w := newWorld(t)
	tpl, steps, output, err := w.build(t.Context(), &covev1.BuildTemplateRequest{Name: "web", Start: serving, ReadyPort: 8080,
		Spec: &covev1.SandboxSpec{Labels: map[string]string{"app": "web"}, Timeout: durationpb.New(time.Hour)}})
	if err != nil || tpl.GetVersion() != 1 || tpl.Size <= 0 || output != "serving\n" || strings.Join(steps, " ") != "create start ready freeze done" {
		t.Fatalf("%+v, %v, %q, %v", tpl, steps, output, err)
	}
	w.until("the sandbox it was built in has ended", func() bool { return w.node.liveCount() == 0 })
	sb := w.create(&covev1.SandboxSpec{Template: "web"})
	if sb.Spec.Template != "web@1" || sb.Parent != tpl.Snapshot || sb.Spec.Labels["app"] != "web" || sb.Spec.Timeout.AsDuration() != 24*time.Hour || sb.Spec.Image != "base" {
		t.Errorf("%+v", sb)
	}
	st, err := w.client.Processes.Attach(t.Context(), connect.NewRequest(&covev1.AttachProcessRequest{SandboxId: sb.Id, ExecId: startExec}))
	if err != nil {
		t.Fatal(err)
	}
	started := st.Receive()
	if printed := st.Receive(); !started || !printed || string(st.Msg().GetOutput().GetData()) != "serving\n" {
		t.Errorf("the start command does not run there: %v, %v", st.Msg(), st.Err())
	}
	_ = st.Close()
	l, err := w.client.Snapshots.List(t.Context(), connect.NewRequest(&covev1.ListSnapshotsRequest{}))
	if err != nil || len(l.Msg.Snapshots) != 0 {
		t.Errorf("its snapshot is listed: %v, %v", l, err)
	}

	// Builds at once make different versions; the old one goes on working.
	var wg sync.WaitGroup
	for range 4 {
		wg.Go(func() {
			if _, _, _, err := w.build(t.Context(), &covev1.BuildTemplateRequest{Name: "web", Start: sleeping}); err != nil {
				t.Error(err)
			}
		})
	}
	wg.Wait()
	if got := w.create(&covev1.SandboxSpec{Template: "web"}).Spec.Template; got != "web@5" {
		t.Error(got)
	}
	w.create(&covev1.SandboxSpec{Template: "web@1"})
	d, err := w.client.Templates.Delete(t.Context(), connect.NewRequest(&covev1.DeleteTemplateRequest{Name: "web"}))
	if err != nil || len(d.Msg.Versions) != 5 {
		t.Fatal(d, err)
	}
	w.settled()
	if got := w.node.contents(); len(got) != 0 {
		t.Errorf("content %v is left", got)
	}
	w.read(sb.Id, "/etc/passwd")
}

func TestPortsOfATable(t *testing.T) {
	const table = "  sl  local_address rem_address   st tx_queue\n" +
		"   3: 0100007F:C33F 00000000:0000 0A 00000000:00000000\n" +
		"   4: 0100007F:1F90 0100007F:688D 01 00000000:00000000\n" +
		"   5: 00000000000000000000000000000000:0050 00000000000000000000000000000000:0000 0A\n" +
		" garbage\n"
	for port, want := range map[int]bool{0xC33F: true, 80: true, 8080: false, 0x688D: false, 0xC33: false, 0: false, 0x33F: false} {
		if got := hasListener(table, port); got != want {
			t.Errorf("port %d: %v", port, got)
		}
	}
}

// A build that fails leaves no sandbox, no record, no content and no version.
func TestAFailedBuildLeavesNothing(t *testing.T) {
	for name, tc := range map[string]struct {
		req   *covev1.BuildTemplateRequest
		spoil func(*world)
		want  *sandbox.Error
		says  string
	}{
		"the start command fails": {&covev1.BuildTemplateRequest{Start: crashing, ReadyPort: 80}, nil, sandbox.ErrPrecondition, "no port free"},
		"never ready": {&covev1.BuildTemplateRequest{Start: serving, ReadyPort: 81, ReadyTimeout: durationpb.New(time.Second)},
			nil, sandbox.ErrDeadline, "serving"},
		"the check never succeeds": {&covev1.BuildTemplateRequest{Start: sleeping, ReadyCommand: "false", ReadyTimeout: durationpb.New(time.Second)},
			nil, sandbox.ErrDeadline, "sleeping"},
		"no snapshot": {&covev1.BuildTemplateRequest{Start: sleeping}, func(w *world) {
			w.node.onSnapshot = func(context.Context, node.SnapshotRequest) error {
				return sandbox.Errorf(sandbox.DiskFull, "node.snapshot", "no space")
			}
		}, sandbox.ErrDiskFull, "no space"},
		"no record": {&covev1.BuildTemplateRequest{Start: sleeping}, func(w *world) { w.store.failing("CreateTemplateVersion", errStore) }, sandbox.ErrUnavailable, "fire"},
	} {
		t.Run(name, func(t *testing.T) {
			w := newWorld(t)
			if tc.spoil != nil {
				tc.spoil(w)
			}
			tc.req.Name = "web"
			_, _, _, err := w.build(t.Context(), tc.req)
			wantError(t, err, tc.want, tc.says)
			w.settled()
			if w.node.liveCount() != 0 || len(w.records()) != 0 || len(w.node.contents()) != 0 {
				t.Errorf("left %d sandboxes, records %v, content %v", w.node.liveCount(), w.records(), w.node.contents())
			}
			if _, err := w.store.GetTemplate(w.all(), "web", 0); !errors.Is(err, sandbox.ErrNotFound) {
				t.Errorf("a version: %v", err)
			}
		})
	}
}

func TestABuildEndsWithItsCaller(t *testing.T) {
	w := newWorld(t)
	ctx, leave := context.WithCancel(t.Context())
	s, err := w.client.Templates.Build(ctx, connect.NewRequest(&covev1.BuildTemplateRequest{Name: "web", Start: sleeping, ReadyPort: 80}))
	if err != nil {
		t.Fatal(err)
	}
	for s.Receive() && s.Msg().Step != "ready" {
	}
	leave()
	_ = s.Close()
	for len(w.records()) != 0 || w.node.liveCount() != 0 {
		<-tick()
	}
}

func TestVolumeFilesOverHTTP(t *testing.T) {
	w := newWorld(t)
	v, err := w.client.Volumes.Create(t.Context(), connect.NewRequest(&covev1.CreateVolumeRequest{Name: "data", Labels: map[string]string{"a": "b"}}))
	if err != nil || v.Msg.Volume.Size != 1<<30 || v.Msg.Volume.Id == "" || v.Msg.Volume.Node != "n1" {
		t.Fatal(v, err)
	}
	info, err := w.client.UploadVolumeFile(t.Context(), "data", "/dir/f", strings.NewReader("content"), 7, 0o600)
	if err != nil || info.Path != "/dir/f" || info.Size != 7 {
		t.Errorf("%+v, %v", info, err)
	}
	body, size, err := w.client.DownloadVolumeFile(t.Context(), v.Msg.Volume.Id, "/dir/f")
	if err != nil || size != 7 {
		t.Fatal(size, err)
	}
	defer body.Close()
	if b, err := io.ReadAll(body); string(b) != "content" || err != nil {
		t.Errorf("%q, %v", b, err)
	}
	c, err := w.client.Volumes.Clone(t.Context(), connect.NewRequest(&covev1.CloneVolumeRequest{Name: "data", NewName: "copy"}))
	if err != nil || c.Msg.Volume.From != v.Msg.Volume.Id || c.Msg.Volume.Size != 1<<30 || c.Msg.Volume.Id == v.Msg.Volume.Id {
		t.Errorf("%v, %v", c, err)
	}
	for path, want := range map[string]int{
		"/v1/volumes/data/files?path=/dir/f": 200, "/v1/volumes/dat/files?path=/dir/f": 404, "/v1/volumes/data/files?path=/none": 404,
		"/v1/volumes/data/files?path=x": 400, "/v1/volumes/..%2Fx/files?path=/f": 400,
	} {
		if resp, text := w.http("GET", path, nil); resp.StatusCode != want {
			t.Errorf("GET %s: %d %s", path, resp.StatusCode, text)
		}
	}
	if resp, _ := w.http("HEAD", "/v1/volumes/data/files?path=/dir/f", nil); resp.StatusCode != 200 || resp.ContentLength != 7 {
		t.Errorf("HEAD: %v", resp)
	}
	if resp, _ := w.http("PUT", "/v1/volumes/data/files?path=/f&mode=9", strings.NewReader("x")); resp.StatusCode != http.StatusBadRequest {
		t.Errorf("a bad mode: %d", resp.StatusCode)
	}
	l, err := w.client.Volumes.List(t.Context(), connect.NewRequest(&covev1.ListVolumesRequest{Labels: map[string]string{"a": "b"}}))
	if err != nil || len(l.Msg.Volumes) != 1 || l.Msg.Volumes[0].Name != "data" {
		t.Errorf("%v, %v", l, err)
	}
}

func TestANodeWithoutVolumes(t *testing.T) {
	w := newWorld(t)
	w.node.noVolumes = true
	_, err := w.client.Volumes.List(t.Context(), connect.NewRequest(&covev1.ListVolumesRequest{}))
	wantError(t, err, sandbox.ErrUnsupported, "volumes")
}

func TestSnapshotTar(t *testing.T) {
	w := newWorld(t)
	a := w.create(nil)
	w.mustSnapshot(&covev1.CreateSnapshotRequest{Sandbox: a.Id, Kind: "directory", Path: "/etc", Name: "etc"})
	w.mustSnapshot(&covev1.CreateSnapshotRequest{Sandbox: a.Id, Name: "mem"})
	if got := w.get(a.Id).Ancestors; len(got) != 1 {
		t.Errorf("a directory's snapshot moved the sandbox: %v", got)
	}
	body, err := w.client.SnapshotTar(t.Context(), "etc")
	if err != nil {
		t.Fatal(err)
	}
	defer body.Close()
	if b, err := io.ReadAll(body); !bytes.Contains(b, []byte("root:x:0:0")) || err != nil {
		t.Errorf("%q, %v", b, err)
	}
	_, err = w.client.SnapshotTar(t.Context(), "mem")
	wantError(t, err, sandbox.ErrInvalid, "memory")
	etc, err := w.store.GetSnapshot(w.all(), "etc")
	if err != nil {
		t.Fatal(err)
	}
	w.node.spoil(t, cas.ID(etc.Content.Manifest))
	_, err = w.client.SnapshotTar(t.Context(), "etc")
	wantError(t, err, sandbox.ErrCorrupt, etc.Content.Manifest)
	_, err = w.client.Snapshots.Verify(t.Context(), connect.NewRequest(&covev1.VerifySnapshotRequest{Id: "etc"}))
	wantError(t, err, sandbox.ErrCorrupt, etc.Content.Manifest)
}

// An image that only snapshots use stays; with the last of them it goes.
func TestImagesOfSnapshotsAreNotPruned(t *testing.T) {
	w := newWorld(t)
	if _, err := w.server.PublishImage(t.Context(), w.node.lib.add("py"), "py"); err != nil {
		t.Fatal(err)
	}
	a := w.create(&covev1.SandboxSpec{Image: "py"})
	w.mustSnapshot(&covev1.CreateSnapshotRequest{Sandbox: a.Id, Name: "s", Stop: true})
	if _, err := w.client.Images.Remove(t.Context(), connect.NewRequest(&covev1.RemoveImageRequest{Name: "py"})); err != nil {
		t.Fatal(err)
	}
	for _, dry := range []bool{true, false} {
		r, err := w.client.Images.Prune(t.Context(), connect.NewRequest(&covev1.PruneImagesRequest{DryRun: dry}))
		if err != nil || len(r.Msg.Ids) != 0 || !w.node.lib.Have("sha256:py") {
			t.Errorf("dry %v: %v, %v", dry, r, err)
		}
	}
	w.create(&covev1.SandboxSpec{Snapshot: "s"})
}
