package server

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"sync"
	"time"

	"github.com/cove-sandbox/cove/node"
	"github.com/cove-sandbox/cove/sandbox"
	"github.com/cove-sandbox/cove/store"
)

const (
	// startExec is the id of a template's start command, in every sandbox made
	// of it: its output can be attached to there.
	startExec = "start"
	// tailBytes of the start command's output go into the error of a build that
	// failed.
	tailBytes = 2 << 10
)

// BuildRequest asks for a version of a template.
type BuildRequest struct {
	Name  string
	Spec  sandbox.Spec // what sandboxes made of it are like
	Start string       // a command that runs in all of them
	Ready sandbox.Readiness
}

// BuildEvent is a step of a build, or what its start command printed.
type BuildEvent struct {
	Step   string
	Output []byte
}

// templateBuild is one making of a template's version.
type templateBuild struct {
	*Server
	tpl  sandbox.Template
	sink func(BuildEvent) error

	sending sync.Mutex // the start command's output and the steps share the sink

	mu struct {
		sync.Mutex
		tail []byte // last of what the start command printed
	}
}

// BuildTemplate runs while its caller waits, and tells it what happens: when that
// leaves, nothing is left of it.
func (s *Server) BuildTemplate(ctx context.Context, r BuildRequest, sink func(BuildEvent) error) (tpl SizedTemplate, err error) {
	ctx, call, err := s.begin(ctx, "template.build", about("name", r.Name))
	if err != nil {
		return tpl, err
	}
	defer call.end(&err)
	parts := partsOfSpec(r.Spec)
	if r.Start != "" {
		parts = append(parts, writes("start", "processes"))
	}
	if r.Ready.Command != "" {
		parts = append(parts, writes("ready_command", "processes"))
	}
	if err := firstError(call.needs(parts...), sandbox.ValidateTemplateName("name", r.Name), sandbox.ValidateStartCommand("start", r.Start), r.Ready.Validate()); err != nil {
		return tpl, err
	}
	switch {
	case r.Spec.Template != "":
		return tpl, sandbox.InvalidField("spec.template", "a template is built from an image or a snapshot")
	case len(r.Spec.Volumes) > 0:
		return tpl, sandbox.InvalidField("spec.volumes", "a template has none: every sandbox made of it would hold them")
	case r.Spec.Lease != "":
		return tpl, sandbox.InvalidField("spec.lease", "a template has none: it outlives whoever builds it")
	}
	began := s.cfg.Clock()
	b := &templateBuild{Server: s, tpl: sandbox.Template{Name: r.Name, Start: r.Start, Ready: r.Ready}, sink: func(ev BuildEvent) error {
		call.begun()
		return sink(ev)
	}}
	sb, err := b.sandbox(ctx, r.Spec)
	if err != nil {
		return tpl, err
	}
	frozen := false
	defer func() {
		if !frozen {
			s.takeBack(sb.ID)
		}
	}()
	if err := b.prepare(ctx, sb.ID); err != nil {
		return tpl, b.failure(ctx, err)
	}
	if err := b.step("freeze"); err != nil {
		return tpl, err
	}
	made, snap, err := b.freeze(ctx, sb, began)
	if err != nil {
		return tpl, b.failure(ctx, err)
	}
	frozen = true
	return SizedTemplate{made, snap.Content.Size}, nil
}

// sandbox is where the template is built. It lives until it is frozen or taken
// back, whatever the spec says about time.
func (b *templateBuild) sandbox(ctx context.Context, spec sandbox.Spec) (sandbox.Sandbox, error) {
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
	sb, _, err := b.makeSandbox(work, plan{spec: spec, img: o.img, from: o.from, lineage: o.lineage, wanted: ctx}, store.Idempotency{})
	return sb, err
}

// prepare starts the start command and returns when it is ready.
func (b *templateBuild) prepare(ctx context.Context, id string) error {
	return b.inside(ctx, id, func() error {
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
			wg.Go(func() { ended <- b.runStart(ctx, id, started) })
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
		return readiness{b.tpl.Ready, "ready-"}.await(ctx, b.node, id, ended)
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

// runStart runs the start command and passes on what it prints. started is closed
// once it runs. It returns nil when the command ended well: one that puts a
// service into the background does.
func (b *templateBuild) runStart(ctx context.Context, id string, started chan struct{}) error {
	spec := sandbox.ProcessSpec{ExecID: startExec, Command: b.tpl.Start}
	var end *sandbox.ProcessEnd
	for ev, err := range b.node.Start(ctx, id, spec, 0) {
		switch {
		case err != nil:
		case ev.Started != nil:
			close(started)
		case ev.Output != nil:
			b.keepTail(ev.Output.Data)
			err = b.event(BuildEvent{Step: "start", Output: ev.Output.Data})
		case ev.End != nil:
			end = ev.End
		}
		if err != nil {
			return err
		}
	}
	if end != nil && (end.Cause != sandbox.Exited || end.ExitCode != 0) {
		return &sandbox.Error{Class: sandbox.Precondition, Field: "start", Msg: "the start command " + end.String() + " before the template was ready"}
	}
	return nil
}

// freeze takes the snapshot that is the version, stops the sandbox with it, and
// records both. A caller that leaves stops it up to the record.
func (b *templateBuild) freeze(ctx context.Context, sb sandbox.Sandbox, began time.Time) (tpl sandbox.Template, snap sandbox.Snapshot, err error) {
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
	stop := node.SnapshotRequest{Kind: sandbox.MemorySnapshot, Stop: true, Keep: true}
	_, recorded, err := b.stage(ctx, sb.ID, stop, func(work context.Context, c sandbox.Content) (err error) {
		snap = b.newSnapshot(sb, taking{kind: sandbox.MemorySnapshot}, c)
		snap.Hidden, snap.Spec = true, b.tpl.Spec
		b.tpl.CreatedAt = snap.CreatedAt
		b.tpl.BuildTime = b.cfg.Clock().Sub(began)
		tpl, err = b.store.CreateTemplateVersion(work, b.tpl, snap)
		return err
	})
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

func (b *templateBuild) step(name string) error { return b.event(BuildEvent{Step: name}) }

func (b *templateBuild) event(ev BuildEvent) error {
	b.sending.Lock()
	defer b.sending.Unlock()
	return b.sink(ev)
}

func (b *templateBuild) keepTail(data []byte) {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.mu.tail = append(b.mu.tail, data...)
	if over := len(b.mu.tail) - tailBytes; over > 0 {
		b.mu.tail = append([]byte(nil), b.mu.tail[over:]...)
	}
}

// failure is an error with what the start command printed last as its hint.
func (b *templateBuild) failure(ctx context.Context, err error) error {
	if ctx.Err() != nil {
		return err
	}
	b.mu.Lock()
	tail := strings.TrimSpace(strings.ToValidUTF8(string(b.mu.tail), "\uFFFD"))
	b.mu.Unlock()
	var e *sandbox.Error
	if tail == "" || !errors.As(err, &e) {
		return err
	}
	return e.WithHint("the start command printed:\n%s", tail)
}
