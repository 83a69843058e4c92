package grade

import (
	"archive/tar"
	"bytes"
	"errors"
	"fmt"
	"io"
	"slices"
	"strings"
	"testing"

	"github.com/cove-sandbox/cove/sandbox"
)

// entry is one of a tar; body "" of a file is an empty one.
type entry struct {
	typ        byte
	name, link string
	body       string
	mode       int64
	xattrs     map[string]string
}

func tarOf(t testing.TB, es []entry) []byte {
	t.Helper()
	var b bytes.Buffer
	w := tar.NewWriter(&b)
	for _, e := range es {
		h := &tar.Header{Typeflag: e.typ, Name: e.name, Linkname: e.link, Mode: e.mode, Size: int64(len(e.body)), PAXRecords: e.xattrs, Format: tar.FormatPAX}
		if e.typ == 0 {
			h.Typeflag = tar.TypeReg
		}
		if err := w.WriteHeader(h); err != nil {
			t.Fatal(err)
		}
		if _, err := io.WriteString(w, e.body); err != nil {
			t.Fatal(err)
		}
	}
	if err := w.Close(); err != nil {
		t.Fatal(err)
	}
	return b.Bytes()
}

// written is what a grader is given, as "name:what".
func written(t testing.TB, es []entry, rules Rules) (out []string, s *Scanned) {
	t.Helper()
	data := tarOf(t, es)
	s, err := Scan(bytes.NewReader(data), rules)
	if err != nil {
		t.Fatal(err)
	}
	for _, root := range s.Roots() {
		var b bytes.Buffer
		if err := s.Write(bytes.NewReader(data), &b, root); err != nil {
			t.Fatal(err)
		}
		dir, _ := s.Below(root)
		out = append(out, entries(t, &b, dir)...)
	}
	return out, s
}

// entries are those of a tar that is unpacked in dir.
func entries(t testing.TB, b io.Reader, dir string) (out []string) {
	r := tar.NewReader(b)
	for {
		h, err := r.Next()
		if errors.Is(err, io.EOF) {
			return out
		}
		if err != nil {
			t.Fatal(err)
		}
		body, err := io.ReadAll(r)
		if err != nil {
			t.Fatal(err)
		}
		if h.Mode&^0o777 != 0 || h.Uid != 0 || len(h.PAXRecords) > 0 {
			t.Errorf("%s is carried with %o, owner %d and %v", h.Name, h.Mode, h.Uid, h.PAXRecords)
		}
		what := string(body)
		if h.Linkname != "" {
			what = string(h.Typeflag) + h.Linkname
		}
		name := strings.TrimSuffix(strings.TrimPrefix(dir, "/")+"/"+h.Name, "./")
		out = append(out, strings.TrimPrefix(name, "/")+":"+what)
	}
}

