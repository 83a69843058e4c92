package blob

import (
	"crypto/rand"
	"crypto/sha256"
	"encoding/binary"
	"hash"
	"io"

	"github.com/cove-sandbox/cove/cas"
)

// Writer writes one blob. It hands every frame to the writer below in one call.
type Writer struct {
	c        *Codec
	w        io.Writer
	frames   *frames
	compress bool
	sum      hash.Hash // nil where the digest is known
	known    [sha256.Size]byte

	plain  []byte // content of the frame that is being filled
	out    []byte
	number uint64
	size   int64
	stored int64
}

// NewWriter writes the header. With known, the digest of the content is taken
// as given and not computed a second time.
func (c *Codec) NewWriter(w io.Writer, compress bool, known *[sha256.Size]byte) (*Writer, error) {
	bw := &Writer{c: c, w: w, compress: compress, out: make([]byte, 0, frameMax)}
	if known != nil {
		bw.known = *known
	} else {
		bw.sum = sha256.New()
	}
	var header [headerSize]byte
	copy(header[:], magic)
	header[8] = version
	// Without a key too: frames of two blobs must not be interchangeable.
	rand.Read(header[24:56])
	id, key, sealed := c.keys.Active()
	if sealed {
		header[9] = flagSealed
		copy(header[16:24], id[:])
	}
	bw.frames = newFrames(header, key)
	return bw, bw.emit(header[:])
}

func (w *Writer) emit(p []byte) error {
	n, err := w.w.Write(p)
	w.stored += int64(n)
	return err
}

// Write takes content. After an error the blob is void.
func (w *Writer) Write(p []byte) (n int, err error) {
	if w.sum != nil {
		w.sum.Write(p)
	}
	for len(p) > 0 {
		chunk := p
		if len(w.plain) == 0 && len(p) >= FrameSize {
			chunk, p = p[:FrameSize], p[FrameSize:] // whole frames are not copied first
			if err := w.frame(chunk); err != nil {
				return n, err
			}
			n += len(chunk)
			continue
		}
		if w.plain == nil {
			w.plain = make([]byte, 0, FrameSize)
		}
		chunk = p[:min(len(p), FrameSize-len(w.plain))]
		w.plain, p = append(w.plain, chunk...), p[len(chunk):]
		if len(w.plain) == FrameSize {
			if err := w.frame(w.plain); err != nil {
				return n, err
			}
			w.plain = w.plain[:0]
		}
		n += len(chunk)
	}
	return n, nil
}

func (w *Writer) frame(content []byte) error {
	buf := w.out[:headSize]
	kind := uint32(kindRaw)
	if w.compress {
		if buf = w.c.enc.EncodeAll(content, buf); len(buf)-headSize < len(content) {
			kind = kindZstd
		}
	}
	if kind == kindRaw {
		buf = append(buf[:headSize], content...)
	}
	putHead(buf, len(buf)-headSize, kind)
	if cap(buf) > cap(w.out) {
		w.out = buf[:0] // zstd may have needed a little more
	}
	w.size += int64(len(content))
	w.number++
	return w.emit(w.frames.seal(buf, w.number-1))
}

// Finish writes the last frame and the end record. It does not sync.
func (w *Writer) Finish() (cas.Info, error) {
	if len(w.plain) > 0 {
		if err := w.frame(w.plain); err != nil {
			return cas.Info{}, err
		}
		w.plain = w.plain[:0]
	}
	if w.sum != nil {
		w.sum.Sum(w.known[:0])
	}
	end := make([]byte, headSize, endSize)
	putHead(end, endPayload, kindEnd)
	end = binary.BigEndian.AppendUint64(end, uint64(w.size))
	end = append(end, w.known[:]...)
	// The end record is authenticated but not secret: its size and digest are
	// needed where no key is at hand, and the digest is the blob's name anyway.
	if err := w.emit(w.frames.sealEnd(end, w.number)); err != nil {
		return cas.Info{}, err
	}
	return cas.Info{ID: cas.IDOf(w.known), Size: w.size, Stored: w.stored}, nil
}

// sealEnd appends the tag of an end record, which stays in clear.
func (f *frames) sealEnd(end []byte, number uint64) []byte {
	tag := f.endTag(end, number)
	return append(end, tag[:]...)
}

func (f *frames) endTag(end []byte, number uint64) [tagSize]byte {
	if f.sealed == nil {
		return f.checksum(end[:headSize], end[headSize:], number, true)
	}
	return [tagSize]byte(f.sealed.Seal(nil, number, true, nil, f.aad(end)))
}
