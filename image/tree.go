package image

import (
	"path"
	"strings"

	"github.com/cove-sandbox/cove/image/erofs"
)

// maxLinks is how many symlinks one path may go through, as in Linux.
const maxLinks = 40

// splitPath turns a tar name into components below the image's root. Absolute
// names are taken from the root. ".." is refused and not resolved: no builder
// writes it, so it is an attack or a defect.
func splitPath(name string, depth int) ([]string, error) {
	if len(name) > maxPath {
		return nil, invalid("path of %d bytes; at most %d are possible", len(name), maxPath)
	}
	if strings.IndexByte(name, 0) >= 0 {
		return nil, invalid("NUL byte in path %q", name)
	}
	var parts []string
	for _, part := range strings.Split(name, "/") {
		switch {
		case part == "" || part == ".":
			continue
		case part == "..":
			return nil, invalid("path %q leaves the image", clip(name))
		case len(part) > erofs.MaxName:
			return nil, invalid("name of %d bytes in %q; at most %d are possible", len(part), clip(name), erofs.MaxName)
		}
		parts = append(parts, part)
	}
	if len(parts) > depth {
		return nil, tooLarge("path of %d levels, more than %d", len(parts), depth)
	}
	return parts, nil
}

// clip shortens hostile text for a message.
func clip(s string) string {
	if len(s) > 200 {
		return s[:200] + "…"
	}
	return s
}

// walk resolves parts to a directory, through symlinks of the image, as a
// chroot would: absolute targets start at the image's root and ".." stops
// there. Missing directories are made when create is set; otherwise a missing
// one gives nil. There is no host path in it, hence nothing to escape to.
func (f *flattener) walk(parts []string, create bool) (*erofs.Node, error) {
	stack := []*erofs.Node{f.root}
	links := 0
	for len(parts) > 0 {
		part := parts[0]
		parts = parts[1:]
		here := stack[len(stack)-1]
		switch part {
		case "", ".":
			continue
		case "..":
			if len(stack) > 1 {
				stack = stack[:len(stack)-1]
			}
			continue
		}
		if len(stack) > f.limits.Depth {
			return nil, tooLarge("path of more than %d levels", f.limits.Depth)
		}
		child := here.Child(part)
		switch {
		case child == nil && !create:
			return nil, nil
		case child == nil:
			if len(part) > erofs.MaxName {
				return nil, invalid("name of %d bytes in a link target", len(part))
			}
			child = erofs.NewDir(0o755, 0, 0)
			if err := f.put(here, part, child); err != nil {
				return nil, err
			}
		case child.IsSymlink():
			if links++; links > maxLinks {
				return nil, invalid("more than %d symlinks in a path, at %q", maxLinks, clip(part))
			}
			if path.IsAbs(child.Target) {
				stack = stack[:1]
			}
			parts = append(strings.Split(child.Target, "/"), parts...)
			if len(parts) > maxPath {
				return nil, invalid("symlinks expand to too long a path, at %q", clip(part))
			}
			continue
		case !child.IsDir():
			if !create {
				return nil, nil
			}
			return nil, invalid("%q is a file, and the layer has entries below it", clip(part))
		}
		stack = append(stack, child)
	}
	return stack[len(stack)-1], nil
}

// lookup finds the node at a path and follows symlinks to the end; nil if
// there is none.
func (f *flattener) lookup(name string) *erofs.Node {
	if path.Clean(name) == "/" {
		return f.root
	}
	for range maxLinks {
		dir, err := f.walk(strings.Split(path.Dir(name), "/"), false)
		if err != nil || dir == nil {
			return nil
		}
		n := dir.Child(path.Base(name))
		if n == nil || !n.IsSymlink() {
			return n
		}
		if path.IsAbs(n.Target) {
			name = path.Clean(n.Target)
		} else {
			// Not path.Join of the directory's own name: where that is a
			// symlink, ".." in the target means another directory.
			name = path.Dir(name) + "/" + n.Target
		}
		if path.Base(name) == ".." || path.Base(name) == "." || path.Base(name) == "/" {
			d, err := f.walk(strings.Split(name, "/"), false)
			if err != nil {
				return nil
			}
			return d
		}
	}
	return nil
}

// count charges a name to the limits.
func (f *flattener) count(bytes int) error {
	f.entries++
	f.names += int64(bytes)
	if f.entries > f.limits.Entries {
		return tooLarge("more than %d files", f.limits.Entries)
	}
	if f.names > f.limits.Names {
		return tooLarge("more than %d bytes of file names", f.limits.Names)
	}
	return nil
}

// put adds an entry and counts it against the limits.
func (f *flattener) put(dir *erofs.Node, name string, n *erofs.Node) error {
	if err := f.count(len(name) + len(n.Target)); err != nil {
		return err
	}
	dir.Put(name, n)
	f.touched[entry{dir, name}] = struct{}{}
	return nil
}
