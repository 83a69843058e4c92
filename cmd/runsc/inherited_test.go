package main

import (
	"testing"

	"golang.org/x/sys/unix"
)

func TestHighestFD(t *testing.T) {
	for _, c := range []struct {
		args []string
		want int
	}{
		{nil, 2},
		{[]string{"boot", "--bundle=/k/9", "--controller-fd=5", "--dev-io-fd=-1", "--io-fds=3,11", "--total-memory=25274793984"}, 11},
		{[]string{"--passthrough-fds=12:3"}, 12},
	} {
		if got := highestFD(c.args); got != c.want {
			t.Errorf("%q: %d, want %d", c.args, got, c.want)
		}
	}
}

// TestCloseStrangers closes what was inherited above what was meant, of any kind,
// and neither what was meant nor what this process opened itself.
func TestCloseStrangers(t *testing.T) {
	base, err := unix.Open("/dev/null", unix.O_RDONLY|unix.O_CLOEXEC, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer unix.Close(base)
	pair, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer unix.Close(pair[0])
	at := func(want, from, flags int) {
		t.Helper()
		if err := unix.Dup3(from, want, flags); err != nil {
			t.Fatal(err)
		}
	}
	// Far above what the test itself has.
	at(900, pair[0], 0)
	at(901, pair[1], 0)
	at(902, base, 0)
	at(903, base, unix.O_CLOEXEC)
	if err := unix.Close(pair[1]); err != nil {
		t.Fatal(err)
	}
	closeStrangers([]string{"--controller-fd=900"})
	open := func(fd int) bool { _, err := unix.FcntlInt(uintptr(fd), unix.F_GETFD, 0); return err == nil }
	if !open(900) || open(901) || open(902) || !open(903) {
		t.Errorf("meant %v, strange socket %v, strange file %v, own file %v; want the strangers closed", open(900), open(901), open(902), open(903))
	}
	unix.Close(900)
	unix.Close(903)
}
