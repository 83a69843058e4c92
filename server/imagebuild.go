package server

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"regexp"
	"runtime"
	"slices"
	"sync"
	"time"

	"github.com/cove-sandbox/cove/build"
	"github.com/cove-sandbox/cove/sandbox"
	"github.com/cove-sandbox/cove/store"
)

const (
	// defaultBuildTime bounds a build whose caller says nothing.
	defaultBuildTime = time.Hour
	maxBuildTime     = 24 * time.Hour
	// mostBuilds of a tenant run at a time; their sandboxes count for its quota
	// besides.
	mostBuilds = 16
	// keptBuilds of a tenant are remembered after their end, for keepBuild.
	keptBuilds = 1000
	keepBuild  = 24 * time.Hour
	// maxSecrets and their bytes: keys and tokens, not data.
	maxBuildSecrets     = 64
	maxBuildSecretBytes = 1 << 20
)

// ImageBuildRequest asks for an image: of a Dockerfile, or of From and Steps.
type ImageBuildRequest struct {
	Name   string   // that the image gets; "" = none: it is built and checked, and goes
	Tags   []string // more names of it
	Shared bool     // names are everybody's

	Dockerfile []byte
	From       string
	Steps      []build.Step

	Context    string // key of files given with PutBuildFiles; "" = none
	IgnoreFile string // of the context, where it is not .dockerignore
	// ContextPartial says that the context has only what the Dockerfile names.
	ContextPartial bool
	Args           map[string]string
	Target         string
	Secrets        map[string][]byte // by id; kept no longer than the build
	Network        sandbox.Network   // of each command
	Resources      sandbox.Resources // of each command's sandbox
	NoCache        bool
	Timeout        time.Duration // of all of it; 0 = an hour
}

// BuildState of a build of an image.
type BuildState string

const (
	BuildRunning  BuildState = "running"
	BuildDone     BuildState = "done"
	BuildFailed   BuildState = "failed"
	BuildCanceled BuildState = "canceled"
)

// ImageBuild is a build of an image.
type ImageBuild struct {
	ID            string
	State         BuildState
	Name          string
	Image         sandbox.Image // when it is done
	Err           error         // when it failed
	Steps, Cached int           // that were looked at, and of them not done again
	CreatedAt     time.Time
	EndedAt       time.Time
}

// imageBuild is one under way, or remembered.
type imageBuild struct {
	*Server
	id     string
	tenant string
	req    ImageBuildRequest
	plan   *build.Plan
	cancel context.CancelCauseFunc
	done   chan struct{} // closed when nothing of it runs
	events buildLog

	mu struct {
		sync.Mutex
		now ImageBuild
	}

	// Of the goroutine that builds.
	stages  map[*build.Stage]*built
	held    []func() // what it keeps from being collected
	total   int
	step    int
	uncache bool // a step was not to be taken from the cache
}

// buildBook knows the builds of images.
type buildBook struct {
	mu struct {
		sync.Mutex
		byID map[string]*imageBuild
	}
}

func (b *buildBook) init() { b.mu.byID = map[string]*imageBuild{} }

var errBuildCanceled = &sandbox.Error{Class: sandbox.Canceled, Msg: "the build was canceled"}

// BuildImage builds an image while its caller waits, and tells it what happens:
// when that leaves, nothing is left of it but what is in the cache.
func (s *Server) BuildImage(ctx context.Context, r ImageBuildRequest, sink func(ImageBuildEvent) error) (out ImageBuild, err error) {
	ctx, call, err := s.begin(ctx, "image.build", about("name", r.Name))
	if err != nil {
		return out, err
	}
	defer call.end(&err)
	b, err := s.startBuild(ctx, call, r)
	if err != nil {
		return out, err
	}
	out, err = b.follow(ctx, 0, func(ev ImageBuildEvent) error {
		call.begun()
		return sink(ev)
	})
	if err != nil {
		b.cancel(errBuildCanceled)
		<-b.done
		return out, err
	}
	return out, out.Err
}

// StartImageBuild begins a build that goes on without its caller.
func (s *Server) StartImageBuild(ctx context.Context, r ImageBuildRequest) (out ImageBuild, err error) {
	ctx, call, err := s.begin(ctx, "image.start_build", about("name", r.Name))
	if err != nil {
		return out, err
	}
	defer call.end(&err)
	b, err := s.startBuild(ctx, call, r)
	if err != nil {
		return out, err
	}
	return b.state(), nil
}

// GetImageBuild says how far a build is, or what came of it.
func (s *Server) GetImageBuild(ctx context.Context, id string) (out ImageBuild, err error) {
	ctx, call, err := s.begin(ctx, "image.get_build", about("build", id))
	if err != nil {
		return out, err
	}
	defer call.end(&err)
	b, err := s.findBuild(ctx, id)
	if err != nil {
		return out, err
	}
	return b.state(), nil
}

