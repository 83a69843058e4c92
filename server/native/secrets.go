package native

import (
	"context"

	"connectrpc.com/connect"

	covev1 "github.com/cove-sandbox/cove/api/cove/v1"
	"github.com/cove-sandbox/cove/sandbox"
	"github.com/cove-sandbox/cove/server"
	"github.com/cove-sandbox/cove/wire"
)

type secrets struct{ *server.Server }

func (s secrets) Create(ctx context.Context, r *connect.Request[covev1.CreateSecretRequest]) (*connect.Response[covev1.CreateSecretResponse], error) {
	m := r.Msg
	sec, err := s.CreateSecret(ctx, sandbox.Secret{Name: m.Name, Hosts: m.Hosts, Header: m.Header, Format: m.Format, URL: m.Url, Body: m.Body,
		AllowHTTP: m.AllowHttp, Env: m.Env, Placeholder: m.Placeholder, Labels: m.Labels, Value: sandbox.NewSecretValue(m.Value)})
	return answer(&covev1.CreateSecretResponse{Secret: wire.Secret(sec)}, err)
}

func (s secrets) List(ctx context.Context, r *connect.Request[covev1.ListSecretsRequest]) (*connect.Response[covev1.ListSecretsResponse], error) {
	list, err := s.ListSecrets(ctx)
	return answer(&covev1.ListSecretsResponse{Secrets: each(list, wire.Secret)}, err)
}

func (s secrets) Update(ctx context.Context, r *connect.Request[covev1.UpdateSecretRequest]) (*connect.Response[covev1.UpdateSecretResponse], error) {
	m := r.Msg
	u := sandbox.SecretUpdate{Hosts: m.Hosts, Header: m.Header, Format: m.Format, Env: m.Env, URL: m.Url, Body: m.Body, AllowHTTP: m.AllowHttp, Labels: m.Labels}
	if m.ClearLabels && u.Labels == nil {
		u.Labels = map[string]string{}
	}
	if m.Value != nil {
		v := sandbox.NewSecretValue(*m.Value)
		u.Value = &v
	}
	sec, err := s.UpdateSecret(ctx, m.Name, u)
	return answer(&covev1.UpdateSecretResponse{Secret: wire.Secret(sec)}, err)
}

func (s secrets) Delete(ctx context.Context, r *connect.Request[covev1.DeleteSecretRequest]) (*connect.Response[covev1.DeleteSecretResponse], error) {
	return answer(&covev1.DeleteSecretResponse{}, s.DeleteSecret(ctx, r.Msg.Name))
}
