package agent

import (
	"archive/tar"
	"errors"
	"fmt"
	"io"
	"path"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"github.com/cove-sandbox/cove/sandbox"
)

// maxDirTimes directories of one tar get their own times; more keep the time
// of unpacking.
const maxDirTimes = 1 << 18

// unpacker puts the entries of a tar below one directory. The tar is hostile:
// names must stay below, nothing is created or written through a symlink that
// leads out, and no devices are made.
type unpacker struct {
	root int
	own  *owner

	parent     int // last parent opened, -1 for none
	parentName string
	dirs       []dirAttrs // set last: unpacking into a directory changes its time
	buf        []byte
}

type dirAttrs struct {
	name string
	mode uint32
	time time.Time
}

// untar unpacks a tar into a directory, which is made where opt.Parents is set.
func (ep *episode) untar(p string, opt sandbox.WriteOptions, r io.Reader) error {
	u := &unpacker{parent: -1, buf: make([]byte, 256<<10)}
	err := ep.inside(func() (err error) {
		if u.own, err = ep.fileOwner(opt.User); err != nil {
			return err
		}
		if opt.Parents {
			u.root, err = openDirs(ep.space, p, 0o755, u.own)
		} else {
			u.root, err = ep.space.open(p, unix.O_PATH|unix.O_DIRECTORY, 0)
		}
		return err
	})
	if err != nil {
		return err
	}
	defer unix.Close(u.root)
	defer u.forgetParent()
	tr := tar.NewReader(inputReader{r})
	for {
		h, err := tr.Next()
		if err == io.EOF {
			return u.finish()
		}
		if errors.Is(err, tar.ErrHeader) || errors.Is(err, io.ErrUnexpectedEOF) || errors.Is(err, tar.ErrFieldTooLong) {
			return &sandbox.Error{Class: sandbox.Invalid, Field: "tar", Msg: "not a complete tar", Err: err}
		}
		if err != nil {
			return err
		}
		if err := u.entry(h, tr); err != nil {
			return fileError(path.Join(p, clip(h.Name, 300)), err)
		}
	}
}

// confined refuses a name that is absolute or climbs.
func confined(name string) (string, error) {
	bad := func(why string) (string, error) {
		return "", sandbox.InvalidField("tar", "entry %q %s", clip(name, 200), why)
	}
	switch {
	case strings.IndexByte(name, 0) >= 0:
		return bad("contains a NUL byte")
	case strings.HasPrefix(name, "/"):
		return bad("is absolute")
	case len(name) >= maxPath:
		return bad("is too long")
	}
	for part := range strings.SplitSeq(name, "/") {
		if part == ".." {
			return bad("leads out of the directory")
		}
	}
	return path.Clean(name), nil
}

func (u *unpacker) entry(h *tar.Header, r io.Reader) error {
	if h.Typeflag == tar.TypeXGlobalHeader {
		return nil
	}
	name, err := confined(h.Name)
	if err != nil {
		return err
	}
	mode := uint32(h.Mode) & maxMode
	if name == "." {
		if h.Typeflag != tar.TypeDir {
			return sandbox.InvalidField("tar", "entry %q has no name", clip(h.Name, 200))
		}
		return nil // the directory itself is the caller's
	}
	dir, base, err := u.openParent(name)
	if err != nil {
		return err
	}
	switch h.Typeflag {
	case tar.TypeDir:
		if err := u.dir(dir, base, name); err != nil {
			return err
		}
		if len(u.dirs) < maxDirTimes {
			u.dirs = append(u.dirs, dirAttrs{name, mode, h.ModTime})
		}
		return nil
	case tar.TypeReg:
		return u.file(dir, base, mode, h, r)
	case tar.TypeSymlink:
		if h.Linkname == "" || len(h.Linkname) >= maxPath || strings.IndexByte(h.Linkname, 0) >= 0 {
			return sandbox.InvalidField("tar", "entry %q is a symlink without a valid target", clip(h.Name, 200))
		}
		if err := replacing(dir, base, func() error { return unix.Symlinkat(h.Linkname, dir, base) }); err != nil {
			return err
		}
	case tar.TypeLink:
		return u.link(dir, base, h.Linkname)
	case tar.TypeFifo:
		if err := replacing(dir, base, func() error { return unix.Mknodat(dir, base, unix.S_IFIFO|mode&0o777, 0) }); err != nil {
			return err
		}
	default:
		return sandbox.InvalidField("tar", "entry %q is of a kind that is not accepted: only files, directories, links and FIFOs are", clip(h.Name, 200))
	}
	if u.own != nil {
		if err := unix.Fchownat(dir, base, u.own.uid, u.own.gid, unix.AT_SYMLINK_NOFOLLOW); err != nil {
			return err
		}
	}
	return setTime(dir, base, h.ModTime)
}

