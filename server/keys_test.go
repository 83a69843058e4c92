package server

import (
	"sync/atomic"
	"testing"
	"time"

	"connectrpc.com/connect"
	"google.golang.org/protobuf/types/known/durationpb"

	covev1 "github.com/cove-sandbox/cove/api/cove/v1"
	"github.com/cove-sandbox/cove/sandbox"
	"github.com/cove-sandbox/cove/wire"
)

// A key that could not have made another neither receives that one's secret nor
// takes it away. The installation's first key is the prize.
func TestKeysHaveNoSayOverGreaterOnes(t *testing.T) {
	s := newShared(t)
	ctx := t.Context()
	made := func(name string, m *covev1.CreateKeyRequest) string {
		t.Helper()
		m.Name = name
		s.keys[name] = s.key(s.client, m)
		return s.keyID
	}
	all, err := s.client.Keys.List(ctx, connect.NewRequest(&covev1.ListKeysRequest{}))
	if err != nil {
		t.Fatal(err)
	}
	ids := map[string]string{}
	for _, k := range all.Msg.Keys {
		if k.Role == string(sandbox.RootRole) {
			ids["first"] = k.Id
		}
	}
	day := durationpb.New(24 * time.Hour)
	for name, m := range map[string]*covev1.CreateKeyRequest{
		"admin":     {Role: "admin"},
		"scoped":    {Role: "admin", Scopes: []string{"keys", "sandboxes"}},
		"part":      {Role: "developer", Scopes: []string{"sandboxes:read"}},
		"elsewhere": {Role: "developer", Scopes: []string{"files"}},
		"passing":   {Role: "admin", Expires: day},
		"sooner":    {Role: "developer", Expires: durationpb.New(time.Hour)},
		"developer": {Role: "developer"},
	} {
		ids[name] = made(name, m)
	}
	for _, c := range []struct {
		who, over string
		may       bool
	}{
		{"admin", "first", false}, {"scoped", "first", false}, {"passing", "first", false},
		{"scoped", "admin", false}, {"scoped", "developer", false}, {"scoped", "elsewhere", false}, {"scoped", "passing", false},
		{"passing", "admin", false}, {"passing", "developer", false}, {"passing", "scoped", false},
		{"scoped", "part", true}, {"passing", "sooner", true}, {"admin", "scoped", true}, {"admin", "passing", true}, {"admin", "developer", true},
		{"scoped", "scoped", true},
	} {
		client := s.dial(s.keys[c.who])
		r, err := client.Keys.Rotate(ctx, connect.NewRequest(&covev1.RotateKeyRequest{Id: ids[c.over]}))
		if !c.may {
			wantError(t, err, sandbox.ErrDenied)
			_, err = client.Keys.Revoke(ctx, connect.NewRequest(&covev1.RevokeKeyRequest{Id: ids[c.over]}))
			wantError(t, err, sandbox.ErrDenied)
			continue
		}
		if err != nil || r.Msg.Secret == "" {
			t.Errorf("%s rotates %s: %v", c.who, c.over, err)
		}
	}
	// Nothing was taken away on the way.
	if _, err := s.client.Keys.List(ctx, connect.NewRequest(&covev1.ListKeysRequest{})); err != nil {
		t.Errorf("the first key: %v", err)
	}
}

// The calls of a key end with it: streams of processes and of files alike, and nobody
// else's.
func TestCallsEndWithTheirKey(t *testing.T) {
	for name, end := range map[string]func(s *shared, id string){
		"revoked": func(s *shared, id string) {
			if _, err := s.red.Keys.Revoke(t.Context(), connect.NewRequest(&covev1.RevokeKeyRequest{Id: id})); err != nil {
				t.Fatal(err)
			}
		},
		"revoked by itself": func(s *shared, id string) {
			if _, err := s.dial(s.keys["it"]).Keys.Revoke(t.Context(), connect.NewRequest(&covev1.RevokeKeyRequest{Id: id})); err != nil {
				t.Fatal("its own call was cut off:", err)
			}
		},
		"expired": func(*shared, string) {}, // it does so by itself
	} {
		t.Run(name, func(t *testing.T) {
			var ahead atomic.Int64
			s := newShared(t, func(c *Config) { c.Clock = func() time.Time { return time.Now().Add(time.Duration(ahead.Load())) } })
			m := &covev1.CreateKeyRequest{Name: "it", Role: "admin"}
			if name == "expired" {
				m.Expires = durationpb.New(time.Hour)
			}
			s.keys["it"] = s.key(s.red, m)
			id := s.keyID
			begin := func(c *wire.Client, exec string) *connect.ServerStreamForClient[covev1.ProcessEvent] {
				st, err := c.Processes.Start(t.Context(), connect.NewRequest(&covev1.StartProcessRequest{SandboxId: s.box, Process: &covev1.ProcessSpec{ExecId: exec, Command: sleeping}}))
				if err != nil || !st.Receive() {
					t.Fatal(err, st.Err())
				}
				t.Cleanup(func() { _ = st.Close() })
				return st
			}
			other := begin(s.red, "others")
			if name == "expired" {
				ahead.Store(int64(time.Hour - 4*time.Second)) // what is left for its calls to begin in
			}
			its := begin(s.dial(s.keys["it"]), "its")
			watch, err := s.dial(s.keys["it"]).Files.Watch(t.Context(), connect.NewRequest(&covev1.WatchFilesRequest{SandboxId: s.box, Path: "/"}))
			if err != nil || !watch.Receive() {
				t.Fatal(err)
			}
			defer watch.Close()
			end(s, id)
			ended := time.Now()
			for its.Receive() {
			}
			for watch.Receive() {
			}
			for what, err := range map[string]error{"the process": its.Err(), "the watch": watch.Err()} {
				if e := wantError(t, err, sandbox.ErrUnauthenticated, "API key"); e.Hint == "" {
					t.Errorf("%s: no hint in %v", what, e)
				}
			}
			if took := time.Since(ended); took > 10*time.Second { // a second, on a machine with nothing else to do
				t.Errorf("they took %s to end", took)
			}
			if _, err := s.red.Processes.Signal(t.Context(), connect.NewRequest(&covev1.SignalRequest{SandboxId: s.box, ExecId: "others"})); err != nil {
				t.Fatal(err)
			}
			if _, how, err := rest(other); err != nil || how.GetEnd().GetCause() != "killed_by_user" {
				t.Errorf("another key's: %v, %v", how, err)
			}
		})
	}
}
