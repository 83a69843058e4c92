package nodetest

import (
	"context"
	"errors"
	"io"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/cove-sandbox/cove/node"
	"github.com/cove-sandbox/cove/sandbox"
)

func (s *suite) testInfo(t *testing.T) {
	info, err := s.Node.Info(t.Context())
	if err != nil || info.Name == "" {
		t.Errorf("%+v, %v", info, err)
	}
	before, err := s.Node.Capacity(t.Context())
	must(t, "capacity", err)
	s.box(t)
	after, err := s.Node.Capacity(t.Context())
	if err != nil || after.Sandboxes != before.Sandboxes+1 || after.Used.Memory-before.Used.Memory != 64<<20 || after.Runtime == "" {
		t.Errorf("%+v, then %+v, %v", before, after, err)
	}
}

func (s *suite) live(t *testing.T, id string) (sandbox.Sandbox, bool) {
	t.Helper()
	all, err := s.Node.Live(t.Context())
	must(t, "live", err)
	i := slices.IndexFunc(all, func(sb sandbox.Sandbox) bool { return sb.ID == id })
	if i < 0 {
		return sandbox.Sandbox{}, false
	}
	return all[i], true
}

func (s *suite) testCreate(t *testing.T) {
	id := s.newID()
	want := sandbox.Sandbox{ID: id, Tenant: "someone", Spec: spec(func(s *sandbox.Spec) {
		s.Env, s.Labels, s.Timeout = map[string]string{"WHO": "me & <you>"}, map[string]string{"a": "b"}, time.Hour
	})}
	_, err := s.Node.Create(t.Context(), want, s.Image)
	must(t, "create", err)
	s.endWith(t, id)
	info, _ := s.Node.Info(t.Context())
	sb, ok := s.live(t, id)
	if !ok || sb.State != sandbox.Running || sb.Episode != 1 || sb.Node != info.Name || sb.ImageID != s.Image.ID || sb.Tenant != "someone" ||
		sb.Spec.Labels["a"] != "b" || time.Until(sb.ExpiresAt) < 59*time.Minute {
		t.Errorf("live: %+v", sb)
	}
	if got := s.exec(t, id, "echo $WHO"); got != "me & <you>" {
		t.Errorf("inside: %q", got)
	}
	if st, err := s.Node.Stats(t.Context(), id); err != nil || st.Memory <= 0 {
		t.Errorf("stats %+v, %v", st, err)
	}
}

func (s *suite) testCreateRefuses(t *testing.T) {
	create := func(ctx context.Context, id string, img sandbox.Image, edits ...func(*sandbox.Spec)) error {
		_, err := s.Node.Create(ctx, sandbox.Sandbox{ID: id, Spec: spec(edits...)}, img)
		return err
	}
	id := s.box(t)
	expect(t, "the same id", create(t.Context(), id, s.Image), sandbox.ErrAlreadyExists)
	expect(t, "no such image", create(t.Context(), s.newID(), sandbox.Image{ID: "sha256:none"}), sandbox.ErrImageNotFound)
	err := create(t.Context(), "No Id", s.Image)
	expect(t, "an id that is none", err, sandbox.ErrInvalid)
	var e *sandbox.Error
	if errors.As(err, &e); e == nil || e.Field != "id" || e.Op == "" || e.Msg == "" {
		t.Errorf("it says %+v", e)
	}
	err = create(t.Context(), s.newID(), s.Image, func(s *sandbox.Spec) { s.Resources.Memory = 1 << 60; s.Resources.MemoryLimit = 1 << 60 })
	expect(t, "more than there is", err, sandbox.ErrTooLarge)
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	id = s.newID()
	err = create(ctx, id, s.Image)
	s.endWith(t, id)
	if err != nil {
		expect(t, "its caller has left", err, sandbox.ErrCanceled)
		if _, ok := s.live(t, id); ok {
			t.Error("something of it is left")
		}
	}
}

