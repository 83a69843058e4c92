package server

import (
	"cmp"
	"context"
	"crypto/rand"
	"errors"
	"io"
	"maps"
	"slices"
	"strings"
	"time"

	"github.com/cove-sandbox/cove/internal/notify"
	"github.com/cove-sandbox/cove/sandbox"
)

// pullEvery is the shortest time between two reports of one step.
const pullEvery = 100 * time.Millisecond

// PullRequest asks for an image of a registry.
type PullRequest struct {
	Reference string
	Platform  string                 // "" = the node's
	Name      string                 // that it gets; "" = its reference
	Shared    bool                   // the name is everybody's
	As        sandbox.RegistryAccess // nobody: who the tenant logged in as
}

// PullImage fetches an image and names it. The sink is told how far it is.
func (s *Server) PullImage(ctx context.Context, r PullRequest, sink func(sandbox.Progress) error) (img sandbox.Image, err error) {
	ctx, call, err := s.begin(ctx, "image.pull", about("name", r.Name), about("image", r.Reference))
	if err != nil {
		return img, err
	}
	defer call.end(&err)
	name := cmp.Or(r.Name, r.Reference)
	if err := firstError(sandbox.ValidateImageName("reference", r.Reference), sandbox.ValidateImageName("name", name)); err != nil {
		return img, err
	}
	whose, err := ownerOfName(ctx, r.Shared)
	if err != nil {
		return img, err
	}
	if r.Platform != "" {
		if err := sandbox.ValidateImageName("platform", r.Platform); err != nil {
			return img, err
		}
	}
	if err := s.admitImage(whose); err != nil {
		return img, err
	}
	if err := r.As.Validate(); err != nil {
		return img, err
	}
	if r.As.Username == "" {
		if r.As, err = s.accessTo(ctx, r.Reference); err != nil {
			return img, err
		}
	}
	return s.pullAs(ctx, whose, r, name, func(p sandbox.Progress) error {
		call.begun()
		return sink(p)
	})
}

// pullAs fetches an image and gives it a name in the scope of whose. Twice: a prune
// may take the content before it has its name.
func (s *Server) pullAs(ctx, whose context.Context, r PullRequest, name string, sink func(sandbox.Progress) error) (img sandbox.Image, err error) {
	for try := 0; ; try++ {
		if img, err = s.pullOnce(ctx, r, sink); err != nil {
			return img, err
		}
		img, err = s.images.publish(whose, img, name)
		if !errors.Is(err, errContentGone) || try > 0 {
			return img, err
		}
	}
}

// ownerOfName is the scope in which an image gets its name: the tenant's own,
// or everybody's, which only root may ask for.
func ownerOfName(ctx context.Context, shared bool) (context.Context, error) {
	switch {
	case !shared:
		return ctx, nil
	case !isRoot(ctx):
		return ctx, notRoot("shared")
	}
	return asServer(ctx), nil
}

// pullOnce follows the one pull of a reference there is, reporting its progress.
func (s *Server) pullOnce(ctx context.Context, r PullRequest, sink func(sandbox.Progress) error) (sandbox.Image, error) {
	p, leave := s.images.join(r.As, r.Reference, r.Platform)
	defer leave()
	var sent sandbox.Progress
	for {
		progress, changed := p.progress.Get()
		if progress != sent && progress.Step != "done" { // that it is done is said with the image
			if err := sink(progress); err != nil {
				return sandbox.Image{}, err
			}
			pause := time.NewTimer(pullEvery)
			select {
			case <-pause.C:
			case <-p.done:
			case <-ctx.Done():
			}
			pause.Stop()
			sent = progress
		}
		select {
		case <-changed:
		case <-p.done:
			return p.img, p.err
		case <-ctx.Done():
			return sandbox.Image{}, ctx.Err()
		}
	}
}

