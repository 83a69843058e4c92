package native

import (
	"context"
	"net/http"

	"connectrpc.com/connect"

	covev1 "github.com/cove-sandbox/cove/api/cove/v1"
	"github.com/cove-sandbox/cove/sandbox"
	"github.com/cove-sandbox/cove/server"
	"github.com/cove-sandbox/cove/wire"
)

type images struct{ *server.Server }

// Pull streams progress; the last event carries the image.
func (s images) Pull(ctx context.Context, r *connect.Request[covev1.PullImageRequest], out *connect.ServerStream[covev1.PullImageEvent]) error {
	m := r.Msg
	req := server.PullRequest{Reference: m.Reference, Platform: m.Platform, Name: m.Name, Shared: m.Shared,
		As: sandbox.RegistryAccess{Username: m.Username, Password: m.Password}}
	img, err := s.PullImage(ctx, req, func(p sandbox.Progress) error { return out.Send(wire.PullEvent(p)) })
	if err != nil {
		return err
	}
	return out.Send(&covev1.PullImageEvent{Step: "done", Done: img.Size, Total: img.Size, Image: wire.Image(img)})
}

func (s images) List(ctx context.Context, r *connect.Request[covev1.ListImagesRequest]) (*connect.Response[covev1.ListImagesResponse], error) {
	list, err := s.ListImages(ctx)
	return answer(&covev1.ListImagesResponse{Images: each(list, wire.Image)}, err)
}

func (s images) Get(ctx context.Context, r *connect.Request[covev1.GetImageRequest]) (*connect.Response[covev1.GetImageResponse], error) {
	img, err := s.GetImage(ctx, r.Msg.Name)
	return answer(&covev1.GetImageResponse{Image: wire.Image(img)}, err)
}

func (s images) Remove(ctx context.Context, r *connect.Request[covev1.RemoveImageRequest]) (*connect.Response[covev1.RemoveImageResponse], error) {
	return answer(&covev1.RemoveImageResponse{}, s.RemoveImage(ctx, r.Msg.Name))
}

func (s images) Prune(ctx context.Context, r *connect.Request[covev1.PruneImagesRequest]) (*connect.Response[covev1.PruneImagesResponse], error) {
	ids, bytes, err := s.PruneImages(ctx, r.Msg.DryRun)
	return answer(&covev1.PruneImagesResponse{Ids: ids, Bytes: bytes}, err)
}

func (s images) Login(ctx context.Context, r *connect.Request[covev1.LoginRegistryRequest]) (*connect.Response[covev1.LoginRegistryResponse], error) {
	m := r.Msg
	l, err := s.LoginRegistry(ctx, m.Registry, sandbox.RegistryAccess{Username: m.Username, Password: m.Password})
	return answer(&covev1.LoginRegistryResponse{Login: wire.RegistryLogin(l)}, err)
}

func (s images) Logins(ctx context.Context, r *connect.Request[covev1.ListLoginsRequest]) (*connect.Response[covev1.ListLoginsResponse], error) {
	list, err := s.RegistryLogins(ctx)
	return answer(&covev1.ListLoginsResponse{Logins: each(list, wire.RegistryLogin)}, err)
}

func (s images) Logout(ctx context.Context, r *connect.Request[covev1.LogoutRegistryRequest]) (*connect.Response[covev1.LogoutRegistryResponse], error) {
	return answer(&covev1.LogoutRegistryResponse{}, s.LogoutRegistry(ctx, r.Msg.Registry))
}

// putImage is PUT /v1/images?name=N&shared=true with a tar.
func (d *dialect) putImage(w http.ResponseWriter, r *http.Request) error {
	q := r.URL.Query()
	img, err := d.server.ImportImage(r.Context(), q.Get("name"), q.Get("shared") == "true", content(w, r))
	return writeMessage(w, wire.Image(img), err)
}
