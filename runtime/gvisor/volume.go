package gvisor

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"syscall"

	specs "github.com/opencontainers/runtime-spec/specs-go"
	"golang.org/x/sys/unix"
	"gvisor.dev/gvisor/runsc/specutils"

	"github.com/cove-sandbox/cove/runtime"
	"github.com/cove-sandbox/cove/sandbox"
)

// Volumes are host directories inside a user container. The image needs no
// file server, because the sentry maps it; a directory does: the sentry may not
// open host files by name. So a container with volumes has one `runsc gofer`
// process that does, and the sentry speaks lisafs to it over a socket for each
// mount. A container without volumes has none and pays nothing.
//
// directfs stays off. With it the sentry would hold the directory itself and
// open below it with openat(2), so that its seccomp filter must let openat
// through and the only thing between a broken sentry and the host's files would
// be the kernel's path walk. Without, a broken sentry can ask the gofer for what
// the protocol knows: names without slashes below a volume. The gofer's own root
// is a tmpfs with nothing on it but the volumes.
//
// Access is always revalidated ("shared"). gVisor's exclusive mode keeps dirty
// pages in the sentry after close(2), and a sentry ends by SIGKILL: what the
// sandbox wrote last would be lost. Shared, a write(2) that has returned is in
// the host's page cache, whatever becomes of the sandbox.

const (
	goferName = "runsc-gofer" // argv[0], by which it is found
	// goferFiles bounds what code inside can make its gofer hold open: the files
	// the sandbox has open, and directories on the way there.
	goferFiles = 1 << 16
	// maxVolumes is far over what is sensible; each is a socket and a mount.
	maxVolumes = 16
)

// volumeMounts is what a container with volumes adds to its start, and in the
// same order to its restore. The zero value adds nothing.
type volumeMounts struct {
	mounts []specs.Mount              // to append to spec.Mounts
	files  []*os.File                 // to append to the gofer files
	confs  []specutils.GoferMountConf // to append to the gofer confs
	added  []bool                     // which of them the checkpoint being restored does not have
	report *os.File                   // what a gofer that failed said
	pid    int
}

// close lets go of our copies of the sockets. The sentry has its own once the
// container is started; without one the gofer ends.
func (v *volumeMounts) close() {
	for _, f := range v.files {
		f.Close()
	}
	if v.report != nil {
		v.report.Close()
	}
}

// those are the mounts that were added to a checkpoint, or those it has. The files stay v's.
func (v *volumeMounts) those(added bool) (m volumeMounts) {
	for i, is := range v.added {
		if is == added {
			m.mounts, m.files, m.confs = append(m.mounts, v.mounts[i]), append(m.files, v.files[i]), append(m.confs, v.confs[i])
		}
	}
	return m
}

// explain adds what the gofer said to an error of the container that needs it.
func (v *volumeMounts) explain(err error) error {
	if err == nil || v.report == nil {
		return err
	}
	b, _ := io.ReadAll(io.LimitReader(io.NewSectionReader(v.report, 0, 4<<10), 4<<10))
	if len(b) == 0 {
		return err
	}
	return fmt.Errorf("%w; the volumes' file server: %s", err, strings.TrimSpace(string(b)))
}

