//go:build !race

package agent_test

import (
	"cmp"
	"context"
	"fmt"
	"os"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/cove-sandbox/cove/node"
	"github.com/cove-sandbox/cove/node/agent"
	"github.com/cove-sandbox/cove/runtime"
	"github.com/cove-sandbox/cove/sandbox"
)

// TestMetamorphic runs random scripts straight through, and cut in two by
// everything that may happen to a sandbox. What a script sees must not tell.
//
//	COVE_META=200                     that many scripts
//	COVE_META_SEED=17                 this one only, with what it saw
//	COVE_META=50 COVE_META_SEED=151   seeds 151 to 200
//	COVE_ORIGIN=child                 only in children of one checkpoint
//	COVE_ORIGIN=reused                only in kernels that served another sandbox
//
// docs/state.md has what does differ; no plot looks at that.
func TestMetamorphic(t *testing.T) {
	first, count := number(t, "COVE_META_SEED", 1), number(t, "COVE_META", times(25, 8))
	workers := 3 // the waits of one are the work of the others
	one := os.Getenv("COVE_META_SEED") != "" && os.Getenv("COVE_META") == ""
	if one {
		count, workers = 1, 1
	}
	m := &machine{edit: func(c *agent.Config) {
		c.Classes = append(c.Classes, agent.Class{Class: runtime.Class{Name: "reuse"}, Driver: c.Classes[0].Driver, Reuse: true, Pool: agent.PoolSettings{Min: -1, Blank: -1}})
	}}
	m.start(t)
	seeds := make(chan int)
	var wg sync.WaitGroup
	trials := &trials{machine: m, verbose: one, kept: map[string]bool{}}
	for w := range workers {
		id := fmt.Sprint("w", w)
		m.originate(id, cmp.Or(os.Getenv("COVE_ORIGIN"), []string{"", "child", "reused"}[w]))
		wg.Go(func() {
			for seed := range seeds {
				trials.trial(t, id, newScript(uint64(seed)))
			}
		})
	}
	for seed := first; seed < first+count; seed++ {
		// A test that is cut off leaves its sandboxes behind.
		if end, ok := t.Deadline(); ok && time.Until(end) < stuckAfter {
			t.Errorf("no time left for seeds %d to %d", seed, first+count-1)
			break
		}
		seeds <- seed
	}
	close(seeds)
	wg.Wait()
}

// originate creates a sandbox that has the memory of a checkpoint, or another's kernel.
func (m *machine) originate(id, origin string) {
	m.t.Helper()
	switch origin {
	case "child":
		m.create("of" + id)
		m.from(id, m.snapshot("of"+id, sandbox.MemorySnapshot, ""))
		return
	case "reused":
		reuse := func(s *sandbox.Spec) { s.Reuse, s.KernelClass, s.Network.Mode = "meta", "reuse", sandbox.NetworkNone }
		m.create("before"+id, reuse)
		m.sh("before"+id, "echo before > /tmp/before; (setsid sleep 1000 >/dev/null 2>&1 &)")
		if err := m.Kill(m.t.Context(), "before"+id, sandbox.End{Cause: sandbox.KilledByUser}); err != nil {
			m.t.Fatal(err)
		}
		m.create(id, reuse)
		return
	}
	m.create(id)
}

// times is how often something is done: whole for "make soak-tests", which looks for what is
// rare, else short.
func times(whole, short int) int {
	if os.Getenv("COVE_SOAK") != "" {
		return whole
	}
	return short
}

func number(t *testing.T, env string, otherwise int) int {
	t.Helper()
	s := os.Getenv(env)
	if s == "" {
		return otherwise
	}
	n, err := strconv.Atoi(s)
	if err != nil || n < 1 {
		t.Fatalf("%s=%q is not a number", env, s)
	}
	return n
}

type trials struct {
	*machine
	verbose bool

	mu   sync.Mutex
	kept map[string]bool // manifests in use
}

