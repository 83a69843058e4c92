package durable

import (
	"bytes"
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"
)

// faulty fails its n-th step and notes all of them.
type faulty struct {
	host
	fail  int
	steps []string
}

var errFault = &fs.PathError{Op: "fault", Err: syscall.ENOSPC}

func (d *faulty) step(what string) error {
	d.steps = append(d.steps, what)
	if len(d.steps) == d.fail {
		return errFault
	}
	return nil
}

func (d *faulty) Create(path string, mode fs.FileMode) (file, error) {
	if err := d.step("create"); err != nil {
		return nil, err
	}
	f, err := d.host.Create(path, mode)
	return &faultyFile{f, d}, err
}

func (d *faulty) Rename(from, to string) error {
	if err := d.step("rename"); err != nil {
		return err
	}
	return d.host.Rename(from, to)
}

func (d *faulty) Link(from, to string) error {
	if err := d.step("link"); err != nil {
		return err
	}
	return d.host.Link(from, to)
}

func (d *faulty) Sync(path string) error {
	if err := d.step("sync directory"); err != nil {
		return err
	}
	return d.host.Sync(path)
}

type faultyFile struct {
	file
	d *faulty
}

// Write puts half of the content there before it fails, as a full disk does.
func (f *faultyFile) Write(p []byte) (int, error) {
	if err := f.d.step("write"); err != nil {
		n, _ := f.file.Write(p[:len(p)/2])
		return n, err
	}
	return f.file.Write(p)
}

func (f *faultyFile) Chmod(m fs.FileMode) error {
	if err := f.d.step("chmod"); err != nil {
		return err
	}
	return f.file.Chmod(m)
}

func (f *faultyFile) Sync() error {
	if err := f.d.step("sync"); err != nil {
		return err
	}
	return f.file.Sync()
}

func (f *faultyFile) Close() error {
	err := f.file.Close()
	return errors.Join(f.d.step("close"), err)
}

func list(t *testing.T, dir string) (names []string) {
	t.Helper()
	ents, err := os.ReadDir(dir)
	if err != nil {
		t.Fatal(err)
	}
	for _, e := range ents {
		names = append(names, e.Name())
	}
	return names
}

// A fault at any step is told, leaves the old content or the new one, and
// leaves nothing else.
func TestFaultsLeaveOldOrNew(t *testing.T) {
	want := map[string][]string{
		"write":  {"create", "write", "chmod", "sync", "close", "rename", "sync directory"},
		"create": {"create", "write", "chmod", "sync", "close", "link", "sync directory"},
	}
	for name, f := range map[string]func(disk, string, []byte, fs.FileMode) error{
		"write": func(d disk, path string, content []byte, mode fs.FileMode) error {
			return write(d, staged(path), path, copied(bytes.NewReader(content)), mode)
		},
		"create": create,
	} {
		old := "old"
		if name == "create" {
			old = ""
		}
		for n := 1; ; n++ {
			dir := t.TempDir()
			path := filepath.Join(dir, "file")
			if old != "" {
				if err := os.WriteFile(path, []byte(old), 0o600); err != nil {
					t.Fatal(err)
				}
			}
			d := &faulty{fail: n}
			err := f(d, path, []byte("new content"), 0o640)
			got, _ := os.ReadFile(path)
			if n > len(want[name]) {
				st, serr := os.Stat(path)
				if err != nil || serr != nil || string(got) != "new content" || st.Mode() != 0o640 {
					t.Errorf("%s: %q, %v, %v", name, got, err, serr)
				}
				if !slices.Equal(d.steps, want[name]) {
					t.Errorf("%s: %q", name, d.steps)
				}
				break
			}
			if !errors.Is(err, syscall.ENOSPC) {
				t.Errorf("%s: a fault at %s is not told: %v", name, d.steps[n-1], err)
			}
			// Only when its name is there may the content be the new one.
			if done := d.steps[n-1] == "sync directory"; done && string(got) != "new content" || !done && string(got) != old {
				t.Errorf("%s: after a fault at %s: %q", name, d.steps[n-1], got)
			}
			for _, f := range list(t, dir) {
				if f != "file" {
					t.Errorf("%s: a fault at %s leaves %s", name, d.steps[n-1], f)
				}
			}
		}
	}
}

func TestCreateReplacesNothing(t *testing.T) {
	dir := t.TempDir()
	path := filepath.Join(dir, "file")
	var made sync.Map
	var all sync.WaitGroup
	for _, who := range []string{"a", "b", "c", "d"} {
		all.Go(func() {
			switch err := Create(path, []byte(who), 0o600); {
			case err == nil:
				made.Store(who, true)
			case !errors.Is(err, fs.ErrExist):
				t.Error(err)
			}
		})
	}
	all.Wait()
	var winners []string
	made.Range(func(k, _ any) bool { winners = append(winners, k.(string)); return true })
	got, err := os.ReadFile(path)
	if err != nil || len(winners) != 1 || winners[0] != string(got) {
		t.Errorf("%q made it, %q is there, %v", winners, got, err)
	}
	if names := list(t, dir); len(names) != 1 {
		t.Errorf("left behind: %q", names)
	}
}

// Whoever reads while others write sees one of the contents, whole.
func TestReadersSeeWholeFiles(t *testing.T) {
	path := filepath.Join(t.TempDir(), "file")
	contents := []string{strings.Repeat("a", 100_000), strings.Repeat("b", 50_000)}
	if err := Write(path, []byte(contents[0]), 0o600); err != nil {
		t.Fatal(err)
	}
	var writers sync.WaitGroup
	for _, c := range contents {
		writers.Go(func() {
			for range 20 {
				if err := Write(path, []byte(c), 0o600); err != nil {
					t.Error(err)
				}
			}
		})
	}
	over := make(chan struct{})
	go func() { writers.Wait(); close(over) }()
	for {
		got, err := os.ReadFile(path)
		if err != nil || !slices.Contains(contents, string(got)) {
			t.Fatalf("%d bytes, %v", len(got), err)
		}
		select {
		case <-over:
			return
		default:
		}
	}
}

// What a crash left under the name of a staged file is not the start of the next.
func TestStageBeginsAnew(t *testing.T) {
	dir := t.TempDir()
	path := filepath.Join(dir, "file")
	if err := os.WriteFile(path, []byte("left by a crash, and long"), 0o400); err != nil {
		t.Fatal(err)
	}
	if err := Stage(path, bytes.NewReader([]byte("new")), 0o755); err != nil {
		t.Fatal(err)
	}
	to := filepath.Join(dir, "final")
	if err := Rename(path, to); err != nil {
		t.Fatal(err)
	}
	got, err := os.ReadFile(to)
	st, serr := os.Stat(to)
	if err != nil || serr != nil || string(got) != "new" || st.Mode() != 0o755 {
		t.Errorf("%q, %v, %v", got, err, serr)
	}
	if err := Sync(filepath.Join(dir, "none")); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("a directory that is not there: %v", err)
	}
}
