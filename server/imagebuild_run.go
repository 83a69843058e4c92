package server

import (
	"context"
	"errors"
	"fmt"
	"regexp"
	"slices"
	"strings"
	"time"

	"github.com/cove-sandbox/cove/build"
	"github.com/cove-sandbox/cove/sandbox"
)

// built is how far a stage is.
type built struct {
	comp  sandbox.Composition // base, layers and history
	key   string              // of all that the layers were made of
	state *build.State
}

// make carries the plan out.
func (b *imageBuild) make(ctx, whose context.Context) (img sandbox.Image, err error) {
	for _, w := range b.plan.Warnings {
		b.events.add(ImageBuildEvent{Kind: BuildWarning, Text: w})
	}
	var last *built
	for _, st := range b.plan.Stages {
		if last, err = b.stage(ctx, st); err != nil {
			return img, err
		}
		b.stages[st] = last
	}
	for _, name := range b.plan.Unused() {
		b.events.add(ImageBuildEvent{Kind: BuildWarning, Text: "no ARG asks for the build argument " + name})
	}
	return b.export(ctx, whose, last)
}

// stage builds one stage.
func (b *imageBuild) stage(ctx context.Context, st *build.Stage) (*built, error) {
	began := time.Now()
	b.step++
	ev := ImageBuildEvent{Kind: BuildStepBegun, Step: b.step, Total: b.total, Stage: st.Name, Line: st.Line, Text: st.Text}
	b.events.add(ev)
	now, config, err := b.base(ctx, st)
	if err != nil {
		where := "from" // of a list of steps
		if st.Line > 0 {
			where = fmt.Sprintf("dockerfile:%d", st.Line)
		}
		return nil, at(where, err)
	}
	if now.state, err = b.plan.Begin(st, config); err != nil {
		return nil, err
	}
	b.total = b.plan.Steps()
	ev.Kind, ev.Took = BuildStepDone, time.Since(began)
	b.events.add(ev)
	for i := range st.Len() {
		if err := ctx.Err(); err != nil {
			return nil, err
		}
		began := time.Now()
		a, err := now.state.Next(i)
		if err != nil {
			return nil, err
		}
		b.step++
		ev := ImageBuildEvent{Kind: BuildStepBegun, Step: b.step, Total: b.total, Stage: st.Name, Line: a.Line, Text: a.Text}
		b.events.add(ev)
		if a.Trigger && a.UsesContext() && b.req.ContextPartial {
			return nil, (&sandbox.Error{Class: sandbox.Precondition, Field: "context", Msg: "the base's " + a.Text + " copies from the context, of which only some was given"}).
				WithHint("give the whole of it")
		}
		b.uncache = b.uncache || a.Force
		hit, err := b.act(ctx, now, a, ev)
		if err != nil {
			return nil, at(a.Where, err)
		}
		if hit {
			ev.Kind = BuildStepCached
			b.events.add(ev)
		}
		ev.Kind, ev.Took = BuildStepDone, time.Since(began)
		b.events.add(ev)
		b.mu.Lock()
		b.mu.now.Steps++
		if hit {
			b.mu.now.Cached++
		}
		b.mu.Unlock()
	}
	return now, nil
}

var ownField = regexp.MustCompile(`^(dockerfile|steps|context|secrets)\b`)

// at says of an error in which instruction it was.
func at(where string, err error) error {
	var e *sandbox.Error
	if !errors.As(err, &e) {
		return err
	}
	// Fields of the request are the caller's own; others are of calls that a step made.
	if ownField.MatchString(e.Field) {
		return err
	}
	own := *e
	own.Field = where
	return &own
}

// base is what a stage begins with.
func (b *imageBuild) base(ctx context.Context, st *build.Stage) (*built, sandbox.ImageConfig, error) {
	if st.Base != nil {
		of := b.stages[st.Base]
		comp := of.comp
		comp.Layers, comp.History = slices.Clone(comp.Layers), slices.Clone(comp.History)
		return &built{comp: comp, key: of.key}, of.state.Config, nil
	}
	if st.Image == "" {
		// As BuildKit and buildah have it, what is built on nothing has a PATH too.
		return &built{key: build.Key("from", "")}, sandbox.ImageConfig{Env: []string{"PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"}}, nil
	}
	img, err := b.image(ctx, st.Image)
	if err != nil {
		return nil, sandbox.ImageConfig{}, err
	}
	return &built{comp: sandbox.Composition{Base: img.ID}, key: build.Key("from", img.ID)}, img.Config, nil
}

// image finds an image by a name that a Dockerfile has, or pulls it, and holds it
// until the build is over.
func (b *imageBuild) image(ctx context.Context, name string) (sandbox.Image, error) {
	if err := sandbox.ValidateImageName("", name); err != nil {
		return sandbox.Image{}, err
	}
	for _, n := range namesOf(name) {
		img, release, err := b.images.acquire(ctx, n)
		if err == nil {
			b.held = append(b.held, release)
			return img, nil
		}
		if !errors.Is(err, sandbox.ErrImageNotFound) {
			return img, err
		}
	}
	who, err := b.accessTo(ctx, name)
	if err != nil {
		return sandbox.Image{}, err
	}
	for try := 0; ; try++ {
		img, err := b.pullOnce(ctx, PullRequest{Reference: name, As: who}, func(p sandbox.Progress) error {
			b.events.add(ImageBuildEvent{Kind: BuildProgress, Step: b.step, Total: b.total, Text: fmt.Sprintf("pull %s: %s %s", name, p.Step, sandbox.FormatSize(p.Done))})
			return nil
		})
		if err != nil {
			return img, b.meant(ctx, name, err)
		}
		img, err = b.images.publish(ctx, img, name)
		if err == nil {
			var release func()
			if img, release, err = b.images.acquire(ctx, name); err == nil {
				b.held = append(b.held, release)
				return img, nil
			}
		}
		if try > 0 || !errors.Is(err, errContentGone) && !errors.Is(err, sandbox.ErrImageNotFound) {
			return img, err
		}
	}
}

