package runtimetest

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/cove-sandbox/cove/runtime"
)

// volumeDir is a host directory with a canary beside it that nothing inside a
// sandbox may read or change.
func volumeDir(t *testing.T) (dir, canary string) {
	t.Helper()
	top := t.TempDir()
	dir, canary = filepath.Join(top, "volume"), filepath.Join(top, "canary")
	if err := os.Mkdir(dir, 0o755); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(canary, []byte("host-secret"), 0o666); err != nil {
		t.Fatal(err)
	}
	return dir, canary
}

func withVolume(v runtime.Volume) func(*runtime.Container) {
	return func(c *runtime.Container) { c.Volumes = append(c.Volumes, v) }
}

func (s *suite) testVolume(t *testing.T) {
	d := s.open(t)
	s.need(t, d, "able to mount volumes", d.Capabilities().Volumes)
	dir, _ := volumeDir(t)
	a := s.attached(t, d, withVolume(runtime.Volume{Source: dir, Target: "/data"}))
	// No sync: what was written is there because write(2) has returned.
	s.sh(t, a, "echo from a > /data/a; mkdir -p /data/d/e; head -c 3000000 /dev/zero | tr '\\0' x > /data/d/e/big; ln -s a /data/link; chown 1000:1000 /data/a; chmod 640 /data/a")
	if err := a.Destroy(deadline(t)); err != nil {
		t.Fatal(err)
	}
	b := s.attached(t, d, withVolume(runtime.Volume{Source: dir, Target: "/other/place"}))
	if got := s.sh(t, b, "cd /other/place && cat a link && stat -c '%u %g %a' a && wc -c < d/e/big && tr -d x < d/e/big | wc -c"); got != "from a\nfrom a\n1000 1000 640\n3000000\n0" {
		t.Errorf("b sees %q", got)
	}
	if got, err := os.ReadFile(filepath.Join(dir, "a")); err != nil || string(got) != "from a\n" {
		t.Errorf("the host sees %q, %v", got, err)
	}
	s.sh(t, b, "cp /bin/true /other/place/run && /other/place/run") // programs run from it
	if strings.Contains(s.sh(t, b, "cat /proc/mounts"), dir) {
		t.Error("the host's path is visible inside")
	}
}
