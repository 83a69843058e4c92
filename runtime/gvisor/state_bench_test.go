package gvisor_test

import (
	"context"
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/cove-sandbox/cove/internal/testbin"
	"github.com/cove-sandbox/cove/runtime"
	"github.com/cove-sandbox/cove/runtime/gvisor"
	"github.com/cove-sandbox/cove/sandbox"
)

// BenchmarkState reports what pausing, checkpoints and restores cost, for a
// Python process that holds some memory, interleaved with what they compare
// to: attaching to a booted kernel. Medians, in milliseconds and MiB.
func BenchmarkState(b *testing.B) {
	image := rootfs(b)
	for _, size := range []int{5, 100} {
		b.Run(fmt.Sprintf("%dMB", size), func(b *testing.B) {
			d, err := gvisor.Open(context.Background(), gvisor.Config{Dir: b.TempDir(), RunscPath: testbin.Runsc(b), GuestPath: testbin.Guest(b), DebugLog: os.Getenv("COVE_TEST_SENTRY_LOG")})
			if err != nil {
				b.Fatal(err)
			}
			defer d.Close()
			c := runtime.Container{Rootfs: image,
				Resources: sandbox.Resources{MilliCPU: 2000, MemoryLimit: 512 << 20, Disk: 1 << 30, Pids: 4096}}
			benchState(b, d, c, size)
		})
	}
}

func benchState(b *testing.B, d *gvisor.Driver, c runtime.Container, size int) {
	ctx := context.Background()
	spent := map[string][]float64{}
	step := func(name string, f func() error) {
		b.Helper()
		t := time.Now()
		if err := f(); err != nil {
			b.Fatal(name, err)
		}
		spent[name+"-ms"] = append(spent[name+"-ms"], float64(time.Since(t).Microseconds())/1000)
	}
	n := 0
	exec := func(k runtime.Kernel) func() error {
		return func() error {
			n++
			return k.Guest().Start(ctx, sandbox.ProcessSpec{ExecID: fmt.Sprint(n), Args: []string{"true"}}, 0, func(sandbox.ProcessEvent) error { return nil })
		}
	}
	id := func() string { n++; return fmt.Sprint("k", n) }
	must := func(err error) {
		b.Helper()
		if err != nil {
			b.Fatal(err)
		}
	}
	source, err := d.Boot(ctx, id(), runtime.Class{})
	must(err)
	defer source.Destroy(ctx)
	must(source.Attach(ctx, c))
	hold := sandbox.ProcessSpec{ExecID: "hold", Args: []string{"python3", "-uc", fmt.Sprintf("import os,time\nx=os.urandom(%d<<20)\nos.write(1,b'up')\nt=time.monotonic()\nw=0\nwhile True:\n time.sleep(.001)\n u=time.monotonic()\n w=max(w,u-t)\n t=u\n if os.path.exists('/tmp/ask'):\n  os.remove('/tmp/ask'); os.write(1,str(w).encode()); w=0", size)}}
	lines := make(chan string, 100)
	go source.Guest().Start(ctx, hold, 0, func(e sandbox.ProcessEvent) error {
		if e.Output != nil {
			lines <- strings.TrimSpace(string(e.Output.Data))
		}
		return nil
	})
	<-lines
	must(exec(source)())
	for b.Loop() {
		plain, err := d.Boot(ctx, id(), runtime.Class{})
		must(err)
		blank, err := d.Blank(ctx, id(), runtime.Class{})
		must(err)
		t := time.Now()
		step("attach", func() error { return plain.Attach(ctx, c) })
		step("attach+exec1", exec(plain))
		spent["attach+exec1-ms"][len(spent["attach+exec1-ms"])-1] = float64(time.Since(t).Microseconds()) / 1000
		must(plain.Destroy(ctx))

		for range 5 {
			step("pause", func() error { return source.(runtime.Pauser).Pause(ctx) })
			step("resume", func() error { return source.(runtime.Pauser).Resume(ctx) })
			must(source.Guest().Ping(ctx)) // awake: nobody pauses what was resumed a millisecond ago
		}
		_, err = source.Guest().WriteFile(ctx, "/tmp/ask", nil, sandbox.WriteOptions{})
		must(err)
		<-lines

		dir := b.TempDir()
		var cp runtime.Checkpoint
		step("checkpoint", func() (err error) {
			cp, err = source.(runtime.Checkpointer).Checkpoint(ctx, dir, runtime.CheckpointOptions{})
			return err
		})
		_, err = source.Guest().WriteFile(ctx, "/tmp/ask", nil, sandbox.WriteOptions{})
		must(err)
		stopped, err := strconv.ParseFloat(<-lines, 64)
		must(err)
		spent["stopped-ms"] = append(spent["stopped-ms"], stopped*1000)
		for _, f := range cp.Files {
			st, err := os.Stat(filepath.Join(dir, f))
			must(err)
			spent[f+"-MiB"] = append(spent[f+"-MiB"], float64(st.Size())/(1<<20))
		}

		var child runtime.Kernel
		t = time.Now()
		step("restore", func() (err error) { child, err = blank.(runtime.Restorer).Restore(ctx, dir, cp, c); return err })
		step("restore+exec1", exec(child))
		spent["restore+exec1-ms"][len(spent["restore+exec1-ms"])-1] = float64(time.Since(t).Microseconds()) / 1000
		step("exec2", exec(child))
		s, err := child.Stats(ctx)
		must(err)
		spent["child-mem-MiB"] = append(spent["child-mem-MiB"], float64(s.Memory)/(1<<20))
		spent["child-pss-MiB"] = append(spent["child-pss-MiB"], pss(child))
		must(child.Destroy(ctx))
		must(os.RemoveAll(dir))
	}
	for name, v := range spent {
		slices.Sort(v)
		b.ReportMetric(v[len(v)/2], name)
	}
	b.ReportMetric(0, "ns/op")
}

// pss of a kernel's processes, in MiB.
func pss(k runtime.Kernel) float64 {
	var saved struct{ PID int }
	_ = json.Unmarshal(k.Handle().Data, &saved)
	var sum int
	for _, pid := range strings.Fields(string(readFile(fmt.Sprintf("/proc/%d/task/%d/children", saved.PID, saved.PID))) + " " + fmt.Sprint(saved.PID)) {
		for _, line := range strings.Split(string(readFile("/proc/"+pid+"/smaps_rollup")), "\n") {
			if f := strings.Fields(line); len(f) > 1 && f[0] == "Pss:" {
				kb, _ := strconv.Atoi(f[1])
				sum += kb
			}
		}
	}
	return float64(sum) / 1024
}

func readFile(p string) []byte {
	b, _ := os.ReadFile(p)
	return b
}
