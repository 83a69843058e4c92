package server

import (
	"bufio"
	"context"
	"encoding/json"
	"net/http"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"connectrpc.com/connect"
	"google.golang.org/protobuf/types/known/durationpb"

	covev1 "github.com/cove-sandbox/cove/api/cove/v1"
	"github.com/cove-sandbox/cove/sandbox"
)

// group makes one and returns all its events.
func (w *world) group(ctx context.Context, m *covev1.GroupRequest) (events []*covev1.GroupEvent, err error) {
	s, err := w.client.Runs.Group(ctx, connect.NewRequest(m))
	if err != nil {
		return nil, err
	}
	defer s.Close()
	for s.Receive() {
		events = append(events, s.Msg())
	}
	return events, s.Err()
}

func lastOf(events []*covev1.GroupEvent) *covev1.GroupEvent {
	if len(events) == 0 {
		return nil
	}
	return events[len(events)-1]
}

func members(ev *covev1.GroupEvent) (ids []string) {
	for _, r := range ev.GetResults() {
		if r.Sandbox != nil {
			ids = append(ids, r.Sandbox.Id)
		}
	}
	return ids
}

func TestGroup(t *testing.T) {
	w := newWorld(t)
	w.node.most = 100
	run := w.run(&covev1.CreateRunRequest{Name: "r"})
	live := w.create(nil)
	snap := w.mustSnapshot(&covev1.CreateSnapshotRequest{Sandbox: live.Id, Kind: "memory"}).Id
	if _, _, _, err := w.build(t.Context(), &covev1.BuildTemplateRequest{Name: "tpl", Spec: &covev1.SandboxSpec{Snapshot: snap}}); err != nil {
		t.Fatal(err)
	}
	for what, m := range map[string]*covev1.GroupRequest{
		"an image":          {Spec: in("r", "g")},
		"a template":        {Spec: &covev1.SandboxSpec{Template: "tpl", Rollout: in("r", "g").Rollout}},
		"a snapshot":        {Spec: &covev1.SandboxSpec{Snapshot: snap, Rollout: in("r", "g").Rollout}},
		"a running sandbox": {Sandbox: live.Id, Spec: in("r", "g")},
	} {
		m.Count, m.IdempotencyKey, m.Spec.Rollout.Episode = 5, what, ""
		events, err := w.group(t.Context(), m)
		last := lastOf(events)
		if err != nil || last.State != "done" || len(members(last)) != 5 || last.Ready != 5 || last.Existed {
			t.Fatalf("of %s: %v, %v", what, events, err)
		}
		if ev := events[0]; ev.State != "creating" || ev.Count != 5 {
			t.Errorf("of %s: %v first", what, ev)
		}
		for i, r := range last.Results {
			if s := r.Sandbox.Spec; s.Rollout.GetRun() != run.Id || s.Rollout.Group != "g" || s.Rollout.Episode != strconv.Itoa(i+1) || s.Lease != run.Id {
				t.Errorf("of %s: %v", what, s)
			}
		}
		again, err := w.group(t.Context(), m)
		if err != nil || !lastOf(again).Existed || !slices.Equal(members(lastOf(again)), members(last)) {
			t.Errorf("of %s: again %v, %v", what, again, err)
		}
	}
	for field, m := range map[string]*covev1.GroupRequest{"count": {}, "at_least": {Count: 2, AtLeast: 3}, "max_wait": {Count: 1, MaxWait: durationpb.New(2 * time.Hour)},
		"sandbox": {Count: 1, Sandbox: live.Id, Spec: &covev1.SandboxSpec{Image: "base"}}, "spec.rollout.run": {Count: 1, Spec: &covev1.SandboxSpec{Rollout: &covev1.Rollout{Group: "g"}}}} {
		_, err := w.group(t.Context(), m)
		if e := wantError(t, err, sandbox.ErrInvalid); e.Field != field {
			t.Errorf("field %q, want %q", e.Field, field)
		}
	}
}

