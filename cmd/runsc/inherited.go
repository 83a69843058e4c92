package main

import (
	"os"
	"strconv"
	"strings"
	"unicode"

	"golang.org/x/sys/unix"
)

// closeStrangers closes what this process inherited and was not meant to.
// gVisor makes its control sockets without close-on-exec, which is right for a
// runsc that starts one sandbox and ends; a node starts many at once, and each
// child gets what the others' starts have open at that moment. A sentry must
// not hold another's control socket: while it does, a caller of that other one
// waits for ever if that dies. And a sentry wants numbers 253 to 255 for itself
// and dies where a stranger has one of them.
//
// What is meant for it is named in its arguments and lies below the rest: Go
// puts files for a child from 3 on. What is inherited has no close-on-exec, or
// it would not be here; what Go's own runtime has opened by now has it.
func closeStrangers(args []string) {
	meant := highestFD(args)
	for _, fd := range openFDs() {
		if flags, err := unix.FcntlInt(uintptr(fd), unix.F_GETFD, 0); fd > meant && err == nil && flags&unix.FD_CLOEXEC == 0 {
			_ = unix.Close(fd)
		}
	}
}

// highestFD is the highest descriptor that flags like --io-fds=3,4 name, and 2
// where there is none.
func highestFD(args []string) int {
	top := 2
	for _, a := range args {
		name, value, _ := strings.Cut(a, "=")
		if !strings.HasSuffix(name, "-fd") && !strings.HasSuffix(name, "-fds") {
			continue
		}
		for _, s := range strings.FieldsFunc(value, func(r rune) bool { return !unicode.IsDigit(r) }) {
			if fd, err := strconv.Atoi(s); err == nil && !strings.HasPrefix(value, "-") {
				top = max(top, fd)
			}
		}
	}
	return top
}

// openFDs also works where there is no /proc, as after a change of root.
func openFDs() (fds []int) {
	const most = 4096 // a look costs 0.1 µs
	ents, err := os.ReadDir("/proc/self/fd")
	if err != nil {
		for fd := range most {
			fds = append(fds, fd)
		}
		return fds
	}
	for _, e := range ents {
		if fd, err := strconv.Atoi(e.Name()); err == nil {
			fds = append(fds, fd)
		}
	}
	return fds
}
