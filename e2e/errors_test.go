package e2e

import (
	"archive/tar"
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"math"
	"net/http"
	"os"
	"strconv"
	"strings"
	"testing"
	"time"

	"connectrpc.com/connect"
	"google.golang.org/protobuf/types/known/durationpb"

	covev1 "github.com/cove-sandbox/cove/api/cove/v1"
	"github.com/cove-sandbox/cove/e2e/world"
	"github.com/cove-sandbox/cove/sandbox"
)

// wantField demands an InvalidArgument that names the field and says what is
// accepted.
func wantField(t *testing.T, err error, field string) {
	t.Helper()
	var e *sandbox.Error
	if !errors.As(err, &e) || e.Class != sandbox.Invalid || e.Field != field {
		t.Errorf("got %v (%s), want %s naming %s", err, sandbox.ClassOf(err), sandbox.Invalid, field)
	} else if len(e.Msg) < 10 {
		t.Errorf("%s: %q does not say what is accepted", field, e.Msg)
	}
}

func wantClass(t *testing.T, what string, err error, want sandbox.Class) {
	t.Helper()
	if sandbox.ClassOf(err) != want {
		t.Errorf("%s: got %v (%s), want %s", what, err, sandbox.ClassOf(err), want)
	}
}

// TestBadInput sends what is wrong in every way the API knows, and after each
// part demands that nothing half-made is left.
func TestBadInput(t *testing.T) {
	w := world.New(t, world.Options{})
	for _, s := range []scenario{
		{"wrong fields of create", wrongCreateFields},
		{"wrong fields of other calls", wrongOtherFields},
		{"plain JSON that is wrong", wrongJSON},
		{"unknown image", unknownImage},
		{"wrong key", wrongKey},
		{"larger than the machine", tooLarge},
		{"no room now", noCapacity},
		{"what is not there", notThere},
		{"images that escape", escapingImages},
	} {
		t.Run(s.name, func(t *testing.T) {
			before, err := w.Info(t.Context())
			if err != nil {
				t.Fatal(err)
			}
			t.Cleanup(func() { w.AssertReconciled(t) })
			s.run(t, w)
			live, err := w.Running(t.Context())
			if err != nil {
				t.Fatal(err)
			}
			ended, err := w.List(t.Context(), []covev1.SandboxState{covev1.SandboxState_SANDBOX_STATE_ENDED, covev1.SandboxState_SANDBOX_STATE_CREATING, covev1.SandboxState_SANDBOX_STATE_ENDING})
			if err != nil {
				t.Fatal(err)
			}
			made := 0
			for _, sb := range append(live, ended...) {
				if sb.Spec.Labels["meant"] == "" {
					t.Errorf("a sandbox was left by a refused create: %+v", sb)
				}
				made++
			}
			after, err := w.Info(t.Context())
			if err != nil {
				t.Fatal(err)
			}
			if after.Used.Memory-before.Used.Memory > int64(len(live))*world.Small().Resources.Memory || int(after.Used.Sandboxes) != len(live) {
				t.Errorf("room is held for nobody: %v, with %d sandboxes", after.Used, len(live))
			}
		})
	}
}

// meant labels a sandbox that a test makes on purpose.
func meant() sandbox.Spec {
	s := world.Small()
	s.Labels = map[string]string{"meant": "yes"}
	return s
}

