// Package castest holds what every implementation of cas.Store must do: the
// sentences of the contract as scenarios, races, and a search for sequences of
// calls in which it differs from a plain model in memory. What a store offers
// beyond the contract (cas.Batcher, cas.Sweeper) is tested where it does.
package castest

import (
	"bytes"
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"
	"testing/iotest"

	"github.com/cove-sandbox/cove/cas"
	"github.com/cove-sandbox/cove/sandbox"
)

// Run runs the suite. open returns an empty store every time, and its own
// cleanup closes it.
func Run(t *testing.T, open func(t *testing.T) cas.Store) {
	for _, c := range slices.Concat(cases, raceCases, batchCases, sweepCases) {
		t.Run(c.name, func(t *testing.T) { c.run(t, open(t)) })
	}
	t.Run("Model", func(t *testing.T) { model(t, open) })
}

type scenario struct {
	name string
	run  func(*testing.T, cas.Store)
}

// Content is deterministic content of n bytes that does not compress.
func Content(seed uint64, n int) []byte {
	var key [32]byte
	key[0], key[1], key[2] = byte(seed), byte(seed>>8), byte(seed>>16)
	b := make([]byte, n)
	rand.NewChaCha8(key).Read(b)
	return b
}

// text compresses well.
func text(n int) []byte {
	return []byte(strings.Repeat("the quick brown fox jumps over the lazy dog\n", n/44+1)[:n])
}

func idOf(content []byte) cas.ID { return cas.IDOf(sha256.Sum256(content)) }

func put(t *testing.T, s interface {
	Put(context.Context, io.Reader, ...cas.PutOption) (cas.Info, error)
}, content []byte, opts ...cas.PutOption) cas.Info {
	t.Helper()
	info, err := s.Put(t.Context(), bytes.NewReader(content), opts...)
	if err != nil {
		t.Fatalf("put of %d bytes: %v", len(content), err)
	}
	if info.ID != idOf(content) || info.Size != int64(len(content)) || info.Stored <= 0 || info.At.IsZero() {
		t.Fatalf("put of %d bytes as %s: %+v", len(content), idOf(content), info)
	}
	return info
}

func read(ctx context.Context, s cas.Store, id cas.ID) ([]byte, error) {
	r, err := s.Open(ctx, id)
	if err != nil {
		return nil, err
	}
	defer r.Close()
	return io.ReadAll(r)
}

func has(t *testing.T, s cas.Store, content []byte) {
	t.Helper()
	got, err := read(t.Context(), s, idOf(content))
	if err != nil || !bytes.Equal(got, content) {
		t.Fatalf("open of %s: %d of %d bytes, %v", idOf(content), len(got), len(content), err)
	}
}

func hasNot(t *testing.T, s cas.Store, id cas.ID) {
	t.Helper()
	if _, err := s.Stat(t.Context(), id); !errors.Is(err, sandbox.ErrNotFound) {
		t.Fatalf("stat of %s: %v, want not found", id, err)
	}
	if _, err := s.Open(t.Context(), id); !errors.Is(err, sandbox.ErrNotFound) {
		t.Fatalf("open of %s: %v, want not found", id, err)
	}
}

func list(t *testing.T, s cas.Store) (infos []cas.Info) {
	t.Helper()
	if err := s.List(t.Context(), func(i cas.Info) error { infos = append(infos, i); return nil }); err != nil {
		t.Fatalf("list: %v", err)
	}
	return infos
}

var errStop = errors.New("stop")

