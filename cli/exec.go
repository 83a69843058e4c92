package cli

import (
	"bytes"
	"context"
	"fmt"
	"strings"
	"time"
	"unicode/utf8"

	"connectrpc.com/connect"
	"github.com/spf13/cobra"

	covev1 "github.com/cove-sandbox/cove/api/cove/v1"
)

func (a *app) execCmd() *cobra.Command {
	var pf processFlags
	var env keyValues
	var timeout duration
	var execID, line string
	var detach, asJSON, killOnCancel bool
	env.bare = func(k string) (string, bool) { v := a.Getenv(k); return v, v != "" }
	cmd := &cobra.Command{
		Use:   "exec [flags] ID -- COMMAND [ARG...]",
		Short: "Run a command in a sandbox; ends with its exit code",
		Long: `Run a command in a sandbox. Ends with the command's exit code, 124 when its
--timeout passed, 128+n when signal n ended it, 127 when there is no such
command, 126 when it cannot be executed, 125 when Cove itself failed.

Ctrl-C is passed on; a second one kills the command, a third one leaves. When
this program is killed or its machine is lost, the command runs on, unless
--kill-on-cancel is given.
When the connection breaks it is taken up again where it broke: nothing runs
twice and no output is lost. The same holds between two calls with the same
--exec-id: the second attaches to the first and replays its output.

With --json the output is not passed on as it comes: when the command has ended,
one object with its stdout, stderr and end is printed.`,
		Example: `  cove exec $id -- make test
  cove exec -it $id -- bash
  cove exec -c 'ls | wc -l' $id
  cove exec --detach $id -- python3 -m http.server`,
		Annotations:       map[string]string{ownSignals: "1", ownCode: "1"},
		ValidArgsFunction: a.liveIDs(1),
		Args:              cobra.ArbitraryArgs,
		RunE: func(cmd *cobra.Command, args []string) error {
			if len(args) == 0 {
				return usage(cmd, fmt.Errorf("which sandbox?"))
			}
			command, err := commandOf(cmd, args[1:])
			if err != nil {
				return err
			}
			if (len(command) > 0) == (line != "") {
				return usage(cmd, fmt.Errorf("give a command after the sandbox id, or a line for its shell with -c"))
			}
			ctx := cmd.Context()
			id, err := a.resolveID(ctx, args[0])
			if err != nil {
				return err
			}
			spec := &covev1.ProcessSpec{ExecId: execID, Args: command, Command: line, Env: env.m, Timeout: timeout.proto()}
			if detach && killOnCancel {
				return usagef("leave out one of them", "--detach leaves it running, --kill-on-cancel does not")
			}
			if detach {
				return a.startDetached(cmd, id, spec, pf, asJSON)
			}
			if asJSON {
				return a.execCaptured(ctx, id, spec, pf, killOnCancel)
			}
			s := &session{app: a, flags: pf, killOnCancel: killOnCancel}
			return s.run(ctx, id, spec)
		},
	}
	addProcessFlags(cmd, &pf)
	fs := cmd.Flags()
	// What follows the id belongs to the command, with or without "--".
	fs.SetInterspersed(false)
	fs.VarP(&env, "env", "e", "variable for the command; KEY alone takes the local value (repeatable)")
	fs.Var(&timeout, "timeout", "kill the command and its children after this long (default: never)")
	fs.StringVar(&execID, "exec-id", "", "name of this run: the same id never runs twice in a sandbox")
	fs.StringVarP(&line, "command", "c", "", "a line for the sandbox's shell instead of a command")
	fs.BoolVar(&killOnCancel, "kill-on-cancel", false, "kill the command 30 s after this program is gone without a word (default: it runs on)")
	fs.BoolVarP(&detach, "detach", "d", false, "print the exec id and leave it running")
	fs.BoolVar(&asJSON, "json", false, "print output and end as JSON when it has ended; with --detach what was started")
	return cmd
}

// commandOf takes the optional "--" off and catches flags in the wrong place.
func commandOf(cmd *cobra.Command, args []string) ([]string, error) {
	if len(args) > 0 && args[0] == "--" {
		return args[1:], nil
	}
	if len(args) > 0 && strings.HasPrefix(args[0], "-") {
		return nil, usagef("put "+args[0]+" before it: "+cmd.UseLine(), "flag %s after the first argument", args[0])
	}
	return args, nil
}

