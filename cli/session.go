package cli

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"connectrpc.com/connect"
	"github.com/spf13/cobra"
	"golang.org/x/term"

	covev1 "github.com/cove-sandbox/cove/api/cove/v1"
	"github.com/cove-sandbox/cove/sandbox"
)

// processFlags are what a process can be asked for; run and exec share them.
type processFlags struct {
	interactive, tty bool
	user, cwd        string
}

func addProcessFlags(cmd *cobra.Command, f *processFlags) {
	fs := cmd.Flags()
	fs.BoolVarP(&f.interactive, "interactive", "i", false, "pass stdin on")
	fs.BoolVarP(&f.tty, "tty", "t", false, "run on a terminal")
	fs.StringVarP(&f.user, "user", "u", "", "user name or uid, with :group or :gid (default: the image's)")
	fs.StringVarP(&f.cwd, "cwd", "w", "", "working directory (default: the image's)")
}

// session is one foreground process: its output on ours, our stdin, signals
// and terminal on its.
type session struct {
	app   *app
	flags processFlags
	// onOutput, when set, gets the output in place of our own streams; onEnd the
	// end, and with it what the network denied, which is told otherwise.
	onOutput func(*covev1.ProcessOutput) error
	onEnd    func(*covev1.ProcessEnd) error
	// removed is set where nobody can look at the sandbox afterwards.
	removed bool
	// grace, when set, is how long a process may outlive the first signal
	// before it is killed: run must come to its removal.
	grace time.Duration

	sigs <-chan os.Signal // taken already by who runs it; nil = not yet

	signalled atomic.Bool // a signal was passed on
	// killOnCancel has the server end the process when we are gone without a word.
	killOnCancel bool
}

// sessionSignals are those that a session passes on.
var sessionSignals = []os.Signal{os.Interrupt, syscall.SIGTERM, syscall.SIGHUP, syscall.SIGQUIT}

// run starts the process and returns when it has ended. Its end is in the
// error, as exitOf says it.
func (s *session) run(ctx context.Context, sandboxID string, spec *covev1.ProcessSpec) error {
	a := s.app
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	if spec.ExecId == "" {
		spec.ExecId = newExecID()
	}
	spec.User, spec.Cwd, spec.Stdin = s.flags.user, s.flags.cwd, s.flags.interactive

	var winch <-chan os.Signal
	if s.flags.tty {
		fd, ok := terminal(a.Stdin)
		if !ok && s.flags.interactive {
			return usagef("leave out -t, or run it in a terminal", "stdin is not a terminal")
		}
		if spec.Env == nil {
			spec.Env = map[string]string{}
		}
		if t := a.Getenv("TERM"); t != "" && spec.Env["TERM"] == "" {
			spec.Env["TERM"] = t
		}
		spec.Pty = a.termSize()
		if ok {
			restore, err := a.rawTerminal(fd)
			if err != nil {
				return err
			}
			defer restore()
		}
		c, stop := a.Notify(syscall.SIGWINCH)
		defer stop()
		winch = c
	}
	sigs := s.sigs
	if sigs == nil {
		c, stop := a.Notify(sessionSignals...)
		defer stop()
		sigs = c
	}

	// Taken, so that a closed pipe behind us is an error we can act on and not
	// our death with a sandbox left behind.
	_, stopPipe := a.Notify(syscall.SIGPIPE)
	defer stopPipe()

	started := make(chan struct{})
	output := s.onOutput
	if output == nil {
		output = a.toStdio
	}
	f := &follower{
		app: a, sandbox: sandboxID, execID: spec.ExecId, spec: spec, onOutput: output, killOnCancel: s.killOnCancel,
		onStart: func(*covev1.ProcessStarted) { close(started) },
	}
	p := &remote{app: a, sandbox: sandboxID, exec: spec.ExecId}
	var wg sync.WaitGroup
	defer wg.Wait()
	// Before the wait: a stream that has ended ends the two below.
	ended, cancelEnded := context.WithCancel(ctx)
	defer cancelEnded()
	wg.Add(1)
	go func() { defer wg.Done(); s.signals(ended, cancel, started, sigs, winch, p) }()
	if s.flags.interactive {
		// Not waited for: a read of a terminal cannot be interrupted, it ends
		// with the next key or with our process.
		go s.input(ended, cancel, started, p)
	}

	end, err := f.run(ctx)
	if errors.Is(err, errNoReader) {
		// What it would have got had it written to the pipe itself.
		sctx, cancelSignal := context.WithTimeout(ctx, 5*time.Second)
		defer cancelSignal()
		p.signal(sctx, "SIGPIPE")
		return err
	}
	if err != nil {
		if cause := context.Cause(ctx); cause != nil && !errors.Is(cause, context.Canceled) {
			return cause
		}
		return err
	}
	if s.onEnd == nil {
		s.tellDenied(sandboxID, end)
	} else if err := s.onEnd(end); err != nil {
		return err
	}
	err = exitOf(end.GetEnd())
	var exit *ExitError
	if sandbox.Cause(end.GetEnd().GetCause()) == sandbox.KilledByUser && s.signalled.Load() && errors.As(err, &exit) {
		return &ExitError{Code: exit.Code} // who pressed Ctrl-C knows why it ended
	}
	return err
}

