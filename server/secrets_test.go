package server

import (
	"context"
	"encoding/hex"
	"errors"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"connectrpc.com/connect"

	covev1 "github.com/cove-sandbox/cove/api/cove/v1"
	"github.com/cove-sandbox/cove/internal/seal"
	"github.com/cove-sandbox/cove/sandbox"
	"github.com/cove-sandbox/cove/store"
)

const secretOfScenarios = "sk-of-scenarios"

func (w *world) addSecret(m *covev1.CreateSecretRequest) *covev1.Secret {
	w.Helper()
	r, err := w.client.Secrets.Create(w.Context(), connect.NewRequest(m))
	if err != nil {
		w.Fatal(err)
	}
	return r.Msg.Secret
}

// onNode is the value that the node has for a secret of the default tenant.
func (w *world) onNode(name string) string {
	for _, s := range w.node.saw().secrets[sandbox.DefaultTenant] {
		if s.Name == name {
			return s.Value.Reveal()
		}
	}
	return ""
}

func publicNetwork() *covev1.Network { return &covev1.Network{Mode: "public"} }

func TestSecrets(t *testing.T) {
	w := newWorld(t)
	ctx := t.Context()
	const value, next = "sk-value-0123456789", "sk-next-0123456789"
	sec := w.addSecret(&covev1.CreateSecretRequest{Name: "api", Value: value, Hosts: []string{"api.test"}, Header: "Authorization", Format: "Bearer {}", Env: "API_KEY"})
	if !strings.HasPrefix(sec.Placeholder, "cove-secret-api-") || w.onNode("api") != value {
		t.Errorf("%v, on the node %q", sec, w.onNode("api"))
	}
	_, err := w.client.Secrets.Create(ctx, connect.NewRequest(&covev1.CreateSecretRequest{Name: "api", Value: value, Hosts: []string{"b.test"}}))
	wantError(t, err, sandbox.ErrAlreadyExists, "update it")
	_, err = w.client.Secrets.Create(ctx, connect.NewRequest(&covev1.CreateSecretRequest{Name: "twin", Value: value, Hosts: []string{"b.test"}, Placeholder: sec.Placeholder}))
	if e := wantError(t, err, sandbox.ErrInvalid, "that of secret 'api'"); e.Field != "placeholder" {
		t.Errorf("field %q", e.Field)
	}

	// What is no request is not quoted.
	for _, body := range []string{`{"name":"x","value":["` + value + `"]}`, `{"name":"x","value":"` + value + `"`, value} {
		resp, answer := w.http("POST", "/cove.v1.Secrets/Create", strings.NewReader(body), "Authorization", "Bearer "+w.secret, "Content-Type", "application/json")
		if resp.StatusCode != 400 || strings.Contains(answer, value) {
			t.Errorf("%s: %s %s", body, resp.Status, answer)
		}
	}

	sb := w.create(&covev1.SandboxSpec{Network: publicNetwork(), Secrets: []string{"api"}})
	if rec, err := w.store.GetSandbox(w.all(), sb.Id); err != nil || rec.Spec.Authority != sb.Id || !slices.Equal(rec.Spec.Secrets, []string{"api"}) {
		t.Errorf("%+v, %v", rec.Spec, err)
	}
	// A child trusts what its parent does, and has its secrets.
	fork, err := w.client.Sandboxes.Fork(ctx, connect.NewRequest(&covev1.ForkRequest{Id: sb.Id, Count: 1}))
	if err != nil {
		t.Fatal(err)
	}
	kid := fork.Msg.Results[0].Sandbox
	if rec, err := w.store.GetSandbox(w.all(), kid.Id); err != nil || rec.Spec.Authority != sb.Id || !slices.Equal(rec.Spec.Secrets, []string{"api"}) {
		t.Errorf("%+v, %v", rec.Spec, err)
	}
	// A running one is given them.
	late := w.create(&covev1.SandboxSpec{Network: publicNetwork()})
	if _, err := w.client.Sandboxes.SetSecrets(ctx, connect.NewRequest(&covev1.SetSecretsRequest{Id: late.Id, Secrets: []string{"api"}})); err != nil {
		t.Fatal(err)
	}
	if got := w.get(late.Id); !slices.Equal(got.Spec.Secrets, []string{"api"}) {
		t.Errorf("%v", got)
	}

	// Rotation is at once where sandboxes are.
	up, err := w.client.Secrets.Update(ctx, connect.NewRequest(&covev1.UpdateSecretRequest{Name: "api", Value: new(next)}))
	if err != nil || up.Msg.Secret.Placeholder != sec.Placeholder || up.Msg.Secret.Header != "Authorization" || w.onNode("api") != next {
		t.Errorf("%v, %v, on the node %q", up, err, w.onNode("api"))
	}
	if up, err = w.client.Secrets.Update(ctx, connect.NewRequest(&covev1.UpdateSecretRequest{Name: "api", Hosts: []string{"b.test"}, Header: new(""), Format: new("")})); err != nil || up.Msg.Secret.Header != "" || w.onNode("api") != next {
		t.Errorf("%v, %v", up, err)
	}
	// A server that starts tells the node.
	w.node.does(func(c *calls) { clear(c.secrets) })
	if err := w.server.Reconcile(ctx); err != nil {
		t.Fatal(err)
	}
	if w.onNode("api") != next {
		t.Errorf("after a start the node has %q", w.onNode("api"))
	}
	// What cannot be put in force now is later.
	w.node.does(func(c *calls) { c.putErr = errors.New("busy") })
	_, err = w.client.Secrets.Update(ctx, connect.NewRequest(&covev1.UpdateSecretRequest{Name: "api", Value: new(value)}))
	wantError(t, err, sandbox.ErrUnavailable, "recorded")

	list, err := w.client.Secrets.List(ctx, connect.NewRequest(&covev1.ListSecretsRequest{}))
	if err != nil || len(list.Msg.Secrets) != 1 {
		t.Fatalf("%v, %v", list, err)
	}
	if _, err := w.client.Secrets.Delete(ctx, connect.NewRequest(&covev1.DeleteSecretRequest{Name: "api"})); err != nil {
		t.Fatal(err)
	}
	if w.onNode("api") != "" {
		t.Error("a deleted secret is on the node")
	}
	_, err = w.client.Sandboxes.Fork(ctx, connect.NewRequest(&covev1.ForkRequest{Id: sb.Id, Count: 1}))
	if e := wantError(t, err, sandbox.ErrNotFound, "no secret 'api'"); e.Field != "spec.secrets[0]" {
		t.Errorf("field %q", e.Field)
	}

	// Nothing of ours has a value: the log, the record, the audit log, answers.
	w.server.audit.flush(w.all())
	said := w.log.String() + up.Msg.String() + list.Msg.String()
	entries, err := w.store.ListAudit(w.all(), 0, sb.CreatedAt.AsTime().AddDate(-1, 0, 0), 1000)
	if err != nil {
		t.Fatal(err)
	}
	for _, e := range entries {
		said += e.Op + strings.Join(e.Things, " ") + e.Outcome
	}
	if !strings.Contains(said, "secret.update") || !strings.Contains(said, "name:api") {
		t.Error("the audit log does not know of it")
	}
	files, _ := filepath.Glob(filepath.Join(w.dir, "cove.db*"))
	for _, f := range files {
		b, err := os.ReadFile(f)
		if err != nil {
			t.Fatal(err)
		}
		said += string(b)
	}
	for _, v := range []string{value, next} {
		if strings.Contains(said, v) {
			t.Errorf("%s is in what we keep or say", v)
		}
	}
}

