package server

import (
	"errors"
	"fmt"
	"testing"

	"connectrpc.com/connect"

	covev1 "github.com/cove-sandbox/cove/api/cove/v1"
	"github.com/cove-sandbox/cove/sandbox"
)

// What a snapshot adds, frees and takes is told by what its own tenant holds: the
// second tenant with the same content sees the figures of the first.
func TestStoredTellsNothingOfOthers(t *testing.T) {
	s := newShared(t)
	const size = 64 << 10
	content := randomBytes(size) // the same for both
	n := 0
	figures := func(who string) (out []int64) {
		t.Helper()
		c := s.dial(s.keys[who])
		box, err := s.make(c)
		if err != nil {
			t.Fatal(err)
		}
		if _, err := c.Files.Write(t.Context(), connect.NewRequest(&covev1.WriteFileRequest{SandboxId: box.Id, Path: "/big", Data: content})); err != nil {
			t.Fatal(err)
		}
		taken := func() *covev1.Snapshot {
			t.Helper()
			n++ // something is new
			if _, err := c.Files.Write(t.Context(), connect.NewRequest(&covev1.WriteFileRequest{SandboxId: box.Id, Path: "/little", Data: []byte(fmt.Sprint(n))})); err != nil {
				t.Fatal(err)
			}
			st, err := c.Snapshots.Create(t.Context(), connect.NewRequest(&covev1.CreateSnapshotRequest{Sandbox: box.Id, Kind: "filesystem"}))
			if err != nil {
				t.Fatal(err)
			}
			defer st.Close()
			var snap *covev1.Snapshot
			for st.Receive() {
				if st.Msg().Snapshot != nil {
					snap = st.Msg().Snapshot
				}
			}
			if st.Err() != nil || snap == nil {
				t.Fatal(snap, st.Err())
			}
			out = append(out, snap.Stored)
			return snap
		}
		before, err := c.Tenants.Get(t.Context(), connect.NewRequest(&covev1.GetTenantRequest{}))
		if err != nil {
			t.Fatal(err)
		}
		first, second := taken(), taken() // the second shares the file with the first
		after, err := c.Tenants.Get(t.Context(), connect.NewRequest(&covev1.GetTenantRequest{}))
		if err != nil {
			t.Fatal(err)
		}
		out = append(out, after.Msg.Tenant.Used.SnapshotBytes-before.Msg.Tenant.Used.SnapshotBytes)
		for _, snap := range []*covev1.Snapshot{first, second} {
			d, err := c.Snapshots.Delete(t.Context(), connect.NewRequest(&covev1.DeleteSnapshotRequest{Id: snap.Id}))
			if err != nil {
				t.Fatal(err)
			}
			out = append(out, d.Msg.Freed)
		}
		taken() // and left there for the next
		return out
	}
	// A manifest is little beside the file.
	const file, manifest = true, false
	is := func(bytes int64, of bool) bool {
		if of == file {
			bytes -= size
		}
		return bytes > 0 && bytes < size/10
	}
	want := []bool{file, manifest, file, manifest, file, file}
	for _, who := range []string{"red", "blue"} {
		got := figures(who)
		for i := range want {
			if len(got) != len(want) || !is(got[i], want[i]) || got[2] != got[0]+got[1] || got[2] != got[3]+got[4] {
				t.Fatalf("%s is told %v, want %v", who, got, want)
			}
		}
	}
	// Counted from the records, it is the same.
	for _, tenant := range s.tenants {
		s.server.holdings.forget(tenant)
	}
	again := figures("blue")
	if !is(again[0], manifest) || !is(again[3], manifest) || !is(again[4], manifest) {
		t.Errorf("with the file in a snapshot that stays: %v", again)
	}
}

// What is remembered of tenants is bounded: those that were asked for longest ago are
// read again when they are next needed, and count the same. One in use is not.
func TestHoldingsAreBounded(t *testing.T) {
	s := newShared(t)
	h := &s.server.holdings
	h.most = 3
	counts := func(tenant string) int64 {
		t.Helper()
		got := int64(-1)
		stop := errors.New("not recorded")
		err := h.add(t.Context(), s.tenants[tenant], sandbox.Content{Manifest: "m-" + tenant, Size: 7}, func(fresh int64) error { got = fresh; return stop })
		if !errors.Is(err, stop) {
			t.Fatal(err)
		}
		return got
	}
	known := func(tenant string) bool {
		h.mu.Lock()
		defer h.mu.Unlock()
		return h.mu.of[s.tenants[tenant]] != nil
	}
	red, done := h.use(s.tenants["red"])
	before := counts("red")
	if counts("blue"); !known("red") || !known("blue") {
		t.Error("what is in use is forgotten")
	}
	red.mu.Lock()
	blobs := red.mu.held.Len()
	red.mu.Unlock()
	if blobs <= h.most {
		t.Fatalf("red has %d blobs, too few for this test", blobs)
	}
	done()
	if counts("blue"); known("red") || !known("blue") {
		t.Error("red is remembered still, or blue not")
	}
	if after := counts("red"); after != before || before != 7 {
		t.Errorf("it adds %d, and %d when it was read again", before, after)
	}
}
