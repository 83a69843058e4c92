// Package snapshot keeps the content of snapshots on cas: what it is made of
// (manifests), bringing it in and out ([Filesystem], [Memory]), what may be
// deleted ([Refs], [Collect], [Verify]), which to keep ([Decide]) and how they
// descend from each other ([BuildTree]). It knows nothing of sandboxes that
// run: who has a tar or the files of a checkpoint hands them in.
//
// A snapshot is one manifest blob, and its id is the snapshot's. The manifest
// names all blobs it needs in one table, so marking is cheap. Content is shared
// by being the same blob; there is no chain of parents to follow and none to
// break: any snapshot can be deleted at any time.
package snapshot

import (
	"github.com/cove-sandbox/cove/cas"
)

// Kind says what a snapshot's content is.
type Kind string

const (
	KindFilesystem Kind = "filesystem" // a tree: the tar of changes
	KindMemory     Kind = "memory"     // the files of a kernel checkpoint
)

// Manifest describes a snapshot that was stored.
type Manifest struct {
	ID     cas.ID // of the manifest blob
	Kind   Kind
	Size   int64 // of the content
	Stored int64 // bytes this call added to the store, the manifest's included
	Files  int   // entries of the tree, or files of the checkpoint
}

// Limits of a manifest. They are far above what a sandbox makes (a node_modules
// is 50,000 files) and keep a forged one from taking the memory of the host.
const (
	maxManifest = 256 << 20 // bytes of the manifest blob
	maxEntries  = 2 << 20
	maxBlobs    = 4 << 20
	maxPath     = 4096 // PATH_MAX
	maxName     = 255
	maxRecords  = 1 << 20 // PAX records of one entry, as in archive/tar
	maxFile     = 1 << 44 // 16 TiB: ext4's limit for a file
	maxTotal    = 1 << 46
)
