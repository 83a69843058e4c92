package image

import (
	"archive/tar"
	"bufio"
	"bytes"
	"compress/bzip2"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"fmt"
	"hash"
	"io"
	"path"
	"slices"
	"strings"
	"time"

	"github.com/ulikunitz/xz"

	"github.com/cove-sandbox/cove/image/erofs"
)

// writeChanges writes the tar of some paths of a tree, with the directories on
// the way to them, and returns a digest of what it holds but for times.
func writeChanges(ctx context.Context, w io.Writer, root *erofs.Node, paths []string) (digest string, err error) {
	all := map[string]bool{}
	for _, p := range paths {
		for ; !all[p] && p != "/"; p = path.Dir(p) {
			all[p] = true
		}
	}
	names := make([]string, 0, len(all))
	for p := range all {
		names = append(names, p)
	}
	slices.Sort(names)
	t := &treeTar{ctx: ctx, w: tar.NewWriter(w), sum: sha256.New(), names: map[*erofs.Node]string{}}
	if err := t.entry("./", root); err != nil {
		return "", err
	}
	for _, p := range names {
		n := root
		for _, part := range strings.Split(p[1:], "/") {
			if n = n.Child(part); n == nil {
				return "", fmt.Errorf("image: %q was to be in a layer and is not in the tree", p)
			}
		}
		if err := t.entry("."+p, n); err != nil {
			return "", err
		}
	}
	return hex.EncodeToString(t.sum.Sum(nil)), t.w.Close()
}

// treeTar writes nodes of a tree as a tar.
type treeTar struct {
	ctx   context.Context
	w     *tar.Writer
	sum   hash.Hash
	names map[*erofs.Node]string // files that were written, for their other names

	xattrs map[string]xattr // by absolute path
}

func (t *treeTar) entry(name string, n *erofs.Node) error {
	if err := t.ctx.Err(); err != nil {
		return err
	}
	h := &tar.Header{Name: name, Mode: int64(n.Mode & 0o7777), Uid: int(n.UID), Gid: int(n.GID),
		ModTime: time.Unix(n.Mtime, int64(n.MtimeNsec)), Format: tar.FormatPAX}
	if n.MtimeNsec == 0 {
		h.Format = tar.FormatUnknown // a plain header where it says all
	}
	if first, again := t.names[n]; again {
		h.Typeflag, h.Linkname = tar.TypeLink, first
		return t.w.WriteHeader(h)
	}
	switch n.Mode & erofs.TypeMask {
	case erofs.TypeDir:
		h.Typeflag = tar.TypeDir
		if !strings.HasSuffix(h.Name, "/") {
			h.Name += "/"
		}
	case erofs.TypeRegular:
		h.Typeflag, h.Size = tar.TypeReg, n.Size
		t.names[n] = name
	case erofs.TypeSymlink:
		h.Typeflag, h.Linkname = tar.TypeSymlink, n.Target
	case erofs.TypeFIFO:
		h.Typeflag = tar.TypeFifo
	case erofs.TypeChar, erofs.TypeBlock:
		h.Typeflag = tar.TypeChar
		if n.Mode&erofs.TypeMask == erofs.TypeBlock {
			h.Typeflag = tar.TypeBlock
		}
		h.Devmajor, h.Devminor = int64(n.Rdev>>8&0xfff), int64(n.Rdev&0xff|n.Rdev>>12&0xfff00)
	default:
		return nil // a socket is nobody's to pass on
	}
	for k, v := range t.xattrs["/"+strings.TrimPrefix(name, "./")] {
		if h.PAXRecords == nil {
			h.PAXRecords = map[string]string{}
		}
		h.PAXRecords[paxXattr+k], h.Format = string(v), tar.FormatPAX
	}
	if _, err := fmt.Fprintf(t.sum, "%q %c %o %d:%d %d %q\n", h.Name, h.Typeflag, h.Mode, h.Uid, h.Gid, h.Size, h.Linkname); err != nil {
		return err
	}
	if err := t.w.WriteHeader(h); err != nil {
		return err
	}
	if h.Size == 0 {
		return nil
	}
	r, err := n.Open()
	if err != nil {
		return err
	}
	defer r.Close()
	_, err = io.Copy(io.MultiWriter(t.w, t.sum), contextReader{t.ctx, r})
	return err
}

// unpackAny is decompress of all that ADD knows.
func unpackAny(r io.Reader, limits Limits) (io.ReadCloser, error) {
	br := bufio.NewReaderSize(r, 64<<10)
	magic, _ := br.Peek(6)
	packed := &counter{r: br}
	var src io.Reader
	switch {
	case bytes.HasPrefix(magic, []byte("BZh")):
		src = bzip2.NewReader(packed)
	case bytes.HasPrefix(magic, []byte{0xfd, '7', 'z', 'X', 'Z', 0}):
		zr, err := xz.ReaderConfig{DictCap: maxWindow}.NewReader(packed)
		if err != nil {
			return nil, unpackError(err)
		}
		src = zr
	default:
		return decompress(br, limits)
	}
	return &unpacker{src: src, close: func() error { return nil }, packed: packed, ratio: limits.Ratio}, nil
}

// isArchive says whether a file is a tar, packed or not.
func (cp *copier) isArchive(n *erofs.Node) (bool, error) {
	r, err := n.Open()
	if err != nil {
		return false, err
	}
	defer r.Close()
	plain, err := unpackAny(r, cp.limits)
	if err != nil {
		return false, nil // it only began like something packed
	}
	defer plain.Close()
	_, err = tar.NewReader(plain).Next()
	return err == nil, nil
}
