package server

import (
	"context"
	"errors"
	"strings"
	"testing"
	"time"

	"connectrpc.com/connect"

	covev1 "github.com/cove-sandbox/cove/api/cove/v1"
	"github.com/cove-sandbox/cove/egress/recording"
	"github.com/cove-sandbox/cove/sandbox"
	"github.com/cove-sandbox/cove/store"
)

func (w *world) makeVolume(name string, size int64) (*covev1.Volume, error) {
	r, err := w.client.Volumes.Create(w.Context(), connect.NewRequest(&covev1.CreateVolumeRequest{Name: name, Size: size}))
	if err != nil {
		return nil, err
	}
	return r.Msg.Volume, nil
}

func (w *world) listVolumes() []*covev1.Volume {
	w.Helper()
	r, err := w.client.Volumes.List(w.Context(), connect.NewRequest(&covev1.ListVolumesRequest{}))
	if err != nil {
		w.Fatal(err)
	}
	return r.Msg.Volumes
}

// What fails half-way leaves the record, the content and the quota as they were.
func TestAVolumeIsThereOrNot(t *testing.T) {
	w := newWorld(t)
	broken := sandbox.Errorf(sandbox.NoCapacity, "volume.create", "the disk is full")
	var fail string
	w.node.onVolume = func(op string) error {
		if op == fail {
			return broken
		}
		return nil
	}
	held := func(want int64) {
		t.Helper()
		if got := w.server.reservations.usage(sandbox.DefaultTenant).Disk; got != want {
			t.Errorf("%d bytes are held, want %d", got, want)
		}
	}
	fail = "create"
	_, err := w.makeVolume("data", sandbox.GiB)
	wantError(t, err, sandbox.ErrNoCapacity, "full")
	if recs, err := w.store.ListVolumes(w.all()); err != nil || len(recs) > 0 {
		t.Errorf("on record: %v, %v", recs, err)
	}
	held(0)
	fail = ""
	v, err := w.makeVolume("data", sandbox.GiB+1) // sizes are whole mebibytes
	if err != nil || v.Size != sandbox.GiB+1<<20 {
		t.Fatal(v, err)
	}
	_, err = w.makeVolume("data", sandbox.GiB)
	wantError(t, err, sandbox.ErrAlreadyExists, "data")
	held(v.Size)
	fail = "resize"
	_, err = w.client.Volumes.Resize(t.Context(), connect.NewRequest(&covev1.ResizeVolumeRequest{Name: "data", Size: 2 * sandbox.GiB}))
	wantError(t, err, sandbox.ErrNoCapacity)
	held(v.Size)
	fail = "delete"
	_, err = w.client.Volumes.Delete(t.Context(), connect.NewRequest(&covev1.DeleteVolumeRequest{Name: "data"}))
	wantError(t, err, sandbox.ErrNoCapacity)
	if l := w.listVolumes(); len(l) != 1 || l[0].Size != v.Size {
		t.Errorf("%v", l)
	}
	fail = ""
	if r, err := w.client.Volumes.Resize(t.Context(), connect.NewRequest(&covev1.ResizeVolumeRequest{Name: v.Id, Size: 2 * sandbox.GiB})); err != nil || r.Msg.Volume.Size != 2*sandbox.GiB {
		t.Error(r, err)
	}
	held(2 * sandbox.GiB)
	if _, err := w.client.Volumes.Delete(t.Context(), connect.NewRequest(&covev1.DeleteVolumeRequest{Name: "data"})); err != nil {
		t.Error(err)
	}
	held(0)
	if left := w.node.volumes(); len(left) > 0 {
		t.Errorf("contents %v are left", left)
	}
}

