// Package durable puts files on the disk so that a crash, at any moment, leaves
// the old content or the new one under a name, and never a part.
//
// That takes three steps in this order: the content is synced under another
// name, the name is changed in one step, and the directory is synced. Without
// the first a name may stand for an empty file after a crash, without the last
// the old file may come back.
package durable

import (
	"bytes"
	"crypto/rand"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
)

// disk is what a write needs of a file system, so that tests can put a fault at
// each step.
type disk interface {
	Create(path string, mode fs.FileMode) (file, error) // must not exist
	Rename(from, to string) error
	Link(from, to string) error
	Remove(path string) error
	Sync(path string) error
}

type file interface {
	io.WriteCloser
	Chmod(fs.FileMode) error
	Sync() error
}

type host struct{}

func (host) Rename(from, to string) error { return os.Rename(from, to) }
func (host) Link(from, to string) error   { return os.Link(from, to) }
func (host) Remove(path string) error     { return os.Remove(path) }

func (host) Create(path string, mode fs.FileMode) (file, error) {
	f, err := os.OpenFile(path, os.O_CREATE|os.O_EXCL|os.O_WRONLY, mode)
	if err != nil {
		return nil, err // and no file that is nil inside an interface that is not
	}
	return f, nil
}

func (host) Sync(path string) error {
	f, err := os.Open(path)
	if err != nil {
		return err
	}
	if err := errors.Join(f.Sync(), f.Close()); err != nil {
		return fmt.Errorf("syncing %s: %w", path, err)
	}
	return nil
}

// Sync makes durable what a file holds, whoever wrote it, or which names a
// directory has.
func Sync(path string) error { return host{}.Sync(path) }

// SyncIn is Sync of a directory below a root, whatever links are on the way.
func SyncIn(root *os.Root, dir string) error {
	d, err := root.Open(dir)
	if err != nil {
		return err
	}
	if err := errors.Join(d.Sync(), d.Close()); err != nil {
		return fmt.Errorf("syncing %s: %w", dir, err)
	}
	return nil
}

// Stage writes a file, synced, that Rename gives its real name later. What a
// crash left under that name is replaced; after an error nothing is there.
func Stage(path string, from io.Reader, mode fs.FileMode) error {
	return stage(host{}, path, copied(from), mode)
}

// filling writes the content of a file.
type filling func(io.Writer) error

func copied(from io.Reader) filling {
	return func(w io.Writer) error { _, err := io.Copy(w, from); return err }
}

func stage(d disk, path string, fill filling, mode fs.FileMode) (err error) {
	if err := d.Remove(path); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	f, err := d.Create(path, 0o600)
	if err != nil {
		return err
	}
	defer func() {
		if err != nil {
			err = errors.Join(err, d.Remove(path))
		}
	}()
	err = fill(f)
	if err == nil {
		err = f.Chmod(mode) // not by the umask
	}
	if err == nil {
		err = f.Sync()
	}
	return errors.Join(err, f.Close())
}

// Rename gives a synced file its name, durably, in place of what has it.
func Rename(from, to string) error {
	if err := os.Rename(from, to); err != nil {
		return err
	}
	return Sync(filepath.Dir(to))
}

// Write replaces a small file. Of two writers at a time the last one stays.
func Write(path string, content []byte, mode fs.FileMode) error {
	return write(host{}, staged(path), path, copied(bytes.NewReader(content)), mode)
}

// Fill is Write of a file that need not be small: fill writes it.
func Fill(path string, mode fs.FileMode, fill func(io.Writer) error) error {
	return write(host{}, staged(path), path, fill, mode)
}

// WriteVia is Write with a name for the file until it is whole, where crashes may
// leave it: on the same file system, and of one writer at a time.
func WriteVia(tmp, path string, content []byte, mode fs.FileMode) error {
	return write(host{}, tmp, path, copied(bytes.NewReader(content)), mode)
}

func write(d disk, tmp, path string, fill filling, mode fs.FileMode) error {
	if err := stage(d, tmp, fill, mode); err != nil {
		return err
	}
	if err := d.Rename(tmp, path); err != nil {
		return errors.Join(err, d.Remove(tmp))
	}
	return d.Sync(filepath.Dir(path))
}

// Create is Write of a file that must not be there: fs.ErrExist if it is.
func Create(path string, content []byte, mode fs.FileMode) error {
	return create(host{}, path, content, mode)
}

func create(d disk, path string, content []byte, mode fs.FileMode) error {
	tmp := staged(path)
	if err := stage(d, tmp, copied(bytes.NewReader(content)), mode); err != nil {
		return err
	}
	// A link fails where a rename would replace what somebody made meanwhile.
	if err := errors.Join(d.Link(tmp, path), d.Remove(tmp)); err != nil {
		return err
	}
	return d.Sync(filepath.Dir(path))
}

// staged is a name of its own per write: with one per file, a writer could rename
// what another has written half of.
func staged(path string) string {
	return filepath.Join(filepath.Dir(path), "."+filepath.Base(path)+"-"+rand.Text())
}