// openParent opens the directory of an entry, making what is missing.
func (u *unpacker) openParent(name string) (dir int, base string, err error) {
	parent, base := path.Split(name)
	parent = strings.TrimSuffix(parent, "/")
	if parent == "" {
		return u.root, base, nil
	}
	if u.parent >= 0 && u.parentName == parent {
		return u.parent, base, nil
	}
	fd, err := beneath(u.root, parent)
	if err == unix.ENOENT {
		fd, err = u.makeParents(parent)
	}
	if err != nil {
		return -1, "", linkError(parent, err)
	}
	u.forgetParent()
	u.parent, u.parentName = fd, parent
	return fd, base, nil
}

// makeParents makes the directories of a path, each below the one before.
func (u *unpacker) makeParents(parent string) (int, error) {
	for i := 0; i <= len(parent); i++ {
		if i < len(parent) && parent[i] != '/' {
			continue
		}
		sofar := parent[:i]
		fd, err := beneath(u.root, sofar)
		if err == unix.ENOENT {
			up, base := path.Split(sofar)
			dir := u.root
			if up != "" {
				if dir, err = beneath(u.root, strings.TrimSuffix(up, "/")); err != nil {
					return -1, err
				}
			}
			fd, err = makeDir(dir, base, 0o755, u.own)
			if dir != u.root {
				unix.Close(dir)
			}
		}
		if err != nil {
			return -1, err
		}
		if i == len(parent) {
			return fd, nil
		}
		unix.Close(fd)
	}
	return -1, unix.ENOENT
}

func (u *unpacker) forgetParent() {
	if u.parent >= 0 {
		unix.Close(u.parent)
	}
	u.parent, u.parentName = -1, ""
}

// beneath opens a directory by a relative path that may pass symlinks only
// while they stay below root. Kernels without openat2 get no symlinks at all.
func beneath(root int, name string) (int, error) {
	how := unix.OpenHow{Flags: unix.O_PATH | unix.O_DIRECTORY | unix.O_CLOEXEC, Resolve: unix.RESOLVE_BENEATH | unix.RESOLVE_NO_MAGICLINKS}
	for range 128 { // EAGAIN: something above was renamed meanwhile
		fd, err := unix.Openat2(root, name, &how)
		if err == unix.EINTR || err == unix.EAGAIN {
			continue
		}
		if err != unix.ENOSYS {
			return fd, err
		}
		return beneathSteps(root, name)
	}
	return -1, unix.EAGAIN
}

func beneathSteps(root int, name string) (int, error) {
	fd := -1
	at := root
	for part := range strings.SplitSeq(name, "/") {
		next, err := fdOpen(at, part, unix.O_PATH|unix.O_DIRECTORY, 0)
		if fd >= 0 {
			unix.Close(fd)
		}
		if err != nil {
			return -1, err
		}
		fd, at = next, next
	}
	return fd, nil
}

// linkError explains what beneath refuses.
func linkError(name string, err error) error {
	if err == unix.EXDEV || err == unix.ELOOP {
		return sandbox.InvalidField("tar", "%q passes a symbolic link that leads out of the directory", clip(name, 200))
	}
	return err
}

