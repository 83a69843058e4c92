package server

import (
	"testing"
	"time"

	"connectrpc.com/connect"
	"google.golang.org/protobuf/types/known/durationpb"

	covev1 "github.com/cove-sandbox/cove/api/cove/v1"
	"github.com/cove-sandbox/cove/sandbox"
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
