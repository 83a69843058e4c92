package e2e

import (
	"fmt"
	"net"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/cove-sandbox/cove/e2e/world"
	"github.com/cove-sandbox/cove/sandbox"
)

var escapes = []scenario{
	{"garbage for the guest's port", guestGarbage},
	{"thousands of connections to the guest's port", guestFlood},
	{"taking over the guest's port", guestImpostor},
	{"the guest's secret", guestSecret},
	{"other sandboxes", otherSandboxes},
	{"the host's loopback", hostLoopback},
	{"the host's files", hostFiles},
	{"raw sockets", rawSockets},
	{"mounts", mounts},
	{"more privileges", privileges},
	{"a process of the guest before it executes", unborn},
	{"out of the group of its exec", outOfGroup},
	{"a file call through /proc", magicLinks},
}

// guestPort is what garbage, flood and impostor aim at: the one port that
// listens on the loopback a fresh sandbox shares with the guest. The kernel
// inside lists it to anyone who asks.
func guestPort(t *testing.T, b *world.Box) string {
	t.Helper()
	r := b.Python(t, `
ports = set()
for f in ('/proc/net/tcp', '/proc/net/tcp6'):
    for l in open(f).read().split('\n')[1:]:
        c = l.split()
        if len(c) > 3 and c[3] == '0A': ports.add(int(c[1].split(':')[1], 16))
print(*ports)
`, time.Minute)
	r.WantExit(t, 0)
	ports := strings.Fields(string(r.Out))
	if len(ports) != 1 {
		t.Fatalf("ports %q listen on a fresh sandbox's loopback, want the guest's alone", r.Out)
	}
	return ports[0]
}

func guestGarbage(t *testing.T, w *world.World) {
	b := w.Create(t, world.Small())
	port := guestPort(t, b)
	r := b.Python(t, `
import os, socket, struct
port = `+port+`
for payload in [b'', b'\0'*65536, b'\xff'*65536, b'GET / HTTP/1.1\r\n\r\n', struct.pack('>I', 0xffffffff)+b'x'*100, struct.pack('<I', 0x7fffffff)*1000, os.urandom(1<<20), b'{"op":"exec"}\n'*1000]:
    for cut in (False, True):
        s = socket.socket(); s.settimeout(5)
        s.connect(('127.0.0.1', port))
        got = b''
        try:
            s.sendall(payload)
            if cut: s.shutdown(socket.SHUT_WR)
            while len(got) < 1 << 20:
                c = s.recv(65536)
                if not c: break
                got += c
        except OSError: pass
        assert len(got) < 4096, (len(got), got[:100])
        s.close()
`, 3*time.Minute)
	r.WantExit(t, 0)
	if got := b.Must(t, "echo alive"); got != "alive" {
		t.Errorf("got %q", got)
	}
}

func guestFlood(t *testing.T, w *world.World) {
	// Memory for all the sockets: what is to be met is the guest's patience,
	// not the sandbox's own limit.
	spec := world.Small()
	spec.Resources.Memory = sandbox.GiB
	b := w.Create(t, spec)
	port := guestPort(t, b)
	flood := make(chan world.Result, 1)
	go func() {
		r, err := b.TryExec(t.Context(), sandbox.ProcessSpec{ExecID: "flood", User: "root", Timeout: 6 * time.Second, Args: []string{"python3", "-c", `
import resource, socket, time
resource.setrlimit(resource.RLIMIT_NOFILE, (20000, 20000))
held, n = [], 0
print('go', flush=True)
while True:
    s = socket.socket(); s.setblocking(False)
    s.connect_ex(('127.0.0.1', ` + port + `))
    held.append(s); n += 1
    if len(held) > 6000:
        for s in held[:3000]: s.close()
        held = held[3000:]
    if n % 500 == 0:
        for s in held[-500:]:
            try: s.send(b'x')
            except OSError: pass
        time.sleep(0.01)
`}})
		if err != nil {
			t.Errorf("the flood itself: %v", err)
		}
		flood <- r
	}()
	world.Eventually(t, time.Minute, "the flood runs", func() bool {
		ps, _ := b.Tasks(t)
		return len(ps) > 0
	})
	// The host still gets in, past all that are already connected.
	answers := 0
	for {
		select {
		case r := <-flood:
			r.WantCause(t, sandbox.Deadline)
			if answers == 0 {
				t.Error("no exec was answered during the flood")
			}
			b.WantRunning(t)
			b.Must(t, "echo alive")
			return
		default:
		}
		if got := b.Must(t, "echo alive"); got != "alive" {
			t.Errorf("got %q", got)
		}
		answers++
	}
}

