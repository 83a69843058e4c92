package e2e

import (
	"crypto/sha256"
	"encoding/binary"
	"encoding/hex"
	"errors"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/cove-sandbox/cove/e2e/world"
	"github.com/cove-sandbox/cove/sandbox"
)

var bombs = []scenario{
	{"fork bomb", forkBomb},
	{"fork bomb whose first process has left", orphanForkBomb},
	{"thread bomb", threadBomb},
	{"memory bomb", memoryBomb},
	{"memory bomb in a child", memoryBombChild},
	{"memory bomb in shared memory", shmBomb},
	{"disk filler", diskFiller},
	{"inode filler", inodeFiller},
	{"pipe bomb", pipeBomb},
	{"memory bomb beside sparse memory", sparseBystander},
	{"more disk than memory", moreDiskThanMemory},
}

// fewPids has memory for all the processes it may have: the limit to be met is
// that on their number.
func fewPids() sandbox.Spec {
	spec := world.Small()
	spec.Resources.MemoryLimit, spec.Resources.Pids = 4*sandbox.GiB, 200
	return spec
}

func forkBomb(t *testing.T, w *world.World) {
	b := w.Create(t, fewPids())
	r := b.Python(t, `
import os
while True:
    try: os.fork()
    except OSError: pass
`, 4*time.Second)
	r.WantCause(t, sandbox.Deadline)
	// The deadline took the whole tree, so there is room again.
	world.Eventually(t, time.Minute, "the bomb's processes are gone", func() bool {
		_, tasks := b.Tasks(t)
		return len(tasks) < 10
	})
	if got := b.Must(t, "echo alive"); got != "alive" {
		t.Errorf("after the bomb an exec answered %q", got)
	}
}

// The bash one-liner: its main process ends at once, so no deadline ever
// comes. The sandbox may be useless, but it can be reset.
func orphanForkBomb(t *testing.T, w *world.World) {
	b := w.Create(t, fewPids())
	r := b.Exec(t, sandbox.ProcessSpec{Command: ":(){ :|:& };:", User: "root", Timeout: 20 * time.Second})
	r.WantCause(t, sandbox.Exited, sandbox.Deadline, sandbox.Signalled)
	world.Eventually(t, time.Minute, "the bomb has gone off", func() bool {
		_, tasks := b.Tasks(t)
		return len(tasks) > 30
	})
	b.WantRunning(t)
	if sb := b.Reset(t); sb.Episode != 2 {
		t.Errorf("episode %d after one reset", sb.Episode)
	}
	// The shell counts by itself: another process may or may not be there yet.
	if got := b.Must(t, "set -- /proc/[0-9]*; echo alive $#"); got != "alive 2" {
		t.Errorf("after the reset an exec answered %q, want no processes but init and its own", got)
	}
	// They were killed before; the kernel inside may take a moment to bury them.
	world.Eventually(t, time.Minute, "the bomb's processes are gone", func() bool {
		_, tasks := b.Tasks(t)
		return len(tasks) < 5
	})
}

func threadBomb(t *testing.T, w *world.World) {
	b := w.Create(t, fewPids())
	r := b.Python(t, `
import threading, time
threading.stack_size(64*1024)
n = 0
try:
    while True:
        threading.Thread(target=time.sleep, args=(1000,), daemon=True).start()
        n += 1
except RuntimeError as e:
    print(n, flush=True)
import os; os._exit(0)
`, 30*time.Second)
	r.WantExit(t, 0)
	var n int
	if _, err := fmt.Sscan(string(r.Out), &n); err != nil || n > 210 {
		t.Errorf("%d threads with a limit of 200 (%v)", n, err)
	}
}

// wantOOM demands that the exec ended over the sandbox's memory, and that the
// sandbox goes on.
func wantOOM(t *testing.T, b *world.Box, r world.Result, err error) {
	t.Helper()
	if err != nil {
		t.Fatalf("the exec failed with %v, want an end by oom", err)
	}
	r.WantCause(t, sandbox.OOM)
	b.WantRunning(t)
	b.Must(t, "true")
}

func memoryBomb(t *testing.T, w *world.World) {
	spec := world.Small()
	spec.Resources.MemoryLimit = 128 * sandbox.MiB
	b := w.Create(t, spec)
	r, err := b.TryExec(t.Context(), sandbox.ProcessSpec{User: "root", Args: []string{"python3", "-c", memoryHoard}})
	wantOOM(t, b, r, err)
}

