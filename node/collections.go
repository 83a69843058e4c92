package node

import (
	"context"
	"io"

	"github.com/cove-sandbox/cove/sandbox"
)

// Volumes are the durable directories of a node, by id. Whose they are and what
// they are called is the caller's to know.
type Volumes interface {
	// Create makes an empty volume; sizes are whole mebibytes.
	Create(ctx context.Context, id string, size int64) error
	// CreateFrom makes a volume with the content of a directory snapshot.
	CreateFrom(ctx context.Context, id string, size int64, c sandbox.Content) error
	// Clone makes a volume of the size and content of another.
	Clone(ctx context.Context, from, id string) error
	// Snapshot makes the content of a directory snapshot, which the node holds until
	// Node.Release: when there is a record of it, or will be none.
	Snapshot(ctx context.Context, id string) (sandbox.Content, error)
	// Status describes volumes as they are now; one that is not here is left out.
	Status(ctx context.Context, ids []string) (map[string]sandbox.VolumeContent, error)
	// List describes all, for who compares them with the records.
	List(ctx context.Context) ([]sandbox.VolumeContent, error)
	// Delete is sandbox.ErrPrecondition while a sandbox holds it.
	Delete(ctx context.Context, id string) error
	// Resize returns the size the volume has then.
	Resize(ctx context.Context, id string, size int64) (int64, error)
	ListFiles(ctx context.Context, id, path string, depth int) (files []sandbox.FileInfo, truncated bool, err error)
	ReadFile(ctx context.Context, id, path string) (io.ReadCloser, sandbox.FileInfo, error)
	WriteFile(ctx context.Context, id, path string, r io.Reader, as sandbox.VolumeFile) (sandbox.FileInfo, error)
	// MakeDirectory makes one, with parents those above it too; then one that is there
	// is no error, and stays as it is.
	MakeDirectory(ctx context.Context, id, path string, parents bool, as sandbox.VolumeFile) (sandbox.FileInfo, error)
	// ChangeFile gives what is at a path another owner or mode; a symlink an owner.
	ChangeFile(ctx context.Context, id, path string, to sandbox.VolumeFile) (sandbox.FileInfo, error)
	RemoveFile(ctx context.Context, id, path string, recursive bool) error
}

// Recordings of traffic that a node keeps, by id.
type Recordings interface {
	// Status describes recordings as they are now; one that is not here is left
	// out. Name and Tenant are set of those from when nodes kept them.
	Status(ctx context.Context, ids []string) (map[string]sandbox.Recording, error)
	// List describes all, for who compares them with the records.
	List(ctx context.Context) ([]sandbox.Recording, error)
	// Delete is sandbox.ErrPrecondition while a sandbox records or replays it.
	Delete(ctx context.Context, id string) error
	// Exchanges lists what is on one, after a number, at most so many.
	Exchanges(ctx context.Context, id string, after int64, limit int) ([]sandbox.RecordedExchange, error)
	// Export writes the archive, or with har a HAR 1.2.
	Export(ctx context.Context, id string, har bool, w io.Writer) error
	// Import takes in an archive.
	Import(ctx context.Context, id string, archive io.Reader) (sandbox.Recording, error)
}

// Images make and keep image content; names are the caller's.
type Images interface {
	// Pull fetches a reference as somebody; platform "" is the node's own.
	Pull(ctx context.Context, who sandbox.RegistryAccess, ref, platform, op string) (sandbox.Image, error)
	// Import takes a docker-save or OCI-layout tar, or a plain root file system.
	Import(ctx context.Context, r io.Reader, op string) (sandbox.Image, error)
	// Get says what is known of content, without names; sandbox.ErrImageNotFound.
	Get(ctx context.Context, id string) (sandbox.Image, error)
	// Delete removes content. The caller knows that nothing uses it.
	Delete(ctx context.Context, id string) error
	// Contents lists every content id with its size.
	Contents(ctx context.Context) (map[string]int64, error)

	// Keep puts a tar, packed or not, into the content store as it is: files that
	// a build copies from. Release lets go of it if it will have no record.
	Keep(ctx context.Context, r io.Reader) (sandbox.Content, error)
	// Copy makes the layer of a step that copies. The digest is of all that is in
	// it but times. Release lets go of the layer if it will have no record.
	Copy(ctx context.Context, c sandbox.Copying) (layer sandbox.Content, digest string, err error)
	// Compose makes the image of a base and layers over it.
	Compose(ctx context.Context, c sandbox.Composition, op string) (sandbox.Image, error)
	// Push sends an image to a registry as somebody, and returns its digest there.
	Push(ctx context.Context, who sandbox.RegistryAccess, id, ref, op string) (digest string, err error)
}
