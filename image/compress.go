package image

import (
	"bufio"
	"bytes"
	"compress/gzip"
	"errors"
	"io"

	"github.com/cove-sandbox/cove/sandbox"
	"github.com/klauspost/compress/zstd"
)

// maxWindow is the largest zstd window accepted: 128 MiB is what zstd --long=27
// writes and what its own decoder takes without being asked.
const maxWindow = 128 * mib

// decompress recognises gzip, zstd and plain data by their first bytes (media
// types are only claims) and stops a bomb at the ratio limit.
func decompress(r io.Reader, limits Limits) (io.ReadCloser, error) {
	packed := &counter{r: r}
	br := bufio.NewReaderSize(packed, 256<<10)
	magic, err := br.Peek(4)
	if err != nil && err != io.EOF && !errors.Is(err, bufio.ErrBufferFull) {
		return nil, err
	}
	var src io.Reader
	closeSrc := func() error { return nil }
	switch {
	case bytes.HasPrefix(magic, []byte{0x1f, 0x8b}):
		zr, err := gzip.NewReader(br)
		if err != nil {
			return nil, unpackError(err)
		}
		src = zr
	case isZstd(magic):
		zr, err := zstd.NewReader(br, zstd.WithDecoderConcurrency(1), zstd.WithDecoderMaxWindow(maxWindow), zstd.WithDecoderLowmem(true))
		if err != nil {
			return nil, unpackError(err)
		}
		src, closeSrc = zr, func() error { zr.Close(); return nil }
	default:
		return io.NopCloser(br), nil
	}
	return &unpacker{src: src, close: closeSrc, packed: packed, ratio: limits.Ratio}, nil
}

// isZstd knows the frame magic and the skippable frames that may come first
// (zstd:chunked and estargz-like layers).
func isZstd(magic []byte) bool {
	return bytes.Equal(magic, []byte{0x28, 0xb5, 0x2f, 0xfd}) ||
		len(magic) == 4 && magic[0]&0xf0 == 0x50 && bytes.Equal(magic[1:], []byte{0x2a, 0x4d, 0x18})
}

type counter struct {
	r io.Reader
	n int64
	// err is what the source itself failed with: a dropped connection or a
	// cancelled context is not a bad archive.
	err error
}

func (c *counter) Read(b []byte) (int, error) {
	n, err := c.r.Read(b)
	c.n += int64(n)
	if err != nil && err != io.EOF {
		c.err = err
	}
	return n, err
}

type unpacker struct {
	src    io.Reader
	close  func() error
	packed *counter
	ratio  int64
	n      int64
}

func (u *unpacker) Read(b []byte) (int, error) {
	n, err := u.src.Read(b)
	u.n += int64(n)
	if u.n > ratioFloor && u.n/max(u.packed.n, 1) > u.ratio {
		return 0, tooLarge("a layer of %d bytes unpacks to more than %d times its size", u.packed.n, u.ratio)
	}
	switch {
	case err == nil || err == io.EOF:
		return n, err
	case u.packed.err != nil:
		return n, u.packed.err
	}
	return n, unpackError(err)
}

func (u *unpacker) Close() error { return u.close() }

func unpackError(err error) error {
	var se *sandbox.Error
	if errors.As(err, &se) {
		return err
	}
	return invalid("compressed data cannot be unpacked: %w", err)
}
