package cli

import (
	"archive/tar"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path"
	"strings"
)

// untar unpacks a tar stream that comes from inside a sandbox, so from an
// attacker, below a directory of this machine.
//
// Refused outright, because an honest guest never sends it: absolute names,
// "..", a name below a symlink or a file, a hard link to any of these, more
// than the limits. Left out with a note, because honest trees hold them:
// symlinks that point out of the tree, devices, fifos, sockets. Never taken
// over: owners, setuid, setgid, sticky, extended attributes.
//
// Two walls: names are checked here, and every call goes through os.Root,
// which the kernel keeps below the directory (openat, no symlink out of it).
type untar struct {
	root       *os.Root
	maxBytes   int64
	maxEntries int
	skipped    func(name, why string)

	bytes   int64
	entries int
	dirs    []dirMode // set last: a directory of mode 0500 must be filled first
}

type dirMode struct {
	name string
	mode fs.FileMode
	hdr  *tar.Header
}

// maxEntries is far above any real tree and bounds what a stream of empty
// files can do to the file system's inodes.
const maxEntries = 5_000_000

func (u *untar) run(r io.Reader) error {
	tr := tar.NewReader(r)
	for {
		h, err := tr.Next()
		if errors.Is(err, io.EOF) {
			break
		}
		if err != nil {
			return fmt.Errorf("the sandbox's tar stream: %w", err)
		}
		if u.entries++; u.entries > u.maxEntries {
			return fmt.Errorf("more than %d entries", u.maxEntries)
		}
		if err := u.entry(tr, h); err != nil {
			return err
		}
	}
	for i := len(u.dirs) - 1; i >= 0; i-- {
		d := u.dirs[i]
		// Always ours to empty and remove again.
		if err := u.root.Chmod(d.name, d.mode|0o700); err != nil {
			return err
		}
		_ = u.root.Chtimes(d.name, d.hdr.ModTime, d.hdr.ModTime)
	}
	return nil
}

// cleanName is the name inside the tree, or an error for one that tries to
// leave it. "" is the tree itself.
func cleanName(name string) (string, error) {
	if strings.HasPrefix(name, "/") || strings.Contains(name, "\x00") {
		return "", fmt.Errorf("refusing the name %q from the sandbox", name)
	}
	for _, part := range strings.Split(name, "/") {
		if part == ".." {
			return "", fmt.Errorf("refusing the name %q from the sandbox", name)
		}
	}
	if name = path.Clean(name); name == "." {
		return "", nil
	}
	return name, nil
}

func (u *untar) entry(tr *tar.Reader, h *tar.Header) error {
	name, err := cleanName(h.Name)
	if err != nil {
		return err
	}
	if name == "" {
		return nil // the directory itself: its mode is the caller's business
	}
	if err := u.parents(name); err != nil {
		return err
	}
	mode := fs.FileMode(h.Mode) & keptBits
	switch h.Typeflag {
	case tar.TypeDir:
		return u.dir(name, mode, h)
	case tar.TypeReg:
		return u.file(tr, name, mode, h)
	case tar.TypeSymlink:
		if !staysInside(name, h.Linkname) {
			u.skipped(name, "a symlink out of the tree, to "+h.Linkname)
			return nil
		}
		if err := u.clear(name); err != nil {
			return err
		}
		return u.root.Symlink(h.Linkname, name)
	case tar.TypeLink:
		old, err := cleanName(h.Linkname)
		if err != nil {
			return err
		}
		if err := u.parents(old); err != nil {
			return err
		}
		if fi, err := u.root.Lstat(old); err != nil || !fi.Mode().IsRegular() {
			return fmt.Errorf("refusing the hard link %q from the sandbox: %q is no file of this copy", name, h.Linkname)
		}
		if old == name {
			return nil
		}
		if err := u.clear(name); err != nil {
			return err
		}
		return u.root.Link(old, name)
	}
	u.skipped(name, "not a file, directory or link")
	return nil
}

// parents makes the directories above name. Each must be a real directory: a
// symlink made by an earlier entry would move what follows, and the rule for
// symlink targets (staysInside) rests on it.
func (u *untar) parents(name string) error {
	for i := 0; i < len(name); i++ {
		if name[i] != '/' {
			continue
		}
		dir := name[:i]
		fi, err := u.root.Lstat(dir)
		if errors.Is(err, fs.ErrNotExist) {
			if err := u.root.Mkdir(dir, 0o755); err != nil {
				return err
			}
			continue
		}
		if err != nil {
			return err
		}
		if !fi.IsDir() {
			return fmt.Errorf("refusing the name %q from the sandbox: %q is not a directory", name, dir)
		}
	}
	return nil
}

// staysInside says whether a symlink at name may point at target. The target
// must be relative, go up only at its beginning and not above the tree. name's
// parents are real directories, so going up is what it says; names after that
// are real or symlinks under the same rule. (Allowing "x/../.." would need
// every x to be checked, now and after each later copy into the same tree.)
func staysInside(name, target string) bool {
	if target == "" || strings.HasPrefix(target, "/") {
		return false
	}
	depth := strings.Count(name, "/")
	down := false
	for _, part := range strings.Split(target, "/") {
		switch part {
		case "", ".":
		case "..":
			if down || depth == 0 {
				return false
			}
			depth--
		default:
			down = true
		}
	}
	return true
}

// clear makes room for an entry. What is there is unlinked and never written
// through: it may be a link of an earlier entry.
func (u *untar) clear(name string) error {
	fi, err := u.root.Lstat(name)
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	if err != nil {
		return err
	}
	if fi.IsDir() {
		return fmt.Errorf("%q is a directory here and something else in the sandbox", name)
	}
	return u.root.Remove(name)
}

func (u *untar) dir(name string, mode fs.FileMode, h *tar.Header) error {
	fi, err := u.root.Lstat(name)
	switch {
	case errors.Is(err, fs.ErrNotExist):
		if err := u.root.Mkdir(name, 0o700); err != nil {
			return err
		}
	case err != nil:
		return err
	case !fi.IsDir():
		return fmt.Errorf("%q is a directory in the sandbox and something else here", name)
	}
	u.dirs = append(u.dirs, dirMode{name, mode, h})
	return nil
}

func (u *untar) file(tr *tar.Reader, name string, mode fs.FileMode, h *tar.Header) (err error) {
	if u.bytes += h.Size; u.bytes > u.maxBytes || u.bytes < 0 {
		return usagef("--max-size allows more", "more than %s from the sandbox", formatSize(u.maxBytes))
	}
	if err := u.clear(name); err != nil {
		return err
	}
	f, err := u.root.OpenFile(name, os.O_WRONLY|os.O_CREATE|os.O_EXCL, 0o600)
	if err != nil {
		return err
	}
	defer func() {
		if cerr := f.Close(); err == nil {
			err = cerr
		}
	}()
	if _, err := io.Copy(f, tr); err != nil {
		return err
	}
	if err := f.Chmod(mode); err != nil {
		return err
	}
	_ = u.root.Chtimes(name, h.ModTime, h.ModTime)
	return nil
}
