package blob

import (
	"bytes"
	"context"
	"crypto/sha256"
	"errors"
	"io"
	"testing"

	"github.com/cove-sandbox/cove/cas"
	"github.com/cove-sandbox/cove/internal/seal"
	"github.com/cove-sandbox/cove/sandbox"
)

func codec(t testing.TB, keys *seal.Keyring) *Codec {
	t.Helper()
	c, err := NewCodec(keys, 2)
	if err != nil {
		t.Fatal(err)
	}
	return c
}

func encode(t testing.TB, c *Codec, content []byte, compress bool) []byte {
	t.Helper()
	var raw bytes.Buffer
	w, err := c.NewWriter(&raw, compress, nil)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := w.Write(content); err != nil {
		t.Fatal(err)
	}
	info, err := w.Finish()
	if err != nil || info.Stored != int64(raw.Len()) || info.ID != cas.IDOf(sha256.Sum256(content)) {
		t.Fatalf("%+v, %v", info, err)
	}
	return raw.Bytes()
}

// The format is a promise: blobs of version 1 are read for ever. This one was
// written by the first release.
func TestReadsVersion1(t *testing.T) {
	c := codec(t, nil)
	raw := []byte(goldenPlain)
	id := cas.IDOf(sha256.Sum256([]byte("hello")))
	b, err := c.Open(bytes.NewReader(raw), int64(len(raw)), id)
	if err != nil {
		t.Fatal(err)
	}
	if got, err := io.ReadAll(b.NewReader(t.Context())); err != nil || string(got) != "hello" {
		t.Errorf("%q, %v", got, err)
	}
	raw = []byte(goldenSealed)
	c = codec(t, seal.NewKeyring([32]byte{1, 2, 3}))
	if b, err = c.Open(bytes.NewReader(raw), int64(len(raw)), id); err != nil {
		t.Fatal(err)
	}
	if got, err := io.ReadAll(b.NewReader(t.Context())); err != nil || string(got) != "hello" {
		t.Errorf("sealed: %q, %v", got, err)
	}
}

func TestNewerVersionIsNotCalledCorrupt(t *testing.T) {
	c := codec(t, nil)
	raw := encode(t, c, []byte("x"), false)
	raw[8] = 2
	_, err := c.Open(bytes.NewReader(raw), int64(len(raw)), cas.IDOf(sha256.Sum256([]byte("x"))))
	if !errors.Is(err, sandbox.ErrUnsupported) {
		t.Errorf("%v", err)
	}
}

// Whatever the bytes, a reader gives out the content or says corrupt, and takes
// no more memory than a frame or two.
func FuzzOpen(f *testing.F) {
	plain, sealed := codec(f, nil), codec(f, seal.NewKeyring([32]byte{1}))
	content := append(bytes.Repeat([]byte("text"), 100<<10), 1, 2, 3)
	for _, c := range []*Codec{plain, sealed} {
		f.Add(encode(f, c, []byte("hello"), true))
		f.Add(encode(f, c, content, true))
	}
	f.Add(encode(f, plain, nil, false))
	f.Fuzz(func(t *testing.T, raw []byte) {
		for _, want := range [][]byte{[]byte("hello"), content, nil} {
			id := cas.IDOf(sha256.Sum256(want))
			for _, c := range []*Codec{plain, sealed} {
				b, err := c.Open(bytes.NewReader(raw), int64(len(raw)), id)
				if err != nil {
					continue
				}
				got, err := io.ReadAll(b.NewReader(context.Background()))
				if err == nil && !bytes.Equal(got, want) {
					t.Fatalf("%d bytes that were never stored", len(got))
				}
				if err != nil && !errors.Is(err, sandbox.ErrCorrupt) {
					t.Fatalf("%v", err)
				}
			}
		}
	})
}
