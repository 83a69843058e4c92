package cli

import (
	"archive/tar"
	"bytes"
	"errors"
	"io"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/cove-sandbox/cove/build"
)

// TestBuildContext sends what a Dockerfile names, less what is ignored.
func TestBuildContext(t *testing.T) {
	dir := t.TempDir()
	for _, name := range []string{"a", "b.json", "c.json", "d/e", "d/skip.log", "d/f/g", "large", ".dockerignore", "docker/x.dockerignore"} {
		name = filepath.Join(dir, name)
		if err := errors.Join(os.MkdirAll(filepath.Dir(name), 0o755), os.WriteFile(name, []byte("*.log\n**/*.log\n"), 0o644)); err != nil {
			t.Fatal(err)
		}
	}
	if err := os.Symlink("large", filepath.Join(dir, "link")); err != nil {
		t.Fatal(err)
	}
	for dockerfile, want := range map[string]string{
		"COPY a /":                 ".dockerignore a",
		"COPY ./d/../a /":          ".dockerignore a",
		"COPY *.json /":            ".dockerignore b.json c.json",
		"COPY d /":                 ".dockerignore d/ d/e d/f/ d/f/g",
		"COPY d/f /":               ".dockerignore d/ d/f/ d/f/g",
		"COPY d/?/g /":             ".dockerignore d/ d/f/ d/f/g",
		"ADD a b.json /x/":         ".dockerignore a b.json",
		"RUN x":                    ".dockerignore",
		"COPY docker/x.* /":        ".dockerignore docker/ docker/x.dockerignore",
		"COPY no/such /":           ".dockerignore",
		"COPY a[ /":                "whole", // what is no pattern is the server's to refuse
		"COPY . /":                 "whole",
		"COPY link /":              "whole",
		"COPY l* /":                "whole",
		"COPY link/below /":        "whole",
		"COPY $X /":                "whole",
		"RUN --mount=target=/m ls": "whole",
	} {
		c := &buildContext{dir: dir}
		var err error
		if c.ignore, err = ignored(filepath.Join(dir, ".dockerignore")); err != nil {
			t.Fatal(err)
		}
		got := "whole"
		if sources, ok := build.Needs([]byte("FROM x\n" + dockerfile + "\n")); ok {
			for _, s := range append(sources, ".dockerignore", "") {
				c.needs = append(c.needs, strings.Split(s, "/"))
			}
			var packed bytes.Buffer
			err := mktar(&packed, dir, c.leaves, func(name, why string) { t.Error(name, why) })
			if err == nil {
				got = strings.Join(namesIn(t, &packed), " ")
			} else if !errors.Is(err, errWhole) {
				t.Error(dockerfile, err)
			}
		}
		if got != want {
			t.Errorf("%s sends %q, not %q", dockerfile, got, want)
		}
	}
}

func namesIn(t *testing.T, r io.Reader) (names []string) {
	t.Helper()
	for tr := tar.NewReader(r); ; {
		h, err := tr.Next()
		if err == io.EOF {
			return names
		}
		if err != nil {
			t.Fatal(err)
		}
		names = append(names, h.Name)
	}
}
