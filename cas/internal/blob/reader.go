package blob

import (
	"context"
	"crypto/sha256"
	"crypto/subtle"
	"encoding/binary"
	"errors"
	"hash"
	"io"

	"github.com/cove-sandbox/cove/cas"
	"github.com/cove-sandbox/cove/internal/seal"
	"github.com/cove-sandbox/cove/sandbox"
)

// Corrupt is the error about a blob that is not what was stored.
func Corrupt(id cas.ID, reason string) error {
	return (&sandbox.Error{Class: sandbox.Corrupt, Err: &cas.BlobError{ID: id, Reason: reason}}).
		WithHint("what refers to this blob cannot be restored from here: delete it, or bring the blob back from a copy")
}

// Blob is a stored blob whose header and end record are checked.
type Blob struct {
	ID   cas.ID
	Size int64

	c      *Codec
	r      io.ReaderAt
	stored int64
	sum    [sha256.Size]byte
	frames *frames
}

// Open checks header and end record of the blob that r holds in stored bytes.
func (c *Codec) Open(r io.ReaderAt, stored int64, id cas.ID) (*Blob, error) {
	b, keyID, err := c.outline(r, stored, id)
	if err != nil {
		return nil, err
	}
	key, ok := c.keys.Key(keyID)
	if b.frames.header[9]&flagSealed != 0 && !ok {
		return nil, (&sandbox.Error{Class: sandbox.Precondition,
			Err: &cas.BlobError{ID: id, Reason: "sealed with key " + keyID.String() + ", which is not in the keyring"}}).
			WithHint("add the key with id %s to the key file, below the active one", keyID)
	}
	b.frames = newFrames(b.frames.header, key)
	end, err := b.readEnd()
	if err != nil {
		return nil, err
	}
	tag := b.frames.endTag(end[:endSize-tagSize], b.count())
	if subtle.ConstantTimeCompare(tag[:], end[endSize-tagSize:]) != 1 {
		return nil, Corrupt(id, "the end record is not authentic")
	}
	return b, nil
}

// Stat is the size of the content by a check of shape alone. It takes no key
// and finds truncation, but not every damage.
func (c *Codec) Stat(r io.ReaderAt, stored int64, id cas.ID) (int64, error) {
	b, _, err := c.outline(r, stored, id)
	if err != nil {
		return 0, err
	}
	return b.Size, nil
}

// outline reads header and end record and checks whatever needs no key.
func (c *Codec) outline(r io.ReaderAt, stored int64, id cas.ID) (*Blob, seal.KeyID, error) {
	b := &Blob{ID: id, c: c, r: r, stored: stored, frames: &frames{}}
	want, err := id.Sum()
	if err != nil {
		return nil, seal.KeyID{}, err
	}
	if stored < Overhead {
		return nil, seal.KeyID{}, Corrupt(id, "truncated")
	}
	h := &b.frames.header
	if err := b.readAt(h[:], 0); err != nil {
		return nil, seal.KeyID{}, err
	}
	switch {
	case string(h[:8]) != magic:
		return nil, seal.KeyID{}, Corrupt(id, "not in the format of a blob")
	case h[8] != version || h[9]&^flagSealed != 0:
		return nil, seal.KeyID{}, sandbox.Errorf(sandbox.Unsupported, "", "blob %s: format version %d, flags %#x", id, h[8], h[9]).
			WithHint("written by a newer cove: use that, or delete it")
	}
	end, err := b.readEnd()
	if err != nil {
		return nil, seal.KeyID{}, err
	}
	if n, kind := parseHead(end[:]); n != endPayload || kind != kindEnd {
		return nil, seal.KeyID{}, Corrupt(id, "no end record: truncated, or something was appended")
	}
	size := binary.BigEndian.Uint64(end[headSize:])
	copy(b.sum[:], end[headSize+8:])
	if b.sum != want {
		return nil, seal.KeyID{}, Corrupt(id, "holds the content of "+string(cas.IDOf(b.sum)))
	}
	// zstd reaches some 1:30000 on zeros; anything above what frames of 1 byte
	// could hold is a lie, found before somebody allocates for it.
	body := uint64(stored - Overhead)
	if size > body/(headSize+1+tagSize)*FrameSize {
		return nil, seal.KeyID{}, Corrupt(id, "claims more content than its frames can hold")
	}
	b.Size = int64(size)
	return b, seal.KeyID(h[16:24]), nil
}

func (b *Blob) readEnd() (end [endSize]byte, err error) {
	return end, b.readAt(end[:], b.stored-endSize)
}

func (b *Blob) readAt(p []byte, off int64) error {
	n, err := b.r.ReadAt(p, off)
	if n == len(p) {
		return nil
	}
	if err == nil || errors.Is(err, io.EOF) {
		return Corrupt(b.ID, "truncated")
	}
	return err
}

// count is the number of frames.
func (b *Blob) count() uint64 { return uint64(b.Size+FrameSize-1) / FrameSize }

