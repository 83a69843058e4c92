package e2e

import (
	"context"
	"net"
	"strings"
	"testing"
	"time"

	"connectrpc.com/connect"

	covev1 "github.com/cove-sandbox/cove/api/cove/v1"
	"github.com/cove-sandbox/cove/e2e/world"
	"github.com/cove-sandbox/cove/sandbox"
)

// replayOf runs the last episode of a sandbox again; seen is told of its progress.
func replayOf(ctx context.Context, w *world.World, id string, seen func(*covev1.ReplayEvent)) (*covev1.Replayed, error) {
	s, err := w.Client().Runs.Replay(ctx, connect.NewRequest(&covev1.ReplayRequest{Sandbox: id}))
	if err != nil {
		return nil, err
	}
	defer s.Close()
	var last *covev1.ReplayEvent
	for s.Receive() {
		last = s.Msg()
		if seen != nil {
			seen(last)
		}
	}
	return last.GetResult(), s.Err()
}

// An episode that fetched from the network says how many bytes it cost, and is run again
// with the origin gone; one whose server dies amid it, or whose disk is full, ends with an
// error that says so, and leaves nothing.
func TestReplayOfARecordedEpisode(t *testing.T) {
	bank := newBank(t)
	disk := smallDisk(t, 4<<30)
	w := world.New(t, world.Options{In: disk, Flags: []string{"--dns", bank.resolver, "--egress-roots", bank.roots}})
	run, err := w.Client().Runs.Create(t.Context(), connect.NewRequest(&covev1.CreateRunRequest{Name: "taped", StepDetails: []string{"egress"}}))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if _, err := w.Client().Runs.Reap(context.WithoutCancel(t.Context()), connect.NewRequest(&covev1.ReapRunRequest{Run: "taped"})); err != nil {
			t.Error(err)
		}
	})
	spec := bank.spec()
	spec.Secrets, spec.Rollout = nil, sandbox.Rollout{Run: run.Msg.Run.Id}
	spec.Network.Record = &sandbox.NetworkRecord{Name: "tape"}
	b := w.Create(t, spec)
	// The bank sends back what it is sent: so much each way, random so that nothing packs it.
	const size = 3 << 20
	url := "https://" + net.JoinHostPort(bankName, bank.port)
	b.Must(t, `python3 -c 'import random; open("/tmp/sent", "wb").write(random.Random(7).randbytes(3 << 20))'`)
	b.Must(t, "set -e; curl -sS -D /tmp/head --data-binary @/tmp/sent "+url+"/echo -o /tmp/got; grep -i ^date /tmp/head; sha256sum < /tmp/got")
	b.Must(t, "sleep 2; cat /tmp/head") // a server can be killed amid it
	steps, err := w.Client().Runs.ListSteps(t.Context(), connect.NewRequest(&covev1.ListStepsRequest{Run: "taped"}))
	if err != nil {
		t.Fatal(err)
	}
	// TLS, the handshake and HTTP: under one part in twenty and 32 KiB.
	fits := func(n int64) bool { return n >= size && n <= size+size/20+32<<10 }
	for i, want := range []bool{false, true, false} {
		s := steps.Msg.Steps[i]
		e := s.Egress
		if e == nil || e.Sent != s.EgressSent || e.Received != s.EgressReceived {
			t.Fatalf("step %d: %v", i+1, s)
		}
		if want && (!fits(e.Sent) || !fits(e.Received) || e.Requests != 1 || e.Denied != 0 || strings.Join(e.Hosts, " ") != bankName) {
			t.Errorf("%d bytes each way are on record as %v", size, e)
		}
		if !want && (e.Sent != 0 || e.Received != 0 || e.Requests != 0) {
			t.Errorf("step %d used no network: %v", i+1, e)
		}
	}

	bank.stop()
	same := func(when string) {
		t.Helper()
		var r *covev1.Replayed
		world.Eventually(t, 30*time.Second, "a replay "+when, func() bool {
			r, err = replayOf(t.Context(), w, b.ID, nil)
			if class := sandbox.ClassOf(err); err != nil && class != sandbox.DiskFull && class != sandbox.NoCapacity { // the node looks every five seconds
				t.Fatalf("%s: %v", when, err)
			}
			return err == nil
		})
		if !r.Same || r.Replayed != 3 || len(r.Gaps) != 0 {
			t.Errorf("%s: %v", when, r)
		}
	}
	alone := func(when string) {
		t.Helper()
		world.Eventually(t, 10*time.Second, when+" its sandbox is gone", func() bool {
			sbs, err := w.Running(t.Context())
			return err == nil && len(sbs) == 1 && sbs[0].ID == b.ID
		})
	}
	same("with the origin gone")
	alone("after a replay")

	killed := false
	_, err = replayOf(t.Context(), w, b.ID, func(ev *covev1.ReplayEvent) {
		if ev.Step == 2 && !killed { // amid the third
			killed = true
			w.Kill(t)
		}
	})
	if sandbox.ClassOf(err) != sandbox.Unavailable {
		t.Errorf("a replay whose server died: %v", err)
	}
	if !killed {
		t.Fatal("no word of the second step")
	}
	w.Start(t)
	alone("after the death of the server")
	b.WantRunning(t)
	same("after a kill -9")

	empty := fillDisk(t, disk, 0)
	if _, err := replayOf(t.Context(), w, b.ID, nil); sandbox.ClassOf(err) != sandbox.DiskFull && sandbox.ClassOf(err) != sandbox.NoCapacity {
		t.Errorf("a replay on a full disk: %v", err)
	}
	// The record of a sandbox that was never made can go when there is room again.
	empty()
	alone("after a full disk")
	same("with room again")
	alone("at the end")
	w.AssertReconciled(t)
}
