package erofs

// Extended attributes are read and never written: the sentry answers ENOTSUP
// for every access to an inode whose attribute count is not 0, be they packed
// behind it or shared (gvisor.dev/gvisor/pkg/erofs, Image.Inode), so a file
// with one "user.x" could not even be listed.
const (
	inodeCompact = 32

	xattrHeader = 12
	xattrSlot   = 4
	xattrEntry  = 4

	// maxXattrBytes is what an inode's 16-bit slot count can describe.
	maxXattrBytes = xattrHeader + 65534*xattrSlot
)

// xattrPrefixes are the name indexes of the format.
var xattrPrefixes = map[byte]string{
	1: "user.", 2: "system.posix_acl_access", 3: "system.posix_acl_default",
	4: "trusted.", 5: "lustre.", 6: "security.",
}

// readXattrs reads the attributes in the n bytes at off: a header with a count
// of shared ones, their addresses, and then this inode's own.
func (r *Reader) readXattrs(in *Inode, off, n int64) error {
	b, err := r.bytes(off, xattrHeader)
	if err != nil {
		return err
	}
	shared := int64(b[4])
	end := off + n
	off += xattrHeader
	if off+shared*xattrSlot > end {
		return badFormat("inode %d has %d shared attributes in %d bytes", in.Nid, shared, n)
	}
	all := map[string]string{}
	for range shared {
		b, err := r.bytes(off, xattrSlot)
		if err != nil {
			return err
		}
		if _, err := r.readXattr(all, r.xattrs+int64(le.Uint32(b))*xattrSlot, r.size); err != nil {
			return err
		}
		off += xattrSlot
	}
	for off+xattrEntry <= end {
		b, err := r.bytes(off, xattrEntry)
		if err != nil {
			return err
		}
		if le.Uint32(b) == 0 {
			break // padding
		}
		if off, err = r.readXattr(all, off, end); err != nil {
			return err
		}
	}
	in.Xattrs = all
	return nil
}

// readXattr reads one attribute and returns where the next one begins.
func (r *Reader) readXattr(all map[string]string, off, end int64) (int64, error) {
	b, err := r.bytes(off, xattrEntry)
	if err != nil {
		return 0, err
	}
	name, index, value := int64(b[0]), b[1], int64(le.Uint16(b[2:]))
	prefix, known := xattrPrefixes[index]
	if !known {
		return 0, badFormat("attribute name index %d", index)
	}
	off += xattrEntry
	if off+name+value > end || name+value > maxXattrBytes {
		return 0, badFormat("an attribute of %d bytes", name+value)
	}
	if b, err = r.bytes(off, name+value); err != nil {
		return 0, err
	}
	all[prefix+string(b[:name])] = string(b[name:])
	return roundUp(off+name+value, xattrSlot), nil
}
