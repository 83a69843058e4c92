// Package erofs writes EROFS file systems that gVisor's sentry can map, and
// reads them back, to make others of them.
//
// Why not mkfs.erofs: it wants a directory, so an image layer written by a
// stranger would first have to be unpacked on the host, as root; it needs an
// erofs-utils newer than Debian 12's to take a tar instead; and its output
// changes with its version, so two nodes would give one image two names. What
// the sentry reads is a small part of the format (no compression, no chunks, no
// extended attributes, no incompatible feature at all), and writing that part
// takes one page of layout rules. fsck.erofs, the Linux kernel and gVisor's own
// reader all check the result in the tests.
//
// The layout: superblock, then one 64-byte inode per file with directories'
// and symlinks' data packed behind it where it fits into the block, then data
// blocks. Regular files are never packed: the sentry maps their pages straight
// from the image file, and execve of a packed one fails with EFAULT. Order and
// padding follow from the tree alone, so equal trees give equal bytes.
//
// Open trusts nothing it reads: it also gets what mkfs.erofs made, and a disk
// may lie. An image read and written again comes out the same, byte for byte.
package erofs
