package agent

import (
	"archive/tar"
	"bufio"
	"io"
	"os"
	"strings"
	"time"

	"golang.org/x/sys/unix"
)

// tar writes all below a directory, names relative to it: files, directories,
// symlinks, hard links and FIFOs with modes, owners and times. Sockets and
// devices are left out: they mean nothing elsewhere.
func (ep *episode) tar(p string, w io.Writer) error {
	fd, err := ep.openDir(p)
	if err != nil {
		return err
	}
	defer unix.Close(fd)
	out := bufio.NewWriterSize(outputWriter{w}, bulkBuf)
	tw := tar.NewWriter(out)
	type inode struct{ dev, ino uint64 }
	seen := map[inode]string{} // of files with several names
	prefix := strings.TrimSuffix(p, "/") + "/"
	buf := make([]byte, 256<<10)
	err = walk(fd, p, maxDepth+1, func(dir int, name, child string, st *unix.Stat_t) (bool, error) {
		h := &tar.Header{Format: tar.FormatPAX, Name: strings.TrimPrefix(child, prefix), Mode: int64(st.Mode & maxMode),
			Uid: int(st.Uid), Gid: int(st.Gid), ModTime: time.Unix(st.Mtim.Unix())}
		switch st.Mode & unix.S_IFMT {
		case unix.S_IFDIR:
			h.Typeflag, h.Name = tar.TypeDir, h.Name+"/"
		case unix.S_IFLNK:
			target, err := readlinkat(dir, name)
			if err != nil {
				return false, err
			}
			h.Typeflag, h.Linkname = tar.TypeSymlink, target
		case unix.S_IFIFO:
			h.Typeflag = tar.TypeFifo
		case unix.S_IFREG:
			id := inode{st.Dev, st.Ino}
			if first, ok := seen[id]; ok {
				h.Typeflag, h.Linkname = tar.TypeLink, first
				break
			}
			if err := tarFile(tw, h, dir, name, buf); err != nil {
				return false, err
			}
			if st.Nlink > 1 {
				seen[id] = h.Name
			}
			return false, nil
		default:
			return false, nil
		}
		return true, tw.WriteHeader(h)
	})
	if err != nil {
		return err
	}
	if err := tw.Close(); err != nil {
		return err
	}
	return out.Flush()
}

// tarFile adds one file. Its size is what it has when it is opened: a file
// that shrinks meanwhile is filled with zeros, growth is left out.
func tarFile(tw *tar.Writer, h *tar.Header, dir int, name string, buf []byte) error {
	fd, err := fdOpen(dir, name, unix.O_RDONLY, 0)
	if err != nil {
		return err
	}
	f := os.NewFile(uintptr(fd), name)
	defer f.Close()
	var st unix.Stat_t
	if err := unix.Fstat(fd, &st); err != nil {
		return err
	}
	if st.Mode&unix.S_IFMT != unix.S_IFREG {
		return unix.ENOENT // replaced meanwhile
	}
	h.Typeflag, h.Size = tar.TypeReg, st.Size
	if err := tw.WriteHeader(h); err != nil {
		return err
	}
	for left := st.Size; left > 0; {
		n, err := retryEINTR(func() (int, error) { return unix.Read(fd, buf[:min(int64(len(buf)), left)]) })
		if err != nil {
			return err
		}
		if n == 0 {
			n = int(min(int64(len(buf)), left))
			clear(buf[:n])
		}
		if _, err := tw.Write(buf[:n]); err != nil {
			return err
		}
		left -= int64(n)
	}
	return nil
}

type outputWriter struct{ w io.Writer }

func (o outputWriter) Write(b []byte) (int, error) {
	n, err := o.w.Write(b)
	if err != nil {
		err = outputError(err)
	}
	return n, err
}