const memoryHoard = `
hoard = []
while True: hoard.append(bytearray(b'x' * (1 << 20)))
`

func memoryBombChild(t *testing.T, w *world.World) {
	spec := world.Small()
	spec.Resources.Memory, spec.Resources.MemoryLimit = 64*sandbox.MiB, 128*sandbox.MiB
	b := w.Create(t, spec)
	// What ends is the child: its parent is told, and goes on.
	if got := b.Must(t, `python3 -c '
hoard = []
while True: hoard.append(bytearray(b"x" * (1 << 20)))
' & wait $!; echo it ended with $?`); got != "it ended with 137" {
		t.Errorf("the parent saw %q", got)
	}
	b.WantRunning(t)
}

// /dev/shm is memory too, and no process's own: it must not be a way around.
func shmBomb(t *testing.T, w *world.World) {
	spec := world.Small()
	spec.Resources.MemoryLimit = 128 * sandbox.MiB
	b := w.Create(t, spec)
	r, err := b.TryExec(t.Context(), sandbox.ProcessSpec{User: "root", Timeout: time.Minute,
		Command: "head -c 2G /dev/zero > /dev/shm/hoard"})
	if err != nil || r.End.Cause != sandbox.Exited || r.End.ExitCode == 0 || !strings.Contains(string(r.Err), "No space left") {
		t.Errorf("it ended with %v, %v, %s", err, r.End, r.Err)
	}
	b.Must(t, "rm /dev/shm/hoard")
}

func diskFiller(t *testing.T, w *world.World) {
	const disk = 256 * sandbox.MiB
	spec := world.Small()
	spec.Resources.Disk = disk
	before := w.DiskUsed()
	b := w.Create(t, spec)
	r := b.Root(t, "head -c 2G /dev/zero | tr '\\0' x > /fill")
	r.WantExit(t, 1)
	if !strings.Contains(string(r.Err), "No space left on device") {
		t.Errorf("the filler was told %q", r.Err)
	}
	if used := b.Stats(t).DiskUsed; used < disk/2 || used > disk+16*sandbox.MiB {
		t.Errorf("%d bytes of disk are used with a limit of %d", used, disk)
	}
	// It is full, not broken: calls are answered, and say why they fail.
	_, _, err := b.Read(t.Context(), "/etc/hostname")
	if err != nil {
		t.Errorf("reading a file on a full disk: %v", err)
	}
	big := strings.NewReader(strings.Repeat("x", 1<<20))
	err = w.Client().Upload(t.Context(), b.ID, "/more", big, 1<<20, sandbox.WriteOptions{User: "root"})
	if !errors.Is(err, sandbox.ErrDiskFull) {
		t.Errorf("writing a file on a full disk gave %v, want %s", err, sandbox.DiskFull)
	}
	if got := b.Must(t, "rm /fill && echo x > /again && cat /again"); got != "x" {
		t.Errorf("after making room: %q", got)
	}
	b.Must(t, "head -c 200M /dev/zero | tr '\\0' x > /fill")
	if _, err := b.TryKill(t.Context()); err != nil {
		t.Fatal(err)
	}
	world.Eventually(t, 30*time.Second, "the host has its space back", func() bool {
		return w.DiskUsed() < before+32*sandbox.MiB
	})
}

// What the kernel knows of a file is its own memory, and no process's: files end
// where there is none for them, processes go on, and who removes some has room again.
func inodeFiller(t *testing.T, w *world.World) {
	spec := world.Small()
	spec.Resources.MemoryLimit = 128 * sandbox.MiB
	b := w.Create(t, spec)
	fill := func(dir string) {
		t.Helper()
		r := b.Exec(t, sandbox.ProcessSpec{User: "root", Timeout: 5 * time.Minute, Args: []string{"python3", "-c", `
import os, sys
try:
    for d in range(10000):
        os.makedirs('` + dir + `/%d' % d)
        for i in range(1000):
            os.close(os.open('` + dir + `/%d/%d' % (d, i), os.O_CREAT | os.O_WRONLY))
except OSError as e:
    sys.exit(str(e))
`}})
		r.WantExit(t, 1)
		if !strings.Contains(string(r.Err), "No space left") {
			t.Errorf("the filler ended with %q", r.Err)
		}
	}
	fill("/fill")
	if got := b.Must(t, "python3 -c 'print(\"alive\")'"); got != "alive" {
		t.Errorf("beside all the files an exec answered %q", got)
	}
	if r := b.Root(t, "rm -rf /fill/1 /fill/2 && mkdir /more && cd /more && for i in $(seq 1000); do : >$i || exit; done"); r.End.ExitCode != 0 {
		t.Errorf("a thousand files where two thousand were: %v, %s", r.End, r.Err)
	}
	b.Reset(t)
	fill("/again") // as many as before: nothing of theirs is left
	b.WantRunning(t)
}

