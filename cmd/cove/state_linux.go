package main

import (
	"context"
	"io"
	"time"

	"github.com/cove-sandbox/cove/sandbox"
	"github.com/cove-sandbox/cove/server"
)

// noState is the state of a node that cannot freeze its sandboxes: none.
type noState struct{}

var _ server.StateNode = noState{}

func cannot(op string) error {
	return &sandbox.Error{Class: sandbox.Unsupported, Op: op, Msg: "this node cannot do that yet"}
}

func (noState) Pause(context.Context, string, bool) error { return cannot("node.pause") }
func (noState) Resume(context.Context, string) (time.Duration, error) {
	return 0, cannot("node.resume")
}
func (noState) Standby() map[string]sandbox.Standby { return nil }
func (noState) Snapshot(context.Context, string, server.SnapshotRequest) (sandbox.Content, time.Duration, error) {
	return sandbox.Content{}, 0, cannot("node.snapshot")
}
func (noState) CreateFrom(context.Context, sandbox.Sandbox, sandbox.Image, sandbox.Snapshot) (time.Duration, error) {
	return 0, cannot("node.create_from")
}
func (noState) PrepareImage(context.Context, sandbox.Snapshot, sandbox.Image, func(sandbox.Progress)) (sandbox.Image, error) {
	return sandbox.Image{}, cannot("node.prepare_image")
}
func (noState) Restore(context.Context, string, sandbox.Image, sandbox.Snapshot) (int64, time.Duration, error) {
	return 0, 0, cannot("node.restore")
}
func (noState) Mount(context.Context, string, sandbox.Snapshot, string, bool) error {
	return cannot("node.mount")
}
func (noState) Tar(context.Context, sandbox.Content, io.Writer) error { return cannot("node.tar") }
func (noState) Release(context.Context, sandbox.Content) error        { return nil }
func (noState) Verify(context.Context, sandbox.Content) (int64, error) {
	return 0, cannot("node.verify")
}
func (noState) Collect(context.Context, []string) (freed int64, e error) { return 0, nil }
func (noState) Volumes() server.VolumeSet                                { return nil }
