package server

import (
	"context"
	"errors"
	"io"
	"net/http"
	"slices"
	"sync"
	"time"

	"connectrpc.com/connect"
	"google.golang.org/protobuf/encoding/protojson"

	covev1 "github.com/cove-sandbox/cove/api/cove/v1"
	"github.com/cove-sandbox/cove/sandbox"
	"github.com/cove-sandbox/cove/wire"
)

type imageService struct{ *Server }

// pullEvery is the shortest time between two progress events of one step.
const pullEvery = 100 * time.Millisecond

// Pull streams progress; the last event carries the image.
func (s imageService) Pull(ctx context.Context, r *connect.Request[covev1.PullImageRequest], out *connect.ServerStream[covev1.PullImageEvent]) error {
	if s.calls.isDraining() {
		return stopping()
	}
	m := r.Msg
	name := m.Name
	if name == "" {
		name = m.Reference
	}
	if err := sandbox.ValidateImageName("reference", m.Reference); err != nil {
		return err
	}
	if err := sandbox.ValidateImageName("name", name); err != nil {
		return err
	}
	whose := ctx // the name is the tenant's own
	if m.Shared {
		if !isRoot(ctx) {
			return notRoot("shared")
		}
		whose = asServer(ctx)
	}
	if m.Platform != "" {
		if err := sandbox.ValidateImageName("platform", m.Platform); err != nil {
			return err
		}
	}
	who := sandbox.RegistryAccess{Username: m.Username, Password: m.Password}
	if err := who.Validate(); err != nil {
		return err
	}
	if who.Username == "" {
		var err error
		if who, err = s.accessTo(ctx, m.Reference); err != nil {
			return err
		}
	}
	// Twice: a prune may take the content before it has its name.
	for try := 0; ; try++ {
		img, err := s.pullOnce(ctx, who, m.Reference, m.Platform, out)
		if err != nil {
			return err
		}
		img, err = s.images.publish(whose, img, name)
		if errors.Is(err, errContentGone) && try == 0 {
			continue
		}
		if err != nil {
			return err
		}
		return out.Send(&covev1.PullImageEvent{Step: "done", Done: img.Size, Total: img.Size, Image: wire.Image(img)})
	}
}