// ImageBuildEvents are what a build told from an offset on, at most limit of them
// (0 = 1000), and the offset to go on from. It does not wait.
func (s *Server) ImageBuildEvents(ctx context.Context, id string, offset, limit int) (evs []ImageBuildEvent, next int, err error) {
	ctx, call, err := s.begin(ctx, "image.build_events", about("build", id))
	if err != nil {
		return nil, 0, err
	}
	defer call.end(&err)
	b, err := s.findBuild(ctx, id)
	if err != nil {
		return nil, 0, err
	}
	if limit <= 0 || limit > 1000 {
		limit = 1000
	}
	evs, next, _ = b.events.from(offset, limit)
	return evs, next, nil
}

// FollowImageBuild tells of a build from an offset on until it is over.
func (s *Server) FollowImageBuild(ctx context.Context, id string, offset int, sink func(ImageBuildEvent) error) (out ImageBuild, err error) {
	ctx, call, err := s.begin(ctx, "image.follow_build", about("build", id))
	if err != nil {
		return out, err
	}
	defer call.end(&err)
	b, err := s.findBuild(ctx, id)
	if err != nil {
		return out, err
	}
	return b.follow(ctx, offset, sink)
}

// CancelImageBuild ends a build and returns when nothing of it runs any more. One
// that is over is no error.
func (s *Server) CancelImageBuild(ctx context.Context, id string) (out ImageBuild, err error) {
	ctx, call, err := s.begin(ctx, "image.cancel_build", about("build", id))
	if err != nil {
		return out, err
	}
	defer call.end(&err)
	b, err := s.findBuild(ctx, id)
	if err != nil {
		return out, err
	}
	b.cancel(errBuildCanceled)
	select {
	case <-b.done:
		return b.state(), nil
	case <-ctx.Done():
		return out, ctx.Err()
	}
}

func (s *Server) findBuild(ctx context.Context, id string) (*imageBuild, error) {
	s.builds.mu.Lock()
	defer s.builds.mu.Unlock()
	b := s.builds.mu.byID[id]
	if b == nil || !store.ScopeOf(ctx).Sees(b.tenant) {
		return nil, &sandbox.Error{Class: sandbox.NotFound, Msg: fmt.Sprintf("no build '%.80s'", id), Hint: "builds are remembered for a day, and not over a restart of the server"}
	}
	return b, nil
}

// startBuild refuses what is wrong with a request and begins.
func (s *Server) startBuild(ctx context.Context, call *call, r ImageBuildRequest) (*imageBuild, error) {
	parts := append(partsOfNetwork("network", r.Network), writes("", "sandboxes"), writes("", "processes"))
	if err := firstError(call.needs(parts...), r.validate(), validateNetwork("network", r.Network.WithDefault(s.cfg.Defaults.Network))); err != nil {
		return nil, err
	}
	if r.Network.Record != nil || r.Network.Replay != nil {
		return nil, sandbox.InvalidField("network", "a build is neither recorded nor replayed: what it ran is in the cache")
	}
	whose, err := ownerOfName(ctx, r.Shared)
	if err != nil {
		return nil, err
	}
	if err := s.admitImage(whose); err != nil {
		return nil, err
	}
	opts := build.Options{Args: r.Args, Target: r.Target, Platform: "linux/" + runtime.GOARCH}
	var plan *build.Plan
	if r.From != "" || len(r.Steps) > 0 {
		plan, err = build.List(r.From, r.Steps, opts)
	} else {
		plan, err = build.Parse(r.Dockerfile, opts)
	}
	if err != nil {
		return nil, err
	}
	b := &imageBuild{Server: s, id: sandbox.NewID(s.cfg.Rand), tenant: store.ScopeOf(ctx).Owner(""), req: r, plan: plan, done: make(chan struct{}),
		stages: map[*build.Stage]*built{}, total: plan.Steps()}
	b.events.init(s.cfg.Clock, r.Secrets)
	b.mu.now = ImageBuild{ID: b.id, State: BuildRunning, Name: r.Name, CreatedAt: s.cfg.Clock().UTC()}
	if err := s.builds.add(b, s.cfg.Clock()); err != nil {
		return nil, err
	}
	call.concerns("build", b.id)
	work, _, leave := s.calls.enter(context.WithoutCancel(ctx), callerOf(ctx).key, s.cfg.Clock())
	work, b.cancel = context.WithCancelCause(work)
	limit := cmp.Or(r.Timeout, defaultBuildTime)
	work, stop := context.WithTimeoutCause(work, limit, &sandbox.Error{Class: sandbox.DeadlineReached, Msg: "the build took more than " + limit.String()})
	go func() {
		defer leave()
		defer close(b.done)
		defer stop()
		defer b.cancel(nil)
		b.run(work, whose)
	}()
	return b, nil
}

