package world

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"fmt"
	"io/fs"
	"maps"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/cove-sandbox/cove/sandbox"
)

// cleanWithin is the promise of design section 5: after anything, what runs is
// what the record says within 30 s.
const cleanWithin = 30 * time.Second

// mostBlanks are kept after a burst of restores; otherwise one is.
const mostBlanks = 8

// Host is what a Cove may leave on the machine. Everything that can carry the
// data directory's name is looked for by it, because other tests run Coves of
// their own at the same time; the rest (nft, named namespaces) is compared as a
// whole.
type Host struct {
	Processes  []string // with the data directory in their command line
	Namespaces []string // network namespaces of those processes, and every named one
	Cgroups    []string // of the data directory
	Mounts     []string // with the data directory in source or target
	Sockets    []string // Unix sockets bound below the data directory
	Files      []string // of kernels: everything below the runtime's directories
	Rules      []string // nftables
	Loops      []string // loop devices over files below the data directory
	Memory     []string // what is kept in /dev/shm for the data directory
}

// HostNow looks at the machine.
func HostNow(dir string) Host {
	h := Host{Cgroups: cgroupsOf(dir), Rules: nftRules(), Files: kernelFiles(dir)}
	for _, p := range processes(dir) {
		h.Processes = append(h.Processes, p.String())
		if ns, err := os.Readlink(fmt.Sprintf("/proc/%d/ns/net", p.pid)); err == nil && !slices.Contains(h.Namespaces, ns) {
			h.Namespaces = append(h.Namespaces, ns)
		}
	}
	if own, err := os.Readlink("/proc/self/ns/net"); err == nil {
		h.Namespaces = slices.DeleteFunc(h.Namespaces, func(s string) bool { return s == own })
	}
	named, _ := os.ReadDir("/run/netns")
	for _, e := range named {
		h.Namespaces = append(h.Namespaces, "/run/netns/"+e.Name())
	}
	h.Mounts = linesWith("/proc/self/mountinfo", dir)
	h.Sockets = linesWith("/proc/net/unix", dir)
	loops, _ := filepath.Glob("/sys/block/loop*/loop/backing_file")
	for _, l := range loops {
		if b, err := os.ReadFile(l); err == nil && strings.Contains(string(b), dir+"/") {
			h.Loops = append(h.Loops, l+" "+strings.TrimSpace(string(b)))
		}
	}
	if _, err := os.Stat(memoryDir(dir)); err == nil {
		h.Memory = append(h.Memory, memoryDir(dir))
	}
	return h
}

// Less is what is in h and was not there before.
func (h Host) Less(before Host) map[string][]string {
	extra := map[string][]string{}
	diff := func(name string, now, was []string) {
		for _, s := range now {
			if !slices.Contains(was, s) {
				extra[name] = append(extra[name], s)
			}
		}
	}
	diff("processes", h.Processes, before.Processes)
	diff("network namespaces", h.Namespaces, before.Namespaces)
	diff("cgroups", h.Cgroups, before.Cgroups)
	diff("mounts", h.Mounts, before.Mounts)
	diff("sockets", h.Sockets, before.Sockets)
	diff("files", h.Files, before.Files)
	diff("nft rules", h.Rules, before.Rules)
	diff("loop devices", h.Loops, before.Loops)
	diff("directories in memory", h.Memory, before.Memory)
	return extra
}

// AssertHostClean demands that nothing of the world is left on the host. The
// server must have ended and all sandboxes with it.
func (w *World) AssertHostClean(t testing.TB) {
	t.Helper()
	var extra map[string][]string
	if poll(cleanWithin, func() bool {
		extra = HostNow(w.Dir).Less(w.before)
		return len(extra) == 0
	}) {
		return
	}
	for _, name := range slices.Sorted(maps.Keys(extra)) {
		t.Errorf("left on the host, %d %s:\n  %s", len(extra[name]), name, tail(strings.Join(extra[name], "\n  "), 2<<10))
	}
}