// A group of a run has a name of its own where it was given none: by its key the
// same each time, and never that of another.
func TestGroupHasAName(t *testing.T) {
	w := newWorld(t)
	w.node.most = 100
	run := w.run(&covev1.CreateRunRequest{Name: "r"})
	name := func(key string) (string, []string) {
		t.Helper()
		events, err := w.group(t.Context(), &covev1.GroupRequest{Count: 2, IdempotencyKey: key, Spec: in("r", "")})
		if err != nil {
			t.Fatal(err)
		}
		return lastOf(events).Results[0].Sandbox.Spec.Rollout.Group, members(lastOf(events))
	}
	seen := map[string]bool{}
	for _, key := range []string{"", "", "k", "l"} {
		n, ids := name(key)
		if n == "" || seen[n] {
			t.Errorf("key %q: %q is no name, or another group's", key, n)
		}
		seen[n] = true
		if key == "" {
			continue
		}
		w.server.forks.mu.byKey = nil // as after a restart
		if again, same := name(key); again != n || !slices.Equal(same, ids) {
			t.Errorf("key %q: %q %v, then %q %v", key, n, ids, again, same)
		}
	}
	k, _ := name("k")
	for _, restarted := range []bool{false, true} {
		want := "'k' was used for a group of 2, '" + k + "' of run r"
		if restarted {
			w.server.forks.mu.byKey = nil
			want = "of group '" + k + "' of run " + run.Id
		}
		_, err := w.group(t.Context(), &covev1.GroupRequest{Count: 3, IdempotencyKey: "k", Spec: in("r", "")})
		wantError(t, err, sandbox.ErrAlreadyExists, want)
	}
}

// All or at least so many: what is too few leaves nothing, what is enough says of
// each that is missing why.
func TestGroupOfTooFew(t *testing.T) {
	w := newWorld(t)
	w.node.most = 100
	var mu sync.Mutex
	made := 0
	w.node.onCreate = func(context.Context, sandbox.Sandbox) error {
		mu.Lock()
		defer mu.Unlock()
		if made++; made > 3 {
			return sandbox.Errorf(sandbox.DiskFull, "", "no space")
		}
		return nil
	}
	events, err := w.group(t.Context(), &covev1.GroupRequest{Count: 5, AtLeast: 3, Spec: in(w.run(&covev1.CreateRunRequest{Name: "r"}).Id, "")})
	last := lastOf(events)
	if err != nil || len(members(last)) != 3 || last.Ready != 3 || len(last.Results) != 5 {
		t.Fatal(events, err)
	}
	failed := 0
	for _, r := range last.Results {
		if r.Error != nil {
			failed++
			if r.Error.Code != "disk_full" || r.Message == "" {
				t.Errorf("%v", r)
			}
		}
	}
	if failed != 2 || w.node.liveCount() != 3 {
		t.Errorf("%d failed, %d live", failed, w.node.liveCount())
	}
	made = 0
	_, err = w.group(t.Context(), &covev1.GroupRequest{Count: 5, AtLeast: 4, IdempotencyKey: "k"})
	wantError(t, err, sandbox.ErrDiskFull, "at least 4")
	w.until("nothing is left", func() bool { return w.node.liveCount() == 3 && len(w.records()) == 3 })
}

// Two groups that do not fit together come one after the other, and neither has a
// part of the room while it waits.
func TestGroupsWaitForAllTheirRoom(t *testing.T) {
	w := newWorld(t, func(c *Config) { c.QueueWait = 20 * time.Second })
	w.node.most = 5
	first, err := w.group(t.Context(), &covev1.GroupRequest{Count: 4})
	if err != nil {
		t.Fatal(err)
	}
	type result struct {
		events []*covev1.GroupEvent
		err    error
	}
	results := make(chan result, 2)
	for range 2 {
		go func() {
			events, err := w.group(t.Context(), &covev1.GroupRequest{Count: 4})
			results <- result{events, err}
		}()
	}
	w.until("both wait", func() bool {
		w.server.queue.mu.Lock()
		defer w.server.queue.mu.Unlock()
		return w.server.queue.mu.queue.Len() == 2
	})
	if n := w.node.liveCount(); n != 4 {
		t.Errorf("%d live while they wait", n)
	}
	seen := map[int32]bool{}
	for _, ids := range [][]string{members(lastOf(first)), nil} {
		for _, id := range ids {
			w.kill(id)
		}
		r := <-results
		if r.err != nil {
			t.Fatal(r.err)
		}
		if ev := r.events[0]; ev.State != "queued" || ev.RetryAfter == nil {
			t.Errorf("first %v", ev)
		} else {
			seen[ev.Position] = true
		}
		if n := w.node.liveCount(); n != 4 {
			t.Errorf("%d live", n)
		}
		for _, id := range members(lastOf(r.events)) {
			w.kill(id)
		}
	}
	if !seen[0] || !seen[1] {
		t.Errorf("positions %v", seen)
	}
	_, err = w.group(t.Context(), &covev1.GroupRequest{Count: 6})
	wantError(t, err, sandbox.ErrNoCapacity, "at_least")
	events, err := w.group(t.Context(), &covev1.GroupRequest{Count: 6, AtLeast: 2})
	if err != nil || len(members(lastOf(events))) != 5 {
		t.Errorf("%v %v", events, err)
	}
	_, err = w.group(t.Context(), &covev1.GroupRequest{Count: 2, MaxWait: durationpb.New(time.Millisecond)})
	if e := wantError(t, err, sandbox.ErrNoCapacity); e.RetryAfter == 0 {
		t.Errorf("%v", e)
	}
}