// Someone who answers in the guest's place learns nothing and is not believed.
func guestImpostor(t *testing.T, w *world.World) {
	b := w.Create(t, world.Small())
	port := guestPort(t, b)
	r := b.Python(t, `
import socket
port, bound = `+port+`, []
for family, host in [(socket.AF_INET, '127.0.0.1'), (socket.AF_INET, '0.0.0.0'), (socket.AF_INET, '127.0.0.2'), (socket.AF_INET6, '::'), (socket.AF_INET6, '::1')]:
    for opts in [(), (socket.SO_REUSEADDR,), (socket.SO_REUSEADDR, socket.SO_REUSEPORT)]:
        try:
            s = socket.socket(family)
            for o in opts: s.setsockopt(socket.SOL_SOCKET, o, 1)
            s.bind((host, port)); s.listen(100)
            bound.append((host, opts))
            # keep it: what is bound stays bound while the host dials
            globals().setdefault('keep', []).append(s)
        except OSError: pass
print(bound, flush=True)
import time
open('/bound', 'w').write('x')
end = time.time() + 4
stolen = []
for s in globals().get('keep', []): s.settimeout(0.2)
while time.time() < end:
    for s in globals().get('keep', []):
        try:
            c, _ = s.accept(); c.settimeout(1)
            c.sendall(b'\0' * 64)
            stolen.append(c.recv(4096))
        except OSError: pass
    if not globals().get('keep'): time.sleep(0.5)
print('stolen', stolen)
`, time.Minute)
	r.WantExit(t, 0)
	if strings.Contains(string(r.Out), "'127.0.0.1'") {
		t.Errorf("the guest's own address could be bound: %s", r.Out)
	}
	t.Logf("impostor: %s", r.Out)
	if got := b.Must(t, "echo alive"); got != "alive" {
		t.Errorf("got %q", got)
	}
	// While an impostor holds what it could get, new connections still find
	// the guest.
	go func() {
		_, _ = b.TryExec(t.Context(), sandbox.ProcessSpec{ExecID: "imp", User: "root", Timeout: 10 * time.Second, Args: []string{"python3", "-c", `
import socket, time
for host in ('0.0.0.0', '127.0.0.2'):
    try:
        s = socket.socket(); s.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1); s.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        s.bind((host, ` + port + `)); s.listen(100)
        globals().setdefault('keep', []).append(s)
    except OSError: pass
open('/holding', 'w').write('x')
time.sleep(1000)
`}})
	}()
	world.Eventually(t, time.Minute, "the impostor listens", func() bool {
		_, _, err := b.Read(t.Context(), "/holding")
		return err == nil
	})
	errs := make(chan error, 20)
	for range cap(errs) {
		go func() {
			r, err := b.TryExec(t.Context(), sandbox.ProcessSpec{Command: "echo alive"})
			if err == nil && string(r.Out) != "alive\n" {
				err = fmt.Errorf("answered %q", r.Out)
			}
			errs <- err
		}()
	}
	for range cap(errs) {
		if err := <-errs; err != nil {
			t.Errorf("exec beside the impostor: %v", err)
		}
	}
}

