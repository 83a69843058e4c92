package e2e

import (
	"archive/tar"
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"path"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"connectrpc.com/connect"

	covev1 "github.com/cove-sandbox/cove/api/cove/v1"
	"github.com/cove-sandbox/cove/e2e/world"
	"github.com/cove-sandbox/cove/sandbox"
)

var fileTricks = []scenario{
	{"symlink farm", symlinkFarm},
	{"symlink loops", symlinkLoops},
	{"files without an end", endlessFiles},
	{"kernel files", kernelFiles},
	{"a tree too deep and too wide", deepTree},
	{"a tar that escapes", escapingTar},
	{"a file that changes under the reader", changingFile},
}

// fileCall is bounded: what a hostile file system must not do is hang.
func fileCall(t *testing.T) context.Context {
	ctx, cancel := context.WithTimeout(t.Context(), 90*time.Second)
	t.Cleanup(cancel)
	return ctx
}

func list(t *testing.T, b *world.Box, path string, depth int32) (*covev1.ListFilesResponse, error) {
	r, err := b.W.Client().Files.List(fileCall(t), connect.NewRequest(&covev1.ListFilesRequest{SandboxId: b.ID, Path: path, Depth: depth}))
	if err != nil {
		return nil, err
	}
	return r.Msg, nil
}

func remove(t *testing.T, b *world.Box, path string, recursive bool) error {
	_, err := b.W.Client().Files.Remove(fileCall(t), connect.NewRequest(&covev1.RemoveFileRequest{SandboxId: b.ID, Path: path, Recursive: recursive}))
	return err
}

// typed demands that a refusal has a class of its own and is no timeout.
func typed(t *testing.T, what string, err error) {
	t.Helper()
	switch sandbox.ClassOf(err) {
	case sandbox.Internal, sandbox.DeadlineReached, sandbox.Unavailable, sandbox.Canceled:
		t.Errorf("%s: %v (%s)", what, err, sandbox.ClassOf(err))
	}
}

func symlinkFarm(t *testing.T, w *world.World) {
	b := w.Create(t, world.Small())
	// A file on the host that a link could be made to name.
	host := filepath.Join(filepath.Dir(w.Dir), "host-secret")
	if err := os.WriteFile(host, []byte("of the host"), 0o644); err != nil {
		t.Fatal(err)
	}
	b.Python(t, fmt.Sprintf(`
import os
os.makedirs('/farm/deep')
for i in range(3000): os.symlink('/farm/deep', '/farm/l%%d' %% i)
os.symlink(%[1]q, '/farm/host')
os.symlink('../../../../../../../../..'+%[1]q, '/farm/relative')
os.symlink('/', '/farm/root')
os.symlink('/proc/self/root', '/farm/procroot')
os.symlink('/proc/1/root', '/farm/initroot')
os.symlink('/etc', '/farm/etc')
os.symlink('/farm/nowhere', '/farm/dangling')
open('/farm/deep/real', 'w').write('real')
`, host), time.Minute).WantExit(t, 0)

	for _, p := range []string{"/farm/host", "/farm/relative", "/farm/root" + host, "/farm/procroot" + host, "/farm/initroot" + host, "/farm/etc/../.." + host, host} {
		data, _, err := b.Read(t.Context(), p)
		if err == nil {
			t.Errorf("reading %s gave %q", p, data)
		} else {
			typed(t, "reading "+p, err)
		}
	}
	if data, _, err := b.Read(t.Context(), "/farm/l7/real"); err != nil || string(data) != "real" {
		t.Errorf("a link inside is followed: %q, %v", data, err)
	}
	files, err := list(t, b, "/farm", 5)
	if err != nil {
		t.Fatal(err)
	}
	if n := len(files.Files); n < 3000 || n > 3020 {
		t.Errorf("%d entries listed: links must be described, not followed", n)
	}
	// Writing through a dangling link, making directories below a link, moving
	// onto one: all inside.
	for what, err := range map[string]error{
		"write through a dangling link": w.Client().Upload(fileCall(t), b.ID, "/farm/dangling", strings.NewReader("x"), 1, sandbox.WriteOptions{User: "root"}),
		"write through a link out":      w.Client().Upload(fileCall(t), b.ID, "/farm/host", strings.NewReader("x"), 1, sandbox.WriteOptions{User: "root", Parents: true}),
		"atomic write onto a link":      w.Client().Upload(fileCall(t), b.ID, "/farm/relative", strings.NewReader("x"), 1, sandbox.WriteOptions{User: "root", Atomic: true}),
	} {
		if err != nil {
			typed(t, what, err)
		}
	}
	if got, err := os.ReadFile(host); err != nil || string(got) != "of the host" {
		t.Fatalf("the host's file now holds %q (%v)", got, err)
	}
	// Recursive calls do not leave through links.
	if _, err := w.Client().Files.Chmod(fileCall(t), connect.NewRequest(&covev1.ChmodRequest{SandboxId: b.ID, Path: "/farm", Mode: 0o700, Recursive: true})); err != nil {
		t.Errorf("chmod: %v", err)
	}
	if err := remove(t, b, "/farm", true); err != nil {
		t.Errorf("remove: %v", err)
	}
	if got := b.Must(t, "stat -c %a /etc; test -e /etc/passwd && echo kept; test -e /farm || echo gone"); got != "755\nkept\ngone" {
		t.Errorf("after chmod and remove of the farm: %q", got)
	}
}

