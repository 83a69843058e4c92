package gvisor_test

import (
	"bytes"
	"context"
	"testing"

	"github.com/cove-sandbox/cove/runtime"
	"github.com/cove-sandbox/cove/sandbox"
)

// The network stack belongs to the kernel and outlives a reset, so root inside
// must not be able to set it up for the next episode.
func TestKernelSettingsAreReadOnlyInside(t *testing.T) {
	ctx := t.Context()
	d := open(t, t.TempDir())
	defer d.Close()
	k, err := d.Boot(ctx, "k", runtime.Class{})
	if err != nil {
		t.Fatal(err)
	}
	defer k.Destroy(context.Background())
	err = k.Attach(ctx, runtime.Container{Rootfs: rootfs(t),
		Resources: sandbox.Resources{MilliCPU: 1000, MemoryLimit: 256 << 20, Disk: 64 << 20, Pids: 100}})
	if err != nil {
		t.Fatal(err)
	}
	var out bytes.Buffer
	script := `cat /proc/sys/net/ipv4/tcp_rmem; echo "4096 8192 16384" 2>/dev/null > /proc/sys/net/ipv4/tcp_rmem && echo WRITTEN
umount /proc/sys 2>/dev/null && echo UNMOUNTED
mount -o remount,rw /proc/sys 2>/dev/null && echo REMOUNTED
cat /proc/sys/net/ipv4/tcp_rmem; echo 7 > /proc/self/oom_score_adj && echo own`
	err = k.Guest().Start(ctx, sandbox.ProcessSpec{ExecID: "x", Command: script}, 0, func(e sandbox.ProcessEvent) error {
		if e.Output != nil && e.Output.Stream == sandbox.Stdout {
			out.Write(e.Output.Data)
		}
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	lines := bytes.Split(bytes.TrimSpace(out.Bytes()), []byte("\n"))
	if len(lines) != 3 || !bytes.Equal(lines[0], lines[1]) || string(lines[2]) != "own" {
		t.Errorf("root inside changed the kernel's settings, or cannot read them:\n%s", out.Bytes())
	}
}
