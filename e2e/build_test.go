package e2e

import (
	"archive/tar"
	"bytes"
	"compress/gzip"
	"encoding/json"
	"errors"
	"io"
	"io/fs"
	"log"
	"net/http/httptest"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	ociregistry "github.com/google/go-containerregistry/pkg/registry"
	v1 "github.com/google/go-containerregistry/pkg/v1"

	"github.com/cove-sandbox/cove/e2e/world"
)

const (
	dockerfiles = "testdata/dockerfiles.txtar"
	golden      = "testdata/dockerfiles.json"
)

// toolNames are what Dockerfiles call the image of tools/Dockerfile.
var toolNames = []string{"python:3.12-slim", "node:20", "golang:1.22", "rust:1", "maven:3", "openjdk:21", "debian:bookworm-slim", "debian:latest"}

// TestImageBuilds builds Dockerfiles as people write them, twice, and compares what
// comes of them with what buildah gave. With COVE_BUILDAH buildah builds them too,
// and what it gives is written down anew (make build-compare). COVE_BUILD_ONLY=03,14
// does some of them.
func TestImageBuilds(t *testing.T) {
	reg := httptest.NewServer(ociregistry.New(ociregistry.Logger(log.New(io.Discard, "", 0))))
	defer reg.Close()
	host := strings.TrimPrefix(reg.URL, "http://")
	w := world.New(t, world.Options{Flags: []string{"--registry-allow", "127.0.0.0/8"}})
	cove := func(args ...string) ran { t.Helper(); return ran(w.CLI(t, args...)) }
	dir := t.TempDir()
	names := unpackDockerfiles(t, dir)
	args := []string{"image", "build"}
	for _, n := range toolNames {
		args = append(args, "-t", n)
	}
	cove(append(args, filepath.Join(dir, "tools"))...).want(t, 0)
	cove("image", "push", "debian:latest", host+"/tools:1").want(t, 0)
	read := &pulled{layers: map[v1.Hash][]tarEntry{}}
	_, under := read.image(t, host+"/tools:1", nil)

	want := readGolden(t)
	var with *buildah
	if os.Getenv("COVE_BUILDAH") != "" {
		with = newBuildah(t, host)
	}
	for _, n := range names {
		if only := os.Getenv("COVE_BUILD_ONLY"); only != "" && !strings.Contains(only, n[:2]) {
			continue
		}
		t.Run(n, func(t *testing.T) {
			cove("image", "build", "-t", "x/"+n, filepath.Join(dir, n)).want(t, 0)
			cove("image", "push", "x/"+n, host+"/cove/"+n).want(t, 0)
			got, _ := read.image(t, host+"/cove/"+n, under)
			if with != nil {
				theirs := with.build(t, read, n, filepath.Join(dir, n), under)
				differ(t, got, theirs)
				want[n] = theirs.stable(under)
			}
			if _, ok := want[n]; !ok {
				t.Fatalf("%s has nothing of it: make build-compare", golden)
			}
			differ(t, got.stable(under), want[n])
			if again := ranAgain(cove("image", "build", "-t", "x/"+n, filepath.Join(dir, n)).want(t, 0).Stderr); len(again) > 0 {
				t.Errorf("run the second time: %q", again)
			}
		})
	}
	if with != nil && !t.Failed() {
		writeGolden(t, want)
	}
	if left := strings.TrimSpace(cove("ls", "--json").want(t, 0).Stdout); left != "[]" {
		t.Error("sandboxes are left:", left)
	}
}

// ranAgain are the steps with files that did not come from the cache.
func ranAgain(stderr string) (steps []string) {
	lines := strings.Split(stderr, "\n")
	for i, line := range lines {
		at, text, ok := strings.Cut(line, "] ")
		op, _, _ := strings.Cut(text, " ")
		if ok && slices.Contains([]string{"RUN", "COPY", "ADD"}, op) && lines[i+1] != at+"] cached" {
			steps = append(steps, text)
		}
	}
	return steps
}

func readGolden(t *testing.T) map[string]made {
	t.Helper()
	all := map[string]made{}
	data, err := os.ReadFile(golden)
	if err == nil {
		err = json.Unmarshal(data, &all)
	}
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		t.Fatal(err)
	}
	return all
}

func writeGolden(t *testing.T, all map[string]made) {
	t.Helper()
	data, err := json.MarshalIndent(all, "", " ")
	if err == nil {
		err = os.WriteFile(golden, append(data, '\n'), 0o644)
	}
	if err != nil {
		t.Error(err)
	}
}

// unpackDockerfiles writes the archive of Dockerfiles into a directory.
func unpackDockerfiles(t *testing.T, dir string) (names []string) {
	t.Helper()
	data, err := os.ReadFile(dockerfiles)
	if err != nil {
		t.Fatal(err)
	}
	var to *os.File
	for line := range strings.Lines(string(data)) {
		if name, ok := strings.CutPrefix(line, "-- "); ok && strings.HasSuffix(name, " --\n") {
			name = filepath.Join(dir, strings.TrimSuffix(name, " --\n"))
			if err := os.MkdirAll(filepath.Dir(name), 0o755); err != nil {
				t.Fatal(err)
			}
			if to, err = os.Create(name); err != nil {
				t.Fatal(err)
			}
			defer to.Close()
			if n := filepath.Base(filepath.Dir(name)); filepath.Base(name) == "Dockerfile" && n != "tools" {
				names = append(names, n)
			}
			continue
		}
		if to != nil {
			if _, err := to.WriteString(line); err != nil {
				t.Fatal(err)
			}
		}
	}
	// What text cannot hold.
	var b bytes.Buffer
	zw := gzip.NewWriter(&b)
	tw := tar.NewWriter(zw)
	for _, h := range []tar.Header{{Name: "bin/", Typeflag: tar.TypeDir, Mode: 0o755}, {Name: "bin/tool", Typeflag: tar.TypeReg, Mode: 0o755, Uid: 7, Gid: 8}, {Name: "link", Typeflag: tar.TypeSymlink, Linkname: "bin/tool"}} {
		if err := tw.WriteHeader(&h); err != nil {
			t.Fatal(err)
		}
	}
	if err := errors.Join(tw.Close(), zw.Close(), os.WriteFile(filepath.Join(dir, "09-add-archive/bundle.tar.gz"), b.Bytes(), 0o644)); err != nil {
		t.Fatal(err)
	}
	return names
}
