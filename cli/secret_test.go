package cli

import (
	"context"
	"io"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"connectrpc.com/connect"

	covev1 "github.com/cove-sandbox/cove/api/cove/v1"
	"github.com/cove-sandbox/cove/sandbox"
)

type fakeSecrets struct{ *fakeAPI }

func (s fakeSecrets) find(name string) *covev1.CreateSecretRequest {
	if i := slices.IndexFunc(s.secrets, func(r *covev1.CreateSecretRequest) bool { return r.GetName() == name }); i >= 0 {
		return s.secrets[i]
	}
	return nil
}

func shown(r *covev1.CreateSecretRequest) *covev1.Secret {
	return &covev1.Secret{Name: r.GetName(), Hosts: r.GetHosts(), Header: r.GetHeader(), Format: r.GetFormat(), Url: r.GetUrl(), Body: r.GetBody(),
		AllowHttp: r.GetAllowHttp(), Env: r.GetEnv(), Placeholder: "cove-secret-" + r.GetName(),
		Labels: r.GetLabels(), Version: 7}
}

func (s fakeSecrets) Create(_ context.Context, r *connect.Request[covev1.CreateSecretRequest]) (*connect.Response[covev1.CreateSecretResponse], error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.find(r.Msg.GetName()) != nil {
		return nil, &sandbox.Error{Class: sandbox.AlreadyExists, Msg: "there already"}
	}
	s.fakeAPI.secrets = append(s.secrets, r.Msg)
	return connect.NewResponse(&covev1.CreateSecretResponse{Secret: shown(r.Msg)}), nil
}

func (s fakeSecrets) List(context.Context, *connect.Request[covev1.ListSecretsRequest]) (*connect.Response[covev1.ListSecretsResponse], error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	return connect.NewResponse(&covev1.ListSecretsResponse{Secrets: each(s.secrets, shown)}), nil
}

func (s fakeSecrets) Update(_ context.Context, r *connect.Request[covev1.UpdateSecretRequest]) (*connect.Response[covev1.UpdateSecretResponse], error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	have := s.find(r.Msg.GetName())
	if have == nil {
		return nil, &sandbox.Error{Class: sandbox.NotFound, Msg: "no secret"}
	}
	if r.Msg.Value != nil {
		have.Value = *r.Msg.Value
	}
	if r.Msg.Body != nil {
		have.Body = *r.Msg.Body
	}
	if len(r.Msg.GetHosts()) > 0 {
		have.Hosts = r.Msg.GetHosts()
	}
	if len(r.Msg.GetLabels()) > 0 || r.Msg.GetClearLabels() {
		have.Labels = r.Msg.GetLabels()
	}
	return connect.NewResponse(&covev1.UpdateSecretResponse{Secret: shown(have)}), nil
}

func (s fakeSecrets) Delete(_ context.Context, r *connect.Request[covev1.DeleteSecretRequest]) (*connect.Response[covev1.DeleteSecretResponse], error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.fakeAPI.secrets = slices.DeleteFunc(s.secrets, func(c *covev1.CreateSecretRequest) bool { return c.GetName() == r.Msg.GetName() })
	return connect.NewResponse(&covev1.DeleteSecretResponse{}), nil
}

func (s fakeSandboxes) SetSecrets(_ context.Context, r *connect.Request[covev1.SetSecretsRequest]) (*connect.Response[covev1.SetSecretsResponse], error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.uses = r.Msg
	return connect.NewResponse(&covev1.SetSecretsResponse{Secrets: r.Msg.GetSecrets()}), nil
}

