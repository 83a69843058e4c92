package e2e

import (
	"crypto/rand"
	"encoding/hex"
	"errors"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/cove-sandbox/cove/e2e/world"
	"github.com/cove-sandbox/cove/sandbox"
)

// plant puts a secret, which it is told on stdin, everywhere in its kernel that bytes are kept:
// in memory that is held, that is freed and that only a dead process had, in files
// of every kind, names, queues and buffers nobody reads. It says where it could not.
const plant = `
import array, ctypes, fcntl, mmap, os, pty, socket, subprocess, sys, time
secret = bytes.fromhex(sys.stdin.readline().strip()); text = secret.decode()
libc = ctypes.CDLL(None, use_errno=True)
libc.shmat.restype = ctypes.c_void_p; libc.mmap.restype = ctypes.c_void_p
held, missing = [], []
def place(name):
    def run(f):
        try: held.append(f())
        except (OSError, AttributeError) as e: missing.append('%s: %s' % (name, e))
    return run
def check(r):
    if r in (-1, None): raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return r
def full(m): m[:] = (secret + b'.' * (64 - len(secret))) * (len(m) // 64); return m
def write(path, n=1 << 20):
    with open(path, 'wb') as f: f.write((secret + b'\n') * (n // len(secret)))
    return path

@place('private memory')
def _(): return full(mmap.mmap(-1, 24 << 20, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS))
@place('shared memory')
def _(): return full(mmap.mmap(-1, 8 << 20))
@place('freed memory')
def _():
    for flags in (mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, mmap.MAP_SHARED | mmap.MAP_ANONYMOUS):
        m = full(mmap.mmap(-1, 24 << 20, flags=flags)); m.close()
    m = full(mmap.mmap(-1, 8 << 20, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)); m.madvise(mmap.MADV_DONTNEED); return m
@place('memory of a process that is dead')
def _():
    if not os.fork(): full(mmap.mmap(-1, 16 << 20, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)); os._exit(0)
    os.wait()
@place('files')
def _():
    os.makedirs('/root/' + text, exist_ok=True)
    for d in ('/root/' + text, '/tmp', '/dev/shm', '/var/tmp', '/home', '/srv'): write(d + '/planted')
    os.symlink(text, '/root/link'); os.setxattr('/root/' + text + '/planted', 'user.x', secret)
@place('deleted files')
def _():
    out = []
    for d in ('/root', '/dev/shm'):
        f = open(write(d + '/gone', 8 << 20), 'rb'); os.unlink(f.name); out.append(f)
        os.unlink(write(d + '/gone', 8 << 20))
    return out
@place('mounted tmpfs')
def _(): check(libc.mount(b'x', b'/mnt', b'tmpfs', 0, None)); return write('/mnt/planted', 4 << 20)
@place('memfd')
def _(): f = os.memfd_create(text); os.write(f, secret * 1000); return f
@place('System V memory')
def _():
    i = check(libc.shmget(0x5151, 4 << 20, 0o1666)); a = libc.shmat(i, None, 0); ctypes.memmove(a, secret * 1000, len(secret) * 1000)
@place('message queue')
def _():
    q = check(libc.msgget(0x5151, 0o1666)); b = (8).to_bytes(8, 'little') + secret; check(libc.msgsnd(q, b, len(secret), 0))
@place('POSIX queue')
def _(): return check(ctypes.CDLL('librt.so.1', use_errno=True).mq_open(b'/' + secret, 0o102, 0o666, None))
@place('key')
def _(): return check(libc.syscall(248, b'user', secret, secret, len(secret), -3))
@place('keyring')
def _(): return check(libc.syscall(250, 1, secret))
@place('pipes')
def _(): r, w = os.pipe(); os.write(w, secret * 1000); return r, w
@place('FIFO')
def _(): os.mkfifo('/tmp/fifo'); f = os.open('/tmp/fifo', os.O_RDWR); os.write(f, secret * 1000); return f
@place('sockets')
def _():
    a, b = socket.socketpair(); a.sendall(secret * 1000)
    n = socket.socket(socket.AF_UNIX); n.bind(b'\0' + secret); n.listen()
    p = socket.socket(socket.AF_UNIX); p.bind('/tmp/' + text); p.listen()
    l = socket.socket(); l.bind(('127.0.0.1', 0)); l.listen(); c = socket.create_connection(l.getsockname()); c.sendall(secret * 10000)
    u = socket.socket(type=socket.SOCK_DGRAM); u.bind(('127.0.0.1', 0)); v = socket.socket(type=socket.SOCK_DGRAM); v.sendto(secret, u.getsockname())
    d, e = socket.socketpair(); m = os.memfd_create('y'); os.write(m, secret * 100)
    d.sendmsg([secret], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array('i', [m]))]); os.close(m)
    return a, b, n, p, l, c, u, v, d, e
@place('terminal')
def _(): m, s = pty.openpty(); os.write(m, secret); os.write(s, secret); return m, s
@place('names')
def _():
    check(libc.prctl(15, secret[:15], 0, 0, 0)); check(libc.sethostname(secret, len(secret))); check(libc.setdomainname(secret, len(secret)))
@place('a process')
def _(): return subprocess.Popen(['sleep', '10000'], executable='/usr/bin/sleep', env={'SECRET': text, text: text}), subprocess.Popen(['python3', '-c', 'import time; time.sleep(10000)', text])
@place('output')
def _(): print(text * 1000, file=sys.stderr, flush=True)
print('missing', missing, flush=True)
time.sleep(100000)
`

