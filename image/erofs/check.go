package erofs

import (
	"fmt"
	"os"

	"gvisor.dev/gvisor/pkg/erofs"
)

// Check walks the image at path with gVisor's own reader and fails on anything
// the sentry would: an unknown feature, a damaged directory, an attribute, a
// regular file it could not map. It reads metadata only.
func Check(path string) error {
	f, err := os.Open(path)
	if err != nil {
		return err
	}
	img, err := erofs.OpenImage(f)
	if err != nil {
		f.Close()
		return fmt.Errorf("erofs: %w", err)
	}
	defer img.Close()
	return checkInode(img, img.RootNid(), "/", 0)
}

func checkInode(img *erofs.Image, nid uint64, path string, depth int) error {
	ino, err := img.Inode(nid)
	if err != nil {
		return fmt.Errorf("erofs: inode of %q: %w", path, err)
	}
	switch {
	case ino.IsRegular():
		off, err := ino.DataOffset()
		if err != nil {
			return fmt.Errorf("erofs: content of %q: %w", path, err)
		}
		if ino.Size() > 0 {
			if _, err := img.BytesAt(off, ino.Size()); err != nil {
				return fmt.Errorf("erofs: content of %q: %w", path, err)
			}
		}
	case ino.IsSymlink():
		if _, err := ino.Readlink(); err != nil {
			return fmt.Errorf("erofs: link %q: %w", path, err)
		}
	case ino.IsDir():
		if depth > maxDepth {
			return fmt.Errorf("erofs: more than %d levels of directories", maxDepth)
		}
		return ino.IterDirents(func(name string, _ uint8, child uint64) error {
			if name == "." || name == ".." {
				return nil
			}
			return checkInode(img, child, path+name+"/", depth+1)
		})
	}
	return nil
}