func wrongCreateFields(t *testing.T, w *world.World) {
	big := map[string]string{}
	for i := range 300 {
		big[fmt.Sprint("K", i)] = "v"
	}
	spec := func(f func(*covev1.SandboxSpec)) *covev1.CreateSandboxRequest {
		s := &covev1.SandboxSpec{Resources: &covev1.Resources{}}
		f(s)
		return &covev1.CreateSandboxRequest{Spec: s}
	}
	for _, c := range []struct {
		field string
		req   *covev1.CreateSandboxRequest
	}{
		{"spec.image", spec(func(s *covev1.SandboxSpec) { s.Image = "a b" })},
		{"spec.image", spec(func(s *covev1.SandboxSpec) { s.Image = strings.Repeat("x", 600) })},
		{"spec.image", spec(func(s *covev1.SandboxSpec) { s.Image = "--rm" })},
		{"spec.resources.cpu", spec(func(s *covev1.SandboxSpec) { s.Resources.Cpu = -1 })},
		{"spec.resources.cpu", spec(func(s *covev1.SandboxSpec) { s.Resources.Cpu = math.NaN() })},
		{"spec.resources.cpu", spec(func(s *covev1.SandboxSpec) { s.Resources.Cpu = math.Inf(1) })},
		{"spec.resources.cpu", spec(func(s *covev1.SandboxSpec) { s.Resources.Cpu = 1e-6 })},
		{"spec.resources.memory", spec(func(s *covev1.SandboxSpec) { s.Resources.Memory = -1 })},
		{"spec.resources.memory", spec(func(s *covev1.SandboxSpec) { s.Resources.Memory = 4096 })},
		{"spec.resources.memory_limit", spec(func(s *covev1.SandboxSpec) { s.Resources.Memory = 256 << 20; s.Resources.MemoryLimit = 128 << 20 })},
		{"spec.resources.memory_limit", spec(func(s *covev1.SandboxSpec) { s.Resources.MemoryLimit = -5 })},
		{"spec.resources.disk", spec(func(s *covev1.SandboxSpec) { s.Resources.Disk = 1 })},
		{"spec.resources.disk", spec(func(s *covev1.SandboxSpec) { s.Resources.Disk = math.MinInt64 })},
		{"spec.resources.pids", spec(func(s *covev1.SandboxSpec) { s.Resources.Pids = 1 })},
		{"spec.resources.pids", spec(func(s *covev1.SandboxSpec) { s.Resources.Pids = 1 << 40 })},
		{"spec.env", spec(func(s *covev1.SandboxSpec) { s.Env = map[string]string{"A=B": "x"} })},
		{"spec.env", spec(func(s *covev1.SandboxSpec) { s.Env = map[string]string{"A": "nul\x00"} })},
		{"spec.env", spec(func(s *covev1.SandboxSpec) { s.Env = big })},
		{"spec.env", spec(func(s *covev1.SandboxSpec) { s.Env = map[string]string{"A": strings.Repeat("x", 1<<20)} })},
		{"spec.labels", spec(func(s *covev1.SandboxSpec) { s.Labels = map[string]string{"": "x"} })},
		{"spec.labels", spec(func(s *covev1.SandboxSpec) { s.Labels = map[string]string{"a": strings.Repeat("x", 1000)} })},
		{"spec.labels", spec(func(s *covev1.SandboxSpec) { s.Labels = map[string]string{"a": "\x1b[31m"} })},
		{"spec.labels", spec(func(s *covev1.SandboxSpec) { s.Labels = big })},
		{"spec.timeout", spec(func(s *covev1.SandboxSpec) { s.Timeout = durationpb.New(time.Millisecond) })},
		{"spec.timeout", spec(func(s *covev1.SandboxSpec) { s.Timeout = durationpb.New(-time.Hour) })},
		{"spec.timeout", spec(func(s *covev1.SandboxSpec) { s.Timeout = &durationpb.Duration{Seconds: 1, Nanos: -1} })},
		{"spec.idle_timeout", spec(func(s *covev1.SandboxSpec) { s.IdleTimeout = &durationpb.Duration{Seconds: math.MaxInt64} })},
		{"idempotency_key", &covev1.CreateSandboxRequest{IdempotencyKey: "a\nb"}},
		{"idempotency_key", &covev1.CreateSandboxRequest{IdempotencyKey: strings.Repeat("k", 300)}},
	} {
		_, err := w.Client().Sandboxes.Create(t.Context(), connect.NewRequest(c.req))
		wantField(t, err, c.field)
	}
}