// pullOnce follows the one pull of a reference there is, sending its progress.
func (s imageService) pullOnce(ctx context.Context, who sandbox.RegistryAccess, ref, platform string, out *connect.ServerStream[covev1.PullImageEvent]) (sandbox.Image, error) {
	p, leave := s.images.join(who, ref, platform)
	defer leave()
	var sent sandbox.Progress
	for {
		progress, changed := p.look()
		if progress != sent && progress.Step != "done" { // the last event is ours, with the image
			if err := out.Send(wire.PullEvent(progress)); err != nil {
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

	mu      sync.Mutex
	latest  sandbox.Progress
	changed chan struct{} // closed and replaced on each progress
}

func (p *pull) report(pr ImageProgress) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.latest = pr
	close(p.changed)
	p.changed = make(chan struct{})
}

func (p *pull) look() (sandbox.Progress, <-chan struct{}) {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.latest, p.changed
}

func (s imageService) List(ctx context.Context, r *connect.Request[covev1.ListImagesRequest]) (*connect.Response[covev1.ListImagesResponse], error) {
	imgs, err := s.store.ListImages(ctx)
	if err != nil {
		return nil, err
	}
	out := &covev1.ListImagesResponse{}
	for _, img := range imgs {
		out.Images = append(out.Images, wire.Image(img))
	}
	return connect.NewResponse(out), nil
}

func (s imageService) Get(ctx context.Context, r *connect.Request[covev1.GetImageRequest]) (*connect.Response[covev1.GetImageResponse], error) {
	if err := sandbox.ValidateImageName("name", r.Msg.Name); err != nil {
		return nil, err
	}
	img, err := s.images.find(ctx, r.Msg.Name)
	if err != nil {
		return nil, err
	}
	return connect.NewResponse(&covev1.GetImageResponse{Image: wire.Image(img)}), nil
}

// Remove forgets a name, or all names if it is given an id, and the content
// with the last one if no sandbox uses it. What is in use goes with Prune.
func (s imageService) Remove(ctx context.Context, r *connect.Request[covev1.RemoveImageRequest]) (*connect.Response[covev1.RemoveImageResponse], error) {
	if err := sandbox.ValidateImageName("name", r.Msg.Name); err != nil {
		return nil, err
	}
	img, err := s.images.find(ctx, r.Msg.Name)
	if err != nil {
		return nil, err
	}
	names := []string{r.Msg.Name}
	if r.Msg.Name == img.ID && !slices.Contains(img.Names, img.ID) {
		names = img.Names
	}
	for _, name := range names {
		_, err := s.store.RemoveImageName(ctx, name)
		if errors.Is(err, sandbox.ErrDenied) && isRoot(ctx) {
			_, err = s.store.RemoveImageName(asServer(ctx), name) // everybody's
		}
		s.images.invalidate()
		if err != nil && !errors.Is(err, sandbox.ErrImageNotFound) {
			return nil, err
		}
	}
	if _, err := s.images.collect(ctx, img.ID, false); err != nil {
		return nil, err
	}
	return connect.NewResponse(&covev1.RemoveImageResponse{}), nil
}

// Prune removes content without a name that no live sandbox and no snapshot
// uses.
func (s imageService) Prune(ctx context.Context, r *connect.Request[covev1.PruneImagesRequest]) (*connect.Response[covev1.PruneImagesResponse], error) {
	ctx = asServer(ctx) // content is the installation's; the rights say who may
	contents, err := s.node.Images().Contents(ctx)
	if err != nil {
		return nil, err
	}
	keep := map[string]bool{}
	imgs, err := s.store.ListImages(ctx)
	if err != nil {
		return nil, err
	}
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
	out := &covev1.PruneImagesResponse{}
	for id, size := range contents {
		if keep[id] {
			continue
		}
		if !r.Msg.DryRun {
			gone, err := s.images.collect(ctx, id, false)
			if err != nil {
				return nil, err
			}
			if !gone {
				continue // a create or pull was faster
			}
		}
		out.Ids = append(out.Ids, id)
		out.Bytes += size
	}
	slices.Sort(out.Ids)
	return connect.NewResponse(out), nil
}

// importImage takes PUT /v1/images?name=N with a tar.
func (s *Server) importImage(w http.ResponseWriter, r *http.Request) error {
	if s.calls.isDraining() {
		return stopping()
	}
	name := r.URL.Query().Get("name")
	if err := sandbox.ValidateImageName("name", name); err != nil {
		return err
	}
	whose := r.Context() // the name is the tenant's own
	if r.URL.Query().Get("shared") == "true" {
		if !isRoot(whose) {
			return notRoot("shared")
		}
		whose = asServer(whose)
	}
	body, err := s.body(w, r, s.cfg.MaxImage)
	if err != nil {
		return err
	}
	img, err := s.node.Images().ImportTar(r.Context(), body, func(ImageProgress) {})
	if body.err != nil {
		err = body.err // the importer saw only that its tar broke off
	}
	if err != nil {
		return err
	}
	if _, err := io.Copy(io.Discard, body); err != nil { // a tar may be padded; the client must have meant to end here
		return body.err
	}
	if img, err = s.images.publish(whose, img, name); err != nil {
		return err
	}
	b, err := protojson.Marshal(wire.Image(img))
	if err != nil {
		return err
	}
	w.Header().Set("Content-Type", "application/json")
	_, _ = w.Write(append(b, '\n'))
	return nil
}

// PublishImage names content the node already has, for images that are made
// beside the API (the base image at first start). Writing to the store alone
// would leave the old meaning of a moved name in memory.
func (s *Server) PublishImage(ctx context.Context, img sandbox.Image, name string) (sandbox.Image, error) {
	return s.images.publish(asServer(ctx), img, name)
}
