package server

import (
	"archive/tar"
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"net/http"
	"sync"
	"sync/atomic"
	"testing"

	"github.com/cove-sandbox/cove/sandbox"
)

// The rollouts of an epoch send the same tests at the same time: they are unpacked
// once, and all are given the same snapshot.
func TestTestsSentByManyAreMadeOnce(t *testing.T) {
	w := newWorld(t)
	w.node.most = 100
	var made atomic.Int64
	w.node.onCreate = func(context.Context, sandbox.Sandbox) error { made.Add(1); return nil }
	var b bytes.Buffer
	tw := tar.NewWriter(&b)
	if err := tw.WriteHeader(&tar.Header{Name: "check.sh", Mode: 0o644, Size: 5}); err != nil {
		t.Fatal(err)
	}
	_, _ = tw.Write([]byte("true\n"))
	if err := tw.Close(); err != nil {
		t.Fatal(err)
	}
	sum := sha256.Sum256(b.Bytes())
	answers := make([]string, 16)
	var wg sync.WaitGroup
	for i := range answers {
		wg.Go(func() {
			resp, body := w.http("PUT", "/v1/grades/tests?digest="+hex.EncodeToString(sum[:]), bytes.NewReader(b.Bytes()))
			if resp.StatusCode != http.StatusOK {
				t.Errorf("%d %s", resp.StatusCode, body)
			}
			answers[i] = body
		})
	}
	wg.Wait()
	for _, a := range answers {
		if a != answers[0] {
			t.Errorf("%s and %s", a, answers[0])
		}
	}
	if n := made.Load(); n != 1 {
		t.Errorf("%d sandboxes unpacked the same tests", n)
	}
}

// A collection lists the whole store. The files of a grade were never in it.
func TestWhatWasNeverStoredWantsNoCollection(t *testing.T) {
	w := newWorld(t)
	begun, gate := make(chan struct{}), make(chan struct{})
	var once sync.Once
	w.node.onCollect = func(context.Context) error {
		once.Do(func() { close(begun); <-gate })
		return nil
	}
	w.server.content.want()
	<-begun
	wanted := func() bool {
		w.server.content.mu.Lock()
		defer w.server.content.mu.Unlock()
		return w.server.content.mu.next != nil
	}
	w.server.letGo(sandbox.Content{Plain: "files-1"})
	if wanted() {
		t.Error("a collection is wanted for files that were not stored")
	}
	w.server.letGo(sandbox.Content{Manifest: "0123"})
	if !wanted() {
		t.Error("no collection is wanted for content of the store")
	}
	close(gate)
}
