package image

import (
	"archive/tar"
	"strings"

	"github.com/cove-sandbox/cove/image/erofs"
)

// What an overlay's upper layer means by its entries. gVisor's
// TarRootfsUpperLayer writes the upper layer as it is: every directory on the
// way to a change, before what is in it; removed names as character devices
// 0:0, of which only the first is written as one and the others, which share
// its inode, as hard links to it; opaque directories by their attribute.
// Inside, neither can be made by hand: mknod of 0:0 and attributes of that
// prefix are refused. (user.overlay.opaque can be set by anybody, and the
// overlay does not heed it; nor is it heeded here.)
const (
	paxXattr     = "SCHILY.xattr."
	overlayXattr = "trusted.overlay."
)

func isOverlayWhiteout(hdr *tar.Header) bool {
	return hdr.Typeflag == tar.TypeChar && hdr.Devmajor == 0 && hdr.Devminor == 0
}

func isOpaque(hdr *tar.Header) bool {
	return hdr.PAXRecords[paxXattr+overlayXattr+"opaque"] == "y"
}

// isEmptyWhiteout is OCI's form, less what no builder writes: in the tar of a
// sandbox a name like ".wh." is some file, and no reason to fail.
func isEmptyWhiteout(hdr *tar.Header, base string) bool {
	name, ok := strings.CutPrefix(base, ".wh.")
	return ok && hdr.Typeflag == tar.TypeReg && hdr.Size == 0 && name != "" && name != "." && name != ".."
}

// overlayWhiteout removes what the base has at a name, and remembers the name:
// hard links to it are whiteouts too.
func (f *flattener) overlayWhiteout(parts []string) error {
	if err := f.drop(parts); err != nil {
		return err
	}
	dir, err := f.walk(parts[:len(parts)-1], false)
	if err != nil || dir == nil {
		return err
	}
	if base := parts[len(parts)-1]; dir.Child(base) != nil {
		f.hide(dir, base)
	}
	return nil
}

// setDevice keeps a device a sandbox made. gVisor's EROFS has no device
// numbers, so a sandbox of the new image does not see character devices (its
// overlay takes them for 0:0) and cannot open block devices; a Linux kernel
// and the next derived image have them whole.
func setDevice(n *erofs.Node, hdr *tar.Header) error {
	var ok bool
	if n.Rdev, ok = erofs.MakeRdev(hdr.Devmajor, hdr.Devminor); !ok {
		return invalid("%q is device %d:%d", clip(hdr.Name), hdr.Devmajor, hdr.Devminor)
	}
	n.Mode = erofs.TypeChar
	if hdr.Typeflag == tar.TypeBlock {
		n.Mode = erofs.TypeBlock
	}
	return nil
}
