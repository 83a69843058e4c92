package image_test

import (
	"archive/tar"
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/base64"
	"encoding/hex"
	"fmt"
	"io"
	"log"
	"math/rand/v2"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"reflect"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/cove-sandbox/cove/image"
	"github.com/cove-sandbox/cove/sandbox"
	"github.com/google/go-containerregistry/pkg/authn"
	"github.com/google/go-containerregistry/pkg/name"
	"github.com/google/go-containerregistry/pkg/registry"
	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/google/go-containerregistry/pkg/v1/empty"
	"github.com/google/go-containerregistry/pkg/v1/mutate"
	"github.com/google/go-containerregistry/pkg/v1/remote"
	"github.com/google/go-containerregistry/pkg/v1/tarball"
	"github.com/google/go-containerregistry/pkg/v1/types"
)

// testRegistry is a real registry on loopback; wrap stands in front of it.
type testRegistry struct {
	host string
	wrap atomic.Pointer[func(next http.Handler) http.Handler]
}

var emptyConfig v1.Config

func startRegistry(t *testing.T) *testRegistry {
	t.Helper()
	r := &testRegistry{}
	inner := registry.New(registry.Logger(log.New(io.Discard, "", 0)))
	srv := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, req *http.Request) {
		h := http.Handler(inner)
		if wrap := r.wrap.Load(); wrap != nil {
			h = (*wrap)(h)
		}
		h.ServeHTTP(w, req)
	}))
	t.Cleanup(srv.Close)
	r.host = strings.TrimPrefix(srv.URL, "http://")
	return r
}

func (r *testRegistry) behind(wrap func(next http.Handler) http.Handler) { r.wrap.Store(&wrap) }

// countUploads counts the blobs that are sent from now on.
func (r *testRegistry) countUploads() *atomic.Int32 {
	var n atomic.Int32
	r.behind(func(next http.Handler) http.Handler {
		return http.HandlerFunc(func(w http.ResponseWriter, req *http.Request) {
			if req.Method == http.MethodPut && strings.Contains(req.URL.Path, "/blobs/") {
				n.Add(1)
			}
			next.ServeHTTP(w, req)
		})
	})
	return &n
}

func (r *testRegistry) push(t *testing.T, repo string, img v1.Image) string {
	t.Helper()
	ref := r.host + "/" + repo
	tag, err := name.ParseReference(ref)
	if err != nil {
		t.Fatal(err)
	}
	if err := remote.Write(tag, img, remote.WithContext(t.Context())); err != nil {
		t.Fatal(err)
	}
	return ref
}

func layer(t *testing.T, data []byte, opts ...tarball.LayerOption) v1.Layer {
	t.Helper()
	l, err := tarball.LayerFromOpener(func() (io.ReadCloser, error) { return io.NopCloser(bytes.NewReader(data)), nil }, opts...)
	if err != nil {
		t.Fatal(err)
	}
	return l
}

// ociImage makes an image of layers for a platform "os/arch".
func ociImage(t *testing.T, platform string, cfg v1.Config, layers ...v1.Layer) v1.Image {
	t.Helper()
	img, err := mutate.AppendLayers(empty.Image, layers...)
	if err != nil {
		t.Fatal(err)
	}
	cf, err := img.ConfigFile()
	if err != nil {
		t.Fatal(err)
	}
	cf = cf.DeepCopy()
	cf.OS, cf.Architecture, _ = strings.Cut(platform, "/")
	cf.Config = cfg
	if img, err = mutate.ConfigFile(img, cf); err != nil {
		t.Fatal(err)
	}
	return img
}

func noise(n int) string {
	b := make([]byte, n)
	src := rand.New(rand.NewPCG(1, 2))
	for i := range b {
		b[i] = byte(src.Uint32())
	}
	return string(b)
}

