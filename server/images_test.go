package server

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"sync"
	"testing"

	"connectrpc.com/connect"

	covev1 "github.com/cove-sandbox/cove/api/cove/v1"
	"github.com/cove-sandbox/cove/sandbox"
	"github.com/cove-sandbox/cove/store"
)

func (w *world) pull(ctx context.Context, ref, name string) (img *covev1.Image, steps []string, err error) {
	return w.pullSeen(ctx, ref, name, func(string) {})
}

// pullSeen is pull with each step told as it comes.
func (w *world) pullSeen(ctx context.Context, ref, name string, seen func(step string)) (img *covev1.Image, steps []string, err error) {
	s, err := w.client.Images.Pull(ctx, connect.NewRequest(&covev1.PullImageRequest{Reference: ref, Name: name}))
	if err != nil {
		return nil, nil, err
	}
	defer s.Close()
	for s.Receive() {
		steps = append(steps, s.Msg().Step)
		seen(s.Msg().Step)
		if s.Msg().Image != nil {
			img = s.Msg().Image
		}
	}
	return img, steps, s.Err()
}

func (w *world) prune(dry bool) *covev1.PruneImagesResponse {
	w.Helper()
	r, err := w.client.Images.Prune(w.Context(), connect.NewRequest(&covev1.PruneImagesRequest{DryRun: dry}))
	if err != nil {
		w.Fatal(err)
	}
	return r.Msg
}

func TestPull(t *testing.T) {
	w := newWorld(t)
	img, steps, err := w.pull(t.Context(), "reg/python", "py")
	if err != nil || img.GetId() != "sha256:python" || strings.Join(img.Names, " ") != "py" || steps[len(steps)-1] != "done" {
		t.Errorf("got %v, steps %v, %v", img, steps, err)
	}
	if sb := w.create(&covev1.SandboxSpec{Image: "py"}); sb.ImageId != "sha256:python" {
		t.Errorf("got %v", sb)
	}
	_, _, err = w.pull(t.Context(), "nowhere/x", "")
	wantError(t, err, sandbox.ErrImageNotFound, "registry")
	if _, _, err := w.pull(t.Context(), "reg/go", ""); err != nil { // named like its reference
		t.Fatal(err)
	}
	w.create(&covev1.SandboxSpec{Image: "reg/go"})
	w.create(&covev1.SandboxSpec{Image: "sha256:go"}) // and by content
}

// A name that moves means the new content at once.
func TestNameMoves(t *testing.T) {
	w := newWorld(t)
	for _, v := range []string{"v1", "v2"} {
		if _, _, err := w.pull(t.Context(), "reg/"+v, "app"); err != nil {
			t.Fatal(err)
		}
		if sb := w.create(&covev1.SandboxSpec{Image: "app"}); sb.ImageId != "sha256:"+v {
			t.Errorf("got %s, want %s", sb.ImageId, v)
		}
	}
}

func TestConcurrentPullsAreOne(t *testing.T) {
	w := newWorld(t)
	w.node.lib.gate = make(chan struct{})
	const n = 5
	var wg, following sync.WaitGroup
	following.Add(n)
	for i := range n {
		wg.Go(func() {
			seen := sync.OnceFunc(following.Done)
			defer seen() // also if it fails
			img, steps, err := w.pullSeen(t.Context(), "reg/big", fmt.Sprint("name", i), func(string) { seen() })
			if got := strings.Join(steps, " "); err != nil || img.GetId() != "sha256:big" || got != "download done" {
				t.Error(img, steps, err)
			}
		})
	}
	following.Wait() // progress is the latest only: each has its own before it goes on
	close(w.node.lib.gate)
	wg.Wait()
	if w.node.lib.pulls() != 1 {
		t.Errorf("%d pulls", w.node.lib.pulls())
	}
	img, err := w.store.GetImage(w.all(), "sha256:big")
	if err != nil || len(img.Names) != n {
		t.Errorf("names %v, %v", img.Names, err)
	}
}