func symlinkLoops(t *testing.T, w *world.World) {
	b := w.Create(t, world.Small())
	b.Must(t, `mkdir /loops; cd /loops
ln -s a b; ln -s b a; ln -s self self; ln -s . here; ln -s .. up
mkdir -p x/y; ln -s ../.. x/y/z
prev=end; for i in $(seq 200); do ln -s $prev c$i; prev=c$i; done; echo end > end`)
	for _, p := range []string{"/loops/a", "/loops/self", "/loops/self/x", "/loops/c200", "/loops/" + strings.Repeat("here/", 60) + "self"} {
		if _, _, err := b.Read(t.Context(), p); err == nil {
			t.Errorf("reading %s worked", p)
		} else {
			typed(t, "reading "+p, err)
		}
	}
	if data, _, err := b.Read(t.Context(), "/loops/c3"); err != nil || string(data) != "end\n" {
		t.Errorf("a short chain: %q, %v", data, err)
	}
	files, err := list(t, b, "/loops", 50)
	if err != nil {
		t.Fatal(err)
	}
	if n := len(files.Files); n > 250 {
		t.Errorf("%d entries: the walk went round", n)
	}
	// The tar holds the links themselves.
	body, err := w.Client().DownloadTar(fileCall(t), b.ID, "/loops")
	if err != nil {
		t.Fatal(err)
	}
	defer body.Close()
	n := 0
	for tr := tar.NewReader(body); ; n++ {
		if _, err := tr.Next(); errors.Is(err, io.EOF) {
			break
		} else if err != nil {
			t.Fatal(err)
		}
	}
	if n < 200 || n > 250 {
		t.Errorf("the tar has %d entries", n)
	}
	if err := remove(t, b, "/loops", true); err != nil {
		t.Errorf("remove: %v", err)
	}
}

