package image_test

import (
	"archive/tar"
	"bytes"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"net/netip"
	"reflect"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-containerregistry/pkg/name"
	"github.com/google/go-containerregistry/pkg/v1/remote"

	"github.com/cove-sandbox/cove/image"
	"github.com/cove-sandbox/cove/image/erofs"
	"github.com/cove-sandbox/cove/sandbox"
)

// shelf is content by its manifest.
type shelf map[string][]byte

func (s shelf) put(data []byte) *sandbox.Content {
	c := &sandbox.Content{Manifest: string(rune('a' + len(s)))}
	s[c.Manifest] = data
	return c
}

func (s shelf) open(c sandbox.Content) (io.ReadCloser, error) {
	return io.NopCloser(bytes.NewReader(s[c.Manifest])), nil
}

// copied is an image with a copy over it.
func copied(t *testing.T, lib *image.Library, s shelf, c sandbox.Copying) (map[string]file, error) {
	t.Helper()
	var layer bytes.Buffer
	digest, err := lib.CopyLayer(t.Context(), c, s.open, nil, &layer)
	if err != nil {
		return nil, err
	}
	var again bytes.Buffer
	if d, err := lib.CopyLayer(t.Context(), c, s.open, nil, &again); err != nil || d != digest {
		t.Error("another digest the second time:", d, digest, err)
	}
	comp := c.Onto
	comp.Layers = append(slices.Clone(comp.Layers), sandbox.Layer{Content: *s.put(layer.Bytes())})
	img, err := lib.Compose(t.Context(), comp, s.open, nil)
	if err != nil {
		t.Fatal(err)
	}
	return files(t, lib, img.ID), nil
}

// whatIs says what a file is: its content first.
func whatIs(f file) string {
	what := f.content
	switch f.mode & erofs.TypeMask {
	case erofs.TypeDir:
		what = "dir"
	case erofs.TypeSymlink:
		what = "-> " + f.content
	}
	return fmt.Sprintf("%s %o %d:%d", what, f.mode&0o7777, f.uid, f.gid)
}