func guestSecret(t *testing.T, w *world.World) {
	spec := world.Small()
	spec.Env = map[string]string{"MINE": "1"}
	b := w.Create(t, spec)
	r := b.Python(t, `
import glob, os
hits = []
for pattern in ('environ', 'cmdline', 'maps', 'status', 'comm'):
    for p in glob.glob('/proc/[0-9]*/' + pattern) + glob.glob('/proc/[0-9]*/task/*/' + pattern):
        if p.split('/')[2] == str(os.getpid()): continue  # this very text
        try: data = open(p, 'rb').read()
        except OSError: continue
        if b'COVE_GUEST' in data or b'agent' in data: hits.append((p, data[:80]))
for k in os.environ:
    if 'COVE_GUEST' in k or 'SECRET' in k: hits.append(k)
names = []
for p in glob.glob('/proc/[0-9]*/cmdline'):
    names.append((int(p.split('/')[2]), open(p, 'rb').read()[:60]))
print('hits', hits)
print(len(names), sorted(names))
# descriptors that came along from the guest
print('fds', sorted(os.listdir('/proc/self/fd')), [os.readlink('/proc/self/fd/'+f) for f in ('0','1','2')])
`, time.Minute)
	r.WantExit(t, 0)
	if !strings.Contains(string(r.Out), "hits []") {
		t.Errorf("the guest can be seen: %s", r.Out)
	}
	if !strings.Contains(string(r.Out), "fds ['0', '1', '2', '3']") {
		t.Errorf("a process has more descriptors than its own three and the listing's: %s", r.Out)
	}
	if _, tasks := b.Tasks(t); len(tasks) > 3 {
		t.Errorf("more processes than an init: %v", tasks)
	}
	// Descending into init: ptrace, its memory, its namespaces.
	r = b.Python(t, `
import ctypes, os
libc = ctypes.CDLL(None, use_errno=True)
for f in ('root', 'cwd', 'exe'):
    try: print(f, os.listdir('/proc/1/'+f)[:0] if f != 'exe' else os.readlink('/proc/1/exe'))
    except OSError as e: print(f, e.errno)
for ns in ('mnt', 'pid', 'net', 'user'):
    try:
        fd = os.open('/proc/1/ns/'+ns, os.O_RDONLY)
        print('setns', ns, libc.setns(fd, 0))
    except OSError as e: print('ns', ns, e.errno)
`, time.Minute)
	r.WantExit(t, 0)
	b.Must(t, "echo alive")
}

func otherSandboxes(t *testing.T, w *world.World) {
	a, b := w.Create(t, world.Small()), w.Create(t, world.Small())
	go func() {
		_, _ = a.TryExec(t.Context(), sandbox.ProcessSpec{ExecID: "srv", User: "root", Timeout: time.Minute, Args: []string{"python3", "-c", `
import socket, threading, time
s = socket.socket(); s.bind(('0.0.0.0', 8000)); s.listen(5)
u = socket.socket(socket.AF_UNIX); u.bind('\0cove-e2e-abstract'); u.listen(5)
open('/ready', 'w').write('x'); open('/dev/shm/secret', 'w').write('of a'); open('/tmp/secret', 'w').write('of a')
while True: c, _ = s.accept(); c.sendall(b'of a'); c.close()
`}})
	}()
	world.Eventually(t, time.Minute, "a listens", func() bool {
		_, _, err := a.Read(t.Context(), "/ready")
		return err == nil
	})
	r := b.Python(t, `
import os, socket
out = []
for host in ('127.0.0.1', '0.0.0.0', '10.200.0.2', '169.254.1.1'):
    s = socket.socket(); s.settimeout(3)
    # What is denied is accepted and reset: only bytes are somebody's.
    try: s.connect((host, 8000)); out += [host] if s.recv(4) else []
    except OSError: pass
    s.close()
s = socket.socket(socket.AF_UNIX)
try: s.connect('\0cove-e2e-abstract'); out.append('abstract')
except OSError: pass
for p in ('/ready', '/dev/shm/secret', '/tmp/secret'):
    if os.path.exists(p): out.append(p)
for i in range(1, 200):
    try: os.kill(i, 0)
    except ProcessLookupError: continue
    except PermissionError: out.append('pid %d' % i)
print(out)
`, time.Minute)
	r.WantExit(t, 0)
	if string(r.Out) != "[]\n" {
		t.Errorf("b reaches of a: %s", r.Out)
	}
}