// trial runs a script in every way in sandbox id, which it resets for each.
func (r *trials) trial(t *testing.T, id string, s script) {
	ctx := t.Context()
	check := func(err error) bool {
		if err != nil {
			t.Errorf("seed %d: %v\n%s", s.seed, err, s)
		}
		return err == nil
	}
	head, tail := s.steps[:s.cut], s.steps[s.cut:]

	// before is the first part in a fresh container.
	before := func() (session, string, error) {
		if _, _, err := r.Reset(ctx, id); err != nil {
			return session{}, "", err
		}
		e, err := r.begin(ctx, id, s)
		if err != nil {
			return e, "", err
		}
		out, err := e.run(ctx, head)
		return e, out, err
	}
	// after is the second, wherever.
	after := func(e session, in string, first string) (string, error) {
		e.id = in
		out, err := e.run(ctx, tail)
		if err != nil {
			return "", err
		}
		end, err := e.quit(ctx)
		return first + out + end, err
	}

	e, wantHead, err := before()
	var want string
	if err == nil {
		want, err = after(e, id, wantHead)
	}
	if !check(err) {
		return
	}
	if r.verbose {
		t.Logf("seed %d, cut after step %d:\n%s", s.seed, s.cut, want)
	}
	start, last := time.Now(), time.Now()
	defer func() { t.Logf("seed %d, %d steps: %.1f s", s.seed, len(s.steps), time.Since(start).Seconds()) }()
	same := func(way, got string, err error) {
		if r.verbose {
			t.Logf("%s: %v", way, time.Since(last))
			last = time.Now()
		}
		if err != nil {
			t.Errorf("seed %d, %s: %v\n%s", s.seed, way, err, s)
		} else if d := firstDifference(want, got); d != "" {
			if !strings.HasPrefix(got, wantHead) {
				way += " (before that already: the script is not deterministic)"
			}
			t.Errorf("seed %d, %s: not as straight through, cut after step %d:\n%s\nCOVE_META_SEED=%d shows all of it", s.seed, way, s.cut, d, s.seed)
		}
	}

	for _, cold := range []bool{false, true} {
		e, out, err := before()
		if err == nil {
			err = r.Pause(ctx, id, cold)
		}
		if err == nil {
			out, err = after(e, id, out)
		}
		same(map[bool]string{false: "paused hot", true: "paused cold"}[cold], out, err)
	}

	e, out, err := before()
	if !check(err) {
		return
	}
	r.fork(ctx, id, func(way, child string, err error) {
		var got string
		if err == nil {
			got, err = after(e, child, out)
		}
		same(way, got, err)
	})
	snap, release, err := r.keep(ctx, id)
	if !check(err) {
		return
	}
	defer release()
	child, got := fmt.Sprint(id, "r", r.number()), ""
	if _, err = r.CreateFrom(ctx, sandbox.Sandbox{ID: child, Spec: spec()}, r.img, snap); err == nil {
		got, err = after(e, child, out)
		r.end(child)
	}
	same("restored", got, err)
	got, err = after(e, id, out)
	same("the source of snapshots", got, err)
	if _, _, err = r.Restore(ctx, id, r.img, snap); err == nil {
		got, err = after(e, id, out)
	}
	same("rolled back", got, err)
}

// fork hands on the children of two.
func (r *trials) fork(ctx context.Context, id string, each func(way, child string, err error)) {
	c, _, err := r.Take(ctx, id, node.SnapshotRequest{Kind: sandbox.MemorySnapshot})
	if err != nil {
		each("fork", "", err)
		return
	}
	var children [2]string
	var errs [2]error
	var wg sync.WaitGroup
	for i := range children {
		wg.Go(func() {
			children[i] = fmt.Sprint(id, "f", i, "n", r.number())
			_, errs[i] = r.CreateFrom(ctx, sandbox.Sandbox{ID: children[i], Spec: spec()}, r.img, sandbox.Snapshot{Kind: sandbox.MemorySnapshot, Content: c})
		})
	}
	wg.Wait()
	if err := r.Release(ctx, c); err != nil {
		each("fork", "", err)
	}
	for i, child := range children {
		each(fmt.Sprint("forked, child ", i+1), child, errs[i])
		if errs[i] == nil {
			r.end(child)
		}
	}
}

// keep is a snapshot in the store, there until release, which also collects
// what others have released.
func (r *trials) keep(ctx context.Context, id string) (snap sandbox.Snapshot, release func(), err error) {
	c, _, err := r.Take(ctx, id, node.SnapshotRequest{Kind: sandbox.MemorySnapshot, Keep: true})
	if err != nil {
		return snap, nil, err
	}
	r.mu.Lock()
	r.kept[c.Manifest] = true
	r.mu.Unlock()
	return sandbox.Snapshot{Kind: sandbox.MemorySnapshot, Content: c}, func() {
		r.mu.Lock()
		defer r.mu.Unlock()
		delete(r.kept, c.Manifest)
		var keep []string
		for k := range r.kept {
			keep = append(keep, k)
		}
		if _, err := r.Collect(context.WithoutCancel(ctx), keep); err != nil {
			r.t.Error(err)
		}
	}, nil
}

func (r *trials) number() int {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.execs++
	return r.execs
}

func (r *trials) end(id string) {
	if err := r.Kill(r.t.Context(), id, sandbox.End{Cause: sandbox.KilledByUser}); err != nil {
		r.t.Error(err)
	}
}

// firstDifference shows the first step that differs, "" for none.
func firstDifference(want, got string) string {
	w, g := strings.SplitAfter(want, "\n"), strings.SplitAfter(got, "\n")
	step := ""
	for i := range max(len(w), len(g)) {
		var a, b string
		if i < len(w) {
			a = w[i]
		}
		if i < len(g) {
			b = g[i]
		}
		if !strings.HasPrefix(a, " ") {
			step = a
		}
		if a != b {
			return fmt.Sprintf("at   %sthen %sgot  %s", step, a, b)
		}
	}
	return ""
}
