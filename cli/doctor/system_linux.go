package doctor

import (
	"context"
	"errors"
	"os"
	"os/exec"
	"syscall"
	"time"

	"github.com/cove-sandbox/cove/egress/netns"
)

func platform() (space func(string) (int64, int64, error), namespaces func(context.Context) error, network func() error) {
	space = func(dir string) (int64, int64, error) {
		var st syscall.Statfs_t
		if err := syscall.Statfs(dir, &st); err != nil {
			return 0, 0, err
		}
		return int64(st.Bavail) * st.Bsize, int64(st.Ffree), nil
	}
	namespaces = func(ctx context.Context) error {
		ctx, cancel := context.WithTimeout(ctx, 10*time.Second)
		defer cancel()
		cmd := exec.CommandContext(ctx, "true")
		cmd.SysProcAttr = &syscall.SysProcAttr{
			Cloneflags: syscall.CLONE_NEWNS | syscall.CLONE_NEWPID | syscall.CLONE_NEWNET | syscall.CLONE_NEWIPC | syscall.CLONE_NEWUTS,
		}
		return cmd.Run()
	}
	network = func() (err error) {
		dir, err := os.MkdirTemp("", "cove-doctor-")
		if err != nil {
			return err
		}
		defer func() { err = errors.Join(err, os.Remove(dir)) }()
		ns, err := netns.Make(dir, "try")
		if err != nil {
			return err
		}
		return errors.Join(ns.Close(), netns.Remove(ns.Path()))
	}
	return space, namespaces, network
}