// checkVolumes refuses what the mounts of the container do not allow.
func checkVolumes(vols []runtime.Volume) error {
	if len(vols) > maxVolumes {
		return sandbox.InvalidField("volumes", "%d volumes; at most %d", len(vols), maxVolumes)
	}
	for i, v := range vols {
		if !path.IsAbs(v.Target) || path.Clean(v.Target) != v.Target || v.Target == "/" || len(v.Target) > 255 || strings.ContainsRune(v.Target, 0) {
			return sandbox.InvalidField("volumes.target", "%q is not a clean absolute path below /", v.Target)
		}
		for _, own := range []string{"/proc", "/sys", "/dev"} {
			if within(own, v.Target) {
				return sandbox.InvalidField("volumes.target", "%q is in %s, which is the kernel's", v.Target, own)
			}
		}
		for _, w := range vols[:i] {
			// One in the other would make a directory of the one for the mount
			// point of the other, and fail if that is read-only.
			if within(v.Target, w.Target) || within(w.Target, v.Target) {
				return sandbox.InvalidField("volumes.target", "%q and %q are in one another", w.Target, v.Target)
			}
		}
		st, err := os.Lstat(v.Source)
		if err != nil || !st.IsDir() || !filepath.IsAbs(v.Source) {
			return sandbox.Errorf(sandbox.Precondition, "gvisor.volumes", "the volume for %s: no directory at %q", v.Target, v.Source)
		}
	}
	return nil
}

// within says whether p is dir or below it.
func within(dir, p string) bool { return p == dir || strings.HasPrefix(p, dir+"/") }