// A value cannot be read with another key, nor put in another's place.
func TestSealedValues(t *testing.T) {
	first, second := seal.NewKey(), seal.NewKey()
	v := vault{seal.NewKeyring(first)}
	s := sandbox.Secret{Tenant: "t", Name: "a", Value: sandbox.NewSecretValue("the value")}
	sealed, err := v.seal(s)
	if err != nil {
		t.Fatal(err)
	}
	if again, _ := v.seal(s); string(again) == string(sealed) || strings.Contains(string(sealed), "value") {
		t.Error("sealed alike, or in clear")
	}
	bare := sandbox.Secret{Tenant: "t", Name: "a"}
	if got, err := (vault{seal.NewKeyring(second, first)}).open(bare, sealed); err != nil || got.Value.Reveal() != "the value" {
		t.Errorf("after a rotation: %v", err)
	}
	for what, f := range map[string]func() error{
		"another key":    func() error { _, err := (vault{seal.NewKeyring(second)}).open(bare, sealed); return err },
		"no key":         func() error { _, err := (vault{}).open(bare, sealed); return err },
		"another name":   func() error { _, err := v.open(sandbox.Secret{Tenant: "t", Name: "b"}, sealed); return err },
		"another tenant": func() error { _, err := v.open(sandbox.Secret{Tenant: "u", Name: "a"}, sealed); return err },
		"a changed byte": func() error {
			_, err := v.open(bare, append(slices.Clone(sealed[:len(sealed)-1]), sealed[len(sealed)-1]^1))
			return err
		},
		"cut short": func() error { _, err := v.open(bare, sealed[:5]); return err },
		"empty":     func() error { _, err := v.open(bare, nil); return err },
	} {
		if err := f(); !errors.Is(err, sandbox.ErrCorrupt) {
			t.Errorf("%s: %v", what, err)
		}
	}
	if _, err := (vault{}).seal(s); !errors.Is(err, sandbox.ErrUnsupported) {
		t.Error(err)
	}
}

