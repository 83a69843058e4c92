package e2e

import (
	"context"
	"fmt"
	"io"
	"math/rand/v2"
	"os"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"connectrpc.com/connect"

	covev1 "github.com/cove-sandbox/cove/api/cove/v1"
	"github.com/cove-sandbox/cove/e2e/world"
	"github.com/cove-sandbox/cove/sandbox"
)

// stateCrashes is how often the server dies in the suite; COVE_CRASHES asks for
// more.
func stateCrashes(t *testing.T) int {
	n := times(20, 8)
	if s := os.Getenv("COVE_CRASHES"); s != "" {
		var err error
		if n, err = strconv.Atoi(s); err != nil {
			t.Fatalf("COVE_CRASHES: %v", err)
		}
	}
	return n
}

// TestStateCrashLoop kills the server again and again while workers take
// snapshots of all kinds, fork, pause, resume, roll back, build templates, and
// write and clone volumes. What was acknowledged is there in the end and whole;
// what was not is there and whole, or absent; nothing lies about.
func TestStateCrashLoop(t *testing.T) {
	w := world.New(t, world.Options{Origin: world.Mixed})
	w.Prepare(t, world.Small())
	seed := rand.Uint64()
	t.Logf("seed %d", seed)
	ctx, stop := context.WithCancel(t.Context())
	defer stop()
	var wg sync.WaitGroup
	all := make([]*stateWorker, 3)
	for i := range all {
		k := &stateWorker{worker: worker{t: t, w: w, name: fmt.Sprintf("s%d", i), rand: rand.New(rand.NewPCG(seed, uint64(i))), quit: ctx.Done()},
			snaps: map[string]string{}, stopped: map[string]bool{}, files: map[string]string{}}
		all[i] = k
		wg.Go(k.work)
	}
	moments := rand.New(rand.NewPCG(seed, 99))
	rounds := stateCrashes(t)
	start := time.Now()
	for i := range rounds {
		select {
		case <-time.After(time.Duration(moments.Int64N(int64(1500 * time.Millisecond)))):
		case <-w.Exited():
			t.Fatalf("the server ended on its own, round %d", i)
		}
		w.Kill(t)
		if i%4 == 3 { // one in four dies again while it recovers
			w.Launch(t)
			time.Sleep(time.Duration(moments.Int64N(int64(300 * time.Millisecond))))
			w.Kill(t)
		}
		w.Start(t)
		if t.Failed() {
			break
		}
	}
	stop()
	wg.Wait()
	t.Logf("%d crashes in %s", rounds, time.Since(start).Round(time.Second))
	did := map[string]int{}
	for _, k := range all {
		for what, n := range k.did {
			did[what] += n
		}
	}
	t.Logf("acknowledged under fire: %v", did)
	if t.Failed() {
		return
	}
	w.AssertNoLitter(t)
	checkStates(t, w)
	for _, k := range all {
		k.check()
	}
	checkSnapshots(t, w, all)
	w.AssertReconciled(t)
	w.Forget(t)
	w.AssertNoLitter(t)
	if n := w.Blobs(); n > 0 {
		t.Errorf("%d blobs are left when all is deleted", n)
	}
}