func wrongOtherFields(t *testing.T, w *world.World) {
	b := w.Create(t, meant())
	ctx, c := t.Context(), w.Client()
	start := func(p *covev1.ProcessSpec) error {
		s, err := c.Processes.Start(ctx, connect.NewRequest(&covev1.StartProcessRequest{SandboxId: b.ID, Process: p}))
		if err == nil {
			s.Receive()
			err = s.Err()
			s.Close()
		}
		return err
	}
	call := func(_ any, err error) error { return err }
	if err := start(&covev1.ProcessSpec{ExecId: "there", Command: "sleep 1000"}); err != nil {
		t.Fatal(err)
	}
	for _, x := range []struct {
		field string
		err   error
	}{
		{"process.args", start(&covev1.ProcessSpec{})},
		{"process", start(nil)},
		{"process.args", start(&covev1.ProcessSpec{Args: []string{"a"}, Command: "b"})},
		{"process.args", start(&covev1.ProcessSpec{Args: []string{""}})},
		{"process.args", start(&covev1.ProcessSpec{Args: []string{"a\x00b"}})},
		{"process.command", start(&covev1.ProcessSpec{Command: "a\x00b"})},
		{"process.command", start(&covev1.ProcessSpec{Command: strings.Repeat("x", 2<<20)})},
		{"process.exec_id", start(&covev1.ProcessSpec{ExecId: "a b", Command: "x"})},
		{"process.exec_id", start(&covev1.ProcessSpec{ExecId: strings.Repeat("x", 200), Command: "x"})},
		{"process.cwd", start(&covev1.ProcessSpec{Command: "x", Cwd: "relative"})},
		{"process.env", start(&covev1.ProcessSpec{Command: "x", Env: map[string]string{"": "x"}})},
		{"process.user", start(&covev1.ProcessSpec{Command: "x", User: "no-such-user-here"})},
		{"process.user", start(&covev1.ProcessSpec{Command: "x", User: "a\x00"})},
		{"process.pty.rows", start(&covev1.ProcessSpec{Command: "x", Pty: &covev1.TermSize{Cols: 80}})},
		{"process.pty.cols", start(&covev1.ProcessSpec{Command: "x", Pty: &covev1.TermSize{Rows: 24, Cols: 1 << 20}})},
		{"process.timeout", start(&covev1.ProcessSpec{Command: "x", Timeout: durationpb.New(-1)})},
		{"path", call(c.Files.Read(ctx, connect.NewRequest(&covev1.ReadFileRequest{SandboxId: b.ID, Path: ""})))},
		{"path", call(c.Files.Read(ctx, connect.NewRequest(&covev1.ReadFileRequest{SandboxId: b.ID})))},
		{"path", call(c.Files.Stat(ctx, connect.NewRequest(&covev1.StatFileRequest{SandboxId: b.ID, Path: "/a\x00"})))},
		{"path", call(c.Files.List(ctx, connect.NewRequest(&covev1.ListFilesRequest{SandboxId: b.ID, Path: "/" + strings.Repeat("x", 5000)})))},
		{"offset", call(c.Files.Read(ctx, connect.NewRequest(&covev1.ReadFileRequest{SandboxId: b.ID, Path: "/etc/passwd", Offset: -1})))},
		{"length", call(c.Files.Read(ctx, connect.NewRequest(&covev1.ReadFileRequest{SandboxId: b.ID, Path: "/etc/passwd", Length: -1})))},
		{"depth", call(c.Files.List(ctx, connect.NewRequest(&covev1.ListFilesRequest{SandboxId: b.ID, Path: "/", Depth: -1})))},
		{"limit", call(c.Files.List(ctx, connect.NewRequest(&covev1.ListFilesRequest{SandboxId: b.ID, Path: "/", Limit: -1})))},
		{"mode", call(c.Files.Chmod(ctx, connect.NewRequest(&covev1.ChmodRequest{SandboxId: b.ID, Path: "/tmp", Mode: 1 << 20})))},
		{"from", call(c.Files.Move(ctx, connect.NewRequest(&covev1.MoveFileRequest{SandboxId: b.ID, From: "", To: "/y"})))},
		{"to", call(c.Files.Move(ctx, connect.NewRequest(&covev1.MoveFileRequest{SandboxId: b.ID, From: "/x", To: ""})))},
		{"labels", call(c.Sandboxes.KillByLabel(ctx, connect.NewRequest(&covev1.KillByLabelRequest{})))},
		{"page_size", call(c.Sandboxes.List(ctx, connect.NewRequest(&covev1.ListSandboxesRequest{PageSize: -1})))},
		{"page_token", call(c.Sandboxes.List(ctx, connect.NewRequest(&covev1.ListSandboxesRequest{PageToken: "garbage"})))},
		{"states", call(c.Sandboxes.List(ctx, connect.NewRequest(&covev1.ListSandboxesRequest{States: []covev1.SandboxState{99}})))},
		{"timeout", call(c.Sandboxes.SetTimeout(ctx, connect.NewRequest(&covev1.SetTimeoutRequest{Id: b.ID, Timeout: durationpb.New(-time.Second)})))},
		{"name", call(c.Keys.Create(ctx, connect.NewRequest(&covev1.CreateKeyRequest{Name: "\x00"})))},
		{"signal", call(c.Processes.Signal(ctx, connect.NewRequest(&covev1.SignalRequest{SandboxId: b.ID, ExecId: "there", Signal: "SIGNONE"})))},
	} {
		wantField(t, x.err, x.field)
	}
	b.Must(t, "echo alive")
}