// AssertReconciled demands that the kernels on the host are the running
// sandboxes and the warm kernels, no more and no fewer, and that each has
// exactly one cgroup and directory.
func (w *World) AssertReconciled(t testing.TB) {
	t.Helper()
	var why string
	// Not t.Context: it is over in a cleanup, where this is mostly asked.
	if !poll(cleanWithin, func() bool { why = w.unreconciled(context.Background()); return why == "" }) {
		t.Errorf("host and record differ: %s", why)
	}
}

func (w *World) unreconciled(ctx context.Context) string {
	running, err := w.Running(ctx)
	if err != nil {
		return err.Error()
	}
	info, err := w.Info(ctx)
	if err != nil {
		return err.Error()
	}
	// Only a kernel that was given to a sandbox has a writable layer. After a
	// reset it soon has another, for the next one.
	kernels, held := w.Kernels(), 0
	running = slices.DeleteFunc(running, func(sb sandbox.Sandbox) bool { return sb.Standby == sandbox.Cold })
	for id := range kernels {
		if layers, _ := filepath.Glob(filepath.Join(w.Dir, "*", "k", id, "*.upper")); len(layers) > 2 {
			return fmt.Sprintf("kernel %s has the layers of old episodes: %v", id, layers)
		} else if len(layers) > 0 {
			held++
		}
	}
	spare, warm := len(kernels)-held, int(info.WarmKernels)
	// Blank kernels, made ahead for restores, are in no list.
	held -= int(info.HeldKernels) // restored ahead, with the layer of their checkpoint
	if held != len(running) || spare < warm || spare > warm+mostBlanks {
		return fmt.Sprintf("%d kernels on the host hold a sandbox and %d sandboxes run; %d hold none and %d are warm", held, len(running), spare, warm)
	}
	groups := map[string]bool{}
	for _, g := range cgroupsOf(w.Dir) {
		groups[filepath.Base(g)] = true
	}
	for id, pid := range kernels {
		if !groups[id] {
			return fmt.Sprintf("kernel %s (pid %d) has no cgroup", id, pid)
		}
		delete(groups, id)
	}
	if len(groups) > 0 {
		return fmt.Sprintf("cgroups without a kernel: %v", slices.Sorted(maps.Keys(groups)))
	}
	dirs := map[string]bool{}
	for _, f := range kernelFiles(w.Dir) {
		dirs[kernelOf(f)] = true
	}
	delete(dirs, "")
	for id := range dirs {
		if kernels[id] == 0 {
			return fmt.Sprintf("files of a kernel that does not run: %s", id)
		}
	}
	return ""
}

// Kernels are the sentries on the host: kernel id to pid.
func (w *World) Kernels() map[string]int {
	kernels := map[string]int{}
	for _, p := range processes(w.Dir) {
		// Stubs share the sentry's command line; the sentry leads the session.
		if sid, err := unix.Getsid(p.pid); err != nil || sid != p.pid || p.args[0] != "runsc-sandbox" {
			continue
		}
		for _, a := range p.args {
			if bundle, ok := strings.CutPrefix(a, "--bundle="); ok {
				kernels[filepath.Base(bundle)] = p.pid
			}
		}
	}
	return kernels
}

// DiskUsed is what kernels hold on the host's disk.
func (w *World) DiskUsed() int64 {
	var n int64
	for _, f := range kernelFiles(w.Dir) {
		var st unix.Stat_t
		if unix.Lstat(f, &st) == nil {
			n += st.Blocks * 512
		}
	}
	return n
}

// ServerMemory is the server's resident memory in bytes.
func (w *World) ServerMemory(t testing.TB) int64 {
	t.Helper()
	b, err := os.ReadFile(fmt.Sprintf("/proc/%d/statm", w.PID()))
	if err != nil {
		t.Fatal(err)
	}
	pages, err := strconv.ParseInt(strings.Fields(string(b))[1], 10, 64)
	if err != nil {
		t.Fatal(err)
	}
	return pages * int64(os.Getpagesize())
}