// followers waits until a pull has n.
func followers(w *world, n int) {
	for {
		w.server.images.mu.Lock()
		got := 0
		for _, p := range w.server.images.mu.pulls {
			got += p.waiters
		}
		w.server.images.mu.Unlock()
		if got == n {
			return
		}
		select {
		case <-tick():
		case <-w.Context().Done():
			w.Fatalf("%d followers, want %d", got, n)
		}
	}
}

// A pull goes on while one caller is left, and stops with the last.
func TestPullStopsWithTheLastCaller(t *testing.T) {
	w := newWorld(t)
	w.node.lib.gate, w.node.lib.left = make(chan struct{}), make(chan struct{})
	ctx1, leave1 := context.WithCancel(t.Context())
	ctx2, leave2 := context.WithCancel(t.Context())
	var wg sync.WaitGroup
	for _, ctx := range []context.Context{ctx1, ctx2} {
		wg.Go(func() {
			_, _, err := w.pull(ctx, "reg/big", "")
			wantError(t, err, sandbox.ErrCanceled)
		})
	}
	followers(w, 2)
	leave1()
	followers(w, 1)
	select {
	case <-w.node.lib.left:
		t.Error("stopped under the second caller")
	default:
	}
	leave2()
	<-w.node.lib.left
	wg.Wait()
}

func TestImport(t *testing.T) {
	w := newWorld(t)
	img, err := w.client.ImportImage(t.Context(), "mine", strings.NewReader("rootfs1"), -1)
	if err != nil || img.ID != "sha256:rootfs1" || strings.Join(img.Names, "") != "mine" {
		t.Errorf("got %+v, %v", img, err)
	}
	w.create(&covev1.SandboxSpec{Image: "mine"})
	_, err = w.client.ImportImage(t.Context(), "", strings.NewReader("x"), 1)
	if e := wantError(t, err, sandbox.ErrInvalid); e.Field != "name" {
		t.Errorf("field %q", e.Field)
	}
	small := newWorld(t, func(c *Config) { c.MaxImage = 10 })
	for _, size := range []int64{11, -1} {
		_, err = small.client.ImportImage(t.Context(), "x", strings.NewReader("01234567890"), size)
		wantError(t, err, sandbox.ErrTooLarge)
	}
	if len(small.node.lib.ids(false)) != 1 {
		t.Errorf("left %v", small.node.lib.ids(false))
	}
}

func TestRemoveAndPrune(t *testing.T) {
	w := newWorld(t)
	ctx := t.Context()
	for _, name := range []string{"used", "named", "nameless"} {
		if _, _, err := w.pull(ctx, "reg/"+name, name); err != nil {
			t.Fatal(err)
		}
	}
	w.node.lib.add("orphan") // content without a record, as a crash leaves it
	sb := w.create(&covev1.SandboxSpec{Image: "used"})
	remove := func(name string) {
		t.Helper()
		if _, err := w.client.Images.Remove(ctx, connect.NewRequest(&covev1.RemoveImageRequest{Name: name})); err != nil {
			t.Fatal(err)
		}
	}
	remove("used") // a sandbox keeps its content
	if !w.node.lib.Have("sha256:used") {
		t.Fatal("content taken from under a sandbox")
	}
	_, err := w.createWith(ctx, "", &covev1.SandboxSpec{Image: "used"})
	wantError(t, err, sandbox.ErrImageNotFound)
	remove("sha256:nameless") // by id: all its names, and the content with them
	if w.node.lib.Have("sha256:nameless") {
		t.Error("content without a name was kept")
	}

	if got := w.prune(true); strings.Join(got.Ids, " ") != "sha256:orphan" || got.Bytes != 100 || !w.node.lib.Have("sha256:orphan") {
		t.Errorf("dry run %v", got)
	}
	if got := w.prune(false); strings.Join(got.Ids, " ") != "sha256:orphan" || w.node.lib.Have("sha256:orphan") {
		t.Errorf("pruned %v", got)
	}
	w.kill(sb.Id)
	if got := w.prune(false); strings.Join(got.Ids, " ") != "sha256:used" {
		t.Errorf("pruned %v", got)
	}
	if !w.node.lib.Have("sha256:base") || !w.node.lib.Have("sha256:named") {
		t.Error("named content is gone")
	}
}