// post is a call as curl makes it.
func post(t *testing.T, w *world.World, key, method, body string) (int, http.Header, map[string]any) {
	t.Helper()
	req, err := http.NewRequestWithContext(t.Context(), http.MethodPost, w.URL()+"/cove.v1."+method, strings.NewReader(body))
	if err != nil {
		t.Fatal(err)
	}
	req.Header.Set("Content-Type", "application/json")
	if key != "" {
		req.Header.Set("Authorization", "Bearer "+key)
	}
	resp, err := http.DefaultClient.Do(req)
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	b, _ := io.ReadAll(resp.Body)
	var m map[string]any
	_ = json.Unmarshal(b, &m) // what is no JSON is checked by its status
	return resp.StatusCode, resp.Header, m
}

func wrongJSON(t *testing.T, w *world.World) {
	for _, body := range []string{"", "{", "null", "[]", `"x"`, `{"spec": 5}`, `{"spec": {"resources": {"memory": "much"}}}`, `{"spec": {"nosuch": 1}}`,
		strings.Repeat("[", 100000), `{"spec":{"labels":{"a":1}}}`, "\xff\xfe", `{"idempotency_key":"\ud800"}`} {
		status, _, m := post(t, w, w.Key(), "Sandboxes/Create", body)
		if body == "" || body == "null" || body == "[]" {
			if status == 200 { // an empty message is a create with defaults; do not keep it
				id, _ := m["sandbox"].(map[string]any)["id"].(string)
				_, err := w.Client().Sandboxes.Kill(t.Context(), connect.NewRequest(&covev1.KillRequest{Id: id}))
				if err != nil {
					t.Error(err)
				}
				t.Errorf("%q made a sandbox", body)
				continue
			}
		}
		if status != 400 || m["code"] != "invalid_argument" {
			t.Errorf("%.40q answered %d %v, want 400 invalid_argument", body, status, m)
		}
	}
	for _, path := range []string{"/", "/cove.v1.Nothing/At", "/cove.v1.Sandboxes/Nothing", "/v1/sandboxes", "/v1/sandboxes//files", "/v1/sandboxes/%00/files?path=/x"} {
		req, _ := http.NewRequestWithContext(t.Context(), http.MethodPost, w.URL()+path, strings.NewReader("{}"))
		req.Header.Set("Authorization", "Bearer "+w.Key())
		resp, err := http.DefaultClient.Do(req)
		if err != nil {
			t.Fatal(err)
		}
		resp.Body.Close()
		// 501 is Connect's for a method that is not there.
		if resp.StatusCode < 400 || resp.StatusCode >= 500 && resp.StatusCode != http.StatusNotImplemented {
			t.Errorf("%s answered %s", path, resp.Status)
		}
	}
}

