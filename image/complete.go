package image

import (
	"bytes"
	"io"
	"strings"

	"github.com/cove-sandbox/cove/image/erofs"
)

// hostName is of an image that is not in a sandbox: the guest writes the
// sandbox's own, here and in /etc/hosts.
const hostName = "cove"

const localHost = "localhost"

const hostsLines = "127.0.0.1 " + localHost + "\n::1 " + localHost + "\n"

// complete adds what a sandbox needs and an image may lack: mount points and
// the files a container runtime would bind-mount.
func (f *flattener) complete() error {
	if err := f.mountPoints(); err != nil {
		return err
	}
	return f.hostFiles()
}

// mountPoints are made because nothing can be in a read-only root before they
// are mounted. A derived image gets no more than these: what its sandbox did
// to /etc is its own affair.
func (f *flattener) mountPoints() error {
	for _, name := range []string{"proc", "dev", "sys"} {
		// Replaced even where it is a symlink to a directory: the mounts
		// below the image are the host's choice, not the image's.
		if n := f.root.Child(name); n == nil || !n.IsDir() {
			if err := f.put(f.root, name, erofs.NewDir(0o755, 0, 0)); err != nil {
				return err
			}
		}
	}
	for name, perm := range map[string]uint16{"tmp": 0o1777, "run": 0o755} {
		if n := f.lookup("/" + name); n == nil || !n.IsDir() {
			if err := f.put(f.root, name, erofs.NewDir(perm, 0, 0)); err != nil {
				return err
			}
		}
	}
	return nil
}

func (f *flattener) hostFiles() error {
	if n := f.lookup("/etc"); n == nil || !n.IsDir() {
		if err := f.put(f.root, "etc", erofs.NewDir(0o755, 0, 0)); err != nil {
			return err
		}
	}
	etc := f.lookup("/etc")

	hosts, err := f.readSmall("/etc/hosts")
	if err != nil {
		return err
	}
	if !namesLocalHost(hosts) {
		if len(hosts) > 0 && !bytes.HasSuffix(hosts, []byte("\n")) {
			hosts = append(hosts, '\n')
		}
		if err := f.put(etc, "hosts", textFile(string(hosts)+hostsLines)); err != nil {
			return err
		}
	}
	if f.lookup("/etc/resolv.conf") == nil { // missing, or a dangling link
		if err := f.put(etc, "resolv.conf", textFile("")); err != nil {
			return err
		}
	}
	if f.lookup("/etc/hostname") == nil {
		if err := f.put(etc, "hostname", textFile(hostName+"\n")); err != nil {
			return err
		}
	}
	return nil
}

// namesLocalHost says whether a hosts file has a line for localhost.
func namesLocalHost(hosts []byte) bool {
	for line := range strings.Lines(string(hosts)) {
		line, _, _ = strings.Cut(line, "#")
		fields := strings.Fields(line)
		for i, field := range fields {
			if i > 0 && field == localHost {
				return true
			}
		}
	}
	return false
}

// readSmall reads a text file of the image; nil if it is not a regular file or
// too large to be one of those we edit.
func (f *flattener) readSmall(name string) ([]byte, error) {
	n := f.lookup(name)
	if n == nil || !n.IsRegular() || n.Size == 0 || n.Size > mib {
		return nil, nil
	}
	r, err := n.Open()
	if err != nil {
		return nil, err
	}
	defer r.Close()
	return io.ReadAll(r)
}

func textFile(content string) *erofs.Node {
	return &erofs.Node{Mode: erofs.TypeRegular | 0o644, Size: int64(len(content)),
		Open: func() (io.ReadCloser, error) { return io.NopCloser(strings.NewReader(content)), nil }}
}