// replacing runs make, and again after removing what is in its way. A
// directory is never removed.
func replacing(dir int, base string, make func() error) error {
	err := make()
	if err != unix.EEXIST {
		return err
	}
	if err := unix.Unlinkat(dir, base, 0); err != nil && err != unix.ENOENT {
		return err
	}
	return make()
}

// dir makes a directory or takes the one that is there, be it by a symlink
// that stays below.
func (u *unpacker) dir(dir int, base, name string) error {
	err := unix.Mkdirat(dir, base, 0o700)
	if err == unix.EEXIST {
		fd, berr := beneath(u.root, name)
		if berr == nil {
			unix.Close(fd)
			return nil
		}
		if err := unix.Unlinkat(dir, base, 0); err != nil && err != unix.ENOENT {
			return err
		}
		err = unix.Mkdirat(dir, base, 0o700)
	}
	if err == nil && u.own != nil {
		err = unix.Fchownat(dir, base, u.own.uid, u.own.gid, unix.AT_SYMLINK_NOFOLLOW)
	}
	return err
}

func (u *unpacker) file(dir int, base string, mode uint32, h *tar.Header, r io.Reader) error {
	fd := -1
	err := replacing(dir, base, func() (err error) {
		fd, err = fdOpen(dir, base, unix.O_WRONLY|unix.O_CREAT|unix.O_EXCL, 0o600)
		return err
	})
	if err != nil {
		return err
	}
	defer unix.Close(fd)
	var at int64
	for at < h.Size {
		n, rerr := r.Read(u.buf[:min(int64(len(u.buf)), h.Size-at)])
		if err := pwriteAll(fd, u.buf[:n], at); err != nil {
			return err
		}
		at += int64(n)
		if rerr != nil && at < h.Size {
			return &sandbox.Error{Class: sandbox.Invalid, Field: "tar", Msg: fmt.Sprintf("entry %q is cut short", clip(h.Name, 200)), Err: rerr}
		}
	}
	if err := setAttrs(fd, &mode, u.own); err != nil {
		return err
	}
	return setTime(dir, base, h.ModTime)
}

// link makes a hard link to an entry that is below the same directory.
func (u *unpacker) link(dir int, base, target string) error {
	name, err := confined(target)
	if err != nil {
		return err
	}
	if name == "." {
		return sandbox.InvalidField("tar", "a hard link to a directory")
	}
	from := u.root
	parent, targetBase := path.Split(name)
	if parent != "" {
		if from, err = beneath(u.root, strings.TrimSuffix(parent, "/")); err != nil {
			return linkError(parent, err)
		}
		defer unix.Close(from)
	}
	return replacing(dir, base, func() error { return unix.Linkat(from, targetBase, dir, base, 0) })
}

func setTime(dir int, base string, t time.Time) error {
	if t.IsZero() || t.Unix() < 0 {
		return nil
	}
	ts, err := unix.TimeToTimespec(t)
	if err != nil {
		return nil
	}
	return unix.UtimesNanoAt(dir, base, []unix.Timespec{ts, ts}, unix.AT_SYMLINK_NOFOLLOW)
}

// finish gives directories their modes and times, the deepest first. One that
// a later entry replaced is left alone.
func (u *unpacker) finish() error {
	for i := len(u.dirs) - 1; i >= 0; i-- {
		d := u.dirs[i]
		fd, err := beneath(u.root, d.name)
		if err != nil {
			continue
		}
		err = chmodFD(fd, d.mode)
		if err == nil {
			if ts, terr := unix.TimeToTimespec(d.time); terr == nil && d.time.Unix() >= 0 {
				err = unix.UtimesNanoAt(unix.AT_FDCWD, fmt.Sprintf("/proc/self/fd/%d", fd), []unix.Timespec{ts, ts}, 0)
			}
		}
		unix.Close(fd)
		if err != nil {
			return err
		}
	}
	return nil
}

type inputReader struct{ r io.Reader }

func (i inputReader) Read(b []byte) (int, error) {
	n, err := i.r.Read(b)
	if err != nil && err != io.EOF {
		err = inputError(err)
	}
	return n, err
}