// pull is one fetch of a reference, shared by everyone who asks for it
// meanwhile. It ends when nobody is left.
type pull struct {
	cancel context.CancelFunc
	done   chan struct{}
	img    sandbox.Image // set before done is closed
	err    error

	progress notify.Latest[sandbox.Progress]
}

// ListImages lists the images the caller sees.
func (s *Server) ListImages(ctx context.Context) (imgs []sandbox.Image, err error) {
	ctx, call, err := s.begin(ctx, "image.list")
	if err != nil {
		return nil, err
	}
	defer call.end(&err)
	return s.store.ListImages(ctx)
}

// GetImage finds an image by a name or its id.
func (s *Server) GetImage(ctx context.Context, name string) (img sandbox.Image, err error) {
	ctx, call, err := s.begin(ctx, "image.get", about("name", name))
	if err != nil {
		return img, err
	}
	defer call.end(&err)
	if err := sandbox.ValidateImageName("name", name); err != nil {
		return img, err
	}
	return s.images.find(ctx, name)
}

// RemoveImage forgets a name, or all names if it is given an id, and the content
// with the last one if no sandbox uses it. What is in use goes with PruneImages.
func (s *Server) RemoveImage(ctx context.Context, name string) (err error) {
	ctx, call, err := s.begin(ctx, "image.remove", about("name", name))
	if err != nil {
		return err
	}
	defer call.end(&err)
	if err := sandbox.ValidateImageName("name", name); err != nil {
		return err
	}
	img, err := s.images.find(ctx, name)
	if err != nil {
		return err
	}
	names := []string{name}
	if name == img.ID && !slices.Contains(img.Names, img.ID) {
		names = img.Names
	}
	for _, name := range names {
		_, err := s.store.RemoveImageName(ctx, name)
		if errors.Is(err, sandbox.ErrDenied) && isRoot(ctx) {
			_, err = s.store.RemoveImageName(asServer(ctx), name) // everybody's
		}
		s.images.invalidate()
		if err != nil && !errors.Is(err, sandbox.ErrImageNotFound) {
			return err
		}
	}
	_, err = s.images.collect(ctx, img.ID, false)
	return err
}

// PruneImages removes content without a name that no live sandbox and no
// snapshot uses, and says what; with dryRun only what it would be.
func (s *Server) PruneImages(ctx context.Context, dryRun bool) (ids []string, bytes int64, err error) {
	ctx, call, err := s.begin(ctx, "image.prune")
	if err != nil {
		return nil, 0, err
	}
	defer call.end(&err)
	ctx = asServer(ctx) // content is the installation's; the rights say who may
	unused, err := s.unusedImages(ctx)
	if err != nil {
		return nil, 0, err
	}
	for id, size := range unused {
		if !dryRun {
			gone, err := s.images.collect(ctx, id, false)
			if err != nil {
				return nil, 0, err
			}
			if !gone {
				continue // a create or pull was faster
			}
		}
		ids = append(ids, id)
		bytes += size
	}
	slices.Sort(ids)
	for _, id := range ids {
		call.concerns("id", id)
	}
	return ids, bytes, nil
}

// unusedImages is the content that nothing refers to, and its sizes.
func (s *Server) unusedImages(ctx context.Context) (map[string]int64, error) {
	contents, err := s.node.Images().Contents(ctx)
	if err != nil {
		return nil, err
	}
	imgs, err := s.store.ListImages(ctx)
	if err != nil {
		return nil, err
	}
	keep := map[string]bool{}
	for _, img := range imgs {
		if len(img.Names) > 0 {
			keep[img.ID] = true
		} else if _, here := contents[img.ID]; !here {
			contents[img.ID] = 0 // a record without content goes too
		}
	}
	live, err := s.liveRecords(ctx)
	if err != nil {
		return nil, err
	}
	for _, sb := range live {
		keep[sb.ImageID] = true
	}
	needed, err := s.store.SnapshotImages(ctx)
	if err != nil {
		return nil, err
	}
	for _, id := range needed {
		keep[id] = true
	}
	maps.DeleteFunc(contents, func(id string, _ int64) bool { return keep[id] })
	return contents, nil
}

