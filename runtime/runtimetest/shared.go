package runtimetest

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"

	"github.com/cove-sandbox/cove/runtime"
	"github.com/cove-sandbox/cove/sandbox"
)

// writer is a process that holds memory of three kinds (private, shared, of a file),
// knows what must be in each 2 KiB of it and who wrote that, and changes and checks
// it when it is told to: by itself, through system calls, in children
// of its own.
const writer = `
import ctypes, mmap, os, random, socket, struct, sys
UNIT, PAGE = 2048, 4096
SIZE = int(sys.argv[1]) << 20
libc = ctypes.CDLL(None, use_errno=True)
os.makedirs("/tmp/w", exist_ok=True)
with open("/tmp/w/file", "wb") as f:
    f.truncate(SIZE // 8)
f = open("/tmp/w/file", "r+b")
kinds = [
    mmap.mmap(-1, SIZE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS),
    mmap.mmap(-1, SIZE // 8, flags=mmap.MAP_SHARED | mmap.MAP_ANONYMOUS),
    mmap.mmap(f.fileno(), SIZE // 8, flags=mmap.MAP_SHARED),
]
must = [[0] * (len(m) // UNIT) for m in kinds]
count = 0

def content(k, i, v):
    return struct.pack("<IHHQ", i, k, 7, v) * (UNIT // 16) if v else bytes(UNIT)

def put(k, i, v, how):
    b = content(k, i, v)
    if how:
        r, w = os.pipe()
        os.write(w, b)
        with memoryview(kinds[k]) as m:
            assert os.readv(r, [m[i * UNIT:(i + 1) * UNIT]]) == UNIT
        os.close(r); os.close(w)
    else:
        kinds[k][i * UNIT:(i + 1) * UNIT] = b
    must[k][i] = v

def check(k, i, how):
    if how:
        r, w = os.pipe()
        with memoryview(kinds[k]) as m:
            assert os.write(w, m[i * UNIT:(i + 1) * UNIT]) == UNIT
        b = os.read(r, UNIT)
        os.close(r); os.close(w)
    else:
        b = kinds[k][i * UNIT:(i + 1) * UNIT]
    if b != content(k, i, must[k][i]):
        raise Exception(f"kind {k} unit {i} of {must[k][i]:#x} has {b[:16].hex()} .. {b[-16:].hex()}")

def check_all():
    for k in range(3):
        for i in range(len(must[k])):
            check(k, i, False)

def protect(k, i, prot):
    a = ctypes.addressof(ctypes.c_char.from_buffer(kinds[k], i * UNIT // PAGE * PAGE))
    if libc.mprotect(ctypes.c_void_p(a), ctypes.c_size_t(4 * PAGE), prot):
        raise OSError(ctypes.get_errno(), "mprotect")

def step(rnd, who):
    global count
    count += 1
    k = rnd.choice((0, 0, 0, 1, 2))
    i = rnd.randrange(len(must[k]) - 8)
    op = rnd.randrange(100)
    v = who << 32 | count
    if op < 45:
        check(k, i, False)  # it is mapped, and what is written is seen there
        put(k, i, v, op < 15)
        check(k, i, False)
    elif op < 85:
        check(k, i, op < 60)
    elif op < 90:
        for j in range(8):
            put(k, i + j, v + j, False)
    elif op < 94 and k == 0:
        i = i // 2 * 2
        kinds[0].madvise(mmap.MADV_DONTNEED, i * UNIT, PAGE)
        must[0][i] = must[0][i + 1] = 0
    elif op < 97 and k == 0:
        protect(0, i, 1)
        check(0, i, False)
        protect(0, i, 3)
        put(0, i, v, False)
    elif op >= 99:
        pid = os.fork()
        if pid == 0:
            try:
                for _ in range(40):
                    j = rnd.randrange(len(must[0]))
                    check(0, j, rnd.random() < 0.5)
                    put(0, rnd.randrange(len(must[0])), 0xf0 << 56 | v, rnd.random() < 0.5)
                for j in rnd.sample(range(len(must[0])), 400):
                    check(0, j, False)
            except BaseException as e:
                open("/tmp/w/forked", "w").write(str(e))
                os._exit(1)
            os._exit(0)
        for _ in range(40):
            put(0, rnd.randrange(len(must[0])), v, rnd.random() < 0.5)
            check(0, rnd.randrange(len(must[0])), rnd.random() < 0.5)
        if os.waitpid(pid, 0)[1] != 0:
            raise Exception("in a forked process: " + open("/tmp/w/forked").read())

for k in range(3):
    for i in range(len(must[k])):
        # Zeros in long stretches, and in the last eighth here and there.
        if i % 2048 < 1792 if i < len(must[k]) * 7 // 8 else i % 4 < 2:
            put(k, i, 0xaa << 32 | i + 1, False)
l = socket.socket(); l.bind(("127.0.0.1", 7778)); l.listen()
print("up", flush=True)
while True:
    c, _ = l.accept()
    seed, steps = map(int, c.recv(100).decode().split())
    try:
        rnd = random.Random(seed)
        for _ in range(steps):
            step(rnd, seed)
        check_all()
        c.sendall(b"ok")
    except BaseException as e:
        c.sendall(str(e).encode())
    c.close()
`