// serveVolumes starts the gofer of a container and returns what its start, or
// its restore, takes beside the root and the guest's mount. The caller closes
// it when the sentry has the files.
//
// The process starts stopped at a pipe, joins the kernel's cgroup (where
// Destroy and Sweep find it), and goes on. It ends by itself when the sentry or
// the container is gone: every socket of it then is. It outlives this process,
// as the kernel does.
func (k *Kernel) serveVolumes(vols []runtime.Volume, cid string) (_ *volumeMounts, err error) {
	m := &volumeMounts{}
	if len(vols) == 0 {
		return m, nil
	}
	if err := checkVolumes(vols); err != nil {
		return nil, err
	}
	defer func() {
		if err != nil {
			m.close()
		}
	}()
	// The gofer's own view: where the container has a volume is nothing it needs
	// to know, and no name the caller chose is a path on its side.
	spec := &specs.Spec{
		Version: specs.Version,
		Process: &specs.Process{Args: []string{goferName}, Cwd: "/"},
		Root:    &specs.Root{Path: filepath.Join(k.dir(), "empty"), Readonly: true},
		Linux:   &specs.Linux{},
	}
	confs := specutils.GoferMountConfFlags{{Lower: specutils.Erofs, Upper: specutils.NoOverlay}} // the root, not served
	var theirs []*os.File                                                                        // in the order of descriptors 3, 4, …
	defer func() {
		for _, f := range theirs {
			f.Close()
		}
	}()
	donate := func(f *os.File) string {
		theirs = append(theirs, f)
		return strconv.Itoa(2 + len(theirs))
	}
	var args []string
	for i, v := range vols {
		opts := []string{"nosuid", "nodev", "rw"}
		if v.ReadOnly {
			opts[2] = "ro"
		}
		conf := specutils.GoferMountConf{Lower: specutils.Lisafs, Upper: specutils.NoOverlay}
		spec.Mounts = append(spec.Mounts, specs.Mount{Destination: goferMount(i), Type: "bind", Source: v.Source, Options: append([]string{"bind"}, opts...)})
		confs = append(confs, conf)
		// dcache=0: names the sentry has seen but nothing holds open are not
		// kept. A restore looks up every name that is, and fails for one that
		// somebody has removed meanwhile; revalidated names gain little anyway.
		m.mounts = append(m.mounts, specs.Mount{Destination: v.Target, Type: "bind", Source: v.Source, Options: append(opts, "dcache=0")})
		m.confs = append(m.confs, conf)
		m.added = append(m.added, v.Added)
		ours, gofers, err := socketPair()
		if err != nil {
			return nil, err
		}
		m.files = append(m.files, ours)
		args = append(args, "--io-fds="+donate(gofers))
	}
	b, err := json.Marshal(spec)
	if err != nil {
		return nil, err
	}
	specFile, err := memFile("gofer spec", b)
	if err != nil {
		return nil, err
	}
	args = append(args, "--spec-fd="+donate(specFile))
	// Where it sends the mount points it has resolved, and whom it asks to open
	// what it may not: nobody.
	null, err := os.OpenFile(os.DevNull, os.O_WRONLY, 0)
	if err != nil {
		return nil, err
	}
	args = append(args, "--mounts-fd="+donate(null))
	nobody, rpc, err := socketPair()
	if err != nil {
		return nil, err
	}
	nobody.Close()
	args = append(args, "--rpc-fd="+donate(rpc))
	wait, sync, err := socketPair()
	if err != nil {
		return nil, err
	}
	defer wait.Close() // and the gofer goes on
	args = append(args, "--sync-chroot-fd="+donate(sync))
	if m.report, err = memFile("gofer report", nil); err != nil {
		return nil, err
	}

	conf := *k.d.conf
	conf.Debug, conf.DebugLog, conf.FDLimit = false, "", goferFiles
	cmd := &exec.Cmd{Path: k.goferProgram(), Env: []string{}, Dir: "/", Stderr: m.report, ExtraFiles: theirs}
	cmd.Args = slices.Concat([]string{goferName}, conf.ToFlags(),
		[]string{"gofer", "--bundle=" + k.dir(), "--gofer-mount-confs=" + confs.String()}, args, []string{cid})
	// Every user and group is itself in the gofer's user namespace: it serves
	// files of all of them. But its capabilities end there: they are none over
	// the host's, and opening files by handle, which leaves any chroot, is not
	// to be had in one.
	all := []syscall.SysProcIDMap{{Size: 1<<32 - 1}}
	cmd.SysProcAttr = &syscall.SysProcAttr{
		Setsid:      true,
		Cloneflags:  unix.CLONE_NEWUSER | unix.CLONE_NEWNS | unix.CLONE_NEWPID | unix.CLONE_NEWIPC | unix.CLONE_NEWUTS | unix.CLONE_NEWNET,
		UidMappings: all, GidMappings: all, GidMappingsEnableSetgroups: true,
		Credential: &syscall.Credential{},
	}
	group, err := k.d.groups.open(k.id)
	if err != nil {
		return nil, err
	}
	if group != nil {
		defer group.Close()
		cmd.SysProcAttr.UseCgroupFD, cmd.SysProcAttr.CgroupFD = true, int(group.Fd())
	}
	if err := k.recordVolumes(cid, vols); err != nil {
		return nil, err
	}
	ended, err := k.d.gofers.StartWaited(cmd)
	if err != nil {
		return nil, fmt.Errorf("starting the volumes' file server: %w", err)
	}
	m.pid = cmd.Process.Pid
	if err := k.watchGofer(m.pid, ended, cid); err != nil {
		return nil, errors.Join(err, cmd.Process.Kill(), ended())
	}
	if _, err := k.d.groups.join(k.id, m.pid); err != nil {
		return nil, errors.Join(err, unix.Kill(m.pid, unix.SIGKILL)) // watchGofer collects it
	}
	return m, nil
}

// goferProgram is the kernel's own runsc, or, where that was not kept, the
// current one: the two agree on the protocol when they connect.
func (k *Kernel) goferProgram() string {
	if isFile(k.programs.runsc) {
		return k.programs.runsc
	}
	return k.d.now.runsc
}

// socketPair is one connection.
func socketPair() (a, b *os.File, err error) {
	fds, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return nil, nil, err
	}
	return os.NewFile(uintptr(fds[0]), "socket"), os.NewFile(uintptr(fds[1]), "socket, other end"), nil
}

// memFile is a file without a name.
func memFile(name string, content []byte) (*os.File, error) {
	fd, err := unix.MemfdCreate(name, unix.MFD_CLOEXEC)
	if err != nil {
		return nil, err
	}
	f := os.NewFile(uintptr(fd), name)
	if _, err := f.WriteAt(content, 0); err != nil {
		return nil, errors.Join(err, f.Close())
	}
	return f, nil
}