// What listens on the host, on its loopback or on its own addresses, is out of
// reach: TCP, UDP, Unix and abstract.
func hostLoopback(t *testing.T, w *world.World) {
	hosts := []string{"127.0.0.1", "::1", "localhost"}
	addrs, err := net.InterfaceAddrs()
	if err != nil {
		t.Fatal(err)
	}
	for _, a := range addrs {
		if n, ok := a.(*net.IPNet); ok && !n.IP.IsLoopback() && !n.IP.IsLinkLocalUnicast() {
			hosts = append(hosts, n.IP.String())
		}
	}
	reached := make(chan string, 100)
	l, err := net.Listen("tcp", "0.0.0.0:0")
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	local, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer local.Close()
	name := fmt.Sprintf("@cove-e2e-host-%d", os.Getpid())
	abstract, err := net.Listen("unix", name)
	if err != nil {
		t.Fatal(err)
	}
	defer abstract.Close()
	for _, l := range []net.Listener{l, local, abstract} {
		go func() {
			for {
				c, err := l.Accept()
				if err != nil {
					return
				}
				reached <- l.Addr().String()
				c.Close()
			}
		}()
	}
	port := func(l net.Listener) int { return l.Addr().(*net.TCPAddr).Port }
	b := w.Create(t, world.Small())
	r := b.Python(t, fmt.Sprintf(`
import socket
out = []
for host in %q.split():
    for port in (%d, %d, %s, 22):
        try:
            # What is denied is accepted and reset: only bytes are somebody's.
            # Those that listen for this test say so themselves.
            s = socket.create_connection((host, port), 3); s.sendall(b'GET / HTTP/1.0\r\n\r\n')
            if s.recv(1): out.append((host, port))
            s.close()
        except OSError: pass
s = socket.socket(socket.AF_UNIX)
try: s.connect('\0' + %q); out.append('abstract')
except OSError: pass
print(out)
`, strings.Join(hosts, " "), port(l), port(local), w.URL()[strings.LastIndex(w.URL(), ":")+1:], name[1:]), 2*time.Minute)
	r.WantExit(t, 0)
	if string(r.Out) != "[]\n" {
		t.Errorf("reached from inside: %s", r.Out)
	}
	select {
	case a := <-reached:
		t.Errorf("the host's listener %s was reached", a)
	default:
	}
	// With no network a lookup fails at once instead of timing out.
	none := world.Small()
	none.Network.Mode = sandbox.NetworkNone
	r = w.Create(t, none).Python(t, `
import socket, time
start = time.time()
try: socket.getaddrinfo('example.com', 80)
except OSError: pass
print(int(time.time() - start))
`, time.Minute)
	r.WantExit(t, 0)
	if string(r.Out) != "0\n" && string(r.Out) != "1\n" {
		t.Errorf("a lookup took %s s to fail", r.Out)
	}
}

func hostFiles(t *testing.T, w *world.World) {
	marker := filepath.Join(filepath.Dir(w.Dir), "host-marker")
	if err := os.WriteFile(marker, []byte("of the host"), 0o644); err != nil {
		t.Fatal(err)
	}
	b := w.Create(t, world.Small())
	r := b.Python(t, fmt.Sprintf(`
import os, glob
out = []
marker, data = %q, %q
for prefix in ('', '/proc/1/root', '/proc/self/root', '/proc/1/cwd', '/proc/self/cwd', '/proc/1/root/proc/1/root', '/.cove', '/..', '/../../..'):
    for p in (marker, data, data + '/key', data + '/images'):
        if os.path.exists(prefix + p): out.append(prefix + p)
for p in glob.glob('/dev/*'):
    if p.split('/')[2][:2] in ('sd', 'vd', 'nv', 'lo', 'dm') or p in ('/dev/mem', '/dev/kmsg', '/dev/kvm'): out.append(p)
for mode, dev in ((0o060666, os.makedev(254, 0)), (0o060666, os.makedev(8, 0)), (0o020666, os.makedev(1, 1)), (0o020666, os.makedev(10, 232))):
    try:
        os.mknod('/node', mode, dev)
        try: os.close(os.open('/node', os.O_RDONLY)); out.append(('opened', mode, dev))
        except OSError: pass
        os.unlink('/node')
    except OSError: pass
for p in ('/proc/sys/kernel/core_pattern', '/sys/kernel/uevent_helper', '/proc/sys/kernel/modprobe', '/sys/fs/cgroup/release_agent'):
    try: open(p, 'w').write('x'); out.append(('wrote', p))
    except OSError: pass
d = os.open('/', os.O_RDONLY)
os.chroot('/tmp')
os.fchdir(d)
for i in range(50): os.chdir('..')
os.chroot('.')
if os.path.exists(marker): out.append('chroot')
print(out)
`, marker, w.Dir), time.Minute)
	r.WantExit(t, 0)
	if string(r.Out) != "[]\n" {
		t.Errorf("of the host: %s", r.Out)
	}
}

