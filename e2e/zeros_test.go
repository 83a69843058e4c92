package e2e

import (
	"fmt"
	"strconv"
	"strings"
	"testing"

	"github.com/cove-sandbox/cove/e2e/world"
	"github.com/cove-sandbox/cove/sandbox"
)

// sparse holds a gigabyte of private memory and does with it what it is told
// through /tmp/in; the answer is in /tmp/out. It knows what each byte must be.
const sparse = `
import ctypes, mmap, os, sys, time
GB, MB, PAGE = 1 << 30, 1 << 20, 4096
libc = ctypes.CDLL(None, use_errno=True)
m = mmap.mmap(-1, GB, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
want = {}  # number of a page -> its content; all others are zeros
zeros = bytes(2 * MB)
def addr(): return ctypes.addressof(ctypes.c_char.from_buffer(m))
def put(page, b): m[page * PAGE:page * PAGE + PAGE] = b; want[page] = b
def stamp(page, salt): put(page, (b'%d %d ' % (page, salt) * PAGE)[:PAGE])
def rss(): return int(open('/proc/self/statm').read().split()[1]) * PAGE // MB
def read():
    t = time.monotonic()
    n = sum(m[i] for i in range(0, GB, PAGE))
    return '%d %.0f' % (n, (time.monotonic() - t) * 1000)
def check(size=GB):
    pages = set(want)
    for at in range(0, size, 2 * MB):
        first = at // PAGE
        mine = sorted(p for p in pages if first <= p < first + 512)
        got = m[at:at + 2 * MB]
        if not mine:
            if got != zeros: return 'not zero at %d' % at
            continue
        b = bytearray(zeros)
        for p in mine: b[(p - first) * PAGE:(p - first + 1) * PAGE] = want[p]
        if got != b: return 'not what was written at %d' % at
    return 'right'
def write(salt):  # every seventh page of some, across where huge pages meet
    for p in list(range(3, 9000, 7)) + list(range(100000, 104000, 511)): stamp(p, salt)
    return 'written'
def system():  # calls that read and write it
    r, w = os.pipe()
    n = os.write(w, memoryview(m)[700 * MB:700 * MB + 8192])
    if os.read(r, 9999) != bytes(n): return 'write(2) of zeros'
    os.write(w, b'in the middle'); v = memoryview(m)[701 * MB + 10:701 * MB + 23]; os.readv(r, [v])
    want[701 * MB // PAGE] = bytes(10) + b'in the middle' + bytes(PAGE - 23)
    f = open('/tmp/f', 'wb'); f.write(memoryview(m)[600 * MB:632 * MB]); f.close()
    if open('/tmp/f', 'rb').read() != bytes(32 * MB): return 'a file of zeros'
    os.remove('/tmp/f')
    return check()
def child():  # and parent write each its own
    pid = os.fork()
    if not pid:
        ok = check() == 'right'
        for p in range(50000, 52000, 3): stamp(p, 77)
        os._exit(0 if ok and check() == 'right' else 1)
    stamp(50000, 5); stamp(60000, 5)
    return check() if os.waitpid(pid, 0)[1] == 0 else 'the child saw others'
def advise():
    m.madvise(mmap.MADV_DONTNEED, 0, 4 * MB)
    for p in [p for p in want if p < 1024]: del want[p]
    for p in range(20000, 20010): m[p * PAGE]
    stamp(20004, 1)
    m.madvise(mmap.MADV_DONTNEED, 20003 * PAGE, 3 * PAGE); del want[20004]
    stamp(20005, 2)
    return check()
def protect():
    a = addr()
    if libc.mprotect(ctypes.c_void_p(a + 300 * MB), 4 * MB, 1): return 'mprotect'
    m[300 * MB]
    if libc.mprotect(ctypes.c_void_p(a + 300 * MB), 4 * MB, 3): return 'mprotect back'
    stamp(300 * MB // PAGE + 5, 3)
    return check()
def lock():
    if libc.mlock(ctypes.c_void_p(addr() + 400 * MB), 64 * 1024): return 'mlock'
    stamp(400 * MB // PAGE + 1, 4)
    return check()
def move():
    old = addr(); other = mmap.mmap(-1, 64 * MB, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    to = ctypes.addressof(ctypes.c_char.from_buffer(other))
    libc.mremap.restype = ctypes.c_void_p
    # A piece not at the start of a huge page, to a place that is not either.
    n, src, dst = 5 * MB, 500 * MB + 3 * PAGE, 7 * PAGE
    page = src // PAGE + 17
    m[src]; stamp(page, 6)
    if libc.mremap(ctypes.c_void_p(old + src), n, n, 3, ctypes.c_void_p(to + dst)) != to + dst: return 'mremap'
    got = bytearray(n); got[17 * PAGE:18 * PAGE] = want.pop(page)
    if other[dst:dst + n] != got: return 'moved wrongly'
    other[dst + 40 * PAGE] = 9; got[40 * PAGE] = 9
    if other[dst:dst + n] != got: return 'written wrongly after the move'
    libc.mmap.restype = ctypes.c_void_p
    if libc.mmap(ctypes.c_void_p(old + src), ctypes.c_size_t(n), 3, 0x32, -1, ctypes.c_long(0)) != old + src: return 'mmap'
    return check()
def populate():
    before = rss(); p = mmap.mmap(-1, 16 * MB, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | 0x8000)
    return 'right' if rss() - before >= 16 and p[:] == bytes(16 * MB) else 'not there: %d' % (rss() - before)
def fill():
    for i in range(0, GB, PAGE): m[i] = 1
    return 'filled'
while True:
    line = open('/tmp/in').read().strip()
    try: answer = str(eval(line))
    except Exception as e: answer = repr(e)
    open('/tmp/out', 'w').write(answer + '\n')
`

