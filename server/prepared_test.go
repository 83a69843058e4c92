package server

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"connectrpc.com/connect"
	"pgregory.net/rapid"

	covev1 "github.com/cove-sandbox/cove/api/cove/v1"
	"github.com/cove-sandbox/cove/sandbox"
	"github.com/cove-sandbox/cove/store"
)

func sealed(on bool) func(*Config) { return func(c *Config) { c.Node.(*double).sealed = on } }

// untilDerived waits for the collections that were wanted, not for one of its own.
func (w *world) untilDerived(want int) {
	w.Helper()
	tooLong := time.After(litterEvery / 3) // before the loop looks by itself
	for len(w.node.lib.ids(true)) != want {
		select {
		case <-tick():
		case <-tooLong:
			w.Fatalf("prepared images %v, want %d", w.node.lib.ids(true), want)
		}
	}
}

func (w *world) deleteSnapshot(id string) (freed int64) {
	w.Helper()
	r, err := w.client.Snapshots.Delete(w.Context(), connect.NewRequest(&covev1.DeleteSnapshotRequest{Id: id}))
	if err != nil {
		w.Fatal(err)
	}
	return r.Msg.Freed
}

// files is a filesystem snapshot of a new sandbox from spec, which has ended.
func (w *world) files(spec *covev1.SandboxSpec) *covev1.Snapshot {
	w.Helper()
	sb := w.create(spec)
	w.write(sb.Id, "/f", sb.Id)
	return w.mustSnapshot(&covev1.CreateSnapshotRequest{Sandbox: sb.Id, Kind: "filesystem", Stop: true})
}

func TestAPreparedImageGoesWithItsLastUser(t *testing.T) {
	w := newWorld(t)
	snap := w.files(nil)
	takes := w.node.stored()
	if freed := w.deleteSnapshot(snap.Id); freed != takes || freed == 0 {
		t.Errorf("freed %d of a snapshot that was never used and takes %d", freed, takes)
	}

	// Nobody runs from it: with the snapshot.
	snap = w.files(nil)
	w.kill(w.create(&covev1.SandboxSpec{Snapshot: snap.Id}).Id)
	w.settled()
	w.untilDerived(1) // for the next create
	takes = w.node.stored()
	if freed := w.deleteSnapshot(snap.Id); freed != takes || freed == 0 {
		t.Errorf("freed %d of %d", freed, takes)
	}
	w.untilDerived(0)

	// Somebody does, asleep: with that sandbox.
	snap = w.files(nil)
	sb := w.create(&covev1.SandboxSpec{Snapshot: snap.Id})
	takes = w.node.stored()
	if err := w.node.Pause(t.Context(), sb.Id, true); err != nil {
		t.Fatal(err)
	}
	if freed := w.deleteSnapshot(snap.Id); freed != takes || freed == 0 {
		t.Errorf("freed %d of %d under a sandbox", freed, takes)
	}
	w.untilDerived(1)
	w.kill(sb.Id)
	w.untilDerived(0)

	// One that ends by itself.
	snap = w.files(nil)
	sb = w.create(&covev1.SandboxSpec{Snapshot: snap.Id})
	w.deleteSnapshot(snap.Id)
	w.node.die(sb.Id, sandbox.OOM)
	w.untilDerived(0)

	// One that is made into something else.
	snap = w.files(nil)
	sb = w.create(&covev1.SandboxSpec{Snapshot: snap.Id})
	w.deleteSnapshot(snap.Id)
	other := w.mustSnapshot(&covev1.CreateSnapshotRequest{Sandbox: w.create(nil).Id})
	if _, err := w.client.Sandboxes.Restore(t.Context(), connect.NewRequest(&covev1.RestoreRequest{Id: sb.Id, Snapshot: other.Id})); err != nil {
		t.Fatal(err)
	}
	w.untilDerived(0)

	// A chain: what is over it needs it.
	snap = w.files(nil)
	over := w.files(&covev1.SandboxSpec{Snapshot: snap.Id})
	sb = w.create(&covev1.SandboxSpec{Snapshot: over.Id})
	memory := w.mustSnapshot(&covev1.CreateSnapshotRequest{Sandbox: sb.Id, Stop: true})
	w.deleteSnapshot(snap.Id)
	w.deleteSnapshot(memory.Id)
	w.untilDerived(2)
	w.deleteSnapshot(over.Id)
	w.untilDerived(0)
}

// A create that comes to nothing leaves no image of a snapshot that is gone.
func TestAPreparedImageOfAFailedCreate(t *testing.T) {
	w := newWorld(t)
	snap := w.files(nil)
	reached, gate := make(chan struct{}), make(chan struct{})
	w.node.onCreate = func(context.Context, sandbox.Sandbox) error { close(reached); <-gate; return errStore }
	var wg sync.WaitGroup
	wg.Go(func() {
		if _, err := w.createWith(t.Context(), "", &covev1.SandboxSpec{Snapshot: snap.Id}); sandbox.ClassOf(err) != sandbox.Unavailable {
			t.Error(err)
		}
	})
	<-reached
	w.deleteSnapshot(snap.Id)
	w.untilDerived(1)
	close(gate)
	wg.Wait()
	w.untilDerived(0)
}