func TestPull(t *testing.T) {
	r := startRegistry(t)
	cfg := v1.Config{Env: []string{"A=1", "nonsense", "B=x=y"}, WorkingDir: "/work", User: "1000:1000",
		Entrypoint: []string{"/entry"}, Cmd: []string{"arg"}}
	src := ociImage(t, "linux/amd64", cfg,
		layer(t, pack(t, reg("a", "lower"), reg("gone", "x"), reg("big", noise(3<<20)))),
		layer(t, pack(t, reg("a", "upper"), reg(".wh.gone", "")), tarball.WithCompression("zstd"), tarball.WithMediaType(types.OCILayerZStd)))
	ref := r.push(t, "team/app:v1", src)
	lib := library(t, image.Options{})
	var steps []string
	var last sandbox.Progress
	img, err := lib.Pull(t.Context(), ref, "linux/amd64", func(p sandbox.Progress) {
		if p.Step != last.Step {
			steps = append(steps, p.Step)
		}
		if p.Step == "download" && p.Done > p.Total {
			t.Errorf("progress beyond the total: %+v", p)
		}
		last = p
	})
	if err != nil {
		t.Fatal(err)
	}
	if got := strings.Join(steps, " "); got != "resolve download flatten erofs done" {
		t.Errorf("steps: %s", got)
	}
	want := sandbox.ImageConfig{Env: []string{"A=1", "B=x=y"}, WorkingDir: "/work", User: "1000:1000", Entrypoint: []string{"/entry"}, Cmd: []string{"arg"}}
	if !reflect.DeepEqual(img.Config, want) {
		t.Errorf("config: %+v", img.Config)
	}
	digest, _ := src.Digest()
	if img.Source != r.host+"/team/app@"+digest.String() || img.Platform != "linux/amd64" {
		t.Errorf("source %s, platform %s", img.Source, img.Platform)
	}
	all := files(t, lib, img.ID)
	if got := strings.Join(own(all), " "); got != "/a /big" || all["/a"].content != "upper" || all["/big"].content != noise(3<<20) {
		t.Errorf("files: %s, a = %q", got, all["/a"].content)
	}
	got, err := lib.Get(img.ID)
	if err != nil || !reflect.DeepEqual(got, img) {
		t.Errorf("sidecar: %+v, %v", got, err)
	}
	if err := lib.Verify(t.Context(), img.ID); err != nil {
		t.Error(err)
	}
	again, err := lib.Pull(t.Context(), r.host+"/team/app@"+digest.String(), "linux/amd64", nil)
	if err != nil || again.ID != img.ID {
		t.Errorf("pull by digest: %s, %v", again.ID, err)
	}
}

// The same files with another environment are another image: otherwise one's
// config would answer for the other.
func TestConfigIsPartOfTheName(t *testing.T) {
	r := startRegistry(t)
	l := layer(t, pack(t, reg("a", "same")))
	one := r.push(t, "one", ociImage(t, "linux/amd64", v1.Config{Env: []string{"A=1"}}, l))
	two := r.push(t, "two", ociImage(t, "linux/amd64", v1.Config{Env: []string{"A=2"}}, l))
	lib := library(t, image.Options{})
	a, err := lib.Pull(t.Context(), one, "linux/amd64", nil)
	if err != nil {
		t.Fatal(err)
	}
	b, err := lib.Pull(t.Context(), two, "linux/amd64", nil)
	if err != nil {
		t.Fatal(err)
	}
	got, err := lib.Get(a.ID)
	if err != nil || a.ID == b.ID || got.Config.Env[0] != "A=1" {
		t.Fatalf("%s and %s: %+v, %v", a.ID, b.ID, got.Config, err)
	}
}

