package gvisor

import (
	"os"
	"sync"
)

// stdio stands in for the process's standard files while sentries are being
// made: sandbox.New donates os.Stdin, os.Stdout and os.Stderr to the kernel
// and chowns them to nobody. Donated, ours would stay open as long as the
// kernel lives (a CI job would never see its pipe close) and a terminal or
// /dev/null would change its owner. The first boot under way puts the stand-in
// there and the last one takes it away; loggers hold the real files already.
//
// A package variable because what it guards is one.
var stdio struct {
	sync.Mutex
	users           int
	in, out, errOut *os.File
	standIn         *os.File
}

// withStdio runs f with a read-only empty file as the standard files.
func withStdio(path string, f func() error) error {
	if err := enterStdio(path); err != nil {
		return err
	}
	defer leaveStdio()
	return f()
}

func enterStdio(path string) error {
	stdio.Lock()
	defer stdio.Unlock()
	if stdio.users == 0 {
		file, err := os.OpenFile(path, os.O_RDONLY|os.O_CREATE, 0o600)
		if err != nil {
			return err
		}
		stdio.in, stdio.out, stdio.errOut = os.Stdin, os.Stdout, os.Stderr
		os.Stdin, os.Stdout, os.Stderr, stdio.standIn = file, file, file, file
	}
	stdio.users++
	return nil
}

func leaveStdio() {
	stdio.Lock()
	defer stdio.Unlock()
	stdio.users--
	if stdio.users == 0 {
		os.Stdin, os.Stdout, os.Stderr = stdio.in, stdio.out, stdio.errOut
		stdio.standIn.Close()
		stdio.standIn = nil
	}
}
