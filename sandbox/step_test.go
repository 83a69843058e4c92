package sandbox

import (
	"bytes"
	"math/rand/v2"
	"testing"
)

// However a stream comes in pieces, its first and its last bytes are kept.
func TestStepCapture(t *testing.T) {
	rng := rand.New(rand.NewPCG(1, 2))
	for _, size := range []int{0, 1, int(StepEnds), int(StepEnds) + 1, 2*int(StepEnds) - 1, 2 * int(StepEnds), 3*int(StepEnds) + 17, 200_000} {
		all := make([]byte, size)
		for i := range all {
			all[i] = byte(rng.Uint32())
		}
		for range 20 {
			c := NewStepCapture(KeepEnds)
			for rest := all; len(rest) > 0; {
				n := min(len(rest), 1+rng.IntN(1+rng.IntN(20_000)))
				c.Add(rest[:n])
				rest = rest[n:]
			}
			out := c.Output()
			if int(out.Dropped)+len(out.Head)+len(out.Tail) != size || !bytes.HasPrefix(all, out.Head) || !bytes.HasSuffix(all, out.Tail) ||
				len(out.Head) != min(size, int(StepEnds)) || len(out.Tail) != min(max(0, size-int(StepEnds)), int(StepEnds)) {
				t.Fatalf("of %d: %d, %d dropped, %d", size, len(out.Head), out.Dropped, len(out.Tail))
			}
		}
	}
	none, whole := NewStepCapture(KeepNone), NewStepCapture(KeepWhole)
	big := make([]byte, MaxStepOutput+5)
	none.Add(big)
	whole.Add(big)
	if o := none.Output(); o.Head != nil || o.Tail != nil || o.Dropped != int64(len(big)) {
		t.Error(len(o.Head), o.Dropped)
	}
	if o := whole.Output(); int64(len(o.Head)) != MaxStepOutput || o.Dropped != 5 {
		t.Error(len(o.Head), o.Dropped)
	}
}
