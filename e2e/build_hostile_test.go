package e2e

import (
	"archive/tar"
	"bytes"
	"compress/gzip"
	"encoding/json"
	"errors"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	"connectrpc.com/connect"

	covev1 "github.com/cove-sandbox/cove/api/cove/v1"
	"github.com/cove-sandbox/cove/e2e/world"
	"github.com/cove-sandbox/cove/sandbox"
	"github.com/cove-sandbox/cove/wire"
)

// TestImageBuildHostile builds what means harm or has secrets. Whatever is tried has
// a typed error, and leaves nothing.
func TestImageBuildHostile(t *testing.T) {
	b := builds{world.New(t, world.Options{})}
	const begin = "FROM base\nUSER root\n"
	// A file of the host that no image has.
	host, err := os.MkdirTemp("", "cove-host-")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { os.RemoveAll(host) })
	write(t, host, "file", "the host's")

	t.Run("symlinks lead nowhere", func(t *testing.T) {
		out := map[string]string{"out@": host + "/file", "up@": "../../../../../../../../.." + host, "dir@": "/", "loop@": "loop", "Dockerfile": ""}
		for line, says := range map[string]string{"COPY out /x": "not there", "COPY up/file /x": "not there", "COPY dir" + host + "/file /x": "not there", "COPY loop /x": "dockerfile:3",
			"ADD out /x": "not there", "RUN --mount=type=bind,source=out,target=/m cat /m": "not there"} {
			out["Dockerfile"] = begin + line + "\n"
			b.refuses(t, b.files(t, out), nil, "dockerfile:3", says)
		}
		// Of another stage neither, nor over what is there.
		b.refuses(t, b.dockerfile(t, "FROM base AS a", "USER root", "RUN ln -s "+host+"/file /leak && ln -s "+host+" /srv/d", "FROM base", "COPY --from=a /leak /x"), nil, "dockerfile:5", "not there")
		dir := b.files(t, map[string]string{"Dockerfile": begin + "RUN ln -s " + host + " /d\nCOPY in /d/\nRUN cat " + host + "/in\n", "in": "in the image\n"})
		if r := b.cove(t, "image", "build", dir).want(t, 0); !strings.Contains(r.Stderr, "| in the image") {
			t.Error(r.Stderr)
		}
	})
	t.Run("archives stay within", func(t *testing.T) {
		dir := b.files(t, map[string]string{"Dockerfile": begin + "ADD a.tar /in/\n"})
		for about, c := range map[string]struct {
			hs   []tar.Header
			says string
		}{
			"dots":             {[]tar.Header{{Name: "../../../../../../.." + host + "/evil", Typeflag: tar.TypeReg}}, "dockerfile:3"},
			"a link out":       {[]tar.Header{{Name: "l", Typeflag: tar.TypeSymlink, Linkname: host}, {Name: "l/evil", Typeflag: tar.TypeReg}}, ""},
			"a hard link out":  {[]tar.Header{{Name: "h", Typeflag: tar.TypeLink, Linkname: "../../../../../../.." + host + "/file"}}, "dockerfile:3"},
			"a device":         {[]tar.Header{{Name: "dev", Typeflag: tar.TypeBlock, Devmajor: 8, Mode: 0o666}, {Name: "null", Typeflag: tar.TypeChar, Devmajor: 1, Devminor: 3}}, ""},
			"a name too long":  {[]tar.Header{{Name: strings.Repeat("x", 300), Typeflag: tar.TypeReg}}, "dockerfile:3"},
			"a path too deep":  {[]tar.Header{{Name: strings.Repeat("d/", 300) + "x", Typeflag: tar.TypeReg}}, "dockerfile:3"},
			"a link to itself": {[]tar.Header{{Name: "s", Typeflag: tar.TypeSymlink, Linkname: "s"}, {Name: "s/x", Typeflag: tar.TypeReg}}, "dockerfile:3"},
		} {
			data := tarOf(t, c.hs...)
			write(t, dir, "a.tar", string(data))
			if c.says != "" {
				b.refuses(t, dir, nil, c.says)
			} else {
				b.cove(t, "image", "build", "-t", "in", dir).want(t, 0)
			}
			if left, err := os.ReadDir(host); err != nil || len(left) != 1 {
				t.Errorf("%s: on the host is %v %v", about, left, err)
			}
			// As a context, from a client that is not ours.
			err := b.buildOf(t, b.Client(), "FROM base\nCOPY . /in/\n", data)
			if err == nil && c.says != "" || err != nil && sandbox.ClassOf(err) == sandbox.Internal {
				t.Errorf("%s as a context: %v", about, err)
			}
		}
		r := b.cove(t, "run", "--image", "in", "--", "sh", "-c", "find /in -type b -o -type c").want(t, 0)
		if r.Stdout != "" {
			t.Error("devices in the image:", r.Stdout)
		}
	})
	t.Run("a bomb is not unpacked", func(t *testing.T) {
		var bomb bytes.Buffer
		zw, err := gzip.NewWriterLevel(&bomb, gzip.BestSpeed)
		if err != nil {
			t.Fatal(err)
		}
		tw := tar.NewWriter(zw)
		if err := tw.WriteHeader(&tar.Header{Name: "zeros", Size: 400 << 20, Mode: 0o644}); err != nil {
			t.Fatal(err)
		}
		if _, err := io.Copy(tw, io.LimitReader(zeros{}, 400<<20)); err != nil {
			t.Fatal(err)
		}
		if err := tw.Close(); err != nil {
			t.Fatal(err)
		}
		if err := zw.Close(); err != nil {
			t.Fatal(err)
		}
		b.refuses(t, b.files(t, map[string]string{"Dockerfile": begin + "ADD a.tgz /\n", "a.tgz": bomb.String()}), nil, "dockerfile:3", "unpacks to more than")
	})
	t.Run("files of megabytes, and too many instructions", func(t *testing.T) {
		for _, n := range []int{2 << 20, 9 << 20} {
			b.refuses(t, b.files(t, map[string]string{"Dockerfile": begin + strings.Repeat("# x\n", n/4)}), nil, "has more than 1048576 bytes")
		}
		b.refuses(t, b.dockerfile(t, begin+strings.Repeat("RUN true\n", 600)), nil, "more than 500")
		b.refuses(t, b.dockerfile(t, begin+"ENV A="+strings.Repeat("x", 5000)+"\nENV A="+strings.Repeat("$A", 1000)), nil, "dockerfile:4", "at most")
	})
	t.Run("commands that do not end well", func(t *testing.T) {
		b.refuses(t, b.dockerfile(t, begin+"RUN python3 <<E", "import os", "while True:", "  try: os.fork()", "  except OSError: pass", "E"), []string{"--timeout", "2s"}, "took more than 2s")
		b.refuses(t, b.dockerfile(t, begin+"RUN sleep inf"), []string{"--timeout", "2s"}, "took more than 2s")
		b.refuses(t, b.dockerfile(t, begin+"RUN head -c 1G /dev/zero > /fill"), []string{"--disk", "64MiB"}, "dockerfile:3", "No space left on device")
		b.refuses(t, b.dockerfile(t, begin+"RUN python3 -c 'x = bytearray(1 << 30)'"), []string{"--memory", "128MiB"}, "dockerfile:3")
	})
	t.Run("a command that stays is ended with its step", func(t *testing.T) {
		dir := b.dockerfile(t, begin+"RUN (setsid sh -c 'while :; do echo x >> /grows; sleep 0.01; done' >/dev/null 2>&1 &) ; echo started\nRUN wc -c < /grows; sleep 0.1; wc -c < /grows; ! pgrep sleep")
		b.cove(t, "image", "build", "-t", "stays", dir).want(t, 0)
		b.nothingLeft(t)
	})
	t.Run("secrets stay out of what is kept", func(t *testing.T) {
		value := "s3cret-" + strings.Repeat("v", 20)
		dir := b.dockerfile(t, begin+`RUN --mount=type=secret,id=tok cat /run/secrets/tok && stat -c %a /run/secrets/tok
RUN --mount=type=secret,id=tok,env=TOK sh -c 'test -n "$TOK" && echo has it'
RUN --mount=type=cache,target=/c --mount=type=secret,id=tok,target=/c/tok cat /c/tok > /c/.len; wc -c < /c/.len > /c/len; rm /c/.len; echo seen-in-a-cache > /c/control; echo seen-in-a-layer > /control
RUN --mount=type=cache,target=/c ls -A /c && ! test -e /c/tok && ! test -e /run/secrets
RUN --mount=type=secret,id=none,required=false ! test -e /run/secrets/none`)
		secret := filepath.Join(t.TempDir(), "tok")
		if err := os.WriteFile(secret, []byte(value), 0o600); err != nil {
			t.Fatal(err)
		}
		r := b.cove(t, "image", "build", "-t", "sec", "--secret", "id=tok,src="+secret, dir).want(t, 0)
		if strings.Contains(r.Stdout+r.Stderr, value) || !strings.Contains(r.Stderr, "***") || !strings.Contains(r.Stderr, "has it") {
			t.Error(r.Stderr)
		}
		// In nothing of what the server keeps, its log among it; what is no secret is found.
		found := map[string]string{value: "", "seen-in-a-layer": "", "seen-in-a-cache": ""}
		err := filepath.WalkDir(filepath.Dir(b.Dir), func(name string, d fs.DirEntry, err error) error {
			if errors.Is(err, fs.ErrNotExist) { // the server goes on
				return nil
			}
			if err != nil || !d.Type().IsRegular() {
				return err
			}
			data, err := os.ReadFile(name)
			if errors.Is(err, fs.ErrNotExist) || errors.Is(err, syscall.EINVAL) { // or a namespace, which is mounted there
				return nil
			}
			for text := range found {
				if bytes.Contains(data, []byte(text)) {
					found[text] = name
				}
			}
			return err
		})
		if err != nil || found[value] != "" || found["seen-in-a-layer"] == "" || found["seen-in-a-cache"] == "" {
			t.Error(found, err)
		}
		b.refuses(t, b.dockerfile(t, begin+"RUN --mount=type=secret,id=tok,required=true true"), nil, "dockerfile:3", "--secret id=tok")
	})
	t.Run("caches stay, and out of the image", func(t *testing.T) {
		dir := b.dockerfile(t, begin+"ARG N\nRUN --mount=type=cache,target=/d echo $N >> /d/log; cat /d/log > /seen\nRUN ! test -e /d/log; cat /seen")
		b.cove(t, "image", "build", "-t", "c1", "--build-arg", "N=one", dir).want(t, 0)
		r := b.cove(t, "image", "build", "-t", "c2", "--build-arg", "N=two", dir).want(t, 0)
		if !strings.Contains(r.Stderr, "| one") || !strings.Contains(r.Stderr, "| two") {
			t.Error(r.Stderr)
		}
	})
	t.Run("no way into the server's own network", func(t *testing.T) {
		for _, to := range []string{"127.0.0.1:1", "[::1]:1", "169.254.169.254", "0.0.0.0:1", "localhost:1"} {
			b.refuses(t, b.dockerfile(t, begin+"ADD http://"+to+"/x /x"), []string{"--allow", "*"}, "dockerfile:3", "does not allow")
		}
		for _, to := range []string{"127.0.0.1:5000", "169.254.169.254", "localhost:5000"} {
			b.refuses(t, b.dockerfile(t, "FROM "+to+"/x/y:1"), nil, "dockerfile:1", "own network")
			b.refuses(t, b.dockerfile(t, begin+"COPY --from="+to+"/x/y:1 /a /b"), nil, "dockerfile:3", "own network")
		}
		b.refuses(t, b.dockerfile(t, begin+"ADD file:///etc/passwd /x"), nil, "dockerfile:3")
	})
	t.Run("another tenant's cache is not used", func(t *testing.T) {
		b.cove(t, "tenant", "create", "red").want(t, 0)
		var key struct{ Secret string }
		if err := json.Unmarshal([]byte(b.cove(t, "key", "create", "--tenant", "red", "--role", "developer", "--json", "builder").want(t, 0).Stdout), &key); err != nil {
			t.Fatal(err)
		}
		red, data := b.ClientWith(t, key.Secret), tarOf(t, tar.Header{Name: "f", Typeflag: tar.TypeReg, Mode: 0o644})
		const file = "FROM base\nRUN true\nRUN --mount=type=cache,target=/tmp/poison echo x >> /tmp/poison/log; ! grep -c x /tmp/poison/log | grep -v 1\n"
		if err := b.buildOf(t, b.Client(), file+"COPY f /f\n", data); err != nil {
			t.Fatal(err)
		}
		has, err := red.Images.HasFiles(t.Context(), connect.NewRequest(&covev1.HasFilesRequest{Key: "e2e"}))
		if err != nil || has.Msg.Has {
			t.Error("the files of another:", has, err)
		}
		cached, err := follow(t, red, &covev1.BuildImageRequest{Dockerfile: file})
		if err != nil || cached != 0 {
			t.Error("steps from the cache of another:", cached, err)
		}
		if _, err := follow(t, red, &covev1.BuildImageRequest{Dockerfile: file + "COPY f /f\n", Context: "e2e"}); sandbox.ClassOf(err) != sandbox.NotFound {
			t.Error("the context of another:", err)
		}
	})
	b.AssertNoLitter(t)
}