// lookFor prints where secrets are seen, which it is told on stdin, inverted: what it reads to
// find them must not be what it finds. Memory that is new must be zeros, whoever's it was.
const lookFor = `
import ctypes, mmap, os, re, socket, subprocess, sys
masks = [bytes.fromhex(x) for x in sys.stdin.readline().split()]
libc = ctypes.CDLL(None, use_errno=True); libc.shmat.restype = ctypes.c_void_p
upside = bytes(255 - x for x in range(256))
me, found = str(os.getpid()), []
def holds(b):
    # Compared upside down, so that the secret is never in what this process was told.
    b = b.translate(upside)
    return any(m in b for m in masks)
def see(where, b):
    if holds(b): found.append(where)
def zeros(where, m):
    for i in range(0, len(m), 1 << 20):
        part = m[i:i + (1 << 20)]
        if part.count(0) != len(part): found.append('%s is not zero at %#x' % (where, i)); see(where + ', and the secret', part); return
def readable(path, limit=1 << 30):
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW)
        try:
            out = b''
            while len(out) < limit:
                b = os.read(fd, 1 << 20)
                if not b: break
                out += b
            return out
        finally: os.close(fd)
    except OSError: return b''

for flags in (mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, mmap.MAP_SHARED | mmap.MAP_ANONYMOUS):
    zeros('fresh memory', mmap.mmap(-1, 96 << 20, flags=flags)[:])
libc.sbrk.restype = ctypes.c_void_p
at = libc.sbrk(32 << 20); zeros('the heap', ctypes.string_at(at + (1 << 16), (32 << 20) - (1 << 16)))
for name, path in (('a new file', '/root/.new'), ('a new file of tmpfs', '/dev/shm/.new')):
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC)
    os.truncate(fd, 48 << 20)
    for i in range(0, 48 << 20, 1 << 20): os.pwrite(fd, b'\0', i + 777)
    zeros(name, os.pread(fd, 48 << 20, 0)); m = mmap.mmap(fd, 48 << 20); zeros(name + ', mapped', m[:]); m.close()
    try: os.posix_fallocate(fd, 48 << 20, 8 << 20); zeros(name + ', allocated', os.pread(fd, 8 << 20, 48 << 20))
    except OSError: pass
    os.close(fd); os.unlink(path)
fd = os.memfd_create('new'); os.truncate(fd, 16 << 20); zeros('a memfd', mmap.mmap(fd, 16 << 20)[:])
i = libc.shmget(0, 8 << 20, 0o1600); zeros('System V memory', ctypes.string_at(libc.shmat(i, None, 0), 8 << 20)); libc.shmctl(i, 0, None)

for top, dirs, files in os.walk('/'):
    if top == '/': dirs[:] = [d for d in dirs if d not in ('proc', 'sys', 'usr', 'lib', 'lib64', 'bin', 'sbin', '.cove')]
    for n in dirs + files:
        p = os.path.join(top, n); see('name ' + top, os.fsencode(n))
        if os.path.islink(p): see('link ' + top, os.fsencode(os.readlink(p)))
        elif os.path.isfile(p): see('file ' + top, readable(p))
        try:
            for x in os.listxattr(p, follow_symlinks=False): see('attribute ' + top, os.getxattr(p, x, follow_symlinks=False))
        except OSError: pass
for pid in [p for p in os.listdir('/proc') if p.isdigit()] + ['.']:
    for d in ('', 'task/' + pid + '/', 'net/'):
        for f in ('environ', 'cmdline', 'comm', 'status', 'stat', 'maps', 'smaps', 'mountinfo', 'mounts', 'cgroup', 'unix', 'tcp', 'udp', 'sysvipc/shm', 'sysvipc/msg', 'keys', 'key-users', 'kmsg', 'locks', 'sys/kernel/hostname', 'sys/kernel/domainname'):
            see('/proc/*/' + d + f, readable('/proc/%s/%s%s' % (pid, d, f), 4 << 20))
    try:
        for f in os.listdir('/proc/%s/fd' % pid): see('descriptors', os.fsencode(os.readlink('/proc/%s/fd/%s' % (pid, f))))
    except OSError: pass
    if pid in (me, '.'): continue
    try: mem = os.open('/proc/%s/mem' % pid, os.O_RDONLY)
    except OSError: continue
    for line in readable('/proc/%s/maps' % pid).decode(errors='replace').split('\n'):
        m = re.match('([0-9a-f]+)-([0-9a-f]+) r', line)
        if not m or '[v' in line: continue
        a, z = (int(x, 16) for x in m.groups())
        while a < z:
            n = min(z - a, 16 << 20)
            try: see('memory of ' + readable('/proc/%s/comm' % pid).decode().strip(), os.pread(mem, n, a))
            except (OSError, OverflowError): pass
            a += n
    os.close(mem)
see('host name', ' '.join(os.uname()).encode()); see('domain name', readable('/proc/sys/kernel/domainname'))
for name, r in (('System V memory', libc.shmget(0x5151, 0, 0)), ('a message queue', libc.msgget(0x5151, 0))):
    if r != -1: found.append(name)
b = ctypes.create_string_buffer(1 << 16)
for ring in (-1, -2, -3, -4, -5):
    n = libc.syscall(250, 11, ring, b, len(b))
    if n > 0: see('keyring', b.raw[:n])
    n = libc.syscall(250, 6, ring, b, len(b))
    if n > 0: see('keyring', b.raw[:n])
for tool in ('dmesg', 'ipcs -a'):
    try: see(tool, subprocess.run(tool.split(), capture_output=True).stdout)
    except OSError: pass
print(sorted(set(found)))
`