func unknownImage(t *testing.T, w *world.World) {
	spec := world.Small()
	spec.Image = "bse"
	_, err := w.TryCreate(t.Context(), spec, "key-of-a-failure")
	wantClass(t, "an unknown image", err, sandbox.ImageNotFound)
	var e *sandbox.Error
	if errors.As(err, &e) && !strings.Contains(e.Hint+e.Msg, "base") {
		t.Errorf("no suggestion for 'bse': %q, hint %q", e.Msg, e.Hint)
	}
	// The key of a failed create is free for another try.
	spec = meant()
	b, err := w.TryCreate(t.Context(), spec, "key-of-a-failure")
	if err != nil {
		t.Fatalf("the key of a failed create is taken: %v", err)
	}
	if _, err := b.TryKill(t.Context()); err != nil {
		t.Error(err)
	}
	spec = world.Small()
	spec.Image = "sha256:" + strings.Repeat("0", 64)
	_, err = w.TryCreate(t.Context(), spec, "")
	wantClass(t, "an unknown digest", err, sandbox.ImageNotFound)
}

func wrongKey(t *testing.T, w *world.World) {
	for _, key := range []string{"", "wrong", "cove_" + strings.Repeat("A", 43), w.Key() + "x", w.Key()[:len(w.Key())-1], strings.ToUpper(w.Key()), "' OR 1=1 --", strings.Repeat("k", 6000)} {
		c := w.ClientWith(t, key)
		_, err := c.Sandboxes.Create(t.Context(), connect.NewRequest(&covev1.CreateSandboxRequest{}))
		wantClass(t, fmt.Sprintf("key %.20q", key), err, sandbox.Unauthenticated)
		_, err = c.System.Info(t.Context(), connect.NewRequest(&covev1.InfoRequest{}))
		wantClass(t, fmt.Sprintf("key %.20q", key), err, sandbox.Unauthenticated)
		_, _, err = c.Download(t.Context(), "anything", "/etc/passwd", 0, 0)
		wantClass(t, fmt.Sprintf("key %.20q, download", key), err, sandbox.Unauthenticated)
		s, err := c.Processes.Start(t.Context(), connect.NewRequest(&covev1.StartProcessRequest{SandboxId: "x", Process: &covev1.ProcessSpec{Command: "true"}}))
		if err == nil {
			s.Receive()
			err = s.Err()
			s.Close()
		}
		wantClass(t, fmt.Sprintf("key %.20q, stream", key), err, sandbox.Unauthenticated)
	}
	if status, _, m := post(t, w, "wrong", "Sandboxes/List", "{}"); status != 401 || m["code"] != "unauthenticated" {
		t.Errorf("plain HTTP with a wrong key: %d %v", status, m)
	}
	// A revoked key is a wrong key.
	r, err := w.Client().Keys.Create(t.Context(), connect.NewRequest(&covev1.CreateKeyRequest{Name: "short-lived"}))
	if err != nil {
		t.Fatal(err)
	}
	other := w.ClientWith(t, r.Msg.Secret)
	if _, err := other.System.Info(t.Context(), connect.NewRequest(&covev1.InfoRequest{})); err != nil {
		t.Errorf("a new key: %v", err)
	}
	if _, err := w.Client().Keys.Revoke(t.Context(), connect.NewRequest(&covev1.RevokeKeyRequest{Id: r.Msg.Key.Id})); err != nil {
		t.Fatal(err)
	}
	_, err = other.System.Info(t.Context(), connect.NewRequest(&covev1.InfoRequest{}))
	wantClass(t, "a revoked key", err, sandbox.Unauthenticated)
}

