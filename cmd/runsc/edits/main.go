// Command edits makes the gVisor that bin/runsc is built of: the pinned module
// with a few places changed: a kernel restores in two thirds of the time
// (table.go), no call to its guest is lost (table_calls.go), root inside has more
// and leaves nothing (table_root.go), errors are Linux's (table_answers.go), memory
// that is only read takes none (table_zero.go), limits are shown (table_limits.go). What
// each change brings is said there.
//
//	edits MODULE DIR             copy MODULE (as "go list -m" names it) to DIR, changed
//	edits -runtime GOROOT JSON   write an overlay of Go's own runtime, see overlay.go
//
// gVisor is changed only where it costs, or loses, what cannot be had from outside, and
// never allows more than it did, but for tracing one's own processes. What plain gVisor wrote is still read; where we write
// it otherwise, stateForm in runtime/gvisor counts it. A pin that moves such a
// place fails here, by name, before anything is built.
package main

import (
	"embed"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"syscall"
)

//go:embed add
var added embed.FS

func main() {
	var err error
	switch {
	case len(os.Args) == 4 && os.Args[1] == "-runtime":
		_, err = overlay(os.Args[2], os.Args[3])
	case len(os.Args) == 3:
		err = run(os.Args[1], os.Args[2])
	default:
		fmt.Fprintln(os.Stderr, "usage: edits MODULE DIR | edits -runtime GOROOT JSON")
		os.Exit(2)
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, "edits:", err)
		os.Exit(1)
	}
}

// run makes dir whole or not at all: make takes its being there for its being
// right. One at a time, so that what another left half-made is nobody's.
func run(module, dir string) error {
	lock, err := os.OpenFile(dir+".lock", os.O_CREATE|os.O_RDWR, 0o644)
	if err != nil {
		return err
	}
	defer lock.Close()
	if err := syscall.Flock(int(lock.Fd()), syscall.LOCK_EX); err != nil {
		return err
	}
	tmp := dir + ".new"
	if err := os.RemoveAll(tmp); err != nil {
		return err
	}
	defer os.RemoveAll(tmp)
	if err := copyTree(tmp, module); err != nil {
		return err
	}
	for _, e := range edits {
		if err := e.apply(tmp); err != nil {
			return err
		}
	}
	if err := os.RemoveAll(dir); err != nil {
		return err
	}
	return os.Rename(tmp, dir)
}

// apply changes the file below root, or puts it there.
func (e edit) apply(root string) error {
	path := filepath.Join(root, filepath.FromSlash(e.file))
	if e.add != "" {
		src, err := added.ReadFile("add/" + e.add)
		if err != nil {
			return err
		}
		if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil { // of a package of ours
			return err
		}
		f, err := os.OpenFile(path, os.O_CREATE|os.O_EXCL|os.O_WRONLY, 0o644)
		if err != nil {
			return err
		}
		_, err = f.Write(src)
		if cerr := f.Close(); err == nil {
			err = cerr
		}
		return err
	}
	src, err := os.ReadFile(path)
	if err != nil {
		return err
	}
	if n := strings.Count(string(src), e.old); n != 1 {
		return fmt.Errorf("%s has %q %d times, not once: gVisor has changed there, look whether the edit is still wanted", e.file, e.old, n)
	}
	return os.WriteFile(path, []byte(strings.Replace(string(src), e.old, e.new, 1)), 0o644)
}

// copyTree copies what a build reads; files of the module cache are read-only,
// those here are not.
func copyTree(to, from string) error {
	return filepath.WalkDir(from, func(path string, d fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		rel, err := filepath.Rel(from, path)
		if err != nil {
			return err
		}
		target := filepath.Join(to, rel)
		if d.IsDir() {
			return os.MkdirAll(target, 0o755)
		}
		return copyFile(target, path)
	})
}

func copyFile(to, from string) (err error) {
	r, err := os.Open(from)
	if err != nil {
		return err
	}
	defer r.Close()
	w, err := os.OpenFile(to, os.O_CREATE|os.O_EXCL|os.O_WRONLY, 0o644)
	if err != nil {
		return err
	}
	defer func() {
		if cerr := w.Close(); err == nil {
			err = cerr
		}
	}()
	_, err = io.Copy(w, r)
	return err
}
