package fake_test

import (
	"archive/tar"
	"bytes"
	"context"
	"errors"
	"os"
	"path/filepath"
	"sync"
	"testing"

	"github.com/cove-sandbox/cove/runtime"
	"github.com/cove-sandbox/cove/runtime/fake"
	"github.com/cove-sandbox/cove/runtime/runtimetest"
	"github.com/cove-sandbox/cove/sandbox"
)

func TestConformance(t *testing.T) {
	t.Run("plain", func(t *testing.T) { conform(t, fake.Options{}, runtime.Class{}) })
	t.Run("fixed size", func(t *testing.T) {
		conform(t, fake.Options{Name: "fixed", Devices: true, FixedSize: true},
			runtime.Class{Name: "sized", Size: sandbox.Resources{MilliCPU: 1000, Memory: 1 << 30}})
	})
}

func conform(t *testing.T, opts fake.Options, class runtime.Class) {
	var mu sync.Mutex
	hosts := map[string]*fake.Host{} // a directory is a machine
	byKernel := func(id string) *fake.Host {
		mu.Lock()
		defer mu.Unlock()
		for _, h := range hosts {
			for _, k := range h.IDs() {
				if k == id {
					return h
				}
			}
		}
		return nil
	}
	runtimetest.Run(t, runtimetest.Factory{
		Open: func(t *testing.T, dir string) runtime.Driver {
			mu.Lock()
			defer mu.Unlock()
			if hosts[dir] == nil {
				hosts[dir] = fake.NewHost(dir, opts)
			}
			return hosts[dir].Open()
		},
		Class: class,
		Crash: func(d runtime.Driver) { d.(*fake.Driver).Crash() },
		Rootfs: func(t *testing.T) runtime.Rootfs {
			return runtime.Rootfs{Env: []string{"PATH=/usr/bin:/bin"}}
		},
		Kill: func(t *testing.T, k runtime.Kernel) {
			if !byKernel(k.ID()).Kill(k.ID(), runtime.Exit{Cause: sandbox.Infra, Detail: "killed by the test"}) {
				t.Errorf("kernel %s was not alive", k.ID())
			}
		},
	})
}

func TestFaults(t *testing.T) {
	ctx := context.Background()
	h := fake.NewHost("", fake.Options{Bare: true})
	d := h.Open()
	boom := sandbox.Errorf(sandbox.Unavailable, "test", "boom")
	d.Fail(fake.Boot, boom)
	if _, err := d.Boot(ctx, "a", runtime.Class{}); err != boom {
		t.Errorf("boot: %v", err)
	}
	k, err := d.Boot(ctx, "a", runtime.Class{})
	if err != nil {
		t.Fatal(err)
	}
	d.Fail(fake.Attach, boom)
	d.Heal()
	if err := k.Attach(ctx, runtime.Container{}); err != nil {
		t.Errorf("attach after heal: %v", err)
	}
	d.Crash()
	if err := k.Destroy(ctx); err == nil {
		t.Error("a crashed process destroyed a kernel")
	}
	if ids := h.IDs(); len(ids) != 1 {
		t.Errorf("kernels %v", ids)
	}
	h.Reboot()
	select {
	case <-k.Done():
	default:
		t.Error("it survived a reboot")
	}
}

// An image is a tar; what runs begins anew after a restore; a kernel is found by its
// sandbox.
func TestImagesAndWhatRan(t *testing.T) {
	ctx := t.Context()
	var b bytes.Buffer
	w := tar.NewWriter(&b)
	if err := errors.Join(w.WriteHeader(&tar.Header{Name: "etc/motd", Mode: 0o644, Size: 5}), func() error { _, err := w.Write([]byte("hello")); return err }(), w.Close()); err != nil {
		t.Fatal(err)
	}
	image := filepath.Join(t.TempDir(), "image.tar")
	if err := os.WriteFile(image, b.Bytes(), 0o600); err != nil {
		t.Fatal(err)
	}
	h := fake.NewHost(t.TempDir(), fake.Options{Mount: true})
	defer h.Close()
	d := h.Open()
	defer d.Close()
	k, err := d.Boot(ctx, "k1", runtime.Class{})
	if err != nil {
		t.Fatal(err)
	}
	c := runtime.Container{Sandbox: "box", Rootfs: runtime.Rootfs{Path: image, Env: []string{"PATH=/usr/bin:/bin"}}}
	for _, step := range []func(context.Context, runtime.Container) error{k.Attach, k.Reset} {
		if err := step(ctx, c); err != nil {
			t.Fatal(err)
		}
		if got, _, err := k.Guest().ReadFile(ctx, "/etc/motd", 0, 0); err != nil || string(got) != "hello" {
			t.Errorf("the image has %q, %v", got, err)
		}
	}
	if err := k.(runtime.Mounter).Mount(ctx, image, "/mnt/it"); err != nil {
		t.Fatal(err)
	}
	if got, _, err := k.Guest().ReadFile(ctx, "/mnt/it/etc/motd", 0, 0); err != nil || string(got) != "hello" {
		t.Errorf("mounted: %q, %v", got, err)
	}
	begun := errors.New("begun")
	printed := func(ev sandbox.ProcessEvent) error {
		if ev.Output != nil && string(ev.Output.Data) == "here\n" && ev.Output.Offset == 0 {
			return begun
		}
		return nil
	}
	if err := k.Guest().Start(ctx, sandbox.ProcessSpec{ExecID: "runs", Command: "echo here; exec sleep 1000"}, 0, printed); !errors.Is(err, begun) {
		t.Fatal(err)
	}
	if err := k.Guest().Start(ctx, sandbox.ProcessSpec{ExecID: "ran", Args: []string{"true"}}, 0, func(sandbox.ProcessEvent) error { return nil }); err != nil {
		t.Fatal(err)
	}
	dir := t.TempDir()
	cp, err := k.(runtime.Checkpointer).Checkpoint(ctx, dir, runtime.CheckpointOptions{Stop: true})
	if err != nil {
		t.Fatal(err)
	}
	if id := h.Kernel("box"); id != "" {
		t.Errorf("box is stopped and in %q", id)
	}
	blank, err := d.Blank(ctx, "k2", runtime.Class{})
	if err != nil {
		t.Fatal(err)
	}
	k, err = blank.(runtime.Restorer).Restore(ctx, dir, cp, c)
	if err != nil {
		t.Fatal(err)
	}
	if id := h.Kernel("box"); id != "k2" {
		t.Errorf("box is in %q", id)
	}
	if err := k.Guest().Attach(ctx, "runs", 0, printed); !errors.Is(err, begun) {
		t.Error(err)
	}
	if err := k.Guest().Attach(ctx, "ran", 0, printed); !errors.Is(err, sandbox.ErrNotFound) {
		t.Errorf("what had ended: %v", err)
	}
}
