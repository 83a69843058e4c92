package cli

import (
	"encoding/json"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/durationpb"

	covev1 "github.com/cove-sandbox/cove/api/cove/v1"
)

// sent checks the request of the latest call.
func (f *fakeAPI) sent(t *testing.T, want proto.Message) {
	t.Helper()
	got := proto.Clone(f.last())
	switch m := got.(type) { // the key is another one every time
	case *covev1.ForkRequest:
		m.IdempotencyKey = ""
	case *covev1.CreateSnapshotRequest:
		m.IdempotencyKey = ""
	}
	if !proto.Equal(got, want) {
		t.Errorf("sent %v\nwant %v", got, want)
	}
}

// A fork or snapshot whose connection breaks is asked for again with its key.
func TestAskingAgain(t *testing.T) {
	f := newFakeAPI(t)
	f.addSandbox("abc", nil)
	f.away = 1
	f.cove(t, settings{}, "fork", "abc", "-n", "1").want(t, 0, "child1\n", "gone; asking again")
	f.away = 1
	f.cove(t, settings{}, "snapshot", "create", "abc", "--ttl", "24h").want(t, 0, "snap1\n", "gone; asking again")
	f.sent(t, &covev1.CreateSnapshotRequest{Sandbox: "abc", Ttl: durationpb.New(24 * time.Hour)})
	f.cove(t, settings{}, "snapshot", "create", "abc", "--idempotency-key", "mine").want(t, 0, "snap1\n", "stored")
	var keys []string
	for _, m := range f.asked {
		if m, ok := m.(interface{ GetIdempotencyKey() string }); ok {
			keys = append(keys, m.GetIdempotencyKey())
		}
	}
	if len(keys) != 5 || keys[0] == "" || keys[0] != keys[1] || keys[2] != keys[3] || keys[1] == keys[2] || keys[4] != "mine" {
		t.Errorf("keys %q", keys)
	}
}

func TestCreateFromState(t *testing.T) {
	f := newFakeAPI(t)
	f.cove(t, settings{}, "create", "--snapshot", "warm", "--volume", "data:/data", "--volume", "set:/set:ro", "--idle-timeout", "5m", "--on-idle", "pause").want(t, 0, "sb1\n")
	want := &covev1.SandboxSpec{Resources: &covev1.Resources{}, Snapshot: "warm", OnIdle: "pause", IdleTimeout: durationpb.New(5 * time.Minute),
		Volumes: []*covev1.VolumeMount{{Volume: "data", Path: "/data"}, {Volume: "set", Path: "/set", Mode: "ro"}}}
	if got := f.created[0].GetSpec(); !proto.Equal(got, want) {
		t.Errorf("sent %v\nwant %v", got, want)
	}
	f.cove(t, settings{}, "create", "--template", "web@2", "--timeout", "1h", "--on-timeout", "pause", "--public-ports", "--port-host", "localhost:${PORT}", "--tls-port", "8443").want(t, 0, "sb2\n")
	if got := f.created[1].GetSpec(); got.GetOnTimeout() != "pause" || !proto.Equal(got.GetIngress(), &covev1.Ingress{Public: true, Host: "localhost:${PORT}", Tls: []int32{8443}}) {
		t.Errorf("sent %v", got)
	}
	if got := f.created[1].GetSpec().GetTemplate(); got != "web@2" {
		t.Error(got)
	}
	for _, bad := range []string{"data", "data:rel", ":/x", "a:/b:ro:x"} {
		f.cove(t, settings{}, "create", "--volume", bad).want(t, 2, "", "NAME:PATH")
	}
}

