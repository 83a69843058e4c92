package agent

import (
	"context"
	"maps"
	"slices"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"pgregory.net/rapid"

	"github.com/cove-sandbox/cove/cas/local"
	"github.com/cove-sandbox/cove/node"
	"github.com/cove-sandbox/cove/runtime"
	"github.com/cove-sandbox/cove/runtime/fake"
	"github.com/cove-sandbox/cove/sandbox"
)

// Whatever happens in whatever order, what runs on the machine, what the node
// says runs and what it has accounted for stay the same, and every sandbox
// that is no longer there has the end the model expects.
func TestAnyHistoryKeepsTheNodeAndTheMachineInAgreement(t *testing.T) {
	dir := t.TempDir()
	store, err := local.Open(dir+"/state", local.Options{})
	if err != nil {
		t.Fatal(err)
	}
	defer store.Close()
	rapid.Check(t, func(rt *rapid.T) {
		synctest.Test(t, func(*testing.T) { // a bubble per history; failures are rt's
			m := &model{t: rt, world: newWorld(rt, dir), live: map[string]time.Time{}, ends: map[string]sandbox.Cause{}, episodes: map[string]int64{}}
			m.cfg = func(c *Config) { c.State = &StateConfig{Store: store, Plain: dir + "/plain"} }
			m.open()
			defer func() {
				m.drv.Heal()
				m.finish()
			}()
			rt.Repeat(map[string]func(*rapid.T){
				"create":           m.create,
				"reset":            m.reset,
				"kill":             m.kill,
				"killTwice":        m.killTwice,
				"setExpiry":        m.setExpiry,
				"ack":              m.ack,
				"pause":            m.pause,
				"wake":             m.wakeUp,
				"snapshot":         m.snapshot,
				"fork":             m.fork,
				"roll back":        m.rollBack,
				"time passes":      m.timePasses,
				"kernel dies":      m.kernelDies,
				"fault":            m.fault,
				"crash":            m.crashAndReturn,
				"crash under load": m.crashUnderLoad,
				"restart":          m.restart,
				"":                 m.check,
			})
		})
	})
}

type model struct {
	*world
	t        *rapid.T
	live     map[string]time.Time // id → expiry; zero = never
	episodes map[string]int64
	ends     map[string]sandbox.Cause
	snaps    []sandbox.Snapshot
	next     int
}

func (m *model) pause(t *rapid.T) {
	// It may fail for a fault: then it is as it was.
	_ = m.Pause(context.Background(), m.pick(t), rapid.Bool().Draw(t, "cold"))
}

func (m *model) wakeUp(t *rapid.T) {
	_, _ = m.Resume(context.Background(), m.pick(t))
}

func (m *model) snapshot(t *rapid.T) {
	id := m.pick(t)
	c, _, err := m.Take(context.Background(), id, node.SnapshotRequest{Kind: sandbox.MemorySnapshot, Keep: true})
	if err == nil {
		m.snaps = append(m.snaps, sandbox.Snapshot{Kind: sandbox.MemorySnapshot, Content: c})
	}
}

func (m *model) fork(t *rapid.T) {
	if len(m.snaps) == 0 {
		t.Skip("none")
	}
	id := m.newID()
	if _, err := m.CreateFrom(context.Background(), smallBox(id), baseImage, rapid.SampledFrom(m.snaps).Draw(t, "snapshot")); err == nil {
		m.live[id], m.episodes[id] = time.Time{}, 1
	}
}

func (m *model) rollBack(t *rapid.T) {
	if len(m.snaps) == 0 {
		t.Skip("none")
	}
	id := m.pick(t)
	episode, _, err := m.Restore(context.Background(), id, baseImage, rapid.SampledFrom(m.snaps).Draw(t, "snapshot"))
	if err != nil {
		return // and it is as it was
	}
	if m.episodes[id]++; episode != m.episodes[id] {
		t.Errorf("episode %d of %s, want %d", episode, id, m.episodes[id])
	}
}

func (m *model) newID() string {
	m.next++
	return "s" + string(rune('a'+m.next%26)) + time.Duration(m.next).String()
}

func (m *model) pick(t *rapid.T) string {
	ids := slices.Sorted(maps.Keys(m.live))
	if len(ids) == 0 {
		t.Skip("none")
	}
	return rapid.SampledFrom(ids).Draw(t, "id")
}

func (m *model) create(t *rapid.T) {
	id := m.newID()
	ttl := rapid.SampledFrom([]time.Duration{0, 0, 30 * time.Second, 5 * time.Minute}).Draw(t, "timeout")
	start := time.Now()
	_, err := m.Create(context.Background(), smallBox(id, timeout(ttl)), baseImage)
	if err != nil { // a fault was in the way; it must have left nothing
		return
	}
	m.live[id], m.episodes[id] = time.Time{}, 1
	if ttl > 0 {
		m.live[id] = start.Add(ttl)
	}
}

func (m *model) reset(t *rapid.T) {
	id := m.pick(t)
	episode, _, err := m.Reset(context.Background(), id)
	switch sandbox.ClassOf(err) {
	case "":
		if m.episodes[id]++; episode != m.episodes[id] {
			t.Errorf("episode %d of %s, want %d", episode, id, m.episodes[id])
		}
	case sandbox.Ended:
		m.ended(id, sandbox.Infra)
	}
}

func (m *model) kill(t *rapid.T) {
	id := m.pick(t)
	_ = m.Kill(context.Background(), id, sandbox.End{Cause: sandbox.KilledByUser})
	m.ended(id, sandbox.KilledByUser)
}