// A value that the first release sealed opens for ever.
func TestOpensSecretsOfTheFirstRelease(t *testing.T) {
	sealed, err := hex.DecodeString("011ac2f192702849e02af5ca12d5d7b9ba156073a5a3a9440b92f07a80d62b69a79eeb448772a9822db2")
	if err != nil {
		t.Fatal(err)
	}
	got, err := vault{seal.NewKeyring([seal.KeySize]byte{1, 2, 3})}.open(sandbox.Secret{Tenant: "t", Name: "a"}, sealed)
	if err != nil || got.Value.Reveal() != "hello" {
		t.Errorf("%q, %v", got.Value.Reveal(), err)
	}
}

// Roles: who binds a secret to hosts is an admin; who uses it need not be.
func TestSecretsByRole(t *testing.T) {
	s := newShared(t)
	dev := s.dial(s.key(s.red, &covev1.CreateKeyRequest{Name: "dev", Role: "developer"}))
	ctx := t.Context()
	_, err := dev.Secrets.Update(ctx, connect.NewRequest(&covev1.UpdateSecretRequest{Name: "redtoken", Hosts: []string{"evil.test"}}))
	wantError(t, err, sandbox.ErrDenied, "admin")
	_, err = dev.Secrets.Create(ctx, connect.NewRequest(&covev1.CreateSecretRequest{Name: "x", Value: "12345678", Hosts: []string{"a.test"}}))
	wantError(t, err, sandbox.ErrDenied, "admin")
	if _, err := dev.Sandboxes.Create(ctx, connect.NewRequest(&covev1.CreateSandboxRequest{Spec: &covev1.SandboxSpec{Network: publicNetwork(), Secrets: []string{"redtoken"}}})); err != nil {
		t.Error(err)
	}
	reader := s.dial(s.keys["reader"])
	if r, err := reader.Secrets.List(ctx, connect.NewRequest(&covev1.ListSecretsRequest{})); err != nil || len(r.Msg.Secrets) != 1 || strings.Contains(r.Msg.String(), "redsecretvalue") {
		t.Errorf("%v, %v", r, err)
	}
	// A tenant that goes takes its secrets along.
	s.tenant("gone")
	gone := s.dial(s.keys["gone"])
	if _, err := gone.Secrets.Create(ctx, connect.NewRequest(&covev1.CreateSecretRequest{Name: "x", Value: "12345678", Hosts: []string{"a.test"}})); err != nil {
		t.Fatal(err)
	}
	if _, err := s.client.Tenants.Delete(ctx, connect.NewRequest(&covev1.DeleteTenantRequest{Name: "gone"})); err != nil {
		t.Fatal(err)
	}
	list, err := s.store.ListSecrets(store.In(ctx, s.tenants["gone"]))
	if err != nil || len(list) != 0 || len(s.node.saw().secrets[s.tenants["gone"]]) != 0 {
		t.Errorf("left: %v, %v, on the node %d", list, err, len(s.node.saw().secrets[s.tenants["gone"]]))
	}
}

