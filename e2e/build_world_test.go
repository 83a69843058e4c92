package e2e

import (
	"bytes"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/cove-sandbox/cove/e2e/world"
)

// builds is a world that images are built in.
type builds struct{ *world.World }

func (b builds) cove(t *testing.T, args ...string) ran {
	t.Helper()
	return ran(b.CLI(t, args...))
}

// files writes a directory of them: a name that ends with "@" is a symlink.
func (b builds) files(t *testing.T, files map[string]string) (dir string) {
	t.Helper()
	dir = t.TempDir()
	for name, text := range files {
		name = filepath.Join(dir, name)
		err := os.MkdirAll(filepath.Dir(name), 0o755)
		if link, ok := strings.CutSuffix(name, "@"); ok && err == nil {
			err = os.Symlink(text, link)
		} else if err == nil {
			err = os.WriteFile(name, []byte(text), 0o644)
		}
		if err != nil {
			t.Fatal(err)
		}
	}
	return dir
}

// dockerfile is a directory with nothing but that.
func (b builds) dockerfile(t *testing.T, lines ...string) (dir string) {
	t.Helper()
	return b.files(t, map[string]string{"Dockerfile": strings.Join(lines, "\n") + "\n"})
}

// refuses builds what is to fail, and demands where and why, and that nothing is left.
func (b builds) refuses(t *testing.T, dir string, args []string, says ...string) {
	t.Helper()
	r := b.cove(t, append(append([]string{"image", "build", "-t", "bad"}, args...), dir)...).want(t, 1)
	for _, s := range says {
		if !strings.Contains(r.Stderr, s) {
			t.Errorf("nothing of %q in:\n%s", s, r.Stderr)
		}
	}
	b.nothingLeft(t)
	b.cove(t, "image", "inspect", "bad").want(t, 1)
}

// nothingLeft demands that no sandbox and no half-made image is there. What is
// taken back goes a moment later.
func (b builds) nothingLeft(t *testing.T) {
	t.Helper()
	world.Eventually(t, 20*time.Second, "the sandboxes of builds are gone", func() bool {
		return strings.TrimSpace(b.cove(t, "ls", "--json").want(t, 0).Stdout) == "[]"
	})
	if left, err := os.ReadDir(filepath.Join(b.Dir, "images", "tmp")); err != nil || len(left) > 0 {
		t.Error("half-made:", left, err)
	}
}

// printed is what a command has printed so far.
type printed struct {
	mu  sync.Mutex
	buf bytes.Buffer
}

func (p *printed) Write(b []byte) (int, error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.buf.Write(b)
}

func (p *printed) String() string {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.buf.String()
}

// start runs cove until it has printed something on stderr.
func (b builds) start(t *testing.T, until string, args ...string) (*exec.Cmd, *printed) {
	t.Helper()
	cmd, out := b.Command(t, args...), &printed{}
	cmd.Stderr = out
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	world.Eventually(t, time.Minute, "cove "+strings.Join(args, " ")+" prints "+until, func() bool { return strings.Contains(out.String(), until) })
	return cmd, out
}