// executedJSON is a command that ran to its end. Output that is not UTF-8, which
// JSON has no words for, is in the field of bytes instead.
type executedJSON struct {
	SandboxID    string   `json:"sandbox_id"`
	ExecID       string   `json:"exec_id"`
	Stdout       *string  `json:"stdout,omitempty"`
	StdoutBase64 []byte   `json:"stdout_base64,omitempty"`
	Stderr       *string  `json:"stderr,omitempty"`
	StderrBase64 []byte   `json:"stderr_base64,omitempty"`
	Truncated    bool     `json:"truncated,omitempty"`
	End          *endJSON `json:"end"`
	DurationS    float64  `json:"duration_s"`
	OutputBytes  int64    `json:"output_bytes"`
	EgressDenied int64    `json:"egress_denied,omitempty"`
	ReplayMissed int64    `json:"replay_missed,omitempty"`
}

// maxCaptured bounds the output that is held for --json, both streams together;
// the rest is read and dropped, so that the command comes to its end.
const maxCaptured = 16 << 20

// execCaptured runs a command and prints it as JSON when it has ended.
func (a *app) execCaptured(ctx context.Context, id string, spec *covev1.ProcessSpec, pf processFlags, killOnCancel bool) error {
	if pf.tty {
		return usagef("leave out -t or --json", "--json keeps stdout and stderr apart, which a terminal does not")
	}
	var stdout, stderr bytes.Buffer
	s := &session{app: a, flags: pf, killOnCancel: killOnCancel}
	s.onOutput = func(o *covev1.ProcessOutput) error {
		to, free := &stdout, maxCaptured-stdout.Len()-stderr.Len()
		if o.GetStream() == covev1.OutputStream_OUTPUT_STREAM_STDERR {
			to = &stderr
		}
		to.Write(o.GetData()[:min(free, len(o.GetData()))])
		return nil
	}
	s.onEnd = func(e *covev1.ProcessEnd) error {
		j := executedJSON{SandboxID: id, ExecID: spec.ExecId, End: toEndJSON(e.GetEnd()), DurationS: e.GetDuration().AsDuration().Seconds(), OutputBytes: e.GetOutputBytes(),
			// Beside ours, what the server no longer held when the connection had broken.
			Truncated:    int64(stdout.Len()+stderr.Len()) < e.GetOutputBytes(),
			EgressDenied: e.GetEgressDenied(), ReplayMissed: e.GetReplayMissed()}
		j.Stdout, j.StdoutBase64 = textOrBytes(stdout.Bytes())
		j.Stderr, j.StderrBase64 = textOrBytes(stderr.Bytes())
		return a.printJSON(j)
	}
	return s.run(ctx, id, spec)
}

func textOrBytes(b []byte) (*string, []byte) {
	if !utf8.Valid(b) {
		return nil, b
	}
	s := string(b)
	return &s, nil
}

type detachedJSON struct {
	SandboxID string `json:"sandbox_id"`
	ExecID    string `json:"exec_id"`
	PID       int32  `json:"pid"`
	Replayed  bool   `json:"replayed"`
}

// startDetached returns as soon as the process runs. Leaving the stream does
// not end it.
func (a *app) startDetached(cmd *cobra.Command, id string, spec *covev1.ProcessSpec, pf processFlags, asJSON bool) error {
	if pf.interactive {
		return usagef("", "--detach leaves no one to read stdin: leave out -i")
	}
	spec.User, spec.Cwd = pf.user, pf.cwd
	if pf.tty {
		spec.Pty = a.termSize()
	}
	if spec.ExecId == "" {
		spec.ExecId = newExecID()
	}
	var got *covev1.ProcessStarted
	f := &follower{app: a, sandbox: id, execID: spec.ExecId, spec: spec,
		onStart:  func(s *covev1.ProcessStarted) { got = s },
		onOutput: func(*covev1.ProcessOutput) error { return nil },
		stop:     func() bool { return got != nil },
	}
	if _, err := f.run(cmd.Context()); err != nil {
		return err
	}
	if asJSON {
		return a.printJSON(detachedJSON{SandboxID: id, ExecID: f.execID, PID: got.GetPid(), Replayed: got.GetReplayed()})
	}
	_, err := fmt.Fprintln(a.Stdout, f.execID)
	return err
}

