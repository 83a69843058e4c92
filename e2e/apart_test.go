package e2e

import (
	"crypto/rand"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/cove-sandbox/cove/e2e/world"
	"github.com/cove-sandbox/cove/sandbox"
)

// pageKeeper has memory of its own, of /dev/shm and of a file of /, each in 8 blocks, and does with
// it what it is told. Every page says by whom it was written and which one it is.
const pageKeeper = `
import mmap, os, sys
PAGE, BLOCKS, size = 4096, 8, int(sys.argv[1])
def private(n): return mmap.mmap(-1, n, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
def file(path, n):
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL); os.truncate(fd, n); m = mmap.mmap(fd, n); os.close(fd); return m
FILES = '/dev/shm/kept', '/root/kept'
regions = [private(size)] + [file(p, size // 8) for p in FILES]
def page(tag, n): return b'%s %8d' % (tag, n) + (tag * (PAGE // len(tag)))[:PAGE - 9 - len(tag)]
def block(m, i): n = len(m) // PAGE // BLOCKS; return range(i * n, i * n + n)
def at(m, n): return m[n * PAGE:(n + 1) * PAGE]
def write(i, tag):
    for m in regions:
        of = block(m, i)
        m[of[0] * PAGE:(of[-1] + 1) * PAGE] = b''.join([page(tag.encode(), n) for n in of])
    return 'written'
def tags():
    out = []
    for m in regions:
        for i in range(BLOCKS):
            of = block(m, i); tag = at(m, of[0]).split(b' ')[0][:40].strip(b'\0') or b'0'
            for n in of:
                if at(m, n) != (bytes(PAGE) if tag == b'0' else page(tag, n)): return 'page %d of region %d begins %r' % (n, regions.index(m), at(m, n)[:64])
            out.append(tag.decode())
    return ' '.join(out)
def free(i):  # what it had there, and its files: new ones come in their places
    m, of = regions[0], block(regions[0], i)
    m.madvise(mmap.MADV_DONTNEED, of[0] * PAGE, len(of) * PAGE)
    for r, p in enumerate(FILES): regions[r + 1].close(); os.unlink(p); regions[r + 1] = file(p, size // 8)
    regions.append(private(size // 4))
    return tags()
while True:
    line = open('/tmp/in').read().strip()
    try: answer = str(eval(line))
    except Exception as e: answer = repr(e)
    open('/tmp/out', 'w').write(answer + '\n')
`

const (
	keptBlocks  = 8
	keptRegions = 3  // at first; each free adds one
	tagLen      = 26 // of a rand.Text
)

// ask has the program that reads /tmp/in do something, and returns what it says in /tmp/out.
func ask(t *testing.T, b *world.Box, line string) string {
	t.Helper()
	return b.Must(t, fmt.Sprintf("echo '%s' > /tmp/in; cat /tmp/out", line))
}

// keeper is a sandbox with a pageKeeper, and what must be in it: the tag of each block of each region.
type keeper struct {
	*world.Box
	name string
	want []string
	own  []string // tags that it wrote or has from where it comes
}

func newKeeper(t *testing.T, w *world.World, name string, size int) *keeper {
	t.Helper()
	spec := world.Small()
	spec.Resources.MemoryLimit = sandbox.GiB
	k := &keeper{Box: w.Create(t, spec), name: name, want: slices.Repeat([]string{"0"}, keptBlocks*keptRegions)}
	k.Write(t, "/tmp/keep.py", []byte(pageKeeper))
	k.Must(t, fmt.Sprintf("mkfifo /tmp/in /tmp/out; nohup python3 /tmp/keep.py %d >/tmp/log 2>&1 &", size))
	for i := range keptBlocks {
		k.write(t, i)
	}
	return k
}

// from is another sandbox that has what k has now.
func (k *keeper) from(name string, b *world.Box) *keeper {
	return &keeper{Box: b, name: name, want: slices.Clone(k.want), own: slices.Clone(k.own)}
}

// write has a block of all regions overwritten by a tag that nobody else knows.
func (k *keeper) write(t *testing.T, block int) {
	t.Helper()
	tag := rand.Text()
	k.own = append(k.own, tag)
	for i := block; i < len(k.want); i += keptBlocks {
		k.want[i] = tag
	}
	if got := ask(t, k.Box, fmt.Sprintf(`write(%d, "%s")`, block, tag)); got != "written" {
		t.Errorf("%s: %s", k.name, got)
	}
}

// free has a block and the files given back and memory taken anew, which must be zeros.
func (k *keeper) free(t *testing.T, block int) {
	t.Helper()
	k.want[block] = "0"
	for i := keptBlocks; i < keptRegions*keptBlocks; i++ {
		k.want[i] = "0"
	}
	k.want = append(k.want, slices.Repeat([]string{"0"}, keptBlocks)...)
	k.has(t, fmt.Sprintf("free(%d)", block))
}