// Content that is lost is told as that, in words that say how to go on, and
// stays on record until its owner gives it up.
func TestLostContent(t *testing.T) {
	w := newWorld(t)
	v, err := w.makeVolume("data", sandbox.GiB)
	if err != nil {
		t.Fatal(err)
	}
	if err := w.node.Machine.Volumes().Delete(t.Context(), v.Id); err != nil {
		t.Fatal(err)
	}
	w.recorded(sandbox.DefaultTenant, "rec1", "web", "http://a.test/")
	if err := w.node.Recorded.Delete(t.Context(), "rec1"); err != nil {
		t.Fatal(err)
	}
	if err := w.server.Reconcile(t.Context()); err != nil {
		t.Fatal(err)
	}
	for _, what := range []string{"a volume is on record and not on the node", "a recording is on record and not on the node"} {
		if !strings.Contains(w.log.String(), what) {
			t.Errorf("the log does not say that %s", what)
		}
	}
	_, err = w.client.Volumes.ListFiles(t.Context(), connect.NewRequest(&covev1.ListVolumeFilesRequest{Name: "data"}))
	wantError(t, err, sandbox.ErrCorrupt, "'data' is not on node n1", "cove volume rm data")
	_, err = w.client.Recordings.Get(t.Context(), connect.NewRequest(&covev1.GetRecordingRequest{Name: "web", Exchanges: 1}))
	wantError(t, err, sandbox.ErrCorrupt, "'web' is not on node n1", "cove recording rm web")
	if l := w.listVolumes(); len(l) != 1 {
		t.Errorf("%v", l)
	}
	if _, err := w.client.Volumes.Delete(t.Context(), connect.NewRequest(&covev1.DeleteVolumeRequest{Name: "data"})); err != nil {
		t.Error(err)
	}
	if _, err := w.client.Recordings.Delete(t.Context(), connect.NewRequest(&covev1.DeleteRecordingRequest{Name: "web"})); err != nil {
		t.Error(err)
	}
	_, err = w.client.Volumes.Get(t.Context(), connect.NewRequest(&covev1.GetVolumeRequest{Name: "data"}))
	wantError(t, err, sandbox.ErrNotFound)
}

func TestReconcileVolumes(t *testing.T) {
	const small, large = 32 << 20, 64 << 20
	for _, tc := range []struct {
		name        string
		record      sandbox.VolumeState // "" = none
		content     bool
		old         string // name in the node's own record
		node        string
		wantRecord  string // name; "" = none
		wantContent bool
		wantSize    int64
	}{
		{name: "kept", record: sandbox.VolumeReady, content: true, wantRecord: "data", wantContent: true, wantSize: large},
		{name: "being made", record: sandbox.VolumeMaking},
		{name: "made", record: sandbox.VolumeMaking, content: true},
		{name: "being deleted", record: sandbox.VolumeDeleting, content: true},
		{name: "deleted", record: sandbox.VolumeDeleting},
		{name: "lost", record: sandbox.VolumeReady, wantRecord: "data", wantSize: small},
		{name: "another node's", record: sandbox.VolumeMaking, node: "n2", wantRecord: "data", wantSize: small},
		{name: "nobody's", content: true, wantContent: true},
		{name: "old", content: true, old: "data", wantRecord: "data", wantContent: true, wantSize: large},
		{name: "old and of nobody", content: true, old: "data.gone_", wantContent: true},
		{name: "old and on record", record: sandbox.VolumeReady, content: true, old: "data", wantRecord: "data", wantContent: true, wantSize: large},
	} {
		t.Run(tc.name, func(t *testing.T) {
			w := newWorld(t)
			v := sandbox.Volume{ID: "v1", Name: "data", Size: small, State: tc.record, Node: "n1", CreatedAt: time.Now()}
			if tc.node != "" {
				v.Node = tc.node
			}
			if v.State == sandbox.VolumeDeleting {
				v.State = sandbox.VolumeReady
			}
			if tc.record != "" {
				if err := w.store.CreateVolume(w.own(), v); err != nil {
					t.Fatal(err)
				}
			}
			if tc.record == sandbox.VolumeDeleting {
				if err := w.store.MoveVolume(w.own(), "v1", v.State, tc.record); err != nil {
					t.Fatal(err)
				}
			}
			if tc.content {
				if err := w.node.Volumes().Create(t.Context(), "v1", large); err != nil {
					t.Fatal(err)
				}
				if tc.old != "" {
					w.node.does(func(c *calls) {
						c.old["v1"] = &sandbox.Volume{Name: tc.old, CreatedAt: time.Now(), Labels: map[string]string{"a": "b"}, Size: large}
					})
				}
			}
			for range 2 { // the second time changes nothing
				if err := w.server.Reconcile(t.Context()); err != nil {
					t.Fatal(err)
				}
				recs, err := w.store.ListVolumes(w.all())
				if err != nil || (len(recs) == 1) != (tc.wantRecord != "") || len(recs) == 1 && (recs[0].Name != tc.wantRecord || recs[0].Size != tc.wantSize) {
					t.Errorf("on record: %+v, %v", recs, err)
				}
				if there := len(w.node.volumes()) == 1; there != tc.wantContent {
					t.Errorf("content is there: %v", there)
				}
				if u := w.server.reservations.usage(sandbox.DefaultTenant).Disk; u != tc.wantSize {
					t.Errorf("%d bytes count, want %d", u, tc.wantSize)
				}
			}
		})
	}
}

