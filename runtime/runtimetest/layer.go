package runtimetest

import (
	"archive/tar"
	"errors"
	"fmt"
	"io"
	"maps"
	"os"
	"path"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/cove-sandbox/cove/runtime"
	"github.com/cove-sandbox/cove/sandbox"
)

// diff is what a kernel's container changed: the path of each entry, with what
// is worth comparing.
func (s *suite) diff(t *testing.T, k runtime.Kernel) map[string]string {
	t.Helper()
	f, err := os.Create(filepath.Join(t.TempDir(), "diff.tar"))
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	if err := k.(runtime.Differ).Diff(deadline(t), f, 0); err != nil {
		t.Fatalf("diff: %v", err)
	}
	if _, err := f.Seek(0, io.SeekStart); err != nil {
		t.Fatal(err)
	}
	got := map[string]string{}
	for r := tar.NewReader(f); ; {
		h, err := r.Next()
		if errors.Is(err, io.EOF) {
			return got
		}
		if err != nil {
			t.Fatalf("diff: %v", err)
		}
		body, err := io.ReadAll(r)
		if err != nil {
			t.Fatal(err)
		}
		if strings.HasPrefix(h.Name, "/") || strings.HasPrefix(h.Name, "./") && h.Name != "./" || strings.HasPrefix(h.Linkname, "./") {
			t.Errorf("diff has a name %q, link to %q", h.Name, h.Linkname)
		}
		what := fmt.Sprintf("%c %o", h.Typeflag, h.Mode)
		switch h.Typeflag {
		case tar.TypeReg:
			what += " " + string(body)
		case tar.TypeSymlink:
			what = "2 " + h.Linkname
		case tar.TypeLink:
			what = "1"
		case tar.TypeChar:
			what = fmt.Sprintf("3 %d:%d", h.Devmajor, h.Devminor)
		}
		for _, x := range slices.Sorted(maps.Keys(h.PAXRecords)) {
			if name, ok := strings.CutPrefix(x, "SCHILY.xattr."); ok {
				what += " " + name + "=" + h.PAXRecords[x]
			}
		}
		got[path.Clean("/"+h.Name)] = what
	}
}

func (s *suite) testDiff(t *testing.T) {
	d := s.open(t)
	s.need(t, d, "able to diff an image's content", d.Capabilities().Diff && d.Capabilities().Isolated)
	k := s.attached(t, d)
	pristine := s.diff(t, k)
	s.sh(t, k, `umask 022; cd /
		mkdir -p /new/deep; echo made > /new/deep/file; chmod 640 /new/deep/file
		echo hard > /new/one; ln /new/one /new/two; ln -s deep/file /new/link
		cp /bin/true /new/suid; : > /new/suid; chmod 4755 /new/suid
		python3 -c 'import os; os.setxattr("/new/one", "user.mark", b"yes")'
		echo changed > /etc/hostname
		rm /etc/passwd- /etc/debian_version 2>/dev/null; rm -r /usr/share/doc/bash
		rm -r /etc/apt; mkdir /etc/apt; echo mine > /etc/apt/own
		echo gone > /new/gone; rm /new/gone; mkdir /new/gonedir; rmdir /new/gonedir`)
	got := s.diff(t, k)
	for p := range pristine {
		delete(got, p)
	}
	want := map[string]string{
		"/new": "5 755 trusted.overlay.opaque=y", "/new/deep": "5 755", "/new/deep/file": "0 640 made\n",
		"/new/link": "2 deep/file", "/new/suid": "0 4755 ",
		"/etc/hostname": "0 644 changed\n", "/etc/debian_version": "3 0:0",
		"/usr/share/doc/bash": "3 0:0", "/etc/apt": "5 755 trusted.overlay.opaque=y", "/etc/apt/own": "0 644 mine\n",
	}
	s.sh(t, k, "truncate -s 1T /new/holes")
	f, err := os.Create(filepath.Join(t.TempDir(), "diff.tar"))
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	if err := k.(runtime.Differ).Diff(deadline(t), f, 1<<30); !errors.Is(err, sandbox.ErrTooLarge) {
		t.Errorf("a terabyte of holes in a diff of at most a gigabyte: %v", err)
	}
	s.sh(t, k, "rm /new/holes; yes | head -c 6000000 > /new/large") // and the kernel goes on
	if large := s.diff(t, k); len(large["/new/large"]) != len("0 644 ")+6000000 || large["/new/deep/file"] != got["/new/deep/file"] {
		t.Errorf("of 6 MB there are %d bytes in a diff, beside %q", len(large["/new/large"]), large["/new/deep/file"])
	}
	// Which of two hard links comes first is the driver's choice.
	one, two := got["/new/one"], got["/new/two"]
	if hard := "0 644 hard\n user.mark=yes"; !(one == hard && two == "1" || two == hard && one == "1") {
		t.Errorf("hard links: %q and %q", one, two)
	}
	for p, w := range want {
		if got[p] != w {
			t.Errorf("%s: %q, want %q", p, got[p], w)
		}
	}
	for p, g := range got {
		parent := strings.HasPrefix(g, "5 ") && slices.ContainsFunc(slices.Collect(maps.Keys(want)), func(q string) bool { return strings.HasPrefix(q, p+"/") || p == "/" })
		if _, ok := want[p]; !ok && !parent && !strings.HasPrefix(p, "/new/") && p != "/etc/passwd-" {
			t.Errorf("unexpected %s: %q", p, g)
		}
	}
	s.sh(t, k, "cat /new/deep/file") // it goes on
}

