package batch

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"iter"
	"sync"
	"time"

	"github.com/cove-sandbox/cove/sandbox"
)

// Input is one line.
type Input struct {
	Index int
	Text  string
}

// Key tells whether an input is the one a result is of.
func (in Input) Key() string {
	sum := sha256.Sum256([]byte(in.Text))
	return hex.EncodeToString(sum[:8])
}

// Outcome is one run of the command to its end, whatever that was.
type Outcome struct {
	Cause          sandbox.Cause
	Detail         string
	ExitCode       int
	Stdout, Stderr []byte
	Truncated      bool
	Duration       time.Duration
}

// Machines are what inputs run on. Safe for concurrent use.
type Machines interface {
	// Create makes one. A NoCapacity is waited out, as long as its RetryAfter says.
	Create(ctx context.Context) (id string, err error)
	// Reset makes one as it was when it was created.
	Reset(ctx context.Context, id string) error
	// Remove ends one; it is called for each that was created, also when ctx is over.
	Remove(ctx context.Context, id string) error
	// Run runs the command for an input. The same exec runs once.
	Run(ctx context.Context, id, exec string, in Input) (Outcome, error)
}

// Status is what became of an input.
type Status string

const (
	OK     Status = "ok"     // exited with 0
	Failed Status = "failed" // the command's own doing: exit code, signal, timeout, memory
	Error  Status = "error"  // the platform failed it, as often as it was tried
)

// Result is a line of the journal.
type Result struct {
	Index     int             `json:"index"`
	Key       string          `json:"key"` // of the input
	Input     json.RawMessage `json:"input,omitempty"`
	Status    Status          `json:"status"`
	Cause     sandbox.Cause   `json:"cause"`
	Detail    string          `json:"detail,omitempty"`
	ExitCode  int             `json:"exit_code"`
	Stdout    string          `json:"stdout"`
	Stderr    string          `json:"stderr,omitempty"`
	Truncated bool            `json:"truncated,omitempty"`
	Attempts  int             `json:"attempts"`
	DurationS float64         `json:"duration_s"` // of the last run of the command
	Sandbox   string          `json:"sandbox_id,omitempty"`
}

// Config is how a batch is run.
type Config struct {
	Parallel int
	Retries  int  // of an input that the platform failed
	OnExit   int  // further tries of one whose command failed
	Reuse    bool // a machine is reset and does the next input
	Name     string
	// Wait sleeps; tests have their own.
	Wait func(context.Context, time.Duration) error
}

// Progress is how far a batch is.
type Progress struct {
	Done, Skipped, Failed, Errors, Retried int
	Machines                               int // there are now
	// Ran is the time of the commands alone, over all machines.
	Ran time.Duration
}

// Run does every input that done does not have, and hands each result to emit, one
// at a time, in the order they come. It returns when all is done and no machine is
// left, with the first error that is not an input's own: of emit, of the inputs, or
// one that no other try would mend, such as an image that is not there.
func Run(ctx context.Context, cfg Config, m Machines, inputs iter.Seq2[Input, error], skip func(Input) (bool, error), emit func(Result) error, progress func(Progress)) (Progress, error) {
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	b := &run{cfg: cfg, machines: m, cancel: cancel, emit: emit, progress: progress}
	if b.cfg.Wait == nil {
		b.cfg.Wait = wait
	}
	work := make(chan Input)
	var workers sync.WaitGroup
	started := 0
	for in, err := range inputs {
		if err != nil {
			cancel(err)
			break
		}
		done, err := skip(in)
		if err != nil {
			cancel(err)
			break
		}
		if done {
			b.note(func(p *Progress) { p.Skipped++ })
			continue
		}
		// From zero up: another worker as long as nobody is free.
		select {
		case work <- in:
			continue
		default:
		}
		if started < cfg.Parallel {
			started++
			workers.Go(func() { b.work(ctx, work) })
		}
		select {
		case work <- in:
			continue
		case <-ctx.Done():
		}
		break
	}
	close(work)
	workers.Wait()
	err := context.Cause(ctx)
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.mu.Progress, err
}

// run is a batch under way.
type run struct {
	cfg      Config
	machines Machines
	cancel   context.CancelCauseFunc
	emit     func(Result) error
	progress func(Progress)

	mu struct {
		sync.Mutex
		Progress
	}
}

func (b *run) note(f func(*Progress)) {
	b.mu.Lock()
	defer b.mu.Unlock()
	f(&b.mu.Progress)
	b.progress(b.mu.Progress)
}

// work does inputs on one machine at a time until there are none.
func (b *run) work(ctx context.Context, work <-chan Input) {
	id := ""
	defer func() { b.remove(ctx, id) }()
	for in := range work {
		if ctx.Err() != nil {
			return
		}
		res, ok := b.do(ctx, in, &id)
		if !ok {
			return
		}
		b.mu.Lock()
		err := b.emit(res)
		b.mu.Unlock()
		if err != nil {
			b.cancel(err)
			return
		}
		b.note(func(p *Progress) {
			p.Done++
			switch res.Status {
			case Failed:
				p.Failed++
			case Error:
				p.Errors++
			}
		})
	}
}