func TestReconcileRecordings(t *testing.T) {
	open, finished := sandbox.RecordingOpen, sandbox.RecordingFinished
	for _, tc := range []struct {
		name        string
		record      sandbox.RecordingState // "" = none
		content     sandbox.RecordingState // "" = none
		tenant      string                 // in its own header
		boxEnded    sandbox.Cause          // of the sandbox; "" = there is none
		want        sandbox.RecordingState // "" = no record
		wantContent bool
	}{
		{name: "goes on", record: open, content: open, boxEnded: sandbox.TTL, want: open, wantContent: true},
		{name: "ended", record: open, content: finished, boxEnded: sandbox.TTL, want: finished, wantContent: true},
		{name: "never begun", record: open},
		{name: "never begun either", record: open, boxEnded: sandbox.NodeLost},
		{name: "not to be read", record: open, boxEnded: sandbox.TTL, want: sandbox.RecordingInterrupted},
		{name: "being imported", record: sandbox.RecordingMaking, content: finished},
		{name: "not imported", record: sandbox.RecordingMaking},
		{name: "being deleted", record: sandbox.RecordingDeleting, content: finished},
		{name: "lost", record: finished, want: finished},
		{name: "kept", record: finished, content: finished, want: finished, wantContent: true},
		{name: "nobody's", content: finished, wantContent: true},
		{name: "old", content: finished, tenant: sandbox.DefaultTenant, want: finished, wantContent: true},
		{name: "old and under way", content: open, tenant: sandbox.DefaultTenant, want: open, wantContent: true},
		{name: "old and of nobody", content: finished, tenant: "gone", wantContent: true},
	} {
		t.Run(tc.name, func(t *testing.T) {
			w := newWorld(t)
			r := sandbox.Recording{ID: "r1", Name: "web", Sandbox: "box", Node: "n1", State: tc.record, CreatedAt: time.Now()}
			if r.State == sandbox.RecordingDeleting {
				r.State = finished
			}
			if tc.record != "" {
				if err := w.store.CreateRecording(w.own(), r); err != nil {
					t.Fatal(err)
				}
			}
			if tc.record == sandbox.RecordingDeleting {
				if err := w.store.MoveRecording(w.own(), "r1", finished, tc.record); err != nil {
					t.Fatal(err)
				}
			}
			if tc.content != "" {
				if _, err := w.node.Recorded.Record(recording.Header{ID: "r1", Name: "web", Tenant: tc.tenant}); err != nil {
					t.Fatal(err)
				}
			}
			if tc.content == finished {
				if err := w.node.Recorded.Finish("r1"); err != nil {
					t.Fatal(err)
				}
			}
			if tc.boxEnded != "" {
				end := sandbox.End{Cause: tc.boxEnded, At: time.Now()}
				sb := sandbox.Sandbox{ID: "box", Node: "n1", State: sandbox.EndedState, ImageID: "sha256:base", CreatedAt: time.Now(), End: &end}
				if _, _, err := w.store.CreateSandbox(w.own(), sb, storeNoKey); err != nil {
					t.Fatal(err)
				}
			}
			for range 2 { // the second time changes nothing
				if err := w.server.Reconcile(t.Context()); err != nil {
					t.Fatal(err)
				}
				recs, err := w.store.ListRecordings(w.all())
				if err != nil || (len(recs) == 1) != (tc.want != "") || len(recs) == 1 && (recs[0].Name != "web" || recs[0].State != tc.want) {
					t.Errorf("on record: %+v, %v", recs, err)
				}
				list, err := w.node.Recorded.List(t.Context())
				if err != nil || (len(list) == 1) != tc.wantContent {
					t.Errorf("content: %+v, %v", list, err)
				}
			}
		})
	}
}

