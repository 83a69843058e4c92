package cli

import (
	"archive/tar"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
)

// mktar streams a directory of this machine as a tar of what is below it.
// Symlinks go as symlinks; owners stay here. What changes while it is read is
// an error, not a torn file. leave, if there is one, says what to leave out, of a
// directory with all that is below it.
func mktar(w io.Writer, dir string, leave func(name string, d fs.DirEntry) (bool, error), skipped func(name, why string)) error {
	root, err := os.OpenRoot(dir)
	if err != nil {
		return err
	}
	defer root.Close()
	tw := tar.NewWriter(w)
	err = fs.WalkDir(root.FS(), ".", func(name string, d fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		if name == "." {
			return nil
		}
		if leave != nil {
			out, err := leave(name, d)
			if err != nil {
				return err
			}
			if out && d.IsDir() {
				return fs.SkipDir
			}
			if out {
				return nil
			}
		}
		fi, err := d.Info()
		if err != nil {
			return err
		}
		link := ""
		switch {
		case fi.Mode()&fs.ModeSymlink != 0:
			if link, err = root.Readlink(filepath.FromSlash(name)); err != nil {
				return err
			}
		case !fi.Mode().IsRegular() && !fi.IsDir():
			skipped(name, "not a file, directory or link")
			return nil
		}
		h, err := tar.FileInfoHeader(anonymous{fi}, link)
		if err != nil {
			return err
		}
		h.Name = name
		h.Mode &= keptBits
		if fi.IsDir() {
			h.Name += "/"
		}
		if err := tw.WriteHeader(h); err != nil {
			return err
		}
		if !fi.Mode().IsRegular() {
			return nil
		}
		f, err := root.Open(filepath.FromSlash(name))
		if err != nil {
			return err
		}
		defer f.Close()
		if _, err := io.Copy(tw, f); err != nil {
			return fmt.Errorf("%s: %w", name, err)
		}
		return nil
	})
	if err != nil {
		return err
	}
	return tw.Close()
}

// anonymous hides the system's own stat from archive/tar, which would look up
// and store our users' names and numbers.
type anonymous struct{ fs.FileInfo }

func (anonymous) Sys() any { return nil }