func rawSockets(t *testing.T, w *world.World) {
	b := w.Create(t, world.Small())
	r := b.Python(t, `
import socket
out = []
for family, kind, proto in ((socket.AF_INET, socket.SOCK_RAW, socket.IPPROTO_TCP), (socket.AF_INET, socket.SOCK_RAW, socket.IPPROTO_ICMP), (socket.AF_INET, socket.SOCK_RAW, 255),
        (socket.AF_INET6, socket.SOCK_RAW, socket.IPPROTO_TCP), (socket.AF_PACKET, socket.SOCK_RAW, 0x300), (socket.AF_PACKET, socket.SOCK_DGRAM, 0x300)):
    try: socket.socket(family, kind, proto); out.append((family, kind, proto))
    except OSError: pass
print(out)
`, time.Minute)
	r.WantExit(t, 0)
	if string(r.Out) != "[]\n" {
		t.Errorf("raw sockets were given: %s", r.Out)
	}
}

// Root mounts what gVisor has, into its own mount namespace; not what is one for
// the whole kernel.
func mounts(t *testing.T, w *world.World) {
	b := w.Create(t, world.Small())
	r := b.Python(t, `
import ctypes, os
libc = ctypes.CDLL(None, use_errno=True)
for d in ('/m', '/low', '/dev/shm/up', '/dev/shm/work'): os.makedirs(d, exist_ok=True)
may, not_ = [], []
for src, kind, flags, data in ((b'tmpfs', b'tmpfs', 0, None), (b'proc', b'proc', 0, None), (b'/low', None, 4096, None), (b'sysfs', b'sysfs', 0, None), (b'devpts', b'devpts', 0, None),
        (b'overlay', b'overlay', 0, b'lowerdir=/low,upperdir=/dev/shm/up,workdir=/dev/shm/work'), (b'none', b'cgroup2', 0, None),
        (b'none', b'cgroup', 0, b'pids'), (b'none', b'cgroup', 0, b'none,name=x'), (b'/dev/vda', b'ext4', 0, None), (b'x', b'9p', 0, b'trans=fd,rfdno=0,wfdno=0'), (b'x', b'erofs', 0, b'ifd=3'), (b'dev', b'devtmpfs', 0, None), (b'x', b'fuse', 0, b'fd=0,rootmode=40000,user_id=0,group_id=0')):
    if libc.mount(src, b'/m', kind, flags, data) == 0:
        may.append((kind or b'bind').decode())
        if kind == b'proc':
            if [p for p in os.listdir('/m') if p.isdigit() and b'agent' in open('/m/%s/cmdline' % p, 'rb').read() and p != str(os.getpid())]: may.append('the guest')
        if kind == b'cgroup2':
            if open('/m/cgroup.procs').read().split() != [str(os.getpid())]: may.append('other groups')
        libc.umount2(b'/m', 2)
    else: not_.append((kind or b'bind').decode())
print(may, not_)
`, time.Minute)
	r.WantExit(t, 0)
	if want := "['tmpfs', 'proc', 'bind', 'sysfs', 'devpts', 'overlay', 'cgroup2'] ['cgroup', 'cgroup', 'ext4', '9p', 'erofs', 'devtmpfs', 'fuse']\n"; string(r.Out) != want {
		t.Errorf("root inside may and may not mount %s want %s", r.Out, want)
	}
	// In a user namespace of its own it may, as any user on Linux; what it
	// sees there is still its own kernel, without the guest.
	r = b.Root(t, `unshare -Urmpf --mount-proc sh -c 'mount -t tmpfs x /mnt; ls /proc | grep -c "^[0-9]"; tr "\0" " " < /proc/1/cmdline'; unshare -Um sh -c 'cat /proc/*/environ' | tr '\0' '\n' | grep COVE_GUEST; true`)
	if strings.Contains(string(r.Out), "COVE_GUEST") || strings.Contains(string(r.Out), "agent") {
		t.Errorf("seen from a namespace of its own: %s", r.Out)
	}
	b.Must(t, "echo alive")
}