func TestCarry(t *testing.T) {
	dir := func(name string) entry { return entry{typ: tar.TypeDir, name: name, mode: 0o755} }
	sym := func(name, to string) entry { return entry{typ: tar.TypeSymlink, name: name, link: to} }
	rules := Rules{Artifacts: []string{"/work"}, TestsPath: "/tests", MaxBytes: 1 << 20}
	with := func(artifacts ...string) Rules { r := rules; r.Artifacts = artifacts; return r }
	for name, c := range map[string]struct {
		rules   Rules
		in      []entry
		want    string
		found   string // kinds and paths
		removed string
	}{
		"what is declared": {rules, []entry{dir("./"), dir("work/"), {name: "work/a", body: "1", mode: 0o4755}, {name: "worker", body: "2"}, {name: "etc/passwd", body: "3"}},
			"work/: work/a:1", "accounts /etc/passwd, setuid /work/a", ""},
		"one file": {with("/work/a"), []entry{dir("work/"), {name: "work/a", body: "1"}, {name: "work/ab", body: "2"}}, "work/a:1", "", ""},
		"special files": {rules, []entry{{typ: tar.TypeFifo, name: "work/f"}, {typ: tar.TypeBlock, name: "work/b", xattrs: nil}, {typ: tar.TypeChar, name: "work/gone"}},
			"", "special /work/b, special /work/f", "/work/gone"},
		"an opaque directory": {rules, []entry{{typ: tar.TypeDir, name: "work/d/", xattrs: map[string]string{"SCHILY.xattr.trusted.overlay.opaque": "y"}}}, "work/d/:", "", "/work/d"},
		"links": {rules, []entry{sym("work/1", "/tests/x"), sym("work/2", "../tests/x"), sym("work/3", "/"), sym("work/4", "a/../../tests"), sym("work/5", "/proc/self/root"), sym("work/6", ".."),
			sym("work/7", "//tests"), sym("work/8", "/run"), sym("work/9", "././../tests"), sym("work/A", "/var/run/cove-grade/tests/x"), sym("work/B", "../var"), sym("work/ok1", "a/b"), sym("work/ok2", "/usr/bin/python3"), sym("work/d/ok3", "../a"), sym("work/ok4", "/dev/null"), sym("work/ok5", "/testsuite"), sym("work/ok6", "/var/log/x")},
			"work/d/ok3:2../a work/ok1:2a/b work/ok2:2/usr/bin/python3 work/ok4:2/dev/null work/ok5:2/testsuite work/ok6:2/var/log/x",
			"link /work/1, link /work/2, link /work/3, link /work/4, link /work/5, link /work/6, link /work/7, link /work/8, link /work/9, link /work/A, link /work/B", ""},
		"hard links from elsewhere": {rules, []entry{{name: "cache/x", body: "one"}, {typ: tar.TypeLink, name: "work/a", link: "cache/x"}, {typ: tar.TypeLink, name: "work/b", link: "cache/x"},
			{name: "work/c", body: "two"}, {typ: tar.TypeLink, name: "work/d", link: "work/c"}}, "work/a:one work/b:1a work/c:two work/d:1c", "", ""},
		"hard links between artifacts": {with("/a", "/b"), []entry{{name: "a/x", body: "one"}, {typ: tar.TypeLink, name: "a/y", link: "a/x"}, {typ: tar.TypeLink, name: "b/x", link: "a/x"}, {typ: tar.TypeLink, name: "b/y", link: "a/x"}},
			"a/x:one a/y:1x b/x:one b/y:1x", "", ""},
		"one in another": {with("/a", "/a/b"), []entry{dir("a/"), dir("a/b/"), {name: "a/b/x", body: "1"}}, "a/: a/b/: a/b/x:1", "", ""},
		"git stays behind": {rules, []entry{{name: "work/.git/config", body: "x"}, {name: "work/.git/objects/aa/bb", body: "x"}, {name: "work/sub/.git", body: "gitdir: x"}, {name: "work/.gitignore", body: "x"}},
			"work/.gitignore:x", "git /work/sub/.git, git_config /work/.git/config, git_objects /work/.git", ""},
		"git that is asked for": {with("/work/.git"), []entry{{name: "work/.git/config", body: "x"}}, "work/.git/config:x", "git_config /work/.git/config", ""},
		"a tool that is asked for, and its neighbour": {with("/usr/local/bin/tool", "/opt"), []entry{{name: "opt/x", body: "1"}, {name: "usr/local/bin/python3", body: "2"}, {name: "usr/local/bin/tool", body: "3"}},
			"opt/x:1 usr/local/bin/tool:3", "interpreter /usr/local/bin/python3, program /usr/local/bin/tool", ""},
		"names that climb": {rules, []entry{{name: "work/../../etc/x", body: "1"}, {name: "/work/abs", body: "2"}}, "work/abs:2", "", ""},
		"a thousand files of a package": {with("/usr/lib/python3/dist-packages/p"), []entry{{name: "usr/lib/python3/dist-packages/p/a.py"}, {name: "usr/lib/python3/dist-packages/p/b.py"}},
			"usr/lib/python3/dist-packages/p/a.py: usr/lib/python3/dist-packages/p/b.py:", "library /usr/lib/python3/dist-packages/p", ""},
	} {
		t.Run(name, func(t *testing.T) {
			got, s := written(t, c.in, c.rules)
			var found []string
			for _, f := range s.Findings {
				found = append(found, f.Kind+" "+f.Path)
			}
			slices.Sort(found)
			slices.Sort(got) // links are last
			if g := strings.Join(got, " "); g != c.want {
				t.Errorf("carried %q, want %q", g, c.want)
			}
			if f := strings.Join(found, ", "); f != c.found {
				t.Errorf("found %q, want %q", f, c.found)
			}
			if r := strings.Join(s.Removed, " "); r != c.removed {
				t.Errorf("removed %q, want %q", r, c.removed)
			}
		})
	}
	if _, err := Scan(bytes.NewReader(tarOf(t, []entry{{name: "work/big", body: strings.Repeat("x", 11)}})), Rules{Artifacts: []string{"/work"}, TestsPath: "/tests", MaxBytes: 10}); !errors.Is(err, sandbox.ErrTooLarge) {
		t.Errorf("more than the bound: %v", err)
	}
}

// However much there is to find, a report is short and says how much more there was.
func TestFindingsAreBounded(t *testing.T) {
	var es []entry
	for i := range 1000 {
		es = append(es, entry{name: fmt.Sprintf("work/%d.pth", i)})
	}
	_, s := written(t, es, Rules{Artifacts: []string{"/work"}, TestsPath: "/tests", MaxBytes: 1})
	if len(s.Findings) != maxFindings || s.Dropped == 0 {
		t.Errorf("%d findings, %d dropped", len(s.Findings), s.Dropped)
	}
}
