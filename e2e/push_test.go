package e2e

import (
	"context"
	"fmt"
	"io"
	"log"
	"net/http"
	"net/http/httptest"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"connectrpc.com/connect"
	ociregistry "github.com/google/go-containerregistry/pkg/registry"
	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/google/go-containerregistry/pkg/v1/layout"

	covev1 "github.com/cove-sandbox/cove/api/cove/v1"
	"github.com/cove-sandbox/cove/e2e/world"
)

// privateRegistry is one that asks who is there and counts the blobs it is sent.
type privateRegistry struct {
	host  string
	blobs atomic.Int32
	stall atomic.Bool // of uploads
	begun chan struct{}
	cut   chan struct{}
}

func newPrivateRegistry(t *testing.T) *privateRegistry {
	r := &privateRegistry{begun: make(chan struct{}, 16), cut: make(chan struct{}, 16)}
	inner := ociregistry.New(ociregistry.Logger(log.New(io.Discard, "", 0)))
	s := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, req *http.Request) {
		if u, p, ok := req.BasicAuth(); !ok || u != "me" || p != "pass-word" {
			w.Header().Set("WWW-Authenticate", `Basic realm="registry"`)
			http.Error(w, `{"errors":[{"code":"UNAUTHORIZED"}]}`, http.StatusUnauthorized)
			return
		}
		if req.Method == http.MethodPatch || req.Method == http.MethodPut && strings.Contains(req.URL.Path, "/blobs/") {
			if r.stall.Load() {
				r.begun <- struct{}{}
				_, _ = io.Copy(io.Discard, req.Body) // so that the end of the client is seen
				<-req.Context().Done()
				r.cut <- struct{}{}
				return
			}
			if req.Method == http.MethodPut {
				r.blobs.Add(1)
			}
		}
		inner.ServeHTTP(w, req)
	}))
	t.Cleanup(s.Close)
	r.host = strings.TrimPrefix(s.URL, "http://")
	return r
}

// TestImagePush sends an image to a registry, and has skopeo fetch it: what it gets
// is what a sandbox has.
func TestImagePush(t *testing.T) {
	reg := newPrivateRegistry(t)
	b := builds{world.New(t, world.Options{Flags: []string{"--registry-allow", "127.0.0.0/8"}})}
	dir := b.files(t, map[string]string{"in/a": "a", "Dockerfile": `FROM base
USER root
RUN rm -rf /usr/share/doc && echo changed > /etc/issue && mkdir -m 1777 /srv/t && ln -s t /srv/l && install -m 4711 -o 7 -g 8 /etc/issue /srv/s && ln /srv/s /srv/hard
COPY --chown=12:34 --chmod=640 in /srv/in/
ENV A="b c"
LABEL l=v
STOPSIGNAL SIGINT
ENTRYPOINT ["/bin/sh"]
`})
	b.cove(t, "image", "build", "-t", "app", dir).want(t, 0)
	ref := reg.host + "/org/app:v1"

	if r := b.cove(t, "image", "push", "app", ref).want(t, 1); !strings.Contains(r.Stderr, "cove registry login "+reg.host) {
		t.Error("to nobody:", r.Stderr)
	}
	if r := ran(b.CLIWith(t, strings.NewReader("wrong"), "image", "push", "app", ref, "--username", "me", "--password-stdin")).want(t, 1); strings.Contains(r.Stderr, "wrong") {
		t.Error("with a wrong password:", r.Stderr)
	}
	if n := reg.blobs.Load(); n != 0 {
		t.Error(n, "blobs were taken of nobody")
	}
	r := ran(b.CLIWith(t, strings.NewReader("pass-word\n"), "image", "push", "app", ref, "--username", "me", "--password-stdin", "--json")).want(t, 0)
	if !strings.Contains(r.Stdout, `"reference": "`+reg.host+"/org/app@sha256:") || strings.Contains(r.Stderr+r.Stdout+b.Logs(), "pass-word") {
		t.Error(r.Stdout, r.Stderr)
	}
	if n := reg.blobs.Load(); n != 3 { // the base, what is over it, and the config
		t.Errorf("%d blobs were sent, not 3", n)
	}

	// As the tenant, what is there is not sent again.
	ran(b.CLIWith(t, strings.NewReader("pass-word"), "registry", "login", reg.host, "--username", "me", "--password-stdin")).want(t, 0)
	write(t, dir, "in/a", "another")
	b.cove(t, "image", "build", "-t", "app2", dir).want(t, 0)
	if last := pushSays(t, b.World, "app2", reg.host+"/org/app:v2", func(ev *covev1.PushImageEvent) bool { return ev.Step == "done" }); !strings.HasPrefix(last.Reference, reg.host+"/org/app@sha256:") {
		t.Errorf("at last %v", last)
	}
	if n := reg.blobs.Load(); n != 5 {
		t.Errorf("%d blobs were sent with another top, not 5", n)
	}
	again := b.cove(t, "image", "push", "app", ref).want(t, 0)
	if n := reg.blobs.Load(); n != 5 || !strings.Contains(r.Stdout, strings.TrimSpace(again.Stdout)) {
		t.Errorf("%d blobs were sent with the same again, as %s", n, again.Stdout)
	}

	out := filepath.Join(t.TempDir(), "oci")
	if said, err := exec.CommandContext(t.Context(), "skopeo", "copy", "--quiet", "--src-tls-verify=false", "--src-creds", "me:pass-word", "docker://"+ref, "oci:"+out+":v1").CombinedOutput(); err != nil {
		t.Fatalf("skopeo: %v\n%s", err, said)
	}
	m, all := (&pulled{layers: map[v1.Hash][]tarEntry{}}).of(t, layoutImage(t, out), nil)
	for k, want := range map[string]string{"Entrypoint": "[/bin/sh]", "User": "root", "StopSignal": "SIGINT", "Labels": "map[l:v]"} {
		if got := fmt.Sprint(m.Config[k]); got != want {
			t.Errorf("%s is %s, not %s", k, got, want)
		}
	}
	if env := fmt.Sprint(m.Config["Env"]); !strings.Contains(env, "A=b c") {
		t.Error(env)
	}
	inside := b.cove(t, "run", "--image", "app", "--", "find", "/", "-xdev", "-mindepth", "1", "-printf", "%y %m %U:%G %s %p\\n").want(t, 0)
	var lines []string
	seen := map[string]bool{}
	for line := range strings.Lines(inside.Stdout) {
		f := strings.SplitN(strings.TrimSpace(line), " ", 5)
		if ownOfSandbox(f[4]) {
			continue
		}
		seen[f[4]] = true
		if got := asFind(all[f[4]], f[3]); got != f[0]+" "+f[1]+" "+f[2]+" "+f[3] {
			lines = append(lines, fmt.Sprintf("%s is %q, in a sandbox %q", f[4], got, line))
		}
	}
	for p := range all {
		if !seen[p] {
			lines = append(lines, p+" is in no sandbox")
		}
	}
	if slices.Sort(lines); len(lines) > 0 || len(seen) < 1000 {
		t.Errorf("%d of %d files differ:\n%s", len(lines), len(seen), strings.Join(lines[:min(20, len(lines))], "\n"))
	}

	t.Run("Ctrl-C", func(t *testing.T) {
		reg.stall.Store(true)
		b.cove(t, "image", "build", "-t", "app3", b.dockerfile(t, "FROM app", "USER root", "RUN echo 3 > /3")).want(t, 0)
		cmd := b.Command(t, "image", "push", "app3", reg.host+"/org/app:v3")
		if err := cmd.Start(); err != nil {
			t.Fatal(err)
		}
		wait(t, reg.begun, "the upload begins")
		if err := cmd.Process.Signal(syscall.SIGINT); err != nil {
			t.Fatal(err)
		}
		if err := cmd.Wait(); cmd.ProcessState.ExitCode() != 130 {
			t.Error(err)
		}
		wait(t, reg.cut, "the upload ends")
		// While it is under way it is told how much there is.
		pushSays(t, b.World, "app3", reg.host+"/org/app:v3", func(ev *covev1.PushImageEvent) bool { return ev.Step == "upload" && ev.Total > 0 })
		wait(t, reg.cut, "the upload ends")
		world.Eventually(t, 20*time.Second, "nothing half-made is left", func() bool {
			left, err := filepath.Glob(filepath.Join(b.Dir, "images", "tmp", "*"))
			return err == nil && len(left) == 0
		})
	})
}

