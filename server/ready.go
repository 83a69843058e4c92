package server

import (
	"context"
	"errors"
	"fmt"
	"strconv"
	"strings"
	"time"

	"github.com/cove-sandbox/cove/node"
	"github.com/cove-sandbox/cove/sandbox"
)

const (
	// A readiness check is cheap at first, when most services come up, and rare
	// later.
	firstLook, longestLook = 20 * time.Millisecond, 500 * time.Millisecond
	// maxSockets bounds what is read of the table of sockets: some 7,000.
	maxSockets = 1 << 20
)

// readiness waits for what a template's start command, or a caller of WaitReady,
// wants to be up.
type readiness struct {
	sandbox.Readiness
	probe string // what the exec ids of its checks begin with
}

// await looks until it is ready, fails or runs out of time.
func (r readiness) await(ctx context.Context, n node.Node, id string, ended <-chan error) error {
	for pause, try := firstLook, 1; ; try++ {
		ok, err := r.isReady(ctx, n, id, try)
		if ctx.Err() != nil {
			return context.Cause(ctx)
		}
		if err != nil {
			return err
		}
		if ok {
			select {
			case err := <-ended: // what failed just now is not ready, whatever answered the check
				return err
			default:
				return nil
			}
		}
		timer := time.NewTimer(pause)
		select {
		case <-timer.C:
		case err := <-ended:
			timer.Stop()
			if err != nil {
				return cmpErr(err, ctx)
			}
			ended = nil // it ended well; what it left running may still become ready
		case <-ctx.Done():
			timer.Stop()
			return context.Cause(ctx)
		}
		pause = min(longestLook, pause*3/2)
	}
}

func (r readiness) isReady(ctx context.Context, n node.Node, id string, try int) (bool, error) {
	switch {
	case r.Command != "":
		ok := false
		spec := sandbox.ProcessSpec{ExecID: r.probe + strconv.Itoa(try), Command: r.Command}
		for ev, err := range n.Start(ctx, id, spec, 0) {
			if err != nil {
				return false, err
			}
			ok = ok || ev.End != nil && ev.End.Cause == sandbox.Exited && ev.End.ExitCode == 0
		}
		return ok, nil
	case r.Port != 0:
		return listens(ctx, n, id, r.Port)
	}
	return true, nil
}

// listens says whether something inside accepts connections on a TCP port. It
// reads the kernel's own table: an image need not hold a program that could
// try. Init's, because /proc/net is that of whoever reads, and the guest is no
// process of the container: to it there is none.
func listens(ctx context.Context, n node.Node, id string, port int) (bool, error) {
	var missing error
	for _, table := range []string{"/proc/1/net/tcp6", "/proc/1/net/tcp"} {
		data, _, err := n.ReadFile(ctx, id, table, 0, maxSockets)
		missing = err
		switch {
		case errors.Is(err, sandbox.ErrNotFound): // a kernel without IPv6 has only the other
		case err != nil:
			return false, err
		case hasListener(string(data), port):
			return true, nil
		}
	}
	return false, missing // waiting for a port nobody can see would be for nothing
}

// hasListener reads a table like
//
//	sl  local_address rem_address   st …
//	 0: 00000000:1F90 00000000:0000 0A …
//
// where 0A is a listening socket and the port is hexadecimal.
func hasListener(table string, port int) bool {
	want := fmt.Sprintf(":%04X", port)
	for line := range strings.Lines(table) {
		f := strings.Fields(line)
		if len(f) > 3 && f[3] == "0A" && strings.HasSuffix(f[1], want) {
			return true
		}
	}
	return false
}
