package image

import (
	"context"
	"errors"
	"os/exec"

	"github.com/cove-sandbox/cove/sandbox"
)

// asError gives err its class and operation; what is already a *sandbox.Error
// keeps its class.
func asError(ctx context.Context, op string, err error) error {
	if err == nil {
		return nil
	}
	var se *sandbox.Error
	switch {
	case sandbox.NoSpace(err):
		return (&sandbox.Error{Class: sandbox.DiskFull, Op: op, Msg: "no space left for the image", Err: err}).
			WithHint("free space on the image directory's file system, or delete images that are not used")
	case ctx.Err() != nil && errors.Is(context.Cause(ctx), errClosed):
		return &sandbox.Error{Class: sandbox.Unavailable, Op: op, Err: errClosed}
	case errors.Is(ctx.Err(), context.DeadlineExceeded):
		return &sandbox.Error{Class: sandbox.DeadlineReached, Op: op, Err: err}
	case ctx.Err() != nil:
		return &sandbox.Error{Class: sandbox.Canceled, Op: op, Err: err}
	case errors.As(err, &se):
		return sandbox.WithOp(op, err)
	}
	return &sandbox.Error{Class: sandbox.Internal, Op: op, Err: err}
}

// needTool finds a program or says which package brings it.
func needTool(program, pkg string) (string, error) {
	path, err := exec.LookPath(program)
	if err != nil {
		return "", (&sandbox.Error{Class: sandbox.Precondition, Msg: program + " is not installed", Err: err}).
			WithHint("apt-get install -y %s", pkg)
	}
	return path, nil
}