// checkStates demands that each sandbox ever made runs, or ended for a reason.
func checkStates(t *testing.T, w *world.World) {
	t.Helper()
	ended, err := w.List(t.Context(), []covev1.SandboxState{covev1.SandboxState_SANDBOX_STATE_ENDED})
	if err != nil {
		t.Fatal(err)
	}
	taken := map[string]bool{}
	for _, s := range w.Snapshots(t) {
		taken[s.Sandbox] = true
	}
	for _, tpl := range w.Templates(t) {
		taken[tpl.Name] = true
	}
	for _, sb := range ended {
		if sb.End == nil || sb.End.Cause == "" {
			t.Errorf("sandbox %s ended without a cause: %+v", sb.ID, sb.End)
			continue
		}
		name, _, _ := strings.Cut(sb.Spec.Template, "@")
		if strings.Contains(sb.End.Detail, "stopped by a snapshot") && !taken[sb.ID] && !taken[name] {
			t.Errorf("sandbox %s was stopped by a snapshot that is not there (%v)", sb.ID, sb.End)
		}
	}
	live, err := w.Running(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	for _, sb := range live {
		if sb.State != sandbox.Running {
			t.Errorf("sandbox %s is %s at rest", sb.ID, sb.State)
		}
	}
}

// checkSnapshots demands that what was acknowledged is listed, and that what is
// listed is whole and can be used.
func checkSnapshots(t *testing.T, w *world.World, all []*stateWorker) {
	t.Helper()
	want := map[string]string{}
	for _, k := range all {
		for id, marker := range k.snaps {
			want[id] = marker
		}
	}
	acked := len(want)
	host := w.Create(t, world.Small())
	listed := w.Snapshots(t)
	for _, s := range listed {
		marker, known := want[s.ID]
		delete(want, s.ID)
		if err := w.Verify(t.Context(), s.ID); err != nil {
			t.Errorf("%s snapshot %s is listed and broken: %v", s.Kind, s.ID, err)
			continue
		}
		if w.IsOrigin(s.ID) {
			continue
		}
		var got string
		if s.Kind == sandbox.DirectorySnapshot {
			if err := host.TryMount(t.Context(), s.ID, "/"+s.ID, true); err != nil {
				t.Errorf("directory snapshot %s cannot be unpacked: %v", s.ID, err)
				continue
			}
			got = host.Must(t, "cat /"+s.ID+"/marker")
		} else {
			b, err := w.TryCreate(t.Context(), world.From(s.ID), "")
			if err != nil {
				t.Errorf("%s snapshot %s does not start: %v", s.Kind, s.ID, err)
				continue
			}
			got = b.Must(t, "cat /d/marker")
			if s.Kind == sandbox.MemorySnapshot && b.Must(t, "cat /dev/shm/marker") != got {
				t.Errorf("memory snapshot %s: memory and files differ", s.ID)
			}
			if _, err := b.TryKill(t.Context()); err != nil {
				t.Error(err)
			}
		}
		if known && got != marker {
			t.Errorf("%s snapshot %s holds %q, want %q", s.Kind, s.ID, got, marker)
		}
	}
	for id := range want {
		t.Errorf("snapshot %s was acknowledged and is not listed", id)
	}
	tpls := w.Templates(t)
	for _, tpl := range tpls {
		spec := world.Small()
		spec.Template = tpl.Ref()
		b, err := w.TryCreate(t.Context(), spec, "")
		if err != nil {
			t.Errorf("template %s does not start: %v", tpl.Ref(), err)
			continue
		}
		if got := b.Must(t, "cat /tmp/ready"); got != "up" {
			t.Errorf("template %s holds %q", tpl.Ref(), got)
		}
		if _, err := b.TryKill(t.Context()); err != nil {
			t.Error(err)
		}
	}
	t.Logf("%d snapshots listed, %d of them acknowledged; %d templates", len(listed), acked, len(tpls))
}

// stateBox is a sandbox with a marker in its files (/d/marker), in memory
// (/dev/shm/marker), and as a process.
type stateBox struct {
	box    *world.Box
	marker string
}

// stateWorker is a client of state. Calls that broke are repeated; what they
// may have made besides is nobody's, and must be whole all the same.
type stateWorker struct {
	worker
	own     []*stateBox
	snaps   map[string]string // acknowledged snapshot → marker
	stopped map[string]bool   // sandboxes ended by a snapshot
	files   map[string]string // of the volume: acknowledged content by path
	clones  map[string]string // volume → content of /f at the time
	did     map[string]int
}

func (k *stateWorker) volume() string { return "vol-" + k.name }

func (k *stateWorker) work() {
	k.did, k.clones = map[string]int{}, map[string]string{}
	ok := k.call("volume", func(ctx context.Context) error {
		_, err := k.w.Client().Volumes.Create(ctx, connect.NewRequest(&covev1.CreateVolumeRequest{Name: k.volume(), Size: 32 << 20}))
		if sandbox.ClassOf(err) == sandbox.AlreadyExists {
			err = nil
		}
		return err
	})
	for ok {
		select {
		case <-k.quit:
			return
		default:
		}
		k.n++
		ok = k.step() && !k.t.Failed()
	}
}

func (k *stateWorker) ack(what string, ok bool) bool {
	if ok {
		k.did[what]++
	}
	return ok
}

func (k *stateWorker) step() bool {
	if len(k.own) == 0 {
		return k.ack("create", k.create())
	}
	b := k.own[k.rand.IntN(len(k.own))]
	switch k.rand.IntN(12) {
	case 0:
		return len(k.own) >= 3 || k.ack("create", k.create())
	case 1, 2:
		return k.ack("memory", k.snapshot(b, world.Take{Kind: sandbox.MemorySnapshot}))
	case 3:
		return k.ack("filesystem", k.snapshot(b, world.Take{Kind: sandbox.FilesystemSnapshot}))
	case 4:
		return k.ack("directory", k.snapshot(b, world.Take{Kind: sandbox.DirectorySnapshot, Path: "/d"}))
	case 5:
		kind := []sandbox.SnapshotKind{sandbox.MemorySnapshot, sandbox.FilesystemSnapshot}[k.rand.IntN(2)]
		return k.ack("stop", k.snapshot(b, world.Take{Kind: kind, Stop: true}))
	case 6:
		return k.ack("fork", k.fork(b))
	case 7:
		return k.ack("hot", k.standby(b, false))
	case 8:
		return k.ack("cold", k.standby(b, true))
	case 9:
		return k.ack("restore", k.restore(b))
	case 10:
		return k.ack("template", k.template())
	default:
		return k.ack("volume", k.write()) && (k.rand.IntN(2) > 0 || k.ack("clone", k.clone()))
	}
}

func (k *stateWorker) create() bool {
	spec := world.Small()
	spec.Labels = map[string]string{"key": fmt.Sprintf("%s-%d", k.name, k.n)}
	b := &stateBox{}
	if !k.call("create", func(ctx context.Context) (err error) {
		b.box, err = k.w.TryCreate(ctx, spec, spec.Labels["key"])
		return err
	}) {
		return false
	}
	// A process that lives as long as the sandbox.
	return k.run(b, "setsid sleep 987654 >/dev/null 2>&1 </dev/null &") && k.mark(b, b.box.ID[:6]+"-0") && k.keep(b)
}

func (k *stateWorker) keep(b *stateBox) bool { k.own = append(k.own, b); return true }

func (k *stateWorker) drop(b *stateBox) {
	k.own = slices.DeleteFunc(k.own, func(o *stateBox) bool { return o == b })
}

func (k *stateWorker) run(b *stateBox, line string) bool {
	k.n++
	return k.once(&owned{box: b.box}, fmt.Sprintf("x-%s-%d", k.name, k.n), line)
}

func (k *stateWorker) mark(b *stateBox, marker string) bool {
	b.marker = marker
	return k.run(b, fmt.Sprintf("mkdir -p /d && echo %s > /d/marker && cp /d/marker /dev/shm/marker", marker))
}

// snapshot marks the sandbox anew first, so that each has a state of its own.
func (k *stateWorker) snapshot(b *stateBox, take world.Take) bool {
	if !k.mark(b, fmt.Sprintf("%s-%d", b.box.ID[:6], k.n)) {
		return false
	}
	var s sandbox.Snapshot
	ended := false
	if !k.call(string(take.Kind)+" snapshot", func(ctx context.Context) (err error) {
		s, err = b.box.TrySnapshot(ctx, take)
		if take.Stop && sandbox.ClassOf(err) == sandbox.Ended {
			ended = true // by the try before, which broke: checkStates asks for its snapshot
			return nil
		}
		return err
	}) {
		return false
	}
	if take.Stop {
		k.drop(b)
	}
	if !ended {
		k.snaps[s.ID] = b.marker
	}
	// Not too many: what is deleted is collected under fire too. Those of
	// stopped sandboxes stay, so that checkStates can look for them.
	for id := range k.snaps {
		if len(k.snaps) < 8 || k.stopped[id] || id == s.ID {
			continue
		}
		if !k.call("delete", func(ctx context.Context) error {
			err := k.w.DeleteSnapshot(ctx, id)
			if sandbox.ClassOf(err) == sandbox.NotFound {
				err = nil
			}
			return err
		}) {
			return false
		}
		delete(k.snaps, id)
	}
	if take.Stop && !ended {
		k.stopped[s.ID] = true
	}
	return true
}

func (k *stateWorker) fork(b *stateBox) bool {
	var kids []*world.Box
	if !k.call("fork", func(ctx context.Context) (err error) {
		kids, err = b.box.TryFork(ctx, 2, map[string]string{"fork": b.box.ID})
		return err
	}) {
		return false
	}
	for i, c := range kids {
		kid := &stateBox{box: c, marker: b.marker}
		if !k.holds(kid, "a fork") {
			return false
		}
		if i == 0 && len(k.own) < 3 {
			k.keep(kid)
		} else if !k.call("kill", func(ctx context.Context) error { _, err := c.TryKill(ctx); return err }) {
			return false
		}
	}
	return true
}

// holds demands that files, memory and process are what they should be.
func (k *stateWorker) holds(b *stateBox, what string) bool {
	return k.call(what, func(ctx context.Context) error {
		k.n++
		r, _, err := untilEnd(ctx, b.box, sandbox.ProcessSpec{ExecID: fmt.Sprintf("h-%s-%d", k.name, k.n), User: "root",
			Command: "cat /d/marker /dev/shm/marker; cat /proc/[0-9]*/cmdline | tr '\\0' ' ' | grep -c 'sleep 98765[4]'"})
		if err != nil {
			return err
		}
		if want := b.marker + "\n" + b.marker + "\n1\n"; string(r.Out) != want {
			return fmt.Errorf("sandbox %s holds %q, want %q (%v, %s)", b.box.ID, r.Out, want, r.End.End, r.Err)
		}
		return nil
	})
}

func (k *stateWorker) standby(b *stateBox, cold bool) bool {
	if !k.call("pause", func(ctx context.Context) error {
		err := b.box.TryPause(ctx, cold)
		if cold && sandbox.ClassOf(err) == sandbox.Precondition {
			err = nil // a call that broke is still under way on the server: an answer too
		}
		return err
	}) {
		return false
	}
	if k.rand.IntN(3) == 0 {
		return true // it stays so until somebody comes
	}
	return k.call("resume", b.box.TryResume) && k.holds(b, "after "+map[bool]string{true: "cold", false: "hot"}[cold])
}

func (k *stateWorker) restore(b *stateBox) bool {
	for id, marker := range k.snaps {
		var kind sandbox.SnapshotKind
		if !k.call("get", func(ctx context.Context) error {
			r, err := k.w.Client().Snapshots.Get(ctx, connect.NewRequest(&covev1.GetSnapshotRequest{Id: id}))
			if err == nil {
				kind = sandbox.SnapshotKind(r.Msg.Snapshot.Kind)
			}
			return err
		}) {
			return false
		}
		if kind != sandbox.MemorySnapshot {
			continue
		}
		if !k.call("restore", func(ctx context.Context) error { return b.box.TryRestore(ctx, id) }) {
			return false
		}
		b.marker = marker
		return k.holds(b, "after a restore")
	}
	return true
}

func (k *stateWorker) template() bool {
	return k.call("template", func(ctx context.Context) error {
		_, err := k.w.BuildTemplate(ctx, "t-"+k.name, "echo up > /tmp/ready; exec sleep 100000", "test -e /tmp/ready")
		return err
	})
}

// write puts a file whose content says whether it is whole.
func (k *stateWorker) write() bool {
	content := strings.Repeat(fmt.Sprintf("%s %d\n", k.name, k.n), 1<<15)
	if !k.call("write", func(ctx context.Context) error {
		_, err := k.w.Client().UploadVolumeFile(ctx, k.volume(), "/f", strings.NewReader(content), int64(len(content)), 0)
		return err
	}) {
		return false
	}
	k.files["/f"] = content
	return true
}

func (k *stateWorker) clone() bool {
	name := ""
	if !k.call("clone", func(ctx context.Context) error {
		k.n++
		name = fmt.Sprintf("clone-%s-%d", k.name, k.n)
		_, err := k.w.Client().Volumes.Clone(ctx, connect.NewRequest(&covev1.CloneVolumeRequest{Name: k.volume(), NewName: name}))
		return err
	}) {
		return false
	}
	k.clones[name] = k.files["/f"]
	return true
}

// check demands, at rest, what this worker was told.
func (k *stateWorker) check() {
	k.t.Helper()
	for _, b := range k.own {
		b.box.WantRunning(k.t)
		k.holds(b, "in the end")
	}
	want := map[string]string{k.volume(): k.files["/f"]}
	for name, content := range k.clones {
		want[name] = content
	}
	for name, content := range want {
		if content == "" {
			continue
		}
		body, _, err := k.w.Client().DownloadVolumeFile(k.t.Context(), name, "/f")
		if err != nil {
			k.t.Errorf("volume %s: %v", name, err)
			continue
		}
		got, err := io.ReadAll(body)
		body.Close()
		if err != nil || string(got) != content {
			k.t.Errorf("volume %s: /f is %.20q (%d bytes, %v), want %.20q", name, got, len(got), err, content)
		}
	}
}