func TestCopy(t *testing.T) {
	lib := library(t, image.Options{})
	passwd := reg("etc/passwd", "root:x:0:0::/:/bin/sh\napp:x:1000:1001::/home:/bin/sh\n")
	base := importTar(t, lib, pack(t, passwd, reg("etc/group", "staff:x:50:\n"), dir("srv"), reg("srv/old", "old"), sym("link", "srv"), sym("abs", "/srv/deep"), reg("file", "f"), sym("up", "../../..")))
	script := reg("run.sh", "#!/bin/sh\n")
	script.Mode = 0o755
	owned := reg("src/owned", "o")
	owned.Uid, owned.Gid = 77, 78
	archive := pack(t, reg("in/tar", "t"), sym("in/l", "tar"))
	context := pack(t, dir("src"), reg("src/a.txt", "a"), owned, dir("src/sub"), reg("src/sub/b.txt", "b"), sym("src/out", "../../../etc/passwd"), sym("src/dir", "sub"),
		script, reg("main.py", "m"), reg("x.tar.gz", string(gz(t, archive))), reg("no.gz", string(gz(t, []byte("plain")))), reg("skip.log", "l"),
		reg(".dockerignore", "*.log\nsrc/sub/**\n!src/sub/b.txt\n"), dir("empty"))
	s := shelf{}
	ctx := s.put(context)
	onto := sandbox.Composition{Base: base.ID}
	for _, c := range []struct {
		about   string
		c       sandbox.Copying
		want    map[string]string // path: content, or "dir", or "-> target"
		missing []string
	}{
		{"a file to a name", sandbox.Copying{Sources: []string{"main.py"}, Dest: "/app/x.py"}, map[string]string{"/app/x.py": "m", "/app": "dir 755 0:0"}, nil},
		{"a file into a directory that is there", sandbox.Copying{Sources: []string{"main.py"}, Dest: "/srv"}, map[string]string{"/srv/main.py": "m", "/srv/old": "old"}, nil},
		{"a file to a slash", sandbox.Copying{Sources: []string{"main.py"}, Dest: "/new/"}, map[string]string{"/new/main.py": "m"}, nil},
		{"what is in a directory", sandbox.Copying{Sources: []string{"src"}, Dest: "/dst"}, map[string]string{"/dst/a.txt": "a", "/dst/sub/b.txt": "b", "/dst/out": "-> ../../../etc/passwd"}, []string{"/dst/src"}},
		{"owners are not the context's", sandbox.Copying{Sources: []string{"src/owned"}, Dest: "/"}, map[string]string{"/owned": "o 644 0:0"}, nil},
		{"all of it", sandbox.Copying{Sources: []string{"."}, Dest: "/app/"}, map[string]string{"/app/src/a.txt": "a", "/app/run.sh": "#!/bin/sh\n 755 0:0", "/app/empty": "dir"}, nil},
		{"less what is ignored", sandbox.Copying{Sources: []string{"."}, Dest: "/app/", Ignore: true}, map[string]string{"/app/src/sub/b.txt": "b", "/app/main.py": "m"}, []string{"/app/skip.log"}},
		{"wildcards", sandbox.Copying{Sources: []string{"s*/*.txt", "m*n.py"}, Dest: "/w/"}, map[string]string{"/w/a.txt": "a", "/w/main.py": "m"}, []string{"/w/b.txt"}},
		{"a wildcard that is nothing", sandbox.Copying{Sources: []string{"*.nope", "main.py"}, Dest: "/w/"}, map[string]string{"/w/main.py": "m"}, nil},
		{"through a symlink of the image", sandbox.Copying{Sources: []string{"main.py"}, Dest: "/link/"}, map[string]string{"/srv/main.py": "m", "/link": "-> srv"}, nil},
		{"to where a symlink leads nowhere", sandbox.Copying{Sources: []string{"main.py"}, Dest: "/abs/"}, map[string]string{"/srv/deep/main.py": "m"}, nil},
		{"no symlink leads out", sandbox.Copying{Sources: []string{"main.py"}, Dest: "/up/up/x/"}, map[string]string{"/x/main.py": "m"}, nil},
		{"a source that is a symlink is followed, within", sandbox.Copying{Sources: []string{"src/dir"}, Dest: "/d/"}, map[string]string{"/d/b.txt": "b"}, nil},
		{"one that leads nowhere is copied", sandbox.Copying{Sources: []string{"src/o*"}, Dest: "/d/"}, map[string]string{"/d/out": "-> ../../../etc/passwd", "/d/owned": "o"}, nil},
		{"dots stay within", sandbox.Copying{Sources: []string{"../../main.py"}, Dest: "/../../y/"}, map[string]string{"/y/main.py": "m"}, nil},
		{"an owner by name", sandbox.Copying{Sources: []string{"src"}, Dest: "/o/", Owner: "app"}, map[string]string{"/o": "dir 755 1000:1001", "/o/a.txt": "a 644 1000:1001", "/o/sub": "dir 755 1000:1001"}, nil},
		{"an owner and group", sandbox.Copying{Sources: []string{"main.py"}, Dest: "/o/", Owner: "app:staff"}, map[string]string{"/o/main.py": "m 644 1000:50"}, nil},
		{"numbers", sandbox.Copying{Sources: []string{"main.py"}, Dest: "/o/", Owner: "5:6"}, map[string]string{"/o/main.py": "m 644 5:6"}, nil},
		{"a mode", sandbox.Copying{Sources: []string{"main.py"}, Dest: "/m", Mode: "0711"}, map[string]string{"/m": "m 711 0:0"}, nil},
		{"excluded", sandbox.Copying{Sources: []string{"."}, Dest: "/e/", Exclude: []string{"src/*.txt", "*.gz"}}, map[string]string{"/e/src/sub/b.txt": "b"}, []string{"/e/src/a.txt", "/e/no.gz"}},
		{"with parents", sandbox.Copying{Sources: []string{"src/a.txt"}, Dest: "/p/", Parents: true}, map[string]string{"/p/src/a.txt": "a"}, nil},
		{"an archive is a file to COPY", sandbox.Copying{Sources: []string{"x.tar.gz"}, Dest: "/t/"}, map[string]string{"/t/x.tar.gz": string(gz(t, archive))}, nil},
		{"and unpacked by ADD", sandbox.Copying{Sources: []string{"x.tar.gz"}, Dest: "/t/", Unpack: true}, map[string]string{"/t/in/tar": "t", "/t/in/l": "-> tar"}, []string{"/t/x.tar.gz"}},
		{"what only is packed is a file", sandbox.Copying{Sources: []string{"no.gz"}, Dest: "/t/", Unpack: true}, map[string]string{"/t/no.gz": string(gz(t, []byte("plain")))}, nil},
		{"a file over a file", sandbox.Copying{Sources: []string{"main.py"}, Dest: "/file"}, map[string]string{"/file": "m"}, nil},
	} {
		c.c.Onto, c.c.Files = onto, ctx
		got, err := copied(t, lib, s, c.c)
		if err != nil {
			t.Errorf("%s: %v", c.about, err)
			continue
		}
		for p, want := range c.want {
			f, ok := got[p]
			if !ok || !strings.HasPrefix(whatIs(f), want) && whatIs(f) != want {
				t.Errorf("%s: %s is %q, not %q (there: %t)", c.about, p, whatIs(f), want, ok)
			}
		}
		for _, p := range c.missing {
			if _, ok := got[p]; ok {
				t.Errorf("%s: %s is there", c.about, p)
			}
		}
	}
	for _, c := range []struct {
		about string
		c     sandbox.Copying
		class sandbox.Class
	}{
		{"not there", sandbox.Copying{Sources: []string{"nope"}, Dest: "/"}, sandbox.NotFound},
		{"of the host", sandbox.Copying{Sources: []string{"src/out"}, Dest: "/"}, sandbox.NotFound},
		{"no such user", sandbox.Copying{Sources: []string{"main.py"}, Dest: "/", Owner: "nobody"}, sandbox.Invalid},
		{"a mode of letters", sandbox.Copying{Sources: []string{"main.py"}, Dest: "/", Mode: "u+x"}, sandbox.Invalid},
		{"several files to a name", sandbox.Copying{Sources: []string{"main.py", "run.sh"}, Dest: "/x"}, sandbox.Invalid},
		{"below a file", sandbox.Copying{Sources: []string{"main.py"}, Dest: "/file/x/"}, sandbox.Invalid},
		{"a directory over a file", sandbox.Copying{Sources: []string{"src"}, Dest: "/file"}, sandbox.Invalid},
	} {
		c.c.Onto, c.c.Files = onto, ctx
		_, err := copied(t, lib, s, c.c)
		if sandbox.ClassOf(err) != c.class {
			t.Errorf("%s: %v", c.about, err)
		}
	}
	// WORKDIR, twice: the second changes nothing.
	mk := sandbox.Copying{Onto: onto, Dest: "/a/b", Owner: "app"}
	got, err := copied(t, lib, s, mk)
	if err != nil || !strings.HasPrefix(whatIs(got["/a/b"]), "dir 755 1000:1001") {
		t.Error(whatIs(got["/a/b"]), err)
	}
	if d, err := lib.CopyLayer(t.Context(), sandbox.Copying{Onto: onto, Dest: "/srv"}, s.open, nil, io.Discard); d != "" || err != nil {
		t.Error("a directory that was there:", d, err)
	}
	// From another image owners are kept.
	other := importTar(t, lib, pack(t, owned))
	got, err = copied(t, lib, s, sandbox.Copying{Onto: onto, From: &sandbox.Composition{Base: other.ID}, Sources: []string{"/src"}, Dest: "/f/"})
	if err != nil || !strings.HasPrefix(whatIs(got["/f/owned"]), "o 644 77:78") {
		t.Error(whatIs(got["/f/owned"]), err)
	}
	got, err = copied(t, lib, s, sandbox.Copying{Onto: onto, Inline: []sandbox.InlineFile{{Name: "EOF", Data: "hi\n"}}, Dest: "/here"})
	if err != nil || !strings.HasPrefix(whatIs(got["/here"]), "hi\n") {
		t.Error(whatIs(got["/here"]), err)
	}
}

