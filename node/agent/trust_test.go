//go:build !race

package agent_test

import (
	"fmt"
	"net/http"
	"strings"
	"testing"

	"github.com/cove-sandbox/cove/egress/egresstest"
	"github.com/cove-sandbox/cove/sandbox"
)

// Where somebody on the way looks into TLS, sandboxes trust who the operator
// says: whatever program asks, after a reset, in a fork, and with secrets, whose
// requests the server itself sends on.
func TestSandboxesTrustTheOperatorsAuthorities(t *testing.T) {
	w := egresstest.NewWorld(t)
	w.HTTPS(t, egresstest.Good+":8443", http.HandlerFunc(func(rw http.ResponseWriter, r *http.Request) { fmt.Fprint(rw, "hello") }))
	m := newMachineTrusting(t, w.Upstream(), w.PEM())
	public := func(s *sandbox.Spec) { s.Network = network(t, "public") }
	works := func(when, id string) {
		t.Helper()
		for _, ask := range []string{
			"curl -sS " + apiURL,
			"env -u CURL_CA_BUNDLE -u SSL_CERT_FILE curl -sS " + apiURL, // by the store alone
			"python3 -c 'import urllib.request; print(urllib.request.urlopen(\"" + apiURL + "\").read().decode())'",
		} {
			if out := strings.TrimSpace(m.sh(id, ask)); out != "hello" {
				t.Errorf("%s: %s: %q", when, ask, out)
			}
		}
	}
	m.create("a", public)
	works("at first", "a")
	env := m.sh("a", "echo $NODE_EXTRA_CA_CERTS $GIT_SSL_CAINFO $REQUESTS_CA_BUNDLE $JAVA_TOOL_OPTIONS")
	for _, want := range []string{"cove.crt", "ca-certificates.crt", "-Djavax.net.ssl.trustStore=/usr/local/share/ca-certificates/cove.jks"} {
		if !strings.Contains(env, want) {
			t.Errorf("environment %q lacks %q", env, want)
		}
	}
	if out := m.sh("a", "head -c4 /usr/local/share/ca-certificates/cove.jks | od -An -tx1"); strings.TrimSpace(out) != "fe ed fe ed" {
		t.Errorf("Java's store begins with %q", out)
	}
	if _, _, err := m.Reset(t.Context(), "a"); err != nil {
		t.Fatal(err)
	}
	works("after a reset", "a")
	m.restart()
	works("after a restart", "a")
	if err := m.PutSecrets(t.Context(), "", []sandbox.Secret{apiSecret("sk-one-0123456789")}); err != nil {
		t.Fatal(err)
	}
	m.create("b", withSecrets(t))
	if out := m.sh("b", "curl -sS "+apiURL); out != "hello" {
		t.Errorf("with secrets: %q", out)
	}
	m.create("own", public, func(s *sandbox.Spec) { s.Env = map[string]string{"SSL_CERT_FILE": "/mine"} })
	if out := m.sh("own", "echo $SSL_CERT_FILE"); out != "/mine" {
		t.Errorf("a variable of the user's: %q", out)
	}
}
