package cli

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"strings"
	"syscall"
	"time"

	"connectrpc.com/connect"
	"github.com/spf13/cobra"

	covev1 "github.com/cove-sandbox/cove/api/cove/v1"
	"github.com/cove-sandbox/cove/batch"
	"github.com/cove-sandbox/cove/sandbox"
)

type batchFlags struct {
	spec            specFlags
	process         processFlags
	out             string
	parallel        int
	retries, onExit int
	reuse, ordered  bool
	json            bool
	keepOutput      size
}

func (a *app) batchCmd() *cobra.Command {
	var f batchFlags
	cmd := &cobra.Command{
		Use:   "batch [flags] [FILE...] -- COMMAND [ARG...]",
		Short: "Run a command for each line of input, many sandboxes at a time",
		Long: `Run a command once for each line of the files, or of stdin, in a sandbox of its
own. A line is the command's stdin, and takes the place of {} in its arguments.

Results are JSON lines, as they come: index, input, status (ok, failed, error),
cause, exit_code, stdout, stderr, attempts, duration_s. With --out they go to a
file, which is also what the batch knows of itself: the same call again does what
is left, after Ctrl-C, a crash, or a restart of the server. An input whose status
is "error" (Cove failed it, not its command) counts as left.

A command that fails is a result. What Cove fails is tried again, --retries times.
On a full node the batch waits. Ends with 0 when every input is ok, 1 when some
are not, 130 after Ctrl-C; no sandbox is left in any case.`,
		Example: `  seq 1000 | cove batch --network none -- sh -c 'echo $(( {} * {} ))'
  cove batch inputs.jsonl --out results.jsonl --parallel 200 --timeout 60s -- python3 -c 'import json,sys; print(len(json.load(sys.stdin)))'
  cove batch inputs.jsonl --out results.jsonl --reuse --image tests -- pytest -q {}`,
		Annotations: map[string]string{ownSignals: "1"},
		Args:        cobra.ArbitraryArgs,
		RunE: func(cmd *cobra.Command, args []string) error {
			dash := cmd.ArgsLenAtDash()
			if dash < 0 || dash == len(args) {
				return usage(cmd, fmt.Errorf("which command? It comes after --"))
			}
			return a.batch(cmd.Context(), f, args[:dash], args[dash:])
		},
	}
	a.addSpecFlags(cmd, &f.spec)
	addProcessFlags(cmd, &f.process)
	fs := cmd.Flags()
	for _, none := range []string{"interactive", "tty", "lease", "idempotency-key", "on-idle", "idle-timeout"} {
		_ = fs.MarkHidden(none)
	}
	fs.Lookup("timeout").Usage = "kill the command of an input after this long: its status is failed, its cause deadline (default: never)"
	fs.StringVarP(&f.out, "out", "o", "", "file of results, which a batch that was cut off goes on with (default: stdout, from the beginning)")
	fs.IntVarP(&f.parallel, "parallel", "p", 0, "sandboxes at a time (default: 4 for each core of the server)")
	fs.IntVar(&f.retries, "retries", 3, "further tries of an input that Cove failed")
	fs.IntVar(&f.onExit, "retry-failed", 0, "further tries of an input whose command failed")
	fs.BoolVar(&f.reuse, "reuse", false, "reset a sandbox and do the next input in it, instead of a new one for each")
	fs.BoolVar(&f.ordered, "ordered", false, "results in the order of the inputs; with --out once all is done")
	fs.BoolVar(&f.json, "json", false, "say nothing but results, which are JSON lines anyway: no progress on stderr")
	f.keepOutput = 1 << 20
	fs.Var(&f.keepOutput, "keep-output", "bytes kept of each stream of an input")
	return cmd
}

