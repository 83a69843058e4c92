//go:build !race

package agent_test

import (
	"bytes"
	"errors"
	"fmt"
	"net/http"
	"os"
	"strings"
	"testing"

	"github.com/cove-sandbox/cove/egress/egresstest"
	"github.com/cove-sandbox/cove/sandbox"
)

const apiURL = "https://good.test:8443/"

func apiSecret(value string) sandbox.Secret {
	return sandbox.Secret{Name: "api", Hosts: []string{"good.test"}, Header: "X-Key", Env: "API_KEY", Placeholder: "cove-secret-api-0123456789", Value: sandbox.NewSecretValue(value)}
}

func withSecrets(t testing.TB) func(*sandbox.Spec) {
	return func(s *sandbox.Spec) {
		s.Network, s.Secrets = network(t, "rules", "allow good.test"), []string{"api"}
	}
}

func TestSecretsOnGVisor(t *testing.T) {
	w := egresstest.NewWorld(t)
	got := make(chan string, 100)
	w.HTTPS(t, egresstest.Good+":8443", http.HandlerFunc(func(rw http.ResponseWriter, r *http.Request) {
		got <- r.Header.Get("X-Key")
		fmt.Fprint(rw, "echo "+r.Header.Get("X-Key"))
	}))
	m := newMachineOn(t, w.Upstream())
	ctx := t.Context()
	put := func(value string) {
		t.Helper()
		if err := m.PutSecrets(ctx, "", []sandbox.Secret{apiSecret(value)}); err != nil {
			t.Fatal(err)
		}
	}
	works := func(when, id, value string) {
		t.Helper()
		if out := m.sh(id, "curl -sS "+apiURL); out != "echo cove-secret-api-0123456789" {
			t.Errorf("%s: %q", when, out)
			return
		}
		if v := <-got; v != value {
			t.Errorf("%s: the server got %q", when, v)
		}
	}
	const one, two = "sk-one-0123456789", "sk-two-0123456789"
	put(one)
	m.create("a", withSecrets(t))
	works("at first", "a", one)
	if out := m.sh("a", "echo $API_KEY $SSL_CERT_FILE"); out != "cove-secret-api-0123456789 /etc/ssl/certs/ca-certificates.crt" {
		t.Errorf("environment %q", out)
	}
	m.create("mine", withSecrets(t), func(s *sandbox.Spec) {
		s.Env = map[string]string{"API_KEY": "own", "SSL_CERT_FILE": "/own"}
	})
	if out := m.sh("mine", "echo $API_KEY $SSL_CERT_FILE"); out != "own /own" {
		t.Errorf("what the user set became %q", out)
	}
	m.create("plain", with(network(t, "rules", "allow good.test")))
	if out := m.sh("plain", "echo $SSL_CERT_FILE; ls /usr/local/share/ca-certificates"); out != "" {
		t.Errorf("a sandbox without secrets has %q", out)
	}
	if _, _, err := m.Reset(ctx, "a"); err != nil {
		t.Fatal(err)
	}
	works("after a reset", "a", one)
	put(two)
	works("after a rotation", "a", two)

	// An image that trusts nobody is made to trust whom the host does, and us.
	m.sh("plain", "rm -rf /etc/ssl /usr/local/share/ca-certificates")
	if a, err := m.UseSecrets(ctx, "plain", []string{"api"}); err != nil || a != "plain" {
		t.Fatalf("%q, %v", a, err)
	}
	works("given while it ran", "plain", two)
	if out := m.sh("plain", "echo $API_KEY; grep -c BEGIN /etc/ssl/certs/ca-certificates.crt"); !strings.HasPrefix(out, "cove-secret-api-0123456789\n") || strings.HasSuffix(out, "\n0") {
		t.Errorf("given while it ran: %q", out)
	}
	if _, err := m.UseSecrets(ctx, "plain", []string{"other"}); !errors.Is(err, sandbox.ErrNotFound) {
		t.Errorf("one that is not there: %v", err)
	}

	// What came of "a" trusts its authority; what "a" becomes, another's.
	snap := m.snapshot("a", sandbox.MemorySnapshot, "")
	snap.Spec.Authority = "a"
	s := spec()
	withSecrets(t)(&s)
	s.Authority = "a"
	if _, err := m.CreateFrom(ctx, sandbox.Sandbox{ID: "fork", Spec: s}, m.img, snap); err != nil {
		t.Fatal(err)
	}
	works("in a fork", "fork", two)
	if _, _, err := m.Restore(ctx, "plain", m.img, snap); err != nil {
		t.Fatal(err)
	}
	works("what became another", "plain", two)
	if err := m.Pause(ctx, "a", true); err != nil {
		t.Fatal(err)
	}
	works("woken", "a", two)

	// After a restart nothing leaves until the server has spoken.
	m.restart()
	if out := m.sh("a", "curl -sS -m 2 "+apiURL+" 2>&1"); !strings.Contains(out, "curl: (") {
		t.Errorf("before the values were there: %q", out)
	}
	put(one)
	works("when they were", "a", one)
	if _, err := m.UseSecrets(ctx, "a", nil); err != nil {
		t.Fatal(err)
	}
	if out := m.sh("a", "echo $API_KEY; curl -sS -k "+apiURL); out != "echo" { // what the server echoes: nothing
		t.Errorf("taken away: %q", out)
	}
	if v := <-got; v != "" {
		t.Errorf("taken away: the server got %q", v)
	}
	journal, err := os.ReadFile(m.dir + "/node/journal")
	if err != nil || bytes.Contains(journal, []byte(one)) || bytes.Contains(journal, []byte(two)) {
		t.Errorf("the journal has a value, or %v", err)
	}
}

// A create with secrets against one with a network, in turns.
// go test ./node -run xxx -bench CreateSecrets -benchtime 40x
func BenchmarkCreateSecrets(b *testing.B) {
	w := egresstest.NewWorld(b)
	m := newMachineOn(b, w.Upstream())
	if err := m.PutSecrets(b.Context(), "", []sandbox.Secret{apiSecret("sk-one-0123456789")}); err != nil {
		b.Fatal(err)
	}
	benchCreates(b, m, func(s *sandbox.Spec, has bool) {
		withSecrets(b)(s)
		if !has {
			s.Secrets = nil
		}
	})
}
