package gvisor

import (
	"context"
	"os"

	"golang.org/x/sys/unix"
	"gvisor.dev/gvisor/pkg/urpc"

	"github.com/cove-sandbox/cove/runtime"
	"github.com/cove-sandbox/cove/sandbox"
)

var _ runtime.Unpacker = (*Kernel)(nil)

// unpackMethod and its argument are of cmd/runsc/edits (add/unpack_control.go.in). A
// kernel that an earlier Cove booted has none, which is an error as any other.
const unpackMethod = "Fs.Unpack"

type unpackOpts struct {
	ContainerID string
	Dir         string
	UID, GID    uint32
	Remove      []string
	Open        []string
	urpc.FilePayload
}

type unpacked struct {
	There  []string
	Opened bool
	Failed string
}

// Unpack has the sentry unpack a tar. See runtime.Unpacker.
func (k *Kernel) Unpack(ctx context.Context, to runtime.Unpacking, tar []byte) (u runtime.Unpacked, err error) {
	const op = "gvisor.unpack"
	if err := k.bulks.enter(ctx); err != nil {
		return u, sandbox.Errorf(sandbox.Canceled, op, "%w", err)
	}
	defer k.bulks.leave()
	k.mu.Lock()
	container, paused := k.mu.container, k.mu.paused
	k.mu.Unlock()
	switch {
	case paused:
		return u, k.errPaused(op)
	case container == "":
		return u, sandbox.Errorf(sandbox.Precondition, op, "kernel %s has no container", k.id)
	}
	// A plain pipe: the sentry reads it as any file.
	var fds [2]int
	if err := unix.Pipe2(fds[:], unix.O_CLOEXEC); err != nil {
		return u, k.explain(op, err)
	}
	r, w := os.NewFile(uintptr(fds[0]), "tar, sentry end"), os.NewFile(uintptr(fds[1]), "tar")
	defer r.Close()
	go func() {
		_, _ = w.Write(tar) // what the sentry does not take fails in it
		w.Close()
	}()
	o := unpackOpts{ContainerID: container, Dir: to.Dir, UID: to.UID, GID: to.GID, Remove: to.Remove, Open: to.Open}
	o.Files = []*os.File{r}
	var res unpacked
	if err := k.control(unpackMethod, &o, &res); err != nil {
		return u, k.explain(op, err)
	}
	u = runtime.Unpacked{There: res.There, Opened: res.Opened}
	if res.Failed != "" {
		return u, sandbox.Errorf(sandbox.Unsupported, op, "kernel %s: %s", k.id, res.Failed)
	}
	return u, nil
}
