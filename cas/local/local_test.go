package local

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/cove-sandbox/cove/cas"
	"github.com/cove-sandbox/cove/cas/castest"
	"github.com/cove-sandbox/cove/internal/seal"
	"github.com/cove-sandbox/cove/sandbox"
)

func open(t testing.TB, dir string, opts Options) *Store {
	t.Helper()
	s, err := Open(dir, opts)
	if err != nil {
		t.Fatalf("open: %v", err)
	}
	t.Cleanup(func() { s.Close() })
	return s
}

var testKey = [32]byte{1, 2, 3}

func TestContract(t *testing.T) {
	for name, opts := range map[string]Options{
		"plain":  {},
		"sealed": {Keys: seal.NewKeyring(testKey)},
	} {
		t.Run(name, func(t *testing.T) {
			castest.Run(t, func(t *testing.T) cas.Store { return open(t, t.TempDir(), opts) })
		})
	}
}

func put(t testing.TB, s *Store, content []byte, opts ...cas.PutOption) cas.Info {
	t.Helper()
	info, err := s.Put(context.Background(), bytes.NewReader(content), opts...)
	if err != nil {
		t.Fatalf("put: %v", err)
	}
	return info
}

func read(s *Store, id cas.ID) ([]byte, error) {
	r, err := s.Open(context.Background(), id)
	if err != nil {
		return nil, err
	}
	defer r.Close()
	return io.ReadAll(r)
}