var buildSecretID = regexp.MustCompile(`^[A-Za-z0-9_.-]{1,128}$`)

func (r ImageBuildRequest) validate() error {
	for i, name := range append([]string{r.Name}, r.Tags...) {
		if i == 0 && name == "" && len(r.Tags) == 0 {
			break
		}
		if err := sandbox.ValidateImageName("name", name); err != nil {
			return err
		}
	}
	if len(r.Tags) > 64 {
		return sandbox.InvalidField("tags", "%d names; at most 64 are accepted", len(r.Tags))
	}
	switch {
	case r.Timeout < 0 || r.Timeout > maxBuildTime:
		return sandbox.InvalidField("timeout", "%s is not accepted; at most %s is", r.Timeout, maxBuildTime)
	case len(r.Dockerfile) > 0 && (r.From != "" || len(r.Steps) > 0):
		return sandbox.InvalidField("dockerfile", "is given beside steps; one of the two is accepted")
	case len(r.Dockerfile) == 0 && r.From == "":
		return sandbox.InvalidField("dockerfile", "is missing")
	case len(r.Args) > 256:
		return sandbox.InvalidField("args", "%d build arguments; at most 256 are accepted", len(r.Args))
	case len(r.Secrets) > maxBuildSecrets:
		return sandbox.InvalidField("secrets", "%d secrets; at most %d are accepted", len(r.Secrets), maxBuildSecrets)
	}
	for id, v := range r.Secrets {
		if !buildSecretID.MatchString(id) || len(v) > maxBuildSecretBytes {
			return sandbox.InvalidField("secrets", "%.128q has %d bytes; letters, digits, _, . and - are accepted as an id, and at most %d bytes", id, len(v), maxBuildSecretBytes)
		}
	}
	if r.Context != "" {
		return validBuildKey("context", r.Context)
	}
	return nil
}

// add takes a build in, and forgets those that ended long ago.
func (b *buildBook) add(one *imageBuild, now time.Time) error {
	b.mu.Lock()
	defer b.mu.Unlock()
	running := 0
	var ended []*imageBuild
	for id, o := range b.mu.byID {
		st := o.state()
		switch {
		case st.State == BuildRunning && o.tenant == one.tenant:
			running++
		case st.State != BuildRunning && now.Sub(st.EndedAt) > keepBuild:
			delete(b.mu.byID, id)
		case st.State != BuildRunning && o.tenant == one.tenant:
			ended = append(ended, o)
		}
	}
	if running >= mostBuilds {
		return &sandbox.Error{Class: sandbox.QuotaExceeded, Msg: fmt.Sprintf("%d builds run already", running), Hint: "wait for one to end, or cancel it", RetryAfter: 5 * time.Second}
	}
	slices.SortFunc(ended, func(x, y *imageBuild) int { return x.state().EndedAt.Compare(y.state().EndedAt) })
	for len(ended) >= keptBuilds {
		delete(b.mu.byID, ended[0].id)
		ended = ended[1:]
	}
	b.mu.byID[one.id] = one
	return nil
}

func (b *imageBuild) state() ImageBuild {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.mu.now
}

// follow tells of events until the build is over.
func (b *imageBuild) follow(ctx context.Context, offset int, sink func(ImageBuildEvent) error) (ImageBuild, error) {
	for {
		over := false
		select {
		case <-b.done: // before the log is read: what is there then is all
			over = true
		default:
		}
		evs, next, more := b.events.from(offset, 1000)
		for _, ev := range evs {
			if err := sink(ev); err != nil {
				return b.state(), err
			}
		}
		offset = next
		switch {
		case len(evs) > 0:
			continue
		case over:
			return b.state(), nil
		}
		select {
		case <-more:
		case <-b.done:
		case <-ctx.Done():
			return b.state(), ctx.Err()
		}
	}
}

// run builds and notes what came of it.
func (b *imageBuild) run(ctx, whose context.Context) {
	img, err := b.make(ctx, whose)
	b.release()
	if err != nil {
		var e *sandbox.Error
		if ctx.Err() != nil && errors.As(context.Cause(ctx), &e) {
			err = e
		}
		err = sandbox.WithOp("image.build", err)
	}
	b.mu.Lock()
	defer b.mu.Unlock()
	b.mu.now.EndedAt = b.cfg.Clock().UTC()
	switch {
	case err == nil:
		b.mu.now.State, b.mu.now.Image = BuildDone, img
	case errors.Is(err, sandbox.ErrCanceled):
		b.mu.now.State, b.mu.now.Err = BuildCanceled, err
	default:
		b.mu.now.State, b.mu.now.Err = BuildFailed, err
	}
	b.req.Secrets = nil
}

func (b *imageBuild) release() {
	for _, drop := range slices.Backward(b.held) {
		drop()
	}
	b.held = nil
}
