package e2e

import (
	"bytes"
	"context"
	"encoding/json"
	"io"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/creack/pty"

	"github.com/cove-sandbox/cove/e2e/world"
)

// TestSSH uses the OpenSSH client against real sandboxes.
func TestSSH(t *testing.T) {
	for _, bin := range []string{"ssh", "scp", "sftp"} {
		if _, err := exec.LookPath(bin); err != nil {
			t.Fatalf("%s is missing: 'make test-deps' installs it", bin)
		}
	}
	w := world.New(t, world.Options{Flags: []string{"--ssh", "127.0.0.1:0"}})
	b := withServer(t, w, world.Small())
	other := w.Create(t, world.Small())
	dir := t.TempDir()
	ran(w.CLI(t, "ssh", "--write", dir, b.ID)).want(t, 0)
	config := filepath.Join(dir, "config")

	// tool runs one of OpenSSH's programs with what cove wrote.
	tool := func(stdin io.Reader, name string, args ...string) ran {
		t.Helper()
		ctx, cancel := context.WithTimeout(t.Context(), 2*time.Minute)
		defer cancel()
		var out, errs bytes.Buffer
		c := exec.CommandContext(ctx, name, append([]string{"-F", config}, args...)...)
		c.Stdin, c.Stdout, c.Stderr = stdin, &out, &errs
		_ = c.Run()
		return ran{Code: c.ProcessState.ExitCode(), Stdout: out.String(), Stderr: errs.String()}
	}

	t.Run("exec", func(t *testing.T) {
		r := tool(strings.NewReader("stdin"), "ssh", b.ID, "cat; echo err >&2; exit 7").want(t, 7)
		if r.Stdout != "stdin" || r.Stderr != "err\n" {
			t.Errorf("%q %q", r.Stdout, r.Stderr)
		}
		tool(nil, "ssh", b.ID, "kill -TERM $$").want(t, 255) // OpenSSH's code for a signal
		if r := tool(nil, "ssh", "-o", "SetEnv=FOO=bar", b.ID, "echo $FOO").want(t, 0); r.Stdout != "bar\n" {
			t.Errorf("env: %q", r.Stdout)
		}
		big := make([]byte, 8<<20)
		_, _ = rand.NewChaCha8([32]byte{9}).Read(big)
		if r := tool(bytes.NewReader(big), "ssh", b.ID, "cat").want(t, 0); r.Stdout != string(big) {
			t.Errorf("%d bytes came back of %d", len(r.Stdout), len(big))
		}
	})
	t.Run("cove ssh", func(t *testing.T) {
		r := ran(w.CLIWith(t, strings.NewReader("x"), "ssh", b.ID, "--", "cat; exit 3")).want(t, 3)
		if r.Stdout != "x" {
			t.Errorf("%q", r.Stdout)
		}
	})
	t.Run("terminal", func(t *testing.T) {
		c := exec.CommandContext(t.Context(), "ssh", "-F", config, "-tt", b.ID)
		c.Env = append(os.Environ(), "TERM=vt220")
		f := newTypist(t, c, 33, 101)
		f.enter(t, "stty size; echo term=$TERM; echo $((6*7))done")
		f.await(t, "33 101")
		f.await(t, "term=vt220")
		f.await(t, "42done")
		if err := pty.Setsize(f.File, &pty.Winsize{Rows: 44, Cols: 55}); err != nil {
			t.Fatal(err)
		}
		_ = c.Process.Signal(syscall.SIGWINCH)
		f.enter(t, "for i in $(seq 100); do stty size | grep -q '44 55' && break; sleep 0.1; done; stty size; exit 5")
		f.await(t, "44 55")
		_ = c.Wait()
		if code := c.ProcessState.ExitCode(); code != 5 {
			t.Errorf("the shell's code: %d", code)
		}
	})
	t.Run("scp and sftp", func(t *testing.T) {
		big := make([]byte, 20<<20)
		_, _ = rand.NewChaCha8([32]byte{4}).Read(big)
		local := filepath.Join(dir, "big")
		if err := os.WriteFile(local, big, 0o640); err != nil {
			t.Fatal(err)
		}
		tool(nil, "scp", "-p", local, b.ID+":/tmp/big").want(t, 0)
		if got := b.Must(t, "stat -c '%a %s' /tmp/big"); strings.TrimSpace(got) != "640 20971520" {
			t.Errorf("%q", got)
		}
		tool(nil, "scp", b.ID+":/tmp/big", local+".back").want(t, 0)
		if back, err := os.ReadFile(local + ".back"); err != nil || !bytes.Equal(back, big) {
			t.Errorf("%d bytes came back, %v", len(back), err)
		}
		batch := "mkdir /tmp/d\nput " + local + " /tmp/d/x\nrename /tmp/d/x /tmp/d/y\nchmod 600 /tmp/d/y\nsymlink y /tmp/d/z\nls -l /tmp/d\nrm /tmp/d/y\n"
		r := tool(strings.NewReader(batch), "sftp", "-b", "-", b.ID).want(t, 0)
		if !strings.Contains(r.Stdout, "-rw-------") || strings.TrimSpace(b.Must(t, "ls /tmp/d")) != "z" {
			t.Errorf("%s", r.Stdout)
		}
		tool(strings.NewReader("get /no/such\n"), "sftp", "-b", "-", b.ID).want(t, 1)
	})
	t.Run("forwarding", func(t *testing.T) {
		addr, stop := sshForward(t, config, b.ID, 8080)
		if res, body := fetch(t, "GET", "http://"+addr, "/", nil); res.StatusCode != 200 || string(body) != "hello\n" {
			t.Errorf("%d %q", res.StatusCode, body)
		}
		stop()
		// Whatever a client names, it is not a way into the server's network.
		r := tool(nil, "ssh", "-W", "10.0.0.1:80", b.ID)
		if r.Code == 0 || !strings.Contains(r.Stderr, "only ports of the sandbox") {
			t.Errorf("%d %s", r.Code, r.Stderr)
		}
	})
	t.Run("a certificate opens its own sandbox", func(t *testing.T) {
		r := tool(nil, "ssh", "-o", "User="+other.ID, b.ID, "true")
		if r.Code != 255 || !strings.Contains(r.Stderr, "Permission denied") {
			t.Errorf("%d %s", r.Code, r.Stderr)
		}
		// The bare key: ssh takes a certificate that lies beside one by itself.
		key, err := os.ReadFile(filepath.Join(dir, "id"))
		if err != nil {
			t.Fatal(err)
		}
		conf, err := os.ReadFile(config)
		if err != nil {
			t.Fatal(err)
		}
		bare := filepath.Join(dir, "bare")
		lines := strings.Split(strings.ReplaceAll(string(conf), filepath.Join(dir, "id")+`"`, bare+`"`), "\n")
		lines = slices.DeleteFunc(lines, func(l string) bool { return strings.Contains(l, "CertificateFile") })
		if os.WriteFile(bare, key, 0o600) != nil || os.WriteFile(bare+".config", []byte(strings.Join(lines, "\n")), 0o600) != nil {
			t.Fatal("cannot write")
		}
		r = tool(nil, "ssh", "-F", bare+".config", b.ID, "true")
		if r.Code != 255 || !strings.Contains(r.Stderr, "Permission denied") {
			t.Errorf("%d %s", r.Code, r.Stderr)
		}
	})
	t.Run("expires", func(t *testing.T) {
		old := filepath.Join(dir, "old")
		ran(w.CLI(t, "ssh", "--ttl", "1s", "--write", old, b.ID)).want(t, 0)
		for until := time.Now().Add(time.Minute); ; {
			c := exec.CommandContext(t.Context(), "ssh", "-F", filepath.Join(old, "config"), b.ID, "true")
			if c.Run() != nil {
				break
			}
			if time.Now().After(until) {
				t.Fatal("a certificate of one second is good for a minute")
			}
		}
	})
	t.Run("ends with the key it was signed for", func(t *testing.T) {
		file, theirs := filepath.Join(dir, "key"), filepath.Join(dir, "theirs")
		var made struct{ ID, Secret string }
		out := ran(w.CLI(t, "key", "create", "guest", "--role", "developer", "--tenant", "default", "--json")).want(t, 0).Stdout
		if err := json.Unmarshal([]byte(out), &made); err != nil || made.ID == "" {
			t.Fatal(out, err)
		}
		if err := os.WriteFile(file, []byte(made.Secret), 0o600); err != nil {
			t.Fatal(err)
		}
		ran(w.CLI(t, "--key-file", file, "ssh", "--write", theirs, "--ttl", "1h", b.ID)).want(t, 0)
		tool(nil, "ssh", "-F", filepath.Join(theirs, "config"), b.ID, "true").want(t, 0)
		ran(w.CLI(t, "key", "revoke", made.ID)).want(t, 0)
		if r := tool(nil, "ssh", "-F", filepath.Join(theirs, "config"), b.ID, "true").want(t, 255); !strings.Contains(r.Stderr, "was revoked") {
			t.Errorf("%s", r.Stderr)
		}
		if log := ran(w.CLI(t, "audit", "--json")).want(t, 0).Stdout; strings.Count(log, `"ssh.login"`) < 3 || !strings.Contains(log, `"unauthenticated"`) {
			t.Errorf("the audit log has not the logins: %s", log)
		}
	})
	t.Run("ends with the client", func(t *testing.T) {
		ctx, cancel := context.WithCancel(t.Context())
		c := exec.CommandContext(ctx, "ssh", "-F", config, b.ID, "touch /tmp/up; exec sleep 98765")
		if err := c.Start(); err != nil {
			t.Fatal(err)
		}
		ran(w.CLI(t, "wait", b.ID, "-c", "test -e /tmp/up")).want(t, 0)
		cancel()
		_ = c.Wait()
		ran(w.CLI(t, "wait", b.ID, "-c", "! grep -qs 9876[5] /proc/[0-9]*/cmdline", "--timeout", "20s")).want(t, 0)
	})
}