// secretOf plants a new secret in a sandbox, and returns it.
func secretOf(t *testing.T, b *world.Box) string {
	t.Helper()
	raw := make([]byte, 20)
	_, _ = rand.Read(raw) // never fails
	secret := hex.EncodeToString(raw)
	b.Write(t, "/tmp/plant.py", []byte(plant))
	r := b.Root(t, `echo `+hex.EncodeToString([]byte(secret))+` > /tmp/in; setsid python3 /tmp/plant.py < /tmp/in > /tmp/out 2>/tmp/err & rm -f /tmp/plant.log; until grep -s missing /tmp/out; do kill -0 $! || { cat /tmp/err; exit 1; }; sleep 0.05; done`)
	r.WantExit(t, 0)
	t.Logf("%s: %s", b.ID, r.Out)
	return secret
}

// whereSeen is where a sandbox sees one of secrets.
func whereSeen(t *testing.T, b *world.Box, secrets ...string) string {
	t.Helper()
	var masks []string
	for _, s := range secrets {
		mask := []byte(s)
		for i := range mask {
			mask[i] ^= 255
		}
		masks = append(masks, hex.EncodeToString(mask))
	}
	r := b.Exec(t, sandbox.ProcessSpec{User: "root", Timeout: 2 * time.Minute, Command: "echo " + strings.Join(masks, " ") + " | python3 -c \"$LOOK\"", Env: map[string]string{"LOOK": lookFor}})
	r.WantExit(t, 0)
	return strings.TrimSpace(string(r.Out))
}

