// Package cas is the contract of content-addressed storage: blobs named by the
// SHA-256 of what is in them, durable once stored, compressed, and encrypted
// once a key is configured.
//
// Implementations are in packages of their own (cas/local: a directory) and all
// pass cas/castest. The verbs are few on purpose: an object store must be able
// to offer them too. What only some can do is an optional interface here:
// [Batcher], [Sweeper].
//
// Names are of the plaintext, so equal content is stored once whatever the
// encoding. The price, accepted: who can list the names can tell whether a
// content he already knows is there.
package cas

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"io"
	"strings"
	"time"

	"github.com/cove-sandbox/cove/sandbox"
)

// ID names a blob: "sha256:" and 64 hex digits, of the plaintext.
type ID string

const idPrefix = "sha256:"

// ParseID checks an ID that comes from outside. Upper case is refused: one blob
// has one name, and names become file names.
func ParseID(s string) (ID, error) {
	digits, ok := strings.CutPrefix(s, idPrefix)
	if !ok || len(digits) != 2*sha256.Size || strings.Trim(digits, "0123456789abcdef") != "" {
		return "", sandbox.InvalidField("id", "%.80q is not a blob id: sha256: and 64 hex digits", s)
	}
	return ID(s), nil
}

// IDOf names a content by its digest.
func IDOf(sum [sha256.Size]byte) ID { return ID(idPrefix + hex.EncodeToString(sum[:])) }

// Sum is the digest in a valid ID. It is an error for an ID that ParseID refuses.
func (id ID) Sum() (sum [sha256.Size]byte, err error) {
	if _, err := ParseID(string(id)); err != nil {
		return sum, err
	}
	_, err = hex.Decode(sum[:], []byte(id[len(idPrefix):]))
	return sum, err
}

// Hex is the ID without its prefix.
func (id ID) Hex() string { return strings.TrimPrefix(string(id), idPrefix) }

// Info describes a blob.
type Info struct {
	ID     ID
	Size   int64     // of the plaintext; -1 in a List where it cannot be read
	Stored int64     // bytes the stored form takes
	At     time.Time // last time it was stored, or stored again
	New    bool      // answer of a Put: it was not there before
}

// PutOption changes how a content is stored, never under which name.
type PutOption uint8

const (
	// Uncompressed is for content that must come back fast (memory pages).
	Uncompressed PutOption = iota + 1
)

// Store keeps blobs. All methods may be called concurrently. Errors are
// *sandbox.Error; those about one damaged blob carry a *BlobError.
type Store interface {
	// Put stores what r gives until EOF. Afterwards the blob is there, complete
	// and durable, or (on error) absent, and the space it took is free again.
	// Storing what is there costs no space and renews Info.At.
	// ErrDiskFull when there is no room.
	Put(ctx context.Context, r io.Reader, opts ...PutOption) (Info, error)

	// Open returns the content, verified: a byte that was not stored is never
	// handed out, and what is damaged ends in ErrCorrupt, not in EOF.
	// ErrNotFound; ErrPrecondition when its key is not in the keyring.
	// A reader that is open outlives a Delete.
	Open(ctx context.Context, id ID) (io.ReadCloser, error)

	// Stat does not read the content. ErrNotFound.
	Stat(ctx context.Context, id ID) (Info, error)

	// Delete removes a blob; one that is not there is no error. It does not ask
	// who still refers to the blob: collectors use Sweeper.
	Delete(ctx context.Context, id ID) error

	// List calls f for each blob, in order of ID, until it returns an error,
	// which List returns as it is. A blob that is damaged is listed too: it must
	// be possible to find and remove it. Blobs stored or deleted during the call
	// may be listed or not.
	List(ctx context.Context, f func(Info) error) error
}

// Batcher is a store that can make many blobs durable at once.
type Batcher interface {
	Begin() (Batch, error)
}

// Batch collects Puts. None of its blobs is in the store before Commit, and
// after Commit all of them are, durably. A Commit that fails may leave some:
// whole and verified, but referred to by nothing; a collector removes them.
// Put may be called concurrently. After Commit or Abort, Put and Commit fail
// with ErrPrecondition, and Abort does nothing, so it can be deferred.
type Batch interface {
	Put(ctx context.Context, r io.Reader, opts ...PutOption) (Info, error)
	Commit(ctx context.Context) error
	Abort() error
}

// Sweeper is a store that can delete what nobody has stored lately, in one step
// with the check, so that a Put that found the blob there does not lose it.
type Sweeper interface {
	// Sweep deletes the blob unless it was stored, or stored again, at or after
	// before, or since the oldest batch now open began. It reports whether it
	// deleted.
	Sweep(ctx context.Context, id ID, before time.Time) (bool, error)
}

// BlobError says which blob cannot be given out; errors.As finds it.
type BlobError struct {
	ID     ID
	Reason string
}

func (e *BlobError) Error() string { return "blob " + string(e.ID) + ": " + e.Reason }

// Begin starts a batch where the store has them, and otherwise one whose Puts
// are each durable and visible at once: correct, slower, and what an aborted
// one stored is left to the collector.
func Begin(s Store) (Batch, error) {
	if b, ok := s.(Batcher); ok {
		return b.Begin()
	}
	return &plainBatch{s: s}, nil
}
