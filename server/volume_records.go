package server

import (
	"context"
	"errors"
	"slices"

	"github.com/cove-sandbox/cove/node"
	"github.com/cove-sandbox/cove/sandbox"
	"github.com/cove-sandbox/cove/store"
)

// A volume is a record of the store and content on a node, under one id. The
// record is there before the content and goes after it, and its state says how
// far it is; reconcileVolumes finishes what a server that died had begun.

// volumes of the node, or why it has none.
func (s *Server) volumes() (node.Volumes, error) {
	if s.about.Volumes {
		return s.node.Volumes(), nil
	}
	return nil, &sandbox.Error{Class: sandbox.Unsupported, Msg: "node " + s.about.Name + " keeps no volumes"}
}

// findVolume is a volume in scope by name or id. A miss says what was probably
// meant.
func findVolume(ctx context.Context, st store.Volumes, ref string) (sandbox.Volume, error) {
	v, err := st.GetVolume(ctx, ref)
	if err == nil && v.State == sandbox.VolumeReady || err != nil && !errors.Is(err, sandbox.ErrNotFound) {
		return v, err
	}
	e := &sandbox.Error{Class: sandbox.NotFound, Msg: "no volume '" + ref + "'", Hint: `"cove volume ls" lists them`}
	all, lerr := readyVolumes(ctx, st)
	if lerr != nil {
		return sandbox.Volume{}, lerr
	}
	var names []string
	for _, v := range all {
		names = append(names, v.Name)
	}
	slices.Sort(names)
	if did := sandbox.DidYouMean(ref, names); did != "" {
		e.Msg += "; " + did
	}
	return sandbox.Volume{}, e
}

// readyVolumes are those in scope that are there for users.
func readyVolumes(ctx context.Context, st store.Volumes) ([]sandbox.Volume, error) {
	all, err := st.ListVolumes(ctx)
	return slices.DeleteFunc(all, func(v sandbox.Volume) bool { return v.State != sandbox.VolumeReady }), err
}

// withVolume runs f for a volume given by name or id.
func (s *Server) withVolume(ctx context.Context, field, ref string, f func(node.Volumes, sandbox.Volume) error) error {
	set, err := s.volumes()
	if err == nil {
		err = sandbox.ValidateVolumeName(field, ref) // every id is such a name too
	}
	if err != nil {
		return err
	}
	v, err := findVolume(ctx, s.store, ref)
	if err != nil {
		return err
	}
	if err = f(set, v); !errors.Is(err, sandbox.ErrNotFound) {
		return err
	}
	// A file in it, or all of it: deleted meanwhile, or lost.
	there, serr := set.Status(ctx, []string{v.ID})
	if serr != nil || len(there) > 0 {
		return err
	}
	if _, gone := findVolume(ctx, s.store, v.ID); gone != nil {
		return gone
	}
	return &sandbox.Error{Class: sandbox.Corrupt, Msg: "the content of volume '" + v.Name + "' is not on node " + v.Node,
		Hint: "bring back the node's directory of volumes, or give the volume up: cove volume rm " + v.Name}
}

// described are volumes with what the node says of them now.
func described(ctx context.Context, set node.Volumes, vols []sandbox.Volume) ([]sandbox.Volume, error) {
	ids := make([]string, len(vols))
	for i, v := range vols {
		ids[i] = v.ID
	}
	on, err := set.Status(ctx, ids)
	if err != nil {
		return nil, err
	}
	for i, v := range vols {
		vols[i].Used, vols[i].Holders = on[v.ID].Used, on[v.ID].Holders
	}
	return vols, nil
}

func describedOne(ctx context.Context, set node.Volumes, v sandbox.Volume) (sandbox.Volume, error) {
	vols, err := described(ctx, set, []sandbox.Volume{v})
	if err != nil {
		return v, err
	}
	return vols[0], nil
}

// makeVolume records a volume and has content make what is in it, or nothing is
// left of either.
func (s *Server) makeVolume(ctx context.Context, v sandbox.Volume, content func(set node.Volumes, id string) error) (sandbox.Volume, error) {
	set, err := s.volumes()
	if err != nil {
		return v, err
	}
	v.ID, v.Tenant, v.Node = sandbox.NewID(s.cfg.Rand), store.ScopeOf(ctx).Tenant(), s.about.Name
	v.Size, v.State, v.CreatedAt = sandbox.RoundVolumeSize(v.Size), sandbox.VolumeMaking, s.cfg.Clock().UTC()
	settle, err := s.admitVolume(ctx, v.ID, v.Tenant, v.Size)
	if err != nil {
		return v, err
	}
	if err := s.store.CreateVolume(ctx, v); err != nil {
		settle(false)
		return v, err
	}
	settle(true)
	if err = content(set, v.ID); err == nil {
		// Its caller may have left: it is there all the same, under its name.
		work, cancel := context.WithTimeout(context.WithoutCancel(ctx), undoTimeout)
		defer cancel()
		err = s.store.MoveVolume(work, v.ID, sandbox.VolumeMaking, sandbox.VolumeReady)
	}
	if err != nil {
		s.untilDone("take back volume "+v.ID, func(ctx context.Context) error { return s.dropVolume(ctx, set, v.ID) })
		return v, err
	}
	v.State = sandbox.VolumeReady
	return describedOne(ctx, set, v)
}

// dropVolume removes the content and then the record of a volume that is not
// ready.
func (s *Server) dropVolume(ctx context.Context, set node.Volumes, id string) error {
	if err := set.Delete(ctx, id); err != nil {
		there, serr := set.Status(ctx, []string{id})
		if serr != nil || len(there) > 0 {
			return err
		} // or it is gone, and what failed is for the node to clear away
	}
	return s.store.DeleteVolume(ctx, id)
}

// deleteVolume is finished once begun. One that somebody holds is as it was.
func (s *Server) deleteVolume(ctx context.Context, set node.Volumes, v sandbox.Volume) error {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), createTimeout)
	defer cancel()
	if err := s.store.MoveVolume(ctx, v.ID, sandbox.VolumeReady, sandbox.VolumeDeleting); err != nil {
		return err
	}
	err := s.dropVolume(ctx, set, v.ID)
	if err != nil {
		s.untilDone("keep volume "+v.ID, func(ctx context.Context) error {
			err := s.store.MoveVolume(ctx, v.ID, sandbox.VolumeDeleting, sandbox.VolumeReady)
			if errors.Is(err, sandbox.ErrNotFound) {
				return nil
			}
			return err
		})
	}
	return err
}

// resizeVolume grows a volume on its node and then on record. Should the server
// die in between, reconcileVolumes takes the node's word.
func (s *Server) resizeVolume(ctx context.Context, set node.Volumes, v sandbox.Volume, size int64) (sandbox.Volume, error) {
	size = sandbox.RoundVolumeSize(size)
	settle, err := s.admitVolume(ctx, v.ID, v.Tenant, size)
	if err != nil {
		return v, err
	}
	got, err := set.Resize(ctx, v.ID, size)
	if err != nil {
		settle(false)
		return v, err
	}
	settle(true)
	v.Size = got
	if err := s.store.ResizeVolume(context.WithoutCancel(ctx), v.ID, got); err != nil {
		return v, err
	}
	return describedOne(ctx, set, v)
}
