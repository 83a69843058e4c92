package gvisor_test

import (
	"context"
	"errors"
	"testing"

	"github.com/cove-sandbox/cove/runtime"
	"github.com/cove-sandbox/cove/sandbox"
)

// A kernel that is vacated has given back what its sandboxes had, or is not used again: the next has
// a limit that what is kept would count against.
func TestVacatedIsLight(t *testing.T) {
	ctx := t.Context()
	d := open(t, t.TempDir())
	defer d.Close()
	c := runtime.Container{Rootfs: rootfs(t), Resources: sandbox.Resources{MilliCPU: 2000, MemoryLimit: 1 << 30, Disk: 512 << 20, Pids: 300}}
	for _, use := range []struct {
		name, command string
		times         int
		heavy         bool
	}{
		{name: "small", command: "python3 -c pass", times: 12},
		{name: "memory", command: "python3 -c 'bytes(100 << 20).translate(bytes([1] * 256))'", times: 2},
		{name: "processes", command: "for i in $(seq 250); do sleep 1000 & done; kill $(jobs -p)", times: 1, heavy: true},
		{name: "shm", command: "head -c 60M /dev/zero | tr '\\0' x > /dev/shm/x", times: 1, heavy: true},
	} {
		t.Run(use.name, func(t *testing.T) {
			k, err := d.Boot(ctx, use.name, runtime.Class{})
			if err != nil {
				t.Fatal(err)
			}
			defer k.Destroy(context.Background())
			for i := range use.times {
				if err := k.Attach(ctx, c); err != nil {
					t.Fatal(err)
				}
				if err := k.Guest().Start(ctx, sandbox.ProcessSpec{ExecID: "use", Command: use.command, User: "root"}, 0, func(sandbox.ProcessEvent) error { return nil }); err != nil {
					t.Fatal(err)
				}
				k.Guest().Retire()
				err := k.(runtime.Reuser).Vacate(ctx)
				st, serr := k.Stats(ctx)
				if serr != nil {
					t.Fatal(serr)
				}
				t.Logf("%d: %d KiB, %v", i, st.Memory>>10, err)
				switch {
				case use.heavy && !errors.Is(err, sandbox.ErrPrecondition):
					t.Errorf("vacated with %d MiB: %v", st.Memory>>20, err)
				case !use.heavy && (err != nil || st.Memory > 48<<20):
					t.Fatalf("use %d: %v, with %d MiB", i, err, st.Memory>>20)
				}
			}
		})
	}
}