// Files that never end or never begin: refused, or cut off at the limit of a
// call, but always answered.
func endlessFiles(t *testing.T, w *world.World) {
	b := w.Create(t, world.Small())
	b.Must(t, "mkfifo /pipe; ln -s /dev/zero /zero; ln -s /pipe /pipelink; python3 -c \"import socket; socket.socket(socket.AF_UNIX).bind('/sock')\"")
	before := w.ServerMemory(t)
	for _, p := range []string{"/pipe", "/pipelink", "/sock", "/dev/zero", "/zero", "/dev/urandom", "/dev/tty", "/dev/ptmx", "/dev/stdin", "/dev/full", "/dev/null", "/proc/kmsg", "/"} {
		ctx := fileCall(t)
		data, _, err := b.Read(ctx, p)
		if err != nil {
			typed(t, "reading "+p, err)
		} else if len(data) > 16<<20 {
			t.Errorf("reading %s gave %d bytes", p, len(data))
		}
		body, _, err := w.Client().Download(ctx, b.ID, p, 0, 0)
		if err != nil {
			typed(t, "downloading "+p, err)
			continue
		}
		n, err := io.Copy(io.Discard, io.LimitReader(body, 64<<20))
		body.Close()
		if n > 1<<20 || ctx.Err() != nil {
			t.Errorf("downloading %s gave %d bytes, %v", p, n, err)
		}
	}
	for _, p := range []string{"/pipe", "/pipelink", "/sock", "/dev/full", "/", "/proc/version"} {
		err := w.Client().Upload(fileCall(t), b.ID, p, strings.NewReader("x"), 1, sandbox.WriteOptions{User: "root"})
		if err == nil {
			t.Errorf("writing to %s worked", p)
		} else {
			typed(t, "writing to "+p, err)
		}
	}
	if _, err := list(t, b, "/dev", 3); err != nil {
		t.Errorf("listing /dev: %v", err)
	}
	if grown := w.ServerMemory(t) - before; grown > 256<<20 {
		t.Errorf("the server grew by %d MiB", grown>>20)
	}
	b.Must(t, "echo alive")
}

// The guest reads files for the caller; what /proc then tells must be of the
// sandbox, never of the guest.
func kernelFiles(t *testing.T, w *world.World) {
	b := w.Create(t, world.Small())
	for _, p := range []string{"/proc/self/environ", "/proc/thread-self/environ", "/proc/self/cmdline", "/proc/self/maps", "/proc/self/mem", "/proc/self/fd/0",
		"/proc/self/exe", "/proc/self/root/etc/passwd", "/proc/1/environ", "/proc/1/mem", "/proc/kcore", "/proc/mounts", "/proc/version"} {
		data, _, err := b.Read(fileCall(t), p)
		if err != nil {
			typed(t, "reading "+p, err)
			continue
		}
		if bytes.Contains(data, []byte("COVE_GUEST")) || bytes.Contains(data, []byte("cove-guest\x00agent")) || bytes.HasPrefix(data, []byte("\x7fELF")) {
			t.Errorf("%s shows the guest: %.100q", p, data)
		}
	}
	if _, err := list(t, b, "/proc", 3); err != nil {
		typed(t, "listing /proc", err)
	}
	if err := remove(t, b, "/proc", true); err == nil {
		t.Error("removing /proc worked")
	}
	b.Must(t, "echo alive")
}

func deepTree(t *testing.T, w *world.World) {
	b := w.Create(t, world.Small())
	b.Python(t, `
import os
os.mkdir('/tree'); os.chdir('/tree')
for i in range(1500):
    os.mkdir('d' * 20); os.chdir('d' * 20)
os.makedirs('/wide')
for i in range(12000): os.close(os.open('/wide/%d' % i, os.O_CREAT))
open(b'/wide/\xff\xfe\n\x1b[31m', 'w').write('odd')
`, 2*time.Minute).WantExit(t, 0)
	r, err := list(t, b, "/wide", 1)
	if err != nil {
		t.Fatal(err)
	}
	if len(r.Files) > 10000 || !r.Truncated {
		t.Errorf("%d entries, truncated %v", len(r.Files), r.Truncated)
	}
	if _, err := list(t, b, "/tree", 10000); err != nil {
		typed(t, "listing a deep tree", err)
	}
	if body, err := w.Client().DownloadTar(fileCall(t), b.ID, "/tree"); err != nil {
		typed(t, "tar of a deep tree", err)
	} else {
		_, _ = io.Copy(io.Discard, body) // its end may be an error; it must come
		body.Close()
	}
	if err := remove(t, b, "/tree", true); err != nil {
		typed(t, "removing a deep tree", err)
	}
	if err := remove(t, b, "/wide", true); err != nil {
		t.Errorf("removing a wide tree: %v", err)
	}
	b.Must(t, "echo alive")
}

