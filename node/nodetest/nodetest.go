// Package nodetest is the suite that every node.Node passes, in this process or
// behind a network.
//
// Commands that run in it are sh and coreutils, and files are named relative to
// the working directory, so that a node without isolation can use the host's.
package nodetest

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"iter"
	"net"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/cove-sandbox/cove/node"
	"github.com/cove-sandbox/cove/sandbox"
)

// World is a node and what the suite needs around it.
type World struct {
	Node node.Node
	// Without names the cases that the node cannot be asked, with the reason. For
	// doubles of tests only: a node that serves users has none.
	Without map[string]string
	// Image is what sandboxes start from, with sh and coreutils.
	Image sandbox.Image
	// Remote is a reference that can be pulled.
	Remote string
	// Echo gives a port inside a sandbox on which each connection gets back what
	// it sends, and its end after its end.
	Echo func(t *testing.T, id string) int
	// Free is a port of the callback address that nothing has. Call is a
	// connection to it that code inside a sandbox makes, and Occupy a program
	// inside that listens there.
	Free   func(t *testing.T) int
	Call   func(t *testing.T, id string, port int) net.Conn
	Occupy func(t *testing.T, id string, port int) (free func())
}

// patience bounds every wait: it is never reached by what works.
const patience = 60 * time.Second

// Run holds a node to its contract. open is called once.
func Run(t *testing.T, open func(t *testing.T) World) {
	s := &suite{World: open(t)}
	for _, c := range []struct {
		name string
		run  func(*testing.T)
	}{
		{"Info", s.testInfo},
		{"Create", s.testCreate},
		{"CreateRefuses", s.testCreateRefuses},
		{"Nobody", s.testNobody},
		{"Ended", s.testEnded},
		{"Cancelled", s.testCancelled},
		{"Reset", s.testReset},
		{"Kill", s.testKill},
		{"Expiry", s.testExpiry},
		{"Standby", s.testStandby},
		{"Hold", s.testHold},
		{"HoldLapses", s.testHoldLapses},
		{"Keep", s.testKeep},
		{"EndsAreTold", s.testEndsAreTold},

		{"Process", s.testProcess},
		{"ProcessInput", s.testProcessInput},
		{"ProcessCut", s.testProcessCut},
		{"ProcessEndsWithItsSandbox", s.testProcessEnds},
		{"ProcessOutput", s.testProcessOutput},
		{"ProcessSlowReaders", s.testSlowReaders},
		{"Deadline", s.testDeadline},
		{"Files", s.testFiles},
		{"Watch", s.testWatch},
		{"Upload", s.testUpload},
		{"UploadLooks", s.testUploadLooks},
		{"UploadBreaksOff", s.testUploadBreaksOff},
		{"Download", s.testDownload},
		{"Tree", s.testTree},
		{"Judged", s.testJudged},

		{"Dial", s.testDial},
		{"DialHalfClose", s.testDialHalfClose},
		{"DialDeadlines", s.testDialDeadlines},
		{"DialEnds", s.testDialEnds},
		{"Callbacks", s.testCallbacks},
		{"CallbacksTakenOver", s.testCallbacksTakenOver},

		{"Snapshot", s.testSnapshot},
		{"SnapshotStop", s.testSnapshotStop},
		{"SnapshotLapses", s.testSnapshotLapses},
		{"SnapshotOfWhatEnds", s.testSnapshotOfWhatEnds},
		{"SnapshotFiles", s.testSnapshotFiles},
		{"SnapshotDirectory", s.testSnapshotDirectory},
		{"Fork", s.testFork},
		{"Content", s.testContent},
		{"Progress", s.testProgress},
		{"Expect", s.testExpect},
		{"Network", s.testNetwork},
		{"Secrets", s.testSecrets},

		{"Images", s.testImages},
		{"Recordings", s.testRecordings},
		{"Volumes", s.testVolumes},
		{"Concurrent", s.testConcurrent},
	} {
		t.Run(c.name, func(t *testing.T) {
			if why, ok := s.Without[c.name]; ok {
				t.Skip(why)
			}
			c.run(t)
		})
	}
}

type suite struct {
	World
	boxes atomic.Int64
	execs atomic.Int64
}

func (s *suite) newID() string { return fmt.Sprintf("nodetest%d", s.boxes.Add(1)) }