func (a *app) logsCmd() *cobra.Command {
	var follow bool
	var offset int64
	cmd := &cobra.Command{
		Use:   "logs ID [EXEC]",
		Short: "Print the output of a process started through the API (default: the latest)",
		Long: `Print the output a process has produced and the server still holds, stdout to
stdout and stderr to stderr. --offset skips bytes, counted over both streams.
Without --follow it stops at what there is.`,
		Args: cobra.RangeArgs(1, 2), ValidArgsFunction: a.liveIDs(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			ctx := cmd.Context()
			id, err := a.resolveID(ctx, args[0])
			if err != nil {
				return err
			}
			p, err := a.findProcess(cmd, id, args[1:])
			if err != nil {
				return err
			}
			f := &follower{app: a, sandbox: id, execID: p.GetExecId(), offset: offset, onOutput: a.toStdio}
			if !follow && p.GetEnd() == nil {
				return a.upToNow(cmd, f)
			}
			_, err = f.run(ctx)
			return err
		},
	}
	cmd.Flags().BoolVarP(&follow, "follow", "f", false, "go on until the process ends")
	cmd.Flags().Int64Var(&offset, "offset", 0, "start at this byte")
	return cmd
}

// quiet is how long a running process's stream must be silent to count as read
// up to now: the stream has no mark for it, and a held buffer is sent at once.
const quiet = 250 * time.Millisecond

func (a *app) upToNow(cmd *cobra.Command, f *follower) error {
	api := a.api
	ctx, cancel := contextWithIdle(cmd.Context(), quiet)
	defer cancel.stop() // twice is fine
	s, err := api.Processes.Attach(ctx, connect.NewRequest(&covev1.AttachProcessRequest{SandboxId: f.sandbox, ExecId: f.execID, Offset: f.offset}))
	if err != nil {
		return err
	}
	defer func() { cancel.stop(); s.Close() }()
	for s.Receive() {
		cancel.touch()
		if o := s.Msg().GetOutput(); o != nil {
			if err := f.output(o); err != nil {
				return err
			}
		}
		if l := s.Msg().GetLost(); l != nil {
			a.warnf("%d bytes of output are no longer held by the server", l.GetTo()-l.GetFrom())
			f.offset = l.GetTo()
		}
	}
	if cancel.fired() && cmd.Context().Err() == nil {
		return nil
	}
	return s.Err()
}

// findProcess picks the process logs is asked for: by id or unique prefix, or
// the one started last.
func (a *app) findProcess(cmd *cobra.Command, id string, args []string) (*covev1.Process, error) {
	api, err := a.client()
	if err != nil {
		return nil, err
	}
	resp, err := api.Processes.List(cmd.Context(), connect.NewRequest(&covev1.ListProcessesRequest{SandboxId: id}))
	if err != nil {
		return nil, err
	}
	var hits []*covev1.Process
	for _, p := range resp.Msg.GetProcesses() {
		switch {
		case len(args) == 1 && p.GetExecId() == args[0]:
			return p, nil
		case len(args) == 0 || strings.HasPrefix(p.GetExecId(), args[0]):
			hits = append(hits, p)
		}
	}
	switch {
	case len(hits) == 0 && len(args) == 0:
		return nil, usagef("'cove exec' starts one", "no process was started in %s", id)
	case len(hits) == 0:
		return nil, usagef("'cove ps --all "+id+"' lists them", "no process %s in %s", args[0], id)
	case len(hits) > 1 && len(args) == 1:
		return nil, usagef("'cove ps --all "+id+"' lists them", "%q is the start of more than one exec id", args[0])
	}
	latest := hits[0]
	for _, p := range hits[1:] {
		if timeOf(p.GetStartedAt()).After(timeOf(latest.GetStartedAt())) {
			latest = p
		}
	}
	if len(hits) > 1 {
		a.warnf("%d processes; this is the latest, %s", len(hits), latest.GetExecId())
	}
	return latest, nil
}
