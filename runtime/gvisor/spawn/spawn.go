// Package spawn starts processes in namespaces of their own from a process that
// is small.
//
// Go starts a process in a new user namespace by a real fork: its tables of pages
// are copied, all threads wait for that, and afterwards every page that is
// written faults once more and interrupts all CPUs. Every other start shares the
// memory until the exec. Of a server with some hundred megabytes that forked for
// each boot, on 16 cores with 96 clients, a fifth of all CPU time went there, and
// its threads waited for their own address space: small snapshots took seconds.
//
// So a second process forks: runsc, started once, which holds nothing. It is
// told what to start over a socket, descriptors included, and is the parent of
// what it started; who wants to know of an end asks by pidfd. It goes with its
// socket. Rejected: CLONE_PARENT, so that the children are the server's own,
// which clone3, needed for the cgroup, does not take with Go's exit signal.
package spawn

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"runtime"
	"strconv"
	"sync"
	"syscall"

	specs "github.com/opencontainers/runtime-spec/specs-go"
	"golang.org/x/sys/unix"

	"github.com/cove-sandbox/cove/sandbox"
)

// Command is the argument that makes runsc a spawner.
const Command = "cove-spawner"

// apartFlag says that the process has mounts of its own, and what it needs of them.
const apartFlag = "--apart="

// hello is what a spawner says first. A runsc of another build says nothing or
// something else: it is to be changed with request and answer.
const hello = "cove-spawner 1"

// helloWait bounds the wait for it; a loaded machine needs a second.
const helloWait = 30 // seconds

// socketFD is where a spawner finds its socket.
const socketFD = 3

// maxRequest bounds a message: arguments are some kilobytes.
const maxRequest = 128 << 10

// maxFiles is what one message carries, by the kernel's SCM_MAX_FD.
const maxFiles = 253

// request is what to start. Descriptors travel beside it, in this order: where
// to answer, the cgroup if there is one, stdin, stdout and stderr as far as they
// are named, and the extra ones.
type request struct {
	Path       string
	Args, Env  []string
	Dir        string
	Attr       *syscall.SysProcAttr
	Namespaces []specs.LinuxNamespace
	Stdio      [3]bool
	Wait       bool // a second answer says how it ended
}

type answer struct {
	PID int    `json:",omitempty"`
	Err string `json:",omitempty"`
}

// Spawner starts processes by another one. Safe for concurrent use.
type Spawner struct {
	runsc string
	apart string

	mu struct {
		sync.Mutex
		closed bool
		socket *os.File // nil while none runs
		proc   *exec.Cmd
	}
}

// New returns one that starts its process when it is first needed.
//
// With a directory what it starts has the mounts that the machine had then, less those
// that come and go with sandboxes: a new namespace of mounts is a copy of them all, the
// networks of all sandboxes among them, so that with 6,600 of these the mounts alone
// took 8 GB. Mounts that the directory is on stay. "" is for what needs those of now.
func New(runsc, apart string) *Spawner { return &Spawner{runsc: runsc, apart: apart} }

// Ready starts the process if none runs, and says whether it is one of ours.
func (s *Spawner) Ready() error {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.runLocked()
}

// Start is cmd.Start in namespaces, as gVisor's specutils.StartInNS is. The
// process is not a child of the caller: cmd.Wait does not work.
func (s *Spawner) Start(cmd *exec.Cmd, nss []specs.LinuxNamespace) error {
	_, err := s.start(cmd, nss, false)
	return err
}

// StartWaited is Start with how it ends: wait is nil for a process that exited
// with 0, and is called once.
func (s *Spawner) StartWaited(cmd *exec.Cmd) (wait func() error, err error) {
	end, err := s.start(cmd, nil, true)
	if err != nil {
		return nil, err
	}
	return func() error {
		defer end.file.Close()
		var a answer
		if err := end.dec.Decode(&a); err != nil {
			return errors.New("how it ended is not known: the spawner died")
		}
		if a.Err != "" {
			return errors.New(a.Err)
		}
		return nil
	}, nil
}

// reply is where answers come from: a pid, and for who waits an end.
type reply struct {
	file *os.File
	dec  *json.Decoder
}

