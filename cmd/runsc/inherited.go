package main

import (
	"os"
	"strconv"
	"strings"
	"unicode"

	"golang.org/x/sys/unix"
)

// closeStrangers closes the sockets that this process inherited and was not
// meant to. gVisor makes its control sockets without close-on-exec, which is
// right for a runsc that starts one sandbox and ends; a node starts many at
// once, and each child gets the sockets that the others' starts have open at
// that moment. A sentry must not hold another's control socket. Also, while it
// does, a caller of that other one waits for ever if that dies.
//
// What is meant for it is named in its arguments and lies below the rest: Go
// puts files for a child from 3 on. Only sockets: what Go's own runtime has
// opened by now is none.
func closeStrangers(args []string) {
	meant := highestFD(args)
	for _, fd := range openFDs() {
		var st unix.Stat_t
		if fd > meant && unix.Fstat(fd, &st) == nil && st.Mode&unix.S_IFMT == unix.S_IFSOCK {
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
