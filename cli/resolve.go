package cli

import (
	"context"
	"errors"
	"regexp"
	"strings"

	"connectrpc.com/connect"
	"github.com/spf13/cobra"

	covev1 "github.com/cove-sandbox/cove/api/cove/v1"
	"github.com/cove-sandbox/cove/sandbox"
)

var idPattern = regexp.MustCompile(`^[a-z0-9]+$`)

// resolve turns what the user typed into a sandbox: an exact id first, ended
// or not, then a prefix that exactly one live sandbox has.
func (a *app) resolve(ctx context.Context, arg string) (*covev1.Sandbox, error) {
	if !idPattern.MatchString(arg) {
		return nil, usagef("'cove ls' lists the sandboxes", "%q is not a sandbox id", arg)
	}
	api, err := a.client()
	if err != nil {
		return nil, err
	}
	got, err := api.Sandboxes.Get(ctx, connect.NewRequest(&covev1.GetSandboxRequest{Id: arg}))
	if err == nil {
		return got.Msg.GetSandbox(), nil
	}
	if !errors.Is(err, sandbox.ErrNotFound) {
		return nil, err
	}
	var hits []*covev1.Sandbox
	lerr := a.eachSandbox(ctx, &covev1.ListSandboxesRequest{}, func(s *covev1.Sandbox) bool {
		if strings.HasPrefix(s.GetId(), arg) {
			hits = append(hits, s)
		}
		return len(hits) < 4
	})
	switch {
	case lerr != nil:
		return nil, lerr
	case len(hits) == 1:
		return hits[0], nil
	case len(hits) > 1:
		ids := each(hits, func(s *covev1.Sandbox) string { return s.GetId() })
		return nil, usagef("write more of it: "+strings.Join(ids, ", "), "%q is the start of more than one sandbox id", arg)
	}
	return nil, (&sandbox.Error{Class: sandbox.NotFound, Msg: "no sandbox " + arg}).WithHint("'cove ls' lists the live ones, 'cove ls --all' the ended ones too")
}

// resolveID is resolve for callers that need only the id. A key whose scopes are
// files, say, may not look at sandboxes: what was typed is then taken for the
// whole id, and the call it is for says what is wrong with it.
func (a *app) resolveID(ctx context.Context, arg string) (string, error) {
	s, err := a.resolve(ctx, arg)
	if errors.Is(err, sandbox.ErrDenied) {
		return arg, nil
	}
	return s.GetId(), err
}

// eachSandbox walks every page until f returns false.
func (a *app) eachSandbox(ctx context.Context, req *covev1.ListSandboxesRequest, f func(*covev1.Sandbox) bool) error {
	api, err := a.client()
	if err != nil {
		return err
	}
	req.PageSize = 1000
	for {
		resp, err := api.Sandboxes.List(ctx, connect.NewRequest(req))
		if err != nil {
			return err
		}
		for _, s := range resp.Msg.GetSandboxes() {
			if !f(s) {
				return nil
			}
		}
		if req.PageToken = resp.Msg.GetNextPageToken(); req.PageToken == "" {
			return nil
		}
	}
}

// liveIDs completes sandbox ids. A server that cannot be reached completes to
// nothing: an error in the middle of a command line helps nobody.
func (a *app) liveIDs(limit int) cobra.CompletionFunc {
	return func(cmd *cobra.Command, args []string, prefix string) ([]string, cobra.ShellCompDirective) {
		if limit > 0 && len(args) >= limit {
			return nil, cobra.ShellCompDirectiveDefault
		}
		var out []string
		_ = a.eachSandbox(cmd.Context(), &covev1.ListSandboxesRequest{}, func(s *covev1.Sandbox) bool {
			if strings.HasPrefix(s.GetId(), prefix) {
				about := s.GetSpec().GetImage()
				if l := formatLabels(s.GetSpec().GetLabels()); l != "" {
					about += " " + l
				}
				out = append(out, s.GetId()+"\t"+escape(about))
			}
			return len(out) < 200
		})
		return out, cobra.ShellCompDirectiveNoFileComp
	}
}

// imageNames completes names of images.
func (a *app) imageNames(cmd *cobra.Command, args []string, prefix string) ([]string, cobra.ShellCompDirective) {
	api, err := a.client()
	if err != nil {
		return nil, cobra.ShellCompDirectiveNoFileComp
	}
	resp, err := api.Images.List(cmd.Context(), connect.NewRequest(&covev1.ListImagesRequest{}))
	if err != nil {
		return nil, cobra.ShellCompDirectiveNoFileComp
	}
	var out []string
	for _, i := range resp.Msg.GetImages() {
		for _, n := range i.GetNames() {
			if strings.HasPrefix(n, prefix) {
				out = append(out, n)
			}
		}
	}
	return out, cobra.ShellCompDirectiveNoFileComp
}