func (a *app) batch(ctx context.Context, f batchFlags, files, command []string) (err error) {
	if _, err := a.client(); err != nil {
		return err
	}
	if f.parallel < 0 || f.retries < 0 || f.onExit < 0 {
		return usagef("", "--parallel, --retries and --retry-failed count from 0")
	}
	in, err := a.batchInput(files)
	if err != nil {
		return err
	}
	defer in.Close()
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	sigs, stop := a.Notify(os.Interrupt, syscall.SIGTERM)
	defer stop()
	interrupted := make(chan struct{})
	go func() {
		select {
		case <-sigs:
			close(interrupted)
			cancel()
		case <-ctx.Done():
		}
	}()
	m, err := a.openMachines(ctx, f, command)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, m.Close()) }()
	if f.parallel == 0 {
		if f.parallel, err = a.defaultParallel(ctx); err != nil {
			return err
		}
	}
	emit, skip := a.batchResults(f), func(batch.Input) (bool, error) { return false, nil }
	if f.out != "" {
		j, err := batch.OpenJournal(f.out)
		if err != nil {
			return err
		}
		defer func() { err = errors.Join(err, j.Close()) }()
		emit, skip = j.Add, j.Has
		if n := j.Len(); n > 0 && !f.json {
			a.warnf("%s has %d results: doing what is left", f.out, n)
		}
	}
	bar := &batchBar{w: a.Stderr, started: time.Now(), parallel: f.parallel}
	_, bar.tty = terminal(a.Stderr)
	if f.json {
		bar.w, bar.tty = io.Discard, false
	}
	cfg := batch.Config{Parallel: f.parallel, Retries: f.retries, OnExit: f.onExit, Reuse: f.reuse, Name: newExecID()}
	p, err := batch.Run(ctx, cfg, m, batch.Lines(in), skip, emit, bar.show)
	bar.finish(p)
	select {
	case <-interrupted:
		if f.out != "" && !f.json {
			a.warnf("stopped; the same call goes on with what is left")
		}
		return &ExitError{Code: 130}
	default:
	}
	if err == nil && f.ordered && f.out != "" {
		err = batch.Sort(f.out)
	}
	if err == nil && p.Failed+p.Errors > 0 {
		err = &ExitError{Code: 1}
	}
	return err
}

// batchInput is the files one after the other, or stdin.
func (a *app) batchInput(files []string) (io.ReadCloser, error) {
	if len(files) == 0 {
		return io.NopCloser(a.Stdin), nil
	}
	var all inputs
	for _, name := range files {
		f, err := os.Open(name)
		if err != nil {
			return nil, errors.Join(err, all.Close())
		}
		all.files = append(all.files, f)
		// A last line without its end does not run into the next file's first.
		all.readers = append(all.readers, f, strings.NewReader("\n"))
	}
	all.Reader = io.MultiReader(all.readers...)
	return &all, nil
}

type inputs struct {
	io.Reader
	readers []io.Reader
	files   []*os.File
}

func (i *inputs) Close() error {
	var errs []error
	for _, f := range i.files {
		errs = append(errs, f.Close())
	}
	return errors.Join(errs...)
}

// batchResults prints results to stdout, as they come or in order.
func (a *app) batchResults(f batchFlags) func(batch.Result) error {
	out := json.NewEncoder(a.Stdout)
	if !f.ordered {
		return func(r batch.Result) error { return out.Encode(r) }
	}
	next, held := 0, map[int]batch.Result{}
	return func(r batch.Result) error {
		held[r.Index] = r
		for {
			r, ok := held[next]
			if !ok {
				return nil
			}
			delete(held, next)
			next++
			if err := out.Encode(r); err != nil {
				return err
			}
		}
	}
}

// perCore sandboxes of a batch at a time: most commands wait for something.
const perCore = 4

func (a *app) defaultParallel(ctx context.Context) (int, error) {
	resp, err := a.api.System.Info(ctx, connect.NewRequest(&covev1.InfoRequest{}))
	if err != nil {
		return 0, err
	}
	return max(perCore, int(perCore*resp.Msg.GetTotal().GetCpu())), nil
}

// apiMachines are sandboxes of the server, which end with us: their lease is
// renewed as long as this process lives.
type apiMachines struct {
	app     *app
	flags   batchFlags
	command []string
	timeout duration
	lease   *ownLease
}

const batchLease = time.Minute

func (a *app) openMachines(ctx context.Context, f batchFlags, command []string) (*apiMachines, error) {
	lease, err := a.holdLease(ctx, "cove batch", batchLease)
	if err != nil {
		return nil, err
	}
	m := &apiMachines{app: a, flags: f, command: command, timeout: f.spec.timeout.duration, lease: lease}
	m.flags.spec.timeout, m.flags.spec.lease = lifetime{}, lease.id
	return m, nil
}

// Close ends the lease, and with it whatever might be left.
func (m *apiMachines) Close() error { return m.lease.end() }

