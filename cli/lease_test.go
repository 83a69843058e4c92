package cli

import (
	"context"
	"os"
	"testing"
	"time"

	"connectrpc.com/connect"
	"google.golang.org/protobuf/types/known/durationpb"
	"google.golang.org/protobuf/types/known/timestamppb"

	covev1 "github.com/cove-sandbox/cove/api/cove/v1"
	"github.com/cove-sandbox/cove/sandbox"
	"github.com/cove-sandbox/cove/wire"
)

// fakeLeases has one lease of two sandboxes, "l1".
type fakeLeases struct {
	covev1.UnimplementedLeasesHandler
	api *fakeAPI
}

func (fakeLeases) one() *covev1.Lease {
	return &covev1.Lease{Id: "l1", Name: "trainer", Ttl: durationpb.New(5 * time.Minute), Sandboxes: 2,
		CreatedAt: timestamppb.New(time.Now().Add(-time.Hour)), ExpiresAt: timestamppb.New(time.Now().Add(90*time.Second + 500*time.Millisecond))}
}
func (f fakeLeases) Create(_ context.Context, r *connect.Request[covev1.CreateLeaseRequest]) (*connect.Response[covev1.CreateLeaseResponse], error) {
	l := f.one()
	l.Id, l.Ttl, l.Name = "l2", r.Msg.Ttl, r.Msg.Name
	return connect.NewResponse(&covev1.CreateLeaseResponse{Lease: l}), nil
}
func (f fakeLeases) List(context.Context, *connect.Request[covev1.ListLeasesRequest]) (*connect.Response[covev1.ListLeasesResponse], error) {
	return connect.NewResponse(&covev1.ListLeasesResponse{Leases: []*covev1.Lease{f.one()}}), nil
}
func (f fakeLeases) Heartbeat(_ context.Context, r *connect.Request[covev1.HeartbeatRequest]) (*connect.Response[covev1.HeartbeatResponse], error) {
	f.api.mu.Lock()
	defer f.api.mu.Unlock()
	f.api.beats++
	if r.Msg.Id != "l1" {
		return nil, wire.ToConnect(sandbox.NoSuchLease("id", r.Msg.Id))
	}
	return connect.NewResponse(&covev1.HeartbeatResponse{Lease: f.one()}), nil
}
func (f fakeLeases) End(_ context.Context, r *connect.Request[covev1.EndLeaseRequest]) (*connect.Response[covev1.EndLeaseResponse], error) {
	f.api.mu.Lock()
	defer f.api.mu.Unlock()
	f.api.leasesEnded = append(f.api.leasesEnded, r.Msg.Id)
	return connect.NewResponse(&covev1.EndLeaseResponse{Ids: []string{"aa", "bb"}}), nil
}

func TestLease(t *testing.T) {
	f := newFakeAPI(t)
	f.cove(t, settings{}, "lease", "ls").want(t, 0, "ID  SANDBOXES  TTL  EXPIRES   AGE  NAME\nl1  2          5m   in 1m30s  1h   trainer\n")
	f.cove(t, settings{}, "lease", "create", "--ttl", "10m", "--name", "x").want(t, 0, "l2\n")
	f.cove(t, settings{}, "lease", "rm", "l1").want(t, 0, "aa\nbb\n")
	f.cove(t, settings{}, "lease", "rm", "l1", "--json").want(t, 0, "[\n  \"aa\",\n  \"bb\"\n]\n")
	if r := f.cove(t, settings{}, "lease", "renew", "l1"); r.code != 0 {
		t.Error(r)
	}
	f.cove(t, settings{}, "lease", "renew", "l9").want(t, 1, "", "no lease 'l9'")
}

// A signal while the create is under way: the sandbox is ended by the key of the
// request, whether or not it was made.
func TestInterruptDuringCreate(t *testing.T) {
	for _, args := range [][]string{{"run", "--", "ls"}, {"create"}, {"fork", "abc", "-n", "2"}} {
		f := newFakeAPI(t)
		f.addSandbox("abc", nil)
		sigs, gate := make(chan os.Signal, 1), make(chan struct{})
		f.onCreate = func() { sigs <- os.Interrupt; <-gate }
		r := f.cove(t, settings{sigs: sigs}, args...)
		close(gate)
		f.mu.Lock()
		if r.code == 0 || len(f.killedKeys) != 1 || len(f.killedKeys[0]) < 32 {
			t.Errorf("%v: code %d, killed by key %q", args, r.code, f.killedKeys)
		}
		f.mu.Unlock()
		f.onCreate = nil
	}
	// A key of the user's own may be a sandbox of before.
	f := newFakeAPI(t)
	sigs, gate := make(chan os.Signal, 1), make(chan struct{})
	f.onCreate = func() { sigs <- os.Interrupt; <-gate }
	f.cove(t, settings{sigs: sigs}, "create", "--idempotency-key", "mine")
	f.addSandbox("abc", nil)
	f.cove(t, settings{sigs: sigs}, "fork", "abc", "--idempotency-key", "mine")
	close(gate)
	if len(f.killedKeys) != 0 {
		t.Errorf("killed by key %q", f.killedKeys)
	}
}

// What ends a sandbox: never, a time, idleness, a lease.
func TestLifetimes(t *testing.T) {
	now := time.Now()
	for want, s := range map[string]*covev1.Sandbox{
		"never":                    {Spec: &covev1.SandboxSpec{}},
		"idle 5m":                  {Spec: &covev1.SandboxSpec{IdleTimeout: durationpb.New(5 * time.Minute)}},
		"in 2h, idle 5m, lease l1": {Spec: &covev1.SandboxSpec{IdleTimeout: durationpb.New(5 * time.Minute), Lease: "l1"}, ExpiresAt: timestamppb.New(now.Add(2 * time.Hour))},
		"":                         {Spec: &covev1.SandboxSpec{}, End: &covev1.End{}},
	} {
		if got := lifeText(s, now); got != want {
			t.Errorf("%q, want %q", got, want)
		}
	}
	f := newFakeAPI(t)
	f.cove(t, settings{}, "create", "--lease", "l1").want(t, 0, "sb1\n")
	f.cove(t, settings{}, "create", "--timeout", "none").want(t, 0, "sb2\n")
	f.cove(t, settings{}, "create").want(t, 0, "sb3\n")
	if a, b, c := f.created[0].Spec, f.created[1].Spec, f.created[2].Spec; a.Lease != "l1" || b.Timeout == nil || b.Timeout.AsDuration() != 0 || c.Timeout != nil {
		t.Error(a, b, c)
	}
}
