package spawn

import (
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/cove-sandbox/cove/internal/mountinfo"
)

func TestPassing(t *testing.T) {
	const table = `22 1 254:0 / / rw,relatime shared:1 - ext4 /dev/vda rw
23 22 0:21 / /proc rw,nosuid shared:2 - proc proc rw
30 22 0:4 net:[4026532] /data/networks/a\\040b rw shared:3 master:1 - nsfs nsfs rw
31 22 7:0 / /data/volumes/v rw - ext4 /dev/loop0 rw
32 22 7:1 / /srv rw - ext4 /dev/loop1 rw
33 32 7:1 / /srv/data/volumes/w rw - ext4 /dev/loop2 rw
34 22 254:0 /x /mnt rw - ext4 /dev/vda rw
35 22 7:3 / /srv/da rw - ext4 /dev/loop3 rw
half a line
`
	want := []string{"/data/networks/a b", "/data/volumes/v", "/srv/data/volumes/w", "/srv/da"}
	if got := passing(mountinfo.Parse(strings.ReplaceAll(table, `\\`, `\`)), "/srv/data/gvisor", "/usr/bin/runsc"); !slices.Equal(got, want) {
		t.Errorf("got  %q\nwant %q", got, want)
	}
}

// What is started apart does not have the networks of sandboxes among its mounts, nor
// those that come later; the machine keeps them.
func TestApart(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("mounts need root")
	}
	dir := t.TempDir()
	mount := func(name string) {
		t.Helper()
		at := filepath.Join(dir, name)
		if err := os.WriteFile(at, nil, 0o600); err != nil {
			t.Fatal(err)
		}
		if err := unix.Mount("/proc/self/ns/net", at, "", unix.MS_BIND, ""); err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() {
			if err := unix.Unmount(at, unix.MNT_DETACH); err != nil {
				t.Error(err)
			}
		})
	}
	mount("before")
	seen := func(s *Spawner) string {
		t.Helper()
		cmd, out, started := shell(t, "grep -o '"+dir+"/[a-z]*' /proc/self/mountinfo >&3; :")
		if err := s.Start(cmd, nil); err != nil {
			t.Fatal(err)
		}
		started()
		return strings.ReplaceAll(strings.ReplaceAll(read(t, out), dir+"/", ""), "\n", " ")
	}
	apart, beside := spawner(t, dir), spawner(t, "")
	if a, b := seen(apart), seen(beside); a != "" || b != "before" {
		t.Errorf("apart %q, beside %q", a, b)
	}
	mount("after")
	if a, b := seen(apart), seen(beside); a != "" || b != "before after" {
		t.Errorf("apart %q, beside %q", a, b)
	}
}
