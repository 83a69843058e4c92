package server

import (
	"context"
	"errors"
	"path"
	"strconv"
	"strings"
	"time"

	"github.com/cove-sandbox/cove/build"
	"github.com/cove-sandbox/cove/node"
	"github.com/cove-sandbox/cove/sandbox"
	"github.com/cove-sandbox/cove/store"
)

// act does what an instruction says, or finds that it was done before.
func (b *imageBuild) act(ctx context.Context, now *built, a build.Action, ev ImageBuildEvent) (hit bool, err error) {
	empty := true
	switch {
	case a.Run != nil:
		hit, err = b.runStep(ctx, now, *a.Run, ev)
		empty = false
	case len(a.Copies) > 0:
		hit = true
		before := len(now.comp.Layers)
		for _, c := range a.Copies {
			one, err := b.copyStep(ctx, now, c)
			if err != nil {
				return false, err
			}
			hit = hit && one
		}
		empty = len(now.comp.Layers) == before
	}
	now.comp.History = append(now.comp.History, sandbox.BuiltLayer{CreatedAt: b.cfg.Clock().UTC(), CreatedBy: a.By, Empty: empty})
	return hit, err
}

// lookUp finds the layer of a key, unless the cache is not to be used, and holds it.
func (b *imageBuild) lookUp(ctx context.Context, now *built, key string) (bool, error) {
	if b.req.NoCache || b.uncache {
		return false, nil
	}
	c, release, found, err := b.useBuilt(ctx, key)
	if !found || err != nil {
		return false, err
	}
	b.held = append(b.held, release)
	b.take(now, c)
	return true, nil
}

func (b *imageBuild) take(now *built, c cached) {
	if c.Layer != nil {
		now.comp.Layers = append(now.comp.Layers, *c.Layer)
	}
	now.key = c.State
}

// source is where files come from, and a key of all of it.
func (b *imageBuild) source(ctx context.Context, field string, st *build.Stage, image, files string, c *sandbox.Copying) (string, error) {
	switch {
	case st != nil:
		of := b.stages[st]
		comp := sandbox.Composition{Base: of.comp.Base, Layers: of.comp.Layers}
		c.From = &comp
		return of.key, nil
	case image != "":
		img, err := b.image(ctx, image)
		c.From = &sandbox.Composition{Base: img.ID}
		return img.ID, err
	}
	key := files
	if key == "" {
		key, field = b.req.Context, "context"
		c.Ignore, c.IgnoreFile = true, b.req.IgnoreFile
	}
	if key == "" {
		return "", sandbox.Errorf(sandbox.NotFound, "", "there is no build context to copy from").WithHint("give a directory to build")
	}
	if err := validBuildKey(field, key); err != nil {
		return "", err
	}
	got, release, found, err := b.useBuilt(ctx, filesKey(key))
	if err != nil {
		return "", err
	}
	if !found || got.Files == nil {
		return "", &sandbox.Error{Class: sandbox.NotFound, Field: field, Msg: "no files were uploaded as " + key, Hint: "upload them again"}
	}
	b.held = append(b.held, release)
	c.Files = got.Files
	return got.Files.Manifest, nil
}

// copyStep puts files over what is there. It is known by all it could copy from,
// and if that changed, by what it does copy: another file of the context makes
// no difference.
func (b *imageBuild) copyStep(ctx context.Context, now *built, c build.Copy) (hit bool, err error) {
	cp := sandbox.Copying{Onto: sandbox.Composition{Base: now.comp.Base, Layers: now.comp.Layers}, Inline: c.Inline, Sources: c.Sources, Dest: c.Dest,
		Owner: c.Owner, Mode: c.Mode, Unpack: c.Unpack, Parents: c.Parents, Exclude: c.Exclude}
	from := ""
	switch {
	case c.URL != "":
		cp.Fetch = &sandbox.Fetch{URL: c.URL, Checksum: c.Checksum, Network: b.req.Network.WithDefault(b.cfg.Defaults.Network)}
		from = c.URL + " " + c.Checksum
	case c.Sources != nil:
		if from, err = b.source(ctx, "steps.files", c.Stage, c.Image, c.Files, &cp); err != nil {
			return false, err
		}
	}
	what := cp
	what.Onto, what.From, what.Files, what.Fetch = sandbox.Composition{}, nil, nil, nil
	// What a URL gives may change: it is fetched each time unless its checksum is
	// said.
	quick := build.Key("copy", now.key, from, what)
	if c.URL == "" || c.Checksum != "" {
		if hit, err := b.lookUp(ctx, now, quick); hit || err != nil {
			return hit, err
		}
	}
	end, err := b.content.begin(ctx)
	if err != nil {
		return false, err
	}
	defer end()
	content, digest, err := b.node.Images().Copy(ctx, cp)
	if err != nil {
		return false, err
	}
	if digest == "" { // all of it was there
		b.letGo(content)
		return false, b.putBuilt(ctx, quick, cached{State: now.key})
	}
	made := cached{Layer: &sandbox.Layer{Content: content}, State: build.Key("copied", now.key, digest)}
	if hit, err = b.lookUp(ctx, now, made.State); hit || err != nil {
		b.letGo(content)
		if err != nil {
			return false, err
		}
		made.Layer = &now.comp.Layers[len(now.comp.Layers)-1]
		return true, b.putBuilt(ctx, quick, made)
	}
	if err := b.putBuilt(ctx, made.State, made); err != nil {
		b.letGo(content)
		return false, err
	}
	b.held = append(b.held, b.content.use(content))
	b.take(now, made)
	return false, b.putBuilt(ctx, quick, made)
}

