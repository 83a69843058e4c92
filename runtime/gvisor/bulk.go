package gvisor

import (
	"bytes"
	"context"
	"encoding/json"
	"io"
	"os"

	"golang.org/x/sys/unix"
	"gvisor.dev/gvisor/pkg/sentry/control"
	"gvisor.dev/gvisor/pkg/urpc"
	"gvisor.dev/gvisor/runsc/specutils"

	"github.com/cove-sandbox/cove/guest"
	"github.com/cove-sandbox/cove/sandbox"
)

// Bulk runs one transfer in the root container. See runtime.Kernel.
//
// The descriptors are the caller's own pipes or files, handed to the sentry as
// they are: bytes go from the HTTP body to the file inside without touching
// the loopback. They cannot live across a checkpoint, which waits for them.
func (k *Kernel) Bulk(ctx context.Context, op guest.BulkOp, stdin, stdout *os.File) error {
	const opName = "gvisor.bulk"
	if err := k.bulks.enter(ctx); err != nil {
		return sandbox.Errorf(sandbox.Canceled, opName, "%w", err)
	}
	defer k.bulks.leave()
	k.mu.Lock()
	op.InitPID = k.mu.initPID
	paused := k.mu.paused
	k.mu.Unlock()
	if paused {
		return k.errPaused(opName)
	}
	if op.InitPID == 0 {
		return sandbox.Errorf(sandbox.Precondition, opName, "kernel %s has no container", k.id)
	}
	arg, err := json.Marshal(op)
	if err != nil {
		return sandbox.Errorf(sandbox.Internal, opName, "%w", err)
	}
	null, err := os.Open(k.d.stdio())
	if err != nil {
		return k.explain(opName, err)
	}
	defer null.Close()
	if stdin == nil {
		stdin = null
	}
	if stdout == nil {
		stdout = null
	}
	errR, errW, err := os.Pipe()
	if err != nil {
		return k.explain(opName, err)
	}
	defer errR.Close()
	defer errW.Close()
	caps, err := specutils.Capabilities(false, capabilities(userCaps))
	if err != nil {
		return sandbox.Errorf(sandbox.Internal, opName, "%w", err)
	}
	pid, err := k.sb.Execute(k.d.conf, &control.ExecArgs{
		Filename: guestBinary, Argv: []string{guestBinary, "bulk", string(arg)},
		WorkingDirectory: "/", ContainerID: k.id, Capabilities: caps,
		FilePayload: control.FilePayload{
			FilePayload: urpc.FilePayload{Files: []*os.File{stdin, stdout, errW}},
			GuestFDs:    []int{0, 1, 2},
		},
	})
	if err != nil {
		return k.explain(opName, err)
	}
	errW.Close()
	// A caller that leaves must not leave the transfer running.
	finished := make(chan struct{})
	defer close(finished)
	go func() {
		select {
		case <-ctx.Done():
			_ = k.sb.SignalProcess(k.id, pid, unix.SIGKILL, false)
		case <-finished:
		}
	}()
	var report bytes.Buffer
	_, _ = io.Copy(&report, io.LimitReader(errR, 64<<10))
	ws, err := k.sb.WaitPID(k.id, pid)
	if err != nil {
		return k.explain(opName, err)
	}
	// Before the context: whoever leaves right after the last byte has it all.
	if ws.Exited() && ws.ExitStatus() == 0 {
		return nil
	}
	if err := ctx.Err(); err != nil {
		return sandbox.Errorf(sandbox.Canceled, opName, "%w", err)
	}
	var e sandbox.Error
	if json.Unmarshal(report.Bytes(), &e) == nil && e.Class != "" {
		return &e
	}
	return sandbox.Errorf(sandbox.Unavailable, opName, "the transfer failed (%v): %s", ws, report.Bytes())
}