// A restore is the node's before it is the record's.
func TestAPreparedImageOfARestoreOffTheRecord(t *testing.T) {
	w := newWorld(t)
	snap, sb := w.files(nil), w.create(nil)
	w.store.failing("UpdateSandbox", errStore)
	if _, err := w.client.Sandboxes.Restore(t.Context(), connect.NewRequest(&covev1.RestoreRequest{Id: sb.Id, Snapshot: snap.Id})); err == nil {
		t.Fatal("restored without a record")
	}
	w.deleteSnapshot(snap.Id)
	w.settled()
	w.untilDerived(1)
	w.store.failing("UpdateSandbox", nil)
	w.kill(sb.Id)
	w.untilDerived(0)
}

// What a crash left goes at the next start, and nothing that is another's.
func TestReconcileRemovesPreparedImages(t *testing.T) {
	w := newWorld(t)
	snap := w.files(nil)
	w.kill(w.create(&covev1.SandboxSpec{Snapshot: snap.Id}).Id)
	kept := w.node.lib.ids(true)
	// Killed between a delete and its collection, between an image and its
	// record, between a record's end and its content's, and in a mount.
	if err := w.store.PutImage(w.all(), w.node.lib.of("unused", sandbox.ImageDerived), ""); err != nil {
		t.Fatal(err)
	}
	w.node.lib.of("unrecorded", sandbox.ImageDerived)
	data := w.node.lib.of("data", sandbox.ImageData).ID
	w.node.lib.add("pulled")
	if err := w.server.Reconcile(t.Context()); err != nil {
		t.Fatal(err)
	}
	if got := w.node.lib.ids(true); !slices.Equal(got, kept) || len(got) != 1 || w.node.lib.Have(data) || !w.node.lib.Have("sha256:pulled") {
		t.Errorf("left %v of %v", got, w.node.lib.ids(false))
	}
}

// Where content is encrypted an image goes with the last sandbox, and comes
// again with the next.
func TestAPreparedImageOfEncryptedContent(t *testing.T) {
	w := newWorld(t, sealed(true))
	snap := w.files(nil)
	for i := range 2 {
		a, b := w.create(&covev1.SandboxSpec{Snapshot: snap.Id}), w.create(&covev1.SandboxSpec{Snapshot: snap.Id})
		if got := w.read(b.Id, "/f"); got != snap.Sandbox {
			t.Errorf("the file is %q", got)
		}
		w.kill(a.Id)
		w.settled()
		w.untilDerived(1)
		w.kill(b.Id)
		w.untilDerived(0)
		if w.node.saw().prepares != i+1 {
			t.Errorf("%d images made, two sandboxes at once want one", w.node.saw().prepares)
		}
	}
	// A failed create leaves none either.
	w.node.onCreate = func(context.Context, sandbox.Sandbox) error { return errStore }
	if _, err := w.createWith(t.Context(), "", &covev1.SandboxSpec{Snapshot: snap.Id}); sandbox.ClassOf(err) != sandbox.Unavailable {
		t.Error(err)
	}
	w.untilDerived(0)
	w.node.onCreate = nil

	// What is over it cannot do without; the start takes what a server without
	// keys left.
	sb := w.create(&covev1.SandboxSpec{Snapshot: snap.Id})
	over := w.mustSnapshot(&covev1.CreateSnapshotRequest{Sandbox: sb.Id, Stop: true})
	w.settled()
	w.untilDerived(1)
	w.kill(w.create(&covev1.SandboxSpec{Snapshot: over.Id}).Id)
	w.deleteSnapshot(over.Id)
	w.untilDerived(0)
	w.server.about.Sealed = false // as a server that has no keys
	w.kill(w.create(&covev1.SandboxSpec{Snapshot: snap.Id}).Id)
	w.settled()
	w.untilDerived(1)
	w.server.about.Sealed = true
	w.node.onCollect = func(context.Context) error { return errStore } // as where a key is missing
	if err := w.server.Reconcile(t.Context()); err != nil {
		t.Fatal(err)
	}
	w.untilDerived(0)
}

