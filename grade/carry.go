package grade

import (
	"archive/tar"
	"errors"
	"fmt"
	"io"
	"path"
	"slices"
	"strings"

	"github.com/cove-sandbox/cove/sandbox"
)

// Rules say what of a sandbox's changes a grader is given.
type Rules struct {
	Artifacts []string // clean absolute paths
	TestsPath string
	Path      []string // directories of the image's PATH
	MaxBytes  int64    // of all files together
}

// maxFindings of one kind are in a report: the rest is counted.
const maxFindings = 20

// Scanned is what a look through a sandbox's changes found.
type Scanned struct {
	Removed  []string // what the sandbox removed of the artifacts, deepest last
	Findings []sandbox.Finding
	Dropped  int // findings beyond those
	Files    int64
	Bytes    int64

	rules   Rules
	carried map[string]bool // names that are written, and whether they are no directories
	// stand is, for a file that is not below a root and has links that are, the
	// first of those: it is written under that name.
	stand map[inRoot]string
}

// inRoot is a path as it is seen from below a root.
type inRoot struct{ root, path string }

// Roots are the artifacts that are in no other: each is written by itself, so that
// no link in one leads the writing of another anywhere.
func (s *Scanned) Roots() (roots []string) {
	for _, a := range s.rules.Artifacts {
		if a == s.rules.root(a) && !slices.Contains(roots, a) {
			roots = append(roots, a)
		}
	}
	return roots
}

// root is the outermost artifact that a path is in; "" = it is in none.
func (r Rules) root(p string) (root string) {
	for _, a := range r.Artifacts {
		if sandbox.Within(p, a) && (root == "" || len(a) < len(root)) {
			root = a
		}
	}
	return root
}

// Below is the directory that a root is unpacked in: itself, or where it is where it
// is a file. Empty says that nothing of it is carried.
func (s *Scanned) Below(root string) (dir string, empty bool) {
	leaf, there := s.carried[root]
	if there && leaf {
		return path.Dir(root), false
	}
	for p := range s.carried {
		if sandbox.Within(p, root) {
			return root, false
		}
	}
	return root, true
}

// Scan looks through the tar of what a sandbox changed. Nothing is carried of what
// it refuses: more than Rules.MaxBytes is sandbox.ErrTooLarge.
func Scan(r io.Reader, rules Rules) (*Scanned, error) {
	s := &Scanned{rules: rules, carried: map[string]bool{}, stand: map[inRoot]string{}}
	report := newReport()
	var links [][2]string
	tr := tar.NewReader(r)
	for {
		h, err := tr.Next()
		if errors.Is(err, io.EOF) {
			break
		}
		if err != nil {
			return nil, fmt.Errorf("reading what the sandbox changed: %w", err)
		}
		p := path.Clean("/" + h.Name)
		ns, in := rules.notes(p, h)
		carried, why := rules.carries(p, h, in)
		if why != nil {
			ns = append(ns, *why)
		}
		for _, n := range ns {
			report.add(n, carried)
		}
		switch {
		case !carried:
		case whiteout(h) || opaque(h):
			s.Removed = append(s.Removed, p)
			if whiteout(h) {
				continue
			}
			fallthrough
		default:
			s.carried[p] = h.Typeflag != tar.TypeDir
			s.Files++
			if h.Typeflag == tar.TypeLink {
				links = append(links, [2]string{p, path.Clean("/" + h.Linkname)})
			}
			if h.Typeflag == tar.TypeReg {
				s.Bytes += h.Size
			}
			if s.Bytes > rules.MaxBytes {
				return nil, &sandbox.Error{Class: sandbox.TooLarge, Field: "artifacts",
					Msg: fmt.Sprintf("the artifacts have more than %s, at '%s'", sandbox.FormatSize(rules.MaxBytes), p)}
			}
		}
	}
	for _, l := range links {
		root := rules.root(l[0])
		at := inRoot{root, l[1]}
		if _, ok := s.carried[l[1]]; s.stand[at] == "" && (!ok || rules.root(l[1]) != root) {
			s.stand[at] = l[0]
		}
	}
	s.Findings, s.Dropped = report.list()
	return s, nil
}

// carries says whether an entry goes to the grader, and if it does not though it
// is an artifact, why.
func (r Rules) carries(p string, h *tar.Header, in *place) (bool, *note) {
	artifact := ""
	for _, a := range r.Artifacts {
		if sandbox.Within(p, a) && len(a) > len(artifact) {
			artifact = a
		}
	}
	if artifact == "" {
		return false, nil
	}
	if in != nil && !sandbox.Within(artifact, in.root) {
		return false, nil // the note that it is there says that it was not carried
	}
	switch h.Typeflag {
	case tar.TypeReg, tar.TypeDir, tar.TypeLink:
		return true, nil
	case tar.TypeSymlink:
		if r.leadsAway(p, h.Linkname) {
			return false, &note{"link", p, "leads to '" + clip(h.Linkname) + "'"}
		}
		return true, nil
	case tar.TypeChar:
		if whiteout(h) {
			return true, nil
		}
	}
	return false, &note{"special", p, "a FIFO or device"}
}

