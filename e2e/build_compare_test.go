package e2e

import (
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"golang.org/x/sys/unix"
)

// buildah builds the same Dockerfiles, in a store of its own.
type buildah struct {
	root, host string
}

// newBuildah gives buildah the base under the names that Dockerfiles have for it.
func newBuildah(t *testing.T, host string) *buildah {
	t.Helper()
	b := &buildah{root: t.TempDir(), host: host}
	t.Cleanup(func() { b.unmount(t) })
	b.run(t, "pull", "--tls-verify=false", "docker://"+host+"/tools:1")
	for _, n := range toolNames {
		b.run(t, "tag", host+"/tools:1", "docker.io/library/"+n)
	}
	return b
}

func (b *buildah) run(t *testing.T, args ...string) {
	t.Helper()
	cmd := exec.CommandContext(t.Context(), "buildah", append([]string{"--root", filepath.Join(b.root, "root"), "--runroot", filepath.Join(b.root, "run")}, args...)...)
	cmd.Env = append(os.Environ(), "STORAGE_DRIVER=overlay", "BUILDAH_ISOLATION=chroot")
	if out, err := cmd.CombinedOutput(); err != nil {
		t.Fatalf("buildah %v: %v\n%s", args, err, out)
	}
}

// unmount takes away what buildah now and then leaves mounted.
func (b *buildah) unmount(t *testing.T) {
	t.Helper()
	mounts, err := os.ReadFile("/proc/self/mountinfo")
	if err != nil {
		t.Error(err)
	}
	for line := range strings.Lines(string(mounts)) {
		if at := strings.Fields(line)[4]; strings.HasPrefix(at, b.root+"/") {
			if err := unix.Unmount(at, unix.MNT_DETACH); err != nil {
				t.Error(at, err)
			}
		}
	}
}

// build is what buildah makes of a Dockerfile. One that it cannot read (here-documents,
// before 1.33) has a Dockerfile.plain beside it that says the same.
func (b *buildah) build(t *testing.T, read *pulled, n, dir string, under map[string]string) made {
	t.Helper()
	ref, file := b.host+"/buildah/"+n, filepath.Join(dir, "Dockerfile")
	if plain := file + ".plain"; exists(plain) {
		file = plain
	}
	b.run(t, "build", "--pull-never", "--format", "docker", "--layers=false", "-f", file, "-t", ref, dir)
	b.run(t, "push", "--tls-verify=false", ref, "docker://"+ref)
	b.run(t, "rmi", ref)
	m, _ := read.image(t, ref, under)
	if mend := exceptions[n]; mend != nil {
		mend(m.Config)
	}
	return m
}

// exceptions are where buildah 1.28 is not as the Dockerfile reference says, and Cove
// and BuildKit are.
var exceptions = map[string]func(config map[string]any){
	// "The SHELL instruction allows the default shell used for the shell form of
	// commands to be overridden", CMD and ENTRYPOINT among them.
	"11-shell": func(config map[string]any) {
		if cmd, ok := config["Cmd"].([]any); ok && len(cmd) == 3 && cmd[0] == "/bin/sh" {
			config["Cmd"] = []any{"/bin/bash", "-o", "pipefail", "-c", cmd[2]}
		}
	},
}

func exists(name string) bool {
	_, err := os.Stat(name)
	return err == nil
}