// Creates, pulls and prunes of the same image at once: whatever is created has
// its content, whatever is named has it too.
func TestPruneRacesCreate(t *testing.T) {
	w := newWorld(t)
	ctx := t.Context()
	missing := errors.New("content missing")
	w.node.onCreate = func(_ context.Context, sb sandbox.Sandbox) error {
		if !w.node.lib.Have(sb.ImageID) {
			t.Error(missing)
		}
		return nil
	}
	var wg sync.WaitGroup
	for range 4 {
		wg.Go(func() {
			for range 30 {
				if _, _, err := w.pull(ctx, "reg/app", "app"); err != nil && !errors.Is(err, sandbox.ErrConflict) {
					t.Error(err)
				}
				r, err := w.createWith(ctx, "", &covev1.SandboxSpec{Image: "app"})
				if err != nil {
					if !errors.Is(err, sandbox.ErrImageNotFound) {
						t.Error(err)
					}
					continue
				}
				w.kill(r.Sandbox.Id)
			}
		})
		wg.Go(func() {
			for range 30 {
				_, err := w.client.Images.Remove(ctx, connect.NewRequest(&covev1.RemoveImageRequest{Name: "app"}))
				if err != nil && !errors.Is(err, sandbox.ErrImageNotFound) {
					t.Error(err)
				}
				w.prune(false)
			}
		})
	}
	wg.Wait()
	for _, img := range all(t, w.store.ListImages) {
		if len(img.Names) > 0 && !w.node.lib.Have(img.ID) {
			t.Errorf("%v has no content", img.Names)
		}
	}
}

// A create that has resolved its image keeps it until its record does.
func TestPruneWaitsForACreateUnderWay(t *testing.T) {
	w := newWorld(t)
	if _, _, err := w.pull(t.Context(), "reg/app", "app"); err != nil {
		t.Fatal(err)
	}
	reached, gate := make(chan struct{}), make(chan struct{})
	w.node.onCreate = func(context.Context, sandbox.Sandbox) error { close(reached); <-gate; return nil }
	w.store.holdCreates(gate)
	done := make(chan error)
	go func() { _, err := w.createWith(t.Context(), "", &covev1.SandboxSpec{Image: "app"}); done <- err }()
	<-reached
	if _, err := w.client.Images.Remove(t.Context(), connect.NewRequest(&covev1.RemoveImageRequest{Name: "app"})); err != nil {
		t.Fatal(err)
	}
	if got := w.prune(false); len(got.Ids) != 0 || !w.node.lib.Have("sha256:app") {
		t.Errorf("pruned %v under a create", got.Ids)
	}
	close(gate)
	if err := <-done; err != nil {
		t.Fatal(err)
	}
	if got := w.prune(false); len(got.Ids) != 0 {
		t.Errorf("pruned %v under a sandbox", got.Ids)
	}
}

// What the server looks for by its id is that or nothing: a tenant of the
// installation cannot call an image so and have others run it.
func TestIDsAreNoNamesToTheServer(t *testing.T) {
	w := newWorld(t)
	id := "sha256:" + strings.Repeat("0", 64)
	if _, _, err := w.pull(t.Context(), "reg/python", id); err != nil {
		t.Fatal(err)
	}
	if img, release, err := w.server.images.acquire(asServer(t.Context()), id); !errors.Is(err, sandbox.ErrImageNotFound) {
		release()
		t.Errorf("%s for %s, %v", img.ID, id, err)
	}
	img, release, err := w.server.images.acquire(store.In(t.Context(), sandbox.DefaultTenant), id)
	if err != nil {
		t.Fatal(err)
	}
	release()
	if _, release, err = w.server.images.acquire(asServer(t.Context()), img.ID); err != nil {
		t.Fatal(err)
	}
	release()
}
