package spawn

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"os/signal"
	"sync"
	"syscall"

	specs "github.com/opencontainers/runtime-spec/specs-go"
	"golang.org/x/sys/unix"
)

// Starter starts a command in namespaces: specutils.StartInNS.
type Starter func(*exec.Cmd, []specs.LinuxNamespace) error

// Serve is the other process: it starts what the socket at descriptor 3 tells it
// to, until that is closed.
func Serve(start Starter) error {
	unix.CloseOnExec(socketFD)
	if err := leaveMounts(os.Args); err != nil {
		return err
	}
	if err := unix.Send(socketFD, []byte(hello), unix.MSG_NOSIGNAL); err != nil {
		return err
	}
	p := parent{start: start}
	p.mu.children = map[int]*os.File{}
	p.mu.early = map[int]string{}
	ended := make(chan os.Signal, 1)
	signal.Notify(ended, unix.SIGCHLD)
	go func() {
		for range ended {
			p.reap()
		}
	}()
	body, oob := make([]byte, maxRequest), make([]byte, unix.CmsgSpace(4*maxFiles))
	for {
		n, oobn, flags, _, err := unix.Recvmsg(socketFD, body, oob, unix.MSG_CMSG_CLOEXEC)
		switch {
		case errors.Is(err, unix.EINTR):
			continue
		case err != nil:
			return err
		case n == 0:
			return nil // what was just forked goes with the pipe that it waits on
		case flags&(unix.MSG_TRUNC|unix.MSG_CTRUNC) != 0:
			return errors.New("a request was cut")
		}
		files, err := received(oob[:oobn])
		if err != nil {
			return err
		}
		if len(files) == 0 {
			return errors.New("a request without a way to answer")
		}
		go p.serve(bytes.Clone(body[:n]), files)
	}
}

func received(oob []byte) (files []*os.File, err error) {
	msgs, err := unix.ParseSocketControlMessage(oob)
	if err != nil {
		return nil, err
	}
	for _, m := range msgs {
		fds, err := unix.ParseUnixRights(&m)
		if err != nil {
			return nil, err
		}
		for _, fd := range fds {
			files = append(files, os.NewFile(uintptr(fd), "donated"))
		}
	}
	return files, nil
}

// parent is what all started processes are children of.
type parent struct {
	start Starter

	mu struct {
		sync.Mutex
		children map[int]*os.File // who wants to know of its end; nil if nobody does
		early    map[int]string   // ends of those that are not yet in children
		starting int              // how many may yet come into children
	}
}

func (p *parent) serve(body []byte, files []*os.File) {
	out := files[0]
	p.mu.Lock()
	p.mu.starting++
	p.mu.Unlock()
	defer p.started()
	pid, wait, err := p.spawn(body, files[1:])
	a := answer{PID: pid}
	if err != nil {
		a.Err = err.Error()
	}
	_ = json.NewEncoder(out).Encode(a) // who asked has gone if it fails
	if err != nil || !wait {
		out.Close()
		out = nil
	}
	if err == nil {
		p.began(pid, out)
	}
}

func (p *parent) spawn(body []byte, files []*os.File) (pid int, wait bool, err error) {
	defer func() {
		for _, f := range files {
			f.Close()
		}
	}()
	var r request
	if err := json.Unmarshal(body, &r); err != nil {
		return 0, false, err
	}
	cmd := &exec.Cmd{Path: r.Path, Args: r.Args, Env: r.Env, Dir: r.Dir, SysProcAttr: r.Attr}
	rest := files
	take := func() *os.File {
		if len(rest) == 0 {
			err = errors.New("a request with too few files")
			return nil
		}
		f := rest[0]
		rest = rest[1:]
		return f
	}
	if r.Attr != nil && r.Attr.UseCgroupFD {
		r.Attr.CgroupFD = int(take().Fd())
	}
	if r.Stdio[0] {
		cmd.Stdin = take()
	}
	if r.Stdio[1] {
		cmd.Stdout = take()
	}
	if r.Stdio[2] {
		cmd.Stderr = take()
	}
	cmd.ExtraFiles = rest
	if err != nil {
		return 0, false, err
	}
	if err := p.start(cmd, r.Namespaces); err != nil {
		return 0, false, err
	}
	pid = cmd.Process.Pid
	return pid, r.Wait, cmd.Process.Release()
}

// started forgets ends that are nobody's: a fork whose exec fails is collected by
// who is faster, and its number is another's one day, whose end it is not.
func (p *parent) started() {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.mu.starting--; p.mu.starting == 0 {
		clear(p.mu.early)
	}
}

func (p *parent) began(pid int, out *os.File) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if end, over := p.mu.early[pid]; over {
		delete(p.mu.early, pid)
		tell(out, end)
		return
	}
	p.mu.children[pid] = out
}

// reap collects all children that have ended. One signal may stand for many.
func (p *parent) reap() {
	for {
		var ws unix.WaitStatus
		pid, err := unix.Wait4(-1, &ws, unix.WNOHANG, nil)
		if errors.Is(err, unix.EINTR) {
			continue
		}
		if err != nil || pid <= 0 {
			return
		}
		p.ended(pid, describe(ws))
	}
}

func (p *parent) ended(pid int, end string) {
	p.mu.Lock()
	defer p.mu.Unlock()
	out, known := p.mu.children[pid]
	if !known {
		p.mu.early[pid] = end
		return
	}
	delete(p.mu.children, pid)
	tell(out, end)
}

// tell may fail: who waited has gone.
func tell(out *os.File, end string) {
	if out != nil {
		_ = json.NewEncoder(out).Encode(answer{Err: end})
		out.Close()
	}
}

// describe is "" for an exit with 0.
func describe(ws unix.WaitStatus) string {
	switch {
	case ws.Signaled():
		return "signal: " + syscall.Signal(ws.Signal()).String()
	case ws.ExitStatus() != 0:
		return fmt.Sprintf("exit status %d", ws.ExitStatus())
	}
	return ""
}
