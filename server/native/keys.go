package native

import (
	"context"
	"time"

	"connectrpc.com/connect"

	covev1 "github.com/cove-sandbox/cove/api/cove/v1"
	"github.com/cove-sandbox/cove/sandbox"
	"github.com/cove-sandbox/cove/server"
	"github.com/cove-sandbox/cove/store"
	"github.com/cove-sandbox/cove/wire"
)

type keys struct{ *server.Server }

func (s keys) Create(ctx context.Context, r *connect.Request[covev1.CreateKeyRequest]) (*connect.Response[covev1.CreateKeyResponse], error) {
	m := r.Msg
	expires, err := wire.DurationFrom("expires", m.Expires)
	if err != nil {
		return nil, err
	}
	k, secret, err := s.CreateKey(ctx, server.KeyRequest{Name: m.Name, Tenant: m.Tenant, Role: sandbox.Role(m.Role), Scopes: m.Scopes, Expires: expires})
	return answer(&covev1.CreateKeyResponse{Key: protoKey(k), Secret: secret}, err)
}

func (s keys) List(ctx context.Context, r *connect.Request[covev1.ListKeysRequest]) (*connect.Response[covev1.ListKeysResponse], error) {
	list, err := s.ListKeys(ctx)
	return answer(&covev1.ListKeysResponse{Keys: each(list, protoKey)}, err)
}

func (s keys) Revoke(ctx context.Context, r *connect.Request[covev1.RevokeKeyRequest]) (*connect.Response[covev1.RevokeKeyResponse], error) {
	return answer(&covev1.RevokeKeyResponse{}, s.RevokeKey(ctx, r.Msg.Id))
}

func (s keys) Rotate(ctx context.Context, r *connect.Request[covev1.RotateKeyRequest]) (*connect.Response[covev1.RotateKeyResponse], error) {
	var grace *time.Duration
	if r.Msg.Grace != nil {
		d, err := wire.DurationFrom("grace", r.Msg.Grace)
		if err != nil {
			return nil, err
		}
		grace = &d
	}
	k, secret, err := s.RotateKey(ctx, r.Msg.Id, grace)
	return answer(&covev1.RotateKeyResponse{Key: protoKey(k), Secret: secret}, err)
}

func protoKey(k store.Key) *covev1.Key {
	p := &covev1.Key{Id: k.ID, Name: k.Name, CreatedAt: wire.Time(k.CreatedAt), LastUsedAt: wire.Time(k.LastUsedAt),
		Tenant: k.Tenant, Role: string(k.Role), Scopes: k.Scopes, ExpiresAt: wire.Time(k.ExpiresAt)}
	if len(k.OldHash) > 0 {
		p.OldSecretUntil = wire.Time(k.OldUntil)
	}
	return p
}
