package server

import (
	"context"
	"encoding/json"
	"io"
	"net/http"
	"strings"
	"testing"

	"connectrpc.com/connect"

	covev1 "github.com/cove-sandbox/cove/api/cove/v1"
	"github.com/cove-sandbox/cove/egress/recording"
	"github.com/cove-sandbox/cove/sandbox"
	"github.com/cove-sandbox/cove/store"
)

// recording gives a tenant a finished recording of one request.
func (w *world) recorded(tenant, id, name, url string) {
	w.Helper()
	r, err := w.node.Recorded.Record(recording.Header{ID: id})
	if err != nil {
		w.Fatal(err)
	}
	req, err := http.NewRequest("GET", url, nil)
	if err != nil {
		w.Fatal(err)
	}
	res, err := r.Over(answers("recorded")).RoundTrip(req)
	if err != nil {
		w.Fatal(err)
	}
	_, err = io.Copy(io.Discard, res.Body)
	if err == nil {
		err = w.node.Recorded.Finish(id)
	}
	if err != nil {
		w.Fatal(err)
	}
	all, err := w.node.Recorded.Status(w.Context(), []string{id})
	is := all[id]
	is.Name, is.Node = name, "n1"
	if err == nil {
		err = w.store.Store.CreateRecording(store.In(w.Context(), tenant), is)
	}
	if err != nil {
		w.Fatal(err)
	}
}

// answers is a server that always says the same.
type answers string

func (a answers) RoundTrip(r *http.Request) (*http.Response, error) {
	return &http.Response{StatusCode: 200, Header: http.Header{}, Body: io.NopCloser(strings.NewReader(string(a))), ContentLength: int64(len(a)), Request: r}, nil
}

func recorded(n *covev1.Network) *covev1.SandboxSpec { return &covev1.SandboxSpec{Network: n} }

func TestRecordingsOfSandboxes(t *testing.T) {
	w := newWorld(t)
	w.recorded(sandbox.DefaultTenant, "rec1", "web", "http://a.test/")
	sb := w.create(recorded(&covev1.Network{Mode: "public", Record: &covev1.NetworkRecord{Name: "mine"}}))
	rec := sb.Spec.Network.GetRecord()
	if rec.GetName() != "mine" || !sandbox.ValidID(rec.GetId()) {
		t.Errorf("%v", sb.Spec.Network)
	}
	if on := w.node.sandbox(sb.Id).Spec.Network.Record; on == nil || on.ID != rec.Id {
		t.Errorf("the node was told %+v", on)
	}
	for _, ref := range []string{"web", "rec1"} {
		sb := w.create(recorded(&covev1.Network{Replay: &covev1.NetworkReplay{Recording: ref, IgnoreBody: true}}))
		if n := sb.Spec.Network; n.GetReplay().GetRecording() != "rec1" || n.Mode != "none" || !n.Replay.IgnoreBody {
			t.Errorf("replaying %s: %v", ref, n)
		}
	}
	// A child never writes onto its parent's recording, and replays what it replays.
	r, err := w.fork(&covev1.ForkRequest{Id: sb.Id, Count: 1})
	if err != nil || r.Results[0].Sandbox.Spec.Network.GetRecord() != nil || r.Results[0].Sandbox.Spec.Network.Mode != "public" {
		t.Errorf("a fork: %v %v", r, err)
	}
	again := w.create(recorded(&covev1.Network{Replay: &covev1.NetworkReplay{Recording: "web"}}))
	r, err = w.fork(&covev1.ForkRequest{Id: again.Id, Count: 1})
	if err != nil || r.Results[0].Sandbox.Spec.Network.GetReplay().GetRecording() != "rec1" {
		t.Errorf("a fork of a replay: %v %v", r, err)
	}
	snap := w.mustSnapshot(&covev1.CreateSnapshotRequest{Sandbox: sb.Id, Kind: "memory"})
	for name, c := range map[string]struct {
		spec   *covev1.SandboxSpec
		record bool
	}{"as it was": {&covev1.SandboxSpec{Snapshot: snap.Id}, false}, "recording": {&covev1.SandboxSpec{Snapshot: snap.Id, Network: &covev1.Network{Record: &covev1.NetworkRecord{}}}, true}} {
		n := w.create(c.spec).Spec.Network
		if n.Mode != "public" || (n.Record != nil) != c.record || n.GetRecord().GetId() == rec.Id {
			t.Errorf("from a snapshot, %s: %v", name, n)
		}
	}

	set := func(n *covev1.Network) *covev1.Network {
		t.Helper()
		r, err := w.client.Sandboxes.SetNetwork(t.Context(), connect.NewRequest(&covev1.SetNetworkRequest{Id: sb.Id, Network: n}))
		if err != nil {
			t.Fatal(err)
		}
		return r.Msg.Network
	}
	for _, same := range []*covev1.NetworkRecord{{Id: rec.Id}, {Name: "mine"}} {
		if n := set(&covev1.Network{Mode: "public", Record: same}); n.Record.Id != rec.Id || n.Record.Name != "mine" {
			t.Errorf("going on with %v: %v", same, n)
		}
	}
	if n := set(&covev1.Network{Mode: "public", Record: &covev1.NetworkRecord{Name: "second"}}); n.Record.Id == rec.Id || n.Record.Name != "second" {
		t.Errorf("another: %v", n)
	}
	if n := set(&covev1.Network{Mode: "public"}); n.Record != nil {
		t.Errorf("none: %v", n)
	}
	// What was missed is in the end of an exec.
	w.node.onStatus = func(st *sandbox.NetworkStatus) {
		st.Missed, st.Replay = 3, &sandbox.ReplayStatus{Recording: "rec1", Missed: 3, Misses: []sandbox.ReplayMiss{{Method: "GET", URL: "http://b.test/", Reason: "replay_miss"}}}
	}
	g, err := w.client.Sandboxes.GetNetwork(t.Context(), connect.NewRequest(&covev1.GetNetworkRequest{Id: sb.Id}))
	if err != nil || g.Msg.GetReplay().GetMissed() != 3 || g.Msg.Replay.Misses[0].Url != "http://b.test/" {
		t.Errorf("%v %v", g, err)
	}
}