func (m *model) killTwice(t *rapid.T) {
	id := m.pick(t)
	var wg sync.WaitGroup
	for range 2 {
		wg.Go(func() { _ = m.Kill(context.Background(), id, sandbox.End{Cause: sandbox.LeaseExpired}) })
	}
	wg.Wait()
	m.ended(id, sandbox.LeaseExpired)
}

func (m *model) setExpiry(t *rapid.T) {
	id := m.pick(t)
	at := time.Time{}
	if d := rapid.IntRange(-1, 100).Draw(t, "seconds"); d >= 0 {
		at = time.Now().Add(time.Duration(d) * time.Second)
	}
	if err := m.SetExpiry(context.Background(), id, at); err == nil {
		m.live[id] = at
	}
}

func (m *model) ack(t *rapid.T) {
	ids := slices.Sorted(maps.Keys(m.ends))
	if len(ids) == 0 {
		t.Skip("none")
	}
	id := rapid.SampledFrom(ids).Draw(t, "id")
	m.settle()
	if err := m.AckEnd(context.Background(), id); err != nil {
		t.Errorf("ack: %v", err)
	}
	delete(m.ends, id)
}

func (m *model) timePasses(t *rapid.T) {
	time.Sleep(time.Duration(rapid.IntRange(1, 120).Draw(t, "seconds")) * time.Second)
}

func (m *model) kernelDies(t *rapid.T) {
	id := m.pick(t)
	synctest.Wait()
	m.expire()
	if _, ok := m.live[id]; !ok {
		return
	}
	if m.kernelOf(id) == "" {
		t.Skip("cold")
	}
	cause := rapid.SampledFrom([]sandbox.Cause{sandbox.OOM, sandbox.InitKilled, sandbox.Infra}).Draw(t, "cause")
	m.host.Kill(m.kernelOf(id), runtime.Exit{Cause: cause})
	m.ended(id, cause)
}

func (m *model) fault(t *rapid.T) {
	op := rapid.SampledFrom([]fake.Op{fake.Boot, fake.Attach, fake.Reset, fake.Destroy, fake.Sweep, fake.Pause, fake.Resume, fake.Checkpoint, fake.Restore}).Draw(t, "op")
	for range rapid.IntRange(1, 3).Draw(t, "times") {
		m.drv.Fail(op, errBroken)
	}
}

func (m *model) restart(t *rapid.T) {
	m.settle()
	if err := m.Node.Close(); err != nil {
		t.Errorf("close: %v", err)
	}
	m.open()
}

func (m *model) crashAndReturn(t *rapid.T) {
	m.settle()
	m.crash(func(unsynced int) int { return rapid.IntRange(0, unsynced).Draw(t, "torn") })
	m.open()
}

// crashUnderLoad kills the node while creates are under way. A create that
// returned must be there after; one that did not may be or not.
func (m *model) crashUnderLoad(t *rapid.T) {
	m.settle()
	n := rapid.IntRange(1, 6).Draw(t, "creates")
	m.drv.Hook(fake.Attach, func(ctx context.Context, id string) error {
		time.Sleep(time.Duration(id[0]%5) * time.Millisecond)
		return nil
	})
	var mu sync.Mutex
	var wg sync.WaitGroup
	maybe := ids("x"+m.newID(), n)
	for _, id := range maybe {
		wg.Go(func() {
			if _, err := m.Create(context.Background(), smallBox(id), baseImage); err == nil {
				mu.Lock()
				defer mu.Unlock()
				m.live[id], m.episodes[id] = time.Time{}, 1
			}
		})
	}
	time.Sleep(time.Duration(rapid.IntRange(0, 6).Draw(t, "ms")) * time.Millisecond)
	m.drv.Crash()
	disk := m.disk.crash(func(unsynced int) int { return rapid.IntRange(0, unsynced).Draw(t, "torn") })
	wg.Wait()
	_ = m.Node.Close()
	m.disk = disk
	m.open()
	live, _ := m.Live(context.Background())
	there := map[string]bool{}
	for _, sb := range live {
		there[sb.ID] = true
	}
	ends, _ := m.Ends(context.Background())
	for _, id := range maybe {
		_, answered := m.live[id]
		if there[id] {
			m.live[id], m.episodes[id] = time.Time{}, 1
		} else if answered {
			t.Errorf("%s was answered for and is gone: %v", id, ends[id])
		} else if end, ok := ends[id]; ok { // e.g. undone by the dying process, its record not
			m.ends[id] = end.Cause
		}
	}
}

// settle lets time that is due happen and ends that began finish.
func (m *model) settle() {
	time.Sleep(2 * time.Minute)
	synctest.Wait()
	m.expire()
}

func (m *model) ended(id string, cause sandbox.Cause) {
	m.expire() // an expiry at this very moment may have come first
	if _, ok := m.live[id]; !ok {
		return
	}
	delete(m.live, id)
	m.ends[id] = cause
}

// expire moves what is past its time to the ends.
func (m *model) expire() {
	for id, at := range m.live {
		if !at.IsZero() && !time.Now().Before(at) {
			delete(m.live, id)
			m.ends[id] = sandbox.TTL
		}
	}
}

func (m *model) check(t *rapid.T) {
	m.settle()
	m.consistent(slices.Collect(maps.Keys(m.live))...)
	ends, _ := m.Ends(context.Background())
	for id, want := range m.ends {
		if ends[id].Cause != want {
			t.Errorf("end of %s is %q, want %q", id, ends[id].Cause, want)
		}
	}
	if len(ends) != len(m.ends) {
		t.Errorf("ends %v, want %v", ends, m.ends)
	}
}