func privileges(t *testing.T, w *world.World) {
	b := w.Create(t, world.Small())
	// NET_ADMIN 12, NET_RAW 13, SYS_MODULE 16, SYS_RAWIO 17, SYS_BOOT 22, SYS_TIME
	// 25, BPF 39: not even in the bounding set.
	r := b.Python(t, `
caps = {}
for line in open('/proc/self/status'):
    if line.startswith('Cap'):
        k, v = line.split(':'); caps[k] = int(v, 16)
print([(k, c) for k in ('CapEff', 'CapPrm', 'CapBnd', 'CapInh', 'CapAmb') for c in (12, 13, 16, 17, 22, 25, 39) if caps.get(k, 0) >> c & 1])
import ctypes
libc = ctypes.CDLL(None, use_errno=True)
print(libc.reboot(0x1234567))
`, time.Minute)
	r.WantExit(t, 0)
	if string(r.Out) != "[]\n-1\n" {
		t.Errorf("root inside has %s", r.Out)
	}
	// sudo works for the image's user, and leads no further.
	r = b.Exec(t, sandbox.ProcessSpec{Command: "sudo -n id -u; sudo -n mount -t tmpfs x /mnt && echo mounted; mount -t tmpfs x /mnt 2>/dev/null && echo by itself; true", User: "user"})
	r.WantExit(t, 0)
	if string(r.Out) != "0\nmounted\n" {
		t.Errorf("sudo: %q %q", r.Out, r.Err)
	}
}

// While it is being started, a process has the guest's memory and descriptors.
// Root inside, which may trace anything it sees, watches for new pids and tries
// what there is.
func unborn(t *testing.T, w *world.World) {
	b := w.Create(t, world.Small())
	done := make(chan world.Result, 1)
	go func() {
		r, err := b.TryExec(t.Context(), sandbox.ProcessSpec{ExecID: "watch", User: "root", Timeout: time.Minute, Args: []string{"python3", "-c", `
import ctypes, os, time
libc = ctypes.CDLL(None, use_errno=True)
libc.ptrace.argtypes = [ctypes.c_long, ctypes.c_long, ctypes.c_void_p, ctypes.c_void_p]
known, got, seen, end = set(os.listdir('/proc')), [], 0, time.time() + 8
open('/ready', 'w').write('x')
while time.time() < end:
    for p in os.listdir('/proc'):
        if not p.isdigit() or p in known: continue
        try: mine = b'agent' not in open('/proc/%s/cmdline' % p, 'rb').read()
        except OSError: continue
        if mine: known.add(p); continue
        seen += 1
        try:
            if b'COVE' in open('/proc/%s/environ' % p, 'rb').read() and b'agent' in open('/proc/%s/cmdline' % p, 'rb').read(): got.append('environ')
        except OSError: pass
        try: os.open('/proc/%s/mem' % p, os.O_RDWR); b'agent' in open('/proc/%s/cmdline' % p, 'rb').read() and got.append('mem')
        except OSError: pass
        for f in range(3, 30):
            try: l = os.readlink('/proc/%s/fd/%d' % (p, f)); b'agent' in open('/proc/%s/cmdline' % p, 'rb').read() and got.append(l)
            except OSError: pass
        if libc.ptrace(16, int(p), None, None) == 0:
            os.waitpid(int(p), 0x40000000)
            if b'agent' in open('/proc/%s/cmdline' % p, 'rb').read(): got.append('traced')
            libc.ptrace(17, int(p), None, None)
        known.add(p)
print(got)
print('seen', seen)
`}})
		if err != nil {
			t.Errorf("the watcher: %v", err)
		}
		done <- r
	}()
	world.Eventually(t, time.Minute, "the watcher watches", func() bool {
		_, _, err := b.Read(t.Context(), "/ready")
		return err == nil
	})
	for {
		select {
		case r := <-done:
			r.WantExit(t, 0)
			if !strings.HasPrefix(string(r.Out), "[]\n") {
				t.Errorf("of a process that is being started, root inside has %s", r.Out)
			}
			t.Logf("%s", r.Out)
			return
		default:
			b.Exec(t, sandbox.ProcessSpec{Command: "true", User: "user"})
		}
	}
}

