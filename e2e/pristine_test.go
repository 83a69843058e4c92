package e2e

import (
	"math"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/cove-sandbox/cove/e2e/world"
	"github.com/cove-sandbox/cove/sandbox"
)

// fingerprint prints all of its kernel that code inside can see or use up. It is
// the first exec of an episode, so that even its pid is the same.
const fingerprint = `
import ctypes, glob, os, pty, signal, socket
libc = ctypes.CDLL(None, use_errno=True)
def out(k, v): print(k.replace(" ", "-"), repr(v))
def errno(r): return r if r >= 0 else -ctypes.get_errno()
out('pid', os.getpid()); out('uname', os.uname()[2:]); out('own name', os.uname()[1] == os.environ['COVE_SANDBOX_ID'])
out('domain', open('/proc/sys/kernel/domainname').read())
status = {l.split(':')[0]: l.split(':')[1].strip() for l in open('/proc/self/status') if ':' in l}
out('status', {k: status.get(k) for k in ('CapInh', 'CapPrm', 'CapEff', 'CapBnd', 'CapAmb', 'NoNewPrivs', 'Seccomp', 'TracerPid', 'Uid', 'Groups')})
out('maps', [open('/proc/self/' + f).read() for f in ('uid_map', 'gid_map', 'setgroups', 'oom_score_adj', 'cgroup')])
out('limits', open('/proc/self/limits').read())
out('limits of init', open('/proc/1/limits').read())
out('processes', sorted(int(p) for p in os.listdir('/proc') if p.isdigit()))
out('mounts', sorted(l.split()[3:9] for l in open('/proc/self/mountinfo')))
out('dev', sorted(p for p in glob.glob('/dev/**', recursive=True)))
out('root', sorted(os.listdir('/')))
for d, _, files in sorted(os.walk('/proc/sys')):
    for f in sorted(files):
        p = os.path.join(d, f)
        if '/random/' in p or p.endswith('/hostname'): continue
        try: out(p, open(p).read())
        except OSError as e: out(p, e.errno)
for f in ('tcp', 'tcp6', 'udp', 'udp6', 'raw'):
    try: out('net ' + f, sorted(l.split()[1:4] for l in open('/proc/net/' + f).read().split('\n')[1:] if l and l.split()[3] in ('0A', '06', '07')))
    except OSError as e: out('net ' + f, e.errno)
out('net unix', sorted(l.split()[7:] for l in open('/proc/net/unix').read().split('\n')[1:] if l and l.split()[7:]))
out('interfaces', socket.if_nameindex())
for p in (80, 8000, 8001, 8002, 8003):
    s = socket.socket()
    try: s.bind(('0.0.0.0', p)); s.listen(); out('port %d' % p, 'free')
    except OSError as e: out('port %d' % p, e.errno)
    s.close()
s = socket.socket(socket.AF_UNIX)
try: s.bind('\0evil'); out('abstract', 'free')
except OSError as e: out('abstract', e.errno)
out('shm', errno(libc.shmget(0x1234, 0, 0))); out('sem', errno(libc.semget(0x1234, 0, 0))); out('msg', errno(libc.msgget(0x1234, 0)))
rt = ctypes.CDLL('librt.so.1', use_errno=True)
out('mq', errno(rt.mq_open(b'/evil', 0)))
out('keyring', errno(libc.syscall(250, 1, b'evil')))
m, sl = pty.openpty(); out('pty', os.ttyname(sl))
os.makedirs('/look')
for kind in ('cgroup2', 'cgroup', 'devtmpfs', 'mqueue', 'tmpfs', 'sysfs'):
    if libc.mount(b'x', b'/look', kind.encode(), 0, None): out('mount ' + kind, -ctypes.get_errno()); continue
    out('mount ' + kind, [(n, open('/look/' + n).read() if kind == 'cgroup2' and n not in ('cgroup.kill',) and os.access('/look/' + n, os.R_OK) and os.path.isfile('/look/' + n) else '') for n in sorted(os.listdir('/look'))])
    libc.umount2(b'/look', 2)
n, pids = 0, []
try:
    while n < 100:
        p = os.fork()
        if not p: signal.pause()
        pids.append(p); n += 1
except OSError: pass
out('may fork', n)
for p in pids: os.kill(p, 9)
`

