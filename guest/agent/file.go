package agent

import (
	"bytes"
	"path"
	"time"

	"golang.org/x/sys/unix"

	"github.com/cove-sandbox/cove/guest/wire"
	"github.com/cove-sandbox/cove/sandbox"
)

// maxMode is every bit a mode may have.
const maxMode = 0o7777

// file runs the requests on files. Only resolving a path needs a thread
// inside; descriptors mean the same on every thread, so content is moved and
// trees are walked outside, and slow work holds none of the few threads.
func (s *session) file(ep *episode, r wire.Req, body *content) error {
	p, err := ep.path("path", r.Path)
	if err != nil {
		return err
	}
	var opt sandbox.WriteOptions
	if r.Write != nil {
		opt = *r.Write
	}
	if opt.Mode > maxMode || r.Mode > maxMode {
		return sandbox.InvalidField("mode", "must be at most 07777")
	}
	switch r.Op {
	case wire.OpRead:
		return s.read(ep, p, r.Offset, r.Length)
	case wire.OpWrite:
		info, err := ep.write(p, opt, body.each)
		return s.reply(wire.Res{File: info}, fileError(p, err))
	case wire.OpUntar:
		tar, err := body.whole(wire.MaxUntar)
		if err != nil {
			return err
		}
		return s.reply(wire.Res{}, fileError(p, ep.untar(p, opt, bytes.NewReader(tar))))
	case wire.OpTrust:
		cert, err := body.whole(wire.MaxContent)
		if err != nil {
			return err
		}
		for i, path := range r.Paths {
			if r.Paths[i], err = cleanPath("paths", path); err != nil {
				return err
			}
		}
		if len(r.Paths) == 0 || len(cert) == 0 {
			return sandbox.InvalidField("paths", "stores and a certificate must be given")
		}
		missing, err := ep.trust(p, r.Paths, cert)
		return s.reply(wire.Res{Missing: missing}, err)
	case wire.OpStat:
		info, err := ep.info(p)
		return s.reply(wire.Res{File: info}, fileError(p, err))
	case wire.OpList:
		files, truncated, err := ep.list(p, r.Depth, r.Limit, r.Flag)
		return s.reply(wire.Res{Files: files, Truncated: truncated}, fileError(p, err))
	case wire.OpMkdir:
		info, err := ep.mkdir(p, opt)
		return s.reply(wire.Res{File: info}, fileError(p, err))
	case wire.OpMove:
		to, err := ep.path("to", r.To)
		if err != nil {
			return err
		}
		info, err := ep.move(p, to)
		return s.reply(wire.Res{File: info}, err)
	case wire.OpRemove:
		return s.reply(wire.Res{}, fileError(p, ep.remove(p, r.Flag)))
	case wire.OpChmod:
		return s.reply(wire.Res{}, fileError(p, ep.chmod(p, r.Mode, r.Flag)))
	case wire.OpSetAttrs:
		if err := sandbox.ValidateAttributes("attributes", r.Attributes); err != nil {
			return err
		}
		info, err := ep.setAttributes(p, r.Attributes)
		return s.reply(wire.Res{File: info}, fileError(p, err))
	case wire.OpChown:
		return s.reply(wire.Res{}, fileError(p, ep.chown(p, r.User, r.Flag)))
	}
	return sandbox.Errorf(sandbox.Unsupported, "", "unknown request %q", clip(r.Op, 50))
}

// inside runs f on a file thread and returns its error.
func (ep *episode) inside(f func() error) error {
	var err error
	if ferr := ep.space.files(func() { err = f() }); ferr != nil {
		return ferr
	}
	return err
}

// describe is what a stat says, with the target of a symlink read at its
// directory.
type describer struct{ user, group func(uint32) string }

// describer reads the names of owners. It runs on a thread inside.
func (ep *episode) describer() describer {
	u, g := ep.userDB.names(ep.space)
	return describer{u, g}
}