func TestFork(t *testing.T) {
	f := newFakeAPI(t)
	f.addSandbox("abcdef", nil)
	f.cove(t, settings{}, "fork", "abc", "-n", "2", "--label", "trial=1", "-e", "A=b", "--timeout", "1h").
		want(t, 0, "child1\nchild2\n", "2 of 2, the source stood still for 40ms")
	f.sent(t, &covev1.ForkRequest{Id: "abcdef", Count: 2, Labels: map[string]string{"trial": "1"}, Env: map[string]string{"A": "b"}, Timeout: durationpb.New(time.Hour)})

	f.addSnapshot("snapxyz", "warm", "memory")
	f.broken = 1
	f.cove(t, settings{}, "fork", "--snapshot", "warm", "-n", "3", "--min-ready", "2").want(t, 0, "child2\nchild3\n", "a child failed: full")
	f.sent(t, &covev1.ForkRequest{Snapshot: "snapxyz", Count: 3, MinReady: 2})
	c := f.cove(t, settings{}, "fork", "abcdef", "-n", "2", "--json")
	var got []map[string]any
	if err := json.Unmarshal([]byte(c.stdout), &got); err != nil || len(got) != 2 || got[0]["error"].(map[string]any)["code"] != "no_capacity" ||
		got[1]["sandbox"].(map[string]any)["id"] != "child2" {
		t.Errorf("%s (%v)", c.stdout, err)
	}
	f.cove(t, settings{}, "fork").want(t, 2, "", "name one sandbox, or give --snapshot")
	f.cove(t, settings{}, "fork", "abc", "--snapshot", "warm").want(t, 2, "", "name one sandbox")
}

func TestSnapshotCreate(t *testing.T) {
	f := newFakeAPI(t)
	f.addSandbox("abc", nil)
	f.cove(t, settings{}, "snapshot", "create", "abc", "--name", "warm", "--label", "a=b", "--stop").want(t, 0, "snap1\n", "100MiB, 3MiB stored, the sandbox stood still for 30ms")
	f.sent(t, &covev1.CreateSnapshotRequest{Sandbox: "abc", Name: "warm", Labels: map[string]string{"a": "b"}, Stop: true})
	for flag, kind := range map[string]string{"--filesystem": "filesystem", "--memory": "memory", "--kind=filesystem": "filesystem"} {
		f.cove(t, settings{}, "snapshot", "create", "abc", flag).want(t, 0, "snap1\n", "stored")
		f.sent(t, &covev1.CreateSnapshotRequest{Sandbox: "abc", Kind: kind})
	}
	f.cove(t, settings{}, "snapshot", "create", "abc", "--path", "/out", "--kind", "directory").want(t, 0, "snap1\n", "stored")
	f.sent(t, &covev1.CreateSnapshotRequest{Sandbox: "abc", Kind: "directory", Path: "/out"})
	f.cove(t, settings{}, "snapshot", "create", "abc", "--path", "/out", "--memory").want(t, 2, "", "of one kind")
	f.unchanged = true
	f.cove(t, settings{}, "snapshot", "create", "abc").want(t, 0, "snap1\n", "nothing happened since")
	c := f.cove(t, settings{}, "snapshot", "create", "abc", "--json")
	if !strings.Contains(c.stdout, `"unchanged": true`) || !strings.Contains(c.stdout, `"paused_s": 0.03`) || c.stderr != "" {
		t.Errorf("%s%s", c.stdout, c.stderr)
	}
}

func TestSnapshotsAreFoundByNameIDAndStart(t *testing.T) {
	f := newFakeAPI(t)
	f.addSandbox("abc", nil)
	f.addSnapshot("snapaa", "warm", "memory")
	f.addSnapshot("snapab", "", "directory")
	f.cove(t, settings{}, "snapshot", "ls", "-q").want(t, 0, "snapaa\nsnapab\n")
	f.cove(t, settings{}, "snapshot", "ls", "--sandbox", "abc", "--kind", "memory", "--label", "a=b", "--json")
	f.sent(t, &covev1.ListSnapshotsRequest{Sandbox: "abc", Kind: "memory", Labels: map[string]string{"a": "b"}, PageSize: 1000, PageToken: "1"})
	f.cove(t, settings{}, "restore", "abc", "warm").want(t, 0, "abc\n", "episode 2, 90ms")
	f.sent(t, &covev1.RestoreRequest{Id: "abc", Snapshot: "snapaa"})
	f.cove(t, settings{}, "snapshot", "mount", "snapab", "abc", "--path", "/x", "--unpack").want(t, 0, "")
	f.sent(t, &covev1.MountSnapshotRequest{Sandbox: "abc", Snapshot: "snapab", Path: "/x", Unpack: true})
	f.cove(t, settings{}, "snapshot", "verify", "warm").want(t, 0, "snapaa\t1MiB whole\n")
	f.cove(t, settings{}, "snapshot", "export", "warm").want(t, 0, "tar of snapaa")
	f.cove(t, settings{}, "snapshot", "get", "snapa").want(t, 2, "", "more than one snapshot", "snapaa, snapab")
	f.cove(t, settings{}, "snapshot", "get", "wram").want(t, 1, "", "did you mean 'warm'?")
	f.cove(t, settings{}, "snapshot", "rm", "wram", "snapab").want(t, 1, "snapab\n", "cove: wram: no snapshot 'wram'; did you mean 'warm'?")
	f.cove(t, settings{}, "snapshot", "rm", "warm", "--json").want(t, 0, "[\n  {\n    \"id\": \"snapaa\",\n    \"freed\": 3145728\n  }\n]\n")
	for _, line := range [][]string{{"snapshot", "rm", ""}, {"restore", "abc", ""}, {"create", "--snapshot", ""}} {
		if c := f.cove(t, settings{}, append([]string{"__complete"}, line...)...); !strings.Contains(c.stdout, "warm\tmemory of abc") {
			t.Errorf("completion of %v: %s", line, c.stdout)
		}
	}
}