// frameLen is the length of the content of a frame.
func (b *Blob) frameLen(number uint64) int {
	return int(min(FrameSize, b.Size-int64(number)*FrameSize))
}

// head is the stored size of the frame at off, checked against what is left.
func (b *Blob) head(number uint64, p []byte, off int64) (size int, err error) {
	n, kind := parseHead(p)
	switch want := b.frameLen(number); {
	case kind != kindRaw && kind != kindZstd,
		kind == kindRaw && n != want,
		kind == kindZstd && n >= want,
		off+int64(headSize+n+tagSize) > b.stored-endSize:
		return 0, Corrupt(b.ID, "a frame has an impossible head")
	}
	return headSize + n + tagSize, nil
}

// decode is the content of a frame read in full; the result is in buf or plain.
func (b *Blob) decode(number uint64, buf, plain []byte) ([]byte, error) {
	_, kind := parseHead(buf)
	payload, ok := b.frames.open(buf, number)
	if !ok {
		return nil, Corrupt(b.ID, "a frame is not authentic")
	}
	if kind == kindRaw {
		return payload, nil
	}
	want := b.frameLen(number)
	content, err := b.c.dec.DecodeAll(payload, plain[:0:want])
	if err != nil || len(content) != want {
		return nil, Corrupt(b.ID, "a frame does not decompress to its size")
	}
	return content, nil
}

// Reader gives out the content in order. Not for concurrent use.
type Reader struct {
	ctx    context.Context
	b      *Blob
	sum    hash.Hash
	off    int64
	number uint64
	buf    []byte // frameMax
	plain  []byte // FrameSize, once a frame is compressed
	left   []byte // verified content not given out yet
	err    error
}

// NewReader reads the content; ctx ends it.
func (b *Blob) NewReader(ctx context.Context) *Reader {
	return &Reader{ctx: ctx, b: b, sum: sha256.New(), off: headerSize}
}

func (r *Reader) Read(p []byte) (int, error) {
	if len(p) == 0 {
		return 0, nil
	}
	if len(r.left) == 0 {
		r.next()
	}
	if len(r.left) == 0 {
		return 0, r.err
	}
	n := copy(p, r.left)
	r.left = r.left[n:]
	return n, nil
}

// WriteTo spares a copy per frame.
func (r *Reader) WriteTo(w io.Writer) (n int64, err error) {
	for {
		if len(r.left) > 0 {
			m, err := w.Write(r.left)
			n += int64(m)
			r.left = r.left[m:]
			if err != nil {
				return n, err
			}
		}
		if r.next(); len(r.left) == 0 {
			if r.err == io.EOF {
				return n, nil
			}
			return n, r.err
		}
	}
}

// next fills left with the next frame, or sets err. The last frame is given out
// only when the digest of everything agrees with the name.
func (r *Reader) next() {
	if r.err != nil {
		return
	}
	if r.err = r.ctx.Err(); r.err != nil {
		return
	}
	count := r.b.count()
	if r.number == count {
		if count == 0 {
			r.err = r.verify()
		}
		if r.err == nil {
			r.err = io.EOF
		}
		return
	}
	content, err := r.readFrame()
	if err != nil {
		r.err = err
		return
	}
	r.sum.Write(content)
	if r.number++; r.number == count {
		if r.err = r.verify(); r.err != nil {
			return
		}
	}
	r.left = content
}

func (r *Reader) verify() error {
	if r.off != r.b.stored-endSize {
		return Corrupt(r.b.ID, "bytes between the last frame and the end record")
	}
	if [sha256.Size]byte(r.sum.Sum(nil)) != r.b.sum {
		return Corrupt(r.b.ID, "the content has another digest")
	}
	return nil
}

func (r *Reader) readFrame() ([]byte, error) {
	if r.buf == nil {
		r.buf = make([]byte, min(int64(frameMax), r.b.stored-headerSize))
	}
	start := r.off
	if err := r.readRaw(); err != nil {
		return nil, err
	}
	if _, kind := parseHead(r.buf); kind == kindZstd && r.plain == nil {
		r.plain = make([]byte, FrameSize)
	}
	return r.b.decode(r.number, r.buf[:r.off-start], r.plain)
}

// readRaw reads the frame at off into buf and moves off behind it.
func (r *Reader) readRaw() error {
	// One read for head and payload: what is too much belongs to the next frame
	// or the end record, and is read again from the page cache.
	want := min(int64(headSize+r.b.frameLen(r.number)+tagSize), r.b.stored-r.off)
	if want < headSize+tagSize {
		return Corrupt(r.b.ID, "truncated")
	}
	if err := r.b.readAt(r.buf[:want], r.off); err != nil {
		return err
	}
	size, err := r.b.head(r.number, r.buf, r.off)
	if err != nil {
		return err
	}
	r.off += int64(size)
	return nil
}