// ownFiles are written anew for every sandbox, so that they are no part of a layer.
var ownFiles = []string{"/etc/hosts", "/etc/hostname", "/etc/resolv.conf", "/dev", "/proc", "/sys"}

// runStep runs a command in a sandbox of its own and keeps what it changed.
func (b *imageBuild) runStep(ctx context.Context, now *built, r build.Run, ev ImageBuildEvent) (hit bool, err error) {
	binds := make([]*sandbox.Copying, len(r.Mounts))
	from := make([]string, len(r.Mounts))
	for i, m := range r.Mounts {
		if m.Type != "bind" {
			continue
		}
		binds[i] = &sandbox.Copying{Sources: []string{m.Source}, Dest: "/" + path.Base(m.Target)}
		if from[i], err = b.source(ctx, "context", m.Stage, m.Image, "", binds[i]); err != nil {
			return false, err
		}
	}
	key := r.Key(now.key, from)
	if hit, err := b.lookUp(ctx, now, key); hit || err != nil {
		return hit, err
	}
	comp := now.comp
	comp.History = nil
	comp.Config = sandbox.ImageConfig{Env: now.state.Config.Env} // as root, so that mounts can be made; the command says who it runs as
	img, drop, err := b.composed(ctx, comp)
	if err != nil {
		return false, err
	}
	defer drop()
	sb, err := b.runner(ctx, img, r)
	if err != nil {
		return false, err
	}
	defer b.takeBack(sb.ID)
	without := append([]string(nil), ownFiles...)
	env := envOf(append(b.plan.Proxies(), r.Env...))
	var above []string
	for i, m := range r.Mounts {
		if m.Target != "" {
			without = append(without, m.Target)
		}
		if m.Type == "secret" {
			missing, err := b.missingAbove(ctx, sb.ID, m.Target)
			if err != nil {
				return false, err
			}
			above = append(above, missing...)
		}
		if err := b.mount(ctx, sb.ID, m, binds[i], env); err != nil {
			return false, err
		}
	}
	if err := b.inside(ctx, sb.ID, func() error { return b.command(ctx, sb.ID, r, env, ev) }); err != nil {
		return false, err
	}
	if err := b.tidy(ctx, sb.ID, r.Mounts, above); err != nil {
		return false, err
	}
	return false, b.keepLayer(ctx, sb.ID, now, key, without)
}

// runner makes the sandbox of a command as any other is made: within the quota of
// its tenant, with the build's network. It ends by itself if nobody takes it back.
func (b *imageBuild) runner(ctx context.Context, img sandbox.Image, r build.Run) (sandbox.Sandbox, error) {
	spec := sandbox.Spec{Image: img.ID, Resources: b.req.Resources, Network: b.req.Network, Timeout: maxBuildTime}
	if deadline, ok := ctx.Deadline(); ok {
		spec.Timeout = time.Until(deadline) + time.Minute
	}
	if spec.Timeout <= 0 {
		return sandbox.Sandbox{}, context.DeadlineExceeded
	}
	if spec.Resources.MemoryLimit == 0 && spec.Resources.Memory == 0 {
		spec.Resources.Memory = b.cfg.Defaults.Resources.Memory
		spec.Resources.MemoryLimit = max(spec.Resources.Memory, 2*sandbox.GiB)
		if most := b.cfg.Limits.MaxMemory; most > 0 {
			spec.Resources.MemoryLimit = min(spec.Resources.MemoryLimit, most)
		}
	}
	if r.Offline {
		spec.Network = sandbox.Network{Mode: sandbox.NetworkNone}
	}
	spec = spec.WithDefaults(b.cfg.Defaults)
	spec.Network = spec.Network.WithDefault(b.cfg.Defaults.Network)
	if err := spec.Validate(b.cfg.Limits); err != nil {
		return sandbox.Sandbox{}, err
	}
	spec.Template = "image-build" + buildMark // a server that starts anew removes what carries it
	// Made whole even if the caller leaves: it is taken back then.
	work, cancel := context.WithTimeout(context.WithoutCancel(ctx), createTimeout)
	defer cancel()
	sb, _, err := b.makeSandbox(work, plan{spec: spec, img: img, wanted: ctx}, store.Idempotency{})
	return sb, err
}