// What nodes kept the records of is its tenants' as before, by name and by id,
// and what is called the same is told apart.
func TestUpgradeOfVolumesAndRecordings(t *testing.T) {
	s := newShared(t)
	red, blue := s.tenants["red"], s.tenants["blue"]
	made := time.Date(2026, 2, 3, 4, 5, 6, 0, time.UTC)
	old := func(id, name string) {
		err := s.node.Volumes().Create(t.Context(), id, sandbox.GiB)
		if err == nil {
			_, err = s.node.Volumes().WriteFile(t.Context(), id, "/f", strings.NewReader("of "+id), sandbox.VolumeFile{})
		}
		if err != nil {
			t.Fatal(err)
		}
		s.node.does(func(c *calls) {
			c.old[id] = &sandbox.Volume{Name: name, CreatedAt: made, From: "x", Labels: map[string]string{"a": "b"}, Size: sandbox.GiB}
		})
	}
	old("v1", "cache")
	old("v2", "cache."+red+"_")
	old("v3", "dotted.name."+blue+"_")
	old("v4", "data."+red+"_") // red has made another since
	for id, of := range map[string][2]string{"r1": {"", "web"}, "r2": {red, "web"}, "r3": {blue, ""}} {
		if of[0] == "" {
			of[0] = sandbox.DefaultTenant
		}
		if _, err := s.node.Recorded.Record(recording.Header{ID: id, Name: of[1], Tenant: of[0], Sandbox: "box", Created: made}); err != nil {
			t.Fatal(err)
		}
		if err := s.node.Recorded.Finish(id); err != nil {
			t.Fatal(err)
		}
	}
	if err := s.server.Reconcile(t.Context()); err != nil {
		t.Fatal(err)
	}
	for _, c := range []struct{ who, name, id string }{{"", "cache", "v1"}, {"red", "cache", "v2"}, {"blue", "dotted.name", "v3"}, {"blue", "v3", "v3"}, {"red", "v4", "v4"}} {
		client := s.client
		if c.who != "" {
			client = s.dial(s.keys[c.who])
		}
		r, err := client.Volumes.Get(t.Context(), connect.NewRequest(&covev1.GetVolumeRequest{Name: c.name}))
		if err != nil {
			t.Error(c, err)
			continue
		}
		v := r.Msg.Volume
		if v.Id != c.id || v.Size != sandbox.GiB || v.Labels["a"] != "b" || !v.CreatedAt.AsTime().Equal(made) || v.From != "x" {
			t.Errorf("%v: %v", c, v)
		}
	}
	if _, body := s.as("red", "GET", "/v1/volumes/cache/files?path=/f", nil); body != "of v2" {
		t.Errorf("red's file: %q", body)
	}
	_, err := s.blue.Volumes.Get(t.Context(), connect.NewRequest(&covev1.GetVolumeRequest{Name: "v2"}))
	wantError(t, err, sandbox.ErrNotFound)
	for who, want := range map[string]string{"red": "r2", "blue": "r3"} {
		name := map[string]string{"r2": "web", "r3": "r3"}[want]
		r, err := s.dial(s.keys[who]).Recordings.Get(t.Context(), connect.NewRequest(&covev1.GetRecordingRequest{Name: name}))
		if err != nil || r.Msg.Recording.Id != want || r.Msg.Recording.State != "finished" {
			t.Error(who, r, err)
		}
	}
	if u := s.server.reservations.usage(blue); u.Disk != sandbox.GiB {
		t.Errorf("blue holds %d", u.Disk)
	}
}