func TestSecret(t *testing.T) {
	f := newFakeAPI(t)
	f.addSandbox("sb1", nil)
	set := func(s settings, args ...string) call {
		return f.cove(t, s, append([]string{"secret", "set"}, args...)...)
	}
	set(settings{stdin: strings.NewReader("the-value\n")}, "openai", "--host", "api.openai.com", "--header", "Authorization", "--format", "Bearer {}", "--env", "KEY").
		want(t, 0, "cove-secret-openai\n")
	if r := f.secrets[0]; r.Value != "the-value" || r.Header != "Authorization" || r.Env != "KEY" || len(r.Hosts) != 1 {
		t.Errorf("sent %v", r)
	}
	file := filepath.Join(t.TempDir(), "v")
	if err := os.WriteFile(file, []byte("from-file\r\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	set(settings{}, "openai", "--value-file", file).want(t, 0, "cove-secret-openai\n")
	if r := f.secrets[0]; r.Value != "from-file" || r.Header != "Authorization" || r.Hosts[0] != "api.openai.com" {
		t.Errorf("after a rotation: %v", r)
	}
	set(settings{env: map[string]string{"NEW": "from-env"}}, "openai", "--value-env", "NEW").want(t, 0, "cove-secret-openai\n")
	set(settings{}, "openai", "--keep-value", "--body").want(t, 0, "cove-secret-openai\n")
	if r := f.secrets[0]; r.Value != "from-env" || !r.Body {
		t.Errorf("after a change of the rest: %v", r)
	}
	set(settings{}, "none", "--keep-value").want(t, 1, "", "no secret")
	set(settings{}, "openai", "--value-env", "NOTHING").want(t, 2, "", "not set")
	set(settings{}, "openai", "a-value-as-an-argument").want(t, 2, "", "arg")
	out := f.cove(t, settings{}, "secret", "ls")
	if !strings.Contains(out.stdout, "Authorization,body") || strings.Contains(out.stdout, "from-env") {
		t.Errorf("%s", out.stdout)
	}
	if out := f.cove(t, settings{}, "secret", "ls", "--json").stdout; !strings.Contains(out, `"placeholder": "cove-secret-openai"`) || strings.Contains(out, "from-env") {
		t.Errorf("%s", out)
	}
	f.cove(t, settings{}, "create", "--secret", "openai", "--secret", "github", "--network", "public").want(t, 0, "sb1\n")
	if got := f.created[len(f.created)-1].GetSpec().GetSecrets(); !slices.Equal(got, []string{"openai", "github"}) {
		t.Errorf("created with %q", got)
	}
	f.cove(t, settings{}, "secret", "use", "sb1", "openai").want(t, 0, "")
	if f.uses.GetId() != "sb1" || !slices.Equal(f.uses.GetSecrets(), []string{"openai"}) {
		t.Errorf("uses %v", f.uses)
	}
	f.cove(t, settings{}, "secret", "use", "sb1").want(t, 2, "", "--none")
	f.cove(t, settings{}, "secret", "use", "sb1", "--none").want(t, 0, "")
	f.cove(t, settings{}, "secret", "rm", "openai", "--json").want(t, 0, "[\n  \"openai\"\n]\n")
	if len(f.secrets) != 0 {
		t.Errorf("left %v", f.secrets)
	}
}

func TestLabelsOfASecret(t *testing.T) {
	f := newFakeAPI(t)
	labels := func(want string, args ...string) {
		t.Helper()
		s := settings{env: map[string]string{"V": "the-value"}}
		f.cove(t, s, append([]string{"secret", "set", "openai"}, args...)...).want(t, 0, "cove-secret-openai\n")
		if got := formatLabels(f.secrets[0].GetLabels()); got != want {
			t.Errorf("%q: %q, want %q", args, got, want)
		}
	}
	labels("a=b=c,team=rl", "--value-env", "V", "--label", "team=rl", "-l", "a=b=c") // a new one
	labels("a=b=c,team=rl", "--value-env", "V")
	labels("team=eval", "--keep-value", "--label", "team=eval")
	for _, args := range [][]string{{"ls"}, {"ls", "--json"}} {
		out := f.cove(t, settings{}, append([]string{"secret"}, args...)...).stdout
		if !strings.Contains(out, "team=eval") && !strings.Contains(out, `"team": "eval"`) {
			t.Errorf("%q: %s", args, out)
		}
	}
	labels("", "--keep-value", "--no-labels")
	if out := f.cove(t, settings{}, "secret", "ls", "--json").stdout; strings.Contains(out, "labels") || !strings.Contains(out, `"hosts": []`) || !strings.Contains(out, `"version": 7`) {
		t.Errorf("%s", out)
	}
	f.cove(t, settings{}, "secret", "set", "openai", "--keep-value", "--no-labels", "--label", "a=b").want(t, 1, "", "no-labels")
	f.cove(t, settings{}, "secret", "set", "openai", "--keep-value", "--label", "a").want(t, 2, "", "KEY=VALUE")
}

// A prompt or a pipe that says nothing must not hold Ctrl-C up.
func TestCtrlCLeavesASecretThatIsAskedFor(t *testing.T) {
	f := newFakeAPI(t)
	silent, w := io.Pipe()
	defer w.Close()
	sigs := make(chan os.Signal, 1)
	sigs <- os.Interrupt
	f.cove(t, settings{stdin: silent, sigs: sigs}, "secret", "set", "x", "--host", "a.org").want(t, 130, "", "interrupted")
}
