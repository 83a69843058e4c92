package e2e

import (
	"bytes"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"fmt"
	"math/rand/v2"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/cove-sandbox/cove/e2e/world"
)

func (c ran) want(t *testing.T, code int) ran {
	t.Helper()
	if c.Code != code {
		t.Errorf("exit code %d, want %d\nstdout %.500q\nstderr %.500q", c.Code, code, c.Stdout, c.Stderr)
	}
	return c
}

type ran world.Ran

// TestCLI uses bin/cove as a person does.
func TestCLI(t *testing.T) {
	w := world.New(t, world.Options{})
	cove := func(args ...string) ran { t.Helper(); return ran(w.CLI(t, args...)) }
	id := strings.TrimSpace(cove("create", "--memory", "128MiB", "--label", "who=cli").want(t, 0).Stdout)
	if id == "" || strings.ContainsAny(id, " \n") {
		t.Fatalf("create printed %q", id)
	}

	t.Run("exit codes", func(t *testing.T) {
		for line, want := range map[string]int{"true": 0, "exit 7": 7, "exit 255": 255, "kill -TERM $$": 143, "kill -9 $$": 137} {
			cove("exec", "-c", line, id).want(t, want)
			cove("run", "--", "bash", "-c", line).want(t, want)
		}
		cove("exec", "--timeout", "1s", id, "--", "sleep", "1000").want(t, 124)
		cove("run", "--timeout", "2s", "--", "sleep", "1000").want(t, 124)
		cove("exec", id, "--", "no-such-program").want(t, 127)
		cove("exec", "nosuchsandbox", "--", "true").want(t, 125)
		cove("run", "bse", "--", "true").want(t, 125)
		cove("nonsense").want(t, 2)
		cove("create", "--nonsense").want(t, 2)
		cove("create", "--memory", "much").want(t, 2)
		cove("inspect", "nosuchsandbox").want(t, 1)
	})

	t.Run("stdout is the result", func(t *testing.T) {
		r := cove("run", "--", "python3", "-c", "import sys; print(6*7); print('err', file=sys.stderr)").want(t, 0)
		if r.Stdout != "42\n" || r.Stderr != "err\n" {
			t.Errorf("stdout %q, stderr %q", r.Stdout, r.Stderr)
		}
		r = ran(w.CLIWith(t, strings.NewReader("hello"), "exec", "-i", id, "--", "tr", "a-z", "A-Z")).want(t, 0)
		if r.Stdout != "HELLO" {
			t.Errorf("stdin through exec -i: %q", r.Stdout)
		}
		// 50 MiB of stdin, and all of it back.
		data := make([]byte, 50<<20)
		_, _ = rand.NewChaCha8([32]byte{5}).Read(data)
		sum := sha256.Sum256(data)
		r = ran(w.CLIWith(t, bytes.NewReader(data), "exec", "-i", id, "--", "sha256sum")).want(t, 0)
		if !strings.HasPrefix(r.Stdout, hex.EncodeToString(sum[:])) {
			t.Errorf("the sum of stdin is %s", r.Stdout)
		}
		r = ran(w.CLIWith(t, bytes.NewReader(data[:8<<20]), "exec", "-i", id, "--", "cat")).want(t, 0)
		if r.Stdout != string(data[:8<<20]) {
			t.Errorf("cat gave %d bytes, not the same", len(r.Stdout))
		}
	})

	t.Run("json", func(t *testing.T) {
		var found []map[string]any
		if err := json.Unmarshal([]byte(cove("inspect", "--json", id).want(t, 0).Stdout), &found); err != nil || len(found) != 1 || found[0]["id"] != id {
			t.Errorf("inspect --json: %v, %v", found, err)
		}
		for _, args := range [][]string{{"ls", "--json"}, {"ps", "--json", id}, {"image", "ls", "--json"}, {"key", "ls", "--json"}, {"stats", "--json", id}, {"info", "--json"}, {"version", "--json"}} {
			r := cove(args...).want(t, 0)
			if !json.Valid([]byte(r.Stdout)) {
				t.Errorf("cove %s printed no JSON: %.200q", strings.Join(args, " "), r.Stdout)
			}
		}
		if r := cove("ls"); !strings.Contains(r.Stdout, id[:8]) {
			t.Errorf("ls does not show %s: %q", id, r.Stdout)
		}
	})

	t.Run("did you mean", func(t *testing.T) {
		for _, c := range []struct {
			args []string
			want string
		}{
			{[]string{"create", "bse"}, "base"},
			{[]string{"exce", id, "--", "true"}, "exec"},
			{[]string{"image", "lss"}, "ls"},
		} {
			r := cove(c.args...)
			if r.Code == 0 || !strings.Contains(r.Stderr, "did you mean") || !strings.Contains(r.Stderr, c.want) {
				t.Errorf("cove %s: code %d, %q, want a hint at %s", strings.Join(c.args, " "), r.Code, r.Stderr, c.want)
			}
		}
	})

	t.Run("exec id", func(t *testing.T) {
		first := cove("exec", "--exec-id", "one", "-c", "echo ran >> /tmp/cli-count; echo out; exit 4", id).want(t, 4)
		second := cove("exec", "--exec-id", "one", "-c", "echo ran >> /tmp/cli-count; echo out; exit 4", id).want(t, 4)
		if first.Stdout != "out\n" || second.Stdout != first.Stdout {
			t.Errorf("%q, then %q", first.Stdout, second.Stdout)
		}
		if r := cove("exec", id, "--", "cat", "/tmp/cli-count").want(t, 0); r.Stdout != "ran\n" {
			t.Errorf("it ran as %q", r.Stdout)
		}
		exec := strings.TrimSpace(cove("exec", "--detach", id, "--", "sh", "-c", "echo detached; sleep 1000").want(t, 0).Stdout)
		world.Eventually(t, cliWithin, "the output is in the logs", func() bool {
			return cove("logs", id, exec).Stdout == "detached\n"
		})
	})

	t.Run("cp", func(t *testing.T) { copies(t, w, id) })

	t.Run("a wrong server or key", func(t *testing.T) {
		r := cove("--url", "http://127.0.0.1:1", "ls").want(t, 1)
		if !strings.Contains(r.Stderr, "no Cove server at") {
			t.Errorf("stderr %q", r.Stderr)
		}
		bad := filepath.Join(t.TempDir(), "key")
		if err := os.WriteFile(bad, []byte("wrong\n"), 0o600); err != nil {
			t.Fatal(err)
		}
		r = cove("--key-file", bad, "ls").want(t, 1)
		if !strings.Contains(r.Stderr, "does not know this API key") {
			t.Errorf("stderr %q", r.Stderr)
		}
	})

	t.Run("reset and rm", func(t *testing.T) {
		cove("exec", "-c", "touch /tmp/old", id).want(t, 0)
		cove("reset", id).want(t, 0)
		cove("exec", "-c", "test ! -e /tmp/old", id).want(t, 0)
		cove("rm", id).want(t, 0)
		if r := cove("inspect", id).want(t, 0); !strings.Contains(r.Stdout, "killed_by_user") {
			t.Errorf("inspect after rm: %q", r.Stdout)
		}
		if r := cove("ls"); strings.Contains(r.Stdout, id) {
			t.Errorf("ls after rm: %q", r.Stdout)
		}
	})
	w.AssertReconciled(t)
}