func (s *Spawner) start(cmd *exec.Cmd, nss []specs.LinuxNamespace, wait bool) (*reply, error) {
	r := request{Path: cmd.Path, Args: cmd.Args, Env: cmd.Env, Dir: cmd.Dir, Attr: cmd.SysProcAttr, Namespaces: nss, Wait: wait}
	var fds []int
	if a := cmd.SysProcAttr; a != nil && a.UseCgroupFD {
		fds = append(fds, a.CgroupFD)
	}
	for i, f := range []any{cmd.Stdin, cmd.Stdout, cmd.Stderr} {
		if f == nil {
			continue
		}
		file, ok := f.(*os.File)
		if !ok {
			return nil, fmt.Errorf("standard file %d is a %T and no file", i, f)
		}
		r.Stdio[i] = true
		fds = append(fds, int(file.Fd()))
	}
	for _, f := range cmd.ExtraFiles {
		fds = append(fds, int(f.Fd()))
	}
	in, pid, err := s.ask(r, fds)
	runtime.KeepAlive(cmd) // and the files with it
	if err != nil {
		return nil, err
	}
	if !wait {
		in.file.Close()
	}
	cmd.Process, err = os.FindProcess(pid)
	return in, err
}

func (s *Spawner) ask(r request, fds []int) (in *reply, pid int, err error) {
	body, err := json.Marshal(r)
	if err != nil {
		return nil, 0, err
	}
	if len(body) > maxRequest || len(fds) >= maxFiles {
		return nil, 0, fmt.Errorf("%d bytes of arguments and %d files are more than a spawner takes", len(body), len(fds))
	}
	ours, theirs, err := os.Pipe()
	if err != nil {
		return nil, 0, err
	}
	err = s.send(body, unix.UnixRights(append([]int{int(theirs.Fd())}, fds...)...))
	theirs.Close()
	if err != nil {
		ours.Close()
		return nil, 0, fmt.Errorf("asking the spawner: %w", err)
	}
	in = &reply{file: ours, dec: json.NewDecoder(ours)}
	var a answer
	switch err := in.dec.Decode(&a); {
	case errors.Is(err, io.EOF):
		err = errors.New("the spawner died")
		fallthrough
	case err != nil:
		ours.Close()
		return nil, 0, err
	case a.Err != "":
		ours.Close()
		return nil, 0, errors.New(a.Err)
	}
	return in, a.PID, nil
}

// send tries twice: the process may have been killed since.
func (s *Spawner) send(body, rights []byte) (err error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for range 2 {
		if err := s.runLocked(); err != nil {
			return err
		}
		for {
			err = unix.Sendmsg(int(s.mu.socket.Fd()), body, rights, nil, unix.MSG_NOSIGNAL)
			if !errors.Is(err, unix.EINTR) {
				break
			}
		}
		if err == nil {
			return nil
		}
		s.endLocked()
	}
	return err
}

func (s *Spawner) runLocked() error {
	if s.mu.closed {
		return os.ErrClosed
	}
	if s.mu.socket != nil {
		return nil
	}
	fds, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_SEQPACKET|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return err
	}
	ours, theirs := os.NewFile(uintptr(fds[0]), "spawner"), os.NewFile(uintptr(fds[1]), "spawner, its end")
	cmd := exec.Command(s.runsc, Command, "--socket-fd="+strconv.Itoa(socketFD)) // named: what is not is closed
	cmd.Env = []string{}
	cmd.Dir = "/"
	cmd.ExtraFiles = []*os.File{theirs}
	cmd.SysProcAttr = &syscall.SysProcAttr{Setsid: true} // Ctrl-C is the server's alone
	if s.apart != "" {
		cmd.Args = append(cmd.Args, apartFlag+s.apart)
		cmd.SysProcAttr.Unshareflags = unix.CLONE_NEWNS
	}
	err = cmd.Start()
	theirs.Close()
	if err != nil {
		ours.Close()
		return err
	}
	s.mu.socket, s.mu.proc = ours, cmd
	if said, err := hear(ours); err != nil || said != hello {
		_ = cmd.Process.Kill() // whatever it is, and if it has not ended by itself
		s.endLocked()
		return sandbox.Errorf(sandbox.Precondition, "gvisor.spawn", "%s is not of this cove's build: it does not start sentries", s.runsc).
			WithHint("run 'make build', or install cove and runsc of one build together")
	}
	return nil
}

// hear returns the first message; "" is an end without one.
func hear(socket *os.File) (string, error) {
	fd := int(socket.Fd())
	if err := unix.SetsockoptTimeval(fd, unix.SOL_SOCKET, unix.SO_RCVTIMEO, &unix.Timeval{Sec: helloWait}); err != nil {
		return "", err
	}
	said := make([]byte, 2*len(hello))
	for {
		n, _, err := unix.Recvfrom(fd, said, 0)
		if !errors.Is(err, unix.EINTR) {
			return string(said[:max(n, 0)]), err
		}
	}
}

func (s *Spawner) endLocked() {
	if s.mu.socket == nil {
		return
	}
	s.mu.socket.Close()
	_ = s.mu.proc.Wait() // it has nothing to say
	s.mu.socket, s.mu.proc = nil, nil
}

// Close ends the process; what it started lives on.
func (s *Spawner) Close() error {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.mu.closed = true
	s.endLocked()
	return nil
}
