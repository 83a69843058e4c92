package ship

import (
	"fmt"
	"io"
	"testing"
	"time"

	"github.com/cove-sandbox/cove/sandbox"
)

// benchStep is a step as coding agents make them: a command of 73 characters that
// prints 541 (research/rl-frameworks.md, medians).
func benchStep(i int) sandbox.Step {
	out := make([]byte, 541)
	for j := range out {
		out[j] = byte('a' + (i*31+j*7)%26)
	}
	return sandbox.Step{ID: fmt.Sprintf("run-%d", i), Seq: int64(i), Rollout: sandbox.Rollout{Run: "run", Group: fmt.Sprintf("g%d", i/160), Episode: fmt.Sprintf("e%d", i/20)},
		Sandbox: fmt.Sprintf("sb%d", i/20), Reset: 1, ExecID: fmt.Sprintf("x%d", i), Command: fmt.Sprintf("cd /work/repo && python -m pytest -x tests/test_module_%04d.py 2>&1 | tail", i%1000),
		StartedAt: time.Unix(1700000000+int64(i), 0), EndedAt: time.Unix(1700000001+int64(i), 0), End: &sandbox.End{Cause: sandbox.Exited}, Duration: time.Second, CPUTime: 300 * time.Millisecond,
		PeakMemory: 64 << 20, BytesOut: 541, Stdout: sandbox.StepOutput{Head: out}}
}

// BenchmarkParquet writes 100,000 steps.
func BenchmarkParquet(b *testing.B) {
	steps := make([]sandbox.Step, 1000)
	for i := range steps {
		steps[i] = benchStep(i)
	}
	for b.Loop() {
		w := NewParquetWriter(io.Discard)
		for i := range 100_000 {
			if err := w.Write(StepRecord("t", steps[i%len(steps)])); err != nil {
				b.Fatal(err)
			}
		}
		if err := w.Close(); err != nil {
			b.Fatal(err)
		}
	}
}