func (k *keeper) has(t *testing.T, line string) {
	t.Helper()
	if got, want := ask(t, k.Box, line), strings.Join(k.want, " "); got != want {
		t.Errorf("%s after %s has\n %s\nnot\n %s", k.name, line, got, want)
	}
}

// separate demands that each has what it must have, and that in its memory and its layers on the host no
// page is what only another wrote.
func separate(t *testing.T, w *world.World, all ...*keeper) {
	t.Helper()
	for _, k := range all {
		k.has(t, "tags()")
	}
	kernels := w.Kernels()
	for _, k := range all {
		heads := pageHeads(t, kernels[w.KernelOf(t, k.ID)])
		if !heads[k.own[len(k.own)-1]] {
			t.Fatalf("%s is not seen to have what it wrote last: this shows nothing", k.name)
		}
		for _, other := range all {
			for _, tag := range other.own {
				if heads[tag] && !slices.Contains(k.own, tag) {
					t.Errorf("what %s wrote is in the memory of %s", other.name, k.name)
				}
			}
		}
	}
}

// pageHeads are the tags that pages begin with in the files that a sentry may write: its memory and
// the layers of its containers.
func pageHeads(t *testing.T, pid int) map[string]bool {
	t.Helper()
	fds, err := filepath.Glob(fmt.Sprintf("/proc/%d/fd/*", pid))
	if err != nil {
		t.Fatal(err)
	}
	heads := map[string]bool{}
	for _, fd := range fds {
		if name, err := os.Readlink(fd); err != nil || !strings.Contains(name, "memfd:") && !strings.HasSuffix(name, ".upper") {
			continue
		}
		f, err := os.Open(fd)
		if err != nil {
			t.Fatal(err)
		}
		if err := eachPage(f, func(page []byte) { heads[string(page[:tagLen])] = true }); err != nil {
			t.Fatal(err)
		}
		f.Close()
	}
	return heads
}

// eachPage goes through what a sparse file has that is no hole.
func eachPage(f *os.File, see func([]byte)) error {
	const page = 4096
	b := make([]byte, 256*page)
	for end := int64(0); ; {
		at, err := unix.Seek(int(f.Fd()), end, unix.SEEK_DATA)
		if errors.Is(err, unix.ENXIO) {
			return nil
		}
		if err == nil {
			end, err = unix.Seek(int(f.Fd()), at, unix.SEEK_HOLE)
		}
		for err == nil && at < end {
			n := 0
			n, err = f.ReadAt(b[:min(int64(len(b)), end-at)], at)
			at += int64(n)
			for i := 0; i+page <= n; i += page {
				see(b[i:])
			}
		}
		if err != nil {
			return err
		}
	}
}

// Pages that sandboxes share are the writer's alone once they are written, and memory that one gives back
// comes to nobody with what was in it: between a parent and its children, between siblings, and for what
// is made of them by snapshots, restores, sleeps and forks.
func TestPagesApart(t *testing.T) {
	w := world.New(t, world.Options{})
	for _, size := range []int{1 << 20, 100 << 20} {
		t.Run(fmt.Sprintf("%d MiB", size>>20), func(t *testing.T) {
			parent := newKeeper(t, w, "the parent", size)
			boxes, err := parent.TryFork(t.Context(), 2, nil)
			if err != nil {
				t.Fatal(err)
			}
			a, b := parent.from("child a", boxes[0]), parent.from("child b", boxes[1])
			// Each overwrites some that only it does, and all overwrite block 3.
			for i, k := range []*keeper{parent, a, b} {
				k.write(t, i)
				k.write(t, 3)
			}
			separate(t, w, parent, a, b)
			a.free(t, 4)
			b.free(t, 1)
			parent.free(t, 2)
			a.write(t, 5)
			b.write(t, 6)
			parent.write(t, 7)
			separate(t, w, parent, a, b)

			// What is kept of one child has nothing of the other, nor what they sleep and wake with.
			snap := a.Snapshot(t, world.Take{Kind: sandbox.MemorySnapshot}).ID
			kept := a.from("a snapshot of child a", a.Box)
			a.Pause(t, true)
			b.Pause(t, true)
			b.write(t, 0)
			a.write(t, 6)
			ofA := kept.from("a child of a snapshot of a child", w.Create(t, world.From(snap)))
			ofA.write(t, 4)
			boxes, err = b.TryFork(t.Context(), 1, nil)
			if err != nil {
				t.Fatal(err)
			}
			ofB := b.from("a child of a child", boxes[0])
			ofB.free(t, 0)
			ofB.write(t, 0)
			b.write(t, 7)
			separate(t, w, parent, a, b, ofA, ofB)

			// Rolled back, a child has what it had, and nothing that it or others wrote since.
			if err := a.TryRestore(t.Context(), snap); err != nil {
				t.Fatal(err)
			}
			a = kept.from("a child that was rolled back", a.Box)
			a.write(t, 2)
			if _, err := parent.TryKill(t.Context()); err != nil {
				t.Fatal(err)
			}
			separate(t, w, a, b, ofA, ofB)
		})
	}
}
