package e2e

import (
	"encoding/json"
	"fmt"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"

	"github.com/cove-sandbox/cove/e2e/world"
)

// TestImageBuildFeatures are those that show in how a build goes rather than in what
// comes of it: that, TestImageBuilds compares.
func TestImageBuildFeatures(t *testing.T) {
	b := builds{world.New(t, world.Options{})}
	const begin = "FROM base\nUSER root\n"

	t.Run("a changed last line runs alone", func(t *testing.T) {
		dir := b.files(t, map[string]string{"Dockerfile": begin + "RUN echo one > /1\nCOPY in /in\nRUN echo two\n", "in": "1"})
		args := []string{"image", "build", "-t", "lines", dir}
		if ran := ranAgain(b.cove(t, args...).want(t, 0).Stderr); len(ran) != 3 {
			t.Errorf("at first: %q", ran)
		}
		if ran := ranAgain(b.cove(t, args...).want(t, 0).Stderr); len(ran) != 0 {
			t.Errorf("unchanged: %q", ran)
		}
		write(t, dir, "Dockerfile", begin+"RUN echo one > /1\nCOPY in /in\nRUN echo three\n")
		if ran := ranAgain(b.cove(t, args...).want(t, 0).Stderr); !slices.Equal(ran, []string{"RUN echo three"}) {
			t.Errorf("with another last line: %q", ran)
		}
		write(t, dir, "in", "2")
		if ran := ranAgain(b.cove(t, args...).want(t, 0).Stderr); !slices.Equal(ran, []string{"COPY in /in", "RUN echo three"}) {
			t.Errorf("with another file: %q", ran)
		}
	})
	t.Run("progress, arguments and JSON", func(t *testing.T) {
		dir := b.dockerfile(t, "FROM base AS a", "ARG WHO=nobody", "RUN echo hello $WHO && echo err >&2", "FROM a AS b", "RUN false")
		r := b.cove(t, "image", "build", "-t", "told", "--target", "a", "--build-arg", "WHO=you", "--build-arg", "OTHER=1", "--json", dir).want(t, 0)
		for _, line := range []string{"[1/3] FROM base AS a", "[3/3] RUN echo hello", "  | hello you", "  | err", "warning: no ARG asks for the build argument OTHER"} {
			if !strings.Contains(r.Stderr, line) {
				t.Errorf("nothing of %q in:\n%s", line, r.Stderr)
			}
		}
		var got struct {
			ID, State     string
			Steps, Cached int
			Image         struct {
				ID    string
				Names []string
			}
		}
		if err := json.Unmarshal([]byte(r.Stdout), &got); err != nil || got.State != "done" || got.Steps != 2 || got.Image.ID == "" || !slices.Equal(got.Image.Names, []string{"told"}) {
			t.Errorf("%v %+v\n%s", err, got, r.Stdout)
		}
		b.cove(t, "image", "build", "--progress", "fancy", dir).want(t, 2)
	})
	t.Run("an ONBUILD of the base gets the whole context", func(t *testing.T) {
		b.cove(t, "image", "build", "-t", "parent", b.dockerfile(t, "FROM base", "ONBUILD COPY . /app/")).want(t, 0)
		dir := b.files(t, map[string]string{"Dockerfile": "FROM parent\nRUN cat /app/not-named\n", "not-named": "it is here\n"})
		if r := b.cove(t, "image", "build", "-t", "child", dir).want(t, 0); !strings.Contains(r.Stderr, "| it is here") {
			t.Error(r.Stderr)
		}
	})
	t.Run("the network is what is allowed", func(t *testing.T) {
		ip := ownAddress(t)
		l, err := net.Listen("tcp", ip+":0")
		if err != nil {
			t.Fatal(err)
		}
		s := &http.Server{Handler: http.HandlerFunc(func(rw http.ResponseWriter, r *http.Request) {
			if r.URL.Path == "/inward" {
				http.Redirect(rw, r, "http://127.0.0.1:1/", http.StatusFound)
				return
			}
			fmt.Fprint(rw, "reached")
		})}
		go s.Serve(l)
		t.Cleanup(func() { s.Close() })
		get := "python3 -c 'import urllib.request; print(urllib.request.urlopen(\"http://" + l.Addr().String() + "/\", timeout=10).read().decode())'"
		_, port, _ := net.SplitHostPort(l.Addr().String())
		allow := []string{"--allow", ip + " tcp " + port}
		if r := b.cove(t, append(append([]string{"image", "build"}, allow...), b.dockerfile(t, begin+"RUN "+get))...).want(t, 0); !strings.Contains(r.Stderr, "| reached") {
			t.Error(r.Stderr)
		}
		b.refuses(t, b.dockerfile(t, begin+"RUN "+get), []string{"--no-cache", "--allow", "example.com"}, "dockerfile:3", "URLError")
		b.refuses(t, b.dockerfile(t, begin+"RUN --network=none "+get), allow, "dockerfile:3", "URLError")
		url := "http://" + l.Addr().String()
		b.cove(t, append(append([]string{"image", "build"}, allow...), b.dockerfile(t, begin+"ADD "+url+"/ok /ok\nRUN grep reached /ok"))...).want(t, 0)
		b.refuses(t, b.dockerfile(t, begin+"ADD "+url+"/ok /ok"), []string{"--allow", "example.com"}, "dockerfile:3", "does not allow")
		b.refuses(t, b.dockerfile(t, begin+"ADD "+url+"/inward /ok"), allow, "dockerfile:3", "does not allow")
	})
	t.Run("a server that dies", func(t *testing.T) {
		dir := b.dockerfile(t, begin+"RUN echo first > /first\nRUN echo begun; test -e /go || sleep 1000")
		cmd, out := b.start(t, "| begun", "image", "build", "-t", "again", dir)
		b.Kill(t)
		if err := cmd.Wait(); err == nil || cmd.ProcessState.ExitCode() != 1 || !strings.Contains(out.String(), "the server went away") {
			t.Errorf("%v:\n%s", err, out)
		}
		b.Start(t)
		b.nothingLeft(t)
		write(t, dir, "Dockerfile", begin+"RUN echo first > /first\nRUN echo begun\n")
		if ran := ranAgain(b.cove(t, "image", "build", "-t", "again", dir).want(t, 0).Stderr); !slices.Equal(ran, []string{"RUN echo begun"}) {
			t.Errorf("after the restart: %q", ran)
		}
	})
	t.Run("Ctrl-C leaves nothing", func(t *testing.T) {
		cmd, _ := b.start(t, "| begun", "image", "build", "-t", "cut", b.dockerfile(t, begin+"RUN --mount=type=cache,target=/c echo begun && sleep 1000"))
		if err := cmd.Process.Signal(syscall.SIGINT); err != nil {
			t.Fatal(err)
		}
		if err := cmd.Wait(); err == nil || cmd.ProcessState.ExitCode() != 130 {
			t.Error("it ended with", err)
		}
		b.nothingLeft(t)
		b.cove(t, "image", "inspect", "cut").want(t, 1)
	})
	b.AssertNoLitter(t)
}

func write(t *testing.T, dir, name, text string) {
	t.Helper()
	if err := os.WriteFile(filepath.Join(dir, name), []byte(text), 0o644); err != nil {
		t.Fatal(err)
	}
}
