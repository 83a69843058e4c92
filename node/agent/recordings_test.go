//go:build !race

package agent_test

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"strings"
	"sync/atomic"
	"testing"

	"github.com/cove-sandbox/cove/egress/egresstest"
	"github.com/cove-sandbox/cove/sandbox"
)

// episode is code that asks a site that never answers twice alike.
const episode = `python3 -c '
import urllib.request
def ask(path, data=None):
    r = urllib.request.Request("https://good.test:8443" + path, data=data)
    try:
        with urllib.request.urlopen(r, timeout=20) as a: print(a.status, a.headers["X-Call"], a.read().decode())
    except urllib.error.HTTPError as e: print(e.code, e.headers["Cove-Replay"], e.read().decode())
ask("/"); ask("/"); ask("/?q=1"); ask("/echo", b"hello"); ask("/echo", b"again")
print(urllib.request.urlopen("http://good.test/", timeout=20).read().decode())
'`

// What cannot be recorded or replayed is not made, and leaves nothing.
func TestNoSandboxWithoutItsRecording(t *testing.T) {
	m := newMachine(t) // has no networks
	for name, n := range map[string]sandbox.Network{
		"record": {Mode: sandbox.NetworkPublic, Record: &sandbox.NetworkRecord{ID: "tape1"}},
		"replay": {Mode: sandbox.NetworkNone, Replay: &sandbox.NetworkReplay{Recording: "nosuch"}},
	} {
		s := spec()
		s.Network = n
		_, err := m.Create(t.Context(), sandbox.Sandbox{ID: "a", Spec: s}, m.img)
		if want := map[string]error{"record": sandbox.ErrUnsupported, "replay": sandbox.ErrNotFound}[name]; !errors.Is(err, want) {
			t.Errorf("%s: %v", name, err)
		}
	}
	if left, err := os.ReadDir(m.dir + "/recordings"); err != nil || len(left) > 0 {
		t.Errorf("left: %v %v", left, err)
	}
	if live, _ := m.Live(t.Context()); len(live) != 0 {
		t.Errorf("live: %v", live)
	}
}