// A recording is on record from its beginning, counts as the node says while it
// runs, and is ended on record at the first look after.
func TestARecordingIsOnRecordWhileItRuns(t *testing.T) {
	w := newWorld(t)
	sb := w.create(recorded(&covev1.Network{Mode: "public", Record: &covev1.NetworkRecord{Name: "mine"}}))
	id := sb.Spec.Network.Record.Id
	get := func() *covev1.Recording {
		t.Helper()
		r, err := w.client.Recordings.Get(t.Context(), connect.NewRequest(&covev1.GetRecordingRequest{Name: "mine"}))
		if err != nil {
			t.Fatal(err)
		}
		return r.Msg.Recording
	}
	before := get()
	if before.Id != id || before.Sandbox != sb.Id || before.State != "recording" {
		t.Errorf("%v", before)
	}
	w.node.onRecording = func(r *sandbox.Recording) { r.Bytes += 7 }
	if now := get(); now.Bytes <= before.Bytes {
		t.Errorf("%d bytes, before %d", now.Bytes, before.Bytes)
	}
	_, err := w.client.Recordings.Delete(t.Context(), connect.NewRequest(&covev1.DeleteRecordingRequest{Name: "mine"}))
	wantError(t, err, sandbox.ErrPrecondition, sb.Id)
	if on, err := w.store.GetRecording(w.own(), "mine"); err != nil || on.State != sandbox.RecordingOpen || on.Bytes != 0 {
		t.Errorf("on record %+v, %v", on, err)
	}
	if err := w.node.Kill(t.Context(), sb.Id, sandbox.End{Cause: sandbox.KilledByUser}); err != nil {
		t.Fatal(err)
	}
	if l, err := w.client.Recordings.List(t.Context(), connect.NewRequest(&covev1.ListRecordingsRequest{})); err != nil || len(l.Msg.Recordings) != 1 || l.Msg.Recordings[0].State != "finished" {
		t.Error(l, err)
	}
	if on, err := w.store.GetRecording(w.own(), "mine"); err != nil || on.State != sandbox.RecordingFinished || on.Bytes == 0 {
		t.Errorf("on record %+v, %v", on, err)
	}
	// The name is taken, also while another is being made.
	_, err = w.createWith(t.Context(), "", recorded(&covev1.Network{Mode: "public", Record: &covev1.NetworkRecord{Name: "mine"}}))
	wantError(t, err, sandbox.ErrAlreadyExists, "mine")
}

// A sandbox that does not come to be, for whatever reason, leaves no recording
// and no name.
func TestNoRecordingOfWhatIsNotMade(t *testing.T) {
	for name, do := range map[string]func(w *world, spec *covev1.SandboxSpec) error{
		"the node refuses": func(w *world, spec *covev1.SandboxSpec) error {
			w.node.onCreate = func(context.Context, sandbox.Sandbox) error { return errors.New("no") }
			_, err := w.createWith(w.Context(), "", spec)
			w.node.onCreate = nil
			return err
		},
		"it cannot be recorded": func(w *world, spec *covev1.SandboxSpec) error {
			w.store.failing("CreateSandbox", errStore)
			_, err := w.createWith(w.Context(), "", spec)
			w.store.failing("CreateSandbox", nil)
			return err
		},
		"its creator leaves": func(w *world, spec *covev1.SandboxSpec) error {
			ctx, leave := w.departure()
			w.node.onCreate = func(_ context.Context, sb sandbox.Sandbox) error {
				w.node.onCreate = nil
				leave()
				return nil
			}
			_, err := w.createWith(ctx, "", spec)
			return err
		},
		"another network is refused": func(w *world, spec *covev1.SandboxSpec) error {
			_, err := w.client.Sandboxes.SetNetwork(w.Context(), connect.NewRequest(&covev1.SetNetworkRequest{Id: w.create(&covev1.SandboxSpec{}).Id + "x", Network: spec.Network}))
			return err
		},
	} {
		t.Run(name, func(t *testing.T) {
			w := newWorld(t)
			spec := recorded(&covev1.Network{Mode: "public", Record: &covev1.NetworkRecord{Name: "mine"}})
			if err := do(w, spec); err == nil {
				t.Fatal("it was made")
			}
			deadline := time.Now().Add(time.Minute)
			for { // who leaves does not wait for what is taken back
				recs, err := w.store.ListRecordings(store.Installation(context.Background()))
				list, lerr := w.node.Recorded.List(context.Background())
				if err == nil && lerr == nil && len(recs) == 0 && len(list) == 0 {
					break
				}
				if time.Now().After(deadline) {
					t.Fatalf("left: %v %v, %v %v", recs, err, list, lerr)
				}
				time.Sleep(time.Millisecond)
			}
			w.create(spec)
		})
	}
}
