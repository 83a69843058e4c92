package server

import (
	"fmt"
	"slices"
	"testing"

	"connectrpc.com/connect"

	covev1 "github.com/cove-sandbox/cove/api/cove/v1"
	"github.com/cove-sandbox/cove/sandbox"
	"github.com/cove-sandbox/cove/snapshot"
	"github.com/cove-sandbox/cove/store"
)

// takes is what snapshots take together, on the disk of the node.
func (w *world) takes(ids ...string) int64 {
	w.Helper()
	var h snapshot.Holding
	for _, id := range ids {
		snap, err := w.store.GetSnapshot(w.all(), id)
		if err != nil {
			w.Fatal(err)
		}
		blobs, err := w.node.Blobs(w.Context(), []string{snap.Content.Manifest})
		if err != nil || len(blobs) != 1 {
			w.Fatal(blobs, err)
		}
		h.Add(blobs[snap.Content.Manifest])
	}
	return h.Bytes()
}

// allTake is takes of all there are.
func (w *world) allTake() int64 {
	w.Helper()
	snaps, err := w.server.allSnapshots(w.all(), store.SnapshotFilter{})
	if err != nil {
		w.Fatal(err)
	}
	ids := make([]string, len(snaps))
	for i, s := range snaps {
		ids[i] = s.ID
	}
	return w.takes(ids...)
}

// noise is content that does not get smaller.
func noise(n int) string { return string(randomBytes(n)) }

// A quota of bytes sees what snapshots hold, whoever of them was the first to
// store it and whatever has become of that one.
func TestTheQuotaCountsWhatSnapshotsHold(t *testing.T) {
	const size = 64 << 10 // beside which all else in a snapshot is little
	used := func(w *world) int64 {
		w.Helper()
		r, err := w.client.Tenants.Get(w.Context(), connect.NewRequest(&covev1.GetTenantRequest{}))
		if err != nil {
			w.Fatal(err)
		}
		return r.Msg.Tenant.Used.SnapshotBytes
	}
	bounded := func(t *testing.T) (*world, string) {
		w := newWorld(t)
		if _, err := w.client.Tenants.SetQuota(t.Context(), connect.NewRequest(&covev1.SetQuotaRequest{Name: "default", Quota: &covev1.Quota{SnapshotBytes: 5 * size / 2}})); err != nil {
			t.Fatal(err)
		}
		return w, w.create(nil).Id
	}
	remove := func(w *world, id string) {
		w.Helper()
		if _, err := w.client.Snapshots.Delete(w.Context(), connect.NewRequest(&covev1.DeleteSnapshotRequest{Id: id})); err != nil {
			w.Fatal(err)
		}
	}
	full := func(w *world, id string) {
		w.Helper()
		if n := used(w); n != w.allTake() || n < 2*size || n > 5*size/2 {
			w.Errorf("%d bytes are used, %d are taken", n, w.allTake())
		}
		w.write(id, "/f", noise(size))
		w.mustSnapshot(&covev1.CreateSnapshotRequest{Sandbox: id})
		w.write(id, "/f", noise(size))
		_, err := w.snapshot(&covev1.CreateSnapshotRequest{Sandbox: id})
		wantError(w, err, sandbox.ErrQuotaExceeded, "snapshots")
	}

	t.Run("of sandboxes on disk", func(t *testing.T) {
		w, id := bounded(t)
		for i := range 2 {
			w.write(id, "/f", noise(size))
			if _, err := w.client.Sandboxes.Pause(t.Context(), connect.NewRequest(&covev1.PauseRequest{Id: id, Cold: true})); err != nil {
				t.Fatal(err)
			}
			// Already in the content store, and in no snapshot of the tenant.
			before := w.allTake()
			if snap := w.mustSnapshot(&covev1.CreateSnapshotRequest{Sandbox: id}); snap.Stored != w.allTake()-before || snap.Stored < size {
				t.Errorf("it added %d, %d were taken and %d are", snap.Stored, before, w.allTake())
			}
			again := w.mustSnapshot(&covev1.CreateSnapshotRequest{Sandbox: id, Name: fmt.Sprint("n", i)})
			if n := used(w); n != w.allTake() || n > int64(i+1)*5*size/4 {
				t.Errorf("%d bytes are used with %s, which is the same content", n, again.Id)
			}
		}
		full(w, id)
	})
	t.Run("by other names of what is deleted", func(t *testing.T) {
		w, id := bounded(t)
		for i := range 2 {
			w.write(id, "/f", noise(size))
			first := w.mustSnapshot(&covev1.CreateSnapshotRequest{Sandbox: id})
			w.mustSnapshot(&covev1.CreateSnapshotRequest{Sandbox: id, Name: fmt.Sprint("n", i)})
			remove(w, first.Id)
		}
		full(w, id)
	})
	t.Run("of others that are deleted", func(t *testing.T) {
		w, id := bounded(t)
		for i := range 2 {
			w.write(id, "/f", noise(size))
			first := w.mustSnapshot(&covev1.CreateSnapshotRequest{Sandbox: id, Kind: "filesystem"})
			w.write(id, "/little", fmt.Sprint(i))
			if second := w.mustSnapshot(&covev1.CreateSnapshotRequest{Sandbox: id, Kind: "filesystem"}); second.Stored > size/10 || second.Stored == 0 {
				t.Errorf("it added %d", second.Stored)
			}
			remove(w, first.Id)
		}
		full(w, id)
		// Room is made by what really goes.
		l, err := w.client.Snapshots.List(t.Context(), connect.NewRequest(&covev1.ListSnapshotsRequest{}))
		if err != nil {
			t.Fatal(err)
		}
		remove(w, l.Msg.Snapshots[0].Id)
		w.mustSnapshot(&covev1.CreateSnapshotRequest{Sandbox: id})
	})
}