// traces are what an episode may try to leave in its kernel: each runs as root and
// ends by itself, what it keeps is kept by processes or by the kernel.
var traces = []struct{ name, program string }{
	{"cgroups, through a user namespace", `
run('''unshare -Urm sh -c "mount -t cgroup2 x /mnt && cd /mnt && mkdir -p a/b/c/d && echo 0 > cgroup.max.descendants; echo 0 > a/cgroup.max.descendants; echo max > pids.max; echo 1 > pids.max; echo +pids > cgroup.subtree_control; echo $$ > a/b/cgroup.procs; echo 1 > ../cgroup.kill; sleep 1000 & sleep 1000 &"''')`},
	{"cgroups, as root", `
run('''mount -t cgroup2 x /mnt && cd /mnt && for i in $(seq 300); do mkdir -p g$i/h; done; echo 0 > cgroup.max.descendants; echo max > pids.max; echo 0 > g1/cgroup.max.descendants; sleep 1000 & echo $! > g1/h/cgroup.procs; mount -t cgroup -o pids x /srv; mount -t cgroup -o none,name=evil x /srv; nsenter -C -t 1 mount -t cgroup2 x /srv; unshare -C mount -t cgroup2 x /srv''')
`},
	{"sysctls", `
run('mount -t proc p /mnt; unshare -Urm sh -c "mount -t proc p /srv; sleep 1000 &" ')
for top in ('/proc/sys', '/mnt/sys'):
    for d, _, files in os.walk(top):
        for f in files:
            for v in ('0', '1', '8', '4096', '1024 2048', '1 2 3'):
                try: os.chmod(os.path.join(d, f), 0o666)
                except OSError: pass
                try: open(os.path.join(d, f), 'w').write(v)
                except OSError: pass
run('umount /proc/sys; mount -o remount,rw /proc/sys; unshare -Urm sh -c "mount -t proc p /mnt; echo 0 > /mnt/sys/net/ipv4/tcp_sack; echo 10 > /mnt/sys/fs/nr_open; echo 1 > /mnt/sys/fs/mount-max"')`},
	{"names of the machine", `
run('hostname evil; domainname evil; nsenter -t 1 -u hostname evil; unshare -u hostname worse; echo evil > /proc/sys/kernel/hostname')
libc.sethostname(b'evil', 4); libc.setdomainname(b'evil', 4)`},
	{"System V and POSIX queues, memory, semaphores", `
libc.shmget(0x1234, 1 << 20, 0o1666); libc.semget(0x1234, 4, 0o1666); libc.msgget(0x1234, 0o1666)
rt.mq_open(b'/evil', 0o102, 0o666, None)
run('nsenter -t 1 -i ipcmk -M 4096; ipcmk -S 3; ipcmk -Q; mount -t mqueue q /mnt && touch /mnt/worse')`},
	{"keyrings", `
for i in range(300): libc.syscall(250, 1, b'evil%d' % i)
libc.syscall(250, 1, b'evil')`},
	{"processes that do not go", `
import signal
code = '''
import os, signal, time
for n in range(1, 65):
    try: signal.signal(n, signal.SIG_IGN)
    except (OSError, ValueError): pass
try: os.setsid()
except OSError: pass
time.sleep(10000)
'''
open('/tmp/stay.py', 'w').write(code)
for cmd in ('unshare -pf', 'unshare -Urpf', 'unshare -pf unshare -pf unshare -pf', 'unshare -pfmuinC', 'unshare -Urpfmuin --mount-proc', 'setsid', ''):
    subprocess.Popen((cmd + ' python3 /tmp/stay.py').split(), start_new_session=True)
stopped = subprocess.Popen(['sleep', '1000']); os.kill(stopped.pid, signal.SIGSTOP)
traced = subprocess.Popen(['sleep', '1000'])
tracer = os.fork()
if not tracer:
    assert libc.ptrace(16, traced.pid, None, None) == 0
    time.sleep(1000)
if not os.fork():  # a vfork whose child never executes
    libc.syscall(56, 0x4000 | 17, 0, 0, 0, 0)
    time.sleep(1000)
time.sleep(1)`},
	{"mounts", `
for d in ('/a', '/b', '/c', '/d'): os.makedirs(d, exist_ok=True)
run('''mount --make-rshared /; mount --bind /a /b; mount -t tmpfs x /a; mount -t overlay o -o lowerdir=/b,upperdir=/c,workdir=/d /usr/share; mount --rbind / /mnt; mount -t tmpfs x /etc; mount -t tmpfs x /dev/shm; mount --bind /dev/null /proc/1/environ
unshare -m sh -c "mount -t tmpfs x /usr; sleep 1000 &"; unshare -Urm --propagation shared sh -c "mount -t tmpfs x /home; sleep 1000 &"
umount -l /sys /dev/pts /dev/shm /.cove /proc/sys; mount -t devtmpfs x /srv && touch /srv/evil; mknod /dev/evil c 1 3; mknod /dev/fuse c 10 229
mount -t tmpfs over /proc; ip link set lo down''')`},
	{"ports", `
run('true')
servers = []
for p in (8000, 8001, 8002):
    s = socket.socket(); s.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1); s.bind(('0.0.0.0', p)); s.listen()
    for i in range(20):
        c = socket.socket(); c.connect(('127.0.0.1', p)); a, _ = s.accept()
        a.close(); c.close()  # the server's side first: its port waits
    servers.append(s)
u = socket.socket(socket.AF_UNIX); u.bind('\0evil'); u.listen()
if not os.fork():
    a = servers[0]; c = socket.socket(); c.connect(('127.0.0.1', 8000)); c.sendall(b'x' * 100000)  # in flight when it dies
    time.sleep(1000)`},
	{"sockets that only unread messages hold", `
import array
def holding(*socks): return [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array('i', [s.fileno() for s in socks]))]
open_ = []
def server(p): s = socket.socket(); s.bind(('0.0.0.0', p)); s.listen(); open_.append(s); return s
def pair(kind=socket.SOCK_STREAM): return socket.socketpair(socket.AF_UNIX, kind)
e = socket.socket(socket.AF_UNIX); e.bind('\0evil'); e.listen()
a, b = pair(); a.sendmsg([b'x'], holding(a, b, server(8000), e))                # itself
c, d = pair(socket.SOCK_DGRAM); f, g = pair(socket.SOCK_SEQPACKET)             # each other
c.sendmsg([b'x'], holding(f, g, server(8001))); f.sendmsg([b'x'], holding(c, d))
h, i = pair(); h.sendmsg([b'x'], holding(h, server(8002))); i.close()          # by the queue of an end that is gone
l = socket.socket(socket.AF_UNIX); l.bind('\0held'); l.listen()                # not accepted
j = socket.socket(socket.AF_UNIX); j.connect('\0held'); j.sendmsg([b'x'], holding(l, server(8003)))
k, n = pair(); k.sendmsg([b'two'], holding(k, n, server(80))); n.recv(1)       # begun to read
big = [os.memfd_create('x') for _ in range(4)]
for m in big: os.write(m, bytes(8 << 20))
o, p = pair(); o.sendmsg([b'x'], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array('i', big + [o.fileno(), p.fileno()]))])
`},
	{"limits of others, filters, timers", `
import resource
for r in range(16):
    try: resource.prlimit(1, r, (1, 1))
    except (OSError, ValueError): pass
open('/proc/1/oom_score_adj', 'w').write('1000')
libc.prctl(38, 1, 0, 0, 0); libc.prctl(4, 0, 0, 0, 0); libc.personality(0x0040000)
os.sched_setaffinity(1, {0})`},
}

