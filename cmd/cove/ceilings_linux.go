package main

import (
	"log/slog"
	"os"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/cove-sandbox/cove/internal/ceilings"
)

// raiseCeilings makes room for thousands of sandboxes where the host's own tables
// are what would run out first. What may not be raised is only told: the node then
// holds as many as fit ('cove doctor' says how many, and by what).
func raiseCeilings(log *slog.Logger) {
	raised, refused := ceilings.Raise(os.ReadFile, func(file string, value []byte) error { return os.WriteFile(file, value, 0) })
	if len(raised) > 0 {
		log.Info("raised limits of the host", "sysctl", raised)
	}
	if len(refused) > 0 {
		log.Warn("limits of the host could not be raised", "sysctl", refused)
	}
	if most, err := raiseFiles(); err != nil {
		log.Warn("the server's own limit of open files could not be raised", "most", most, "err", err)
	}
}

// raiseFiles lets this process have as many open files as fs.nr_open allows. By
// the bare system call: Go gives children back the limit that a process started
// with unless it is changed through its packages, and the limit of a sentry is
// what code inside sees as its own.
func raiseFiles() (most uint64, err error) {
	var was unix.Rlimit
	if err := unix.Getrlimit(unix.RLIMIT_NOFILE, &was); err != nil {
		return 0, err
	}
	if was.Max >= 1<<20 {
		return was.Max, nil // Go has raised the rest
	}
	to := unix.Rlimit{Cur: max(was.Cur, 1<<20), Max: max(was.Max, 1<<20)}
	if _, _, errno := unix.RawSyscall6(unix.SYS_PRLIMIT64, 0, unix.RLIMIT_NOFILE, uintptr(unsafe.Pointer(&to)), 0, 0, 0); errno != 0 {
		return was.Max, errno
	}
	return to.Max, nil
}
