package e2e

import (
	"errors"
	"strings"
	"testing"
	"time"

	"github.com/cove-sandbox/cove/e2e/world"
	"github.com/cove-sandbox/cove/sandbox"
)

var resets = []scenario{
	{"reset leaves nothing", resetLeavesNothing},
	{"reset of a full disk", resetFullDisk},
	{"reset again and again", resetOften},
	{"reset is pristine", resetPristine},
	{"a kernel that is used again is pristine", reusePristine},
	{"a kernel that did not end well is not used again", reuseUnclean},
}

// look prints all an episode could have left behind. It is the same before a
// hostile episode and after the reset that ends it.
const look = `
import glob, os, socket, subprocess
def out(k, v): print(k, v)
tree = []
for top in ('/tmp', '/dev', '/run', '/var/tmp', '/root', '/home', '/etc', '/opt', '/srv', '/mnt'):
    for d, dirs, files in os.walk(top):
        for f in sorted(dirs + files):
            p = os.path.join(d, f)
            if p.startswith('/dev/pts/'): continue
            st = os.lstat(p)
            tree.append((p, oct(st.st_mode), st.st_uid, st.st_size if not os.path.isdir(p) else 0))
out('tree', sorted(tree))
out('root', sorted(os.listdir('/')))
out('procs', len(glob.glob('/proc/[0-9]*')))
listening = []
for f in ('tcp', 'tcp6', 'udp', 'udp6'):
    try: lines = open('/proc/net/'+f).read().split('\n')[1:]
    except OSError: continue
    listening += [f + l.split()[1] for l in lines if l.split() and (l.split()[3] == '0A' or f.startswith('udp'))]
out('listening', sorted(listening))
unix = []
try:
    for l in open('/proc/net/unix').read().split('\n')[1:]:
        if len(l.split()) > 7: unix.append(l.split()[7])
except OSError: pass
out('unix', sorted(unix))
for f in ('shm', 'sem', 'msg'):
    try: out('sysv ' + f, len(open('/proc/sysvipc/'+f).read().split('\n')))
    except OSError as e: out('sysv ' + f, e.errno)
try: out('mq', os.listdir('/dev/mqueue'))
except OSError as e: out('mq', e.errno)
out('env', sorted(i for i in os.environ.items() if i[0] != 'COVE_EXEC'))  # names the exec, a new one each time
out('host', socket.gethostname())
out('cwd', os.getcwd()); out('umask', oct(os.umask(0o22)))
out('mounts', sorted(l.split()[1] for l in open('/proc/mounts')))
out('limits', open('/proc/self/limits').read())
busy = []
for p in (8000, 8001, 8002):
    try: s = socket.socket(); s.bind(('0.0.0.0', p)); s.close()
    except OSError: busy.append(p)
out('busy', busy)
out('sysctl', [open(p).read() for p in sorted(glob.glob('/proc/sys/net/*/*')) if os.path.isfile(p)])
`

const hostileEpisode = `
import ctypes, mmap, os, socket, subprocess, sys, time
libc = ctypes.CDLL(None, use_errno=True)
for p in ('/evil', '/tmp/evil', '/dev/shm/evil', '/dev/evil', '/run/evil', '/var/tmp/evil', '/root/.bashrc', '/root/.profile', '/etc/environment', '/etc/profile', '/etc/ld.so.preload2', '/usr/bin/evil', '/home/user/.bashrc', '/etc/sudoers.d/evil'):
    open(p, 'a').write('export EVIL=1\n'); os.chmod(p, 0o777)
for p in ('/etc/passwd', '/usr/bin/env', '/bin/true'):
    data = open(p, 'rb').read(); os.unlink(p); open(p, 'wb').write(b'#!/bin/sh\necho evil\n' if 'bin' in p else data + b'evil:x:0:0::/:/bin/sh\n'); os.chmod(p, 0o755)
subprocess.run('rm -rf /usr/lib/python3/dist-packages /var/log; chmod 777 /root /etc /tmp; mkfifo /tmp/pipe; ln -s / /tmp/rootlink', shell=True)
libc.shmget(0x1234, 1 << 20, 0o1666); libc.semget(0x1234, 4, 0o1666); libc.msgget(0x1234, 0o1666)
for path in ('/proc/sys/net/ipv4/ip_forward', '/proc/sys/net/ipv4/tcp_rmem', '/proc/sys/net/core/somaxconn'):
    try: open(path, 'w').write('1')
    except OSError: pass
for i in range(20):
    if os.fork() == 0:
        os.setsid()
        if os.fork(): os._exit(0)
        s = []
        for p in (8000 + i % 3,):
            t = socket.socket(); t.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
            t.bind(('0.0.0.0', p)); t.listen(50)
            u = socket.socket(socket.AF_INET, socket.SOCK_DGRAM); u.bind(('0.0.0.0', 9000 + i))
            a = socket.socket(socket.AF_UNIX); a.bind('\0evil%d' % i); a.listen(5)
            f = socket.socket(socket.AF_UNIX); f.bind('/tmp/evil%d.sock' % i); f.listen(5)
            c = socket.socket(); c.connect(('127.0.0.1', p))
            s += [t, u, a, f, c]
        import signal
        for n in range(1, 65):
            try: signal.signal(n, signal.SIG_IGN)
            except (OSError, ValueError): pass
        time.sleep(10000)
time.sleep(1)
print('done')
`

