package node

import (
	"fmt"
	"os"
	"sync"
	"testing"

	"github.com/cove-sandbox/cove/cas"
	"github.com/cove-sandbox/cove/cas/local"
	"github.com/cove-sandbox/cove/runtime"
	"github.com/cove-sandbox/cove/snapshot"
)

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
		content, err := c.store(t.Context(), path, cp)
		undo()
		if err == nil {
			err = snapshot.Verify(t.Context(), st, cas.ID(content.Manifest))
		}
		if err != nil {
			t.Errorf("store %d: %v", i, err)
		}
		// Garbage at once: the next one finds some of it there.
		c.mu.Lock()
		delete(c.pending, cas.ID(content.Manifest))
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