// Times alone make no other layer.
func TestCopyDigestIsWithoutTimes(t *testing.T) {
	lib := library(t, image.Options{})
	base := importTar(t, lib, pack(t, dir("srv")))
	digest := func(h tar.Header) string {
		s := shelf{}
		c := sandbox.Copying{Onto: sandbox.Composition{Base: base.ID}, Files: s.put(pack(t, h)), Sources: []string{"f"}, Dest: "/srv/"}
		d, err := lib.CopyLayer(t.Context(), c, s.open, nil, io.Discard)
		if err != nil {
			t.Fatal(err)
		}
		return d
	}
	a := reg("f", "x")
	b := a
	b.ModTime = a.ModTime.Add(1000)
	c, d := reg("f", "y"), a
	d.Mode = 0o755
	if digest(a) != digest(b) || digest(a) == digest(c) || digest(a) == digest(d) {
		t.Error(digest(a), digest(b), digest(c), digest(d))
	}
}

// What was mounted for a step is no part of its layer, but what is linked out of it is.
func TestComposeWithoutMounts(t *testing.T) {
	lib := library(t, image.Options{})
	base := importTar(t, lib, pack(t, reg("keep", "k")))
	s := shelf{}
	layer := sandbox.Layer{Content: *s.put(pack(t, dir("cache"), reg("cache/big", "b"), reg("cachet", "other"), hard("linked", "cache/big"))), Without: []string{"/cache"}}
	img, err := lib.Compose(t.Context(), sandbox.Composition{Base: base.ID, Layers: []sandbox.Layer{layer}}, s.open, nil)
	if err != nil {
		t.Fatal(err)
	}
	got := files(t, lib, img.ID)
	if _, ok := got["/cache"]; ok || !strings.HasPrefix(whatIs(got["/linked"]), "b") || !strings.HasPrefix(whatIs(got["/cachet"]), "other") || !strings.HasPrefix(whatIs(got["/keep"]), "k") {
		t.Error(shape(got))
	}
}