// A pipe's buffer is the kernel's memory. It is its process that ends, and no
// larger one that has nothing to do with it.
func pipeBomb(t *testing.T, w *world.World) {
	besideABystander(t, w, "hoard = bytearray(b'x' * (30 << 20))", `
import fcntl, os
hoard, blob = [], b'x' * 65536
while True:
    r, w = os.pipe()
    hoard.append((r, w))
    fcntl.fcntl(w, fcntl.F_SETPIPE_SZ, 1 << 20)
    os.set_blocking(w, False)
    try:
        while True: os.write(w, blob)
    except BlockingIOError: pass
`)
}

// A byte in each of many huge pages is not much memory, though gVisor counts the
// pages as resident.
func sparseBystander(t *testing.T, w *world.World) {
	besideABystander(t, w, `
import mmap
hoard = mmap.mmap(-1, 2 << 30, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
for i in range(0, 2 << 30, 2 << 20): hoard[i] = 1
`, memoryHoard)
}

// besideABystander runs a bomb beside a process that must live on.
func besideABystander(t *testing.T, w *world.World, bystander, bomb string) {
	spec := world.Small()
	spec.Resources.MemoryLimit = 256 * sandbox.MiB
	b := w.Create(t, spec)
	b.Must(t, fmt.Sprintf("nohup python3 -c '%s\nopen(\"/tmp/up\", \"w\")\nimport time; time.sleep(1000)' >/dev/null 2>&1 & echo $! >/tmp/pid",
		strings.ReplaceAll(bystander, "'", `'\''`)))
	b.Must(t, "for i in $(seq 600); do [ -e /tmp/up ] && exit; sleep 0.1; done; exit 1")
	r, err := b.TryExec(t.Context(), sandbox.ProcessSpec{Args: []string{"python3", "-c", bomb}, Timeout: 2 * time.Minute})
	wantOOM(t, b, r, err)
	b.Must(t, "kill -0 $(cat /tmp/pid)")
}

// A sandbox with 512 MiB of memory writes 3 GiB to / and reads them back.
func moreDiskThanMemory(t *testing.T, w *world.World) {
	const chunks, chunk = 256, 4 << 20
	spec := world.Small()
	spec.Resources.Memory, spec.Resources.MemoryLimit, spec.Resources.Disk = 192*sandbox.MiB, 192*sandbox.MiB, 2*sandbox.GiB
	b := w.Create(t, spec)
	r := b.Python(t, fmt.Sprintf(`
import hashlib, os
body = bytes(range(256)) * (%[2]d // 256)
with open('/big', 'wb', buffering=0) as f:
    for i in range(%[1]d):
        f.write(i.to_bytes(8, 'little') + body[8:])
    os.fsync(f.fileno())
h = hashlib.sha256()
with open('/big', 'rb', buffering=0) as f:
    while True:
        c = f.read(%[2]d)
        if not c: break
        h.update(c)
print(os.stat('/big').st_size, h.hexdigest())
`, chunks, chunk), 5*time.Minute)
	r.WantExit(t, 0)
	body := make([]byte, chunk)
	for i := range body {
		body[i] = byte(i)
	}
	h := sha256.New()
	for i := range uint64(chunks) {
		binary.LittleEndian.PutUint64(body, i)
		h.Write(body)
	}
	want := fmt.Sprintf("%d %s\n", int64(chunks)*chunk, hex.EncodeToString(h.Sum(nil)))
	if string(r.Out) != want {
		t.Errorf("read back %q, want %q", r.Out, want)
	}
	st := b.Stats(t)
	if st.DiskUsed < sandbox.GiB || st.Memory > 192*sandbox.MiB {
		t.Errorf("stats after it: %+v", st)
	}
}
