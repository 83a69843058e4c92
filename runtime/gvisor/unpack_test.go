package gvisor

import (
	"archive/tar"
	"bytes"
	"context"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/cove-sandbox/cove/image/imagetest"
	"github.com/cove-sandbox/cove/internal/testbin"
	"github.com/cove-sandbox/cove/runtime"
	"github.com/cove-sandbox/cove/sandbox"
)

// packed is a tar of entries; those of files have their name as content.
func packed(t *testing.T, entries ...tar.Header) []byte {
	t.Helper()
	var b bytes.Buffer
	w := tar.NewWriter(&b)
	for _, h := range entries {
		if h.ModTime = time.Unix(1e9, 0); h.Typeflag == tar.TypeReg {
			h.Size = int64(len(h.Name))
		}
		if err := w.WriteHeader(&h); err != nil {
			t.Fatal(err)
		}
		if h.Size > 0 {
			if _, err := w.Write([]byte(h.Name)); err != nil {
				t.Fatal(err)
			}
		}
	}
	if err := w.Close(); err != nil {
		t.Fatal(err)
	}
	return b.Bytes()
}

// TestUnpack: what the sentry unpacks is what the guest would have, and nothing of it
// is anywhere else.
func TestUnpack(t *testing.T) {
	lib, img := imagetest.Base(t)
	d, err := Open(context.Background(), Config{Dir: t.TempDir(), RunscPath: testbin.Runsc(t), GuestPath: testbin.Guest(t)})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { d.Close() })
	k := derivedKernel(t, d, lib, img, "unpack")
	ctx := t.Context()
	unpack := func(to runtime.Unpacking, tar []byte) (runtime.Unpacked, error) {
		to.UID, to.GID = 64002, 64002
		return k.Unpack(ctx, to, tar)
	}
	const file, dir, sym, hard = tar.TypeReg, tar.TypeDir, tar.TypeSymlink, tar.TypeLink
	whole := packed(t,
		tar.Header{Typeflag: dir, Name: "./", Mode: 0o700}, tar.Header{Typeflag: dir, Name: "d/", Mode: 0o750},
		tar.Header{Typeflag: file, Name: "d/f", Mode: 0o640}, tar.Header{Typeflag: file, Name: "run", Mode: 0o777},
		tar.Header{Typeflag: file, Name: "no/parent/f", Mode: 0o600}, tar.Header{Typeflag: sym, Name: "d/l", Linkname: "/etc/passwd"},
		tar.Header{Typeflag: hard, Name: "h", Linkname: "d/f"}, tar.Header{Typeflag: file, Name: "empty", Mode: 0o444})
	look := ` && find . -printf '%p %y %m %U:%G %s %T@ %l\n' | sort && cat run h no/parent/f`
	for _, made := range []string{"", "mkdir -p $D && ", "mkdir -p $D/d/deep && echo x > $D/run && ln -s /etc/passwd $D/empty && "} {
		runIn(t, k, `set -e; for D in /a/x /b/x; do rm -rf $D; `+made+`true; done`)
		if _, err := unpack(runtime.Unpacking{Dir: "/a/x"}, whole); err != nil {
			t.Fatal(err)
		}
		if err := k.Guest().Untar(ctx, "/b/x", whole, sandbox.WriteOptions{User: "64002:64002", Parents: true}); err != nil {
			t.Fatal(err)
		}
		// Directories that the tar has no entry for are of when they were made.
		times := ` && touch -d @1 $(find . -maxdepth 0; find no -type d; find d -name deep)`
		sentry, guest := runIn(t, k, `cd /a/x`+times+look), runIn(t, k, `cd /b/x`+times+look)
		if sentry != guest || !strings.Contains(sentry, "./d/f f 640 64002:64002 3 1000000000") {
			t.Errorf("after %q:\n%s\nby the guest:\n%s", made, sentry, guest)
		}
	}

	t.Run("opened", func(t *testing.T) {
		runIn(t, k, `mkdir -p /shut/in/work /shut/other && chmod 700 /shut /shut/in /shut/work /shut/other 2>/dev/null || true; ln -s /etc /shut/link`)
		_, err := unpack(runtime.Unpacking{Dir: "/", Open: []string{"/shut/in/work", "/shut/link", "/shut/none"}}, packed(t))
		if err != nil {
			t.Fatal(err)
		}
		if got, want := runIn(t, k, `stat -c '%n %a %u' /shut /shut/in /shut/in/work /shut/other /etc`), "/shut 711 0\n/shut/in 711 0\n/shut/in/work 755 64002\n/shut/other 700 0\n/etc 755 0\n"; got != want {
			t.Errorf("got\n%s, want\n%s", got, want)
		}
	})
	t.Run("to be removed", func(t *testing.T) {
		runIn(t, k, `mkdir -p /gone/dir && chmod 700 /gone`)
		u, err := unpack(runtime.Unpacking{Dir: "/gone/new", Remove: []string{"/gone/none", "/gone/dir", "/gone/dir/x/y"}, Open: []string{"/gone/new"}}, whole)
		if err == nil || u.Opened || !slices.Equal(u.There, []string{"/gone/dir"}) {
			t.Errorf("%+v %v", u, err)
		}
		if got := runIn(t, k, `find /gone -printf '%p %m\n' | sort`); got != "/gone 700\n/gone/dir 755\n" {
			t.Errorf("something was done: %s", got)
		}
	})
	for name, h := range map[string]tar.Header{
		"climbs":                {Typeflag: file, Name: "../../out", Mode: 0o644},
		"absolute":              {Typeflag: file, Name: "/out", Mode: 0o644},
		"by a link":             {Typeflag: file, Name: "away/out", Mode: 0o644},
		"a directory by a link": {Typeflag: dir, Name: "away/", Mode: 0o777},
		"a link out":            {Typeflag: hard, Name: "p", Linkname: "../../etc/passwd"},
		"a link by a link":      {Typeflag: hard, Name: "p", Linkname: "away/passwd"},
		"a link to nothing":     {Typeflag: sym, Name: "nothing"},
		"a device":              {Typeflag: tar.TypeChar, Name: "dev", Devmajor: 1, Devminor: 3},
		"a FIFO":                {Typeflag: tar.TypeFifo, Name: "fifo"},
		"over a directory":      {Typeflag: file, Name: "full", Mode: 0o644},
	} {
		t.Run(name, func(t *testing.T) {
			runIn(t, k, `rm -rf /h && mkdir -p /h/x/full/of`)
			before := runIn(t, k, `ls -laR --time-style=full-iso /etc | sha256sum; ls /`)
			u, err := unpack(runtime.Unpacking{Dir: "/h/x"}, packed(t, tar.Header{Typeflag: sym, Name: "away", Linkname: "/etc"}, h))
			if err == nil || !u.Opened {
				t.Errorf("%+v, %v", u, err)
			}
			if after := runIn(t, k, `ls -laR --time-style=full-iso /etc | sha256sum; ls /`); after != before {
				t.Error("something outside has changed")
			}
			if got := runIn(t, k, `cd /h; find . | sort | tr '\n' ' '`); got != ". ./x ./x/away ./x/full ./x/full/of " {
				t.Errorf("got %s", got)
			}
		})
	}
	if u, err := unpack(runtime.Unpacking{Dir: "/cut"}, whole[:1100]); err == nil {
		t.Errorf("half a tar: %+v", u)
	}
	if err := k.Pause(ctx); err != nil {
		t.Fatal(err)
	}
	if _, err := unpack(runtime.Unpacking{Dir: "/paused"}, whole); sandbox.ClassOf(err) != sandbox.Precondition {
		t.Errorf("of one that stands still: %v", err)
	}
	if err := k.Resume(ctx); err != nil {
		t.Fatal(err)
	}
}