// tracesHead is what they have in common.
const tracesHead = `
import ctypes, os, socket, subprocess, time
libc = ctypes.CDLL(None, use_errno=True)
rt = ctypes.CDLL('librt.so.1', use_errno=True)
libc.ptrace.argtypes = [ctypes.c_long, ctypes.c_long, ctypes.c_void_p, ctypes.c_void_p]
def run(line): subprocess.run(line, shell=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, timeout=60)
`

// A reset is pristine against what an episode does to its kernel.
func resetPristine(t *testing.T, w *world.World) {
	spec := world.Small()
	spec.Resources.Memory = sandbox.GiB
	spec.Resources.Pids = 40
	fresh := w.Create(t, spec)
	want := fresh.Python(t, fingerprint, time.Minute)
	want.WantExit(t, 0)
	b := w.Create(t, spec)
	for _, a := range traces {
		t.Run(a.name, func(t *testing.T) {
			r := b.Python(t, tracesHead+a.program+"\nprint('done')", time.Minute)
			if string(r.Out) != "done\n" {
				t.Fatalf("the attack: %q %q %v", r.Out, r.Err, r.End.End)
			}
			b.Reset(t)
			got := b.Python(t, fingerprint, time.Minute)
			got.WantExit(t, 0)
			// The hostname may be the sandbox's own: each has one.
			diffLines(t, strings.ReplaceAll(string(want.Out), fresh.ID, "ID"), strings.ReplaceAll(string(got.Out), b.ID, "ID"))
			b.Reset(t)
		})
	}
}