// TestMemoryThatIsOnlyRead reads a gigabyte that was never written in a sandbox of
// half a gigabyte. gVisor allocates what is read; see cmd/runsc/edits, table_zero.go.
func TestMemoryThatIsOnlyRead(t *testing.T) {
	w := world.New(t, world.Options{})
	spec := world.Small()
	spec.Resources.Memory, spec.Resources.MemoryLimit = 512*sandbox.MiB, 512*sandbox.MiB
	b := w.Create(t, spec)
	b.Write(t, "/tmp/sparse.py", []byte(sparse))
	b.Must(t, "mkfifo /tmp/in /tmp/out; nohup python3 /tmp/sparse.py >/tmp/log 2>&1 & echo $! > /tmp/pid")
	right := func(b *world.Box, line string) {
		t.Helper()
		if got := ask(t, b, line); got != "right" {
			t.Fatalf("%s: %s", line, got)
		}
	}
	rss := func() int {
		n, err := strconv.Atoi(ask(t, b, "rss()"))
		if err != nil {
			t.Fatal(err)
		}
		return n
	}
	rss0, before := rss(), b.Stats(t).Memory
	sum, ms, _ := strings.Cut(ask(t, b, "read()"), " ")
	if sum != "0" {
		t.Fatalf("a gigabyte of zeros sums up to %s", sum)
	}
	if used := b.Stats(t).Memory - before; used > 64*sandbox.MiB {
		t.Errorf("reading a gigabyte took %d MiB", used>>20)
	} else {
		t.Logf("reading a gigabyte took %d MiB and %s ms", used>>20, ms)
	}
	if grown := rss() - rss0; grown > 64 {
		t.Errorf("the process has %d MiB more", grown)
	}

	if got := ask(t, b, "write(1)"); got != "written" {
		t.Fatal(got)
	}
	for _, line := range []string{"check()", "system()", "child()", "advise()", "protect()", "lock()", "move()", "populate()"} {
		right(b, line)
	}
	// The same after a snapshot, in a child of a fork, and after a sleep: zeros
	// that were mapped, and pages written before and after.
	snap := b.Snapshot(t, world.Take{Kind: sandbox.MemorySnapshot})
	ask(t, b, "stamp(70001, 8)")
	right(b, "check()")
	children, err := b.TryFork(t.Context(), 2, nil)
	if err != nil {
		t.Fatal(err)
	}
	for i, c := range children {
		right(c, "check()")
		ask(t, c, fmt.Sprintf("stamp(80000, %d)", i))
		right(c, "check()")
		if _, err := c.TryKill(t.Context()); err != nil {
			t.Error(err)
		}
	}
	b.Pause(t, true)
	right(b, "check()")
	ask(t, b, "stamp(70003, 9)")
	right(b, "check()")
	if err := b.TryRestore(t.Context(), snap.ID); err != nil {
		t.Fatal(err)
	}
	right(b, "check()")
	if got := ask(t, b, "m[70001 * PAGE], m[80000 * PAGE]"); got != "(0, 0)" {
		t.Errorf("after the restore there is %s of later", got)
	}

	// And what is written counts.
	b.Must(t, "echo 'fill()' > /tmp/in; while kill -0 $(cat /tmp/pid) 2>/dev/null; do sleep 0.05; done")
	if n := b.Stats(t).OOMKills; n == 0 {
		t.Error("a gigabyte was written in half a one")
	}
	b.WantRunning(t)
}
