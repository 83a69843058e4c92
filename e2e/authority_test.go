package e2e

import (
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/pem"
	"math/big"
	"strings"
	"testing"
	"time"

	"github.com/cove-sandbox/cove/e2e/world"
	"github.com/cove-sandbox/cove/sandbox"
)

// tlsServer serves /srv/www at https://localhost:8443 and says so in /tmp/up.
const tlsServer = `
import http.server, os, ssl
os.chdir('/srv/www')
s = http.server.ThreadingHTTPServer(('127.0.0.1', 8443), http.server.SimpleHTTPRequestHandler)
c = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER); c.load_cert_chain('/srv/server.pem')
s.socket = c.wrap_socket(s.socket, server_side=True)
open('/tmp/up', 'w')
s.serve_forever()
`

// askers fetch from it, each as programs of its kind do.
var askers = []struct{ name, line string }{
	{"curl", "curl -sS https://localhost:8443/hello"},
	{"curl by the store", "env -u CURL_CA_BUNDLE -u SSL_CERT_FILE curl -sS https://localhost:8443/hello"},
	{"Python", `python3 -c "import urllib.request as u; print(u.urlopen('https://localhost:8443/hello').read().decode(), end='')"`},
	{"git", "git clone -q https://localhost:8443/repo.git /tmp/clone$$ && cat /tmp/clone$$/hello"},
	{"pip", "python3 -m pip download -q --no-deps --no-cache-dir -d /tmp/pip$$ --index-url https://localhost:8443/simple/ hello >/dev/null 2>/tmp/pip.err && ls /tmp/pip$$ | grep -q hello && echo hello || cat /tmp/pip.err"},
}

// TestAuthoritiesOfAnImage runs what an image with authorities in /etc/cove/ca.d
// is for: all programs believe a server whose certificate one of them signed.
func TestAuthoritiesOfAnImage(t *testing.T) {
	w := world.New(t, world.Options{})
	ca, server := authority(t)
	made := w.Create(t, world.Small())
	made.Write(t, "/srv/server.pem", server)
	made.Write(t, "/srv/server.py", []byte(tlsServer))
	made.Must(t, `mkdir -p /srv/www/simple/hello && cd /srv/www && printf hello > hello && mkdir repo && cd repo && git init -q . && printf hello > hello &&
git add . && git -c user.name=x -c user.email=x@y commit -qm x && git clone -q --bare . ../repo.git && cd ../repo.git && git update-server-info && rm -rf ../repo`)
	made.Must(t, `cd /tmp && mkdir h && cd h && printf 'Metadata-Version: 2.1\nName: hello\nVersion: 1\n' > M && python3 - <<'E'
import zipfile
with zipfile.ZipFile('/srv/www/simple/hello/hello-1-py3-none-any.whl', 'w') as z:
    z.write('M', 'hello-1.dist-info/METADATA'); z.writestr('hello-1.dist-info/WHEEL', 'Wheel-Version: 1.0\nTag: py3-none-any\nRoot-Is-Purelib: true\n'); z.writestr('hello-1.dist-info/RECORD', '')
open('/srv/www/simple/hello/index.html', 'w').write('<a href="hello-1-py3-none-any.whl">hello-1-py3-none-any.whl</a>')
E`)
	hasPip := made.Root(t, "python3 -m pip --version").End.ExitCode == 0
	without := made.Snapshot(t, world.Take{Kind: sandbox.FilesystemSnapshot})
	made.Must(t, "mkdir -p /etc/cove/ca.d")
	made.Write(t, "/etc/cove/ca.d/corporate.crt", ca)
	with := made.Snapshot(t, world.Take{Kind: sandbox.FilesystemSnapshot})

	ask := func(t *testing.T, b *world.Box, believed bool) {
		b.Must(t, "rm -f /tmp/up; setsid python3 /srv/server.py >/dev/null 2>&1 & while ! test -e /tmp/up; do sleep 0.05; done")
		for _, a := range askers {
			if a.name == "pip" && !hasPip {
				t.Log("the image has no pip")
				continue
			}
			r := b.Root(t, a.line)
			if got := strings.TrimSpace(string(r.Out)) == "hello"; got != believed {
				t.Errorf("%s believes the server: %v, want %v: %q %q", a.name, got, believed, r.Out, r.Err)
			}
		}
	}
	ask(t, w.Create(t, world.From(without.ID)), false)
	b := w.Create(t, world.From(with.ID))
	ask(t, b, true)
	env := b.Must(t, "echo $NODE_EXTRA_CA_CERTS $JAVA_TOOL_OPTIONS; head -c4 /usr/local/share/ca-certificates/cove.jks | od -An -tx1")
	for _, want := range []string{"cove.crt", "cove.jks", "fe ed fe ed"} { // npm and Java go by these
		if !strings.Contains(env, want) {
			t.Errorf("%q lacks %q", env, want)
		}
	}
	b.Reset(t)
	ask(t, b, true)
	b.Pause(t, true)
	b.Must(t, "curl -sS https://localhost:8443/hello")
}

// authority is the certificate of one, and of a server on localhost with its key.
func authority(t *testing.T) (ca, server []byte) {
	t.Helper()
	make := func(c, parent *x509.Certificate, signer *ecdsa.PrivateKey) (*x509.Certificate, *ecdsa.PrivateKey, []byte) {
		key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
		if err != nil {
			t.Fatal(err)
		}
		if signer == nil {
			parent, signer = c, key
		}
		c.NotBefore, c.NotAfter = time.Now().Add(-time.Hour), time.Now().Add(24*time.Hour)
		der, err := x509.CreateCertificate(rand.Reader, c, parent, &key.PublicKey, signer)
		if err != nil {
			t.Fatal(err)
		}
		made, err := x509.ParseCertificate(der)
		if err != nil {
			t.Fatal(err)
		}
		return made, key, pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: der})
	}
	root, rootKey, caPEM := make(&x509.Certificate{SerialNumber: big.NewInt(1), Subject: pkix.Name{CommonName: "Corporate"}, IsCA: true, BasicConstraintsValid: true, KeyUsage: x509.KeyUsageCertSign}, nil, nil)
	_, key, leaf := make(&x509.Certificate{SerialNumber: big.NewInt(2), Subject: pkix.Name{CommonName: "localhost"}, DNSNames: []string{"localhost"},
		KeyUsage: x509.KeyUsageDigitalSignature, ExtKeyUsage: []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth}}, root, rootKey)
	der, err := x509.MarshalPKCS8PrivateKey(key)
	if err != nil {
		t.Fatal(err)
	}
	return caPEM, append(leaf, pem.EncodeToMemory(&pem.Block{Type: "PRIVATE KEY", Bytes: der})...)
}
