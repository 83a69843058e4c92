package fake_test

import (
	"context"
	"sync"
	"testing"

	"github.com/cove-sandbox/cove/runtime"
	"github.com/cove-sandbox/cove/runtime/fake"
	"github.com/cove-sandbox/cove/runtime/runtimetest"
	"github.com/cove-sandbox/cove/sandbox"
)

func TestConformance(t *testing.T) {
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
				hosts[dir] = fake.NewHost(dir, fake.Options{})
			}
			return hosts[dir].Open()
		},
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
	if _, err := d.Boot(ctx, "a"); err != boom {
		t.Errorf("boot: %v", err)
	}
	k, err := d.Boot(ctx, "a")
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
