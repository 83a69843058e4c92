package agent

import (
	"strconv"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/cove-sandbox/cove/sandbox"
)

// signalNumber reads "SIGTERM", "TERM" or "15"; "" is SIGKILL.
func signalNumber(s string) (unix.Signal, error) {
	if s == "" {
		return unix.SIGKILL, nil
	}
	if n, err := strconv.Atoi(s); err == nil && n > 0 && n <= 64 {
		return unix.Signal(n), nil
	}
	name := strings.ToUpper(s)
	if !strings.HasPrefix(name, "SIG") {
		name = "SIG" + name
	}
	if n := unix.SignalNum(name); n != 0 {
		return n, nil
	}
	return 0, sandbox.InvalidField("signal", "unknown signal %q; accepted are names such as SIGTERM or TERM, and numbers from 1 to 64", s)
}

// signalName is the name shells use, or SIG<n> for those without one.
func signalName(s unix.Signal) string {
	if n := unix.SignalName(s); n != "" {
		return n
	}
	return "SIG" + strconv.Itoa(int(s))
}
