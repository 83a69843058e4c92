// Package blob is the stored form of a blob, shared by the stores: a header,
// frames of at most 256 KiB of content, each compressed where that helps and
// each authenticated, and an end record. docs/state-format.md is the promise;
// this is the code.
//
//	header  64  "COVEBLOB" version flags 0*6 key-id[8] salt[32] 0*8
//	frame    4  payload length | kind<<24
//	         n  payload
//	        16  tag
//	end      4  40 | kindEnd<<24
//	        40  size[8] sha256[32] of the content
//	        16  tag
//
// The tag of a frame covers the header, the frame's head, its number and its
// payload, so frames cannot be changed, reordered, dropped, or moved between
// blobs; the end record is the only one with the last flag in its nonce, and a
// blob without one is truncated. It lies at a fixed distance from the end, so
// a reader checks size and name before it gives out the first byte.
package blob

import (
	"crypto/sha256"
	"encoding/binary"
	"hash/crc32"

	"github.com/klauspost/compress/zstd"

	"github.com/cove-sandbox/cove/internal/seal"
	"github.com/cove-sandbox/cove/sandbox"
)

const (
	// FrameSize is the content of each frame but the last. Every frame before
	// the last is full, so the place of a frame in the content is known without
	// decoding those before it, and frames can be decoded in parallel.
	FrameSize = 256 << 10

	magic      = "COVEBLOB"
	version    = 1
	headerSize = 64
	headSize   = 4 // of a frame
	tagSize    = seal.TagSize
	endPayload = 8 + sha256.Size
	endSize    = headSize + endPayload + tagSize
	frameMax   = headSize + FrameSize + tagSize

	// Overhead is what the stored form of an empty content takes.
	Overhead = headerSize + endSize

	flagSealed = 1 << 0 // the frames are AES-256-GCM; else CRC-32C

	kindRaw  = 0
	kindZstd = 1
	kindEnd  = 2
)

// hkdfInfo separates the keys of this format from whatever else a key of the
// keyring may be used for.
const hkdfInfo = "cove blob v1"

// castagnoli is the polynomial with an instruction of its own on amd64 and arm64.
var castagnoli = crc32.MakeTable(crc32.Castagnoli)

// A Codec writes and reads the stored form. It may be used concurrently.
type Codec struct {
	keys *seal.Keyring
	enc  *zstd.Encoder
	dec  *zstd.Decoder
}

// NewCodec makes a codec; keys may be nil. parallel is how many frames may be
// (de)compressed at a time; more wait.
func NewCodec(keys *seal.Keyring, parallel int) (*Codec, error) {
	enc, err := zstd.NewWriter(nil, zstd.WithEncoderLevel(zstd.SpeedFastest), zstd.WithEncoderConcurrency(parallel),
		zstd.WithWindowSize(FrameSize), zstd.WithEncoderCRC(false), zstd.WithLowerEncoderMem(true))
	if err != nil {
		return nil, sandbox.Errorf(sandbox.Internal, "blob.codec", "%w", err)
	}
	// CapLimit: a frame that claims to be larger fails before it is allocated.
	dec, err := zstd.NewReader(nil, zstd.WithDecoderConcurrency(parallel), zstd.WithDecodeAllCapLimit(true),
		zstd.WithDecoderMaxMemory(FrameSize), zstd.WithDecoderLowmem(true))
	if err != nil {
		return nil, sandbox.Errorf(sandbox.Internal, "blob.codec", "%w", err)
	}
	return &Codec{keys: keys, enc: enc, dec: dec}, nil
}

// frames authenticates the frames of one blob.
type frames struct {
	header [headerSize]byte
	sealed *seal.Frames // nil: CRC-32C
}

// newFrames derives the key of one blob. The salt is random per blob, so each
// AES key seals one blob only and a counter is a nonce that never repeats.
func newFrames(header [headerSize]byte, key [seal.KeySize]byte) *frames {
	f := &frames{header: header}
	if header[9]&flagSealed != 0 {
		f.sealed = seal.NewFrames(key, header[24:56], hkdfInfo)
	}
	return f
}

func (f *frames) aad(head []byte) []byte {
	a := make([]byte, 0, headerSize+headSize)
	return append(append(a, f.header[:]...), head...)
}

// seal turns buf = head, payload into head, sealed payload, tag, in place.
// buf needs tagSize of room behind it.
func (f *frames) seal(buf []byte, number uint64) []byte {
	head, payload := buf[:headSize], buf[headSize:]
	if f.sealed != nil {
		return buf[:headSize+len(f.sealed.Seal(payload[:0], number, false, payload, f.aad(head)))]
	}
	tag := f.checksum(head, payload, number, false)
	return append(buf, tag[:]...)
}

// open is the payload of a frame that was read as head, payload, tag, in the
// same memory; false if it is not what was sealed.
func (f *frames) open(buf []byte, number uint64) ([]byte, bool) {
	head, rest := buf[:headSize], buf[headSize:]
	if f.sealed != nil {
		return f.sealed.Open(rest[:0], number, false, rest, f.aad(head))
	}
	payload := rest[:len(rest)-tagSize]
	return payload, f.checksum(head, payload, number, false) == [tagSize]byte(rest[len(payload):])
}

// checksum finds accidents, not forgers: that takes a key. The content's
// SHA-256 is checked on top, against the name.
func (f *frames) checksum(head, payload []byte, number uint64, last bool) (tag [tagSize]byte) {
	n := seal.Nonce(number, last)
	sum := crc32.Update(0, castagnoli, f.header[:])
	sum = crc32.Update(sum, castagnoli, n[:])
	sum = crc32.Update(sum, castagnoli, head)
	sum = crc32.Update(sum, castagnoli, payload)
	binary.BigEndian.PutUint32(tag[:], sum)
	return tag
}

func putHead(head []byte, length int, kind uint32) {
	binary.BigEndian.PutUint32(head, uint32(length)|kind<<24)
}

func parseHead(head []byte) (length int, kind uint32) {
	v := binary.BigEndian.Uint32(head)
	return int(v & 0xffffff), v >> 24
}