// tarOf is a tar of empty files and what is no file.
func tarOf(t *testing.T, hs ...tar.Header) []byte {
	t.Helper()
	var out bytes.Buffer
	w := tar.NewWriter(&out)
	for _, h := range hs {
		if err := w.WriteHeader(&h); err != nil {
			t.Fatal(err)
		}
	}
	if err := w.Close(); err != nil {
		t.Fatal(err)
	}
	return out.Bytes()
}

// buildOf builds with a tar as the context, as it is.
func (b builds) buildOf(t *testing.T, c *wire.Client, dockerfile string, data []byte) error {
	t.Helper()
	if err := c.PutBuildFiles(t.Context(), "e2e", bytes.NewReader(data), int64(len(data))); err != nil {
		return err
	}
	_, err := follow(t, c, &covev1.BuildImageRequest{Dockerfile: dockerfile, Context: "e2e"})
	return err
}

// follow runs a build to its end.
func follow(t *testing.T, c *wire.Client, r *covev1.BuildImageRequest) (cached int32, err error) {
	t.Helper()
	s, err := c.Images.Build(t.Context(), connect.NewRequest(r))
	if err != nil {
		return 0, err
	}
	defer s.Close()
	for s.Receive() {
		if done := s.Msg().GetBuild(); done != nil {
			cached = done.Cached
		}
	}
	return cached, s.Err()
}

// zeros never end.
type zeros struct{}

func (zeros) Read(p []byte) (int, error) { clear(p); return len(p), nil }
