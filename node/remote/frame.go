package remote

import (
	"bufio"
	"bytes"
	"encoding/binary"
	"encoding/json"
	"errors"
	"io"
	"slices"

	"github.com/cove-sandbox/cove/sandbox"
)

// kind of a frame.
type kind byte

const (
	value  kind = 'v' // JSON
	blob   kind = 'b' // bytes that belong to the value before
	data   kind = 'd' // a piece of a byte stream
	end    kind = 'e' // of this direction, in order
	closed kind = 'c' // of both: the caller wants no more of a connection
	fault  kind = 'f' // a sandbox.Error, and the end
)

const (
	headerSize = 5
	// maxValue bounds what is read whole: a file of guest/wire.MaxContent, or the
	// blobs of half a million pieces of snapshots.
	maxValue = 64<<20 + 4096
	// piece is how byte streams are cut.
	piece = 64 << 10
)

// frameWriter is one direction of a call. For one goroutine.
type frameWriter struct {
	w     *bufio.Writer
	flush func() error // of what is below w
}

func newFrameWriter(w io.Writer, flush func() error) *frameWriter {
	return &frameWriter{w: bufio.NewWriterSize(w, piece+headerSize), flush: flush}
}

func (f *frameWriter) frame(k kind, p []byte) error {
	h := [headerSize]byte{byte(k)}
	binary.BigEndian.PutUint32(h[1:], uint32(len(p)))
	if _, err := f.w.Write(h[:]); err != nil {
		return err
	}
	_, err := f.w.Write(p)
	return err
}

// send lets go of what is in the buffer.
func (f *frameWriter) send() error {
	if err := f.w.Flush(); err != nil {
		return err
	}
	return f.flush()
}

// value writes values and what of them is bytes.
func (f *frameWriter) value(vs ...any) error {
	vs = slices.Clone(vs) // a stream may be ranged over twice
	blobs := detach(vs)
	p, err := json.Marshal(vs)
	if err == nil {
		err = f.frame(value, p)
	}
	for _, b := range blobs {
		if err == nil {
			err = f.frame(blob, b)
		}
	}
	return err
}

// over ends the direction.
func (f *frameWriter) over(err error) error {
	if err == nil {
		err = f.frame(end, nil)
	} else {
		p, jerr := json.Marshal(flat(err))
		if jerr != nil {
			return jerr
		}
		err = f.frame(fault, p)
	}
	if err != nil {
		return err
	}
	return f.send()
}

// Write is for a byte stream.
func (f *frameWriter) Write(p []byte) (total int, err error) {
	for len(p) > 0 {
		n := min(len(p), piece)
		if err := f.frame(data, p[:n]); err != nil {
			return total, err
		}
		total, p = total+n, p[n:]
	}
	return total, nil
}

// flat is an error as it crosses: class, reason, op, field, hint, and in words
// what it was made of.
func flat(err error) *sandbox.Error {
	var e *sandbox.Error
	if !errors.As(err, &e) {
		return &sandbox.Error{Class: sandbox.Internal, Msg: err.Error()}
	}
	c := *e
	c.Op, c.Field = "", ""
	c.Msg, c.Err = c.Error(), nil
	c.Op, c.Field = e.Op, e.Field
	return &c
}

// frameReader is the other end of a frameWriter.
type frameReader struct {
	r    *bufio.Reader
	left int   // of the data frame that is being read
	err  error // after the last frame: io.EOF, or why it ended
}

func newFrameReader(r io.Reader) *frameReader { return &frameReader{r: bufio.NewReaderSize(r, piece)} }

// errBroken is a direction that ended without having said so.
var errBroken = &sandbox.Error{Class: sandbox.Unavailable, Op: "node.remote", Msg: "the connection broke off"}

// next is the head of a frame; the end of the direction is an error.
func (f *frameReader) next() (kind, int, error) {
	if f.err != nil {
		return 0, 0, f.err
	}
	var h [headerSize]byte
	if _, err := io.ReadFull(f.r, h[:]); err != nil {
		f.err = broken(err)
		return 0, 0, f.err
	}
	k, n := kind(h[0]), int(binary.BigEndian.Uint32(h[1:]))
	if n > maxValue {
		f.err = sandbox.Errorf(sandbox.TooLarge, "node.remote", "a frame of %d bytes", n)
		return 0, 0, f.err
	}
	switch k {
	case end:
		f.err = io.EOF
	case closed:
		f.err = errClosed
	case fault:
		e := &sandbox.Error{}
		p, err := f.whole(n)
		if err == nil {
			err = json.Unmarshal(p, e)
		}
		if f.err = e; err != nil {
			f.err = broken(err)
		}
	}
	return k, n, f.err
}

// errClosed is an end that leaves nothing open.
var errClosed = errors.New("closed by its caller")

func broken(err error) error {
	c := *errBroken
	if err != io.EOF {
		c.Err = err
	}
	return &c
}

// whole reads the content of a frame. Memory is taken as it comes, not as it is
// announced.
func (f *frameReader) whole(n int) ([]byte, error) {
	var b bytes.Buffer
	b.Grow(min(n, piece))
	if _, err := io.CopyN(&b, f.r, int64(n)); err != nil {
		return nil, broken(err)
	}
	return b.Bytes(), nil
}

// want is the content of the next frame, which is of a kind.
func (f *frameReader) want(k kind) ([]byte, error) {
	got, n, err := f.next()
	if err == nil && got != k {
		err = sandbox.Errorf(sandbox.Internal, "node.remote", "a frame %q where %q belongs", got, k)
	}
	if err != nil {
		return nil, err
	}
	return f.whole(n)
}

// value reads into what ptrs point to; io.EOF at the end of the direction.
func (f *frameReader) value(ptrs ...any) error {
	p, err := f.want(value)
	if err != nil {
		return err
	}
	return f.fill(p, ptrs)
}

func (f *frameReader) fill(p []byte, ptrs []any) error {
	var parts []json.RawMessage
	if err := json.Unmarshal(p, &parts); err != nil {
		return sandbox.Errorf(sandbox.Internal, "node.remote", "%w", err)
	}
	if len(parts) != len(ptrs) {
		return sandbox.Errorf(sandbox.Unsupported, "node.remote", "%d values where %d belong: the two sides are of different versions", len(parts), len(ptrs))
	}
	for i, to := range ptrs {
		if err := attach(parts[i], to, func() ([]byte, error) { return f.want(blob) }); err != nil {
			return err
		}
	}
	return nil
}

// Read is for a byte stream. An error that the other side had is its own.
func (f *frameReader) Read(p []byte) (int, error) {
	for f.left == 0 {
		k, n, err := f.next()
		if err != nil {
			return 0, err
		}
		if k != data {
			f.err = sandbox.Errorf(sandbox.Internal, "node.remote", "a frame %q among bytes", k)
			return 0, f.err
		}
		f.left = n
	}
	n, err := f.r.Read(p[:min(len(p), f.left)])
	f.left -= n
	if err != nil {
		f.err = broken(err)
		err = f.err
	}
	return n, err
}