// What this machine could never hold is refused with its own code and the
// field, not with a hint to come back later.
func tooLarge(t *testing.T, w *world.World) {
	for field, f := range map[string]func(*sandbox.Resources){
		"spec.resources.memory":       func(r *sandbox.Resources) { r.Memory = 100 * sandbox.TiB },
		"spec.resources.memory_limit": func(r *sandbox.Resources) { r.MemoryLimit = 100 * sandbox.TiB },
		"spec.resources.disk":         func(r *sandbox.Resources) { r.Disk = 1000 * sandbox.TiB },
		"spec.resources.cpu":          func(r *sandbox.Resources) { r.MilliCPU = 250_000 },
	} {
		spec := world.Small()
		f(&spec.Resources)
		_, err := w.TryCreate(t.Context(), spec, "")
		var e *sandbox.Error
		if !errors.As(err, &e) || e.Class != sandbox.TooLarge || e.Field != field || e.RetryAfter != 0 {
			t.Errorf("%s above the machine's: %v (%s, field %q, retry %s), want %s", field, err, sandbox.ClassOf(err), e.Field, e.RetryAfter, sandbox.TooLarge)
		}
	}
}

func noCapacity(t *testing.T, w *world.World) {
	info, err := w.Info(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	// Memory with a limit is a reservation: two of 60 % do not fit.
	spec := meant()
	spec.Resources.Memory = info.Total.Memory / 10 * 6
	spec.Resources.MemoryLimit = spec.Resources.Memory
	b, err := w.TryCreate(t.Context(), spec, "")
	if err != nil {
		t.Fatal(err)
	}
	spec.Labels = nil
	_, err = w.TryCreate(t.Context(), spec, "no-room")
	var e *sandbox.Error
	if !errors.As(err, &e) || e.Class != sandbox.NoCapacity || e.RetryAfter <= 0 || e.Hint == "" {
		t.Errorf("without room: %v, want %s with a time to retry and a hint", err, sandbox.NoCapacity)
	}
	status, h, m := post(t, w, w.Key(), "Sandboxes/Create", fmt.Sprintf(`{"spec":{"resources":{"memory":"%[1]d","memoryLimit":"%[1]d"}}}`, spec.Resources.Memory))
	after, _ := strconv.Atoi(h.Get("Retry-After"))
	if status != 429 || m["code"] != "resource_exhausted" || after < 1 {
		t.Errorf("without room, plain HTTP: %d, Retry-After %q, %v", status, h.Get("Retry-After"), m)
	}
	if _, err := b.TryKill(t.Context()); err != nil {
		t.Fatal(err)
	}
	// The room is free the moment Kill has returned, and the key with it.
	spec.Labels = map[string]string{"meant": "yes"}
	b, err = w.TryCreate(t.Context(), spec, "no-room")
	if err != nil {
		t.Fatalf("after making room: %v", err)
	}
	if _, err := b.TryKill(t.Context()); err != nil {
		t.Error(err)
	}
}

func notThere(t *testing.T, w *world.World) {
	b := w.Create(t, meant())
	ctx, c := t.Context(), w.Client()
	for what, err := range map[string]error{
		"get": func() error {
			_, err := c.Sandboxes.Get(ctx, connect.NewRequest(&covev1.GetSandboxRequest{Id: "nosuch"}))
			return err
		}(),
		"kill": func() error {
			_, err := c.Sandboxes.Kill(ctx, connect.NewRequest(&covev1.KillRequest{Id: "nosuch"}))
			return err
		}(),
		"reset": func() error {
			_, err := c.Sandboxes.Reset(ctx, connect.NewRequest(&covev1.ResetRequest{Id: "nosuch"}))
			return err
		}(),
		"exec": func() error {
			_, err := (&world.Box{W: w, ID: "nosuch"}).TryExec(ctx, sandbox.ProcessSpec{Command: "true"})
			return err
		}(),
		"process": b.Attach(ctx, "nosuch", 0, func(sandbox.ProcessEvent) error { return nil }),
		"program": func() error {
			_, err := b.TryExec(ctx, sandbox.ProcessSpec{Args: []string{"no-such-program"}})
			return err
		}(),
		"cwd": func() error {
			_, err := b.TryExec(ctx, sandbox.ProcessSpec{Command: "true", Cwd: "/no/such"})
			return err
		}(),
		"file":     func() error { _, _, err := b.Read(ctx, "/no/such"); return err }(),
		"download": func() error { _, _, err := c.Download(ctx, b.ID, "/no/such", 0, 0); return err }(),
		"key": func() error {
			_, err := c.Keys.Revoke(ctx, connect.NewRequest(&covev1.RevokeKeyRequest{Id: "nosuch"}))
			return err
		}(),
	} {
		// A program or directory that is not there is the caller's mistake.
		if c := sandbox.ClassOf(err); c != sandbox.NotFound && (c != sandbox.Invalid || what != "program" && what != "cwd") {
			t.Errorf("%s: got %v (%s), want %s", what, err, c, sandbox.NotFound)
		}
	}
	// An ended sandbox is not unknown: it says why.
	if _, err := b.TryKill(ctx); err != nil {
		t.Fatal(err)
	}
	if sb := b.Get(t); sb.End == nil || sb.End.Cause != sandbox.KilledByUser {
		t.Errorf("ended by %v", sb.End)
	}
	if sb, err := b.TryKill(ctx); err != nil || sb.End == nil || sb.End.Cause != sandbox.KilledByUser {
		t.Errorf("killing twice: %v, %v", sb.End, err)
	}
	_, err := b.TryExec(ctx, sandbox.ProcessSpec{Command: "true"})
	wantClass(t, "exec after the end", err, sandbox.Ended)
	_, err = b.TryReset(ctx)
	wantClass(t, "reset after the end", err, sandbox.Ended)
}

// A root file system whose tar tries to get out is refused or confined; the
// host never sees a file of it.
func escapingImages(t *testing.T, w *world.World) {
	marker := fmt.Sprintf("cove-e2e-evil-%d", os.Getpid())
	for name, entries := range map[string][]tar.Header{
		"dots":             {{Name: "../../../../../../tmp/" + marker}},
		"absolute":         {{Name: "/tmp/" + marker}},
		"symlinked parent": {{Name: "out", Typeflag: tar.TypeSymlink, Linkname: "/tmp"}, {Name: "out/" + marker}},
		"relative link":    {{Name: "out", Typeflag: tar.TypeSymlink, Linkname: "../../../../../../tmp"}, {Name: "out/" + marker}},
		"hard link out":    {{Name: marker, Typeflag: tar.TypeLink, Linkname: "../../../../../../etc/passwd"}, {Name: marker}},
		"device":           {{Name: marker, Typeflag: tar.TypeBlock, Devmajor: 254}},
	} {
		var buf bytes.Buffer
		tw := tar.NewWriter(&buf)
		for _, h := range entries {
			if h.Typeflag == 0 {
				h.Typeflag, h.Size = tar.TypeReg, 4
			}
			h.Mode = 0o644
			if err := tw.WriteHeader(&h); err != nil {
				t.Fatal(err)
			}
			if h.Typeflag == tar.TypeReg {
				fmt.Fprint(tw, "evil")
			}
		}
		tw.Close()
		image := "evil-" + strings.ReplaceAll(name, " ", "-")
		_, err := w.Client().ImportImage(t.Context(), image, bytes.NewReader(buf.Bytes()), int64(buf.Len()))
		if err != nil {
			typed(t, name, err)
		} else if _, err := w.Client().Images.Remove(t.Context(), connect.NewRequest(&covev1.RemoveImageRequest{Name: image})); err != nil {
			t.Errorf("%s: removing it: %v", name, err)
		}
		if _, err := os.Lstat("/tmp/" + marker); err == nil {
			os.Remove("/tmp/" + marker)
			t.Errorf("%s: wrote to the host", name)
		}
	}
	for what, body := range map[string]string{"empty": "", "garbage": strings.Repeat("garbage", 10000)} {
		_, err := w.Client().ImportImage(t.Context(), "evil", strings.NewReader(body), int64(len(body)))
		if err == nil {
			t.Errorf("%s was taken for an image", what)
		} else {
			typed(t, what, err)
		}
	}
}
