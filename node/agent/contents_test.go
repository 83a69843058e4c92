package agent

import (
	"archive/tar"
	"bytes"
	"errors"
	"fmt"
	"io"
	"os"
	"sync"
	"testing"

	"github.com/cove-sandbox/cove/cas"
	"github.com/cove-sandbox/cove/cas/castest"
	"github.com/cove-sandbox/cove/cas/local"
	"github.com/cove-sandbox/cove/runtime"
	"github.com/cove-sandbox/cove/sandbox"
	"github.com/cove-sandbox/cove/snapshot"
)

// Of a reader that stops and content that cannot be read, the one that came
// first is the error.
func TestPipedSaysWhoFailed(t *testing.T) {
	dir := t.TempDir()
	st, err := local.Open(dir+"/state", local.Options{})
	if err != nil {
		t.Fatal(err)
	}
	defer st.Close()
	c, err := openContents(StateConfig{Store: st, Plain: dir + "/plain"})
	if err != nil {
		t.Fatal(err)
	}
	var b bytes.Buffer
	tw := tar.NewWriter(&b)
	for i := range 3 {
		const size = 2 << 20
		if err := tw.WriteHeader(&tar.Header{Name: fmt.Sprint("f", i), Typeflag: tar.TypeReg, Mode: 0o600, Size: size}); err != nil {
			t.Fatal(err)
		}
		if _, err := tw.Write(castest.Content(uint64(i), size)); err != nil {
			t.Fatal(err)
		}
	}
	if err := tw.Close(); err != nil {
		t.Fatal(err)
	}
	content, err := c.pack(sandbox.Content{}, func() (snapshot.Manifest, error) {
		return snapshot.Filesystem{SpoolDir: dir}.Pack(t.Context(), st, &b)
	})
	if err != nil {
		t.Fatal(err)
	}
	read := func(n int64, then error) func(io.Reader) error {
		return func(r io.Reader) error {
			if _, err := io.CopyN(io.Discard, r, n); err != nil && !errors.Is(err, io.EOF) {
				return fmt.Errorf("reading: %w", err)
			}
			return then
		}
	}
	full := sandbox.Errorf(sandbox.DiskFull, "derive", "no room")
	if err := c.piped(t.Context(), content, read(1000, full)); !errors.Is(err, sandbox.ErrDiskFull) {
		t.Errorf("a reader whose disk is full: %v", err)
	}
	if err := c.piped(t.Context(), content, read(1000, nil)); err != nil {
		t.Errorf("a reader that needs no more: %v", err)
	}
	if err := c.piped(t.Context(), content, read(1<<30, nil)); err != nil {
		t.Errorf("a reader of all of it: %v", err)
	}
	// Now a blob of it goes.
	if err := st.List(t.Context(), func(i cas.Info) error {
		if i.Size == 2<<20 {
			return st.Delete(t.Context(), i.ID)
		}
		return nil
	}); err != nil {
		t.Fatal(err)
	}
	err = c.piped(t.Context(), content, read(1<<30, full))
	if cls := sandbox.ClassOf(err); cls != sandbox.Corrupt && cls != sandbox.NotFound {
		t.Errorf("content that is not whole: %v", err)
	}
}

func TestKeepPlain(t *testing.T) {
	for _, c := range []struct{ limit, free, want int64 }{
		{1 << 30, 100 << 30, 1 << 30},
		{1 << 30, 1 << 30, 256 << 20}, // the cache must not be what fills a disk
		{1 << 30, 0, 0},
		{-1, 100 << 30, 0},
	} {
		if got := keepPlain(c.limit, c.free); got != c.want {
			t.Errorf("limit %d, %d free: %d, want %d", c.limit, c.free, got, c.want)
		}
	}
}

// What was stored while a collection ran is whole, though no list of roots that
// the collection could have seen has it. A sandbox that went cold in the middle
// of one was lost before.
func TestCollectBesideAStore(t *testing.T) {
	dir := t.TempDir()
	st, err := local.Open(dir+"/state", local.Options{})
	if err != nil {
		t.Fatal(err)
	}
	defer st.Close()
	c, err := openContents(StateConfig{Store: st, Plain: dir + "/plain"})
	if err != nil {
		t.Fatal(err)
	}
	stop := make(chan struct{})
	var wg sync.WaitGroup
	for range 2 {
		wg.Go(func() {
			for {
				select {
				case <-stop:
					return
				default:
				}
				if _, _, err := c.collect(t.Context(), nil); err != nil {
					t.Error(err)
					return
				}
			}
		})
	}
	for i := range 60 {
		path, undo, err := c.scratch()
		if err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(path+"/checkpoint.img", fmt.Appendf(nil, "memory %d", i%7), 0o600); err != nil {
			t.Fatal(err)
		}
		cp := runtime.Checkpoint{Files: []string{"checkpoint.img"}}
		if err := describe(path, cp); err != nil {
			t.Fatal(err)
		}
		content, err := c.store(t.Context(), path, cp, nil)
		undo()
		if err == nil {
			err = snapshot.Verify(t.Context(), st, cas.ID(content.Manifest))
		}
		if err != nil {
			t.Errorf("store %d: %v", i, err)
		}
		// Garbage at once: the next one finds some of it there.
		c.mu.Lock()
		delete(c.mu.pending, cas.ID(content.Manifest))
		c.mu.Unlock()
	}
	close(stop)
	wg.Wait()
	// Alone it takes what is a moment old.
	if freed, _, err := c.collect(t.Context(), nil); err != nil {
		t.Errorf("freed %d, %v", freed, err)
	}
	if err := st.List(t.Context(), func(i cas.Info) error { return fmt.Errorf("%s is left", i.ID) }); err != nil {
		t.Error(err)
	}
}
