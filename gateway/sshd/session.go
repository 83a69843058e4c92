package sshd

import (
	"context"
	"crypto/rand"
	"errors"
	"io"
	"net"
	"strings"
	"sync"
	"time"

	"golang.org/x/crypto/ssh"

	"github.com/cove-sandbox/cove/sandbox"
)

// shellLine is what a login gets.
const shellLine = `command -v bash >/dev/null 2>&1 && exec bash -l; exec sh -l`

const (
	maxEnv      = 128
	inputChunk  = 64 << 10
	hangUpGrace = 5 * time.Second // for telling a process that its terminal is gone
)

// session is one channel with at most one process.
type session struct {
	s    *Server
	id   string
	ch   ssh.Channel
	exec string // id of the process

	// Of the goroutine that takes requests, until the process starts.
	env  map[string]string
	size *sandbox.TermSize
}

func (s *Server) session(ctx context.Context, id string, nch ssh.NewChannel) {
	m, release, err := s.cfg.Backend.Machine(ctx, id)
	if err != nil {
		_ = nch.Reject(ssh.ConnectionFailed, plain(err))
		return
	}
	defer release()
	ch, reqs, err := nch.Accept()
	if err != nil {
		return
	}
	defer ch.Close()
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	ss := &session{s: s, id: id, ch: ch, exec: "ssh-" + sandbox.NewID(rand.Reader), env: map[string]string{}}
	var wg sync.WaitGroup
	defer wg.Wait()
	running := false
	ended := make(chan struct{})
	for {
		select {
		case r, ok := <-reqs:
			if !ok { // the client closed the channel, or is gone
				if running {
					hangUp(ctx, m, ss.exec, ended)
				}
				cancel()
				return
			}
			spec, accepted := ss.take(ctx, m, r, running)
			if r.WantReply {
				_ = r.Reply(accepted, nil)
			}
			if spec != nil && accepted {
				running = true
				wg.Go(func() { defer close(ended); ss.run(ctx, m, *spec) })
			}
		case <-ended:
			ch.Close()
			go ssh.DiscardRequests(reqs) // ends with the channel
			return
		}
	}
}

// hangUp tells a process that whoever watched it is gone, as a terminal does.
func hangUp(ctx context.Context, m Machine, exec string, ended <-chan struct{}) {
	select {
	case <-ended:
		return
	default:
	}
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), hangUpGrace)
	defer cancel()
	_ = m.Signal(ctx, exec, "SIGHUP", false) // it may have ended
}

// take answers one request; a spec is a process to start.
func (ss *session) take(ctx context.Context, m Machine, r *ssh.Request, running bool) (*sandbox.ProcessSpec, bool) {
	switch r.Type {
	case "env":
		var p struct{ Name, Value string }
		if running || ssh.Unmarshal(r.Payload, &p) != nil || len(ss.env) >= maxEnv {
			return nil, false
		}
		if sandbox.ValidateEnv("env", map[string]string{p.Name: p.Value}) != nil {
			return nil, false
		}
		ss.env[p.Name] = p.Value
		return nil, true
	case "pty-req":
		var p struct {
			Term                      string
			Cols, Rows, Width, Height uint32
			Modes                     string
		}
		if running || ssh.Unmarshal(r.Payload, &p) != nil {
			return nil, false
		}
		size := termSize(p.Cols, p.Rows)
		ss.size = &size
		if sandbox.ValidateEnv("env", map[string]string{"TERM": p.Term}) == nil && p.Term != "" {
			ss.env["TERM"] = p.Term
		}
		return nil, true
	case "window-change":
		var p struct{ Cols, Rows, Width, Height uint32 }
		if ss.size == nil || ssh.Unmarshal(r.Payload, &p) != nil {
			return nil, false
		}
		size := termSize(p.Cols, p.Rows)
		if !running {
			ss.size = &size
			return nil, true
		}
		return nil, m.Resize(ctx, ss.exec, size) == nil
	case "signal":
		var p struct{ Name string }
		if !running || ssh.Unmarshal(r.Payload, &p) != nil {
			return nil, false
		}
		return nil, m.Signal(ctx, ss.exec, "SIG"+strings.TrimPrefix(p.Name, "SIG"), false) == nil
	case "shell":
		return ss.spec(nil, shellLine), !running
	case "exec":
		var p struct{ Command string }
		if running || ssh.Unmarshal(r.Payload, &p) != nil || p.Command == "" {
			return nil, false
		}
		return ss.spec(nil, p.Command), true
	case "subsystem":
		var p struct{ Name string }
		if running || ssh.Unmarshal(r.Payload, &p) != nil || p.Name != "sftp" || ss.s.cfg.SFTP == nil {
			return nil, false
		}
		return ss.spec(ss.s.cfg.SFTP, ""), true
	}
	return nil, false
}

