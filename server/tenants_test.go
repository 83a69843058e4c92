package server

import (
	"bytes"
	"context"
	"encoding/binary"
	"encoding/json"
	"io"
	"io/fs"
	"net/http"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"connectrpc.com/connect"
	"google.golang.org/protobuf/reflect/protoreflect"
	"google.golang.org/protobuf/reflect/protoregistry"

	covev1 "github.com/cove-sandbox/cove/api/cove/v1"
	"github.com/cove-sandbox/cove/sandbox"
	"github.com/cove-sandbox/cove/store"
	"github.com/cove-sandbox/cove/wire"
)

// apiPackage is where the protos are.
const apiPackage = "cove.v1"

// shared is an installation with two teams: red has one of everything, blue is
// the stranger.
type shared struct {
	*world
	red, blue  *wire.Client
	keys       map[string]string // by name: red, blue, reader
	tenants    map[string]string
	box, image string
	snap       map[string]string // by kind
	vol, keyID string
	rec, lease string
	runID      string
}

func (s *shared) tenant(name string) {
	s.Helper()
	t, err := s.client.Tenants.Create(s.Context(), connect.NewRequest(&covev1.CreateTenantRequest{Name: name}))
	if err != nil {
		s.Fatal(err)
	}
	s.tenants[name] = t.Msg.Tenant.Id
	s.keys[name] = s.key(s.client, &covev1.CreateKeyRequest{Name: name + "-admin", Tenant: name})
}

func (s *shared) key(c *wire.Client, m *covev1.CreateKeyRequest) string {
	s.Helper()
	k, err := c.Keys.Create(s.Context(), connect.NewRequest(m))
	if err != nil {
		s.Fatal(err)
	}
	s.keyID = k.Msg.Key.Id
	return k.Msg.Secret
}

func (s *shared) dial(secret string) *wire.Client {
	c := wire.NewClient(s.url, secret, wire.Options{})
	s.Cleanup(c.Close)
	return c
}

func newShared(t *testing.T, change ...func(*Config)) *shared {
	s := &shared{world: newWorld(t, change...), keys: map[string]string{}, tenants: map[string]string{}, snap: map[string]string{}}
	s.tenant("red")
	s.tenant("blue")
	s.red, s.blue = s.dial(s.keys["red"]), s.dial(s.keys["blue"])
	ctx := t.Context()

	if _, body := s.as("red", "PUT", "/v1/images?name=mine", strings.NewReader("redsown")); !strings.Contains(body, "sha256:") {
		t.Fatal(body)
	} else {
		var img struct{ ID string }
		if err := json.Unmarshal([]byte(body), &img); err != nil {
			t.Fatal(err)
		}
		s.image = img.ID
	}
	l, err := s.red.Leases.Create(ctx, connect.NewRequest(&covev1.CreateLeaseRequest{Name: "redlease"}))
	if err != nil {
		t.Fatal(err)
	}
	s.lease = l.Msg.Lease.Id
	r, err := s.red.Runs.Create(ctx, connect.NewRequest(&covev1.CreateRunRequest{Name: "redjob"}))
	if err != nil {
		t.Fatal(err)
	}
	s.runID = r.Msg.Run.Id
	if _, err := s.red.Runs.PutCheckpoint(ctx, connect.NewRequest(&covev1.PutCheckpointRequest{Run: s.runID, Doc: []byte("redsecret")})); err != nil {
		t.Fatal(err)
	}
	c, err := s.red.Sandboxes.Create(ctx, connect.NewRequest(&covev1.CreateSandboxRequest{IdempotencyKey: "once",
		Spec: &covev1.SandboxSpec{Labels: map[string]string{"run": "redrun"}, Env: map[string]string{"TOKEN": "redsecret"}}}))
	if err != nil {
		t.Fatal(err)
	}
	s.box = c.Msg.Sandbox.Id
	if _, err := s.red.Files.Write(ctx, connect.NewRequest(&covev1.WriteFileRequest{SandboxId: s.box, Path: "/redfile", Data: []byte("redsecret")})); err != nil {
		t.Fatal(err)
	}
	st, err := s.red.Processes.Start(ctx, connect.NewRequest(&covev1.StartProcessRequest{SandboxId: s.box, Process: &covev1.ProcessSpec{ExecId: "proc", Command: sleeping}}))
	if err != nil || !st.Receive() {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = st.Close() })
	for _, kind := range []string{"memory", "filesystem", "directory"} {
		m := &covev1.CreateSnapshotRequest{Sandbox: s.box, Kind: kind, Name: "red-" + kind}
		if kind == "directory" {
			m.Path = "/etc"
		}
		ev, err := s.red.Snapshots.Create(ctx, connect.NewRequest(m))
		if err != nil {
			t.Fatal(err)
		}
		for ev.Receive() {
			if snap := ev.Msg().Snapshot; snap != nil {
				s.snap[kind] = snap.Id
			}
		}
		if err := ev.Err(); err != nil || s.snap[kind] == "" {
			t.Fatal(kind, err)
		}
		_ = ev.Close()
	}
	b, err := s.red.Templates.Build(ctx, connect.NewRequest(&covev1.BuildTemplateRequest{Name: "redpy"}))
	if err != nil {
		t.Fatal(err)
	}
	for b.Receive() {
	}
	if err := b.Err(); err != nil {
		t.Fatal(err)
	}
	_ = b.Close()
	v, err := s.red.Volumes.Create(ctx, connect.NewRequest(&covev1.CreateVolumeRequest{Name: "data", Size: 64 << 20}))
	if err != nil {
		t.Fatal(err)
	}
	if s.vol = v.Msg.Volume.Id; v.Msg.Volume.Name != "data" {
		t.Errorf("red's volume is called %q", v.Msg.Volume.Name)
	}
	if resp, body := s.as("red", "PUT", "/v1/volumes/data/files?path=/redfile", strings.NewReader("redsecret")); resp.StatusCode != 200 {
		t.Fatal(body)
	}
	s.rec = "rectape"
	s.recorded(s.tenants["red"], s.rec, "redtape", "http://redhost.test/redsecret")
	if _, err := s.red.Secrets.Create(ctx, connect.NewRequest(&covev1.CreateSecretRequest{Name: "redtoken", Value: "redsecretvalue", Hosts: []string{"redhost.test"}, Env: "REDENV"})); err != nil {
		t.Fatal(err)
	}
	if _, err := s.red.Images.Login(ctx, connect.NewRequest(&covev1.LoginRegistryRequest{Registry: "redreg.test", Username: "reduser", Password: "redpassword"})); err != nil {
		t.Fatal(err)
	}
	s.keys["reader"] = s.key(s.red, &covev1.CreateKeyRequest{Name: "reader", Role: "readonly"})
	return s
}