// ImportImage makes an image of a tar and names it.
func (s *Server) ImportImage(ctx context.Context, name string, shared bool, tar Upload) (img sandbox.Image, err error) {
	ctx, call, err := s.begin(ctx, "image.import", about("name", name))
	if err != nil {
		return img, err
	}
	defer call.end(&err)
	if err := sandbox.ValidateImageName("name", name); err != nil {
		return img, err
	}
	whose, err := ownerOfName(ctx, shared)
	if err == nil {
		err = s.admitImage(whose)
	}
	if err != nil {
		return img, err
	}
	body, err := boundedUpload(tar, s.cfg.MaxImage)
	if err != nil {
		return img, err
	}
	img, err = s.node.Images().Import(ctx, body, "")
	if err = body.or(err); err != nil { // of one that broke off the importer saw only that it did
		return img, err
	}
	if _, err := io.Copy(io.Discard, body); err != nil { // a tar may be padded; the client must have meant to end here
		return img, body.or(err)
	}
	return s.images.publish(whose, img, name)
}

// PublishImage names content the node already has, for images that are made
// beside the API (the base image at first start). Writing to the store alone
// would leave the old meaning of a moved name in memory.
func (s *Server) PublishImage(ctx context.Context, img sandbox.Image, name string) (sandbox.Image, error) {
	return s.images.publish(asServer(ctx), img, name)
}

// PushRequest asks for an image to be sent to a registry.
type PushRequest struct {
	Name      string                 // or id
	Reference string                 // where to; "" = its name
	As        sandbox.RegistryAccess // nobody: who the tenant logged in as
}

// PushImage sends an image to a registry and returns the reference it has there.
func (s *Server) PushImage(ctx context.Context, r PushRequest, sink func(sandbox.Progress) error) (ref string, err error) {
	ctx, call, err := s.begin(ctx, "image.push", about("name", r.Name), about("image", r.Reference))
	if err != nil {
		return "", err
	}
	defer call.end(&err)
	r.Reference = cmp.Or(r.Reference, r.Name)
	if err := firstError(sandbox.ValidateImageName("name", r.Name), sandbox.ValidateImageName("reference", r.Reference), r.As.Validate()); err != nil {
		return "", err
	}
	img, release, err := s.images.acquire(ctx, r.Name)
	if err != nil {
		return "", err
	}
	defer release()
	if r.As.Username == "" {
		if r.As, err = s.accessTo(ctx, r.Reference); err != nil {
			return "", err
		}
	}
	op := "push-" + rand.Text()
	work, stop := context.WithCancel(ctx)
	var latest notify.Latest[sandbox.Progress]
	go follow(work, s.node, op, latest.Set)
	type result struct {
		digest string
		err    error
	}
	pushed, over := make(chan result, 1), make(chan struct{})
	go func() {
		defer close(over)
		digest, err := s.node.Images().Push(work, r.As, img.ID, r.Reference, op)
		pushed <- result{digest, err}
	}()
	defer func() { stop(); <-over }() // the image is held until nothing reads it
	var sent sandbox.Progress
	tick := time.NewTicker(pullEvery)
	defer tick.Stop()
	for {
		select {
		case <-tick.C:
			if p, _ := latest.Get(); p != sent && p.Step != "done" {
				call.begun()
				if err := sink(p); err != nil {
					return "", err
				}
				sent = p
			}
		case got := <-pushed:
			if got.err != nil {
				return "", got.err
			}
			repo, _, _ := strings.Cut(r.Reference, "@")
			if i := strings.LastIndexByte(repo, ':'); i > strings.LastIndexByte(repo, '/') {
				repo = repo[:i]
			}
			return repo + "@" + got.digest, nil
		}
	}
}