type hostProcess struct {
	pid  int
	args []string
}

func (p hostProcess) String() string { return fmt.Sprintf("%d %s", p.pid, strings.Join(p.args, " ")) }

// processes are those with dir in their command line: the server, sentries and
// their stubs. Zombies have no command line and do not count.
func processes(dir string) []hostProcess {
	var out []hostProcess
	paths, _ := filepath.Glob("/proc/[0-9]*/cmdline")
	for _, path := range paths {
		b, err := os.ReadFile(path)
		if err != nil || !strings.Contains(string(b), dir) {
			continue
		}
		pid, _ := strconv.Atoi(filepath.Base(filepath.Dir(path)))
		out = append(out, hostProcess{pid, strings.Split(strings.TrimRight(string(b), "\x00"), "\x00")})
	}
	return out
}

// cgroupsOf are the cgroups of kernels. The driver names its parent group by
// its directory, which is the data directory or one below.
func cgroupsOf(dir string) []string {
	dirs := []string{dir}
	for _, pattern := range []string{"*", "*/*"} {
		sub, _ := filepath.Glob(filepath.Join(dir, pattern))
		dirs = append(dirs, sub...)
	}
	var groups []string
	for _, d := range dirs {
		for _, parent := range cgroupParents(d) {
			ents, _ := os.ReadDir(parent)
			for _, e := range ents {
				if e.IsDir() {
					groups = append(groups, filepath.Join(parent, e.Name()))
				}
			}
		}
	}
	return groups
}

// cgroupParents are the groups a driver makes for its directory, on v1 and v2.
func cgroupParents(dir string) []string {
	sum := sha256.Sum256([]byte(dir))
	name := "cove-" + hex.EncodeToString(sum[:4])
	v2, _ := filepath.Glob("/sys/fs/cgroup/" + name)
	v1, _ := filepath.Glob("/sys/fs/cgroup/*/" + name)
	return append(v2, v1...)
}

// kernelFiles is all below the driver's directories of kernels ("k") and
// control sockets ("run").
func kernelFiles(dir string) []string {
	var files []string
	_ = filepath.WalkDir(dir, func(path string, e fs.DirEntry, err error) error {
		if err != nil {
			return nil // vanished meanwhile
		}
		if e.IsDir() && e.Name() == "images" {
			return fs.SkipDir
		}
		if kernelOf(path) != "" || e.Type()&fs.ModeSocket != 0 || filepath.Base(filepath.Dir(path)) == "run" {
			files = append(files, path)
		}
		return nil
	})
	return files
}

// kernelOf is the kernel a file belongs to: the element after "k".
func kernelOf(path string) string {
	parts := strings.Split(path, "/")
	for i, p := range parts[:len(parts)-1] {
		if p == "k" {
			return parts[i+1]
		}
	}
	return ""
}

func linesWith(file, dir string) []string {
	b, err := os.ReadFile(file)
	if err != nil {
		return nil
	}
	var out []string
	for _, l := range strings.Split(string(b), "\n") {
		if strings.Contains(l, dir) {
			out = append(out, l)
		}
	}
	return out
}

// nftRules is empty where there is no nft: Cove makes no rules without it.
func nftRules() []string {
	b, err := exec.Command("nft", "list", "ruleset").Output()
	if err != nil {
		return nil
	}
	return strings.Split(strings.TrimSpace(string(b)), "\n")
}

// poll asks until ok or the time has passed.
func poll(within time.Duration, ok func() bool) bool {
	deadline := time.Now().Add(within)
	for wait := 10 * time.Millisecond; ; wait = min(wait*2, 250*time.Millisecond) {
		if ok() {
			return true
		}
		if time.Now().After(deadline) {
			return false
		}
		time.Sleep(wait)
	}
}

// Eventually demands that ok becomes true.
func Eventually(t testing.TB, within time.Duration, what string, ok func() bool) {
	t.Helper()
	if !poll(within, ok) {
		t.Fatalf("not within %s: %s", within, what)
	}
}