var cases = []scenario{
	{"Comes back in every size", func(t *testing.T, s cas.Store) {
		const frame = 256 << 10
		for _, n := range []int{0, 1, 100, frame - 1, frame, frame + 1, 3*frame + 7, 4<<20 - 1, 4 << 20, 4<<20 + 1, 9<<20 + 5} {
			for _, content := range [][]byte{Content(uint64(n), n), text(n), make([]byte, n)} {
				for _, opts := range [][]cas.PutOption{nil, {cas.Uncompressed}} {
					info := put(t, s, content, opts...)
					has(t, s, content)
					st, err := s.Stat(t.Context(), info.ID)
					if err != nil || st.Size != info.Size || st.Stored != info.Stored {
						t.Fatalf("stat %+v, %v; put said %+v", st, err, info)
					}
					if err := s.Delete(t.Context(), info.ID); err != nil {
						t.Fatal(err)
					}
				}
			}
		}
	}},
	{"Reads in any step", func(t *testing.T, s cas.Store) {
		content := append(text(300<<10), Content(1, 300<<10)...)
		info := put(t, s, content)
		for name, wrap := range map[string]func(io.Reader) io.Reader{"half": iotest.HalfReader, "data with error": iotest.DataErrReader} {
			r, err := s.Open(t.Context(), info.ID)
			if err != nil {
				t.Fatal(err)
			}
			got, err := io.ReadAll(wrap(r))
			if err := r.Close(); err != nil {
				t.Fatal(err)
			}
			if err != nil || !bytes.Equal(got, content) {
				t.Errorf("%s: %d bytes, %v", name, len(got), err)
			}
		}
		if got := put(t, s, content, cas.Uncompressed); got.New {
			t.Error("the same content in another encoding is the same blob")
		}
		if info, err := s.Put(t.Context(), iotest.OneByteReader(bytes.NewReader(content[:1000]))); err != nil || info.ID != idOf(content[:1000]) {
			t.Errorf("put byte by byte: %+v, %v", info, err)
		}
	}},
	{"Compresses what can be", func(t *testing.T, s cas.Store) {
		if info := put(t, s, text(1<<20)); info.Stored > 1<<18 {
			t.Errorf("1 MiB of text takes %d", info.Stored)
		}
		if info := put(t, s, Content(2, 1<<20)); info.Stored > 1<<20+1<<10 {
			t.Errorf("1 MiB of noise takes %d", info.Stored)
		}
	}},
	{"The same again costs nothing", func(t *testing.T, s cas.Store) {
		for _, n := range []int{10, 5 << 20} {
			content := Content(3, n)
			first := put(t, s, content)
			if !first.New {
				t.Error("the first is not new")
			}
			before := list(t, s)
			again := put(t, s, content)
			if again.New || again.Stored != first.Stored || again.At.Before(first.At) {
				t.Errorf("first %+v, again %+v", first, again)
			}
			if after := list(t, s); len(after) != len(before) {
				t.Errorf("%d blobs, then %d", len(before), len(after))
			}
		}
	}},
	{"A reader that fails leaves nothing", func(t *testing.T, s cas.Store) {
		for _, n := range []int{0, 10, 1 << 20, 6 << 20} {
			r := io.MultiReader(bytes.NewReader(Content(4, n)), iotest.ErrReader(errStop))
			if _, err := s.Put(t.Context(), r); !errors.Is(err, errStop) {
				t.Errorf("after %d bytes: %v", n, err)
			}
		}
		if l := list(t, s); len(l) != 0 {
			t.Errorf("left: %v", l)
		}
	}},
	{"A context that ends", func(t *testing.T, s cas.Store) {
		info := put(t, s, Content(5, 2<<20))
		ctx, cancel := context.WithCancel(t.Context())
		r, err := s.Open(ctx, info.ID)
		if err != nil {
			t.Fatal(err)
		}
		defer r.Close()
		if _, err := io.ReadFull(r, make([]byte, 10)); err != nil {
			t.Fatal(err)
		}
		cancel()
		if n, err := io.Copy(io.Discard, r); !errors.Is(err, sandbox.ErrCanceled) {
			t.Errorf("read on for %d bytes: %v", n, err)
		}
		_, err = s.Put(ctx, strings.NewReader("x"))
		calls := map[string]error{"put": err}
		_, calls["open"] = s.Open(ctx, info.ID)
		_, calls["stat"] = s.Stat(ctx, info.ID)
		calls["delete"] = s.Delete(ctx, info.ID)
		calls["list"] = s.List(ctx, func(cas.Info) error { return nil })
		for name, err := range calls {
			if !errors.Is(err, sandbox.ErrCanceled) {
				t.Errorf("%s: %v", name, err)
			}
		}
		has(t, s, Content(5, 2<<20))
		// Half-way through a Put.
		ctx, cancel = context.WithCancel(t.Context())
		r2 := io.MultiReader(bytes.NewReader(Content(6, 5<<20)), readerFunc(func(p []byte) (int, error) { cancel(); return len(p), nil }))
		if _, err := s.Put(ctx, r2); !errors.Is(err, sandbox.ErrCanceled) {
			t.Errorf("put: %v", err)
		}
	}},
	{"Delete", func(t *testing.T, s cas.Store) {
		a, b := Content(7, 600<<10), Content(8, 10)
		info := put(t, s, a)
		put(t, s, b)
		r, err := s.Open(t.Context(), info.ID)
		if err != nil {
			t.Fatal(err)
		}
		defer r.Close()
		for range 2 {
			if err := s.Delete(t.Context(), info.ID); err != nil {
				t.Fatal(err)
			}
			hasNot(t, s, info.ID)
		}
		if got, err := io.ReadAll(r); err != nil || !bytes.Equal(got, a) {
			t.Errorf("a reader from before: %d bytes, %v", len(got), err)
		}
		has(t, s, b)
		put(t, s, a)
		has(t, s, a)
	}},
	{"Not there", func(t *testing.T, s cas.Store) {
		id := idOf([]byte("nobody"))
		hasNot(t, s, id)
		_, err := s.Open(t.Context(), id)
		var be *cas.BlobError
		if !errors.As(err, &be) || be.ID != id {
			t.Errorf("%v does not name the blob", err)
		}
	}},
	{"Names that are none", func(t *testing.T, s cas.Store) {
		for _, id := range []cas.ID{"", "sha256:", "x", "sha256:../../../../etc/passwd", cas.ID("sha256:" + strings.Repeat("A", 64)),
			cas.ID("sha256:" + strings.Repeat("0", 63)), cas.ID("sha512:" + strings.Repeat("0", 64)), cas.ID("sha256:" + strings.Repeat("0", 62) + "/.")} {
			_, err := s.Open(t.Context(), id)
			_, err2 := s.Stat(t.Context(), id)
			for _, err := range []error{err, err2, s.Delete(t.Context(), id)} {
				if !errors.Is(err, sandbox.ErrInvalid) {
					t.Errorf("%q: %v", id, err)
				}
			}
		}
	}},
	{"List in order, until told", func(t *testing.T, s cas.Store) {
		want := map[cas.ID]cas.Info{}
		for i := range 50 {
			info := put(t, s, fmt.Append(nil, i))
			want[info.ID] = info
		}
		got := list(t, s)
		if len(got) != len(want) || !slices.IsSortedFunc(got, func(a, b cas.Info) int { return strings.Compare(string(a.ID), string(b.ID)) }) {
			t.Errorf("%d of %d, in order?", len(got), len(want))
		}
		for _, g := range got {
			if w := want[g.ID]; g.Size != w.Size || g.Stored != w.Stored || g.At.Sub(w.At).Abs() > 1e9 {
				t.Errorf("listed %+v, put %+v", g, w)
			}
		}
		n := 0
		if err := s.List(t.Context(), func(cas.Info) error { n++; return errStop }); err != errStop || n != 1 {
			t.Errorf("%d calls, %v", n, err)
		}
	}},
}

type readerFunc func([]byte) (int, error)

func (f readerFunc) Read(p []byte) (int, error) { return f(p) }
