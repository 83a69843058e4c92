package agent

import (
	"archive/tar"
	"bytes"
	"context"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"sync"
	"testing"
	"testing/synctest"

	"github.com/cove-sandbox/cove/node"
	"github.com/cove-sandbox/cove/runtime/fake"
	"github.com/cove-sandbox/cove/sandbox"
	"github.com/cove-sandbox/cove/snapshot"
)

// tarImages makes the file of a directory by copying its tar.
type tarImages struct {
	testImages
	dir string

	mu   sync.Mutex
	made int
}

func (l *tarImages) Derive(context.Context, string, io.Reader, func(sandbox.Progress)) (sandbox.Image, error) {
	return sandbox.Image{}, errBroken
}

func (l *tarImages) FromTar(_ context.Context, r io.Reader, _ func(sandbox.Progress)) (sandbox.Image, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.made++
	id := fmt.Sprint("data-", l.made)
	b, err := io.ReadAll(r)
	if err != nil {
		return sandbox.Image{}, err
	}
	return sandbox.Image{ID: id, Source: sandbox.ImageData}, os.WriteFile(filepath.Join(l.dir, id), b, 0o600)
}

func (l *tarImages) Path(id string) (string, error) {
	if id == baseImage.ID {
		return l.testImages.Path(id)
	}
	return filepath.Join(l.dir, id), nil
}

func (l *tarImages) Delete(_ context.Context, id string) error {
	return os.Remove(filepath.Join(l.dir, id))
}

// The plain form of an encrypted directory is on disk while a kernel has it
// mounted, and at no other time; what wakes or is restored finds it again.
// Where nothing is encrypted it stays for the next.
func TestPlainDirectoriesGoWithTheirKernel(t *testing.T) {
	for _, keys := range []bool{true, false} {
		t.Run(fmt.Sprint("encrypted=", keys), func(t *testing.T) {
			inStateWorld(t, func(t *testing.T, w *world, store *faultyStore) {
				images := &tarImages{dir: t.TempDir()}
				plain := w.cfg
				w.cfg = func(c *Config) { plain(c); c.State.Sealed, c.Images = keys, images }
				if err := w.Node.Close(); err != nil {
					t.Fatal(err)
				}
				w.open()
				var b bytes.Buffer
				tw := tar.NewWriter(&b)
				if err := tw.WriteHeader(&tar.Header{Name: "f", Typeflag: tar.TypeReg, Mode: 0o600}); err != nil || tw.Close() != nil {
					t.Fatal(err)
				}
				dir, err := w.states.pack(sandbox.Content{}, func() (snapshot.Manifest, error) {
					return snapshot.Filesystem{SpoolDir: t.TempDir()}.Pack(t.Context(), store, &b)
				})
				if err != nil {
					t.Fatal(err)
				}
				file := w.mounts.path(dir.Manifest)
				there := func(want bool, when string) {
					t.Helper()
					synctest.Wait()
					if _, err := os.Stat(file); (err == nil) != want {
						t.Errorf("%s: %v", when, err)
					}
				}
				needed := func(context.Context, string) error {
					_, err := os.Stat(file)
					return err
				}

				w.drv.Hook(fake.Restore, needed)
				w.create("a")
				c, _, err := w.Node.Take(t.Context(), "a", node.SnapshotRequest{Kind: sandbox.MemorySnapshot, Keep: true})
				if err != nil {
					t.Fatal(err)
				}
				c.Needs = []string{dir.Manifest} // the fake kernels cannot mount
				from := sandbox.Snapshot{Kind: sandbox.MemorySnapshot, Content: c}
				w.drv.Fail(fake.Restore, errBroken)
				if _, err := w.CreateFrom(t.Context(), smallBox("x"), baseImage, from); err == nil {
					t.Error("created with a broken driver")
				}
				there(!keys, "after a failed create")
				for _, id := range []string{"b", "c"} {
					if _, err := w.CreateFrom(t.Context(), smallBox(id), baseImage, from); err != nil {
						t.Fatal(err)
					}
				}
				there(true, "in use")
				if err := w.Kill(t.Context(), "c", sandbox.End{Cause: sandbox.KilledByUser}); err != nil {
					t.Fatal(err)
				}
				there(true, "in use by another")
				if err := w.Pause(t.Context(), "b", true); err != nil {
					t.Fatal(err)
				}
				there(!keys, "asleep")
				if err := w.touch("b"); err != nil {
					t.Fatal(err)
				}
				there(true, "awake")
				w.crash(func(n int) int { return n })
				w.open()
				w.drv.Hook(fake.Restore, needed)
				there(true, "awake, after a restart")
				if _, err := w.Collect(t.Context(), []string{c.Manifest}); err != nil {
					t.Fatal(err)
				}
				there(true, "awake, after a collection")
				if _, _, err := w.Restore(t.Context(), "a", baseImage, from); err != nil {
					t.Fatal(err)
				}
				for _, id := range []string{"a", "b"} {
					there(true, "before "+id+" goes")
					if err := w.Kill(t.Context(), id, sandbox.End{Cause: sandbox.KilledByUser}); err != nil {
						t.Fatal(err)
					}
				}
				there(!keys, "when all are gone")
				// What a crash left, or a server without keys.
				if err := os.WriteFile(file, nil, 0o600); err != nil {
					t.Fatal(err)
				}
				w.crash(func(n int) int { return n })
				w.open()
				there(!keys, "at the start")
				if left, _ := os.ReadDir(images.dir); len(left) > 0 {
					t.Errorf("in the library: %v", left)
				}
			})
		})
	}
}