func (s *suite) testMount(t *testing.T) {
	d := s.open(t)
	s.need(t, d, "able to mount", d.Capabilities().Mount && s.Erofs != nil)
	file := func(content string) string {
		tree := t.TempDir()
		if err := os.WriteFile(filepath.Join(tree, "data"), []byte(content), 0o644); err != nil {
			t.Fatal(err)
		}
		return s.Erofs(t, tree)
	}
	one, two := file("one"), file("two")
	k := s.attached(t, d)
	mount := func(k runtime.Kernel, file, path string) error {
		return k.(runtime.Mounter).Mount(deadline(t), file, path)
	}
	if err := mount(k, one, "/made/for/it"); err != nil {
		t.Fatalf("mount: %v", err)
	}
	if err := mount(k, two, "/mnt"); err != nil {
		t.Fatalf("mount: %v", err)
	}
	s.sh(t, k, "ln -s /root /lead; mkdir /real; ln -s /real /real/self")
	for _, p := range []string{"/lead/x", "/real/self/y", "/", "relative", "/mnt/../x\x00"} {
		if err := mount(k, one, p); err == nil {
			t.Errorf("mounted at %q", p)
		}
	}
	see := func(k runtime.Kernel) {
		t.Helper()
		if got := s.sh(t, k, "cat /made/for/it/data /mnt/data"); got != "onetwo" {
			t.Errorf("it has %q", got)
		}
		s.fails(t, k, "echo x > /mnt/data")
		s.fails(t, k, "rm /made/for/it/data")
		s.fails(t, k, "mount -o remount,rw /mnt; echo x > /mnt/data")
	}
	see(k)
	if d.Capabilities().Checkpoint {
		dir, cp := s.checkpoint(t, k)
		child := s.restore(t, d, dir, cp)
		see(child)
		dir, cp = s.checkpoint(t, child)
		see(s.restore(t, d, dir, cp))
	}
	if err := k.Reset(deadline(t), s.container(t)); err != nil {
		t.Fatal(err)
	}
	s.sh(t, k, "! test -e /made && ! test -e /mnt/data")
	if err := mount(k, two, "/made"); err != nil {
		t.Errorf("mount after a reset: %v", err)
	}
	if got := s.sh(t, k, "cat /made/data"); got != "two" {
		t.Errorf("after a reset: %q", got)
	}

	// From the start.
	k = s.attached(t, d, func(c *runtime.Container) {
		c.Mounts = []runtime.Mount{{Source: one, Target: "/made/for/it"}, {Source: two, Target: "/mnt"}}
	})
	see(k)
	if err := mount(k, two, "/later"); err != nil {
		t.Errorf("mount beside those of the start: %v", err)
	}
	if d.Capabilities().Checkpoint {
		dir, cp := s.checkpoint(t, k)
		child := s.restore(t, d, dir, cp)
		see(child)
		if got := s.sh(t, child, "cat /later/data"); got != "two" {
			t.Errorf("after a restore: %q", got)
		}
	}
}