// calls are all methods that name a sandbox.
func (s *suite) calls(ctx context.Context, id string) map[string]func() error {
	n, snap := s.Node, sandbox.Snapshot{Kind: sandbox.DirectorySnapshot}
	return map[string]func() error{
		"Reset":         func() error { _, _, err := n.Reset(ctx, id); return err },
		"Restore":       func() error { _, _, err := n.Restore(ctx, id, s.Image, snap); return err },
		"SetExpiry":     func() error { return n.SetExpiry(ctx, id, time.Time{}) },
		"Stats":         func() error { _, err := n.Stats(ctx, id); return err },
		"Pause":         func() error { return n.Pause(ctx, id, false) },
		"Resume":        func() error { _, err := n.Resume(ctx, id); return err },
		"Hold":          func() error { _, err := n.Hold(ctx, id, time.Second); return err },
		"Start":         func() error { return last(n.Start(ctx, id, s.script("true"), 0)) },
		"Attach":        func() error { return last(n.Attach(ctx, id, "e", 0)) },
		"SendInput":     func() error { return n.SendInput(ctx, id, "e", []byte("x")) },
		"CloseInput":    func() error { return n.CloseInput(ctx, id, "e") },
		"Signal":        func() error { return n.Signal(ctx, id, "e", "SIGTERM", false) },
		"Resize":        func() error { return n.Resize(ctx, id, "e", sandbox.TermSize{Rows: 1, Cols: 1}) },
		"Processes":     func() error { _, _, err := n.Processes(ctx, id); return err },
		"Wait":          func() error { _, err := n.Wait(ctx, id, "e"); return err },
		"ReadFile":      func() error { _, _, err := n.ReadFile(ctx, id, "f", 0, 0); return err },
		"WriteFile":     func() error { _, err := n.WriteFile(ctx, id, "f", nil, sandbox.WriteOptions{}); return err },
		"StatFile":      func() error { _, err := n.StatFile(ctx, id, "f"); return err },
		"ListFiles":     func() error { _, _, err := n.ListFiles(ctx, id, ".", sandbox.ListOptions{Depth: 1}); return err },
		"MakeDir":       func() error { _, err := n.MakeDir(ctx, id, "d", sandbox.WriteOptions{}); return err },
		"MoveFile":      func() error { _, err := n.MoveFile(ctx, id, "a", "b"); return err },
		"RemoveFile":    func() error { return n.RemoveFile(ctx, id, "f", false) },
		"Chmod":         func() error { return n.Chmod(ctx, id, "f", 0o600, false) },
		"SetAttributes": func() error { _, err := n.SetAttributes(ctx, id, "f", nil); return err },
		"Chown":         func() error { return n.Chown(ctx, id, "f", "0:0", false) },
		"Watch":         func() error { return last(n.Watch(ctx, id, ".", false)) },
		"Upload":        func() error { return n.Upload(ctx, id, node.Upload{Path: "f"}, strings.NewReader("x")) },
		"Download":      func() error { return n.Download(ctx, id, node.Download{Path: "f"}, io.Discard) },
		"Dial":          func() error { _, err := n.Dial(ctx, id, 1); return err },
		"Callbacks":     func() error { return last(n.Callbacks(ctx, id, 1)) },
		"PrepareSnapshot": func() error {
			_, err := n.PrepareSnapshot(ctx, id, node.SnapshotRequest{Kind: sandbox.MemorySnapshot, Keep: true})
			return err
		},
		"Mount":         func() error { return n.Mount(ctx, id, snap, "/m", true) },
		"SetNetwork":    func() error { _, err := n.SetNetwork(ctx, id, sandbox.Network{Mode: sandbox.NetworkNone}); return err },
		"NetworkStatus": func() error { _, err := n.NetworkStatus(ctx, id, 1); return err },
		"UseSecrets":    func() error { _, err := n.UseSecrets(ctx, id, nil); return err },
	}
}

func (s *suite) testNobody(t *testing.T) {
	for name, call := range s.calls(t.Context(), "nobody") {
		expect(t, name, call(), sandbox.ErrNoSandbox)
	}
	expect(t, "Kill", s.Node.Kill(t.Context(), "nobody", sandbox.End{Cause: sandbox.KilledByUser}), sandbox.ErrNoSandbox)
	must(t, "AckEnd", s.Node.AckEnd(t.Context(), "nobody"))
}

func (s *suite) testEnded(t *testing.T) {
	id := s.box(t)
	must(t, "kill", s.Node.Kill(t.Context(), id, sandbox.End{Cause: sandbox.LeaseExpired, Detail: "its lease"}))
	for name, call := range s.calls(t.Context(), id) {
		err := call()
		expect(t, name, err, sandbox.ErrEnded)
		if err == nil || !strings.Contains(err.Error(), "its lease") {
			t.Errorf("%s does not say why: %v", name, err)
		}
	}
	must(t, "ack", s.Node.AckEnd(t.Context(), id))
	for name, call := range s.calls(t.Context(), id) {
		expect(t, name+" after the acknowledgement", call(), sandbox.ErrNoSandbox)
	}
}

