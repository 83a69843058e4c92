package server

import (
	"crypto/rand"
	"testing"
	"time"

	"connectrpc.com/connect"
	"google.golang.org/protobuf/types/known/durationpb"

	covev1 "github.com/cove-sandbox/cove/api/cove/v1"
	"github.com/cove-sandbox/cove/sandbox"
)

// After a restart the store says what the node runs, whatever the two say before.
func TestReconcile(t *testing.T) {
	const noBox, ended, live = "nothing", "ended", "live"
	for _, tc := range []struct {
		name         string
		record       sandbox.State // "" = none
		onNode       string
		wantState    sandbox.State // "" = no record
		wantCause    sandbox.Cause
		wantOnNode   bool
		wantEpisode  int64
		recordNode   string
		recordExpiry time.Duration
	}{
		{name: "kept", record: sandbox.Running, onNode: live, wantState: sandbox.Running, wantOnNode: true, wantEpisode: 3},
		{name: "was creating", record: sandbox.Creating, onNode: live, wantState: sandbox.Running, wantOnNode: true, wantEpisode: 3},
		{name: "expiry moved", record: sandbox.Running, onNode: live, wantState: sandbox.Running, wantOnNode: true, wantEpisode: 3, recordExpiry: time.Hour},
		{name: "ended meanwhile", record: sandbox.Running, onNode: ended, wantState: sandbox.EndedState, wantCause: sandbox.TTL},
		{name: "lost", record: sandbox.Running, onNode: noBox, wantState: sandbox.EndedState, wantCause: sandbox.NodeLost},
		{name: "lost while creating", record: sandbox.Creating, onNode: noBox, wantState: sandbox.EndedState, wantCause: sandbox.NodeLost},
		{name: "orphan", record: "", onNode: live},
		{name: "zombie", record: sandbox.EndedState, onNode: live, wantState: sandbox.EndedState, wantCause: sandbox.KilledByUser},
		{name: "end of a stranger", record: "", onNode: ended},
		{name: "end known", record: sandbox.EndedState, onNode: ended, wantState: sandbox.EndedState, wantCause: sandbox.KilledByUser},
		{name: "another node's", record: sandbox.Running, onNode: noBox, recordNode: "n2", wantState: sandbox.Running, wantEpisode: 1},
	} {
		t.Run(tc.name, func(t *testing.T) {
			w := newWorld(t)
			sb := sandbox.Sandbox{ID: "abc", Node: "n1", State: tc.record, Episode: 1, ImageID: "sha256:base", CreatedAt: time.Now().UTC()}
			if tc.recordNode != "" {
				sb.Node = tc.recordNode
			}
			if tc.recordExpiry > 0 {
				sb.ExpiresAt = sb.CreatedAt.Add(tc.recordExpiry)
			}
			if tc.record != "" {
				first := sb
				if tc.record == sandbox.EndedState {
					first.State = sandbox.Running
				}
				if _, _, err := w.store.CreateSandbox(w.all(), first, storeNoKey); err != nil {
					t.Fatal(err)
				}
				if tc.record == sandbox.EndedState {
					if _, err := w.store.EndSandbox(w.all(), "abc", sandbox.End{Cause: sandbox.KilledByUser, At: time.Now()}); err != nil { // not so old as to be forgotten
						t.Fatal(err)
					}
				}
			}
			box := sb
			box.Episode, box.ExpiresAt, box.Spec = 3, time.Time{}, small
			if tc.onNode != noBox {
				w.place(box)
			}
			if tc.onNode == ended {
				if err := w.node.Kill(t.Context(), "abc", sandbox.End{Cause: sandbox.TTL, At: time.Now()}); err != nil {
					t.Fatal(err)
				}
			}

			for range 2 { // the second time changes nothing
				if err := w.server.Reconcile(t.Context()); err != nil {
					t.Fatal(err)
				}
				got, err := w.store.GetSandbox(w.all(), "abc")
				if tc.wantState == "" {
					wantError(t, err, sandbox.ErrNotFound)
				} else if err != nil || got.State != tc.wantState {
					t.Fatalf("got %+v, %v", got, err)
				}
				if tc.wantCause != "" && (got.End == nil || got.End.Cause != tc.wantCause) {
					t.Errorf("end %v, want %s", got.End, tc.wantCause)
				}
				if tc.wantEpisode != 0 && got.Episode != tc.wantEpisode {
					t.Errorf("episode %d, want %d", got.Episode, tc.wantEpisode)
				}
				on := w.node.sandbox("abc")
				if (on != nil) != tc.wantOnNode || len(w.node.ends()) != 0 {
					t.Errorf("on the node: %v, unacknowledged: %v", on, w.node.ends())
				}
				if on != nil && !on.ExpiresAt.Equal(sb.ExpiresAt) {
					t.Errorf("expiry %s, want %s", on.ExpiresAt, sb.ExpiresAt)
				}
			}
		})
	}
}

