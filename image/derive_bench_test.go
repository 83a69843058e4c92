package image_test

import (
	"archive/tar"
	"bytes"
	"crypto/sha256"
	"fmt"
	"io"
	"os"
	"testing"
	"time"

	"github.com/cove-sandbox/cove/image"
	"github.com/cove-sandbox/cove/sandbox"
	"golang.org/x/sys/unix"
)

// benchDiff is 20 MB in 300 files, half of them over files of the base.
func benchDiff(b *testing.B) []byte {
	hdrs := []tar.Header{dir("home"), dir("home/user"), dir("home/user/new"), dir("usr"), dir("usr/bin")}
	body := noise(70_000)
	for i := range 300 {
		at := "home/user/new"
		if i%2 == 0 {
			at = "usr/bin"
		}
		hdrs = append(hdrs, reg(fmt.Sprintf("%s/file-%03d", at, i), body))
	}
	return pack(b, hdrs...)
}

// BenchmarkDerive derives from the image file COVE_BENCH_IMAGE (an .erofs of a
// library, say /work/.cache/images/blobs/sha256/….erofs), and for comparison
// does what the other layout could not do without: copy the base whole, hash
// the result, sync. Run both in one go and look at the ratio.
func BenchmarkDerive(b *testing.B) {
	base := os.Getenv("COVE_BENCH_IMAGE")
	if base == "" {
		b.Skip("COVE_BENCH_IMAGE is not set")
	}
	dir := b.TempDir()
	lib, err := image.Open(dir, image.Options{})
	if err != nil {
		b.Fatal(err)
	}
	defer lib.Close()
	id := adopt(b, dir, base)
	diff := benchDiff(b)
	b.Run("derive", func(b *testing.B) {
		var writing time.Duration // what copy-append is to be compared with
		for b.Loop() {
			var began time.Time
			img, err := lib.Derive(b.Context(), id, bytes.NewReader(diff), func(p sandbox.Progress) {
				if p.Step == "erofs" && began.IsZero() {
					began = time.Now()
				}
			})
			if err != nil {
				b.Fatal(err)
			}
			writing += time.Since(began)
			b.StopTimer()
			if err := lib.Delete(b.Context(), img.ID); err != nil {
				b.Fatal(err)
			}
			b.StartTimer()
		}
		b.ReportMetric(writing.Seconds()*1000/float64(b.N), "ms-writing/op")
	})
	b.Run("copy-append", func(b *testing.B) {
		for b.Loop() {
			if err := copyAppend(base, dir+"/copy", diff); err != nil {
				b.Fatal(err)
			}
			b.StopTimer()
			os.Remove(dir + "/copy")
			b.StartTimer()
		}
	})
}

// copyAppend is the least that "the base verbatim, then the changes" costs:
// spooled changes, the copy, the digest of all of it, the sync. The digest runs beside
// the sync, as in the sink.
func copyAppend(base, to string, diff []byte) error {
	src, err := os.Open(base)
	if err != nil {
		return err
	}
	defer src.Close()
	dst, err := os.Create(to)
	if err != nil {
		return err
	}
	defer dst.Close()
	info, err := src.Stat()
	if err != nil {
		return err
	}
	hashed := make(chan error, 1)
	go func() {
		sum := sha256.New()
		_, err := io.CopyBuffer(sum, io.MultiReader(io.NewSectionReader(src, 0, info.Size()), bytes.NewReader(diff)), make([]byte, 1<<20))
		hashed <- err
	}()
	for left := info.Size(); left > 0; {
		n, err := unix.CopyFileRange(int(src.Fd()), nil, int(dst.Fd()), nil, int(left), 0)
		if err != nil {
			return err
		}
		left -= int64(n)
	}
	if _, err := dst.Write(diff); err != nil {
		return err
	}
	if err := dst.Sync(); err != nil {
		return err
	}
	return <-hashed
}

// adopt puts an image of another library into the one in dir.
func adopt(t testing.TB, dir, blob string) (id string) {
	t.Helper()
	name := blob[len(blob)-len(".erofs")-64 : len(blob)-len(".erofs")]
	for _, ext := range []string{".erofs", ".json"} {
		data, err := os.ReadFile(blob[:len(blob)-len(".erofs")] + ext)
		if err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(dir+"/blobs/sha256/"+name+ext, data, 0o400); err != nil {
			t.Fatal(err)
		}
	}
	return "sha256:" + name
}