// leadsAway says whether a symlink leads, or lets others lead, to what a grader
// has and the sandbox had not: an answer that is a link to the expected one. It is by
// the text alone. What leads there by other links of the image's, or is made while the
// work runs, does not lead a judge apart: its kernel follows no link of the work's.
func (r Rules) leadsAway(p, target string) bool {
	if target == "/dev/null" {
		return false
	}
	// After another name, ".." goes up from wherever that name leads.
	rest := target
	for strings.HasPrefix(rest, "../") || strings.HasPrefix(rest, "./") || strings.HasPrefix(rest, "/") {
		_, rest, _ = strings.Cut(rest, "/")
	}
	if rest != ".." && slices.Contains(strings.Split(rest, "/"), "..") {
		return true
	}
	to := path.Clean(target)
	if !path.IsAbs(target) {
		to = path.Join(path.Dir(p), target)
	}
	// Most images have /var/run as a link to /run.
	for _, f := range []string{r.TestsPath, sandbox.GradeDir, "/var" + sandbox.GradeDir, "/proc", "/sys", "/dev"} {
		if sandbox.Within(to, f) || sandbox.Within(f, to) {
			return true
		}
	}
	return false
}

// Write copies what is carried of the same tar below one of Roots, with names as
// they are in its Below, and without owners, attributes or more than permission bits.
func (s *Scanned) Write(r io.Reader, w io.Writer, root string) error {
	tr, tw := tar.NewReader(r), tar.NewWriter(w)
	dir, _ := s.Below(root)
	name := func(p string) string { return strings.TrimPrefix(strings.TrimPrefix(p, dir), "/") }
	var later []*tar.Header     // links: their files may come after them
	buf := make([]byte, 32<<10) // io.Copy makes one for each file
	for {
		h, err := tr.Next()
		if errors.Is(err, io.EOF) {
			break
		}
		if err != nil {
			return err
		}
		p := path.Clean("/" + h.Name)
		_, carried := s.carried[p]
		carried = carried && s.rules.root(p) == root
		stand := s.stand[inRoot{root, p}]
		out := &tar.Header{Typeflag: h.Typeflag, Name: name(p), Mode: h.Mode&0o777 | 0o400, ModTime: h.ModTime, Format: tar.FormatPAX}
		switch {
		case carried && h.Typeflag == tar.TypeLink:
			to := path.Clean("/" + h.Linkname)
			if first := s.stand[inRoot{root, to}]; first != "" {
				to = first
			}
			if out.Linkname = name(to); to != p { // else the file comes under this name
				later = append(later, out)
			}
			continue
		case carried && h.Typeflag == tar.TypeDir:
			if out.Name, out.Mode = out.Name+"/", out.Mode|0o700; p == dir {
				out.Name = "./"
			}
		case carried && h.Typeflag == tar.TypeSymlink:
			out.Linkname = h.Linkname
		case carried && h.Typeflag == tar.TypeReg:
			out.Size = h.Size
		case stand != "" && h.Typeflag == tar.TypeReg:
			out.Name, out.Size = name(stand), h.Size
			if s.Bytes += h.Size; s.Bytes > s.rules.MaxBytes {
				return &sandbox.Error{Class: sandbox.TooLarge, Field: "artifacts", Msg: "the artifacts have more than " + sandbox.FormatSize(s.rules.MaxBytes)}
			}
		default:
			continue
		}
		if err := tw.WriteHeader(out); err != nil {
			return err
		}
		if out.Size > 0 {
			if _, err := io.CopyBuffer(tw, tr, buf); err != nil {
				return err
			}
		}
	}
	for _, h := range later {
		if err := tw.WriteHeader(h); err != nil {
			return err
		}
	}
	return tw.Close()
}

// report gathers findings, each once and a few of each kind.
type report struct {
	seen  map[[2]string]int // place in found
	count map[string]int
	found []sandbox.Finding
	more  int
}

func newReport() *report { return &report{seen: map[[2]string]int{}, count: map[string]int{}} }

func (r *report) add(n note, carried bool) {
	key := [2]string{n.kind, n.path}
	if i, ok := r.seen[key]; ok {
		if i >= 0 && carried {
			r.found[i].Carried = true
		}
		return
	}
	if r.count[n.kind]++; r.count[n.kind] > maxFindings {
		if r.more++; r.more < 1<<20 { // after that, the same is counted again
			r.seen[key] = -1
		}
		return
	}
	r.seen[key] = len(r.found)
	r.found = append(r.found, sandbox.Finding{Kind: n.kind, Path: clip(n.path), Detail: n.detail, Carried: carried})
}

func (r *report) list() ([]sandbox.Finding, int) {
	slices.SortStableFunc(r.found, func(a, b sandbox.Finding) int { return strings.Compare(a.Kind, b.Kind) })
	return r.found, r.more
}

// clip keeps what an agent chose short and printable.
func clip(s string) string {
	const most = 300
	if len(s) > most {
		s = s[:most] + "…"
	}
	return strings.ToValidUTF8(s, "\uFFFD")
}