func (d describer) info(p string, st *unix.Stat_t) sandbox.FileInfo {
	fi := sandbox.FileInfo{Path: p, Name: path.Base(p), Size: st.Size, Mode: st.Mode & maxMode, UID: st.Uid, GID: st.Gid,
		Owner: d.user(st.Uid), Group: d.group(st.Gid), ModTime: time.Unix(st.Mtim.Unix()).UTC()}
	switch st.Mode & unix.S_IFMT {
	case unix.S_IFREG:
		fi.Type = sandbox.Regular
	case unix.S_IFDIR:
		fi.Type = sandbox.Directory
	case unix.S_IFLNK:
		fi.Type = sandbox.Symlink
	default:
		fi.Type = sandbox.OtherFile
	}
	return fi
}

// at describes one name of a directory, not following it.
func (d describer) at(dir int, name, p string) (sandbox.FileInfo, error) {
	var st unix.Stat_t
	if err := unix.Fstatat(dir, name, &st, unix.AT_SYMLINK_NOFOLLOW); err != nil {
		return sandbox.FileInfo{}, err
	}
	fi := d.info(p, &st)
	if fi.Type == sandbox.Symlink {
		fi.Target, _ = readlinkat(dir, name)
	}
	fi.Attributes = attributesAt(dir, name, fi.Type)
	return fi, nil
}

func readlinkat(dir int, name string) (string, error) {
	b := make([]byte, maxPath)
	n, err := unix.Readlinkat(dir, name, b)
	if err != nil {
		return "", err
	}
	return string(b[:n]), nil
}

// info describes a path.
func (ep *episode) info(p string) (*sandbox.FileInfo, error) {
	var fi sandbox.FileInfo
	err := ep.inside(func() error {
		dir, name, err := openParent(ep.space, p)
		if err != nil {
			return err
		}
		defer unix.Close(dir)
		fi, err = ep.describer().at(dir, name, p)
		return err
	})
	return &fi, err
}

// infoFD describes an open file.
func (ep *episode) infoFD(p string, fd int) (*sandbox.FileInfo, error) {
	var fi sandbox.FileInfo
	err := ep.inside(func() error {
		var st unix.Stat_t
		if err := unix.Fstat(fd, &st); err != nil {
			return err
		}
		fi = ep.describer().info(p, &st)
		fi.Attributes = attributes(fd)
		return nil
	})
	return &fi, err
}

func (ep *episode) mkdir(p string, opt sandbox.WriteOptions) (*sandbox.FileInfo, error) {
	mode := opt.Mode
	if mode == 0 {
		mode = 0o755
	}
	err := ep.inside(func() error {
		own, err := ep.fileOwner(opt.User)
		if err != nil {
			return err
		}
		if opt.Parents {
			// Parents are made passable whatever mode the directory itself gets.
			if dir := path.Dir(p); dir != p {
				fd, err := openDirs(ep.space, dir, 0o755, own)
				if err != nil {
					return err
				}
				unix.Close(fd)
			}
			fd, err := openDirs(ep.space, p, mode, own)
			if err == nil {
				unix.Close(fd)
			}
			return err
		}
		dir, name, err := openParent(ep.space, p)
		if err != nil {
			return err
		}
		defer unix.Close(dir)
		if err := unix.Mkdirat(dir, name, 0o700); err != nil {
			return err
		}
		fd, err := fdOpen(dir, name, unix.O_RDONLY|unix.O_DIRECTORY, 0)
		if err != nil {
			return err
		}
		defer unix.Close(fd)
		return setAttrs(fd, &mode, own)
	})
	if err != nil {
		return nil, err
	}
	return ep.info(p)
}

func (ep *episode) move(from, to string) (*sandbox.FileInfo, error) {
	named := from // which of the two an error is about
	err := ep.inside(func() error {
		src, name, err := openParent(ep.space, from)
		if err != nil {
			return err
		}
		defer unix.Close(src)
		var st unix.Stat_t
		if err := unix.Fstatat(src, name, &st, unix.AT_SYMLINK_NOFOLLOW); err != nil {
			return err
		}
		named = to
		dst, newName, err := openParent(ep.space, to)
		if err != nil {
			return err
		}
		defer unix.Close(dst)
		return unix.Renameat(src, name, dst, newName)
	})
	if err != nil {
		return nil, fileError(named, err)
	}
	return ep.info(to)
}
