package gvisor_test

import (
	"context"
	"fmt"
	"testing"
	"time"

	"github.com/cove-sandbox/cove/image/imagetest"
	"github.com/cove-sandbox/cove/internal/testbin"
	"github.com/cove-sandbox/cove/runtime"
	"github.com/cove-sandbox/cove/runtime/gvisor"
	"github.com/cove-sandbox/cove/sandbox"
)

// BenchmarkLife reports what each step of a sandbox's life costs the driver.
func BenchmarkLife(b *testing.B) {
	lib, img := imagetest.Base(b)
	path, err := lib.Path(img.ID)
	if err != nil {
		b.Fatal(err)
	}
	d, err := gvisor.Open(context.Background(), gvisor.Config{Dir: b.TempDir(), RunscPath: testbin.Runsc(b), GuestPath: testbin.Guest(b)})
	if err != nil {
		b.Fatal(err)
	}
	defer d.Close()
	c := runtime.Container{Rootfs: runtime.Rootfs{Path: path, Env: img.Config.Env},
		Resources: sandbox.Resources{MilliCPU: 2000, MemoryLimit: 512 << 20, Disk: 1 << 30, Pids: 4096}}
	spent := map[string]time.Duration{}
	step := func(name string, f func() error) {
		t := time.Now()
		if err := f(); err != nil {
			b.Fatal(name, err)
		}
		spent[name] += time.Since(t)
	}
	ctx := context.Background()
	n := 0
	for b.Loop() {
		var k runtime.Kernel
		n++
		exec := func() error {
			n++
			return k.Guest().Start(ctx, sandbox.ProcessSpec{ExecID: fmt.Sprint(n), Args: []string{"true"}}, 0, func(sandbox.ProcessEvent) error { return nil })
		}
		step("boot", func() (err error) { k, err = d.Boot(ctx, fmt.Sprint("k", n)); return err })
		step("attach", func() error { return k.Attach(ctx, c) })
		step("exec1", exec)
		for range 5 {
			step("exec", exec)
		}
		step("reset", func() error { return k.Reset(ctx, c) })
		step("exec1reset", exec)
		step("destroy", func() error { return k.Destroy(ctx) })
	}
	spent["exec"] /= 5
	for name, t := range spent {
		b.ReportMetric(float64(t.Microseconds())/1000/float64(b.N), name+"-ms")
	}
	b.ReportMetric(0, "ns/op")
}