// Creates, ends and deletes at once: whatever is created has its image, and in
// the end there is none.
func TestPreparedImagesRace(t *testing.T) {
	for _, keys := range []bool{false, true} {
		t.Run(fmt.Sprint("encrypted=", keys), func(t *testing.T) {
			w := newWorld(t, sealed(keys))
			var snaps []string
			for range 3 {
				snaps = append(snaps, w.files(nil).Id)
			}
			var wg sync.WaitGroup
			var deleting atomic.Bool
			for i := range 6 {
				wg.Go(func() {
					for n := range 25 {
						r, err := w.createWith(t.Context(), "", &covev1.SandboxSpec{Snapshot: snaps[(i+n)%len(snaps)]})
						if err != nil {
							if !errors.Is(err, sandbox.ErrNotFound) || !deleting.Load() {
								t.Error(err)
							}
							continue
						}
						w.kill(r.Sandbox.Id)
						if i == 0 && n >= 20 {
							deleting.Store(true)
							_, _ = w.client.Snapshots.Delete(t.Context(), connect.NewRequest(&covev1.DeleteSnapshotRequest{Id: snaps[n%len(snaps)]}))
						}
					}
				})
			}
			wg.Wait()
			for _, id := range snaps {
				_, _ = w.client.Snapshots.Delete(t.Context(), connect.NewRequest(&covev1.DeleteSnapshotRequest{Id: id}))
			}
			w.untilDerived(0)
		})
	}
}

// TestPreparedImagesModel does all that has to do with snapshots in any order,
// and after each step compares the library with what may and must be there.
func TestPreparedImagesModel(t *testing.T) {
	worlds := map[bool]*world{false: newWorld(t, sealed(false)), true: newWorld(t, sealed(true))}
	rapid.Check(t, func(rt *rapid.T) {
		keys := rapid.Bool().Draw(rt, "encrypted")
		w := worlds[keys]
		live, snaps := map[string]bool{}, map[string]string{} // by id; its kind
		pick := func(m []string, what string) string {
			if len(m) == 0 {
				rt.Skip()
			}
			slices.Sort(m)
			return rapid.SampledFrom(m).Draw(rt, what)
		}
		box := func() string { return pick(slices.Collect(maps.Keys(live)), "sandbox") }
		snap := func() string { return pick(slices.Collect(maps.Keys(snaps)), "snapshot") }
		rt.Repeat(map[string]func(*rapid.T){
			"create": func(rt *rapid.T) {
				if len(live) < 8 {
					live[w.create(nil).Id] = true
				}
			},
			"from": func(rt *rapid.T) {
				if from := snap(); len(live) < 8 {
					live[w.create(&covev1.SandboxSpec{Snapshot: from}).Id] = true
				}
			},
			"take": func(rt *rapid.T) {
				id, kind := box(), rapid.SampledFrom([]string{"memory", "filesystem"}).Draw(rt, "kind")
				stop := rapid.Bool().Draw(rt, "stop")
				w.write(id, "/f", fmt.Sprint(len(snaps)))
				snaps[w.mustSnapshot(&covev1.CreateSnapshotRequest{Sandbox: id, Kind: kind, Stop: stop}).Id] = kind
				if stop {
					delete(live, id)
				}
			},
			"restore": func(rt *rapid.T) {
				r := connect.NewRequest(&covev1.RestoreRequest{Id: box(), Snapshot: snap()})
				if _, err := w.client.Sandboxes.Restore(t.Context(), r); err != nil {
					rt.Fatal(err)
				}
			},
			"kill": func(rt *rapid.T) { id := box(); w.kill(id); delete(live, id) },
			"die": func(rt *rapid.T) {
				id := box()
				w.node.die(id, sandbox.OOM)
				w.ended(id)
				delete(live, id)
			},
			"delete": func(rt *rapid.T) { id := snap(); w.deleteSnapshot(id); delete(snaps, id) },
			"start": func(rt *rapid.T) {
				w.node.lib.of("left", sandbox.ImageDerived)
				if err := w.server.Reconcile(t.Context()); err != nil {
					rt.Fatal(err)
				}
			},
			"": func(rt *rapid.T) {
				w.settled()
				w.checkDerived(rt, keys)
			},
		})
		for id := range live {
			w.kill(id)
		}
		for id := range snaps {
			w.deleteSnapshot(id)
		}
		w.untilDerived(0)
	})
}

// checkDerived wants every image that something refers to, and of the prepared
// ones no other.
func (w *world) checkDerived(rt *rapid.T, keys bool) {
	must, may := map[string]bool{}, map[string]bool{}
	for _, sb := range all(w.TB.(*testing.T), func(ctx context.Context) ([]sandbox.Sandbox, error) { return w.server.liveRecords(ctx) }) {
		must[sb.ImageID] = true
	}
	snaps, err := w.server.allSnapshots(w.all(), store.SnapshotFilter{})
	if err != nil {
		rt.Fatal(err)
	}
	for _, snap := range snaps {
		if !keys && snap.Content.Image != "" {
			may[snap.Content.Image] = true
		}
		snap.Content.Image = ""
		for _, id := range store.ImagesOf(snap) {
			must[id] = true
		}
	}
	for id := range must {
		may[id] = true
		if !w.node.lib.Have(id) {
			rt.Fatalf("image %s is gone and still needed", id)
		}
	}
	for _, id := range w.node.lib.ids(true) {
		if !may[id] {
			rt.Fatalf("image %s is there and nothing refers to it", id)
		}
	}
}