// do is an input until it has a result; not ok: the batch ends.
func (b *run) do(ctx context.Context, in Input, id *string) (_ Result, ok bool) {
	res := Result{Index: in.Index, Key: in.Key(), Input: asJSON(in.Text)}
	failures, exits := 0, 0
	for {
		out, err := b.try(ctx, in, res.Attempts, id)
		if ctx.Err() != nil {
			return res, false
		}
		res.Attempts++
		res.Sandbox = *id
		if err != nil {
			if fatal(err) {
				b.cancel(err)
				return res, false
			}
			out = Outcome{Cause: sandbox.Infra, Detail: err.Error()}
		}
		res.Cause, res.Detail, res.ExitCode = out.Cause, out.Detail, out.ExitCode
		res.Stdout, res.Stderr, res.Truncated = string(out.Stdout), string(out.Stderr), out.Truncated
		res.DurationS = out.Duration.Seconds()
		b.note(func(p *Progress) { p.Ran += out.Duration })
		res.Status = statusOf(out)
		// A machine on which something went wrong does no other input, nor one that
		// may not be used again.
		if !b.cfg.Reuse || res.Status == Error {
			b.remove(ctx, *id)
			*id = ""
		}
		switch {
		case res.Status == Error && failures < b.cfg.Retries:
			// What failed it may need a moment, as a server that restarts does.
			if err := b.cfg.Wait(ctx, min(retryFirst<<failures, retryMost)); err != nil {
				return res, false
			}
			failures++
		case res.Status == Failed && exits < b.cfg.OnExit:
			exits++
		default:
			return res, true
		}
		b.note(func(p *Progress) { p.Retried++ })
	}
}

// try runs an input once, on a machine that is fresh.
func (b *run) try(ctx context.Context, in Input, attempt int, id *string) (Outcome, error) {
	if *id != "" {
		if err := b.machines.Reset(ctx, *id); err != nil {
			b.remove(ctx, *id) // another one then: nothing ran
			*id = ""
		}
	}
	for *id == "" {
		made, err := b.machines.Create(ctx)
		var e *sandbox.Error
		if errors.As(err, &e) && (e.Class == sandbox.NoCapacity || e.Class == sandbox.QuotaExceeded) {
			if err := b.cfg.Wait(ctx, max(e.RetryAfter, time.Second)); err != nil {
				return Outcome{}, err
			}
			continue
		}
		if err != nil {
			return Outcome{}, err
		}
		*id = made
		b.note(func(p *Progress) { p.Machines++ })
	}
	return b.machines.Run(ctx, *id, execID(b.cfg.Name, in.Index, attempt), in)
}

// remove ends a machine, also where the batch is over.
func (b *run) remove(ctx context.Context, id string) {
	if id == "" {
		return
	}
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), removeWithin)
	defer cancel()
	if err := b.machines.Remove(ctx, id); err != nil && !errors.Is(err, sandbox.ErrNotFound) {
		b.cancel(err)
	}
	b.note(func(p *Progress) { p.Machines-- })
}

// execID names a try, so that it runs once however often it is asked for.
func execID(name string, index, attempt int) string {
	return fmt.Sprintf("%s-%d-%d", name, index, attempt)
}

const (
	removeWithin          = 20 * time.Second
	retryFirst, retryMost = 100 * time.Millisecond, 5 * time.Second
)

// statusOf says whose doing an end was.
func statusOf(out Outcome) Status {
	switch out.Cause {
	case sandbox.Exited:
		if out.ExitCode == 0 {
			return OK
		}
		return Failed
	case sandbox.Signalled, sandbox.Deadline, sandbox.OOM, sandbox.NoDisk, sandbox.InitKilled:
		return Failed
	}
	return Error
}

// fatal says that no input would fare better.
func fatal(err error) bool {
	switch sandbox.ClassOf(err) {
	case sandbox.Invalid, sandbox.Unauthenticated, sandbox.Denied, sandbox.ImageNotFound, sandbox.NotFound,
		sandbox.Precondition, sandbox.Unsupported, sandbox.TooLarge:
		return true
	}
	return false
}

func asJSON(text string) json.RawMessage {
	if json.Valid([]byte(text)) {
		return json.RawMessage(text)
	}
	quoted, _ := json.Marshal(text)
	return quoted
}

func wait(ctx context.Context, d time.Duration) error {
	t := time.NewTimer(d)
	defer t.Stop()
	select {
	case <-t.C:
		return nil
	case <-ctx.Done():
		return ctx.Err()
	}
}