// bootOf is when the kernel of a sandbox was booted, in Unix seconds.
func bootOf(t *testing.T, b *world.Box) float64 {
	t.Helper()
	r := b.Python(t, "import time; print(time.time() - float(open('/proc/uptime').read().split()[0]))", time.Minute)
	at, err := strconv.ParseFloat(strings.TrimSpace(string(r.Out)), 64)
	if err != nil {
		t.Fatal(err)
	}
	return at
}

// sameBoot says whether two of them are of one kernel: two reads of the clock lie between them.
func sameBoot(a, b float64) bool { return math.Abs(a-b) < 0.15 }

// A kernel that served one of a trust group shows the next nothing of it, whatever
// the first did, and what was called by a name is not there for the next.
func reusePristine(t *testing.T, w *world.World) {
	spec := world.Small()
	spec.Resources.Memory = sandbox.GiB
	spec.Resources.Pids = 40
	spec.Network.Mode = sandbox.NetworkNone // a kernel with a device is its sandbox's alone
	fresh := w.Create(t, spec)
	want := fresh.Python(t, fingerprint, time.Minute)
	want.WantExit(t, 0)
	spec.Reuse = "pristine"
	again := func(t *testing.T, b *world.Box) *world.Box {
		t.Helper()
		if _, err := b.TryKill(t.Context()); err != nil {
			t.Fatal(err)
		}
		return w.Create(t, spec)
	}
	reused := 0
	for _, a := range traces {
		t.Run(a.name, func(t *testing.T) {
			first := w.Create(t, spec)
			kernel := bootOf(t, first)
			r := first.Python(t, tracesHead+a.program+"\nprint('done')", time.Minute)
			if string(r.Out) != "done\n" {
				t.Fatalf("the attack: %q %q %v", r.Out, r.Err, r.End.End)
			}
			b := again(t, first)
			got := b.Python(t, fingerprint, time.Minute)
			got.WantExit(t, 0)
			diffLines(t, strings.ReplaceAll(string(want.Out), fresh.ID, "ID"), strings.ReplaceAll(string(got.Out), b.ID, "ID"))
			if sameBoot(bootOf(t, b), kernel) {
				reused++
			}
			if _, err := b.TryKill(t.Context()); err != nil {
				t.Fatal(err)
			}
		})
	}
	if reused < len(traces)/2 {
		t.Errorf("%d of %d kernels were used again: this shows nothing", reused, len(traces))
	}
}

// A kernel whose sandbox went over its memory, or whose init was killed, serves nobody again; one whose
// sandbox ended well serves the next.
func reuseUnclean(t *testing.T, w *world.World) {
	spec := world.Small()
	spec.Resources.MemoryLimit = 128 * sandbox.MiB
	spec.Network.Mode = sandbox.NetworkNone
	spec.Reuse = "unclean"
	b := w.Create(t, spec)
	for _, c := range []struct {
		name  string
		use   func(*testing.T, *world.Box)
		again bool
	}{
		{"ended well", func(t *testing.T, b *world.Box) { b.Must(t, "true") }, true},
		{"out of memory", func(t *testing.T, b *world.Box) {
			r, err := b.TryExec(t.Context(), sandbox.ProcessSpec{User: "root", Args: []string{"python3", "-c", memoryHoard}})
			wantOOM(t, b, r, err)
		}, false},
		{"ended well after it", func(t *testing.T, b *world.Box) { b.Must(t, "true") }, true},
		{"init killed", func(t *testing.T, b *world.Box) {
			_, _ = b.TryExec(t.Context(), sandbox.ProcessSpec{User: "root", Command: "kill -9 1; sleep 1000", Timeout: time.Minute})
			b.WantEnd(t, time.Minute, sandbox.InitKilled)
		}, false},
	} {
		kernel := w.KernelOf(t, b.ID)
		c.use(t, b)
		if _, err := b.TryKill(t.Context()); err != nil {
			t.Fatalf("%s: %v", c.name, err)
		}
		b = w.Create(t, spec)
		if got := w.KernelOf(t, b.ID); (got == kernel) != c.again {
			t.Errorf("%s: the next has kernel %s after %s", c.name, got, kernel)
		}
		if n := b.Stats(t).OOMKills; n != 0 {
			t.Errorf("%s: the next begins with %d processes over its memory", c.name, n)
		}
	}
}