func copies(t *testing.T, w *world.World, id string) {
	cove := func(args ...string) ran { t.Helper(); return ran(w.CLI(t, args...)) }
	dir := t.TempDir()
	file := func(name, content string) string {
		p := filepath.Join(dir, name)
		if err := os.MkdirAll(filepath.Dir(p), 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(p, []byte(content), 0o644); err != nil {
			t.Fatal(err)
		}
		return p
	}
	data := make([]byte, 5<<20)
	_, _ = rand.NewChaCha8([32]byte{9}).Read(data)
	big := file("big.bin", string(data))
	file("src/a.txt", "a")
	file("src/sub/b.txt", "b")
	if err := os.Symlink("a.txt", filepath.Join(dir, "src/link")); err != nil {
		t.Fatal(err)
	}
	cove("cp", big, id+":/tmp/big.bin").want(t, 0)
	cove("cp", id+":/tmp/big.bin", filepath.Join(dir, "back.bin")).want(t, 0)
	if got, err := os.ReadFile(filepath.Join(dir, "back.bin")); err != nil || !bytes.Equal(got, data) {
		t.Errorf("a file there and back: %d bytes, %v", len(got), err)
	}
	cove("cp", filepath.Join(dir, "src"), id+":/tmp/src").want(t, 0)
	r := cove("exec", "-c", "cat /tmp/src/a.txt /tmp/src/sub/b.txt /tmp/src/link; readlink /tmp/src/link", id).want(t, 0)
	if r.Stdout != "abaa.txt\n" {
		t.Errorf("a directory in: %q", r.Stdout)
	}
	out := filepath.Join(dir, "out")
	cove("cp", id+":/tmp/src", out).want(t, 0)
	if got, err := os.ReadFile(filepath.Join(out, "sub/b.txt")); err != nil || string(got) != "b" {
		t.Errorf("a directory out: %q, %v", got, err)
	}
	r = ran(w.CLIWith(t, strings.NewReader("piped"), "cp", "-", id+":/tmp/piped")).want(t, 0)
	if r = cove("cp", id+":/tmp/piped", "-").want(t, 0); r.Stdout != "piped" {
		t.Errorf("through pipes: %q", r.Stdout)
	}
	cove("cp", id+":/no/such", dir).want(t, 1)

	// A hostile tree out: nothing of it lands outside of the destination.
	victim := file("victim", "untouched")
	cove("exec", "-u", "root", "-c", fmt.Sprintf(`mkdir -p /tmp/evil && cd /tmp/evil && ln -s %s out && ln -s / root && ln -s /dev/zero zero && mkfifo pipe && ln -s loop loop && ln -s ../../../../../../../../%s rel && printf '#!/bin/sh\n' > suid && chmod 4755 suid && ln -s %s victim`,
		dir, strings.TrimPrefix(dir, "/"), victim), id).want(t, 0)
	cove("cp", id+":/tmp/evil", filepath.Join(dir, "evil")).want(t, 0)
	if got, _ := os.ReadFile(victim); string(got) != "untouched" {
		t.Errorf("the victim holds %q", got)
	}
	err := filepath.WalkDir(filepath.Join(dir, "evil"), func(p string, e os.DirEntry, err error) error {
		if err != nil {
			return err
		}
		info, err := e.Info()
		if err != nil {
			return err
		}
		if info.Mode()&(os.ModeSetuid|os.ModeNamedPipe|os.ModeDevice) != 0 {
			t.Errorf("%s came out as %s", p, info.Mode())
		}
		if target, err := os.Readlink(p); err == nil && (filepath.IsAbs(target) || strings.Contains(target, "..")) {
			t.Errorf("%s came out pointing at %s", p, target)
		}
		return nil
	})
	if err != nil {
		t.Error(err)
	}
}