// ADD of a URL goes only where it may, by redirects too.
func TestCopyFetch(t *testing.T) {
	lib := library(t, image.Options{})
	base := importTar(t, lib, pack(t, dir("srv")))
	web := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if r.URL.Path == "/away" {
			http.Redirect(w, r, "http://127.0.0.2:1/secret", http.StatusFound)
			return
		}
		_, _ = io.WriteString(w, "content")
	}))
	defer web.Close()
	fetch := func(url, sum string, allow func(string, netip.AddrPort) bool) error {
		c := sandbox.Copying{Onto: sandbox.Composition{Base: base.ID}, Fetch: &sandbox.Fetch{URL: url, Checksum: sum}, Dest: "/srv/"}
		_, err := lib.CopyLayer(t.Context(), c, nil, allow, io.Discard)
		return err
	}
	here := func(_ string, to netip.AddrPort) bool { return to.String() == strings.TrimPrefix(web.URL, "http://") }
	nowhere := func(string, netip.AddrPort) bool { return false }
	if err := fetch(web.URL+"/f", "", here); err != nil {
		t.Error(err)
	}
	wantClass(t, fetch(web.URL+"/f", "", nowhere), sandbox.Denied)
	wantClass(t, fetch(web.URL+"/f", "", nil), sandbox.Denied)
	wantClass(t, fetch(web.URL+"/away", "", here), sandbox.Denied)
	wantClass(t, fetch(web.URL+"/f", "sha256:"+strings.Repeat("0", 64), here), sandbox.Corrupt)
	wantClass(t, fetch("file:///etc/passwd", "", here), sandbox.Invalid)
}