func TestArchivesMove(t *testing.T) {
	w := newWorld(t)
	w.recorded(sandbox.DefaultTenant, "rec1", "web", "http://a.test/x?y=z")
	resp, archive := w.http("GET", "/v1/recordings/web/archive", nil)
	if resp.StatusCode != 200 || !strings.HasPrefix(archive, "COVETAPE") {
		t.Fatalf("%d %.100q", resp.StatusCode, archive)
	}
	resp, har := w.http("GET", "/v1/recordings/rec1/archive?format=har", nil)
	if resp.StatusCode != 200 || !json.Valid([]byte(har)) || !strings.Contains(har, "http://a.test/x?y=z") {
		t.Errorf("%d %.200q", resp.StatusCode, har)
	}
	resp, body := w.http("PUT", "/v1/recordings?name=copy", strings.NewReader(archive))
	if resp.StatusCode != 200 || !strings.Contains(body, `"copy"`) {
		t.Fatalf("%d %s", resp.StatusCode, body)
	}
	got, err := w.client.Recordings.Get(t.Context(), connect.NewRequest(&covev1.GetRecordingRequest{Name: "copy", Exchanges: 5}))
	if err != nil || len(got.Msg.Exchanges) != 1 || got.Msg.Exchanges[0].Url != "http://a.test/x?y=z" || got.Msg.Exchanges[0].Received != 8 || got.Msg.Recording.State != "finished" {
		t.Errorf("%v %v", got, err)
	}
	for path, want := range map[string]string{"/v1/recordings?name=copy": "already_exists", "/v1/recordings?name=a/b": "invalid_argument", "/v1/recordings": "invalid_argument"} {
		content := archive
		if path == "/v1/recordings" {
			content = content[:len(content)-1]
		}
		if _, body := w.http("PUT", path, strings.NewReader(content)); classIn(body) != want {
			t.Errorf("%s: %s", path, body)
		}
	}
	for path, want := range map[string]string{"/v1/recordings/nosuch/archive": "not_found", "/v1/recordings/web/archive?format=zip": "invalid_argument"} {
		if _, body := w.http("GET", path, nil); classIn(body) != want {
			t.Errorf("%s: %s", path, body)
		}
	}
	l, err := w.client.Recordings.List(t.Context(), connect.NewRequest(&covev1.ListRecordingsRequest{}))
	if err != nil || len(l.Msg.Recordings) != 2 {
		t.Errorf("%v %v", l, err)
	}
}