func TestAnEpisodeIsRecordedAndReplayed(t *testing.T) {
	w := egresstest.NewWorld(t)
	var calls atomic.Int64
	w.HTTPS(t, egresstest.Good+":8443", http.HandlerFunc(func(rw http.ResponseWriter, r *http.Request) {
		rw.Header().Set("X-Call", fmt.Sprint(calls.Add(1)))
		fmt.Fprintf(rw, "%s %s: ", r.Method, r.URL)
		io.Copy(rw, r.Body)
	}))
	up := w.Upstream()
	dial, gone := up.Dial, atomic.Bool{}
	up.Dial = func(ctx context.Context, network, address string) (net.Conn, error) {
		if gone.Load() {
			t.Errorf("a replay dials %s", address)
			return nil, errors.New("the internet is gone")
		}
		return dial(ctx, network, address)
	}
	m := newMachineOn(t, up)
	ctx := t.Context()
	public := network(t, "public")
	public.Record = &sandbox.NetworkRecord{ID: "tape1", Name: "first"}
	m.create("a", with(public))
	first := m.sh("a", episode)
	if !strings.Contains(first, "hello") || strings.Count(first, "\n") != 5 {
		t.Fatalf("%q", first)
	}
	// The recording goes on over a restart and standby on disk.
	if err := m.Pause(ctx, "a", true); err != nil {
		t.Fatal(err)
	}
	m.restart()
	second := m.sh("a", episode)
	st, err := m.NetworkStatus(ctx, "a", 0)
	if err != nil || st.Recording == nil || st.Recording.Exchanges != 12 || st.Recording.State != sandbox.RecordingOpen {
		t.Fatalf("%+v %v", st.Recording, err)
	}
	if err := m.recordings.Delete(ctx, "tape1"); !errors.Is(err, sandbox.ErrPrecondition) {
		t.Errorf("deleted while it records: %v", err)
	}
	// A sandbox that is not made leaves no recording.
	taken := spec()
	taken.Network = public
	if _, err := m.Create(ctx, sandbox.Sandbox{ID: "twice", Spec: taken}, m.img); err == nil {
		t.Error("two sandboxes on one recording")
	}
	// Recording that begins and ends while it runs.
	m.create("late", with(network(t, "public")))
	public.Record = &sandbox.NetworkRecord{ID: "tape2"}
	if _, err := m.SetNetwork(ctx, "late", public); err != nil {
		t.Fatal(err)
	}
	m.sh("late", episode)
	public.Record = nil
	if _, err := m.SetNetwork(ctx, "late", public); err != nil {
		t.Fatal(err)
	}
	m.sh("late", fetch("http://good.test/"))
	if is, err := m.recordings.Status(ctx, []string{"tape2"}); err != nil || is["tape2"].State != sandbox.RecordingFinished || is["tape2"].Exchanges != 6 {
		t.Errorf("%+v %v", is, err)
	}
	for _, id := range []string{"a", "late"} {
		if err := m.Kill(ctx, id, sandbox.End{Cause: sandbox.KilledByUser}); err != nil {
			t.Fatal(err)
		}
	}
	if is, err := m.recordings.Status(ctx, []string{"tape1"}); err != nil || is["tape1"].State != sandbox.RecordingFinished || is["tape1"].Exchanges != 12 || is["tape1"].Sandbox != "a" {
		t.Errorf("%+v %v", is, err)
	}

	gone.Store(true)
	replay := network(t, "none")
	replay.Replay = &sandbox.NetworkReplay{Recording: "tape1"}
	m.create("b", with(replay))
	expect := func(when, id, want string) {
		t.Helper()
		if got := m.sh(id, episode); got != want {
			t.Errorf("%s:\n got %s\nwant %s", when, got, want)
		}
	}
	expect("replayed", "b", first)
	m.restart()
	snap := m.snapshot("b", sandbox.MemorySnapshot, "")
	expect("replayed on after a restart", "b", second)
	s := spec()
	s.Network = replay
	if _, err := m.CreateFrom(ctx, sandbox.Sandbox{ID: "fork", Spec: s}, m.img, snap); err != nil {
		t.Fatal(err)
	}
	expect("in a fork, from where its parent was", "fork", second)
	if got := m.sh("b", episode); strings.Count(got, "424 miss") != 5 || !strings.Contains(got, "not as often") {
		t.Errorf("beyond the end: %s", got)
	}
	if got := m.sh("b", fetch("http://evil.test/", "http://203.0.113.66/")); got != "gaierror\n424" {
		t.Errorf("another host: %q", got)
	}
	st, err = m.NetworkStatus(ctx, "b", 100)
	if err != nil || st.Replay == nil || st.Missed != 8 || st.Replay.Unused != 0 || len(st.Replay.Misses) != 8 || st.Replay.Misses[6].URL != "evil.test" {
		t.Errorf("%+v %v", st.Replay, err)
	}
	if _, _, err := m.Restore(ctx, "b", m.img, snap); err != nil {
		t.Fatal(err)
	}
	expect("restored to the snapshot", "b", second)
	if _, _, err := m.Reset(ctx, "b"); err != nil {
		t.Fatal(err)
	}
	expect("reset", "b", first)
	if err := m.recordings.Delete(ctx, "tape1"); !errors.Is(err, sandbox.ErrPrecondition) {
		t.Errorf("deleted while it is replayed: %v", err)
	}
	for _, id := range []string{"b", "fork"} {
		if err := m.Kill(ctx, id, sandbox.End{Cause: sandbox.KilledByUser}); err != nil {
			t.Fatal(err)
		}
	}
	for _, id := range []string{"tape1", "tape2"} {
		if err := m.recordings.Delete(ctx, id); err != nil {
			t.Error(err)
		}
	}
	if left, err := os.ReadDir(m.dir + "/recordings"); err != nil || len(left) > 0 {
		t.Errorf("left: %v %v", left, err)
	}
	if left := m.namespaces(); len(left) > 0 {
		t.Errorf("left: %q", left)
	}
}