func envOf(list []string) map[string]string {
	env := map[string]string{}
	for _, kv := range list {
		k, v, _ := strings.Cut(kv, "=")
		env[k] = v
	}
	return env
}

const (
	runExec = "run"
	// scriptPath is in memory, and so in no layer.
	scriptPath = "/dev/shm/.cove-run"
)

// command runs a RUN to its end and tells what it prints.
func (b *imageBuild) command(ctx context.Context, id string, r build.Run, env map[string]string, ev ImageBuildEvent) error {
	spec := sandbox.ProcessSpec{ExecID: runExec, Args: r.Args, Cwd: r.Dir, Env: env, User: r.User}
	if r.Script != nil {
		if _, err := b.node.WriteFile(ctx, id, scriptPath, r.Script, sandbox.WriteOptions{Mode: 0o755}); err != nil {
			return err
		}
		spec.Args = []string{scriptPath}
	}
	if spec.Cwd == "" {
		spec.Cwd = "/"
	}
	out := &printed{log: &b.events, ev: ev, rest: map[sandbox.Stream][]byte{}}
	var end *sandbox.ProcessEnd
	for pe, err := range b.node.Start(ctx, id, spec, 0) {
		switch {
		case err != nil:
			out.close()
			return err
		case pe.Output != nil:
			out.write(pe.Output.Stream, pe.Output.Data)
		case pe.End != nil:
			end = pe.End
		}
	}
	out.close()
	if end == nil {
		return sandbox.Errorf(sandbox.Unavailable, "", "the command's end was not told")
	}
	if end.Cause == sandbox.Exited && end.ExitCode == 0 {
		return nil
	}
	e := &sandbox.Error{Class: sandbox.Precondition, Msg: "the command " + end.String() + ": " + b.events.hide(ev.Text)}
	if tail := strings.TrimSpace(strings.ToValidUTF8(string(out.tail), "\uFFFD")); tail != "" {
		e = e.WithHint("it printed:\n%s", tail)
	}
	return e
}

// mount puts what a RUN has besides the image into its sandbox. What is put there
// is left out of the layer, so that a copy does as well as a mount.
func (b *imageBuild) mount(ctx context.Context, id string, m build.Mount, bind *sandbox.Copying, env map[string]string) error {
	switch m.Type {
	case "secret":
		value, ok := b.req.Secrets[m.ID]
		if !ok {
			if m.Required {
				return sandbox.Errorf(sandbox.Invalid, "", "the secret %q was not given", m.ID).WithHint("cove image build --secret id=%s,src=FILE", m.ID)
			}
			return nil
		}
		if m.Env != "" {
			env[m.Env] = string(value)
		}
		if m.Target == "" {
			return nil
		}
		mode := m.Mode
		if mode == 0 {
			mode = 0o400
		}
		if _, err := b.node.WriteFile(ctx, id, m.Target, value, sandbox.WriteOptions{Mode: mode, Parents: true}); err != nil {
			return err
		}
		return b.own(ctx, id, m)
	case "bind":
		end, err := b.content.begin(ctx)
		if err != nil {
			return err
		}
		defer end()
		content, _, err := b.node.Images().Copy(ctx, *bind)
		if err != nil {
			return err
		}
		defer b.letGo(content)
		if _, err := b.node.MakeDir(ctx, id, path.Dir(m.Target), sandbox.WriteOptions{Parents: true, Mode: 0o755}); err != nil && !errors.Is(err, sandbox.ErrAlreadyExists) {
			return err
		}
		return b.node.Mount(ctx, id, sandbox.Snapshot{Kind: sandbox.DirectorySnapshot, Content: content}, path.Dir(m.Target), true)
	}
	if _, err := b.node.MakeDir(ctx, id, m.Target, sandbox.WriteOptions{Parents: true, Mode: 0o755}); err != nil && !errors.Is(err, sandbox.ErrAlreadyExists) {
		return err
	}
	if m.Type == "cache" && !b.req.NoCache {
		c, release, found, err := b.useBuilt(ctx, mountKey(m))
		if err != nil {
			return err
		}
		if found {
			defer release()
			return b.node.Mount(ctx, id, sandbox.Snapshot{Kind: sandbox.DirectorySnapshot, Content: *c.Files}, m.Target, true)
		}
	}
	if m.Mode != 0 {
		if err := b.node.Chmod(ctx, id, m.Target, m.Mode, false); err != nil {
			return err
		}
	}
	return b.own(ctx, id, m)
}