// Labels stay until others are given or they are cleared; the version is the value's alone.
func TestLabelsAndVersionOfASecret(t *testing.T) {
	w := newWorld(t)
	const value = "sk-value-0123456789"
	w.addSecret(&covev1.CreateSecretRequest{Name: "api", Value: value, Hosts: []string{"api.test"}, Labels: map[string]string{"team": "rl"}})
	rl, eval := map[string]string{"team": "rl"}, map[string]string{"team": "eval"}
	for _, step := range []struct {
		name    string
		change  *covev1.UpdateSecretRequest
		labels  map[string]string
		version int64
	}{
		{"as made", nil, rl, 1},
		{"a new value", &covev1.UpdateSecretRequest{Value: new("sk-next-0123456789")}, rl, 2},
		{"the same again", &covev1.UpdateSecretRequest{Value: new("sk-next-0123456789")}, rl, 3},
		{"other labels", &covev1.UpdateSecretRequest{Labels: eval}, eval, 3},
		{"cleared for others", &covev1.UpdateSecretRequest{Labels: rl, ClearLabels: true}, rl, 3},
		{"something else", &covev1.UpdateSecretRequest{Body: new(true)}, rl, 3},
		{"cleared", &covev1.UpdateSecretRequest{ClearLabels: true}, nil, 3},
	} {
		if step.change != nil {
			step.change.Name = "api"
			up, err := w.client.Secrets.Update(t.Context(), connect.NewRequest(step.change))
			if err != nil || !maps.Equal(up.Msg.Secret.Labels, step.labels) || up.Msg.Secret.Version != step.version {
				t.Errorf("%s: %v, %v", step.name, up, err)
			}
		}
		list, err := w.client.Secrets.List(t.Context(), connect.NewRequest(&covev1.ListSecretsRequest{}))
		if err != nil || !maps.Equal(list.Msg.Secrets[0].Labels, step.labels) || list.Msg.Secrets[0].Version != step.version {
			t.Errorf("%s, listed: %v, %v", step.name, list, err)
		}
	}
	if w.onNode("api") != "sk-next-0123456789" {
		t.Errorf("on the node %q", w.onNode("api"))
	}
}

