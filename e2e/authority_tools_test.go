package e2e

import (
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/cove-sandbox/cove/e2e/world"
	"github.com/cove-sandbox/cove/sandbox"
)

// toolsTree makes a root file system of this machine's Node.js, npm and Java with
// their libraries. $1 is the directory, $2 the home of Java.
const toolsTree = `set -eu
root=$1 jvm=$2
mkdir -p "$root"/usr/bin "$root"/usr/lib "$root"/usr/lib64 "$root"/etc "$root"/root "$root"/tmp "$root"/srv
for d in bin lib lib64; do ln -s usr/$d "$root/$d"; done
echo 'root:x:0:0::/root:/bin/sh' > "$root/etc/passwd"; echo 'root:x:0:' > "$root/etc/group"
npm=$(dirname "$(dirname "$(readlink -f "$(command -v npm)")")")
tar -C / -c --exclude src.zip --exclude ct.sym "${npm#/}" "${jvm#/}/bin" "${jvm#/}/lib" "${jvm#/}/conf" | tar -C "$root" -x
find "$root$jvm" -type l | while read -r link; do  # what Debian keeps below /etc
  to=$(readlink "$link"); case $to in /*) ! test -e "$to" || cp -L --parents "$to" "$root" ;; esac
done
for p in node sh cat env mkdir rm sleep setsid; do cp -L "$(command -v $p)" "$root/usr/bin/$p"; done
ln -s "$npm/bin/npm-cli.js" "$root/usr/bin/npm"; ln -s "$jvm/bin/java" "$root/usr/bin/java"
{ ldd "$root"/usr/bin/node "$root"/usr/bin/sh "$root"/usr/bin/env "$root$jvm"/bin/java "$root$jvm"/lib/server/libjvm.so
  find "$root$jvm/lib" -maxdepth 1 -xtype f -name '*.so' | xargs -n1 ldd; } | sed -n 's/.*=> \(\/[^ ]*\) .*/\1/p; s/^\t\(\/[^ ]*\) .*/\1/p' | sort -u |
while read -r lib; do case $lib in "$root"*|"$jvm"*) ;; *) cp -L --parents "$lib" "$root" ;; esac; done
`

// registry is an npm registry of one package on https://localhost:8443.
const registry = `
const fs = require('fs'), pem = fs.readFileSync('/srv/server.pem');
const hello = {name: 'hello', 'dist-tags': {latest: '1.2.3'}, versions: {'1.2.3': {name: 'hello', version: '1.2.3', dist: {tarball: 'https://localhost:8443/x.tgz', shasum: ''}}}};
require('https').createServer({key: pem, cert: pem}, (q, r) => {
  const answers = {'/-/ping': {}, '/hello': hello};
  const path = q.url.split('?')[0];
  if (!(path in answers)) { r.writeHead(404); return r.end(); }
  r.writeHead(200, {'content-type': 'application/json'}); r.end(JSON.stringify(answers[path]));
}).listen(8443, '127.0.0.1', () => fs.writeFileSync('/tmp/up', ''));
`

const askJava = `
import java.net.URL;
import javax.net.ssl.HttpsURLConnection;
public class Ask {
  public static void main(String[] args) throws Exception {
    HttpsURLConnection c = (HttpsURLConnection) new URL(args[0]).openConnection();
    System.out.print(new String(c.getInputStream().readAllBytes()));
  }
}
`

// TestAuthoritiesForNodeAndJava has npm and Java, which do not go by the trust store
// of OpenSSL, believe a server by an authority of its image, and by one of the
// server's option. Both are large, so this machine's own are put into an image.
func TestAuthoritiesForNodeAndJava(t *testing.T) {
	for _, p := range []string{"node", "npm", "javac"} {
		if _, err := exec.LookPath(p); err != nil {
			t.Skipf("this machine has no %s to put into an image: apt-get install nodejs npm openjdk-17-jdk-headless", p)
		}
	}
	javac, err := exec.LookPath("javac")
	if err == nil {
		javac, err = filepath.EvalSymlinks(javac)
	}
	if err != nil {
		t.Fatal(err)
	}
	ca, server := authority(t)
	dir := t.TempDir()
	root := filepath.Join(dir, "root")
	if out, err := exec.CommandContext(t.Context(), "bash", "-c", toolsTree, "tree", root, filepath.Dir(filepath.Dir(javac))).CombinedOutput(); err != nil {
		t.Fatalf("the tree of the image: %v\n%s", err, out)
	}
	write := func(path string, data []byte) {
		t.Helper()
		if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(path, data, 0o644); err != nil {
			t.Fatal(err)
		}
	}
	write(filepath.Join(root, "srv/server.pem"), server)
	write(filepath.Join(root, "srv/registry.js"), []byte(registry))
	write(filepath.Join(root, "srv/Ask.java"), []byte(askJava))
	write(filepath.Join(dir, "ca.pem"), ca)

	w := world.New(t, world.Options{})
	imported := func(name string) {
		t.Helper()
		if r := w.CLI(t, "image", "import", name, root); r.Code != 0 {
			t.Fatalf("import: %s", r.Stderr)
		}
	}
	imported("strangers")
	write(filepath.Join(root, "etc/cove/ca.d/corporate.crt"), ca)
	imported("believers")

	ask := func(t *testing.T, image string, believed bool) {
		spec := world.Small()
		spec.Image, spec.Resources.Memory, spec.Resources.MemoryLimit = image, sandbox.GiB, sandbox.GiB
		b := w.Create(t, spec)
		b.Must(t, "setsid node /srv/registry.js >/dev/null 2>&1 & while ! test -e /tmp/up; do sleep 0.05; done")
		for _, a := range []struct{ name, line, want string }{
			{"npm view", "npm view hello version --registry https://localhost:8443/ --fetch-retries=0 --no-update-notifier", "1.2.3"},
			{"npm ping", "npm ping --registry https://localhost:8443/ --fetch-retries=0 --no-update-notifier >/dev/null 2>&1 && echo pong", "pong"},
			{"Java", "java /srv/Ask.java https://localhost:8443/-/ping", "{}"},
		} {
			r := b.Root(t, a.line)
			if got := strings.TrimSpace(string(r.Out)) == a.want; got != believed {
				t.Errorf("%s believes the server: %v, want %v: %q %q", a.name, got, believed, r.Out, r.Err)
			}
			if refusal := string(r.Out) + string(r.Err); !believed && a.name != "npm ping" && !strings.Contains(refusal, "certificat") { // for that reason, and no other
				t.Errorf("%s fails without a word of certificates: %q", a.name, refusal)
			}
		}
	}
	t.Run("without", func(t *testing.T) { ask(t, "strangers", false) })
	t.Run("of the image", func(t *testing.T) { ask(t, "believers", true) })
	w.SetFlags("--sandbox-ca", filepath.Join(dir, "ca.pem"))
	w.Restart(t)
	t.Run("of the server", func(t *testing.T) { ask(t, "strangers", true) })
}