// What runs in an exec ends with it, whatever groups it makes and wherever it
// tries to go; and the limit of processes holds.
func outOfGroup(t *testing.T, w *world.World) {
	spec := world.Small()
	spec.Resources.Memory = sandbox.GiB // for 40 Pythons
	spec.Resources.Pids = 40
	b := w.Create(t, spec)
	go func() {
		_, _ = b.TryExec(t.Context(), sandbox.ProcessSpec{ExecID: "other", User: "root", Args: []string{"sleep", "1000"}})
	}()
	world.Eventually(t, time.Minute, "the other exec runs", func() bool { ps, _ := b.Tasks(t); return len(ps) > 0 })
	r := b.Exec(t, sandbox.ProcessSpec{User: "root", Timeout: 5 * time.Second, Command: `
other=$(pgrep -o sleep)
mount -t cgroup2 x /mnt; mkdir -p /mnt/a/b
for ns in 1 $other; do
  nsenter -C -t $ns sh -c 'echo $$ > /mnt/a/cgroup.procs; exec setsid sleep 2000' &
  nsenter -C -t $ns sh -c 'mount -t cgroup2 x /srv; echo $$ > /srv/cgroup.procs; exec setsid sleep 2000' &
  unshare -C nsenter -C -t $ns setsid sleep 2000 &
done
unshare -Urm sh -c 'mount -t cgroup2 x /srv; echo $$ > /srv/a/cgroup.procs; exec setsid sleep 2000' &
(echo $(exec sh -c 'echo $PPID') > /mnt/a/b/cgroup.procs; exec setsid sleep 2000) &
echo max > /mnt/pids.max; echo 1000 > /mnt/a/pids.max
sleep 1000`})
	r.WantCause(t, sandbox.Deadline)
	if got := b.Must(t, "pgrep -fx '(setsid )?sleep 2000' | wc -l; pgrep -x sleep | wc -l"); got != "0\n1" {
		t.Errorf("after the exec's end: %q, want nothing of it and the other", got)
	}
	r = b.Python(t, `
import os, signal
n = 0
try:
    while n < 100:
        if not os.fork(): signal.pause()
        n += 1
except OSError: pass
print(n < 40, flush=True)
os.killpg(0, 9)
`, time.Minute)
	if string(r.Out) != "True\n" {
		t.Errorf("a limit of 40 processes: %q %q", r.Out, r.Err)
	}
}

// A link of /proc leads to what a process holds, whatever it is called. File
// calls and working directories do not follow it.
func magicLinks(t *testing.T, w *world.World) {
	b := w.Create(t, world.Small())
	b.Must(t, "echo secret > /root/s; exec 9</root/s; setsid sleep 1000 & echo -n $! > /pid; ln -s /proc/$!/fd/9 /link; ln -s /proc/$!/cwd /dir; ln -s /root/s /plain")
	if data, _, err := b.Read(t.Context(), "/link"); err == nil {
		t.Errorf("read %q through a link of /proc", data)
	}
	if data, _, err := b.Read(t.Context(), "/plain"); err != nil || string(data) != "secret\n" {
		t.Errorf("a plain link: %q, %v", data, err)
	}
	if r, err := b.TryExec(t.Context(), sandbox.ProcessSpec{Command: "pwd", Cwd: "/dir", User: "root"}); err == nil {
		t.Errorf("started in %q through a link of /proc", r.Out)
	}
}