// files is every regular file under dir but the lock, with its content.
func files(t testing.TB, dir string) map[string][]byte {
	t.Helper()
	all := map[string][]byte{}
	err := filepath.WalkDir(dir, func(path string, d fs.DirEntry, err error) error {
		if err != nil || d.IsDir() || d.Name() == "lock" {
			return err
		}
		all[path], err = os.ReadFile(path)
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	return all
}

func TestSealedBlobsHoldNoPlaintext(t *testing.T) {
	secret := []byte("the launch code is 0000-marmalade")
	content := bytes.Repeat(append(secret, castest.Content(1, 1000)...), 700) // several frames
	for _, sealed := range []bool{false, true} {
		dir := t.TempDir()
		opts := Options{}
		if sealed {
			opts.Keys = seal.NewKeyring(testKey)
		}
		s := open(t, dir, opts)
		put(t, s, content, cas.Uncompressed)
		put(t, s, secret)
		b, err := s.Begin()
		if err != nil {
			t.Fatal(err)
		}
		defer b.Abort()
		if _, err := b.Put(t.Context(), bytes.NewReader(append(content, 'x')), cas.Uncompressed); err != nil {
			t.Fatal(err)
		}
		found := 0 // also in what is not committed yet
		for _, raw := range files(t, dir) {
			if bytes.Contains(raw, secret[:16]) || bytes.Contains(raw, testKey[:]) {
				found++
			}
		}
		if want := map[bool]int{false: 3, true: 0}[sealed]; found != want {
			t.Errorf("sealed %v: the secret is in %d files, want %d", sealed, found, want)
		}
		// The same content twice, under the same key, has nothing in common.
		if sealed {
			other := open(t, t.TempDir(), opts)
			info := put(t, other, secret)
			a, _ := os.ReadFile(s.path(info.ID))
			b, _ := os.ReadFile(other.path(info.ID))
			if len(a) != len(b) || bytes.Equal(a[64+4:64+4+len(secret)], b[64+4:64+4+len(secret)]) {
				t.Error("two blobs are sealed alike")
			}
		}
	}
}

func TestKeysChange(t *testing.T) {
	dir, newKey := t.TempDir(), [32]byte{9}
	step := func(keys *seal.Keyring, f func(s *Store)) {
		s := open(t, dir, Options{Keys: keys})
		f(s)
		if err := s.Close(); err != nil {
			t.Fatal(err)
		}
	}
	var plain, first, second cas.Info
	good := func(s *Store, infos ...cas.Info) {
		t.Helper()
		for _, info := range infos {
			if got, err := read(s, info.ID); err != nil || int64(len(got)) != info.Size {
				t.Errorf("%d bytes, %v", len(got), err)
			}
		}
	}
	step(nil, func(s *Store) { plain = put(t, s, []byte("plain")) })
	step(seal.NewKeyring(testKey), func(s *Store) { first = put(t, s, []byte("first")); good(s, plain, first) })
	step(seal.NewKeyring(newKey, testKey), func(s *Store) { second = put(t, s, []byte("second")); good(s, plain, first, second) })
	step(seal.NewKeyring(newKey), func(s *Store) {
		good(s, plain, second)
		_, err := read(s, first.ID)
		keyID, _, _ := seal.NewKeyring(testKey).Active()
		if !errors.Is(err, sandbox.ErrPrecondition) || !strings.Contains(err.Error(), keyID.String()) {
			t.Errorf("a blob without its key: %v", err)
		}
		// It can still be listed and described, or it could never be collected.
		if info, err := s.Stat(t.Context(), first.ID); err != nil || info.Size != first.Size {
			t.Errorf("stat: %+v, %v", info, err)
		}
	})
}

// Whatever changes in a file, no byte that was not stored is given out, and the
// end is ErrCorrupt that names the blob.
func TestDamageIsFound(t *testing.T) {
	content := append(castest.Content(1, 300<<10), bytes.Repeat([]byte("text "), 60<<10)...) // 3 frames, raw and zstd
	for _, keys := range []*seal.Keyring{nil, seal.NewKeyring(testKey)} {
		s := open(t, t.TempDir(), Options{Keys: keys})
		info := put(t, s, content)
		path := s.path(info.ID)
		good, err := os.ReadFile(path)
		if err != nil {
			t.Fatal(err)
		}
		other := put(t, s, append([]byte("x"), content[1:]...))
		otherRaw, _ := os.ReadFile(s.path(other.ID))
		frame := 4 + 256<<10 + 16 // the first one is raw
		type damage struct {
			name string
			raw  []byte
		}
		damages := []damage{
			{"empty", nil}, {"another blob", otherRaw}, {"appended", append(bytes.Clone(good), 0)},
			{"frame dropped", append(bytes.Clone(good[:64]), good[64+frame:]...)},
			{"frame of another blob", append(append(bytes.Clone(good[:64]), otherRaw[64:64+frame]...), good[64+frame:]...)},
			{"frame twice", append(append(bytes.Clone(good[:64+frame]), good[64:64+frame]...), good[64+frame:]...)},
		}
		for at := 0; at < len(good); at++ {
			if at > 200 && at < len(good)-200 && at%49999 != 0 && (at < 64+frame-30 || at > 64+frame+30) {
				continue
			}
			flipped := bytes.Clone(good)
			flipped[at] ^= 0x10
			damages = append(damages, damage{fmt.Sprintf("bit at %d", at), flipped}, damage{fmt.Sprintf("cut at %d", at), good[:at]})
		}
		for _, d := range damages {
			if err := os.WriteFile(path, d.raw, 0o600); err != nil {
				t.Fatal(err)
			}
			got, err := read(s, info.ID)
			if !bytes.HasPrefix(content, got) || len(got) == len(content) {
				t.Fatalf("%s: gave out %d bytes, not of this blob or all of them", d.name, len(got))
			}
			var be *cas.BlobError
			var other = errors.Is(err, sandbox.ErrUnsupported) || errors.Is(err, sandbox.ErrPrecondition) // version, flags, key id
			if !other && (!errors.Is(err, sandbox.ErrCorrupt) || !errors.As(err, &be) || be.ID != info.ID) || err == nil {
				t.Fatalf("%s: %v", d.name, err)
			}
			dst, _ := os.CreateTemp(t.TempDir(), "")
			if err := s.ReadTo(t.Context(), info.ID, dst); err == nil || errors.Is(err, sandbox.ErrInternal) {
				t.Fatalf("%s: ReadTo: %v", d.name, err)
			}
			dst.Close()
			if err := s.List(t.Context(), func(cas.Info) error { return nil }); err != nil {
				t.Fatalf("%s: list: %v", d.name, err)
			}
		}
		// What is seen to be broken is not "there already": storing it again heals.
		if err := os.WriteFile(path, good[:1000], 0o600); err != nil {
			t.Fatal(err)
		}
		if info := put(t, s, content); !info.New {
			t.Error("a truncated blob counts as there")
		}
		if got, err := read(s, info.ID); err != nil || !bytes.Equal(got, content) {
			t.Errorf("after storing it again: %v", err)
		}
	}
}

func TestReadTo(t *testing.T) {
	for _, keys := range []*seal.Keyring{nil, seal.NewKeyring(testKey)} {
		s := open(t, t.TempDir(), Options{Keys: keys})
		for _, n := range []int{0, 1, 256 << 10, 256<<10 + 1, 9 << 20} {
			for _, content := range [][]byte{castest.Content(1, n), make([]byte, n)} {
				info := put(t, s, content)
				dst, err := os.CreateTemp(t.TempDir(), "")
				if err != nil {
					t.Fatal(err)
				}
				err = s.ReadTo(t.Context(), info.ID, dst)
				got, _ := os.ReadFile(dst.Name())
				if err != nil || !bytes.Equal(got, content) {
					t.Errorf("%d bytes: %d, %v", n, len(got), err)
				}
				dst.Close()
			}
		}
		info := put(t, s, castest.Content(2, 9<<20))
		readOnly, err := os.Open(os.DevNull)
		if err != nil {
			t.Fatal(err)
		}
		if err := s.ReadTo(t.Context(), info.ID, readOnly); err == nil || errors.Is(err, sandbox.ErrCorrupt) {
			t.Errorf("a file that cannot be written: %v", err)
		}
		ctx, cancel := context.WithCancel(t.Context())
		cancel()
		if err := s.ReadTo(ctx, info.ID, readOnly); !errors.Is(err, sandbox.ErrCanceled) {
			t.Errorf("canceled: %v", err)
		}
	}
}

func TestUncompressedStore(t *testing.T) {
	s := open(t, t.TempDir(), Options{Uncompressed: true})
	if info := put(t, s, make([]byte, 1<<20)); info.Stored < 1<<20 {
		t.Errorf("1 MiB of zeros takes %d", info.Stored)
	}
}

func TestOneProcessAtATime(t *testing.T) {
	dir := t.TempDir()
	s := open(t, dir, Options{})
	if _, err := Open(dir, Options{}); !errors.Is(err, sandbox.ErrPrecondition) {
		t.Errorf("second open: %v", err)
	}
	if err := s.Close(); err != nil {
		t.Fatal(err)
	}
	open(t, dir, Options{})
	if _, err := s.Put(t.Context(), strings.NewReader("")); !errors.Is(err, sandbox.ErrUnavailable) {
		t.Errorf("put after close: %v", err)
	}
}

func TestOpenRemovesWhatACrashLeft(t *testing.T) {
	dir := t.TempDir()
	s := open(t, dir, Options{})
	b, err := s.Begin()
	if err != nil {
		t.Fatal(err)
	}
	if _, err := b.Put(t.Context(), strings.NewReader("half a batch")); err != nil {
		t.Fatal(err)
	}
	if n := len(files(t, dir)); n != 1 {
		t.Fatalf("%d files", n)
	}
	s.Close() // the batch is forgotten, as by a crash
	s = open(t, dir, Options{})
	if n := len(files(t, dir)); n != 0 {
		t.Errorf("%d files left", n)
	}
	put(t, s, []byte("new"))
}

// A file system that really is full.
func TestFullFileSystem(t *testing.T) {
	dir := t.TempDir()
	if err := syscall.Mount("cove-test", dir, "tmpfs", 0, "size=4m"); err != nil {
		t.Skipf("needs the right to mount: %v", err)
	}
	t.Cleanup(func() {
		if err := syscall.Unmount(dir, syscall.MNT_DETACH); err != nil {
			t.Error(err)
		}
	})
	s := open(t, filepath.Join(dir, "blobs"), Options{})
	free := func() uint64 {
		var st syscall.Statfs_t
		if err := syscall.Statfs(dir, &st); err != nil {
			t.Fatal(err)
		}
		return st.Bfree * uint64(st.Bsize)
	}
	small := castest.Content(1, 1<<20)
	put(t, s, small)
	before := free()
	for _, n := range []int{3500 << 10, 6 << 20} { // below and above what is probed in memory
		_, err := s.Put(t.Context(), bytes.NewReader(castest.Content(2, n)))
		if !errors.Is(err, sandbox.ErrDiskFull) {
			t.Errorf("%d bytes: %v", n, err)
		}
		b, err := s.Begin()
		if err != nil {
			t.Fatal(err)
		}
		for i := range 4 {
			if _, err = b.Put(t.Context(), bytes.NewReader(castest.Content(uint64(i+3), 1<<20))); err != nil {
				break
			}
		}
		if !errors.Is(err, sandbox.ErrDiskFull) {
			t.Errorf("batch: %v", err)
		}
		if err := b.Abort(); err != nil {
			t.Error(err)
		}
	}
	if after := free(); after != before {
		t.Errorf("%d bytes free, %d before", after, before)
	}
	if got, err := read(s, cas.ID(put(t, s, small).ID)); err != nil || !bytes.Equal(got, small) {
		t.Errorf("what was there: %v", err)
	}
	put(t, s, castest.Content(9, 1<<20))
}

func TestSweepMindsABatchOlderThanTheGrace(t *testing.T) {
	s := open(t, t.TempDir(), Options{})
	now := time.Now().Add(-48 * time.Hour)
	s.now = func() time.Time { return now }
	old := put(t, s, []byte("old"))
	b, err := s.Begin()
	if err != nil {
		t.Fatal(err)
	}
	defer b.Abort()
	if _, err := b.Put(t.Context(), strings.NewReader("old")); err != nil {
		t.Fatal(err)
	}
	now = now.Add(24 * time.Hour) // the batch takes a day
	if swept, err := s.Sweep(t.Context(), old.ID, now.Add(-time.Hour)); err != nil || swept {
		t.Errorf("swept %v, %v", swept, err)
	}
	if err := b.Commit(t.Context()); err != nil {
		t.Fatal(err)
	}
	if swept, err := s.Sweep(t.Context(), old.ID, now.Add(-time.Hour)); err != nil || !swept {
		t.Errorf("swept %v, %v", swept, err)
	}
}