// A context that is over gives either nothing or the one error that says so.
func (s *suite) testCancelled(t *testing.T) {
	id := s.box(t)
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	past, cancelPast := context.WithDeadline(t.Context(), time.Now().Add(-time.Second))
	defer cancelPast()
	for name := range s.calls(ctx, id) {
		for want, ctx := range map[*sandbox.Error]context.Context{sandbox.ErrCanceled: ctx, sandbox.ErrDeadline: past} {
			err := s.calls(ctx, id)[name]()
			if s := (*sandbox.Error)(nil); errors.As(err, &s) && slices.Contains([]sandbox.Class{sandbox.NotFound, sandbox.Precondition, sandbox.Unsupported, sandbox.Invalid}, s.Class) {
				continue // it was refused before it waited for anything
			}
			if err != nil {
				expect(t, name, err, want)
			}
		}
	}
	s.exec(t, id, "true") // it is none the worse
}

func (s *suite) testReset(t *testing.T) {
	id := s.box(t)
	s.write(t, id, "old", "x")
	episode, took, err := s.Node.Reset(t.Context(), id)
	if err != nil || episode != 2 || took <= 0 {
		t.Errorf("episode %d, %s, %v", episode, took, err)
	}
	_, err = s.Node.StatFile(t.Context(), id, "old")
	expect(t, "a file of before", err, sandbox.ErrNotFound)
	if errors.Is(err, sandbox.ErrNoSandbox) {
		t.Errorf("of a file it says that the sandbox is not there: %v", err)
	}
	if sb, _ := s.live(t, id); sb.Episode != 2 {
		t.Errorf("live: %+v", sb)
	}
}

func (s *suite) testKill(t *testing.T) {
	id := s.box(t)
	var wg sync.WaitGroup
	for range 8 {
		wg.Go(func() {
			if err := s.Node.Kill(t.Context(), id, sandbox.End{Cause: sandbox.KilledByUser, Detail: "why"}); err != nil {
				t.Error(err)
			}
		})
	}
	wg.Wait()
	if end := s.end(t, id); end.Cause != sandbox.KilledByUser || end.Detail != "why" || end.At.IsZero() {
		t.Errorf("end %+v", end)
	}
	if _, ok := s.live(t, id); ok {
		t.Error("it lives")
	}
	must(t, "kill of what has ended", s.Node.Kill(t.Context(), id, sandbox.End{Cause: sandbox.Evicted}))
	if end := s.end(t, id); end.Cause != sandbox.KilledByUser {
		t.Errorf("end %+v", end)
	}
	for range 2 {
		must(t, "ack", s.Node.AckEnd(t.Context(), id))
	}
	if ends, err := s.Node.Ends(t.Context()); err != nil || ends[id].Cause != "" {
		t.Errorf("ends %+v, %v", ends, err)
	}
}

func (s *suite) testExpiry(t *testing.T) {
	id, spared := s.box(t), s.box(t, func(s *sandbox.Spec) { s.Timeout = time.Hour })
	must(t, "set", s.Node.SetExpiry(t.Context(), spared, time.Time{}))
	if sb, _ := s.live(t, spared); !sb.ExpiresAt.IsZero() {
		t.Errorf("expires at %s", sb.ExpiresAt)
	}
	must(t, "set", s.Node.SetExpiry(t.Context(), id, time.Now().Add(50*time.Millisecond)))
	if end := s.end(t, id); end.Cause != sandbox.TTL {
		t.Errorf("end %+v", end)
	}
	s.exec(t, spared, "true")
}

func (s *suite) testStandby(t *testing.T) {
	id := s.box(t)
	s.write(t, id, "f", "content")
	for _, cold := range []bool{false, true} {
		want := sandbox.Hot
		if cold {
			want = sandbox.Cold
		}
		for range 2 {
			must(t, "pause", s.Node.Pause(t.Context(), id, cold))
			s.standby(t, id, want)
		}
		if _, err := s.Node.Stats(t.Context(), id); err != nil {
			t.Error(err)
		}
		must(t, "expiry", s.Node.SetExpiry(t.Context(), id, time.Now().Add(time.Hour)))
		s.standby(t, id, want) // looking does not wake it
		if took, err := s.Node.Resume(t.Context(), id); err != nil || took <= 0 {
			t.Errorf("resume: %s, %v", took, err)
		}
		s.standby(t, id, sandbox.Awake)
		must(t, "pause", s.Node.Pause(t.Context(), id, cold))
		s.expectFile(t, id, "f", "content") // a call does
		s.standby(t, id, sandbox.Awake)
	}
}

