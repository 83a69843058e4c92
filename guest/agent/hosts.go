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

// selfAddr is what Debian gives a host of a name and no address of its own.
const selfAddr = "127.0.1.1"

// selfMark ends our line, so that a copy of the sandbox that has another name
// finds the one to replace.
const selfMark = " # this sandbox"

// setHostname gives the container its name; "" leaves what it has.
func setHostname(sp Space, name string) (err error) {
	if name == "" || !sp.contained() {
		return nil
	}
	derr := sp.spawner(func() { err = unix.Sethostname([]byte(name)) })
	return errors.Join(derr, err)
}

// nameSelf lets the name resolve inside, on a thread of run as nameHost.
func nameSelf(sp Space, run func(func()) error, name string) (err error) {
	if name == "" || !sp.contained() {
		return nil
	}
	derr := run(func() { err = errors.Join(nameIn("/etc", name), writeHostname("/etc", name)) })
	return errors.Join(derr, err)
}

// writeHostname has the file say what the kernel does, whatever the image or the
// sandbox that this is a copy of had there.
func writeHostname(etc, name string) error {
	f, have, err := openEtc(etc, "hostname")
	if err != nil {
		return err
	}
	defer f.Close()
	if string(have) == name+"\n" {
		return nil
	}
	if err := f.Truncate(0); err != nil {
		return err
	}
	_, err = f.WriteString(name + "\n")
	return err
}

// nameIn makes the file's one line of ours name the sandbox.
func nameIn(etc, name string) error {
	f, have, err := openEtc(etc, "hosts")
	if err != nil {
		return err
	}
	defer f.Close()
	if names(have, name) {
		return nil
	}
	var others []byte
	for line := range bytes.Lines(have) {
		if !bytes.HasSuffix(bytes.TrimRight(line, "\n"), []byte(selfMark)) {
			others = append(others, line...)
		}
	}
	if len(others) < len(have) && len(have) < maxHosts {
		if err := f.Truncate(0); err != nil {
			return err
		}
		if _, err := f.Write(others); err != nil {
			return err
		}
		have = others
	}
	return appendHost(f, have, selfAddr+" "+name+selfMark)
}

// addHost adds a line to the file unless one there has the name.
func addHost(etc, addr, name string) error {
	f, have, err := openEtc(etc, "hosts")
	if err != nil {
		return err
	}
	defer f.Close()
	if names(have, name) {
		return nil
	}
	return appendHost(f, have, addr+" "+name)
}

// openEtc opens a file for appending and reads it. It works below etc,
// never through a symlink and never into a FIFO.
func openEtc(etc, name string) (f *os.File, have []byte, err error) {
	if err := unix.Mkdir(etc, 0o755); err != nil && err != unix.EEXIST {
		return nil, nil, &os.PathError{Op: "mkdir", Path: etc, Err: err}
	}
	path := etc + "/" + name
	fd, err := retryEINTR(func() (int, error) {
		return unix.Open(path, unix.O_RDWR|unix.O_APPEND|unix.O_CREAT|unix.O_NOFOLLOW|unix.O_NONBLOCK|unix.O_CLOEXEC, 0o644)
	})
	if err != nil {
		return nil, nil, &os.PathError{Op: "open", Path: path, Err: err}
	}
	f = os.NewFile(uintptr(fd), path)
	defer func() {
		if err != nil {
			f.Close()
		}
	}()
	fi, err := f.Stat()
	if err != nil {
		return nil, nil, err
	}
	if !fi.Mode().IsRegular() {
		return nil, nil, errNotRegular(path)
	}
	have = make([]byte, min(fi.Size(), maxHosts))
	if _, err := f.ReadAt(have, 0); err != nil {
		return nil, nil, err
	}
	return f, have, nil
}

// appendHost writes a line behind what the file has. An empty one gets the
// lines of localhost too, which resolvers would else not know.
func appendHost(f *os.File, have []byte, line string) error {
	line += "\n"
	switch {
	case len(have) == 0:
		line = "127.0.0.1 localhost\n::1 localhost\n" + line
	case have[len(have)-1] != '\n':
		line = "\n" + line
	}
	_, err := f.WriteString(line)
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