// startWriter begins one that holds mb MiB of private memory.
func (s *suite) startWriter(t *testing.T, k runtime.Kernel, mb int) {
	t.Helper()
	started, _ := s.background(t, k, sandbox.ProcessSpec{ExecID: "writer", User: "root", Args: []string{"python3", "-uc", writer, fmt.Sprint(mb)}})
	waitFor(t, "the writer", started)
	s.sh(t, k, `until python3 -c 'import socket; s = socket.create_connection(("127.0.0.1", 7778)); s.sendall(b"0 0"); print(s.recv(1000))' 2>/dev/null; do sleep 0.05; done`)
}

// write has the writers of kernels change and check their memory, all at once.
func (s *suite) write(t *testing.T, seed, steps int, ks ...runtime.Kernel) {
	t.Helper()
	var wg sync.WaitGroup
	for i, k := range ks {
		wg.Go(func() {
			ask := fmt.Sprintf(`import socket; s = socket.create_connection(("127.0.0.1", 7778)); s.sendall(b"%d %d"); print(s.recv(1000).decode())`, seed+i, steps)
			r, err := s.tryExec(deadline(t), k, sandbox.ProcessSpec{Args: []string{"python3", "-c", ask}, User: "root"})
			if err != nil || strings.TrimSpace(r.stdout) != "ok" {
				t.Errorf("seed %d, kernel %d of %d: %q, %v", seed+i, i, len(ks), r.stdout, err)
			}
		})
	}
	wg.Wait()
	if t.Failed() {
		t.FailNow()
	}
}

// Whatever the parent, its children and theirs write, none sees a byte of another:
// their memory is one until it is written. What they were restored from may be
// gone by then.
func (s *suite) testSharedMemory(t *testing.T) {
	d := s.open(t)
	s.need(t, d, "able to checkpoint processes", d.Capabilities().Processes)
	k := s.attached(t, d)
	s.startWriter(t, k, 32)
	s.write(t, 100, 500, k)
	first, cp := s.checkpoint(t, k)
	s.write(t, 200, 500, k)
	a, b := s.restore(t, d, first, cp), s.restore(t, d, first, cp)
	s.write(t, 300, 1500, k, a, b)

	second, cp2 := s.checkpoint(t, a) // of a child that has memory of its own and of its parent
	s.write(t, 400, 500, k, a, b)
	aa, ab := s.restore(t, d, second, cp2), s.restore(t, d, second, cp2)
	if err := b.Reset(deadline(t), s.container(t)); err != nil { // its memory is gone, others' is not
		t.Fatal(err)
	}
	again := s.restore(t, d, first, cp)
	for _, dir := range []string{first, second} {
		ents, err := os.ReadDir(dir)
		if err != nil {
			t.Fatal(err)
		}
		for _, e := range ents {
			if err := os.Remove(filepath.Join(dir, e.Name())); err != nil {
				t.Fatal(err)
			}
		}
	}
	s.write(t, 500, 1500, k, a, aa, ab, again)

	third, cp3 := s.checkpoint(t, ab)
	s.write(t, 600, 500, ab, s.restore(t, d, third, cp3))
}