// pushSays pushes an image and demands that what is told of it on the way is true: first it
// is packed, then sent, never less than before and never more than all. until ends it, with
// what was told last; what is over sooner than somebody looks is not told.
func pushSays(t *testing.T, w *world.World, name, ref string, until func(*covev1.PushImageEvent) bool) (last *covev1.PushImageEvent) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	s, err := w.Client().Images.Push(ctx, connect.NewRequest(&covev1.PushImageRequest{Name: name, Reference: ref}))
	if err != nil {
		t.Fatal(err)
	}
	defer s.Close()
	order := []string{"", "pack", "upload", "done"}
	for s.Receive() {
		ev := s.Msg()
		if at, was := slices.Index(order, ev.Step), slices.Index(order, last.GetStep()); at < was || ev.Total > 0 && ev.Done > ev.Total || at == was && ev.Done < last.Done {
			t.Errorf("%v follows %v", ev, last)
		}
		if last = ev; until(ev) {
			cancel()
			return last
		}
	}
	t.Errorf("at last %v: %v", last, s.Err())
	return last
}

func wait(t *testing.T, c <-chan struct{}, what string) {
	t.Helper()
	select {
	case <-c:
	case <-time.After(time.Minute):
		t.Fatal("not within a minute: ", what)
	}
}

func layoutImage(t *testing.T, dir string) v1.Image {
	t.Helper()
	index, err := layout.ImageIndexFromPath(dir)
	if err != nil {
		t.Fatal(err)
	}
	m, err := index.IndexManifest()
	if err != nil || len(m.Manifests) != 1 {
		t.Fatal(m, err)
	}
	img, err := index.Image(m.Manifests[0].Digest)
	if err != nil {
		t.Fatal(err)
	}
	return img
}

// asFind is an entry of a layer as find prints it: size is what find says where a tar
// says nothing of it.
func asFind(what, size string) string {
	f := strings.Fields(what)
	switch {
	case len(f) == 0:
		return ""
	case f[0] == "symlink":
		return fmt.Sprintf("l 777 0:0 %d", len(strings.TrimPrefix(what, "symlink ")))
	case f[0] == "5":
		return "d " + f[1] + " " + f[2] + " " + size
	case f[0] == "0":
		return "f " + f[1] + " " + f[2] + " " + f[3]
	}
	return what
}