// Recordings count in a tenant's quota and keep it from being forgotten.
func TestRecordingsCountForTheirTenant(t *testing.T) {
	s := newShared(t)
	get := func() int64 {
		r, err := s.client.Tenants.Get(t.Context(), connect.NewRequest(&covev1.GetTenantRequest{Name: "red"}))
		if err != nil {
			t.Fatal(err)
		}
		return r.Msg.Tenant.Used.SnapshotBytes
	}
	with := get()
	if _, err := s.red.Recordings.Delete(t.Context(), connect.NewRequest(&covev1.DeleteRecordingRequest{Name: "redtape"})); err != nil {
		t.Fatal(err)
	}
	if without := get(); with <= without {
		t.Errorf("%d with a recording, %d without", with, without)
	}
	s.recorded(s.tenants["blue"], "bluerec", "b", "http://b.test/")
	_, err := s.client.Tenants.Delete(t.Context(), connect.NewRequest(&covev1.DeleteTenantRequest{Name: "blue"}))
	wantError(t, err, sandbox.ErrPrecondition, "1 recordings")
	s.quota("blue", &covev1.Quota{SnapshotBytes: 1})
	_, err = s.blue.Sandboxes.Create(t.Context(), connect.NewRequest(&covev1.CreateSandboxRequest{Spec: recorded(&covev1.Network{Mode: "public", Record: &covev1.NetworkRecord{}})}))
	wantError(t, err, sandbox.ErrQuotaExceeded, "")
}

func recordingScenarios() []scenario {
	get := func(m *covev1.GetRecordingRequest) func(context.Context, *world) error {
		return func(ctx context.Context, w *world) error {
			_, err := w.client.Recordings.Get(ctx, connect.NewRequest(m))
			return err
		}
	}
	del := func(name string) func(context.Context, *world) error {
		return func(ctx context.Context, w *world) error {
			_, err := w.client.Recordings.Delete(ctx, connect.NewRequest(&covev1.DeleteRecordingRequest{Name: name}))
			return err
		}
	}
	create := func(n *covev1.Network) func(context.Context, *world) error {
		return func(ctx context.Context, w *world) error {
			_, err := w.createWith(ctx, "", recorded(n))
			return err
		}
	}
	invalid, notFound := sandbox.ErrInvalid, sandbox.ErrNotFound
	return []scenario{
		{"Recordings/Get", "good", get(&covev1.GetRecordingRequest{Name: "web", Exchanges: 1000}), nil, "", ""},
		{"Recordings/Get", "unknown", get(&covev1.GetRecordingRequest{Name: "wed"}), notFound, "", "web"},
		{"Recordings/Get", "bad name", get(&covev1.GetRecordingRequest{Name: "../web"}), invalid, "name", ""},
		{"Recordings/Get", "too many", get(&covev1.GetRecordingRequest{Name: "web", Exchanges: 1001}), invalid, "exchanges", "1000"},
		{"Recordings/Get", "before the first", get(&covev1.GetRecordingRequest{Name: "web", After: -1}), invalid, "after", ""},
		{"Recordings/List", "good", func(ctx context.Context, w *world) error {
			_, err := w.client.Recordings.List(ctx, connect.NewRequest(&covev1.ListRecordingsRequest{}))
			return err
		}, nil, "", ""},
		{"Recordings/Delete", "good", del("rec1"), nil, "", ""},
		{"Recordings/Delete", "unknown", del("nosuch"), notFound, "", "cove recording ls"},
		{"Recordings/Delete", "bad name", del(""), invalid, "name", ""},
		{"Sandboxes/Create", "replays", create(&covev1.Network{Replay: &covev1.NetworkReplay{Recording: "web"}}), nil, "", ""},
		{"Sandboxes/Create", "replays what is not there", create(&covev1.Network{Replay: &covev1.NetworkReplay{Recording: "wed"}}), notFound, "", "web"},
		{"Sandboxes/Create", "replays with a network", create(&covev1.Network{Mode: "public", Replay: &covev1.NetworkReplay{Recording: "web"}}), invalid, "spec.network.replay", "none"},
		{"Sandboxes/Create", "replays and records", create(&covev1.Network{Record: &covev1.NetworkRecord{}, Replay: &covev1.NetworkReplay{Recording: "web"}}), invalid, "spec.network.record", "replay"},
		{"Sandboxes/Create", "records nothing", create(&covev1.Network{Mode: "none", Record: &covev1.NetworkRecord{}}), invalid, "spec.network.record", "public"},
		{"Sandboxes/Create", "records by a bad name", create(&covev1.Network{Mode: "public", Record: &covev1.NetworkRecord{Name: "a b"}}), invalid, "spec.network.record.name", ""},
		{"Sandboxes/Create", "matches no header", create(&covev1.Network{Replay: &covev1.NetworkReplay{Recording: "web", MatchHeaders: []string{"a b"}}}), invalid, "spec.network.replay.match_headers", ""},
	}
}