func TestSnapshotPrune(t *testing.T) {
	f := newFakeAPI(t)
	f.cove(t, settings{}, "snapshot", "prune", "--keep-last", "3", "--keep-label", "a=b", "--max-bytes", "1GiB", "--max-age", "30d", "--sandbox", "abc", "--dry-run").
		want(t, 0, "s1\tkeep_last\ns2\tmax_age\n", "would delete 2, 3MiB")
	f.sent(t, &covev1.PruneSnapshotsRequest{KeepLast: 3, KeepLabels: map[string]string{"a": "b"}, MaxBytes: 1 << 30, MaxAge: durationpb.New(720 * time.Hour), Sandbox: "abc", DryRun: true})
	c := f.cove(t, settings{}, "snapshot", "prune", "--keep-last", "1", "--json")
	if !strings.Contains(c.stdout, `"bytes": 3145728`) || !strings.Contains(c.stdout, `"reason": "max_age"`) {
		t.Error(c.stdout)
	}
}

func TestStandby(t *testing.T) {
	f := newFakeAPI(t)
	f.addSandbox("abc", nil)
	f.addSandbox("def", nil)
	f.cove(t, settings{}, "pause", "abc", "def", "--cold").want(t, 0, "abc\ndef\n")
	f.sent(t, &covev1.PauseRequest{Id: "def", Cold: true})
	if c := f.cove(t, settings{}, "ls"); !strings.Contains(c.stdout, "paused (cold)") {
		t.Error(c.stdout)
	}
	if c := f.cove(t, settings{}, "ls", "--json"); !strings.Contains(c.stdout, `"standby": "cold"`) {
		t.Error(c.stdout)
	}
	c := f.cove(t, settings{}, "resume", "abc", "--json")
	if c.code != 0 || !strings.Contains(c.stdout, `"node_time_s": 0.002`) {
		t.Errorf("%+v", c)
	}
	f.cove(t, settings{}, "pause", "zzz").want(t, 1, "", "no sandbox zzz")
}

func TestTree(t *testing.T) {
	f := newFakeAPI(t)
	f.addSandbox("abcdef", nil)
	f.tree = []*covev1.TreeNode{{Id: "s1", Kind: "memory", Name: "warm\x1b[2J"}, {Id: "abcdef", Parent: "s1", Kind: "sandbox", State: "running"},
		{Id: "s2", Parent: "s1", Kind: "filesystem"}}
	f.cove(t, settings{}, "tree", "abcdef").want(t, 0, "s1  memory  warm[2J\n├── abcdef  sandbox  running\n└── s2  filesystem\n")
	f.cove(t, settings{}, "tree", "abc").want(t, 0, "s1  memory  warm[2J\n├── abcdef  sandbox  running\n└── s2  filesystem\n")
	if c := f.cove(t, settings{}, "tree", "s2", "--json"); !strings.Contains(c.stdout, `"parent": "s1"`) {
		t.Error(c.stdout)
	}
	f.cove(t, settings{}, "tree", "zzz").want(t, 1, "", "no sandbox or snapshot 'zzz'")
}

