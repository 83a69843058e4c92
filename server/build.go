package server

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"sync"
	"time"

	"connectrpc.com/connect"

	covev1 "github.com/cove-sandbox/cove/api/cove/v1"
	"github.com/cove-sandbox/cove/sandbox"
	"github.com/cove-sandbox/cove/store"
	"github.com/cove-sandbox/cove/wire"
)

const (
	// startExec is the id of a template's start command, in every sandbox made
	// of it: its output can be attached to there.
	startExec = "start"
	// tailBytes of the start command's output go into the error of a build that
	// failed.
	tailBytes = 2 << 10
)

// build is one making of a template's version.
type build struct {
	*Server
	tpl  sandbox.Template
	out  *connect.ServerStream[covev1.BuildTemplateEvent]
	send sync.Mutex // the start command's output and the steps share the stream

	mu   sync.Mutex
	tail []byte // last of what the start command printed
}

// Build runs while its caller waits: when that leaves, nothing is left of it.
func (s templateService) Build(ctx context.Context, r *connect.Request[covev1.BuildTemplateRequest], out *connect.ServerStream[covev1.BuildTemplateEvent]) error {
	if s.calls.isDraining() {
		return stopping()
	}
	m := r.Msg
	spec, err := wire.SpecFrom(m.Spec)
	if err != nil {
		return err
	}
	ready, err := wire.ReadinessFrom(m)
	if err != nil {
		return err
	}
	if err := firstError(sandbox.ValidateTemplateName("name", m.Name), sandbox.ValidateStartCommand("start", m.Start), ready.Validate()); err != nil {
		return err
	}
	if spec.Template != "" {
		return sandbox.InvalidField("spec.template", "a template is built from an image or a snapshot")
	}
	if len(spec.Volumes) > 0 {
		return sandbox.InvalidField("spec.volumes", "a template has none: every sandbox made of it would hold them")
	}
	if spec.Lease != "" {
		return sandbox.InvalidField("spec.lease", "a template has none: it outlives whoever builds it")
	}
	began := s.cfg.Clock()
	b := &build{Server: s.Server, out: out, tpl: sandbox.Template{Name: m.Name, Start: m.Start, Ready: ready}}
	sb, err := b.sandbox(ctx, spec)
	if err != nil {
		return err
	}
	frozen := false
	defer func() {
		if !frozen {
			s.takeBack(sb.ID)
		}
	}()
	if err := b.prepare(ctx, sb.ID); err != nil {
		return b.failure(ctx, err)
	}
	if err := b.step("freeze"); err != nil {
		return err
	}
	tpl, snap, err := b.freeze(ctx, sb, began)
	if err != nil {
		return b.failure(ctx, err)
	}
	frozen = true
	p := wire.Template(tpl)
	p.Size = snap.Content.Size
	return b.event(&covev1.BuildTemplateEvent{Step: "done", Template: p})
}

// sandbox is where the template is built. It lives until it is frozen or taken
// back, whatever the spec says about time.
func (b *build) sandbox(ctx context.Context, spec sandbox.Spec) (sandbox.Sandbox, error) {
	if err := b.step("create"); err != nil {
		return sandbox.Sandbox{}, err
	}
	if err := spec.ValidateSource(); err != nil {
		return sandbox.Sandbox{}, err
	}
	probe := spec.WithDefaults(b.cfg.Defaults)
	if probe.Image == "" {
		probe.Image = b.cfg.Defaults.Image
	}
	if err := probe.Validate(b.cfg.Limits); err != nil {
		return sandbox.Sandbox{}, err
	}
	said := spec.Timeout
	spec, o, err := b.resolve(ctx, spec)
	if err != nil {
		return sandbox.Sandbox{}, err
	}
	defer o.release()
	if err := spec.Validate(b.cfg.Limits); err != nil {
		return sandbox.Sandbox{}, err
	}
	spec.Timeout = said // the default is for those made of it
	b.tpl.Spec = spec
	spec.Template, spec.Snapshot = b.tpl.Name+buildMark, ""
	spec.Timeout, spec.IdleTimeout, spec.OnIdle = 0, 0, ""
	// Made whole even if the caller leaves: it is taken back then.
	work, cancel := context.WithTimeout(context.WithoutCancel(ctx), createTimeout)
	defer cancel()
	sb, _, err := b.bear(work, birth{spec: spec, img: o.img, from: o.from, lineage: o.lineage, wanted: ctx}, store.Idempotency{})
	return sb, err
}

// prepare starts the start command and returns when it is ready.
func (b *build) prepare(ctx context.Context, id string) error {
	return b.withGuest(ctx, id, func(g Guest) error {
		timeout := b.tpl.Ready.Timeout
		if timeout == 0 {
			timeout = sandbox.DefaultReady
		}
		ctx, cancel := context.WithTimeoutCause(ctx, timeout, errNotReady(timeout))
		defer cancel()
		started, ended := closed, make(chan error, 1)
		if b.tpl.Start != "" {
			if err := b.step("start"); err != nil {
				return err
			}
			started = make(chan struct{})
			var wg sync.WaitGroup
			// The stream is over before the sandbox is frozen; the process goes on.
			defer wg.Wait()
			defer cancel()
			wg.Go(func() { ended <- b.follow(ctx, g, started) })
		}
		select {
		case <-started:
		case err := <-ended:
			return cmpErr(err, ctx)
		case <-ctx.Done():
			return context.Cause(ctx)
		}
		if err := b.step("ready"); err != nil {
			return err
		}
		return readiness{b.tpl.Ready, "ready-"}.await(ctx, g, ended)
	})
}

