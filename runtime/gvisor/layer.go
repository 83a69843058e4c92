package gvisor

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"time"

	"golang.org/x/sys/unix"
	"gvisor.dev/gvisor/pkg/control/client"
	"gvisor.dev/gvisor/pkg/urpc"

	"github.com/cove-sandbox/cove/runtime"
	"github.com/cove-sandbox/cove/sandbox"
)

var (
	_ runtime.LayerLister = (*Kernel)(nil)
	_ runtime.Clocked     = (*Kernel)(nil)
)

// listMethod and its types are of cmd/runsc/edits (add/upper_*.go.in).
const (
	listMethod  = "Fs.ListRootfsUpperLayer"
	clockMethod = "containerManager.SetRealtime"
)

type listOpts struct {
	ContainerID string
	Most        int64
	Until       int64 // nanoseconds of Unix time
	Hash        bool
	HashMost    int64
	Only        [][]byte
	urpc.FilePayload
}

type listed struct {
	Entries   int64
	Truncated bool
}

// listedEntry is a line. Its bytes need not be UTF-8, which JSON's strings must.
type listedEntry struct {
	sandbox.LayerEntry
	Name   []byte `json:"n"`
	Target []byte `json:"l"`
}

// ListLayer lists the writable layer. See runtime.LayerLister. The sentry holds the
// layer's names still while it walks; what is inside runs on.
func (k *Kernel) ListLayer(ctx context.Context, q runtime.LayerQuery) (*sandbox.UpperLayer, error) {
	const op = "gvisor.list_layer"
	k.mu.Lock()
	container := k.mu.container
	k.mu.Unlock()
	if container == "" {
		return nil, sandbox.Errorf(sandbox.Precondition, op, "kernel %s has no container", k.id)
	}
	o := listOpts{ContainerID: container, Most: int64(q.Most), Hash: q.Hash, HashMost: q.HashMost}
	if !q.Until.IsZero() {
		o.Until = q.Until.UnixNano()
	}
	for _, name := range q.Only {
		o.Only = append(o.Only, []byte(name))
	}
	var fds [2]int
	if err := unix.Pipe2(fds[:], unix.O_CLOEXEC); err != nil {
		return nil, k.explain(op, err)
	}
	if err := unix.SetNonblock(fds[0], true); err != nil { // our end alone: so that a deadline can be set
		return nil, k.explain(op, errors.Join(err, unix.Close(fds[0]), unix.Close(fds[1])))
	}
	r, w := os.NewFile(uintptr(fds[0]), "layer"), os.NewFile(uintptr(fds[1]), "layer, sentry end")
	stop := context.AfterFunc(ctx, func() { r.SetReadDeadline(time.Now()) }) // the sentry's next write fails then
	defer stop()
	o.Files = []*os.File{w}
	var res listed
	called := make(chan error, 1)
	go func() {
		called <- k.control(listMethod, &o, &res)
		w.Close()
	}()
	layer, err := readLayer(io.LimitReader(r, maxListing), q.Most)
	r.Close()
	if cerr := <-called; err == nil || errors.Is(err, io.EOF) {
		err = cerr
	}
	if ctx.Err() != nil {
		return nil, sandbox.Errorf(sandbox.Canceled, op, "%w", ctx.Err())
	}
	if err != nil {
		return nil, k.explain(op, err)
	}
	layer.Truncated = res.Truncated
	return layer, nil
}

// maxListing is more than the sentry writes: 64 MiB of names, in base64, and 300 bytes for
// each of a million. One that writes more is not ours any more.
const maxListing = 1 << 30

func readLayer(r io.Reader, most int) (*sandbox.UpperLayer, error) {
	dec, layer := json.NewDecoder(bufio.NewReaderSize(r, 256<<10)), &sandbox.UpperLayer{}
	for {
		var e listedEntry
		if err := dec.Decode(&e); err == io.EOF {
			return layer, nil
		} else if err != nil {
			return layer, err
		}
		if len(layer.Entries) >= most {
			return layer, fmt.Errorf("more than %d names", most)
		}
		e.LayerEntry.Name, e.LayerEntry.Target = string(e.Name), string(e.Target)
		layer.Entries = append(layer.Entries, e.LayerEntry)
	}
}

// SetClock sets the clock of day inside. See runtime.Clocked.
func (k *Kernel) SetClock(_ context.Context, at time.Time) error {
	ns := realtimeOf(at)
	if err := k.control(clockMethod, &ns, nil); err != nil {
		return k.explain("gvisor.set_clock", err)
	}
	return nil
}

// realtimeOf is a time as the sentry is told; 0 = the host's.
func realtimeOf(at time.Time) int64 {
	if at.IsZero() {
		return 0
	}
	return at.UnixNano()
}

// control calls the sentry.
func (k *Kernel) control(method string, args, res any) error {
	conn, err := client.ConnectTo(k.sb.ControlSocketPath)
	if err != nil {
		return fmt.Errorf("%s: %w", method, err)
	}
	defer conn.Close()
	if err := conn.Call(method, args, res); err != nil {
		return fmt.Errorf("%s: %w", method, err)
	}
	return nil
}