// A tar sent in is unpacked below its directory or refused.
func escapingTar(t *testing.T, w *world.World) {
	b := w.Create(t, world.Small())
	b.Must(t, "mkdir /in; ln -s /etc /in/out")
	for name, entries := range map[string][]tar.Header{
		"dots":             {{Name: "../evil", Typeflag: tar.TypeReg}},
		"deep dots":        {{Name: "a/../../evil", Typeflag: tar.TypeReg}},
		"absolute":         {{Name: "/evil", Typeflag: tar.TypeReg}},
		"symlinked parent": {{Name: "p", Typeflag: tar.TypeSymlink, Linkname: "/"}, {Name: "p/evil", Typeflag: tar.TypeReg}},
		"existing parent":  {{Name: "out/evil", Typeflag: tar.TypeReg}},
		"hard link":        {{Name: "h", Typeflag: tar.TypeLink, Linkname: "/etc/passwd"}, {Name: "h", Typeflag: tar.TypeReg}},
		"hard link dots":   {{Name: "h2", Typeflag: tar.TypeLink, Linkname: "../etc/passwd"}, {Name: "h2", Typeflag: tar.TypeReg}},
		"device":           {{Name: "dev", Typeflag: tar.TypeBlock, Devmajor: 8}},
	} {
		var buf bytes.Buffer
		tw := tar.NewWriter(&buf)
		for _, h := range entries {
			h.Mode = 0o644
			if h.Typeflag == tar.TypeReg {
				h.Size = 4
			}
			if err := tw.WriteHeader(&h); err != nil {
				t.Fatal(err)
			}
			if h.Typeflag == tar.TypeReg {
				fmt.Fprint(tw, "evil")
			}
		}
		tw.Close()
		if err := w.Client().UploadTar(fileCall(t), b.ID, "/in", "root", &buf); err != nil {
			typed(t, name, err)
		}
	}
	if got := b.Must(t, "ls /evil /etc/evil 2>/dev/null; grep -c evil /etc/passwd; stat -c %F /in/dev 2>/dev/null; true"); got != "0" {
		t.Errorf("outside of the directory: %q", got)
	}
	// Cut off in the middle of an entry.
	err := w.Client().UploadTar(fileCall(t), b.ID, "/in", "root", strings.NewReader("not a tar at all"))
	if err == nil {
		t.Error("16 bytes of text were taken for a tar")
	} else {
		typed(t, "no tar", err)
	}
}

// A file that grows, shrinks and is replaced while it is read.
func changingFile(t *testing.T, w *world.World) {
	b := w.Create(t, world.Small())
	r, err := b.W.Client().Processes.Start(t.Context(), connect.NewRequest(&covev1.StartProcessRequest{SandboxId: b.ID, Process: &covev1.ProcessSpec{
		ExecId: "churn", User: "root", Command: `mkdir /churn; cd /churn; while :; do head -c 3M /dev/zero > f; : > f; ln -sf /dev/zero g; mv g f; rm f; mkdir f; rmdir f; done`}}))
	if err != nil {
		t.Fatal(err)
	}
	defer r.Close()
	for i := range 40 {
		p := path.Join("/churn", "f")
		if data, _, err := b.Read(fileCall(t), p); err == nil && len(data) > 16<<20 {
			t.Errorf("%d bytes", len(data))
		} else if err != nil {
			typed(t, "reading a changing file", err)
		}
		if i%4 == 0 {
			if body, _, err := w.Client().Download(fileCall(t), b.ID, p, 0, 0); err == nil {
				n, _ := io.Copy(io.Discard, io.LimitReader(body, 64<<20))
				body.Close()
				if n > 16<<20 {
					t.Errorf("downloaded %d bytes", n)
				}
			}
		}
	}
	b.Must(t, "echo alive")
}
