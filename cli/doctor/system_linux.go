package doctor

import (
	"context"
	"os/exec"
	"syscall"
	"time"
)

func platform() (space func(string) (int64, int64, error), namespaces func(context.Context) error) {
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
	return space, namespaces
}
