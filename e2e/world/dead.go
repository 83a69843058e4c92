package world

import (
	"context"
	"os"
	"os/exec"
	"path/filepath"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

const dirPrefix = "cove-e2e-"

// lockDir marks dir as belonging to a living test.
func lockDir(dir string) (*os.File, error) {
	f, err := os.OpenFile(filepath.Join(dir, "lock"), os.O_CREATE|os.O_RDWR, 0o600)
	if err != nil {
		return nil, err
	}
	if err := unix.Flock(int(f.Fd()), unix.LOCK_EX|unix.LOCK_NB); err != nil {
		f.Close()
		return nil, err
	}
	return f, nil
}

// sweepDead removes the worlds of test processes that died: a panic or a
// kill -9 leaves kernels running, which no t.Cleanup sees.
func (w *World) sweepDead(t testing.TB) {
	dirs, _ := filepath.Glob(filepath.Join(os.TempDir(), dirPrefix+"*"))
	for _, dir := range dirs {
		st, err := os.Stat(filepath.Join(dir, "lock"))
		if err != nil || time.Since(st.ModTime()) < 10*time.Second {
			continue // being made right now, or not ours
		}
		lock, err := lockDir(dir)
		if err != nil {
			continue // its test lives
		}
		t.Logf("removing the world of a dead test: %s", dir)
		(&World{Dir: filepath.Join(dir, "d"), bin: w.bin, opts: w.opts}).reap(t)
		if err := os.RemoveAll(dir); err != nil {
			t.Logf("removing %s: %v", dir, err)
		}
		lock.Close()
	}
}

// reap removes every kernel of the data directory, whoever made it.
func (w *World) reap(t testing.TB) {
	ctx, cancel := context.WithTimeout(context.Background(), 2*time.Minute)
	defer cancel()
	cmd := exec.CommandContext(ctx, filepath.Join(w.bin, "cove"), "reap", "--data", w.Dir)
	cmd.Env = w.environ()
	if out, err := cmd.CombinedOutput(); err != nil {
		t.Logf("cove reap --data %s: %v\n%s", w.Dir, err, out)
	}
}