func (s *suite) testHold(t *testing.T) {
	id := s.box(t, idles(150*time.Millisecond))
	s.standby(t, id, sandbox.Hot)
	h, err := s.Node.Hold(t.Context(), id, time.Minute)
	if err != nil || h.Token == "" || time.Until(h.Until) > time.Minute || time.Until(h.Until) < 50*time.Second {
		t.Fatalf("%+v, %v", h, err)
	}
	s.awake(t, id, 700*time.Millisecond)
	again, err := s.Node.RenewHold(t.Context(), h.Token, 2*time.Minute)
	if err != nil || again.Token != h.Token || !again.Until.After(h.Until) {
		t.Errorf("renewed: %+v, %v", again, err)
	}
	for range 2 {
		must(t, "release", s.Node.ReleaseHold(t.Context(), h.Token))
	}
	s.standby(t, id, sandbox.Hot)
	_, err = s.Node.RenewHold(t.Context(), h.Token, time.Minute)
	expect(t, "renewing what is over", err, sandbox.ErrNoLease)
	for _, ttl := range []time.Duration{0, -1, node.MaxHold + 1} {
		_, err = s.Node.Hold(t.Context(), id, ttl)
		expect(t, ttl.String(), err, sandbox.ErrInvalid)
	}
}

// awake is that a sandbox does not sleep for a time.
func (s *suite) awake(t *testing.T, id string, d time.Duration) {
	t.Helper()
	for until := time.Now().Add(d); time.Now().Before(until); time.Sleep(20 * time.Millisecond) {
		if all, err := s.Node.Standby(t.Context()); err != nil || all[id] != sandbox.Awake {
			t.Fatalf("it is %q, %v", all[id], err)
		}
	}
}

// A holder that is gone keeps nobody awake, and one that renews does.
func (s *suite) testHoldLapses(t *testing.T) {
	id := s.box(t, idles(100*time.Millisecond))
	h, err := s.Node.Hold(t.Context(), id, 1500*time.Millisecond)
	must(t, "hold", err)
	for range 6 { // renewed it lasts for longer than it would have
		if h, err = s.Node.RenewHold(t.Context(), h.Token, 30*time.Second); err != nil {
			t.Fatal(err)
		}
		s.awake(t, id, 300*time.Millisecond)
	}
	_, err = s.Node.RenewHold(t.Context(), h.Token, 50*time.Millisecond)
	must(t, "renew", err)
	s.standby(t, id, sandbox.Hot)
	_, err = s.Node.RenewHold(t.Context(), h.Token, time.Minute)
	expect(t, "renewing what has lapsed", err, sandbox.ErrNoLease)
}

func (s *suite) testKeep(t *testing.T) {
	id := s.box(t, idles(100*time.Millisecond))
	release, err := node.Keep(t.Context(), s.Node, id)
	must(t, "keep", err)
	s.awake(t, id, 400*time.Millisecond)
	release()
	release()
	s.standby(t, id, sandbox.Hot)
	_, err = node.Keep(t.Context(), s.Node, "nobody")
	expect(t, "keep", err, sandbox.ErrNoSandbox)
}

// Whoever listens is told of every end that comes by itself, and whoever begins to
// of all that are not acknowledged.
func (s *suite) testEndsAreTold(t *testing.T) {
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	first := s.box(t)
	must(t, "kill", s.Node.Kill(ctx, first, sandbox.End{Cause: sandbox.KilledByUser}))
	second := s.box(t)
	told := func(id string, begun func()) (end sandbox.End) {
		for e, err := range s.Node.Ended(ctx) {
			if err != nil {
				t.Errorf("waiting for %s: %v", id, err)
				return end
			}
			if e.ID == first {
				begun()
			}
			if e.ID == id {
				return e.End
			}
		}
		return end
	}
	var wg, begun sync.WaitGroup
	for range 2 {
		begun.Add(1)
		wg.Go(func() {
			if end := told(second, begun.Done); end.Cause != sandbox.TTL {
				t.Errorf("told of %+v", end)
			}
		})
	}
	begun.Wait()
	must(t, "expiry", s.Node.SetExpiry(ctx, second, time.Now()))
	wg.Wait()
	if end := told(second, func() {}); end.Cause != sandbox.TTL { // again to who comes later
		t.Errorf("told of %+v", end)
	}
	must(t, "ack", s.Node.AckEnd(ctx, second))
	third := s.box(t)
	must(t, "expiry", s.Node.SetExpiry(ctx, third, time.Now()))
	for e, err := range s.Node.Ended(ctx) {
		if err != nil || e.ID == second {
			t.Errorf("told of %+v, %v", e, err)
			break
		}
		if e.ID == third {
			break
		}
	}
	leaving, leave := context.WithCancel(ctx)
	var err error
	for _, err = range s.Node.Ended(leaving) {
		leave()
	}
	leave()
	expect(t, "leaving", err, sandbox.ErrCanceled)
}