func resetLeavesNothing(t *testing.T, w *world.World) {
	spec := world.Small()
	spec.Resources.Memory = 512 * sandbox.MiB
	spec.Env = map[string]string{"GIVEN": "stays"}
	b := w.Create(t, spec)
	before := b.Python(t, look, time.Minute)
	before.WantExit(t, 0)
	if !strings.Contains(string(before.Out), "('GIVEN', 'stays')") {
		t.Fatalf("the sandbox's own environment is missing: %s", before.Out)
	}
	r := b.Exec(t, sandbox.ProcessSpec{ExecID: "episode", Args: []string{"python3", "-c", hostileEpisode}, User: "root", Env: map[string]string{"EVIL": "1"}, Timeout: time.Minute})
	if string(r.Out) != "done\n" {
		t.Fatalf("the episode: %q %q %v", r.Out, r.Err, r.End.End)
	}
	// A process and a watch that are open across the reset end, each with its
	// reason.
	long := make(chan world.Result, 1)
	longErr := make(chan error, 1)
	go func() {
		r, err := b.TryExec(t.Context(), sandbox.ProcessSpec{ExecID: "long", Args: []string{"sleep", "1000"}})
		long <- r
		longErr <- err
	}()
	world.Eventually(t, time.Minute, "the long process runs", func() bool {
		ps, _ := b.Tasks(t)
		for _, p := range ps {
			if p.ExecID == "long" {
				return true
			}
		}
		return false
	})
	if sb := b.Reset(t); sb.Episode != 2 || sb.State != sandbox.Running {
		t.Errorf("after the reset: episode %d, %s", sb.Episode, sb.State)
	}
	if r, err := <-long, <-longErr; err != nil || r.End.Cause != sandbox.ResetCause {
		t.Errorf("the open exec ended by %v, %v; want %s", r.End.End, err, sandbox.ResetCause)
	}
	after := b.Python(t, look, time.Minute)
	after.WantExit(t, 0)
	diffLines(t, string(before.Out), string(after.Out))
	if ps, tasks := b.Tasks(t); len(ps) > 1 || len(tasks) > 2 {
		t.Errorf("after the reset: processes %v, tasks %v", ps, tasks)
	}
	// The exec_ids of the old episode are free again, its output is gone.
	if err := b.Attach(t.Context(), "episode", 0, func(sandbox.ProcessEvent) error { return nil }); !errors.Is(err, sandbox.ErrNotFound) {
		t.Errorf("attaching to a process of the old episode: %v, want %s", err, sandbox.NotFound)
	}
	if r := b.Exec(t, sandbox.ProcessSpec{ExecID: "episode", Command: "echo new"}); string(r.Out) != "new\n" || r.Started.Replayed {
		t.Errorf("the same exec_id in the new episode: %q, replayed %v", r.Out, r.Started.Replayed)
	}
	if got := b.Must(t, "true && env | grep -c EVIL; id evil 2>/dev/null; /bin/true; echo"); got != "0\n" {
		t.Errorf("of the old episode: %q", got)
	}
}

func diffLines(t *testing.T, before, after string) {
	t.Helper()
	was := map[string]bool{}
	for _, l := range strings.Split(before, "\n") {
		was[l] = true
	}
	for _, l := range strings.Split(after, "\n") {
		if !was[l] {
			key, _, _ := strings.Cut(l, " ")
			for _, b := range strings.Split(before, "\n") {
				if strings.HasPrefix(b, key+" ") {
					t.Errorf("%s differs after the reset%s", key, firstDifference(b, l))
				}
			}
		}
	}
}

func firstDifference(a, b string) string {
	i := 0
	for i < len(a) && i < len(b) && a[i] == b[i] {
		i++
	}
	from := max(0, i-80)
	return "\n before …" + clip(a[from:], 300) + "\n after  …" + clip(b[from:], 300)
}

func clip(s string, n int) string { return s[:min(n, len(s))] }

func resetFullDisk(t *testing.T, w *world.World) {
	spec := world.Small()
	spec.Resources.Disk = 64 * sandbox.MiB
	b := w.Create(t, spec)
	b.Root(t, "head -c 1G /dev/zero | tr '\\0' x > /fill").WantExit(t, 1)
	b.Reset(t)
	b.Must(t, "head -c 40M /dev/zero | tr '\\0' x > /again && rm /again")
	if used := b.Stats(t).DiskUsed; used > 64*sandbox.MiB {
		t.Errorf("%d bytes are used", used)
	}
}

func resetOften(t *testing.T, w *world.World) {
	const resets, warm = 26, 8
	b := w.Create(t, world.Small())
	var early int64
	for i := range resets {
		b.Must(t, "head -c 4M /dev/urandom > /dev/shm/x; head -c 4M /dev/urandom > /x; sleep 1000 & disown")
		if sb := b.Reset(t); sb.Episode != int64(i+2) {
			t.Fatalf("episode %d after %d resets", sb.Episode, i+1)
		}
		if i == warm {
			early = b.Stats(t).Memory
		}
	}
	// What an episode left in the kernel would add up: 17 times 4 MiB at least.
	if late := b.Stats(t).Memory; late > early+32*sandbox.MiB {
		t.Errorf("memory went from %d MiB to %d MiB over %d resets", early>>20, late>>20, resets-warm)
	}
	if got := b.Must(t, "ls /x /dev/shm 2>/dev/null; echo alive"); !strings.HasSuffix(got, "alive") || strings.Contains(got, "x\n") {
		t.Errorf("got %q", got)
	}
}
