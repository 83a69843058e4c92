package e2e

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/cove-sandbox/cove/e2e/world"
	"github.com/cove-sandbox/cove/sandbox"
)

// TestCrashLoop kills the server again and again at a moment of no one's choosing
// while workers create, use, reset and kill sandboxes. Workers do what SDKs
// do: repeat a call that broke, with the same key. In the end every sandbox
// whose creation was acknowledged and whose kill was not asked for runs and
// holds its own marker, what was asked once happened once, and the host holds
// nothing else.
func TestCrashLoop(t *testing.T) {
	w := world.New(t, world.Options{Origin: world.Mixed})
	w.Prepare(t, crashSpec())
	seed := rand.Uint64()
	t.Logf("seed %d", seed)
	ctx, stop := context.WithCancel(t.Context())
	defer stop()
	const workers = 4
	var wg sync.WaitGroup
	all := make([]*worker, workers)
	for i := range all {
		all[i] = &worker{t: t, w: w, name: fmt.Sprintf("w%d", i), rand: rand.New(rand.NewPCG(seed, uint64(i))), quit: ctx.Done()}
		wg.Go(all[i].run)
	}
	moments := rand.New(rand.NewPCG(seed, workers))
	start := time.Now()
	crashes := times(50, 14)
	for i := range crashes {
		run := time.Duration(moments.Int64N(int64(1500 * time.Millisecond)))
		select {
		case <-time.After(run):
		case <-w.Exited():
			t.Fatalf("the server ended on its own, round %d", i)
		}
		w.Kill(t)
		if i%4 == 3 {
			// One in four dies again while it recovers.
			w.Launch(t)
			time.Sleep(time.Duration(moments.Int64N(int64(400 * time.Millisecond))))
			w.Kill(t)
		}
		w.Start(t)
		if t.Failed() {
			break
		}
	}
	stop()
	wg.Wait()
	t.Logf("%d crashes in %s", crashes, time.Since(start).Round(time.Second))

	// The model of all workers against the server's own list.
	want := map[string]*owned{}
	total := counts{}
	for _, wk := range all {
		for _, o := range wk.boxes {
			want[o.box.ID] = o
		}
		total.add(wk.done)
	}
	t.Logf("acknowledged under fire: %+v", total)
	if total.created < crashes/2 || total.execs < crashes/2 {
		t.Errorf("too little happened between the crashes to mean anything: %+v", total)
	}
	live, err := w.Running(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	for _, sb := range live {
		if want[sb.ID] == nil {
			t.Errorf("sandbox %s runs and nobody owns it (key %s)", sb.ID, sb.Spec.Labels["key"])
		}
	}
	for id, o := range want {
		o.box.WantRunning(t)
		if got := o.box.Must(t, "cat /marker"); got != o.marker() {
			t.Errorf("sandbox %s holds the marker %q, want %q", id, got, o.marker())
		}
		if got := o.box.Must(t, "cat /count 2>/dev/null | wc -l"); got != fmt.Sprint(o.execs) {
			t.Errorf("sandbox %s ran %s execs of %d", id, got, o.execs)
		}
	}
	for _, wk := range all {
		for _, b := range wk.killed {
			if sb := b.Get(t); sb.State != sandbox.EndedState || sb.End.Cause != sandbox.KilledByUser {
				t.Errorf("killed sandbox %s is %s (%v)", b.ID, sb.State, sb.End)
			}
		}
	}
	w.AssertReconciled(t)
}

type counts struct{ created, execs, resets, kills, retries int }

func (c *counts) add(o counts) {
	c.created += o.created
	c.execs += o.execs
	c.resets += o.resets
	c.kills += o.kills
	c.retries += o.retries
}

// owned is a sandbox whose creation its worker was told of.
type owned struct {
	box     *world.Box
	key     string
	episode int // as the worker counts them, in the marker
	execs   int
}

func (o *owned) marker() string { return fmt.Sprintf("%s episode %d", o.key, o.episode) }

// worker is one client. It finishes what it began before it stops, so that at
// the end nothing is unknown.
type worker struct {
	t    *testing.T
	w    *world.World
	name string
	rand *rand.Rand
	quit <-chan struct{}

	n      int
	boxes  []*owned
	killed []*world.Box
	done   counts
}

const ownedAtMost = 5

func crashSpec() sandbox.Spec {
	spec := world.Small()
	spec.Resources.Memory = 64 * sandbox.MiB
	return spec
}

func (k *worker) run() {
	for {
		select {
		case <-k.quit:
			return
		default:
		}
		k.n++
		switch p := k.rand.IntN(10); {
		case len(k.boxes) == 0 || p < 3 && len(k.boxes) < ownedAtMost:
			k.create()
		case p < 7:
			k.exec()
		case p < 8:
			k.reset()
		default:
			if len(k.boxes) > 1 {
				k.kill()
			}
		}
		if k.t.Failed() {
			return
		}
	}
}

// call repeats f until the server has answered it.
func (k *worker) call(what string, f func(context.Context) error) bool {
	ctx, cancel := context.WithTimeout(context.Background(), 2*time.Minute)
	defer cancel()
	for {
		err := f(ctx)
		if err == nil {
			return true
		}
		if !again(err) || ctx.Err() != nil {
			k.t.Errorf("%s: %s: %v (%s)", k.name, what, err, sandbox.ClassOf(err))
			return false
		}
		k.done.retries++
		time.Sleep(time.Duration(5+k.rand.IntN(50)) * time.Millisecond)
	}
}

func (k *worker) pick() (int, *owned) {
	i := k.rand.IntN(len(k.boxes))
	return i, k.boxes[i]
}

func (k *worker) create() {
	o := &owned{key: fmt.Sprintf("%s-%d", k.name, k.n), episode: 1}
	spec := crashSpec()
	spec.Labels = map[string]string{"key": o.key}
	if k.call("create", func(ctx context.Context) (err error) {
		o.box, err = k.w.TryCreate(ctx, spec, o.key)
		return err
	}) && k.mark(o) {
		k.boxes = append(k.boxes, o)
		k.done.created++
	}
}

// mark writes the marker of an episode: appended, so that running it twice
// shows.
func (k *worker) mark(o *owned) bool {
	return k.once(o, fmt.Sprintf("mark-%d", o.episode), "echo "+o.marker()+" >> /marker")
}

func (k *worker) once(o *owned, id, line string) bool {
	return k.call("exec "+id, func(ctx context.Context) error {
		r, _, err := untilEnd(ctx, o.box, sandbox.ProcessSpec{ExecID: id, Command: line, User: "root"})
		if err == nil && (r.End.Cause != sandbox.Exited || r.End.ExitCode != 0) {
			err = fmt.Errorf("in %s: ended by %v", o.box.ID, r.End.End)
		}
		return err
	})
}

func (k *worker) exec() {
	_, o := k.pick()
	if k.once(o, fmt.Sprintf("e%d", k.n), "echo x >> /count") {
		o.execs++
		k.done.execs++
	}
}

// reset has no key: one that broke may have happened. Repeated, it is the same
// to its caller: an empty sandbox.
func (k *worker) reset() {
	_, o := k.pick()
	if k.call("reset", func(ctx context.Context) error { _, err := o.box.TryReset(ctx); return err }) {
		o.episode++
		o.execs = 0
		if k.mark(o) {
			k.done.resets++
		}
	}
}

func (k *worker) kill() {
	i, o := k.pick()
	if k.call("kill", func(ctx context.Context) error {
		sb, err := o.box.TryKill(ctx)
		if err == nil && (sb.End == nil || sb.End.Cause != sandbox.KilledByUser) {
			err = errors.New(strings.TrimSpace(fmt.Sprintf("%s ended by %v", sb.ID, sb.End)))
		}
		return err
	}) {
		k.boxes = append(k.boxes[:i], k.boxes[i+1:]...)
		k.killed = append(k.killed, o.box)
		k.done.kills++
	}
}