// meant adds to an error of a registry which stage, or image that is here, was
// probably meant.
func (b *imageBuild) meant(ctx context.Context, name string, err error) error {
	var e *sandbox.Error
	imgs, lerr := b.store.ListImages(ctx)
	if lerr != nil || ctx.Err() != nil || !errors.As(err, &e) {
		return err
	}
	names := slices.Clone(b.plan.Names)
	for _, i := range imgs {
		names = append(names, i.Names...)
	}
	slices.Sort(names)
	did := sandbox.DidYouMean(name, names)
	if did == "" {
		return err
	}
	own := *e
	own.Msg, own.Err = "no image '"+name+"' here, and "+e.Error()+"; "+did, nil
	return &own
}

// namesOf are the names that an image may have here that a Dockerfile calls by
// one: registries have a default, and so do tags.
func namesOf(name string) []string {
	names := []string{name}
	short := strings.TrimPrefix(strings.TrimPrefix(name, "docker.io/"), "library/")
	if short != name {
		names = append(names, short)
	}
	if rest, ok := strings.CutSuffix(short, ":latest"); ok {
		names = append(names, rest)
	} else if last := short[strings.LastIndexByte(short, '/')+1:]; !strings.ContainsAny(last, ":@") {
		names = append(names, short+":latest")
	}
	return names
}

// export makes the image and names it.
func (b *imageBuild) export(ctx, whose context.Context, last *built) (img sandbox.Image, err error) {
	comp := last.comp
	comp.Config, comp.Built = last.state.Config, true
	comp.Config.Authorities = nil // of its files
	by := make([]string, len(comp.History))
	for i, h := range comp.History {
		by[i] = h.CreatedBy
	}
	began := time.Now()
	b.events.add(ImageBuildEvent{Kind: BuildProgress, Text: "export"})
	key := build.Key("image", last.key, comp.Config, by)
	for try := 0; ; try++ {
		img, err = b.exportOnce(ctx, whose, key, comp)
		if try > 0 || !errors.Is(err, errContentGone) && !errors.Is(err, sandbox.ErrImageNotFound) {
			break
		}
	}
	if err != nil {
		return img, err
	}
	b.events.add(ImageBuildEvent{Kind: BuildProgress, Text: fmt.Sprintf("image %s, %s", img.ID, sandbox.FormatSize(img.Size)), Took: time.Since(began)})
	return img, nil
}

func (b *imageBuild) exportOnce(ctx, whose context.Context, key string, comp sandbox.Composition) (img sandbox.Image, err error) {
	c, release, found, err := b.useBuilt(ctx, key)
	if err != nil {
		return img, err
	}
	drop := func() {}
	if found {
		release()
		if img, drop, err = b.images.acquire(asServer(ctx), c.Image); err != nil && !errors.Is(err, sandbox.ErrImageNotFound) {
			return img, err
		}
		found = err == nil
	}
	if !found {
		if img, drop, err = b.composed(ctx, comp); err != nil {
			return img, err
		}
		if err := b.putBuilt(ctx, key, cached{Image: img.ID}); err != nil {
			drop()
			return img, err
		}
	}
	defer drop()
	for _, name := range append([]string{b.req.Name}, b.req.Tags...) {
		if name == "" {
			continue
		}
		if img, err = b.images.publish(whose, img, name); err != nil {
			return img, err
		}
	}
	b.images.onFree() // what had the names before may have none now
	return img, nil
}

// composed makes an image of a composition, with a record, and holds it.
func (b *imageBuild) composed(ctx context.Context, comp sandbox.Composition) (img sandbox.Image, drop func(), err error) {
	for try := 1; ; try++ { // the same image may just go that was made before
		img, drop, err = b.composedOnce(asServer(ctx), comp)
		if try == prepareTries || !errors.Is(err, errContentGone) && !errors.Is(err, sandbox.ErrImageNotFound) {
			return img, drop, err
		}
	}
}

func (b *imageBuild) composedOnce(ctx context.Context, comp sandbox.Composition) (img sandbox.Image, drop func(), err error) {
	if img, err = b.node.Images().Compose(ctx, comp, ""); err != nil {
		return img, nil, err
	}
	if err = b.images.reserve(ctx, img.ID); err != nil { // until acquire holds it
		return img, nil, err
	}
	defer b.images.drop(img.ID)
	if _, err = b.images.publish(ctx, img, ""); err == nil {
		b.images.setLoose(map[string]bool{img.ID: true})
		return b.images.acquire(ctx, img.ID)
	}
	if !errors.Is(err, errContentGone) {
		// Without a record no collection would find it.
		b.untilDone("remove image "+img.ID, func(ctx context.Context) error {
			_, err := b.images.collect(ctx, img.ID, false)
			return err
		})
	}
	return img, nil, err
}