func secretScenarios() (list []scenario) {
	create := func(change func(*covev1.CreateSecretRequest)) func(context.Context, *world) error {
		return func(ctx context.Context, w *world) error {
			m := &covev1.CreateSecretRequest{Name: "new", Value: "sk-new-value", Hosts: []string{"api.test"}}
			change(m)
			_, err := w.client.Secrets.Create(ctx, connect.NewRequest(m))
			return err
		}
	}
	update := func(m *covev1.UpdateSecretRequest) func(context.Context, *world) error {
		return func(ctx context.Context, w *world) error {
			_, err := w.client.Secrets.Update(ctx, connect.NewRequest(m))
			return err
		}
	}
	remove := func(name string) func(context.Context, *world) error {
		return func(ctx context.Context, w *world) error {
			_, err := w.client.Secrets.Delete(ctx, connect.NewRequest(&covev1.DeleteSecretRequest{Name: name}))
			return err
		}
	}
	use := func(id string, names ...string) func(context.Context, *world) error {
		return func(ctx context.Context, w *world) error {
			_, err := w.client.Sandboxes.SetSecrets(ctx, connect.NewRequest(&covev1.SetSecretsRequest{Id: id, Secrets: names}))
			return err
		}
	}
	box := func(n *covev1.Network, names ...string) func(context.Context, *world) error {
		return func(ctx context.Context, w *world) error {
			_, err := w.client.Sandboxes.Create(ctx, connect.NewRequest(&covev1.CreateSandboxRequest{Spec: &covev1.SandboxSpec{Network: n, Secrets: names}}))
			return err
		}
	}
	invalid, notFound := sandbox.ErrInvalid, sandbox.ErrNotFound
	return []scenario{
		{"Secrets/Create", "good", create(func(m *covev1.CreateSecretRequest) {}), nil, "", ""},
		{"Secrets/Create", "again", create(func(m *covev1.CreateSecretRequest) { m.Name = "api" }), sandbox.ErrAlreadyExists, "name", ""},
		{"Secrets/Create", "name", create(func(m *covev1.CreateSecretRequest) { m.Name = "A" }), invalid, "name", "a-z"},
		{"Secrets/Create", "no hosts", create(func(m *covev1.CreateSecretRequest) { m.Hosts = nil }), invalid, "hosts", ""},
		{"Secrets/Create", "every host", create(func(m *covev1.CreateSecretRequest) { m.Hosts = []string{"a.test", "*"} }), invalid, "hosts[1]", ""},
		{"Secrets/Create", "header that breaks requests", create(func(m *covev1.CreateSecretRequest) { m.Header = "Content-Length" }), invalid, "header", "where a request ends"},
		{"Secrets/Create", "format", create(func(m *covev1.CreateSecretRequest) { m.Header, m.Format = "X", "no place" }), invalid, "format", "{}"},
		{"Secrets/Create", "value", create(func(m *covev1.CreateSecretRequest) { m.Value = "short" }), invalid, "value", "8"},
		{"Secrets/Create", "placeholder", create(func(m *covev1.CreateSecretRequest) { m.Placeholder = "short" }), invalid, "placeholder", "16"},
		{"Secrets/Create", "labels", create(func(m *covev1.CreateSecretRequest) { m.Labels = map[string]string{"a b": "c"} }), invalid, "labels", "a b"},
		{"Secrets/List", "good", func(ctx context.Context, w *world) error {
			_, err := w.client.Secrets.List(ctx, connect.NewRequest(&covev1.ListSecretsRequest{}))
			return err
		}, nil, "", ""},
		{"Secrets/Update", "good", update(&covev1.UpdateSecretRequest{Name: "api", Body: new(true)}), nil, "", ""},
		{"Secrets/Update", "unknown", update(&covev1.UpdateSecretRequest{Name: "apj"}), notFound, "name", "did you mean 'api'?"},
		{"Secrets/Update", "host", update(&covev1.UpdateSecretRequest{Name: "api", Hosts: []string{"10.0.0.1"}}), invalid, "hosts[0]", "address"},
		{"Secrets/Update", "name", update(&covev1.UpdateSecretRequest{Name: "!"}), invalid, "name", ""},
		{"Secrets/Update", "labels", update(&covev1.UpdateSecretRequest{Name: "api", Labels: map[string]string{"a": "\x00"}}), invalid, "labels", "control"},
		{"Secrets/Delete", "good", remove("api"), nil, "", ""},
		{"Secrets/Delete", "unknown", remove("nothing"), notFound, "name", ""},
		{"Secrets/Delete", "name", remove(""), invalid, "name", ""},
		{"Sandboxes/SetSecrets", "none", use(live), nil, "", ""},
		{"Sandboxes/SetSecrets", "without a network", use(live, "api"), invalid, "secrets", "network"},
		{"Sandboxes/SetSecrets", "bad id", use("A!", "api"), invalid, "id", ""},
		{"Sandboxes/SetSecrets", "ended", use(dead, "api"), sandbox.ErrEnded, "", "oom"},
		{"Sandboxes/SetSecrets", "no sandbox", use(none, "api"), notFound, "", ""},
		{"Sandboxes/Create", "with a secret", box(publicNetwork(), "api"), nil, "", ""},
		{"Sandboxes/Create", "with an unknown secret", box(publicNetwork(), "ap"), notFound, "spec.secrets[0]", "did you mean 'api'?"},
		{"Sandboxes/Create", "with a secret twice", box(publicNetwork(), "api", "api"), invalid, "spec.secrets[1]", "twice"},
		{"Sandboxes/Create", "with a secret and no network", box(nil, "api"), invalid, "spec.secrets", "network"},
	}
}