func (b *imageBuild) own(ctx context.Context, id string, m build.Mount) error {
	if m.UID == 0 && m.GID == 0 {
		return nil
	}
	return b.node.Chown(ctx, id, m.Target, strconv.FormatUint(uint64(m.UID), 10)+":"+strconv.FormatUint(uint64(m.GID), 10), false)
}

func mountKey(m build.Mount) string { return "mount:" + build.Key(m.ID) }

// missingAbove are the directories that are made for a file, the deepest first.
func (b *imageBuild) missingAbove(ctx context.Context, id, file string) (dirs []string, err error) {
	if file == "" {
		return nil, nil
	}
	for dir := path.Dir(file); dir != "/" && dir != "."; dir = path.Dir(dir) {
		if _, err := b.node.StatFile(ctx, id, dir); err == nil {
			return dirs, nil
		} else if !errors.Is(err, sandbox.ErrNotFound) {
			return nil, err
		}
		dirs = append(dirs, dir)
	}
	return dirs, nil
}

// tidy ends what a command left running, keeps its caches and takes its secrets
// away: what is stored afterwards has none of them. The directories above that were made
// for them go too, unless the command left something there.
func (b *imageBuild) tidy(ctx context.Context, id string, mounts []build.Mount, above []string) error {
	if err := b.node.Signal(ctx, id, runExec, "KILL", false); err != nil && !errors.Is(err, sandbox.ErrNotFound) && !errors.Is(err, sandbox.ErrPrecondition) {
		return err
	}
	for _, m := range mounts { // before caches are kept: a secret may be within one
		if m.Target == "" || m.Type != "secret" && m.Type != "tmpfs" {
			continue
		}
		if err := b.node.RemoveFile(ctx, id, m.Target, true); err != nil && !errors.Is(err, sandbox.ErrNotFound) {
			return err
		}
	}
	for _, dir := range above {
		if err := b.node.RemoveFile(ctx, id, dir, false); err != nil && !errors.Is(err, sandbox.ErrNotFound) && !errors.Is(err, sandbox.ErrPrecondition) {
			return err
		}
	}
	for _, m := range mounts {
		if m.Type == "cache" {
			if err := b.keepMount(ctx, id, m); err != nil {
				return err
			}
		}
	}
	return nil
}

func (b *imageBuild) keepMount(ctx context.Context, id string, m build.Mount) error {
	end, err := b.content.begin(ctx)
	if err != nil {
		return err
	}
	defer end()
	req := node.SnapshotRequest{Kind: sandbox.DirectorySnapshot, Path: m.Target, Keep: true}
	_, _, err = b.stageSnapshot(ctx, id, req, func(work context.Context, c sandbox.Content) error {
		return b.putBuilt(work, mountKey(m), cached{Files: &c})
	})
	return err
}

// keepLayer stores what a command changed.
func (b *imageBuild) keepLayer(ctx context.Context, id string, now *built, key string, without []string) error {
	end, err := b.content.begin(ctx)
	if err != nil {
		return err
	}
	defer end()
	req := node.SnapshotRequest{Kind: sandbox.FilesystemSnapshot, Keep: true}
	_, _, err = b.stageSnapshot(ctx, id, req, func(work context.Context, c sandbox.Content) error {
		made := cached{Layer: &sandbox.Layer{Content: c, Without: without}, State: key}
		if err := b.putBuilt(work, key, made); err != nil {
			return err
		}
		b.held = append(b.held, b.content.use(c))
		b.take(now, made)
		return nil
	})
	return err
}

// stageSnapshot is the server's own; a stage is something else here.
func (b *imageBuild) stageSnapshot(ctx context.Context, id string, r node.SnapshotRequest, record func(context.Context, sandbox.Content) error) (time.Duration, bool, error) {
	return b.Server.stage(ctx, id, r, record)
}
