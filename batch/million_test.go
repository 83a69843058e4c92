package batch

import (
	"context"
	"errors"
	"fmt"
	"iter"
	"os"
	"path/filepath"
	"runtime"
	"strings"
	"sync/atomic"
	"testing"

	"github.com/cove-sandbox/cove/sandbox"
)

// echo answers at once and keeps nothing: what is counted is the batch itself.
type echo struct{ runs, live atomic.Int64 }

func (e *echo) Create(context.Context) (string, error) { e.live.Add(1); return "m", nil }
func (e *echo) Reset(context.Context, string) error    { return nil }
func (e *echo) Remove(context.Context, string) error   { e.live.Add(-1); return nil }
func (e *echo) Run(_ context.Context, _, _ string, in Input) (Outcome, error) {
	e.runs.Add(1)
	return Outcome{Cause: sandbox.Exited, Stdout: []byte(in.Text)}, nil
}

// made are inputs that nobody holds all of.
func made(n int) iter.Seq2[Input, error] {
	return func(yield func(Input, error) bool) {
		for i := range n {
			if !yield(Input{Index: i, Text: fmt.Sprintf(`{"n":%d}`, i)}, nil) {
				return
			}
		}
	}
}

// A batch of a million inputs: what is held for each is the key of those that are done,
// nothing while it runs; stopped, it goes on; each input is done once, and sorted.
// Unless COVE_SOAK is set it has 200,000.
func TestAMillionInputs(t *testing.T) {
	n := 200_000
	if os.Getenv("COVE_SOAK") != "" {
		n = 1_000_000
	}
	path := filepath.Join(t.TempDir(), "out.jsonl")
	before := heap()
	var most uint64
	part := func(stopAfter int) Progress {
		t.Helper()
		ctx, stop := context.WithCancel(t.Context())
		defer stop()
		j, err := OpenJournal(path)
		if err != nil {
			t.Fatal(err)
		}
		opened, count, m := heap(), 0, &echo{}
		p, err := Run(ctx, Config{Parallel: 8, Reuse: true, Name: "b"}, m, made(n), j.Has, func(r Result) error {
			if count++; count == stopAfter {
				stop()
			}
			if count%(n/10) == 0 { // of what is held beside what the journal knew
				most = max(most, heap()-min(opened, heap()))
			}
			return j.Add(r)
		}, func(Progress) {})
		if (stopAfter > 0) != errors.Is(err, context.Canceled) || stopAfter == 0 && err != nil {
			t.Fatal(err)
		}
		if err := j.Close(); err != nil {
			t.Fatal(err)
		}
		if m.live.Load() != 0 || m.runs.Load() < int64(p.Done) {
			t.Errorf("%d machines are left, %d runs for %+v", m.live.Load(), m.runs.Load(), p)
		}
		return p
	}
	first := part(n / 2)
	second := part(0)
	if second.Skipped != first.Done || first.Done+second.Done != n {
		t.Fatalf("%+v, then %+v, of %d", first, second, n)
	}
	if most > 16<<20 {
		t.Errorf("%s more are held in the middle of it", sandbox.FormatSize(int64(most)))
	}
	if err := Sort(path); err != nil {
		t.Fatal(err)
	}
	next := 0
	for in, err := range Lines(open(t, path)) {
		if err != nil || !strings.HasPrefix(in.Text, fmt.Sprintf(`{"index":%d,`, next)) {
			t.Fatalf("line %d: %.80s, %v", next, in.Text, err)
		}
		next++
	}
	if next != n {
		t.Errorf("%d lines, want %d", next, n)
	}
	if after := heap(); after > before+16<<20 {
		t.Errorf("%s are held when it is over, %s before", sandbox.FormatSize(int64(after)), sandbox.FormatSize(int64(before)))
	}
}

func open(t *testing.T, path string) *os.File {
	t.Helper()
	f, err := os.Open(path)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { f.Close() })
	return f
}

// heap is what is held now.
func heap() uint64 {
	runtime.GC()
	var m runtime.MemStats
	runtime.ReadMemStats(&m)
	return m.HeapAlloc
}