func (m *apiMachines) Create(ctx context.Context) (id string, err error) {
	req := m.flags.spec.request()
	req.IdempotencyKey = newKey()
	err = m.app.again(ctx, func() error {
		resp, err := m.app.api.Sandboxes.Create(ctx, connect.NewRequest(req))
		if err == nil {
			id = resp.Msg.GetSandbox().GetId()
		}
		return err
	})
	return id, err // one that was made as we left ends with the lease
}

func (m *apiMachines) Reset(ctx context.Context, id string) error {
	_, err := m.app.api.Sandboxes.Reset(ctx, connect.NewRequest(&covev1.ResetRequest{Id: id}))
	return err
}

func (m *apiMachines) Remove(ctx context.Context, id string) error {
	return m.app.again(ctx, func() error {
		_, err := m.app.api.Sandboxes.Kill(ctx, connect.NewRequest(&covev1.KillRequest{Id: id}))
		return err
	})
}

func (m *apiMachines) Run(ctx context.Context, id, exec string, in batch.Input) (out batch.Outcome, err error) {
	args := make([]string, len(m.command))
	for i, arg := range m.command {
		args[i] = strings.ReplaceAll(arg, "{}", unquoted(in.Text))
	}
	var stdout, stderr bytes.Buffer
	f := &follower{app: m.app, sandbox: id, execID: exec, spec: &covev1.ProcessSpec{
		ExecId: exec, Args: args, Input: []byte(in.Text + "\n"), Timeout: m.timeout.proto(), User: m.flags.process.user, Cwd: m.flags.process.cwd}}
	f.onOutput = func(o *covev1.ProcessOutput) error {
		to := &stdout
		if o.GetStream() == covev1.OutputStream_OUTPUT_STREAM_STDERR {
			to = &stderr
		}
		free := int(m.flags.keepOutput) - to.Len()
		if len(o.GetData()) > free {
			out.Truncated = true
		}
		to.Write(o.GetData()[:min(free, len(o.GetData()))])
		return nil
	}
	end, err := f.run(ctx)
	if err != nil {
		return out, err
	}
	e := end.GetEnd()
	out.Cause, out.Detail, out.ExitCode = sandbox.Cause(e.GetCause()), e.GetDetail(), int(e.GetExitCode())
	out.Stdout, out.Stderr, out.Duration = stdout.Bytes(), stderr.Bytes(), end.GetDuration().AsDuration()
	return out, nil
}

// unquoted is an input as a word: a JSON string without its quotes.
func unquoted(text string) string {
	var s string
	if strings.HasPrefix(text, `"`) && json.Unmarshal([]byte(text), &s) == nil {
		return s
	}
	return text
}

// batchBar shows how far a batch is: on a terminal one line that is rewritten,
// elsewhere a line every ten seconds.
type batchBar struct {
	w        io.Writer
	tty      bool
	parallel int
	started  time.Time
	shown    time.Time
}

func (b *batchBar) show(p batch.Progress) {
	every := 10 * time.Second
	if b.tty {
		every = 200 * time.Millisecond
	}
	if now := time.Now(); now.Sub(b.shown) >= every && (b.tty || now.Sub(b.started) >= every) {
		b.shown = now
		if b.tty {
			fmt.Fprintf(b.w, "\r\x1b[K%s", b.line(p))
		} else {
			fmt.Fprintln(b.w, b.line(p))
		}
	}
}

func (b *batchBar) line(p batch.Progress) string {
	s := fmt.Sprintf("%d done, %.0f/s, %d sandboxes", p.Done, float64(p.Done)/max(time.Since(b.started).Seconds(), 0.001), p.Machines)
	for _, c := range []struct {
		n    int
		what string
	}{{p.Skipped, "before"}, {p.Failed, "failed"}, {p.Errors, "errors"}, {p.Retried, "tried again"}} {
		if c.n > 0 {
			s += fmt.Sprintf(", %d %s", c.n, c.what)
		}
	}
	return s
}

// finish says what a batch came to, and how much of its time was not the commands'.
func (b *batchBar) finish(p batch.Progress) {
	if b.tty {
		fmt.Fprint(b.w, "\r\x1b[K")
	}
	took := time.Since(b.started)
	fmt.Fprintf(b.w, "%s; %s, of which %.0f %% in commands\n", b.line(p), formatDuration(took),
		100*min(1, p.Ran.Seconds()/max(took.Seconds()*float64(b.parallel), 0.001)))
}