func spec(edits ...func(*sandbox.Spec)) sandbox.Spec {
	const mib = 1 << 20
	sp := sandbox.Spec{Image: "base", Resources: sandbox.Resources{MilliCPU: 100, Memory: 64 * mib, MemoryLimit: 64 * mib, Disk: 256 * mib}}
	for _, e := range edits {
		e(&sp)
	}
	return sp
}

// idles makes a sandbox sleep after a time without a call.
func idles(after time.Duration) func(*sandbox.Spec) {
	return func(s *sandbox.Spec) { s.IdleTimeout, s.OnIdle = after, sandbox.IdlePause }
}

// box is a new sandbox that goes with the test.
func (s *suite) box(t *testing.T, edits ...func(*sandbox.Spec)) string {
	t.Helper()
	id := s.newID()
	took, err := s.Node.Create(t.Context(), sandbox.Sandbox{ID: id, Tenant: "default", Spec: spec(edits...)}, s.Image)
	if err != nil || took <= 0 {
		t.Fatalf("create: took %s, %v", took, err)
	}
	s.endWith(t, id)
	return id
}

// endWith ends a sandbox with the test.
func (s *suite) endWith(t *testing.T, id string) {
	t.Cleanup(func() {
		ctx, cancel := context.WithTimeout(context.Background(), patience)
		defer cancel()
		if err := s.Node.Kill(ctx, id, sandbox.End{Cause: sandbox.KilledByUser}); err != nil && !errors.Is(err, sandbox.ErrNoSandbox) {
			t.Errorf("kill: %v", err)
		}
		if err := s.Node.AckEnd(ctx, id); err != nil {
			t.Errorf("ack: %v", err)
		}
	})
}

// exec runs a script to its end and returns what it wrote.
func (s *suite) exec(t *testing.T, id, script string) string {
	t.Helper()
	var out bytes.Buffer
	for ev, err := range s.Node.Start(t.Context(), id, s.script(script), 0) {
		if err != nil {
			t.Fatalf("%s: %v", script, err)
		}
		if ev.Output != nil {
			out.Write(ev.Output.Data)
		}
		if ev.End != nil && ev.End.ExitCode != 0 {
			t.Fatalf("%s: %+v: %s", script, *ev.End, out.String())
		}
	}
	return strings.TrimSpace(out.String())
}

func (s *suite) script(script string) sandbox.ProcessSpec {
	return sandbox.ProcessSpec{ExecID: fmt.Sprintf("e%d", s.execs.Add(1)), Args: []string{"sh", "-c", script}}
}

func (s *suite) write(t *testing.T, id, path, content string) {
	t.Helper()
	if _, err := s.Node.WriteFile(t.Context(), id, path, []byte(content), sandbox.WriteOptions{Parents: true}); err != nil {
		t.Fatal(err)
	}
}

func (s *suite) expectFile(t *testing.T, id, path, want string) {
	t.Helper()
	got, _, err := s.Node.ReadFile(t.Context(), id, path, 0, 0)
	if err != nil || string(got) != want {
		t.Errorf("%s is %.100q, %v; want %.100q", path, got, err, want)
	}
}

// standby waits until a sandbox is where it should be.
func (s *suite) standby(t *testing.T, id string, want sandbox.Standby) {
	t.Helper()
	await(t, func() (any, bool) {
		all, err := s.Node.Standby(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		return fmt.Sprintf("%q, want %q", all[id], want), all[id] == want
	})
}

// end waits for the end of a sandbox.
func (s *suite) end(t *testing.T, id string) (end sandbox.End) {
	t.Helper()
	await(t, func() (any, bool) {
		ends, err := s.Node.Ends(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		var ok bool
		end, ok = ends[id]
		return "it has not ended", ok
	})
	return end
}

// await asks until the answer is yes.
func await(t *testing.T, ask func() (state any, ok bool)) {
	t.Helper()
	for until := time.Now().Add(patience); ; time.Sleep(5 * time.Millisecond) {
		state, ok := ask()
		if ok {
			return
		}
		if time.Now().After(until) {
			t.Fatal(state)
		}
	}
}

func expect(t *testing.T, what string, err error, want *sandbox.Error) {
	t.Helper()
	if !errors.Is(err, want) {
		t.Errorf("%s: %v, want %s %s", what, err, want.Class, want.Reason)
	}
}

func must(t *testing.T, what string, err error) {
	t.Helper()
	if err != nil {
		t.Fatalf("%s: %v", what, err)
	}
}

// last is the error that a stream ends with.
func last[T any](seq iter.Seq2[T, error]) (err error) {
	for _, e := range seq {
		err = e
	}
	return err
}
