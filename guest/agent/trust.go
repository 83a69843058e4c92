package agent

import (
	"bytes"
	"errors"
	"slices"

	"golang.org/x/sys/unix"

	"github.com/cove-sandbox/cove/guest/wire"
	"github.com/cove-sandbox/cove/sandbox"
)

// trust adds a certificate to the stores that a container has, and then writes it
// to a file of its own: where that is there, all is. The first store is made of
// another where it is missing; missing says that there is none at all, and that
// nothing was done.
//
// It is done in here and not by reads and writes from outside, which took 40 ms:
// a store has 220 KiB, and half of the calls are about stores that are not there.
func (ep *episode) trust(own string, stores []string, cert []byte) (missing bool, err error) {
	if have, err := ep.content(own); err == nil && bytes.Equal(have, cert) {
		return false, nil
	}
	type inode struct{ dev, ino uint64 }
	seen := map[inode]bool{} // a file may have several of the names
	var there []string
	for _, p := range stores {
		fd, st, err := ep.openRegular(p, unix.O_RDONLY)
		if errors.Is(err, unix.ENOENT) || errors.Is(err, unix.ENOTDIR) {
			continue
		}
		if err != nil {
			return false, fileError(p, err)
		}
		unix.Close(fd)
		if i := (inode{uint64(st.Dev), st.Ino}); !seen[i] {
			seen[i] = true
			there = append(there, p)
		}
	}
	if len(there) == 0 {
		return true, nil
	}
	if !slices.Contains(there, stores[0]) {
		base, err := ep.content(there[0])
		if err == nil {
			err = ep.put(stores[0], base, false)
		}
		if err != nil {
			return false, fileError(stores[0], err)
		}
		there = append(there, stores[0])
	}
	for _, p := range there {
		if err := ep.put(p, append([]byte("\n"), cert...), true); err != nil {
			return false, fileError(p, err)
		}
	}
	return false, fileError(own, ep.put(own, cert, false))
}

// put writes a file of root's. Numbers: a container may have no names of users.
func (ep *episode) put(p string, b []byte, add bool) error {
	_, err := ep.write(p, sandbox.WriteOptions{User: "0:0", Parents: true, Append: add}, func(f func([]byte) error) error { return f(b) })
	return err
}

// content is a whole regular file.
func (ep *episode) content(p string) ([]byte, error) {
	fd, st, err := ep.openRegular(p, unix.O_RDONLY)
	if err != nil {
		return nil, err
	}
	defer unix.Close(fd)
	if st.Size > wire.MaxContent {
		return nil, unix.EFBIG
	}
	b := make([]byte, st.Size)
	at := 0
	for at < len(b) {
		n, err := retryEINTR(func() (int, error) { return unix.Pread(fd, b[at:], int64(at)) })
		if err != nil {
			return nil, err
		}
		if n == 0 {
			break
		}
		at += n
	}
	return b[:at], nil
}