// checkpointSince makes one that leaves out what an earlier one has, and puts the
// two together, as who keeps them does.
func (s *suite) checkpointSince(t *testing.T, k runtime.Kernel, before string, since *runtime.Pages) (dir string, cp runtime.Checkpoint) {
	t.Helper()
	dir = t.TempDir()
	cp, err := k.(runtime.Checkpointer).Checkpoint(deadline(t), dir, runtime.CheckpointOptions{Follow: true, Since: since})
	if err != nil {
		t.Fatalf("checkpoint: %v", err)
	}
	if cp.Pages == nil {
		t.Skip("this driver writes whole checkpoints only")
	}
	if cp.Pages.Offset == 0 {
		return dir, cp
	}
	earlier, err := os.ReadFile(filepath.Join(before, runtime.PagesFile))
	if err != nil {
		t.Fatal(err)
	}
	own, err := os.ReadFile(filepath.Join(dir, runtime.PagesFile))
	if err != nil {
		t.Fatal(err)
	}
	if int64(len(earlier)) != cp.Pages.Offset || int64(len(earlier)+len(own)) != cp.Pages.Size {
		t.Fatalf("pages %+v, of files of %d and %d bytes", *cp.Pages, len(earlier), len(own))
	}
	if err := os.WriteFile(filepath.Join(dir, runtime.PagesFile), append(earlier, own...), 0o600); err != nil {
		t.Fatal(err)
	}
	return dir, cp
}

// A checkpoint that leaves out what an earlier one has is as good as a whole one: of
// the kernel that made the earlier one, of its children and of theirs.
func (s *suite) testCheckpointSince(t *testing.T) {
	d := s.open(t)
	s.need(t, d, "able to checkpoint processes", d.Capabilities().Processes)
	k := s.attached(t, d)
	s.startWriter(t, k, 64)
	first, cp := s.checkpointSince(t, k, "", nil)
	s.write(t, 100, 100, k)
	s.checkpoint(t, k) // that none follows: it changes nothing for the next
	second, cp2 := s.checkpointSince(t, k, first, cp.Pages)
	if own := cp2.Pages.Size - cp2.Pages.Offset; cp2.Pages.Offset == 0 || own > cp.Pages.Size/2 {
		t.Errorf("after a few writes %d bytes of %d are written again", own, cp.Pages.Size)
	}
	s.write(t, 200, 300, k)
	third, cp3 := s.checkpointSince(t, k, second, cp2.Pages)
	a, b, c := s.restore(t, d, first, cp), s.restore(t, d, second, cp2), s.restore(t, d, third, cp3)
	s.write(t, 300, 500, k, a, b, c)

	of, cpc := s.checkpointSince(t, c, third, cp3.Pages)
	if cpc.Pages.Offset != cp3.Pages.Size {
		t.Errorf("a child's checkpoint has pages %+v, its own is %+v", *cpc.Pages, *cp3.Pages)
	}
	s.write(t, 400, 500, c, s.restore(t, d, of, cpc))
	again, cpa := s.checkpointSince(t, c, of, cpc.Pages)
	s.write(t, 500, 500, c, s.restore(t, d, again, cpa))

	// Of pages that this kernel does not know nothing is left out.
	whole, cpw := s.checkpointSince(t, a, third, cp3.Pages)
	if cpw.Pages.Offset != 0 {
		t.Errorf("a checkpoint follows one that the kernel never had: %+v", *cpw.Pages)
	}
	s.write(t, 600, 500, a, s.restore(t, d, whole, cpw))
}