// What is pushed comes back as it was, with its history, and the base as a layer
// that is the same for all that is built on it.
func TestPush(t *testing.T) {
	reg0 := startRegistry(t)
	lib := library(t, image.Options{Registries: []string{"127.0.0.0/8"}})
	far := library(t, image.Options{Registries: []string{"127.0.0.0/8"}})
	base := importTar(t, lib, pack(t, reg("a", "a"), reg("gone", "g"), dir("d"), reg("d/x", "x")))
	s := shelf{}
	build := func(text string) sandbox.Image {
		changed := reg("a", text)
		c := sandbox.Composition{Base: base.ID, Built: true, Layers: []sandbox.Layer{{Content: *s.put(pack(t, changed, wh("gone"), reg("new", "n")))}},
			Config:  sandbox.ImageConfig{Env: []string{"A=1"}, Cmd: []string{"run"}, Labels: map[string]string{"l": "v"}, ExposedPorts: []string{"80/tcp"}, User: "app", WorkingDir: "/d"},
			History: []sandbox.BuiltLayer{{CreatedBy: "ENV A=1", Empty: true}, {CreatedBy: "RUN x"}, {CreatedBy: "CMD run", Empty: true}}}
		img, err := lib.Compose(t.Context(), c, s.open, nil)
		if err != nil {
			t.Fatal(err)
		}
		return img
	}
	var bases []string
	var img sandbox.Image
	for _, text := range []string{"1", "2"} {
		img = build(text)
		ref := reg0.host + "/app:" + text
		digest, err := lib.Push(t.Context(), sandbox.RegistryAccess{}, img.ID, ref, nil)
		if err != nil {
			t.Fatal(err)
		}
		r, err := name.ParseReference(ref)
		if err != nil {
			t.Fatal(err)
		}
		got, err := remote.Image(r)
		if err != nil {
			t.Fatal(err)
		}
		m, err := got.Manifest()
		if err != nil || len(m.Layers) != 2 {
			t.Fatal(m, err)
		}
		if h, _ := got.Digest(); h.String() != digest {
			t.Error(h, digest)
		}
		bases = append(bases, m.Layers[0].Digest.String())
		cf, err := got.ConfigFile()
		if err != nil || len(cf.History) != 4 || cf.History[2].CreatedBy != "RUN x" || cf.History[2].EmptyLayer || !cf.History[3].EmptyLayer {
			t.Error(cf.History, err)
		}
		back, err := far.PullAs(t.Context(), sandbox.RegistryAccess{}, ref, "", nil)
		if err != nil {
			t.Fatal(err)
		}
		if !reflect.DeepEqual(shape(files(t, far, back.ID)), shape(files(t, lib, img.ID))) {
			t.Error(shape(files(t, far, back.ID)), shape(files(t, lib, img.ID)))
		}
		if !reflect.DeepEqual(back.Config, img.Config) {
			t.Errorf("%+v, not %+v", back.Config, img.Config)
		}
	}
	if bases[0] != bases[1] {
		t.Error("the base is packed differently:", bases)
	}
	// What is known is sent once more only to who lacks it.
	sent := reg0.countUploads()
	if _, err := lib.Push(t.Context(), sandbox.RegistryAccess{}, img.ID, reg0.host+"/app:3", nil); err != nil || sent.Load() != 0 {
		t.Error(sent.Load(), "blobs were sent again:", err)
	}
	other := startRegistry(t)
	sent = other.countUploads()
	if _, err := lib.Push(t.Context(), sandbox.RegistryAccess{}, img.ID, other.host+"/app:2", nil); err != nil || sent.Load() != 3 {
		t.Error(sent.Load(), "blobs were sent to another:", err)
	}
	back, err := far.PullAs(t.Context(), sandbox.RegistryAccess{}, other.host+"/app:2", "", nil)
	if err != nil || !reflect.DeepEqual(shape(files(t, far, back.ID)), shape(files(t, lib, img.ID))) {
		t.Error("from another:", err)
	}
}

// Credentials that a registry does not take are refused before anything is packed.
func TestPushAsNobody(t *testing.T) {
	reg0 := startRegistry(t)
	reg0.behind(func(next http.Handler) http.Handler {
		return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
			if u, p, _ := r.BasicAuth(); u != "me" || p != "right" {
				w.Header().Set("WWW-Authenticate", `Basic realm="r"`)
				w.WriteHeader(http.StatusUnauthorized)
				return
			}
			next.ServeHTTP(w, r)
		})
	})
	lib := library(t, image.Options{Registries: []string{"127.0.0.0/8"}})
	img := importTar(t, lib, pack(t, reg("a", "a")))
	for _, who := range []sandbox.RegistryAccess{{}, {Username: "me", Password: "wrong"}, {Username: "me", Password: "right"}} {
		packed := false
		_, err := lib.Push(t.Context(), who, img.ID, reg0.host+"/app", func(p sandbox.Progress) { packed = packed || p.Step == "pack" })
		if right := who.Password == "right"; (err == nil) != right || packed != right {
			t.Errorf("%s: packed %t, %v", who.Password, packed, err)
		} else if !right {
			wantClass(t, err, sandbox.Unauthenticated)
		}
	}
}