// tellDenied says what the network refused while the process ran. Code inside
// sees a connection that is reset, or a name that does not exist, and its error
// rarely tells why.
func (s *session) tellDenied(id string, end *covev1.ProcessEnd) {
	tell := func(n int64, one, many, look string) {
		if n == 0 {
			return
		}
		what := fmt.Sprintf("%d %s", n, many)
		if n == 1 {
			what = "1 " + one
		}
		if s.removed {
			look = "with --keep, " + look
		}
		s.app.warnf("%s ("+look+")", what, id)
	}
	tell(end.GetEgressDenied(), "connection or lookup was denied by the network policy", "connections or lookups were denied by the network policy", "'cove net flows --denied %s' lists them")
	tell(end.GetReplayMissed(), "request has no answer on the recording", "requests have no answer on the recording", "'cove net get %s' lists them")
}

// errLeft is the third signal: the user wants out, whatever the process does.
var errLeft = &ExitError{Code: 128 + int(syscall.SIGINT)}

// signals passes on what we are sent. The second signal kills, the third
// leaves.
func (s *session) signals(ctx context.Context, leave context.CancelCauseFunc, started <-chan struct{}, sigs, winch <-chan os.Signal, p *remote) {
	var grace <-chan time.Time
	n := 0
	for {
		select {
		case <-ctx.Done():
			return
		case <-winch:
			if size := s.app.termSize(); size != nil {
				p.resize(ctx, size)
			}
		case <-grace:
			p.signal(ctx, "SIGKILL")
			grace = nil
		case sig := <-sigs:
			select {
			case <-started:
			default:
				leave(errLeft) // nothing to signal yet
				return
			}
			s.signalled.Store(true)
			switch n++; n {
			case 1:
				p.signal(ctx, signalName(sig))
				if s.grace > 0 {
					grace = time.After(s.grace)
				}
			case 2:
				p.signal(ctx, "SIGKILL")
			default:
				leave(errLeft)
				return
			}
		}
	}
}

func signalName(s os.Signal) string {
	switch s {
	case syscall.SIGTERM:
		return "SIGTERM"
	case syscall.SIGHUP:
		return "SIGHUP"
	case syscall.SIGQUIT:
		return "SIGQUIT"
	}
	return "SIGINT"
}

// input sends our stdin. A chunk whose fate is unknown is never sent again:
// SendInput has no offset, and twice is worse than an error. On a terminal a
// lost key shows by its missing echo and the session goes on; a pipe with a
// hole in it must not.
func (s *session) input(ctx context.Context, leave context.CancelCauseFunc, started <-chan struct{}, p *remote) {
	select {
	case <-started:
	case <-ctx.Done():
		return
	}
	buf := make([]byte, 64<<10)
	for {
		n, err := s.app.Stdin.Read(buf)
		if n > 0 {
			switch serr := p.send(ctx, buf[:n]); {
			case serr == nil:
			case ctx.Err() != nil:
				return
			case errors.Is(serr, sandbox.ErrNotFound), errors.Is(serr, sandbox.ErrPrecondition):
				return // it has ended or closed its stdin; the stream says how it goes on
			case s.flags.tty:
			default:
				leave(&ExitError{Code: exitCove, Err: serr})
				return
			}
		}
		if err != nil {
			if s.flags.tty && errors.Is(err, io.EOF) {
				_ = p.send(ctx, []byte{4}) // a terminal's stdin is closed with ^D
				return
			}
			_ = p.close(ctx)
			return
		}
	}
}

// remote is the process seen from here.
type remote struct {
	app           *app
	sandbox, exec string
}

func (p *remote) send(ctx context.Context, data []byte) error {
	_, err := p.app.api.Processes.SendInput(ctx, connect.NewRequest(&covev1.SendInputRequest{SandboxId: p.sandbox, ExecId: p.exec, Data: data}))
	return err
}

func (p *remote) close(ctx context.Context) error {
	_, err := p.app.api.Processes.CloseInput(ctx, connect.NewRequest(&covev1.CloseInputRequest{SandboxId: p.sandbox, ExecId: p.exec}))
	return err
}

func (p *remote) signal(ctx context.Context, name string) {
	_, err := p.app.api.Processes.Signal(ctx, connect.NewRequest(&covev1.SignalRequest{SandboxId: p.sandbox, ExecId: p.exec, Signal: name}))
	if err != nil && ctx.Err() == nil {
		p.app.warnf("could not send %s: %v", name, err)
	}
}

func (p *remote) resize(ctx context.Context, size *covev1.TermSize) {
	_, _ = p.app.api.Processes.Resize(ctx, connect.NewRequest(&covev1.ResizeRequest{SandboxId: p.sandbox, ExecId: p.exec, Size: size}))
}

// termSize is that of the terminal on stdout, else stdin, else 80x24.
func (a *app) termSize() *covev1.TermSize {
	for _, v := range []any{a.Stdout, a.Stdin} {
		if fd, ok := terminal(v); ok {
			if cols, rows, err := term.GetSize(fd); err == nil && cols > 0 && rows > 0 {
				return &covev1.TermSize{Rows: uint32(rows), Cols: uint32(cols)}
			}
		}
	}
	return &covev1.TermSize{Rows: 24, Cols: 80}
}

// rawTerminal hands every key to the process inside. Until restore, our own
// messages need their carriage returns.
func (a *app) rawTerminal(fd int) (restore func(), err error) {
	state, err := term.MakeRaw(fd)
	if err != nil {
		return nil, err
	}
	stderr := a.Stderr
	a.Stderr = crlf{stderr}
	return func() {
		a.Stderr = stderr
		_ = term.Restore(fd, state)
	}, nil
}

type crlf struct{ w io.Writer }

func (c crlf) Write(p []byte) (int, error) {
	if _, err := io.WriteString(c.w, strings.ReplaceAll(string(p), "\n", "\r\n")); err != nil {
		return 0, err
	}
	return len(p), nil
}