// No byte of a sandbox shows in one that shares its checkpoint's memory, nor in the
// next that has its kernel.
func TestNoByteOfAnother(t *testing.T) {
	w := world.New(t, world.Options{})
	spec := world.Small()
	spec.Resources.Memory, spec.Resources.MemoryLimit = 128*sandbox.MiB, sandbox.GiB
	spec.Network.Mode = sandbox.NetworkNone
	clean := func(t *testing.T, what string, b *world.Box, secrets ...string) {
		t.Helper()
		if got := whereSeen(t, b, secrets...); got != "[]" {
			t.Errorf("%s sees %s", what, got)
		}
	}

	t.Run("child", func(t *testing.T) {
		parent := w.Create(t, spec)
		parent.Must(t, "echo before > /tmp/before")
		snap := parent.Snapshot(t, world.Take{Kind: sandbox.MemorySnapshot})
		from := spec
		from.Snapshot = snap.ID
		a, b := w.Create(t, from), w.Create(t, from)
		ofA, ofParent := secretOf(t, a), secretOf(t, parent)
		if got := whereSeen(t, a, ofA); !strings.Contains(got, "memory of python3") || !strings.Contains(got, "file /root") {
			t.Fatalf("what is planted is not seen where it is (%s): the test shows nothing", got)
		}
		clean(t, "a sibling, of the other and of their parent after the checkpoint,", b, ofA, ofParent)
		kids, err := b.TryFork(t.Context(), 1, nil) // when the pages of all are in the host's cache
		if err != nil {
			t.Fatal(err)
		}
		clean(t, "a grandchild, of its parent's sibling,", kids[0], ofA)

		// Nor is it in what is kept of another, which holds all memory of a kernel.
		own := "own-" + rand.Text()
		b.Must(t, "echo "+own+" > /dev/shm/own")
		b.Snapshot(t, world.Take{Kind: sandbox.MemorySnapshot})
		kept := filepath.Join(w.Dir, "checkpoints")
		if len(holders(t, kept, own)) == 0 {
			t.Error("what a sandbox holds is in no checkpoint: the test shows nothing")
		}
		if found := holders(t, kept, ofA); len(found) > 0 {
			t.Errorf("the secret of a sibling is in the checkpoint of another: %v", found)
		}
	})

	t.Run("reused", func(t *testing.T) {
		spec := spec
		spec.Reuse = "leaks"
		var secrets []string
		var kernel float64
		for use := range 3 {
			b := w.Create(t, spec)
			if at := bootOf(t, b); use == 0 {
				kernel = at
			} else if !sameBoot(at, kernel) {
				t.Fatal("another kernel: the test shows nothing")
			}
			if use > 0 {
				clean(t, "the next use of a kernel", b, secrets...)
			}
			if use < 2 {
				secrets = append(secrets, secretOf(t, b))
			}
			if err := b.Attach(t.Context(), "once", 0, func(sandbox.ProcessEvent) error { return nil }); !errors.Is(err, sandbox.ErrNotFound) {
				t.Errorf("the process of the one before: %v", err)
			}
			b.Exec(t, sandbox.ProcessSpec{ExecID: "once", Command: "true"}).WantExit(t, 0)
			if _, err := b.TryKill(t.Context()); err != nil {
				t.Fatal(err)
			}
		}
	})
}
