package nodetest

import (
	"strings"
	"testing"
	"time"

	"github.com/cove-sandbox/cove/node"
	"github.com/cove-sandbox/cove/sandbox"
)

// What is expected gets ready, and is let go when it is not expected any more.
func (s *suite) testExpect(t *testing.T) {
	ctx, id := t.Context(), s.box(t)
	snap := s.take(t, id, memory)
	name := s.newID()
	e := node.Expectation{Kernels: 2, Restores: 1, States: []sandbox.Content{snap.Content}, TTL: time.Minute}
	var got node.Expected
	for until := time.Now().Add(patience); ; time.Sleep(20 * time.Millisecond) {
		var err error
		got, err = s.Node.Expect(ctx, name, e) // said again, it changes nothing
		must(t, "expect", err)
		if len(got.States) != 1 || got.States[0].Manifest != snap.Content.Manifest {
			t.Fatalf("%+v", got)
		}
		if got.States[0].Err != nil {
			t.Fatal(got.States[0].Err)
		}
		if got.Kernels >= got.Aim && got.States[0].Ready {
			break
		}
		if time.Now().After(until) {
			t.Fatalf("not ready: %+v", got)
		}
	}
	child := s.newID()
	_, err := s.Node.CreateFrom(ctx, sandbox.Sandbox{ID: child, Spec: snap.Spec}, s.Image, snap)
	must(t, "create from what was expected", err)
	s.endWith(t, child)

	missing := sandbox.Content{Manifest: "sha256:" + strings.Repeat("0", 64), Size: 1}
	e = node.Expectation{States: []sandbox.Content{missing}, TTL: time.Minute}
	for until := time.Now().Add(patience); ; time.Sleep(20 * time.Millisecond) {
		got, err = s.Node.Expect(ctx, name, e)
		must(t, "expect", err)
		if got.States[0].Err != nil {
			break // what is not there never gets ready, and says so
		}
		if got.States[0].Ready || time.Now().After(until) {
			t.Fatalf("%+v", got)
		}
	}
	got, err = s.Node.Expect(ctx, name, node.Expectation{})
	if err != nil || len(got.States) != 0 {
		t.Errorf("forgotten: %+v, %v", got, err)
	}
	for _, bad := range []node.Expectation{{Kernels: 1}, {Kernels: -1, TTL: time.Minute}, {Restores: -1, TTL: time.Minute}, {Kernels: 1, TTL: node.MaxExpect + 1}} {
		_, err = s.Node.Expect(ctx, name, bad)
		expect(t, "a bad expectation", err, sandbox.ErrInvalid)
	}
	_, err = s.Node.Expect(ctx, "", node.Expectation{Kernels: 1, TTL: time.Minute})
	expect(t, "without a name", err, sandbox.ErrInvalid)
}