func TestTemplates(t *testing.T) {
	f := newFakeAPI(t)
	// What the start command prints is shown, and cannot act on the terminal.
	f.cove(t, settings{}, "template", "build", "web", "--image", "py", "--start", "serve", "--ready-port", "80", "--ready-timeout", "2m", "--memory", "1GiB", "-e", "A=b").
		want(t, 0, "web@4\n", `  | listening \x1b]0;x\x07on`, "  | 80\n", "50MiB in 3s")
	f.sent(t, &covev1.BuildTemplateRequest{Name: "web", Start: "serve", ReadyPort: 80, ReadyTimeout: durationpb.New(2 * time.Minute),
		Spec: &covev1.SandboxSpec{Image: "py", Resources: &covev1.Resources{Memory: 1 << 30}, Env: map[string]string{"A": "b"}}})
	f.cove(t, settings{}, "template", "build", "web", "--start", "crash").want(t, 1, "", "exited with 3", "hint: the start command printed:\nno port\\x1b[2J free\n")
	f.templates = []*covev1.Template{{Name: "web", Version: 4, Start: "serve", Spec: &covev1.SandboxSpec{Image: "py"}}}
	if c := f.cove(t, settings{}, "template", "ls"); !strings.Contains(c.stdout, "web@4") {
		t.Error(c.stdout)
	}
	f.cove(t, settings{}, "template", "ls", "web")
	f.sent(t, &covev1.ListTemplatesRequest{Name: "web"})
	if c := f.cove(t, settings{}, "template", "get", "web"); !strings.Contains(c.stdout, `"ref": "web@1"`) {
		t.Error(c.stdout)
	}
	if c := f.cove(t, settings{}, "template", "tag", "web@3", "stable", "v3"); c.code != 0 || !strings.Contains(c.stdout, "web@3") || !strings.Contains(c.stdout, "stable,v3") {
		t.Errorf("%+v", c)
	}
	f.sent(t, &covev1.TagTemplateRequest{Name: "web@3", Tags: []string{"stable", "v3"}})
	f.cove(t, settings{}, "template", "untag", "web", "stable").want(t, 0, "stable\n")
	f.sent(t, &covev1.UntagTemplateRequest{Name: "web", Tags: []string{"stable"}})
	for _, ref := range []string{"web", "web@2", "web:stable"} {
		f.cove(t, settings{}, "template", "rm", ref).want(t, 0, "web@1\nweb@2\n")
	}
	if c := f.cove(t, settings{}, "__complete", "create", "--template", "w"); !strings.Contains(c.stdout, "web\tversion 4") {
		t.Error(c.stdout)
	}
	f.cove(t, settings{}, "template", "biuld").want(t, 2, "", "did you mean 'cove template build'?")
}