func TestPullPrivate(t *testing.T) {
	r := startRegistry(t)
	ref := r.push(t, "private/app", ociImage(t, "linux/amd64", v1.Config{}, layer(t, pack(t, reg("a", "x")))))
	r.behind(func(next http.Handler) http.Handler {
		return http.HandlerFunc(func(w http.ResponseWriter, req *http.Request) {
			if user, pass, _ := req.BasicAuth(); user != "trainer" || pass != "s3cret" {
				w.Header().Set("WWW-Authenticate", `Basic realm="test"`)
				w.WriteHeader(http.StatusUnauthorized)
				return
			}
			next.ServeHTTP(w, req)
		})
	})
	dockerDir := t.TempDir()
	t.Setenv("DOCKER_CONFIG", dockerDir)
	lib := library(t, image.Options{Keychain: authn.DefaultKeychain})
	_, err := lib.Pull(t.Context(), ref, "linux/amd64", nil)
	wantClass(t, err, sandbox.Unauthenticated)
	login := func(pass string) {
		auth := base64.StdEncoding.EncodeToString([]byte("trainer:" + pass))
		conf := fmt.Sprintf(`{"auths": {%q: {"auth": %q}}}`, r.host, auth)
		if err := os.WriteFile(filepath.Join(dockerDir, "config.json"), []byte(conf), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	login("wrong")
	_, err = lib.Pull(t.Context(), ref, "linux/amd64", nil)
	wantClass(t, err, sandbox.Unauthenticated)
	login("s3cret")
	// What the operator may is nobody else's: they bring their own.
	for who, want := range map[sandbox.RegistryAccess]sandbox.Class{
		{}:                                       sandbox.Unauthenticated,
		{Username: "trainer", Password: "wrong"}: sandbox.Unauthenticated,
		{Username: "trainer", Password: "s3cret"}: "",
		{Operator: true}: "",
	} {
		if _, err := lib.PullAs(t.Context(), who, ref, "linux/amd64", nil); sandbox.ClassOf(err) != want && (want != "" || err != nil) {
			t.Errorf("as %+v: %v", who, err)
		}
	}
}

// cutter serves at most n bytes of each large blob answer and then drops the
// connection.
type cutter struct {
	http.ResponseWriter
	left int
	when <-chan struct{} // it is dropped; nil: at once
}

func (c *cutter) Write(b []byte) (int, error) {
	if c.left < len(b) {
		c.ResponseWriter.Write(b[:c.left])
		c.ResponseWriter.(http.Flusher).Flush()
		if c.when != nil {
			<-c.when
		}
		panic(http.ErrAbortHandler)
	}
	c.left -= len(b)
	return c.ResponseWriter.Write(b)
}

// isBlob says whether a request is for a blob's content.
func isBlob(req *http.Request) bool {
	return req.Method == http.MethodGet && strings.Contains(req.URL.Path, "/blobs/sha256:")
}

func TestPullResumesWhereTheConnectionBroke(t *testing.T) {
	for _, ranges := range []bool{true, false} {
		t.Run(fmt.Sprintf("ranges=%v", ranges), func(t *testing.T) {
			r := startRegistry(t)
			content := noise(1 << 20)
			ref := r.push(t, "app", ociImage(t, "linux/amd64", v1.Config{}, layer(t, pack(t, reg("a", content)))))
			var mu sync.Mutex
			var offsets []string
			cuts := 3
			r.behind(func(next http.Handler) http.Handler {
				return http.HandlerFunc(func(w http.ResponseWriter, req *http.Request) {
					if !isBlob(req) {
						next.ServeHTTP(w, req)
						return
					}
					mu.Lock()
					if h := req.Header.Get("Range"); h != "" {
						offsets = append(offsets, h)
					}
					cut := cuts > 0
					mu.Unlock()
					if !ranges {
						req.Header.Del("Range")
					}
					c := &cutter{ResponseWriter: w, left: 1 << 30}
					if cut {
						c.left = 200_000
					}
					defer func() {
						if p := recover(); p != nil {
							mu.Lock()
							cuts--
							mu.Unlock()
							panic(p)
						}
					}()
					next.ServeHTTP(c, req)
				})
			})
			lib := library(t, image.Options{})
			img, err := lib.Pull(t.Context(), ref, "linux/amd64", nil)
			if err != nil {
				t.Fatal(err)
			}
			if files(t, lib, img.ID)["/a"].content != content {
				t.Error("content differs")
			}
			if len(offsets) < 3 {
				t.Errorf("ranges asked for: %v", offsets)
			}
			if ranges && (offsets[0] == offsets[1] || offsets[1] == offsets[2]) {
				t.Errorf("no progress between attempts: %v", offsets)
			}
		})
	}
}

// A pull that was cancelled leaves what it has to the next one, in another
// process for that matter.
func TestPullResumesAfterCancel(t *testing.T) {
	r := startRegistry(t)
	content := noise(8 << 20)
	ref := r.push(t, "app", ociImage(t, "linux/amd64", v1.Config{}, layer(t, pack(t, reg("a", content)))))
	// The rest does not come before the client has left.
	r.behind(func(next http.Handler) http.Handler {
		return http.HandlerFunc(func(w http.ResponseWriter, req *http.Request) {
			if isBlob(req) {
				w = &cutter{ResponseWriter: w, left: 5 << 20, when: req.Context().Done()}
			}
			next.ServeHTTP(w, req)
		})
	})
	dir := t.TempDir()
	lib := libraryAt(t, dir, image.Options{})
	ctx, cancel := context.WithCancel(t.Context())
	_, err := lib.Pull(ctx, ref, "linux/amd64", func(p sandbox.Progress) {
		if p.Step == "download" && p.Done > 2<<20 {
			cancel()
		}
	})
	wantClass(t, err, sandbox.Canceled)
	lib.Close()

	var resumed atomic.Bool
	r.behind(func(next http.Handler) http.Handler {
		return http.HandlerFunc(func(w http.ResponseWriter, req *http.Request) {
			if isBlob(req) && req.Header.Get("Range") != "" {
				resumed.Store(true)
			}
			next.ServeHTTP(w, req)
		})
	})
	lib = libraryAt(t, dir, image.Options{})
	img, err := lib.Pull(t.Context(), ref, "linux/amd64", nil)
	if err != nil {
		t.Fatal(err)
	}
	if files(t, lib, img.ID)["/a"].content != content || !resumed.Load() {
		t.Errorf("resumed: %v", resumed.Load())
	}
	if left, _ := os.ReadDir(filepath.Join(dir, "partial")); len(left) != 0 {
		t.Errorf("%d partial downloads kept after success", len(left))
	}
}

func TestPullNoticesWrongContent(t *testing.T) {
	r := startRegistry(t)
	src := ociImage(t, "linux/amd64", v1.Config{}, layer(t, pack(t, reg("a", noise(1000)))))
	ref := r.push(t, "app", src)
	flip := func(match func(*http.Request) bool) {
		r.behind(func(next http.Handler) http.Handler {
			return http.HandlerFunc(func(w http.ResponseWriter, req *http.Request) {
				rec := httptest.NewRecorder()
				next.ServeHTTP(rec, req)
				body := rec.Body.Bytes()
				if match(req) && len(body) > 0 {
					body[len(body)/2] ^= 1
				}
				for k, v := range rec.Header() {
					w.Header()[k] = v
				}
				w.WriteHeader(rec.Code)
				w.Write(body)
			})
		})
	}
	lib := library(t, image.Options{})
	flip(isBlob)
	_, err := lib.Pull(t.Context(), ref, "linux/amd64", nil)
	wantClass(t, err, sandbox.Corrupt)

	digest, _ := src.Digest()
	flip(func(req *http.Request) bool { return strings.Contains(req.URL.Path, "/manifests/") })
	_, err = lib.Pull(t.Context(), r.host+"/app@"+digest.String(), "linux/amd64", nil)
	wantClass(t, err, sandbox.Corrupt)

	flip(func(*http.Request) bool { return false })
	if _, err := lib.Pull(t.Context(), ref, "linux/amd64", nil); err != nil {
		t.Fatalf("after the registry was mended: %v", err)
	}
}

// What an earlier process left may be garbage after a power cut: then the
// blob is fetched again from the start.
func TestPullMendsABadPartial(t *testing.T) {
	r := startRegistry(t)
	l := layer(t, pack(t, reg("a", noise(100_000))))
	ref := r.push(t, "app", ociImage(t, "linux/amd64", v1.Config{}, l))
	dir := t.TempDir()
	lib := libraryAt(t, dir, image.Options{})
	d, _ := l.Digest()
	repo := sha256.Sum256([]byte(ref))
	if err := os.WriteFile(filepath.Join(dir, "partial", hex.EncodeToString(repo[:8])+"-"+d.Hex), make([]byte, 5000), 0o600); err != nil {
		t.Fatal(err)
	}
	if _, err := lib.Pull(t.Context(), ref, "linux/amd64", nil); err != nil {
		t.Fatal(err)
	}
}

// What is here of a private repository's blob is not for who names the blob in a
// repository of his own: he would have the layer without a right to it.
func TestPullGivesNobodyAnothersBlobs(t *testing.T) {
	theirs, ours := startRegistry(t), startRegistry(t)
	secret := layer(t, pack(t, reg("secret", noise(1<<20))))
	ref := theirs.push(t, "private/app", ociImage(t, "linux/amd64", v1.Config{}, secret, layer(t, pack(t, reg("b", noise(4<<20))))))
	digest, _ := secret.Digest()
	size, _ := secret.Size()
	dir := t.TempDir()
	lib := libraryAt(t, dir, image.Options{})
	ctx, cancel := context.WithCancel(t.Context())
	// The other layer does not come, and the pull is given up when the first is here.
	theirs.behind(func(next http.Handler) http.Handler {
		return http.HandlerFunc(func(w http.ResponseWriter, req *http.Request) {
			for isBlob(req) && !strings.Contains(req.URL.Path, digest.Hex) {
				found, _ := filepath.Glob(filepath.Join(dir, "partial", "*"+digest.Hex))
				if len(found) == 1 {
					if is, err := os.Stat(found[0]); err == nil && is.Size() == size {
						cancel()
						panic(http.ErrAbortHandler)
					}
				}
				time.Sleep(time.Millisecond)
			}
			next.ServeHTTP(w, req)
		})
	})
	_, err := lib.Pull(ctx, ref, "linux/amd64", nil)
	wantClass(t, err, sandbox.Canceled)

	// A registry that knows no more of the layer than its digests and size.
	var asked atomic.Pointer[string]
	forged := ours.push(t, "mine", ociImage(t, "linux/amd64", v1.Config{}, secret))
	ours.behind(func(next http.Handler) http.Handler {
		return http.HandlerFunc(func(w http.ResponseWriter, req *http.Request) {
			if isBlob(req) && strings.Contains(req.URL.Path, digest.Hex) {
				have := req.Header.Get("Range")
				asked.Store(&have)
				w.WriteHeader(http.StatusNotFound)
				return
			}
			next.ServeHTTP(w, req)
		})
	})
	img, err := lib.Pull(t.Context(), forged, "linux/amd64", nil)
	if err == nil {
		t.Fatalf("image %s has the layer of somebody else: %d files", img.ID, len(files(t, lib, img.ID)))
	}
	if have := asked.Load(); have == nil || *have != "" {
		t.Errorf("the registry was asked for %v; all of the blob would tell nothing", have)
	}
}

func TestPullChoosesThePlatform(t *testing.T) {
	r := startRegistry(t)
	var adds []mutate.IndexAddendum
	for _, p := range []string{"linux/amd64", "linux/arm64"} {
		img := ociImage(t, p, v1.Config{}, layer(t, pack(t, reg("arch", p))))
		os, arch, _ := strings.Cut(p, "/")
		adds = append(adds, mutate.IndexAddendum{Add: img, Descriptor: v1.Descriptor{Platform: &v1.Platform{OS: os, Architecture: arch}}})
	}
	ref := r.host + "/multi"
	tag, _ := name.ParseReference(ref)
	if err := remote.WriteIndex(tag, mutate.AppendManifests(empty.Index, adds...)); err != nil {
		t.Fatal(err)
	}
	lib := library(t, image.Options{})
	for _, p := range []string{"linux/amd64", "linux/arm64"} {
		img, err := lib.Pull(t.Context(), ref, p, nil)
		if err != nil {
			t.Fatal(err)
		}
		if got := files(t, lib, img.ID)["/arch"].content; got != p || img.Platform != p {
			t.Errorf("asked for %s, got %s (%s)", p, got, img.Platform)
		}
	}
	_, err := lib.Pull(t.Context(), ref, "linux/riscv64", nil)
	wantClass(t, err, sandbox.Unsupported)
	if hint := err.(*sandbox.Error).Hint; !strings.Contains(hint, "linux/amd64, linux/arm64") {
		t.Errorf("hint: %q", hint)
	}
	single := r.push(t, "single", ociImage(t, "linux/arm64", v1.Config{}, layer(t, pack(t, reg("a", "x")))))
	_, err = lib.Pull(t.Context(), single, "linux/amd64", nil)
	wantClass(t, err, sandbox.Unsupported)
	_, err = lib.Pull(t.Context(), single, "windows", nil)
	wantClass(t, err, sandbox.Invalid)
}

// What this machine's resolver and network are is no business of who pulls.
func TestPullErrorsHideTheNetwork(t *testing.T) {
	lib := library(t, image.Options{})
	for ref, says := range map[string]string{"no-such-registry.invalid/app": "leads nowhere", "127.0.0.1:1/app": "nobody answers"} {
		_, err := lib.Pull(t.Context(), ref, "linux/amd64", nil)
		wantClass(t, err, sandbox.Unavailable)
		if msg := err.Error(); !strings.Contains(msg, says) || strings.Contains(msg, "lookup") || strings.Contains(msg, "dial") || strings.Contains(msg, ":53") {
			t.Errorf("%s: %s", ref, msg)
		}
	}
}

func TestPullErrorsSayWhat(t *testing.T) {
	r := startRegistry(t)
	lib := library(t, image.Options{})
	_, err := lib.Pull(t.Context(), r.host+"/nothing:here", "", nil)
	wantClass(t, err, sandbox.ImageNotFound)
	_, err = lib.Pull(t.Context(), "UPPER CASE", "", nil)
	wantClass(t, err, sandbox.Invalid)
	if err.(*sandbox.Error).Field != "reference" {
		t.Errorf("field: %+v", err)
	}
	dead := httptest.NewServer(http.NotFoundHandler())
	dead.Close()
	_, err = lib.Pull(t.Context(), strings.TrimPrefix(dead.URL, "http://")+"/app", "", nil)
	wantClass(t, err, sandbox.Unavailable)
	if err.(*sandbox.Error).Hint == "" {
		t.Error("no way out of an unreachable registry")
	}
}

func TestPullRefusesWhatItDoesNotKnow(t *testing.T) {
	r := startRegistry(t)
	lib := library(t, image.Options{Limits: image.Limits{Download: 1 << 20}})
	big := r.push(t, "big", ociImage(t, "linux/amd64", v1.Config{}, layer(t, pack(t, reg("a", noise(2<<20))))))
	_, err := lib.Pull(t.Context(), big, "linux/amd64", nil)
	wantClass(t, err, sandbox.TooLarge)
	bad := r.push(t, "bad", ociImage(t, "linux/amd64", v1.Config{}, layer(t, []byte("this is no tar archive"))))
	_, err = lib.Pull(t.Context(), bad, "linux/amd64", nil)
	wantClass(t, err, sandbox.Invalid)
	evil := r.push(t, "evil", ociImage(t, "linux/amd64", v1.Config{}, layer(t, pack(t, tar.Header{Typeflag: tar.TypeReg, Name: "../../etc/passwd"}))))
	_, err = lib.Pull(t.Context(), evil, "linux/amd64", nil)
	wantClass(t, err, sandbox.Invalid)
}