func (ss *session) spec(args []string, line string) *sandbox.ProcessSpec {
	return &sandbox.ProcessSpec{ExecID: ss.exec, Args: args, Command: line, Env: ss.env, Stdin: true, PTY: ss.size}
}

func termSize(cols, rows uint32) sandbox.TermSize {
	clamp := func(n, normal uint32) uint16 {
		if n == 0 {
			n = normal
		}
		return uint16(min(n, 10000))
	}
	return sandbox.TermSize{Cols: clamp(cols, 80), Rows: clamp(rows, 24)}
}

// run runs the process and tells the client how it ended.
func (ss *session) run(ctx context.Context, m Machine, spec sandbox.ProcessSpec) {
	var wg sync.WaitGroup
	defer wg.Wait()
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	defer ss.ch.Close() // upon which the client closes too, and the reader of input ends
	defer context.AfterFunc(ctx, func() { ss.ch.Close() })()
	var end *sandbox.ProcessEnd
	err := m.Start(ctx, spec, 0, func(ev sandbox.ProcessEvent) error {
		switch {
		case ev.Started != nil:
			wg.Go(func() { ss.input(ctx) })
		case ev.Output != nil:
			var w io.Writer = ss.ch
			if ev.Output.Stream == sandbox.Stderr {
				w = ss.ch.Stderr()
			}
			_, err := w.Write(ev.Output.Data)
			return err
		case ev.End != nil:
			end = ev.End
		}
		return nil
	})
	if err != nil && ctx.Err() == nil && !errors.Is(err, io.EOF) {
		_, _ = io.WriteString(ss.ch.Stderr(), "cove: "+plain(err)+"\r\n")
	}
	ss.tell(end)
}

// tell sends exit-status or exit-signal; 255 is what ssh itself says for trouble
// on the way.
func (ss *session) tell(end *sandbox.ProcessEnd) {
	_ = ss.ch.CloseWrite()
	if end != nil && end.Signal != "" {
		name := strings.TrimPrefix(end.Signal, "SIG")
		_, _ = ss.ch.SendRequest("exit-signal", false, ssh.Marshal(struct {
			Name     string
			CoreDump bool
			Message  string
			Lang     string
		}{name, false, string(end.Cause), ""}))
		return
	}
	status := uint32(255)
	if end != nil && end.Cause == sandbox.Exited {
		status = uint32(end.ExitCode) & 0xff
	}
	_, _ = ss.ch.SendRequest("exit-status", false, ssh.Marshal(struct{ Status uint32 }{status}))
}

// input carries what the client types, and its end. Either wakes a sandbox that
// was put to sleep under the session.
func (ss *session) input(ctx context.Context) {
	buf := make([]byte, inputChunk)
	awake := func(f func(Machine) error) error {
		m, release, err := ss.s.cfg.Backend.Machine(ctx, ss.id)
		if err != nil {
			return err
		}
		defer release()
		return f(m)
	}
	for {
		n, err := ss.ch.Read(buf)
		if n > 0 && awake(func(m Machine) error { return m.SendInput(ctx, ss.exec, buf[:n]) }) != nil {
			// The process has closed its stdin or ended: the rest is of no use, but
			// taken, since the client's window must not close under its output.
			_, _ = io.Copy(io.Discard, ss.ch)
			return
		}
		if err != nil {
			if err == io.EOF {
				_ = awake(func(m Machine) error { return m.CloseInput(ctx, ss.exec) })
			}
			return
		}
	}
}

// join copies both ways until both have ended or one has failed.
func join(ch ssh.Channel, c net.Conn) {
	var wg sync.WaitGroup
	wg.Go(func() {
		_, err := io.Copy(c, ch)
		if cw, ok := c.(interface{ CloseWrite() error }); err != nil || !ok || cw.CloseWrite() != nil {
			c.Close()
			ch.Close()
		}
	})
	wg.Go(func() {
		if _, err := io.Copy(ch, c); err != nil || ch.CloseWrite() != nil {
			c.Close()
			ch.Close()
		}
	})
	wg.Wait()
}