// errNotReady is why a build ended that took too long.
func errNotReady(after time.Duration) error {
	return &sandbox.Error{Class: sandbox.DeadlineReached, Msg: fmt.Sprintf("the template was not ready after %s", after)}
}

// cmpErr prefers the reason a context ended to the error that came of it.
func cmpErr(err error, ctx context.Context) error {
	if ctx.Err() != nil {
		return context.Cause(ctx)
	}
	return err
}

// follow runs the start command and passes on what it prints. started is closed
// once it runs. It returns nil when the command ended well: one that puts a
// service into the background does.
func (b *build) follow(ctx context.Context, g Guest, started chan struct{}) error {
	spec := sandbox.ProcessSpec{ExecID: startExec, Command: b.tpl.Start}
	var end *sandbox.ProcessEnd
	err := g.Start(ctx, spec, 0, func(ev sandbox.ProcessEvent) error {
		switch {
		case ev.Started != nil:
			close(started)
		case ev.Output != nil:
			b.keepTail(ev.Output.Data)
			return b.event(&covev1.BuildTemplateEvent{Step: "start", Output: ev.Output.Data})
		case ev.End != nil:
			end = ev.End
		}
		return nil
	})
	if err != nil {
		return err
	}
	if end != nil && (end.Cause != sandbox.Exited || end.ExitCode != 0) {
		return &sandbox.Error{Class: sandbox.Precondition, Field: "start", Msg: "the start command " + end.String() + " before the template was ready"}
	}
	return nil
}

// freeze takes the snapshot that is the version, stops the sandbox with it, and
// records both. A caller that leaves stops it up to the record.
func (b *build) freeze(ctx context.Context, sb sandbox.Sandbox, began time.Time) (tpl sandbox.Template, snap sandbox.Snapshot, err error) {
	ctx, cancel := context.WithTimeout(ctx, snapshotTimeout)
	defer cancel()
	defer context.AfterFunc(b.calls.cut, cancel)()
	if err := b.admitSnapshot(ctx); err != nil {
		return tpl, snap, err
	}
	end, err := b.content.begin(ctx)
	if err != nil {
		return tpl, snap, err
	}
	defer end()
	recorded := false
	_, _, err = b.node.Snapshot(ctx, sb.ID, SnapshotRequest{Kind: sandbox.MemorySnapshot, Stop: true, Keep: true, Progress: func(sandbox.Progress) {},
		Commit: func(c sandbox.Content) (err error) {
			work, cancel, err := onRecord(ctx)
			if err != nil {
				return err
			}
			defer cancel()
			snap = b.newSnapshot(sb, taking{kind: sandbox.MemorySnapshot}, c)
			snap.Hidden, snap.Spec = true, b.tpl.Spec
			b.tpl.CreatedAt = snap.CreatedAt
			b.tpl.BuildTime = b.cfg.Clock().Sub(began)
			tpl, err = b.store.CreateTemplateVersion(work, b.tpl, snap)
			recorded = err == nil
			return err
		}})
	switch {
	case err != nil && recorded:
		return tpl, snap, b.explain(context.WithoutCancel(ctx), sb.ID, err)
	case err != nil:
		return tpl, snap, b.gaveUp(ctx, sb.ID, err)
	}
	work, cancel := context.WithTimeout(context.WithoutCancel(ctx), createTimeout)
	defer cancel()
	if err := b.stopped(work, sb); err != nil {
		b.log.Warn("the end of a template's build is not on record yet", "sandbox", sb.ID, "err", err)
	}
	return tpl, snap, nil
}

func (b *build) step(name string) error { return b.event(&covev1.BuildTemplateEvent{Step: name}) }

func (b *build) event(ev *covev1.BuildTemplateEvent) error {
	b.send.Lock()
	defer b.send.Unlock()
	return b.out.Send(ev)
}

func (b *build) keepTail(data []byte) {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.tail = append(b.tail, data...)
	if over := len(b.tail) - tailBytes; over > 0 {
		b.tail = append([]byte(nil), b.tail[over:]...)
	}
}

// failure is an error with what the start command printed last as its hint.
func (b *build) failure(ctx context.Context, err error) error {
	if ctx.Err() != nil {
		return err
	}
	b.mu.Lock()
	tail := strings.TrimSpace(strings.ToValidUTF8(string(b.tail), "\uFFFD"))
	b.mu.Unlock()
	var e *sandbox.Error
	if tail == "" || !errors.As(err, &e) {
		return err
	}
	return e.WithHint("the start command printed:\n%s", tail)
}
