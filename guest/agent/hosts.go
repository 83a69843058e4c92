package agent

import (
	"bytes"
	"errors"
	"os"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/cove-sandbox/cove/guest/wire"
)

// maxHosts bytes of /etc/hosts are looked at; in a longer one our line may come
// to stand twice.
const maxHosts = 1 << 20

// nameHost makes CallbackHost mean CallbackAddr inside, on a thread of run: one
// for files once code runs there, which could hold up the spawner's, and the
// spawner's before, which is there already. A directory of this machine is not
// a container: its names are the machine's.
func nameHost(sp Space, run func(func()) error) (err error) {
	if !sp.contained() {
		return nil
	}
	derr := run(func() { err = addHost("/etc", wire.CallbackAddr, wire.CallbackHost) })
	return errors.Join(derr, err)
}

// addHost adds a line to the file unless one there has the name. A file that is
// missing is made with the lines of localhost beside it, which resolvers would
// else not know. It works below etc, never through a symlink and never into a
// FIFO.
func addHost(etc, addr, name string) error {
	if err := unix.Mkdir(etc, 0o755); err != nil && err != unix.EEXIST {
		return &os.PathError{Op: "mkdir", Path: etc, Err: err}
	}
	path := etc + "/hosts"
	fd, err := retryEINTR(func() (int, error) {
		return unix.Open(path, unix.O_RDWR|unix.O_APPEND|unix.O_CREAT|unix.O_NOFOLLOW|unix.O_NONBLOCK|unix.O_CLOEXEC, 0o644)
	})
	if err != nil {
		return &os.PathError{Op: "open", Path: path, Err: err}
	}
	f := os.NewFile(uintptr(fd), path)
	defer f.Close()
	fi, err := f.Stat()
	if err != nil {
		return err
	}
	if !fi.Mode().IsRegular() {
		return errNotRegular(path)
	}
	have := make([]byte, min(fi.Size(), maxHosts))
	if _, err := f.ReadAt(have, 0); err != nil {
		return err
	}
	if names(have, name) {
		return nil
	}
	line := addr + " " + name + "\n"
	switch {
	case len(have) == 0:
		line = "127.0.0.1 localhost\n::1 localhost\n" + line
	case have[len(have)-1] != '\n':
		line = "\n" + line
	}
	_, err = f.WriteString(line)
	return err
}

// names says whether a line has name, whatever address it gives it: somebody
// inside may have a reason for another.
func names(hosts []byte, name string) bool {
	for line := range bytes.Lines(hosts) {
		line, _, _ = bytes.Cut(line, []byte("#"))
		f := strings.Fields(string(line))
		for _, n := range f[min(1, len(f)):] {
			if strings.EqualFold(n, name) {
				return true
			}
		}
	}
	return false
}