func TestVolumes(t *testing.T) {
	f := newFakeAPI(t)
	f.volumes = []*covev1.Volume{{Id: "v1", Name: "data", Size: 1 << 30, Used: 5 << 20, Holders: []*covev1.VolumeHolder{{Sandbox: "abc", Mode: "rw"}}}}
	f.cove(t, settings{}, "volume", "create", "data", "--size", "10GiB", "--label", "a=b").want(t, 0, "data\n")
	f.sent(t, &covev1.CreateVolumeRequest{Name: "data", Size: 10 << 30, Labels: map[string]string{"a": "b"}})
	if c := f.cove(t, settings{}, "volume", "ls"); !strings.Contains(c.stdout, "abc (rw)") {
		t.Error(c.stdout)
	}
	if c := f.cove(t, settings{}, "volume", "get", "data"); !strings.Contains(c.stdout, `"used": 5242880`) {
		t.Error(c.stdout)
	}
	f.cove(t, settings{}, "volume", "get", "dta").want(t, 1, "", "did you mean 'data'?")
	f.cove(t, settings{}, "volume", "rm", "data", "held").want(t, 1, "data\n", "mounted by abc")
	f.cove(t, settings{}, "volume", "resize", "data", "2GiB").want(t, 0, "data\n")
	f.sent(t, &covev1.ResizeVolumeRequest{Name: "data", Size: 2 << 30})
	f.cove(t, settings{}, "volume", "resize", "data", "big").want(t, 2, "", "not a size")
	f.cove(t, settings{}, "volume", "clone", "data", "copy").want(t, 0, "copy\n")

	local := filepath.Join(t.TempDir(), "f")
	if err := os.WriteFile(local, []byte("content"), 0o600); err != nil {
		t.Fatal(err)
	}
	f.cove(t, settings{}, "volume", "put", "data", local, "dir/f").want(t, 0, "")
	f.cove(t, settings{stdin: strings.NewReader("piped")}, "volume", "put", "data", "-", "/p", "--mode", "0755").want(t, 0, "")
	if got := strings.Join(f.queries, " "); got != "mode=0600&path=%2Fdir%2Ff mode=0755&path=%2Fp" {
		t.Error(got)
	}
	f.cove(t, settings{}, "volume", "cat", "data", "/dir/f").want(t, 0, "content")
	f.cove(t, settings{}, "volume", "cat", "data", "p").want(t, 0, "piped")
	f.cove(t, settings{}, "volume", "cat", "data", "/none").want(t, 1, "", "no file")
	f.cove(t, settings{}, "volume", "put", "data", t.TempDir(), "/x").want(t, 2, "", "is no file")
	f.cove(t, settings{}, "volume", "put", "data", local, "/x", "--mode", "9").want(t, 2, "", "is no mode")
	f.cove(t, settings{}, "volume", "files", "data", "dir", "--depth", "3").want(t, 0, "MODE  SIZE  AGE  PATH\n0644  5B    -    /a\\x1b[2J\n0755  0B    -    /d/\n")
	f.sent(t, &covev1.ListVolumeFilesRequest{Name: "data", Path: "/dir", Depth: 3})
	f.cove(t, settings{}, "volume", "rmfile", "data", "-r", "a", "/b").want(t, 0, "a\n/b\n")
	f.sent(t, &covev1.RemoveVolumeFileRequest{Name: "data", Path: "/b", Recursive: true})
	if c := f.cove(t, settings{}, "__complete", "volume", "cat", "d"); !strings.Contains(c.stdout, "data\t5MiB of 1GiB") {
		t.Error(c.stdout)
	}
}

// Of several things that were named, one that cannot be done keeps none of the
// others from it. Each failure is said, and the exit code is that of a failure.
func TestOneOfSeveralFails(t *testing.T) {
	f := newFakeAPI(t)
	f.addSnapshot("snapaa", "warm", "memory")
	for _, command := range [][]string{{"pause"}, {"pause", "--cold"}, {"resume"}, {"reset"}, {"rm"}, {"kill"}} {
		f.addSandbox("abc", nil)
		f.addSandbox("xyz", nil)
		args := append(command, "abc", "nope", "nix", "xyz")
		f.cove(t, settings{}, args...).want(t, 1, "abc\nxyz\n", "cove: nope: no sandbox nope", "cove: nix: no sandbox nix", "hint: 'cove ls'")
	}
	f.addSandbox("abc", nil)
	f.addSandbox("xyz", nil)
	for _, command := range [][]string{{"pause", "--json"}, {"inspect"}, {"stats", "--json"}, {"reset", "--json"}} {
		got := f.cove(t, settings{}, append(command, "abc", "nope", "xyz")...)
		var out []struct{ ID string }
		if err := json.Unmarshal([]byte(got.stdout), &out); err != nil || len(out) != 2 || out[0].ID != "abc" || out[1].ID != "xyz" || got.code != 1 ||
			!strings.Contains(got.stderr, "cove: nope: no sandbox nope") {
			t.Errorf("%v: exit %d, %s, %s, %v", command, got.code, got.stdout, got.stderr, err)
		}
	}
	f.cove(t, settings{}, "snapshot", "verify", "wram", "warm").want(t, 1, "snapaa\t1MiB whole\n", "cove: wram: no snapshot 'wram'")
	// What cannot go better is tried once.
	got := f.cove(t, settings{env: map[string]string{"COVE_KEY": "wrong"}}, "pause", "abc", "xyz")
	if got.code != 1 || strings.Count(got.stderr, "does not know this API key") != 1 {
		t.Errorf("exit %d, %s", got.code, got.stderr)
	}
}