// A caller that leaves leaves nothing, amid the making and in the queue.
func TestGroupWhoseCallerLeaves(t *testing.T) {
	for _, key := range []string{"", "k"} {
		w := newWorld(t, func(c *Config) { c.GroupGrace, c.QueueWait = time.Millisecond, time.Minute })
		w.node.most = 100
		ctx, leave := context.WithCancel(w.Context())
		left := make(chan struct{})
		w.onCall = func(ctx context.Context) { afterAll(ctx, func() { close(left) }) }
		var once sync.Once
		w.node.onCreate = func(context.Context, sandbox.Sandbox) error {
			once.Do(func() { leave(); <-left })
			return nil
		}
		if _, err := w.group(ctx, &covev1.GroupRequest{Count: 16, IdempotencyKey: key}); err == nil {
			t.Fatal("it heard the answer")
		}
		w.until("nothing is left", func() bool { return w.node.liveCount() == 0 && len(w.records()) == 0 })

		// Another one: there, those that were left amid the making may still be tried.
		w = newWorld(t, func(c *Config) { c.GroupGrace, c.QueueWait = time.Millisecond, time.Minute })
		w.node.most = 1
		w.create(nil)
		ctx, leave = context.WithCancel(w.Context())
		done := make(chan error, 1)
		go func() {
			// Not the key of before: that may still stand for the group that was left.
			_, err := w.group(ctx, &covev1.GroupRequest{Count: 1, IdempotencyKey: strings.ToUpper(key)})
			done <- err
		}()
		w.until("it waits", func() bool {
			w.server.queue.mu.Lock()
			defer w.server.queue.mu.Unlock()
			return w.server.queue.mu.queue.Len() == 1
		})
		leave()
		<-done
		w.until("it has left the queue", func() bool {
			w.server.queue.mu.Lock()
			defer w.server.queue.mu.Unlock()
			return w.server.queue.mu.queue.Len() == 0
		})
	}
}

// The same as lines of JSON, for curl.
func TestGroupAsLines(t *testing.T) {
	w := newWorld(t)
	w.node.most = 100
	resp, text := w.http("POST", "/v1/groups", strings.NewReader(`{"count": 2, "spec": {"labels": {"a": "b"}}}`))
	if resp.StatusCode != http.StatusOK || resp.Header.Get("Content-Type") != "application/x-ndjson" {
		t.Fatal(resp.StatusCode, text)
	}
	var last struct {
		State   string
		Results []struct{ Sandbox struct{ Id string } }
	}
	n := 0
	for lines := bufio.NewScanner(strings.NewReader(text)); lines.Scan(); n++ {
		if err := json.Unmarshal(lines.Bytes(), &last); err != nil {
			t.Fatal(err)
		}
	}
	if n < 2 || last.State != "done" || len(last.Results) != 2 || last.Results[1].Sandbox.Id == "" {
		t.Errorf("%d lines: %s", n, text)
	}
	for body, want := range map[string]string{`{"count": 0}`: "count: ", `{"cuont": 1}`: "cuont", `{`: "body"} {
		if resp, text := w.http("POST", "/v1/groups", strings.NewReader(body)); resp.StatusCode != http.StatusBadRequest || !strings.Contains(text, want) {
			t.Errorf("%s: %d %s", body, resp.StatusCode, text)
		}
	}
	// One that fails amid it says so in its last line.
	w.node.onCreate = func(context.Context, sandbox.Sandbox) error { return sandbox.Errorf(sandbox.DiskFull, "", "no space") }
	_, text = w.http("POST", "/v1/groups", strings.NewReader(`{"count": 2}`))
	if lines := strings.Split(strings.TrimSpace(text), "\n"); len(lines) < 2 || !strings.Contains(lines[len(lines)-1], `"code":"resource_exhausted"`) {
		t.Error(text)
	}
}
