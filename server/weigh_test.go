package server

import (
	"fmt"
	"strings"
	"testing"

	"connectrpc.com/connect"

	covev1 "github.com/cove-sandbox/cove/api/cove/v1"
	"github.com/cove-sandbox/cove/sandbox"
)

// A quota of bytes sees what snapshots hold, whoever of them was the first to
// store it and whatever has become of that one.
func TestTheQuotaCountsWhatSnapshotsHold(t *testing.T) {
	kilobyte := func(c string) string { return strings.Repeat(c, 1000) }
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
		if _, err := w.client.Tenants.SetQuota(t.Context(), connect.NewRequest(&covev1.SetQuotaRequest{Name: "default", Quota: &covev1.Quota{SnapshotBytes: 2500}})); err != nil {
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
		if n := used(w); n != 2020 {
			w.Errorf("%d bytes are used", n)
		}
		w.write(id, "/f", kilobyte("n"))
		w.mustSnapshot(&covev1.CreateSnapshotRequest{Sandbox: id})
		w.write(id, "/f", kilobyte("o"))
		_, err := w.snapshot(&covev1.CreateSnapshotRequest{Sandbox: id})
		wantError(w, err, sandbox.ErrQuotaExceeded, "snapshots")
	}

	t.Run("of sandboxes on disk", func(t *testing.T) {
		w, id := bounded(t)
		for i := range 2 {
			w.write(id, "/f", kilobyte(fmt.Sprint(i)))
			if _, err := w.client.Sandboxes.Pause(t.Context(), connect.NewRequest(&covev1.PauseRequest{Id: id, Cold: true})); err != nil {
				t.Fatal(err)
			}
			if snap := w.mustSnapshot(&covev1.CreateSnapshotRequest{Sandbox: id}); snap.Stored != 0 {
				t.Errorf("it added %d", snap.Stored)
			}
			again := w.mustSnapshot(&covev1.CreateSnapshotRequest{Sandbox: id, Name: fmt.Sprint("n", i)})
			if n := used(w); n != int64(i+1)*1010 {
				t.Errorf("%d bytes are used with %s, which is the same content", n, again.Id)
			}
		}
		full(w, id)
	})
	t.Run("by other names of what is deleted", func(t *testing.T) {
		w, id := bounded(t)
		for i := range 2 {
			w.write(id, "/f", kilobyte(fmt.Sprint(i)))
			first := w.mustSnapshot(&covev1.CreateSnapshotRequest{Sandbox: id})
			w.mustSnapshot(&covev1.CreateSnapshotRequest{Sandbox: id, Name: fmt.Sprint("n", i)})
			remove(w, first.Id)
		}
		full(w, id)
	})
	t.Run("of others that are deleted", func(t *testing.T) {
		w, id := bounded(t)
		for i := range 2 {
			w.write(id, "/f", kilobyte(fmt.Sprint(i)))
			first := w.mustSnapshot(&covev1.CreateSnapshotRequest{Sandbox: id})
			w.write(id, "/little", fmt.Sprint(i))
			if second := w.mustSnapshot(&covev1.CreateSnapshotRequest{Sandbox: id}); second.Stored != 10 {
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
		w.write(id, "/shared", strings.Repeat(shared, 1000))
		w.write(id, "/own", strings.Repeat(own, 100))
		snaps = append(snaps, w.mustSnapshot(&covev1.CreateSnapshotRequest{Sandbox: id}).Id)
	}
	take("x", "1")
	take("x", "2")
	take("x", "3")
	take("y", "4")
	// Another sandbox has the last one's content too, for a template and as a
	// name of the same.
	if _, _, _, err := w.build(t.Context(), &covev1.BuildTemplateRequest{Name: "tpl", Spec: &covev1.SandboxSpec{Snapshot: snaps[3]}}); err != nil {
		t.Fatal(err)
	}
	prune := func(budget int64, dry bool) (said string, freed int64) {
		t.Helper()
		r, err := w.client.Snapshots.Prune(t.Context(), connect.NewRequest(&covev1.PruneSnapshotsRequest{MaxBytes: budget, DryRun: dry}))
		if err != nil {
			t.Fatal(err)
		}
		for _, p := range r.Msg.Removed {
			for i, id := range snaps {
				if id == p.Id {
					said += fmt.Sprintf("%d:%d ", i+1, p.Stored)
				}
			}
			freed += p.Stored
		}
		return said, freed
	}
	takes := func() int64 {
		w.node.mu.Lock()
		defer w.node.mu.Unlock()
		return w.node.takesLocked()
	}
	for _, c := range []struct {
		budget int64
		want   string
	}{
		{1350, ""}, // 1000 shared, three times 100 and 10, and the 10 of the fourth that the template does not hold
		{1339, "1:110 "},
		{1100, "1:110 2:110 3:1110 "}, // only then are the shared ones free
		{9, "1:110 2:110 3:1110 4:10 "},
	} {
		if got, _ := prune(c.budget, true); got != c.want {
			t.Errorf("budget %d: %q, want %q", c.budget, got, c.want)
		}
	}
	before := takes()
	said, freed := prune(1100, false)
	if said != "1:110 2:110 3:1110 " {
		t.Error(said)
	}
	w.settled()
	if got := before - takes(); got != freed {
		t.Errorf("%d bytes were to be freed, %d are", freed, got)
	}

	// What was taken of a sandbox on disk added nothing, and is freed all the same.
	w = newWorld(t)
	id = w.create(nil).Id
	w.write(id, "/f", strings.Repeat("f", 1000))
	if _, err := w.client.Sandboxes.Pause(t.Context(), connect.NewRequest(&covev1.PauseRequest{Id: id, Cold: true})); err != nil {
		t.Fatal(err)
	}
	snaps = []string{w.mustSnapshot(&covev1.CreateSnapshotRequest{Sandbox: id}).Id}
	w.kill(id)
	if said, _ := prune(500, true); said != "1:1010 " {
		t.Error(said)
	}
	before = takes()
	prune(500, false)
	w.settled()
	if got := before - takes(); got != 1010 {
		t.Errorf("%d bytes are free", got)
	}
}
