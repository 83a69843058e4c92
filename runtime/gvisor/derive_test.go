package gvisor

import (
	"bytes"
	"context"
	"crypto/rand"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/cove-sandbox/cove/image"
	"github.com/cove-sandbox/cove/image/imagetest"
	"github.com/cove-sandbox/cove/internal/testbin"
	"github.com/cove-sandbox/cove/runtime"
	"github.com/cove-sandbox/cove/sandbox"
)

// What the overlay of a real kernel writes down, image.Derive understands, and
// another kernel shows: the contract between the two is gVisor's source, which
// may change with its version.
func TestDerivedImageShowsWhatTheSandboxSaw(t *testing.T) {
	lib, base := imagetest.Base(t)
	d, err := Open(t.Context(), Config{Dir: t.TempDir(), RunscPath: testbin.Runsc(t), GuestPath: testbin.Guest(t)})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { d.Close() }) // after its kernels

	first := derivedKernel(t, d, lib, base, "first")
	runIn(t, first, `set -e
mkdir -p /work/deep/dir && echo one > /work/deep/dir/file
ln /work/deep/dir/file /work/hard && ln -s deep/dir/file /work/soft && mkfifo /work/pipe
cp /bin/true /work/su && chown 1000:1001 /work/su && chmod 6755 /work/su
rm /etc/hostname /usr/bin/perl /etc/motd
rm -rf /usr/share/doc && mkdir /usr/share/doc && echo only > /usr/share/doc/only
echo 'more:x:4242:' >> /etc/group && chmod 600 /etc/issue
rm -rf /opt && ln -s /usr/local /opt
mv /etc/profile.d /etc/moved
mkdir /work/.wh.dir && echo x > /work/.wh.file
head -c 3000000 /dev/urandom > /work/random`)
	snapshot := upperTar(t, first)
	derived, err := lib.Derive(t.Context(), base.ID, snapshot, nil)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { lib.Delete(context.Background(), derived.ID) })
	second := derivedKernel(t, d, lib, derived, "second")

	// mtimes without fractions: gVisor's tar rounds them. No directory sizes:
	// they are the file system's own. No link counts: the overlay goes on
	// counting a removed name of a file of the image.
	look := `cd / && find . -xdev \( -path ./proc -o -path ./sys -o -path ./dev -o -path ./tmp -o -path ./run \) -prune -o \
-type d -printf '%p %y %m %U:%G\n' -o -printf '%p %y %m %U:%G %s %l\n' | LC_ALL=C sort
sha256sum /work/random /work/hard /work/su /etc/group /bin/bash
test /work/hard -ef /work/deep/dir/file && echo linked; /work/su && echo runs`
	before, after := runIn(t, first, look), runIn(t, second, look)
	if before != after {
		t.Errorf("the sandbox and what was derived from it differ:\n%s", firstDifferences(before, after))
	}
	for _, want := range []string{"./opt l 777", "./usr/share/doc/only f", "./work/su f 6755 1000:1001", "./etc/moved d", "./work/pipe p", "linked\nruns\n"} {
		if !strings.Contains(after, want) {
			t.Errorf("no %q in the derived image", want)
		}
	}
	if strings.Contains(after, "./usr/bin/perl ") || strings.Contains(after, "./etc/hostname ") || strings.Contains(after, "./etc/profile.d") {
		t.Error("what was removed is there")
	}

	// And once more, from what was derived.
	runIn(t, second, `rm -r /work/hard /etc/moved; echo two > /work/deep/dir/file; rm /work/random`)
	again, err := lib.Derive(t.Context(), derived.ID, upperTar(t, second), nil)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { lib.Delete(context.Background(), again.ID) })
	third := derivedKernel(t, d, lib, again, "third")
	look = strings.ReplaceAll(look, "/work/random /work/hard", "")
	if before, after := runIn(t, second, look), runIn(t, third, look); before != after {
		t.Errorf("the second generation differs:\n%s", firstDifferences(before, after))
	}
	if again.Size >= derived.Size {
		t.Errorf("3 MB less, and %d bytes after %d", again.Size, derived.Size)
	}
}

func derivedKernel(t *testing.T, d *Driver, lib *image.Library, img sandbox.Image, id string) *Kernel {
	t.Helper()
	path, err := lib.Path(img.ID)
	if err != nil {
		t.Fatal(err)
	}
	k, err := d.Boot(t.Context(), id, runtime.Class{})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { k.Destroy(context.Background()) })
	err = k.Attach(t.Context(), runtime.Container{Rootfs: runtime.Rootfs{Path: path, Env: img.Config.Env, User: "root"},
		Resources: sandbox.Resources{MilliCPU: 2000, MemoryLimit: 512 << 20, Disk: 256 << 20, Pids: 100}})
	if err != nil {
		t.Fatal(err)
	}
	return k.(*Kernel)
}

func runIn(t testing.TB, k *Kernel, script string) string {
	t.Helper()
	var out, msg bytes.Buffer
	err := k.Guest().Start(t.Context(), sandbox.ProcessSpec{ExecID: sandbox.NewID(rand.Reader), Command: script}, 0, func(e sandbox.ProcessEvent) error {
		if e.Output != nil && e.Output.Stream == sandbox.Stdout {
			out.Write(e.Output.Data)
		} else if e.Output != nil {
			msg.Write(e.Output.Data)
		}
		return nil
	})
	if err != nil || msg.Len() > 0 {
		t.Fatalf("%v\n%s", err, msg.String())
	}
	return out.String()
}

func upperTar(t *testing.T, k *Kernel) *os.File {
	t.Helper()
	f, err := os.Create(filepath.Join(t.TempDir(), "upper.tar"))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { f.Close() })
	if err := k.sb.TarRootfsUpperLayer(k.mu.container, f); err != nil {
		t.Fatal(err)
	}
	if _, err := f.Seek(0, 0); err != nil {
		t.Fatal(err)
	}
	return f
}

// firstDifferences lists lines of one and not the other.
func firstDifferences(a, b string) string {
	var out strings.Builder
	for _, side := range []struct{ mark, has, lacks string }{{"-", a, b}, {"+", b, a}} {
		lacks := map[string]bool{}
		for line := range strings.Lines(side.lacks) {
			lacks[line] = true
		}
		n := 0
		for line := range strings.Lines(side.has) {
			if !lacks[line] && n < 20 {
				n++
				out.WriteString(side.mark + line)
			}
		}
	}
	return out.String()
}