func TestReconcileManyPages(t *testing.T) {
	w := newWorld(t)
	times := make([]int64, 1500)
	for i := range times {
		times[i] = int64(i / 3) // some are made at the same moment
	}
	err := inParallel(t.Context(), 64, times, func(at int64) error {
		sb := sandbox.Sandbox{ID: sandbox.NewID(rand.Reader), Node: "n1", State: sandbox.Running, Episode: 1, ImageID: "sha256:base",
			CreatedAt: time.Unix(at, 0).UTC()}
		_, _, err := w.store.CreateSandbox(w.all(), sb, storeNoKey)
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	if err := w.server.Reconcile(t.Context()); err != nil {
		t.Fatal(err)
	}
	if left, err := w.server.liveRecords(w.all()); err != nil || len(left) != 0 {
		t.Errorf("%d left, %v", len(left), err)
	}
}

// An end reaches the store even if the store fails for a while, and the node
// keeps it until then.
func TestEndsAreRecorded(t *testing.T) {
	w := newWorld(t)
	for _, cause := range []sandbox.Cause{sandbox.OOM, sandbox.TTL, sandbox.Idle, sandbox.InitKilled, sandbox.Infra} {
		sb := w.create(nil)
		w.die(sb.Id, cause)
		if end := w.ended(sb.Id); end.Cause != cause {
			t.Errorf("ended with %s, want %s", end, cause)
		}
	}

	sb := w.create(nil)
	w.store.failing("EndSandbox", errStore)
	w.node.die(sb.Id, sandbox.OOM)
	w.until("it has ended", func() bool { return w.node.sandbox(sb.Id) == nil })
	if w.server.settle(t.Context()) {
		t.Error("a failing store cannot have settled")
	}
	if _, kept := w.node.ends()[sb.Id]; !kept {
		t.Error("the node was told to forget an end nobody has")
	}
	w.store.failing("EndSandbox", nil)
	if end := w.ended(sb.Id); end.Cause != sandbox.OOM {
		t.Errorf("ended with %s", end)
	}
	settled(w)
	if ends := w.node.ends(); len(ends) != 0 {
		t.Errorf("not acknowledged: %v", ends)
	}
}

func TestKillReturnsTheFirstEnd(t *testing.T) {
	w := newWorld(t)
	sb := w.create(nil)
	if got := w.kill(sb.Id); got.End.GetCause() != "killed_by_user" || got.State != covev1.SandboxState_SANDBOX_STATE_ENDED {
		t.Errorf("got %v", got)
	}
	if got := w.kill(sb.Id); got.End.GetCause() != "killed_by_user" {
		t.Errorf("got %v", got)
	}

	// It died by itself and the store does not know yet.
	sb = w.create(nil)
	if err := w.node.Kill(t.Context(), sb.Id, sandbox.End{Cause: sandbox.OOM}); err != nil { // tells nobody
		t.Fatal(err)
	}
	if got := w.kill(sb.Id); got.End.GetCause() != "oom" {
		t.Errorf("got %v", got)
	}

	// The node lost it altogether.
	sb = w.create(nil)
	w.node.lose(t, sb.Id)
	if got := w.kill(sb.Id); got.End.GetCause() != "node_lost" {
		t.Errorf("got %v", got)
	}
}

func TestKillByLabelAndPaging(t *testing.T) {
	w := newWorld(t)
	for i := range 30 {
		label := "odd"
		if i%2 == 0 {
			label = "even"
		}
		w.create(&covev1.SandboxSpec{Labels: map[string]string{"kind": label, "run": "1"}})
	}
	r, err := w.client.Sandboxes.KillByLabel(t.Context(), connect.NewRequest(&covev1.KillByLabelRequest{Labels: map[string]string{"kind": "even", "run": "1"}}))
	if err != nil || len(r.Msg.Ids) != 15 {
		t.Fatal(r, err)
	}
	seen := map[string]bool{}
	token := ""
	for pages := 0; ; pages++ {
		l, err := w.client.Sandboxes.List(t.Context(), connect.NewRequest(&covev1.ListSandboxesRequest{PageSize: 4, PageToken: token}))
		if err != nil {
			t.Fatal(err)
		}
		for _, sb := range l.Msg.Sandboxes {
			if sb.Spec.Labels["kind"] != "odd" || seen[sb.Id] {
				t.Errorf("got %v", sb)
			}
			seen[sb.Id] = true
		}
		if token = l.Msg.NextPageToken; token == "" {
			break
		}
		if pages > 10 {
			t.Fatal("paging never ends")
		}
	}
	if len(seen) != 15 {
		t.Errorf("listed %d", len(seen))
	}
	l, err := w.client.Sandboxes.List(t.Context(), connect.NewRequest(&covev1.ListSandboxesRequest{States: []covev1.SandboxState{covev1.SandboxState_SANDBOX_STATE_ENDED}}))
	if err != nil || len(l.Msg.Sandboxes) != 15 {
		t.Error(len(l.Msg.Sandboxes), err)
	}
}

func TestResetCountsEpisodes(t *testing.T) {
	w := newWorld(t)
	sb := w.create(nil)
	reset := func() (*covev1.Sandbox, error) {
		r, err := w.client.Sandboxes.Reset(t.Context(), connect.NewRequest(&covev1.ResetRequest{Id: sb.Id}))
		if err != nil {
			return nil, err
		}
		return r.Msg.Sandbox, nil
	}
	for want := int64(2); want < 5; want++ {
		got, err := reset()
		if err != nil || got.Episode != want || w.get(sb.Id).Episode != want {
			t.Fatalf("got %v, %v, want episode %d", got, err, want)
		}
	}
	w.node.onReset = func() error { return sandbox.Errorf(sandbox.Unavailable, "node.reset", "no") }
	_, err := reset()
	wantError(t, err, sandbox.ErrUnavailable)
	settled(w)
	if got := w.get(sb.Id).Episode; got != 4 {
		t.Errorf("a failed reset counted: %d", got)
	}
}

func TestSetTimeoutReachesNodeAndStore(t *testing.T) {
	w := newWorld(t)
	sb := w.create(nil)
	set := func(d time.Duration) *covev1.Sandbox {
		r, err := w.client.Sandboxes.SetTimeout(t.Context(), connect.NewRequest(&covev1.SetTimeoutRequest{Id: sb.Id, Timeout: durationpb.New(d)}))
		if err != nil {
			t.Fatal(err)
		}
		return r.Msg.Sandbox
	}
	got := set(time.Hour)
	at := w.node.sandbox(sb.Id).ExpiresAt
	if at.IsZero() || !at.Equal(got.ExpiresAt.AsTime()) || got.Spec.Timeout.AsDuration() != time.Hour {
		t.Errorf("the node has %s, the store %v", at, got)
	}
	if got := set(0); got.ExpiresAt != nil {
		t.Errorf("still expires: %v", got)
	}
}

func TestOldEndsAreForgotten(t *testing.T) {
	now := time.Now()
	w := newWorld(t, func(c *Config) { c.Clock = func() time.Time { return now } })
	old, fresh, living := w.create(nil), w.create(nil), w.create(nil)
	if _, err := w.store.EndSandbox(w.all(), old.Id, sandbox.End{Cause: sandbox.TTL, At: now.Add(-8 * 24 * time.Hour)}); err != nil {
		t.Fatal(err)
	}
	w.kill(fresh.Id)
	w.server.forgetOld(t.Context())
	ids := w.records()
	if len(ids) != 2 {
		t.Errorf("left %v, want %s and %s", ids, fresh.Id, living.Id)
	}
}
