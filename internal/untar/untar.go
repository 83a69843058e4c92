// Package untar unpacks a tar that an attacker may have written below a
// directory of this machine.
//
// Two walls: names and links are checked here, and every call goes through
// os.Root, which the kernel keeps below the directory. Nothing is written
// through what an earlier entry put there: it is unlinked first.
package untar

import (
	"archive/tar"
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path"
	"strings"
	"time"

	"github.com/cove-sandbox/cove/sandbox"
)

// Options say what of a tar is taken over. Never taken are extended attributes,
// devices, FIFOs and sockets.
type Options struct {
	Bytes   int64       // of all files, as the tar says them; more is sandbox.ErrTooLarge
	Entries int         // more are refused: names without content fill a file system too
	Modes   fs.FileMode // the bits of modes that are kept, as a tar has them: 0o7777 is all
	Owners  bool        // files belong to whom the tar says; else to this process

	// Chroot says that the tree is read as a root directory, by a sandbox or through
	// an os.Root: ".." and "/" in names stop at the tree, symlinks may point
	// anywhere, names may pass them, and "." has a mode. Without it, for a tree that
	// programs of this machine read: such names are refused, because an honest
	// tar has none, symlinks that lead out are left out, because honest trees hold
	// them, and directories stay open to their owner.
	Chroot bool

	Skipped func(name, why string) // hears what is left out; nil = nobody does
}

// EntryError is the file system's refusal of one entry.
type EntryError struct {
	Name string // in the tar
	Err  error
}

func (e *EntryError) Error() string { return fmt.Sprintf("tar entry %q: %v", e.Name, e.Err) }
func (e *EntryError) Unwrap() error { return e.Err }

const (
	maxPath = 4096 // Linux's
	// dirTimes directories get the times of the tar; those above keep the time of
	// unpacking. It bounds the memory of what has to be remembered to the end.
	dirTimes = 1 << 18
)

type unpacking struct {
	Options
	root    *os.Root
	bytes   int64
	entries int
	dirs    []dirTime
}

type dirTime struct {
	name string
	at   time.Time
}

// Extract unpacks r to its end. After an error a part of it is there.
func Extract(ctx context.Context, root *os.Root, r io.Reader, o Options) error {
	if o.Skipped == nil {
		o.Skipped = func(string, string) {}
	}
	u := &unpacking{Options: o, root: root}
	in := &input{ctx: ctx, r: r}
	for tr := tar.NewReader(in); ; {
		h, err := tr.Next()
		// A tar ends with two empty blocks. One that is cut off between two entries
		// just ends, which the reader takes for the same.
		if errors.Is(err, io.EOF) && !in.ended {
			return u.finish()
		}
		if err != nil {
			return in.refuse("", err)
		}
		if u.entries++; u.entries > u.Entries {
			return sandbox.InvalidField("tar", "more than %d entries", u.Entries)
		}
		if err := u.entry(tr, h); err != nil {
			return in.refuse(h.Name, err)
		}
	}
}

// input ends with its context, and notes how it ended.
type input struct {
	ctx   context.Context
	r     io.Reader
	ended bool
	err   error
}

func (i *input) Read(b []byte) (int, error) {
	if i.err = i.ctx.Err(); i.err != nil {
		return 0, i.err
	}
	n, err := i.r.Read(b)
	i.ended = i.ended || n == 0 && errors.Is(err, io.EOF)
	if err != nil && !errors.Is(err, io.EOF) {
		i.err = err
	}
	return n, err
}

// refuse says whose fault an error is: the source's, as it said it, the tar's,
// or the file system's.
func (i *input) refuse(name string, err error) error {
	var e *sandbox.Error
	switch {
	case i.err != nil:
		return i.err
	case errors.As(err, &e):
		return err
	case name == "":
		if errors.Is(err, io.EOF) {
			err = io.ErrUnexpectedEOF
		}
		return sandbox.InvalidField("tar", "%v", err)
	case errors.Is(err, io.ErrUnexpectedEOF):
		return sandbox.InvalidField("tar", "entry %.200q: %v", name, err)
	}
	return &EntryError{name, err}
}

// clean is a name in the tree; "." is the tree itself.
func (u *unpacking) clean(name string) (string, error) {
	bad := func(why string) (string, error) {
		return "", sandbox.InvalidField("tar", "refusing the name %.200q: it %s", name, why)
	}
	switch {
	case len(name) >= maxPath:
		return bad("is too long")
	case strings.IndexByte(name, 0) >= 0:
		return bad("has a NUL byte")
	}
	if u.Chroot {
		return path.Clean(strings.TrimPrefix(path.Clean("/"+name), "/")), nil
	}
	if strings.HasPrefix(name, "/") {
		return bad("is absolute")
	}
	for part := range strings.SplitSeq(name, "/") {
		if part == ".." {
			return bad("leads out of the tree")
		}
	}
	return path.Clean(name), nil
}

func (u *unpacking) entry(tr *tar.Reader, h *tar.Header) error {
	if h.Typeflag == tar.TypeXGlobalHeader {
		return nil
	}
	name, err := u.clean(h.Name)
	if err != nil {
		return err
	}
	if name == "." && !u.Chroot {
		return nil // its mode is the caller's business
	}
	if err := u.parents(name); err != nil {
		return err
	}
	switch h.Typeflag {
	case tar.TypeDir:
		return u.dir(name, h)
	case tar.TypeReg:
		return u.file(tr, name, h)
	case tar.TypeSymlink:
		return u.symlink(name, h)
	case tar.TypeLink:
		return u.link(name, h)
	}
	u.Skipped(name, "not a file, directory or link")
	return nil
}