// as makes a plain request with a team's key.
func (s *shared) as(who, method, path string, body io.Reader) (*http.Response, string) {
	s.Helper()
	return s.http(method, path, body, "Authorization", "Bearer "+s.keys[who])
}

// call makes a Connect call in JSON and returns the class of its error, "" for
// none, and everything that came back.
func (s *shared) call(who string, m protoreflect.MethodDescriptor, procedure, msg string) (class, body string) {
	s.Helper()
	if !m.IsStreamingServer() {
		resp, body := s.http("POST", procedure, strings.NewReader(msg), "Authorization", "Bearer "+s.keys[who], "Content-Type", "application/json")
		if resp.StatusCode == 200 {
			return "", body
		}
		return classIn(body), body
	}
	var frame bytes.Buffer
	frame.WriteByte(0)
	_ = binary.Write(&frame, binary.BigEndian, uint32(len(msg)))
	frame.WriteString(msg)
	ctx, cancel := context.WithCancel(s.Context())
	defer cancel()
	req, err := http.NewRequestWithContext(ctx, "POST", s.url+procedure, &frame)
	if err != nil {
		s.Fatal(err)
	}
	req.Header.Set("Authorization", "Bearer "+s.keys[who])
	req.Header.Set("Content-Type", "application/connect+json")
	resp, err := plainHTTP.Do(req)
	if err != nil {
		s.Fatal(err)
	}
	defer resp.Body.Close()
	if resp.StatusCode != 200 {
		b, _ := io.ReadAll(resp.Body)
		return classIn(string(b)), string(b)
	}
	// The first frames are enough: a watch has no end.
	for {
		var head [5]byte
		if _, err := io.ReadFull(resp.Body, head[:]); err != nil {
			s.Fatal(procedure, err)
		}
		b := make([]byte, binary.BigEndian.Uint32(head[1:]))
		if _, err := io.ReadFull(resp.Body, b); err != nil {
			s.Fatal(err)
		}
		if head[0]&2 == 0 {
			body += string(b)
			if m.Name() == "Attach" || m.Name() == "Watch" {
				return "", body
			}
			continue
		}
		var end struct{ Error json.RawMessage }
		if err := json.Unmarshal(b, &end); err != nil {
			s.Fatal(err)
		}
		if end.Error == nil {
			return "", body
		}
		return classIn(string(end.Error)), body + string(b)
	}
}

// classIn is the class in a Connect error.
func classIn(body string) string {
	var e struct {
		Code    string
		Details []struct {
			Debug struct{ Code string }
		}
	}
	if json.Unmarshal([]byte(body), &e) != nil {
		return "not an error of ours: " + body
	}
	if len(e.Details) > 0 && e.Details[0].Debug.Code != "" {
		return e.Details[0].Debug.Code
	}
	return e.Code
}

// fingerprint is everything there is: the whole record and what the node holds.
func (s *shared) fingerprint() string {
	s.Helper()
	ctx, out := s.all(), map[string]any{}
	check := func(err error) {
		s.Helper()
		if err != nil {
			s.Fatal(err)
		}
	}
	sbs, _, err := s.store.ListSandboxes(ctx, store.Filter{States: sandbox.States, PageSize: 1000})
	check(err)
	out["sandboxes"] = sbs
	for _, hidden := range []bool{false, true} {
		snaps, _, err := s.store.ListSnapshots(ctx, store.SnapshotFilter{Hidden: hidden, PageSize: 1000})
		check(err)
		out["snapshots"+map[bool]string{true: " hidden"}[hidden]] = snaps
	}
	for name, id := range s.tenants {
		out["templates "+name], err = s.store.ListTemplates(store.In(ctx, id), "")
		check(err)
	}
	out["images"], err = s.store.ListImages(ctx)
	check(err)
	keys, err := s.store.ListKeys(ctx)
	check(err)
	for i := range keys {
		keys[i].LastUsedAt = keys[i].CreatedAt // the one thing a call changes
	}
	out["keys"] = keys
	secs, err := s.store.ListSecrets(ctx)
	check(err)
	out["secrets"] = secs
	out["logins"], err = s.store.ListLogins(ctx)
	check(err)
	out["shipments"], err = s.store.ListShipments(ctx)
	check(err)
	if out["runs"], err = s.store.ListRuns(ctx, true); err != nil {
		check(err)
	}
	if out["leases"], err = s.store.ListLeases(ctx); err != nil {
		s.Fatal(err)
	}
	out["tenants"], err = s.store.ListTenants(ctx)
	check(err)
	var live []sandbox.Sandbox
	s.until("nothing is ending", func() bool {
		live, err = s.node.Live(ctx)
		check(err)
		return !slices.ContainsFunc(live, func(sb sandbox.Sandbox) bool { return sb.State == sandbox.Ending })
	})
	standby, err := s.node.Standby(ctx)
	check(err)
	for _, sb := range live {
		ran, _, err := s.node.Processes(ctx, sb.ID)
		check(err)
		procs := []string{}
		for _, p := range ran {
			procs = append(procs, p.ExecID+" "+map[bool]string{true: "ended", false: "runs"}[p.End != nil])
		}
		slices.Sort(procs)
		out["node "+sb.ID] = []any{tree(s, s.node.root(sb.ID)), procs, sb.ExpiresAt, sb.Episode, standby[sb.ID]}
	}
	vols, err := s.node.Volumes().List(ctx)
	check(err)
	for _, v := range vols {
		files, _, err := s.node.Volumes().ListFiles(ctx, v.ID, "/", 10)
		check(err)
		v.Used = 0 // of a file system that is mounted and not, in other blocks
		out["volume "+v.ID] = []any{v, files}
	}
	out["recordings"], err = s.node.Recorded.List(ctx)
	check(err)
	out["recordings on record"], err = s.store.ListRecordings(ctx)
	check(err)
	out["volumes on record"], err = s.store.ListVolumes(ctx)
	check(err)
	b, err := json.Marshal(out)
	check(err)
	return string(b)
}

