package image_test

import (
	"context"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/cove-sandbox/cove/image"
	"github.com/cove-sandbox/cove/image/imagetest"
	"github.com/cove-sandbox/cove/sandbox"
)

func TestBaseImage(t *testing.T) {
	lib, img := imagetest.Base(t)
	all := files(t, lib, img.ID)
	for _, program := range []string{"bash", "ls", "ps", "python3", "python", "pip", "git", "curl", "sudo", "tmux"} {
		if _, ok := all["/usr/bin/"+program]; !ok {
			t.Errorf("%s is missing", program)
		}
	}
	if m := all["/usr/bin/sudo"].mode; m&0o4000 == 0 {
		t.Errorf("sudo has mode %o", m)
	}
	if f := all["/etc/sudoers.d/user"]; f.mode != 0o100440 || !strings.Contains(f.content, "NOPASSWD") {
		t.Errorf("sudoers: %s", describe(f))
	}
	if f := all["/home/user"]; f.uid != 1000 || f.gid != 1000 {
		t.Errorf("home: %s", describe(f))
	}
	if !strings.Contains(all["/etc/passwd"].content, "user:x:1000:1000::/home/user:/bin/bash\n") {
		t.Error("no user in /etc/passwd")
	}
	if !strings.Contains(all["/etc/hosts"].content, "localhost") || all["/etc/hostname"].content != "cove\n" {
		t.Error("the host name does not resolve")
	}
	for path := range all {
		if strings.HasSuffix(path, "EXTERNALLY-MANAGED") {
			t.Errorf("%s keeps pip from installing", path)
		}
		if strings.HasPrefix(path, "/var/lib/apt/lists/") && strings.Contains(path, "Packages") {
			t.Errorf("%s takes room", path)
		}
	}
	if img.Config.User != "user" || img.Config.WorkingDir != "/home/user" || img.Source != "debian" {
		t.Errorf("%+v", img)
	}
	// A second time it is found, not made.
	again, err := lib.Bootstrap(t.Context(), image.Debian{}, func(p sandbox.Progress) { t.Errorf("made again: %s", p.Step) })
	if err != nil || again.ID != img.ID {
		t.Errorf("%s, %v", again.ID, err)
	}
}

// Ctrl-C in the middle: no process, no mount and no file of it is left.
func TestBootstrapCancelled(t *testing.T) {
	if testing.Short() {
		t.Skip("downloads from the Debian mirror")
	}
	if os.Getuid() != 0 {
		t.Skip("needs root")
	}
	dir := t.TempDir()
	lib := libraryAt(t, dir, image.Options{})
	ctx, cancel := context.WithCancel(t.Context())
	var seen []string
	_, err := lib.Bootstrap(ctx, image.Debian{Packages: []string{"bash"}}, func(p sandbox.Progress) {
		seen = append(seen, p.Step)
		// By then the new root has its mounts and runs programs.
		if strings.Contains(p.Step, "installing essential packages") {
			cancel()
		}
	})
	if sandbox.ClassOf(err) == sandbox.Unavailable {
		t.Skipf("no Debian mirror in reach: %v", err)
	}
	wantClass(t, err, sandbox.Canceled)
	if len(seen) < 3 {
		t.Errorf("progress: %q", seen)
	}
	noTemp(t, dir)
	mounts, err := os.ReadFile("/proc/self/mountinfo")
	if err != nil || strings.Contains(string(mounts), dir) {
		t.Errorf("a mount is left (%v)", err)
	}
	procs, _ := filepath.Glob("/proc/[0-9]*")
	for _, p := range procs {
		if cmd, err := os.ReadFile(p + "/environ"); err == nil && strings.Contains(string(cmd), "TMPDIR="+dir) {
			t.Errorf("process %s is left", filepath.Base(p))
		}
	}
}

func TestBootstrapSaysWhatIsMissing(t *testing.T) {
	lib := library(t, image.Options{})
	t.Setenv("PATH", t.TempDir())
	_, err := lib.Bootstrap(t.Context(), image.Debian{Suite: "bookworm", Mirror: "http://127.0.0.1:1/debian"}, nil)
	wantClass(t, err, sandbox.Precondition)
	if hint := err.(*sandbox.Error).Hint; hint != "apt-get install -y mmdebstrap" {
		t.Errorf("hint: %q", hint)
	}
}

func TestBootstrapWithoutAMirror(t *testing.T) {
	lib := library(t, image.Options{})
	_, err := lib.Bootstrap(t.Context(), image.Debian{Suite: "bookworm", Mirror: "http://127.0.0.1:1/debian"}, nil)
	wantClass(t, err, sandbox.Unavailable)
	if hint := err.(*sandbox.Error).Hint; !strings.Contains(hint, "127.0.0.1:1") {
		t.Errorf("hint: %q", hint)
	}
	_, err = lib.Bootstrap(t.Context(), image.Debian{Suite: "book worm", Mirror: "http://x"}, nil)
	wantClass(t, err, sandbox.Invalid)
}
