package gvisor_test

import (
	"archive/tar"
	"bytes"
	"context"
	"fmt"
	"slices"
	"testing"
	"time"

	"github.com/cove-sandbox/cove/runtime"
	"github.com/cove-sandbox/cove/sandbox"
)

// BenchmarkGrader is what a grader costs the driver, by the medians of its steps: a
// rehearsed kernel takes its container, forty files by the sentry and by the guest in
// turn, and a command.
func BenchmarkGrader(b *testing.B) {
	d, c := measured(b)
	defer d.Close()
	var work bytes.Buffer
	tw := tar.NewWriter(&work)
	_ = tw.WriteHeader(&tar.Header{Typeflag: tar.TypeDir, Name: "src/", Mode: 0o755, ModTime: time.Now()})
	for i := range 41 {
		body := fmt.Sprintln(i)
		_ = tw.WriteHeader(&tar.Header{Typeflag: tar.TypeReg, Name: fmt.Sprint("src/", i, ".py"), Mode: 0o644, Size: int64(len(body)), ModTime: time.Now()})
		_, _ = tw.Write([]byte(body))
	}
	if err := tw.Close(); err != nil {
		b.Fatal(err)
	}
	spent := map[string][]time.Duration{}
	ctx := context.Background()
	n := 0
	for b.Loop() {
		n++
		k, err := d.Boot(ctx, fmt.Sprint("g", n), runtime.Class{})
		if err != nil {
			b.Fatal(err)
		}
		if err := k.(runtime.Rehearser).Rehearse(ctx); err != nil {
			b.Fatal(err)
		}
		g := k.Guest()
		step := func(name string, f func() error) {
			t := time.Now()
			if err := f(); err != nil {
				b.Fatal(name, err)
			}
			spent[name] = append(spent[name], time.Since(t))
		}
		own := sandbox.WriteOptions{User: "64002:64002", Parents: true}
		step("1attach", func() error { return k.Attach(ctx, c) })
		if n%2 == 0 {
			step("4unpack", func() error {
				_, err := k.(runtime.Unpacker).Unpack(ctx, runtime.Unpacking{Dir: "/work", UID: 64002, GID: 64002, Remove: []string{"/work/src"}, Open: []string{"/work"}}, work.Bytes())
				return err
			})
		} else { // as without it
			step("2stat", func() error { _, _ = g.Stat(ctx, "/work"); return nil })
			step("3untar", func() error { return g.Untar(ctx, "/work", work.Bytes(), own) })
		}
		step("6exec", func() error {
			return g.Start(ctx, sandbox.ProcessSpec{ExecID: "g", Args: []string{"true"}}, 0, func(sandbox.ProcessEvent) error { return nil })
		})
		if err := k.Destroy(ctx); err != nil {
			b.Fatal(err)
		}
	}
	for name, ts := range spent {
		slices.Sort(ts)
		b.ReportMetric(float64(ts[len(ts)/2].Microseconds())/1000, name+"-ms")
		b.ReportMetric(float64(ts[len(ts)/10].Microseconds())/1000, name+"-p10-ms")
	}
	b.ReportMetric(0, "ns/op")
}