// tree is the files below a directory, with their content.
func tree(t testing.TB, dir string) map[string]string {
	t.Helper()
	out := map[string]string{}
	err := filepath.WalkDir(dir, func(path string, d fs.DirEntry, err error) error {
		if err != nil || !d.Type().IsRegular() {
			return err
		}
		b, err := os.ReadFile(path)
		out[strings.TrimPrefix(path, dir)] = string(b)
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	return out
}

// attack is one call at red's things. want is the class it ends with for a
// stranger; "own" is a call that works and is about the stranger's own, whatever
// it is called.
type attack struct{ msg, want string }

// attacks are calls of every method at every kind of red's things. $BOX and the
// like stand for red's ids.
var attacks = map[string][]attack{
	"Sandboxes/Create": {{`{"spec":{"snapshot":"$MEM"}}`, "not_found"}, {`{"spec":{"snapshot":"red-memory"}}`, "not_found"}, {`{"spec":{"snapshot":"$FS"}}`, "not_found"},
		{`{"spec":{"template":"redpy"}}`, "not_found"}, {`{"spec":{"template":"redpy@1"}}`, "not_found"}, {`{"spec":{"image":"mine"}}`, "image_not_found"},
		{`{"spec":{"image":"$IMAGE"}}`, "image_not_found"}, {`{"spec":{"volumes":[{"volume":"data","path":"/d"}]}}`, "not_found"}, {`{"spec":{"volumes":[{"volume":"$VOL","path":"/d"}]}}`, "not_found"},
		{`{"spec":{"network":{"replay":{"recording":"redtape"}}}}`, "not_found"}, {`{"spec":{"network":{"replay":{"recording":"$REC"}}}}`, "not_found"},
		{`{"spec":{"network":{"mode":"public","record":{"id":"$REC"}}}}`, "invalid_argument"},
		{`{"spec":{"network":{"mode":"public"},"secrets":["redtoken"]}}`, "not_found"},
		{`{"spec":{"lease":"$LEASE"}}`, "not_found"}, {`{"spec":{"rollout":{"run":"$RUN"}}}`, "not_found"}, {`{"spec":{"rollout":{"run":"redjob"}}}`, "not_found"}},
	"Sandboxes/Get":         {{`{"id":"$BOX"}`, "not_found"}},
	"Sandboxes/List":        {{`{}`, "own"}, {`{"labels":{"run":"redrun"}}`, "own"}, {`{"states":["SANDBOX_STATE_RUNNING","SANDBOX_STATE_ENDED"]}`, "own"}},
	"Sandboxes/SetTimeout":  {{`{"id":"$BOX","timeout":"60s"}`, "not_found"}},
	"Sandboxes/Reset":       {{`{"id":"$BOX"}`, "not_found"}},
	"Sandboxes/SetLease":    {{`{"id":"$BOX"}`, "not_found"}, {`{"id":"$OWN","lease":"$LEASE"}`, "not_found"}},
	"Sandboxes/Kill":        {{`{"id":"$BOX"}`, "not_found"}, {`{"idempotencyKey":"once"}`, "not_found"}},
	"Sandboxes/KillByLabel": {{`{"labels":{"run":"redrun"}}`, "own"}},
	"Sandboxes/Stats":       {{`{"id":"$BOX"}`, "not_found"}},
	"Sandboxes/Diff":        {{`{"id":"$BOX"}`, "not_found"}, {`{"id":"$OWN","since":"red-filesystem"}`, "not_found"}},
	"Sandboxes/Pause":       {{`{"id":"$BOX"}`, "not_found"}, {`{"id":"$BOX","cold":true}`, "not_found"}},
	"Sandboxes/Resume":      {{`{"id":"$BOX"}`, "not_found"}},
	"Sandboxes/Fork":        {{`{"id":"$BOX","count":1}`, "not_found"}, {`{"snapshot":"$MEM","count":1}`, "not_found"}, {`{"snapshot":"red-filesystem","count":1}`, "not_found"}},
	"Sandboxes/SetNetwork": {{`{"id":"$BOX","network":{"mode":"public"}}`, "not_found"}, {`{"id":"$OWN","network":{"replay":{"recording":"redtape"}}}`, "not_found"},
		{`{"id":"$OWN","network":{"replay":{"recording":"$REC"}}}`, "not_found"}, {`{"id":"$OWN","network":{"mode":"public","record":{"id":"$REC"}}}`, "invalid_argument"}},
	"Sandboxes/GetNetwork": {{`{"id":"$BOX"}`, "not_found"}},
	"Sandboxes/Restore":    {{`{"id":"$BOX","snapshot":"$MEM"}`, "not_found"}, {`{"id":"$OWN","snapshot":"$MEM"}`, "not_found"}, {`{"id":"$BOX","snapshot":"$OWNSNAP"}`, "not_found"}},
	"Sandboxes/Tree":       {{`{"id":"$BOX"}`, "not_found"}, {`{"id":"$MEM"}`, "not_found"}, {`{"id":"red-memory"}`, "not_found"}},
	"Sandboxes/SetSecrets": {{`{"id":"$BOX"}`, "not_found"}, {`{"id":"$BOX","secrets":["redtoken"]}`, "not_found"}, {`{"id":"$OWN","secrets":["redtoken"]}`, "not_found"}},

	"Processes/Start":      {{`{"sandboxId":"$BOX","process":{"command":"cat /redfile"}}`, "not_found"}},
	"Processes/Attach":     {{`{"sandboxId":"$BOX","execId":"proc"}`, "not_found"}},
	"Processes/SendInput":  {{`{"sandboxId":"$BOX","execId":"proc","data":"eA=="}`, "not_found"}},
	"Processes/CloseInput": {{`{"sandboxId":"$BOX","execId":"proc"}`, "not_found"}},
	"Processes/Signal":     {{`{"sandboxId":"$BOX","execId":"proc","signal":"SIGKILL"}`, "not_found"}},
	"Processes/Resize":     {{`{"sandboxId":"$BOX","execId":"proc","size":{"rows":20,"cols":20}}`, "not_found"}},
	"Processes/List":       {{`{"sandboxId":"$BOX"}`, "not_found"}},
	"Processes/Wait":       {{`{"sandboxId":"$BOX","execId":"proc","maxWait":"0.01s"}`, "not_found"}},

	"Files/Read":          {{`{"sandboxId":"$BOX","path":"/redfile"}`, "not_found"}},
	"Files/Write":         {{`{"sandboxId":"$BOX","path":"/redfile","data":"eA=="}`, "not_found"}},
	"Files/Stat":          {{`{"sandboxId":"$BOX","path":"/redfile"}`, "not_found"}},
	"Files/List":          {{`{"sandboxId":"$BOX","path":"/"}`, "not_found"}},
	"Files/Mkdir":         {{`{"sandboxId":"$BOX","path":"/evil"}`, "not_found"}},
	"Files/Move":          {{`{"sandboxId":"$BOX","from":"/redfile","to":"/evil"}`, "not_found"}},
	"Files/Remove":        {{`{"sandboxId":"$BOX","path":"/redfile"}`, "not_found"}},
	"Files/Chmod":         {{`{"sandboxId":"$BOX","path":"/redfile","mode":511}`, "not_found"}},
	"Files/SetAttributes": {{`{"sandboxId":"$BOX","path":"/redfile","attributes":{"a":"b"}}`, "not_found"}},
	"Files/Chown":         {{`{"sandboxId":"$BOX","path":"/redfile","user":"root"}`, "not_found"}},
	"Files/Watch":         {{`{"sandboxId":"$BOX","path":"/"}`, "not_found"}},

	"Images/Pull":   {{`{"reference":"python:3","shared":true}`, "permission_denied"}},
	"Images/List":   {{`{}`, "own"}},
	"Images/Get":    {{`{"name":"mine"}`, "image_not_found"}, {`{"name":"$IMAGE"}`, "image_not_found"}},
	"Images/Remove": {{`{"name":"mine"}`, "image_not_found"}, {`{"name":"$IMAGE"}`, "image_not_found"}, {`{"name":"base"}`, "permission_denied"}},
	"Images/Prune":  {{`{}`, "permission_denied"}},
	"Images/Login":  {{`{"registry":"redreg.test","username":"blue"}`, "invalid_argument"}},
	"Images/Logins": {{`{}`, "own"}},
	"Images/Logout": {{`{"registry":"redreg.test"}`, "not_found"}},

	"Images/Build":       {{`{"name":"x","dockerfile":"FROM mine"}`, "image_not_found"}, {`{"name":"x","dockerfile":"FROM $IMAGE"}`, "image_not_found"}, {`{"name":"base","shared":true,"dockerfile":"FROM base"}`, "permission_denied"}, {`{"name":"x","from":"base","context":"redfiles","steps":[{"op":"COPY","args":["a","/b"]}]}`, "not_found"}},
	"Images/StartBuild":  {{`{"name":"base","shared":true,"dockerfile":"FROM base"}`, "permission_denied"}},
	"Images/GetBuild":    {{`{"id":"redbuild"}`, "not_found"}},
	"Images/FollowBuild": {{`{"id":"redbuild"}`, "not_found"}},
	"Images/CancelBuild": {{`{"id":"redbuild"}`, "not_found"}},
	"Images/HasFiles":    {{`{"key":"redfiles"}`, "own"}},
	"Images/Push":        {{`{"name":"mine"}`, "image_not_found"}, {`{"name":"$IMAGE"}`, "image_not_found"}},

	"Snapshots/Create": {{`{"sandbox":"$BOX"}`, "not_found"}, {`{"sandbox":"$BOX","stop":true}`, "not_found"}},
	"Snapshots/Get":    {{`{"id":"$MEM"}`, "not_found"}, {`{"id":"red-memory"}`, "not_found"}, {`{"id":"$TPLSNAP"}`, "not_found"}},
	"Snapshots/List":   {{`{}`, "own"}, {`{"sandbox":"$BOX"}`, "own"}, {`{"kind":"memory"}`, "own"}},
	"Snapshots/Delete": {{`{"id":"$MEM"}`, "not_found"}, {`{"id":"red-memory"}`, "not_found"}, {`{"id":"$TPLSNAP"}`, "not_found"}},
	"Snapshots/Prune":  {{`{"maxBytes":"1"}`, "own"}, {`{"maxBytes":"1","sandbox":"$BOX"}`, "own"}},
	"Snapshots/Mount":  {{`{"sandbox":"$BOX","snapshot":"$DIR"}`, "not_found"}, {`{"sandbox":"$OWN","snapshot":"$DIR"}`, "not_found"}, {`{"sandbox":"$BOX","snapshot":"$OWNDIR"}`, "not_found"}},
	"Snapshots/Verify": {{`{"id":"$MEM"}`, "not_found"}},

	"Templates/Build":  {{`{"name":"x","spec":{"snapshot":"$FS"}}`, "not_found"}, {`{"name":"x","spec":{"image":"mine"}}`, "image_not_found"}},
	"Templates/Get":    {{`{"name":"redpy"}`, "not_found"}, {`{"name":"redpy@1"}`, "not_found"}},
	"Templates/List":   {{`{}`, "own"}, {`{"name":"redpy"}`, "not_found"}},
	"Templates/Tag":    {{`{"name":"redpy","tags":["v1"]}`, "not_found"}},
	"Templates/Untag":  {{`{"name":"redpy","tags":["v1"]}`, "not_found"}},
	"Templates/Delete": {{`{"name":"redpy"}`, "not_found"}, {`{"name":"redpy@1"}`, "not_found"}},

	"Recordings/Get":    {{`{"name":"redtape","exchanges":10}`, "not_found"}, {`{"name":"$REC","exchanges":10}`, "not_found"}},
	"Recordings/List":   {{`{}`, "own"}},
	"Recordings/Delete": {{`{"name":"redtape"}`, "not_found"}, {`{"name":"$REC"}`, "not_found"}},

	"Volumes/Create":     {{`{"name":"data.$REDID_","size":"67108864"}`, "invalid_argument"}},
	"Volumes/Get":        {{`{"name":"data"}`, "not_found"}, {`{"name":"$VOL"}`, "not_found"}},
	"Volumes/List":       {{`{}`, "own"}},
	"Volumes/Delete":     {{`{"name":"data"}`, "not_found"}, {`{"name":"$VOL"}`, "not_found"}, {`{"name":"data.$REDID"}`, "not_found"}},
	"Volumes/Resize":     {{`{"name":"data","size":"134217728"}`, "not_found"}, {`{"name":"$VOL","size":"134217728"}`, "not_found"}},
	"Volumes/Snapshot":   {{`{"name":"data"}`, "not_found"}, {`{"name":"$VOL"}`, "not_found"}},
	"Volumes/Clone":      {{`{"name":"$VOL","newName":"mine"}`, "not_found"}},
	"Volumes/ListFiles":  {{`{"name":"data","path":"/"}`, "not_found"}, {`{"name":"$VOL","path":"/"}`, "not_found"}},
	"Volumes/RemoveFile": {{`{"name":"$VOL","path":"/redfile"}`, "not_found"}},

	"Grades/Create":    {{`{"sandbox":"$BOX","args":["true"],"artifacts":["/work"]}`, "not_found"}},
	"Grades/Get":       {{`{"id":"redgrade1"}`, "not_found"}},
	"Grades/Cancel":    {{`{"id":"redgrade1"}`, "not_found"}},
	"Grades/Wait":      {{`{"id":"redgrade1"}`, "not_found"}},
	"Grades/List":      {{`{}`, "own"}, {`{"sandbox":"$BOX"}`, "own"}},
	"Leases/Create":    {{`{"ttl":"0.1s"}`, "invalid_argument"}},
	"Leases/Heartbeat": {{`{"id":"$LEASE"}`, "not_found"}},
	"Leases/Get":       {{`{"id":"$LEASE"}`, "not_found"}},
	"Leases/List":      {{`{}`, "own"}},
	"Leases/End":       {{`{"id":"$LEASE"}`, "own"}},

	"Runs/Create":          {{`{"name":"x","ttl":"0.1s"}`, "invalid_argument"}},
	"Runs/Get":             {{`{"run":"$RUN"}`, "not_found"}, {`{"run":"redjob"}`, "not_found"}},
	"Runs/List":            {{`{"ended":true}`, "own"}},
	"Runs/Heartbeat":       {{`{"run":"$RUN"}`, "not_found"}},
	"Runs/End":             {{`{"run":"$RUN"}`, "not_found"}},
	"Runs/Reap":            {{`{"run":"$RUN"}`, "not_found"}, {`{"run":"redjob"}`, "not_found"}},
	"Runs/Delete":          {{`{"run":"$RUN"}`, "own"}},
	"Runs/Group":           {{`{"count":1,"sandbox":"$BOX"}`, "not_found"}, {`{"count":1,"spec":{"snapshot":"$MEM"}}`, "not_found"}, {`{"count":1,"spec":{"rollout":{"run":"$RUN"}}}`, "not_found"}, {`{"count":1,"spec":{"lease":"$LEASE"}}`, "not_found"}},
	"Runs/Replay":          {{`{"run":"$RUN","sandbox":"$BOX"}`, "not_found"}, {`{"sandbox":"$BOX"}`, "not_found"}},
	"Runs/PutCheckpoint":   {{`{"run":"$RUN","doc":"aGk="}`, "not_found"}},
	"Runs/SetPlan":         {{`{"run":"$RUN","items":[{"image":"base","count":1}]}`, "not_found"}},
	"Runs/GetPlan":         {{`{"run":"$RUN"}`, "not_found"}},
	"Runs/GetCheckpoint":   {{`{"run":"$RUN"}`, "not_found"}},
	"Runs/ListCheckpoints": {{`{"run":"$RUN"}`, "not_found"}},
	"Runs/ListSteps":       {{`{"run":"$RUN"}`, "not_found"}, {`{"run":"redjob","cursor":"$RUN.0"}`, "not_found"}},
	"Runs/FollowSteps":     {{`{"run":"$RUN"}`, "not_found"}},
	"Runs/Cost":            {{`{"run":"$RUN"}`, "not_found"}, {`{"by":"tenant"}`, "own"}},

	"Shipments/Create": {{`{"name":"x","run":"$RUN","sink":{"kind":"pull"}}`, "not_found"}, {`{"name":"x","run":"redjob","sink":{"kind":"pull"}}`, "not_found"},
		{`{"name":"x","sink":{"kind":"directory","path":"x"}}`, "permission_denied"}},
	"Shipments/Get":    {{`{"shipment":"redship1"}`, "not_found"}, {`{"shipment":"redshipment"}`, "not_found"}},
	"Shipments/List":   {{`{}`, "own"}},
	"Shipments/Pause":  {{`{"shipment":"redship1"}`, "not_found"}, {`{"shipment":"redshipment"}`, "not_found"}},
	"Shipments/Resume": {{`{"shipment":"redship1"}`, "not_found"}},
	"Shipments/Delete": {{`{"shipment":"redship1"}`, "own"}, {`{"shipment":"redshipment"}`, "own"}},
	"Shipments/Ack":    {{`{"shipment":"redship1","cursor":"$RUN.0"}`, "not_found"}},

	"Secrets/Create": {{`{"name":"redtoken","value":"bluevalue"}`, "invalid_argument"}},
	"Secrets/List":   {{`{}`, "own"}},
	"Secrets/Update": {{`{"name":"redtoken","hosts":["evil.test"]}`, "not_found"}},
	"Secrets/Delete": {{`{"name":"redtoken"}`, "not_found"}},

	"Keys/Create": {{`{"name":"x","tenant":"red"}`, "not_found"}, {`{"name":"x","tenant":"$REDID"}`, "not_found"}, {`{"name":"x","role":"root"}`, "permission_denied"},
		{`{"name":"x","tenant":"default"}`, "not_found"}},
	"Keys/List":       {{`{}`, "own"}},
	"Ports/Url":       {{`{"sandboxId":"$BOX","port":80}`, "not_found"}},
	"Ports/Set":       {{`{"sandboxId":"$BOX","port":80,"public":true}`, "not_found"}},
	"Ports/WaitReady": {{`{"sandboxId":"$BOX","port":80,"timeout":"0.1s"}`, "not_found"}},
	"Ports/SignSsh":   {{`{"sandboxId":"$BOX","publicKey":"ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAIJWVgYg0yV7Q0dlbJmNTSNBAG4hG1JDqQ1vzkOHC5sW1"}`, "not_found"}},

	"Callbacks/Serve": {{`{"sandboxId":"$BOX","name":"llm"}`, "not_found"}, {`{"sandboxId":"$BOX","name":"llm","replace":true}`, "not_found"}},
	"Callbacks/Close": {{`{"sandboxId":"$BOX","name":"llm"}`, "not_found"}},

	"Keys/Revoke": {{`{"id":"$KEY"}`, "not_found"}},
	"Keys/Rotate": {{`{"id":"$KEY"}`, "not_found"}},

	"Tenants/Create":   {{`{"name":"x"}`, "permission_denied"}},
	"Tenants/Get":      {{`{"name":"red"}`, "not_found"}, {`{"name":"$REDID"}`, "not_found"}, {`{"name":"default"}`, "not_found"}, {`{}`, "own"}},
	"Tenants/List":     {{`{}`, "permission_denied"}},
	"Tenants/SetQuota": {{`{"name":"red","quota":{"sandboxes":"1"}}`, "permission_denied"}, {`{"name":"blue","quota":{}}`, "permission_denied"}},
	"Tenants/Delete":   {{`{"name":"red"}`, "permission_denied"}, {`{"name":"$REDID"}`, "permission_denied"}},

	"System/Info":  {{`{}`, "own"}},
	"System/Audit": {{`{"all":true}`, "permission_denied"}, {`{}`, "own"}},
}

// routeAttacks are the same for the plain routes, by pattern.
const evil = `{"command": "touch /evil"}` // a command where the route takes one, content where it takes that

var routeAttacks = map[string][]attack{
	"GET /v1/sandboxes/{id}/files":                            {{"/v1/sandboxes/$BOX/files?path=/redfile", "not_found"}},
	"PUT /v1/sandboxes/{id}/files":                            {{"/v1/sandboxes/$BOX/files?path=/redfile", "not_found"}},
	"GET /v1/sandboxes/{id}/tar":                              {{"/v1/sandboxes/$BOX/tar?path=/", "not_found"}},
	"PUT /v1/sandboxes/{id}/tar":                              {{"/v1/sandboxes/$BOX/tar?path=/", "not_found"}},
	"POST /v1/sandboxes/{id}/exec":                            {{"/v1/sandboxes/$BOX/exec", "not_found"}},
	"GET /v1/sandboxes/{id}/connect":                          {{"/v1/sandboxes/$BOX/connect?port=80", "not_found"}},
	"POST /v1/sandboxes/{id}/code":                            {{"/v1/sandboxes/$BOX/code", "invalid_argument"}},
	"GET /v1/sandboxes/{id}/code/contexts":                    {{"/v1/sandboxes/$BOX/code/contexts", "not_found"}},
	"POST /v1/sandboxes/{id}/code/contexts":                   {{"/v1/sandboxes/$BOX/code/contexts", "invalid_argument"}},
	"DELETE /v1/sandboxes/{id}/code/contexts/{context}":       {{"/v1/sandboxes/$BOX/code/contexts/c", "not_found"}},
	"POST /v1/sandboxes/{id}/code/contexts/{context}/restart": {{"/v1/sandboxes/$BOX/code/contexts/c/restart", "not_found"}},
	"PUT /v1/build-files/{key}":                               {{"/v1/build-files/a%20b", "invalid_argument"}},
	"POST /v1/replays":                                        {{"/v1/replays", "invalid_argument"}},
	"POST /v1/groups":                                         {{"/v1/groups", "invalid_argument"}},
	"GET /v1/runs/{id}/steps":                                 {{"/v1/runs/$RUN/steps", "not_found"}, {"/v1/runs/redjob/steps?follow=true", "not_found"}},
	"GET /v1/runs/{id}/export":                                {{"/v1/runs/$RUN/export", "not_found"}, {"/v1/runs/redjob/export?format=parquet", "not_found"}, {"/v1/runs/redjob/export?follow=true&cursor=$RUN.0", "not_found"}},
	"GET /v1/shipments/{id}/records":                          {{"/v1/shipments/redship1/records", "not_found"}, {"/v1/shipments/redshipment/records?follow=true", "not_found"}},
	"PUT /v1/images":                                          {{"/v1/images?name=base&shared=true", "permission_denied"}},
	"GET /v1/snapshots/{id}/tar":                              {{"/v1/snapshots/$FS/tar", "not_found"}, {"/v1/snapshots/red-filesystem/tar", "not_found"}},
	"GET /v1/recordings/{id}/archive":                         {{"/v1/recordings/redtape/archive", "not_found"}, {"/v1/recordings/$REC/archive?format=har", "not_found"}},
	"PUT /v1/grades/tests":                                    {{"/v1/grades/tests?digest=x", "invalid_argument"}},
	"PUT /v1/recordings":                                      {{"/v1/recordings?name=redtape", "invalid_argument"}},
	"GET /v1/volumes/{id}/files":                              {{"/v1/volumes/data/files?path=/redfile", "not_found"}, {"/v1/volumes/$VOL/files?path=/redfile", "not_found"}},
	"PUT /v1/volumes/{id}/files":                              {{"/v1/volumes/data/files?path=/redfile", "not_found"}, {"/v1/volumes/$VOL/files?path=/redfile", "not_found"}},
	"GET /v1/sandboxes/{id}/callbacks/{request}/body":         {{"/v1/sandboxes/$BOX/callbacks/x/body", "not_found"}},
	"PUT /v1/sandboxes/{id}/callbacks/{request}":              {{"/v1/sandboxes/$BOX/callbacks/x", "not_found"}},
}

// methods is every method of the API that is linked in, from the registry: a new
// service cannot be forgotten here.
func methods() map[string]protoreflect.MethodDescriptor {
	out := map[string]protoreflect.MethodDescriptor{}
	protoregistry.GlobalFiles.RangeFilesByPackage(apiPackage, func(f protoreflect.FileDescriptor) bool {
		for i := range f.Services().Len() {
			svc := f.Services().Get(i)
			for j := range svc.Methods().Len() {
				out[string(svc.Name())+"/"+string(svc.Methods().Get(j).Name())] = svc.Methods().Get(j)
			}
		}
		return true
	})
	return out
}

func (s *shared) fill(msg string, own map[string]string) string {
	pairs := []string{"$BOX", s.box, "$MEM", s.snap["memory"], "$FS", s.snap["filesystem"], "$DIR", s.snap["directory"], "$IMAGE", s.image,
		"$LEASE", s.lease, "$RUN", s.runID, "$VOL", s.vol, "$REC", s.rec, "$KEY", s.keyID, "$REDID", s.tenants["red"]}
	for k, v := range own {
		pairs = append([]string{k, v}, pairs...)
	}
	return strings.NewReplacer(pairs...).Replace(msg)
}

// A key of another tenant reaches nothing: every method of every service and
// every plain route, at every thing red has. Existence does not show, nothing
// changes, and no answer has a word of red's in it that was not asked with.
func TestForeignKeyReachesNothing(t *testing.T) {
	s := newShared(t)
	own := map[string]string{}
	sb, err := s.blue.Sandboxes.Create(t.Context(), connect.NewRequest(&covev1.CreateSandboxRequest{}))
	if err != nil {
		t.Fatal(err)
	}
	own["$OWN"] = sb.Msg.Sandbox.Id
	for kind, as := range map[string]string{"memory": "$OWNSNAP", "directory": "$OWNDIR"} {
		m := &covev1.CreateSnapshotRequest{Sandbox: own["$OWN"], Kind: kind, Labels: map[string]string{"a": kind}}
		if kind == "directory" {
			m.Path = "/etc"
		}
		ev, err := s.blue.Snapshots.Create(t.Context(), connect.NewRequest(m))
		if err != nil {
			t.Fatal(err)
		}
		for ev.Receive() {
			own[as] = ev.Msg().GetSnapshot().GetId()
		}
		_ = ev.Close()
		if own[as] == "" {
			t.Fatal(ev.Err())
		}
	}
	tpl, err := s.store.GetTemplate(store.In(t.Context(), s.tenants["red"]), "redpy", 0)
	if err != nil {
		t.Fatal(err)
	}
	own["$TPLSNAP"] = tpl.Snapshot
	if err := s.store.CreateGrade(store.In(t.Context(), s.tenants["red"]), sandbox.Grade{ID: "redgrade1", State: sandbox.Graded, Spec: sandbox.GradeSpec{Sandbox: s.box}}); err != nil {
		t.Fatal(err)
	}
	if err := s.store.CreateShipment(store.In(t.Context(), s.tenants["red"]), sandbox.Shipment{ID: "redship1", Name: "redshipment", Run: s.runID, Sink: sandbox.ShipmentSink{Kind: sandbox.PullSink}}); err != nil {
		t.Fatal(err)
	}
	// Pruning blue's own snapshots is blue's right: out of the way before.
	before := s.fingerprint()

	red := []string{"redsecret", "redtoken", "redhost", "REDENV", "redrun", "redpy", "red-", "redfile", "reader", s.box, s.image, s.vol, s.rec, "redtape", "redlease", "redgrade1", "redship1", "redshipment", s.lease, "redjob", s.runID, s.keyID, s.tenants["red"],
		s.snap["memory"], s.snap["filesystem"], s.snap["directory"], tpl.Snapshot}
	leaks := func(what, sent, got string) {
		t.Helper()
		words := red
		if what == "System/Audit" { // it has what blue itself asked with before
			words = []string{"redsecret", "redrun", "redfile", "reader", "red-admin", `"tenant":"` + s.tenants["red"]}
		}
		for _, word := range words {
			if strings.Contains(got, word) && !strings.Contains(sent, word) {
				t.Errorf("%s %s: the answer has %q: %s", what, sent, word, got)
			}
		}
	}
	all := methods()
	for proc, m := range all {
		if len(attacks[proc]) == 0 {
			t.Errorf("no attack on %s: a method is walked with a foreign key before it is released", proc)
		}
		for _, a := range attacks[proc] {
			if proc == "Snapshots/Prune" {
				continue // below
			}
			msg := s.fill(a.msg, own)
			class, body := s.call("blue", m, "/"+apiPackage+"."+proc, msg)
			want := a.want
			if want == "own" {
				want = ""
			}
			if class != want {
				t.Errorf("%s %s: %q, want %q: %s", proc, msg, class, a.want, body)
			}
			leaks(proc, msg, body)
			if now := s.fingerprint(); now != before {
				t.Fatalf("%s %s changed something:\n%s\n%s", proc, msg, before, now)
			}
		}
	}
	for proc := range attacks {
		if all[proc] == nil {
			t.Errorf("an attack on %s, which is no method", proc)
		}
	}
	for pattern := range nativeRoutes(s.server) {
		if len(routeAttacks[pattern]) == 0 {
			t.Errorf("no attack on %q", pattern)
		}
		method, _, _ := strings.Cut(pattern, " ")
		for _, a := range routeAttacks[pattern] {
			path := s.fill(a.msg, own)
			resp, body := s.as("blue", method, path, strings.NewReader(evil))
			if class := classIn(body); class != a.want {
				t.Errorf("%s %s: %d %q, want %q", method, path, resp.StatusCode, class, a.want)
			}
			leaks(pattern, path, body)
			if method == "GET" {
				if resp, _ := s.as("blue", "HEAD", path, nil); resp.StatusCode != 404 {
					t.Errorf("HEAD %s: %d", path, resp.StatusCode)
				}
			}
			if now := s.fingerprint(); now != before {
				t.Fatalf("%s %s changed something", method, path)
			}
		}
	}

	// Pruning takes blue's own and leaves red's.
	for _, a := range attacks["Snapshots/Prune"] {
		msg := s.fill(a.msg, own)
		class, body := s.call("blue", all["Snapshots/Prune"], "/cove.v1.Snapshots/Prune", msg)
		if class != "" {
			t.Error(class, body)
		}
		leaks("Snapshots/Prune", msg, body)
	}
	for kind, id := range s.snap {
		if _, err := s.red.Snapshots.Get(t.Context(), connect.NewRequest(&covev1.GetSnapshotRequest{Id: id})); err != nil {
			t.Errorf("red's %s snapshot: %v", kind, err)
		}
	}

	// The same names are blue's own for blue: an idempotency key, a volume, an image, a template.
	c, err := s.blue.Sandboxes.Create(t.Context(), connect.NewRequest(&covev1.CreateSandboxRequest{IdempotencyKey: "once"}))
	if err != nil || c.Msg.Existed || c.Msg.Sandbox.Id == s.box {
		t.Errorf("red's idempotency key: %v, %v", c, err)
	}
	v, err := s.blue.Volumes.Create(t.Context(), connect.NewRequest(&covev1.CreateVolumeRequest{Name: "data", Size: 64 << 20}))
	if err != nil || v.Msg.Volume.Id == s.vol || v.Msg.Volume.Name != "data" {
		t.Errorf("a volume called as red's: %v, %v", v, err)
	}
	if _, err := s.blue.Volumes.Delete(t.Context(), connect.NewRequest(&covev1.DeleteVolumeRequest{Name: "data"})); err != nil {
		t.Error(err)
	}
	if _, body := s.as("red", "GET", "/v1/volumes/data/files?path=/redfile", nil); body != "redsecret" {
		t.Errorf("red's volume after blue deleted its own: %q", body)
	}
	if _, body := s.as("blue", "PUT", "/v1/images?name=mine", strings.NewReader("bluesown")); strings.Contains(body, s.image) {
		t.Errorf("an image called as red's: %s", body)
	}
	if img, err := s.red.Images.Get(t.Context(), connect.NewRequest(&covev1.GetImageRequest{Name: "mine"})); err != nil || img.Msg.Image.Id != s.image {
		t.Errorf("red's image after blue made its own: %v, %v", img, err)
	}
	if n := len(attacks) + len(routeAttacks); n < 70 {
		t.Errorf("only %d methods and routes were walked", n)
	}
}

// A readonly key of red's own looks and downloads, and changes nothing: every
// method and route again.
func TestReadonlyKeyChangesNothing(t *testing.T) {
	s := newShared(t)
	own := map[string]string{"$OWN": s.box, "$OWNSNAP": s.snap["memory"], "$OWNDIR": s.snap["directory"], "$TPLSNAP": s.snap["memory"]}
	before := s.fingerprint()
	looks := 0
	for proc, m := range methods() {
		may := operations[nativeProcedures["/"+apiPackage+"."+proc]].role == readonly
		for _, a := range attacks[proc] {
			if a.want == "permission_denied" && may {
				continue
			}
			msg := s.fill(a.msg, own)
			class, body := s.call("reader", m, "/"+apiPackage+"."+proc, msg)
			if denied := class == "permission_denied"; denied == may {
				t.Errorf("%s %s: %q for a readonly key: %s", proc, msg, class, body)
			}
			if may && class == "" {
				looks++
			}
		}
		if now := s.fingerprint(); now != before {
			t.Fatalf("%s changed something:\n%s\n%s", proc, before, now)
		}
	}
	if looks < 15 {
		t.Errorf("a readonly key could only look at %d things", looks)
	}
	for pattern := range nativeRoutes(s.server) {
		method, _, _ := strings.Cut(pattern, " ")
		for _, a := range routeAttacks[pattern] {
			resp, body := s.as("reader", method, s.fill(a.msg, own), strings.NewReader(evil))
			if denied := resp.StatusCode == 403; denied == (operations[nativeRoutes(s.server)[pattern]].role == readonly) {
				t.Errorf("%s %s: %d for a readonly key: %s", method, a.msg, resp.StatusCode, body)
			}
		}
	}
	if now := s.fingerprint(); now != before {
		t.Fatal("a route changed something")
	}
}

// A context without a caller reaches no sandbox on the node either.
func TestGuardFailsClosed(t *testing.T) {
	w := newWorld(t)
	id := w.create(nil).Id
	g, ctx := w.server.node, t.Context()
	for name, call := range map[string]func() error{
		"Create": func() error {
			_, err := g.Create(ctx, sandbox.Sandbox{ID: "x", Tenant: "default"}, sandbox.Image{})
			return err
		},
		"CreateFrom": func() error {
			_, err := g.CreateFrom(ctx, sandbox.Sandbox{ID: "x"}, sandbox.Image{}, sandbox.Snapshot{})
			return err
		},
		"Kill": func() error { return g.Kill(ctx, id, sandbox.End{}) },
		"Hold": func() error { _, err := g.Hold(ctx, id, time.Second); return err },
		"Start": func() error {
			for _, err := range g.Start(ctx, id, sandbox.ProcessSpec{}, 0) {
				return err
			}
			return nil
		},
		"Stats":   func() error { _, err := g.Stats(ctx, id); return err },
		"Reset":   func() error { _, _, err := g.Reset(ctx, id); return err },
		"Live":    func() error { _, err := g.Live(ctx); return err },
		"Collect": func() error { _, err := g.Collect(ctx, nil); return err },
		"Blobs":   func() error { _, err := g.Blobs(ctx, nil); return err },
		"AckEnd":  func() error { return g.AckEnd(ctx, id) },
	} {
		if err := call(); sandbox.ClassOf(err) != sandbox.Internal {
			t.Errorf("%s without a tenant: %v", name, err)
		}
	}
	if w.node.liveCount() != 1 {
		t.Error("something was done")
	}
}