// stat sees what names in the tree may pass.
func (u *unpacking) stat(name string) (fs.FileInfo, error) {
	if u.Chroot {
		return u.root.Stat(name)
	}
	return u.root.Lstat(name)
}

// parents makes the directories above name. Without Chroot each must be a real
// directory: a symlink made by an earlier entry would move what follows, and the
// rule for symlinks (staysInside) rests on it.
func (u *unpacking) parents(name string) error {
	for i := range len(name) {
		if name[i] != '/' {
			continue
		}
		if err := u.mkdir(name[:i], 0o755); err != nil {
			return err
		}
	}
	return nil
}

func (u *unpacking) mkdir(name string, mode fs.FileMode) error {
	fi, err := u.stat(name)
	switch {
	case errors.Is(err, fs.ErrNotExist):
		return u.root.Mkdir(name, mode)
	case err != nil:
		return err
	case !fi.IsDir():
		return sandbox.InvalidField("tar", "%.200q is a directory in the tar and is not a directory here", name)
	}
	return nil
}

// clear makes room for an entry. What is there is unlinked and never written
// through: it may be a link of an earlier entry.
func (u *unpacking) clear(name string) error {
	fi, err := u.root.Lstat(name)
	switch {
	case errors.Is(err, fs.ErrNotExist):
		return nil
	case err != nil:
		return err
	case fi.IsDir() && !u.Chroot:
		return sandbox.InvalidField("tar", "%.200q is a directory here and something else in the tar", name)
	}
	return u.root.Remove(name)
}

func (u *unpacking) dir(name string, h *tar.Header) error {
	if err := u.mkdir(name, 0o700); err != nil {
		return err
	}
	open := fs.FileMode(0o700) // always its owner's to fill, to empty and to remove
	if u.Chroot {
		open = 0
	}
	if err := u.settle(name, h, open); err != nil {
		return err
	}
	if len(u.dirs) < dirTimes {
		u.dirs = append(u.dirs, dirTime{name, h.ModTime})
	}
	return nil
}

func (u *unpacking) file(tr *tar.Reader, name string, h *tar.Header) error {
	if u.bytes += h.Size; u.bytes > u.Bytes || u.bytes < 0 {
		return sandbox.Errorf(sandbox.TooLarge, "", "the tar holds more than %s", sandbox.FormatSize(u.Bytes))
	}
	if err := u.clear(name); err != nil {
		return err
	}
	f, err := u.root.OpenFile(name, os.O_WRONLY|os.O_CREATE|os.O_EXCL, 0o600)
	if err != nil {
		return err
	}
	_, err = io.Copy(f, tr)
	if err := errors.Join(err, f.Close()); err != nil {
		return err
	}
	if err := u.settle(name, h, 0); err != nil {
		return err
	}
	return u.root.Chtimes(name, h.ModTime, h.ModTime)
}

func (u *unpacking) symlink(name string, h *tar.Header) error {
	if h.Linkname == "" || !u.Chroot && !staysInside(name, h.Linkname) {
		u.Skipped(name, "a symlink out of the tree, to "+h.Linkname)
		return nil
	}
	if err := u.clear(name); err != nil {
		return err
	}
	if err := u.root.Symlink(h.Linkname, name); err != nil || !u.Owners {
		return err
	}
	return u.root.Lchown(name, h.Uid, h.Gid)
}

// staysInside says whether a symlink at name may point at target. The target
// must be relative, go up only at its beginning and not above the tree. name's
// parents are real directories, so going up is what it says; names after that
// are real or symlinks under the same rule. (Allowing "x/../.." would need
// every x to be checked, now and after each later unpacking into the same tree.)
func staysInside(name, target string) bool {
	if strings.HasPrefix(target, "/") {
		return false
	}
	depth := strings.Count(name, "/")
	down := false
	for part := range strings.SplitSeq(target, "/") {
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

// link makes a hard link to something of the tree.
func (u *unpacking) link(name string, h *tar.Header) error {
	target, err := u.clean(h.Linkname)
	if err != nil {
		return err
	}
	if !u.Chroot {
		if err := u.parents(target); err != nil {
			return err
		}
		if fi, err := u.root.Lstat(target); err != nil || !fi.Mode().IsRegular() {
			return sandbox.InvalidField("tar", "refusing the hard link %.200q: %.200q is no file of the tree", name, h.Linkname)
		}
	}
	if target == name {
		return nil
	}
	if err := u.clear(name); err != nil {
		return err
	}
	return u.root.Link(target, name)
}

// settle gives what was made its owner and its mode, to which open is added.
func (u *unpacking) settle(name string, h *tar.Header, open fs.FileMode) error {
	if u.Owners {
		if err := u.root.Lchown(name, h.Uid, h.Gid); err != nil {
			return err
		}
	}
	bits := fs.FileMode(h.Mode) & u.Modes
	mode := bits&fs.ModePerm | open
	for bit, m := range map[fs.FileMode]fs.FileMode{0o4000: fs.ModeSetuid, 0o2000: fs.ModeSetgid, 0o1000: fs.ModeSticky} {
		if bits&bit != 0 {
			mode |= m
		}
	}
	return u.root.Chmod(name, mode) // after the owner, whose change clears setuid
}

// finish gives directories their times, when nothing is put into them any more.
func (u *unpacking) finish() error {
	for i := len(u.dirs) - 1; i >= 0; i-- {
		d := u.dirs[i]
		err := u.root.Chtimes(d.name, d.at, d.at)
		if err != nil && !errors.Is(err, fs.ErrNotExist) { // a later entry may have replaced it
			return &EntryError{d.name, err}
		}
	}
	return nil
}