// A prune says beforehand what it frees, and a budget is one of bytes on disk.
func TestAPruneFreesWhatItSays(t *testing.T) {
	w := newWorld(t)
	id := w.create(nil).Id
	var snaps []string
	take := func(shared, own string) {
		t.Helper()
		w.write(id, "/shared", shared)
		w.write(id, "/own", own)
		snaps = append(snaps, w.mustSnapshot(&covev1.CreateSnapshotRequest{Sandbox: id, Kind: "filesystem"}).Id)
	}
	x, y := noise(100<<10), noise(100<<10)
	for range 3 {
		take(x, noise(10<<10))
	}
	take(y, noise(10<<10))
	// Another sandbox has the last one's content too, for a template and as a
	// name of the same.
	tpl, _, _, err := w.build(t.Context(), &covev1.BuildTemplateRequest{Name: "tpl", Spec: &covev1.SandboxSpec{Snapshot: snaps[3]}})
	if err != nil {
		t.Fatal(err)
	}
	prune := func(budget int64, dry bool) (said string, freed int64) {
		t.Helper()
		r, err := w.client.Snapshots.Prune(t.Context(), connect.NewRequest(&covev1.PruneSnapshotsRequest{MaxBytes: budget, DryRun: dry}))
		if err != nil {
			t.Fatal(err)
		}
		for _, p := range r.Msg.Removed {
			said += fmt.Sprintf("%d:%d ", slices.Index(snaps, p.Id)+1, p.Stored)
			freed += p.Stored
		}
		return said, freed
	}
	// left is what the snapshots after the first n take over the template, which a
	// budget is not about.
	left := func(n int) int64 { return w.takes(append(snaps[n:], tpl.Snapshot)...) - w.takes(tpl.Snapshot) }
	said := func(n int) (s string) {
		for i := range n {
			s += fmt.Sprintf("%d:%d ", i+1, left(i)-left(i+1))
		}
		return s
	}
	if shared := left(2) - left(3); shared < 100<<10 || left(0)-left(1) > 20<<10 {
		t.Fatalf("the third frees %d and the first %d: nothing is shared", shared, left(0)-left(1))
	}
	for n := range 5 {
		if got, _ := prune(max(left(n), 1), true); got != said(n) {
			t.Errorf("budget %d: %q, want %q", left(n), got, said(n))
		}
		if n < 4 && left(n) > 1 {
			if got, _ := prune(left(n)-1, true); got != said(n+1) {
				t.Errorf("budget %d: %q, want %q", left(n)-1, got, said(n+1))
			}
		}
	}
	before, want := w.node.stored(), said(3)
	did, freed := prune(left(3), false)
	if did != want {
		t.Errorf("%q, want %q", did, want)
	}
	w.settled()
	if got := before - w.node.stored(); got != freed {
		t.Errorf("%d bytes were to be freed, %d are", freed, got)
	}

	// What was taken of a sandbox on disk added nothing, and is freed all the same.
	w = newWorld(t)
	id = w.create(nil).Id
	w.write(id, "/f", noise(10<<10))
	if _, err := w.client.Sandboxes.Pause(t.Context(), connect.NewRequest(&covev1.PauseRequest{Id: id, Cold: true})); err != nil {
		t.Fatal(err)
	}
	snaps = []string{w.mustSnapshot(&covev1.CreateSnapshotRequest{Sandbox: id}).Id}
	w.kill(id)
	all := w.takes(snaps...)
	if did, _ := prune(all/2, true); did != fmt.Sprintf("1:%d ", all) {
		t.Error(did)
	}
	before = w.node.stored()
	prune(all/2, false)
	w.settled()
	if got := before - w.node.stored(); got != all {
		t.Errorf("%d bytes are free of %d", got, all)
	}
}
