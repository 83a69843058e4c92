package server

import (
	"context"
	"errors"
	"strings"

	"github.com/cove-sandbox/cove/sandbox"
)

// reconcileVolumes brings the records of volumes and what the node has of them
// together, and returns the records. Content goes only where a record says so.
//
//	record     content   then
//	making     any       both go: nobody was told of it
//	deleting   any       both go: its owner said so
//	ready      there     kept; the size is the node's, which grows first
//	ready      none      kept and told: lost, or the node's disk is not there
//	none       old       recorded as the node's own record says
//	none       there     kept and told: nobody knows whose it is
func (s *Server) reconcileVolumes(ctx context.Context) ([]sandbox.Volume, error) {
	records, err := s.store.ListVolumes(ctx)
	set := s.node.Volumes()
	if err != nil || !s.about.Volumes {
		return records, err
	}
	list, err := set.List(ctx)
	if err != nil {
		return nil, err
	}
	on := map[string]sandbox.VolumeContent{}
	for _, c := range list {
		on[c.ID] = c
	}
	for _, v := range records {
		c, there := on[v.ID]
		delete(on, v.ID)
		switch {
		case v.Node != s.about.Name:
		case v.State != sandbox.VolumeReady:
			s.log.Info("a volume that was being made or deleted goes", "volume", v.ID, "name", v.Name, "tenant", v.Tenant, "state", v.State)
			s.untilDone("remove volume "+v.ID, func(ctx context.Context) error { return s.dropVolume(ctx, set, v.ID) })
		case !there:
			s.log.Error("a volume is on record and not on the node; its record is kept", "volume", v.ID, "name", v.Name, "tenant", v.Tenant)
		case c.Size != v.Size:
			if err := s.store.ResizeVolume(ctx, v.ID, c.Size); err != nil {
				return nil, err
			}
		}
	}
	for _, c := range on {
		if c.Old == nil {
			s.log.Error("the node has a volume that is not on record; it is kept, and nobody can use it", "volume", c.ID, "size", c.Size)
			continue
		}
		if err := s.adoptVolume(ctx, c); err != nil {
			return nil, err
		}
	}
	return s.store.ListVolumes(ctx)
}

// adoptVolume records a volume from when nodes kept the records.
func (s *Server) adoptVolume(ctx context.Context, c sandbox.VolumeContent) error {
	v := *c.Old
	v.ID, v.Size, v.State, v.Node = c.ID, c.Size, sandbox.VolumeReady, s.about.Name
	v.Tenant, v.Name = fromOldName(v.Name)
	err := s.store.CreateVolume(ctx, v)
	if errors.Is(err, sandbox.ErrAlreadyExists) { // its name was given to another since
		s.log.Warn("a volume keeps its id for a name", "volume", v.ID, "name", v.Name, "tenant", v.Tenant)
		v.Name = v.ID
		err = s.store.CreateVolume(ctx, v)
	}
	if errors.Is(err, sandbox.ErrNotFound) {
		s.log.Error("the node has a volume of a tenant that is not there; it is kept, and nobody can use it", "volume", v.ID, "name", v.Name, "tenant", v.Tenant)
		return nil
	}
	if err == nil {
		s.log.Info("a volume of an older version is on record now", "volume", v.ID, "name", v.Name, "tenant", v.Tenant)
	}
	return err
}

// fromOldName is the tenant of a volume and what it calls it, of a name that a
// node kept: "data.TENANT_", or "data" of the default tenant. No name that a user
// may choose ends in "_".
func fromOldName(name string) (tenant, plain string) {
	marked, ok := strings.CutSuffix(name, "_")
	if i := strings.LastIndexByte(marked, '.'); ok && i > 0 {
		return marked[i+1:], marked[:i]
	}
	return sandbox.DefaultTenant, name
}

// reconcileRecordings does so for recordings, when the sandboxes are settled.
//
//	record        content    then
//	making        any        both go: nobody was told of it
//	deleting      any        both go: its owner said so
//	open          open       kept: its sandbox goes on with it
//	open          ended      ended on record too
//	open          none       it goes if its sandbox never ran; else ended as interrupted, and told
//	ended         there      kept
//	ended         none       kept and told: lost
//	none          old        recorded as its own header says
//	none          there      kept and told: nobody knows whose it is
func (s *Server) reconcileRecordings(ctx context.Context) error {
	records, err := s.store.ListRecordings(ctx)
	set := s.node.Recordings()
	if err != nil || !s.about.Recordings {
		return err
	}
	list, err := set.List(ctx)
	if err != nil {
		return err
	}
	on := map[string]sandbox.Recording{}
	for _, is := range list {
		on[is.ID] = is
	}
	for _, r := range records {
		is, there := on[r.ID]
		delete(on, r.ID)
		switch {
		case r.Node != s.about.Name:
		case r.State == sandbox.RecordingMaking || r.State == sandbox.RecordingDeleting:
			s.log.Info("a recording that was being imported or deleted goes", "recording", r.ID, "name", r.Name, "tenant", r.Tenant, "state", r.State)
			s.giveUpRecording(r.ID)
		case there && r.State == sandbox.RecordingOpen && is.State != sandbox.RecordingOpen:
			is.Name, is.Tenant = r.Name, r.Tenant
			err = s.store.FinishRecording(ctx, is)
		case !there && r.State == sandbox.RecordingOpen:
			err = s.settleUnbegun(ctx, r)
		case !there:
			s.log.Error("a recording is on record and not on the node; its record is kept", "recording", r.ID, "name", r.Name, "tenant", r.Tenant)
		}
		if err != nil {
			return err
		}
	}
	for _, is := range on {
		if err := s.adoptRecording(ctx, is); err != nil {
			return err
		}
	}
	return nil
}

// settleUnbegun is for a recording that is open on record and of which the node
// has nothing: its sandbox was not made, or its file cannot be read.
func (s *Server) settleUnbegun(ctx context.Context, r sandbox.Recording) error {
	sb, err := s.store.GetSandbox(ctx, r.Sandbox)
	if errors.Is(err, sandbox.ErrNotFound) || err == nil && sb.End != nil && sb.End.Cause == sandbox.NodeLost {
		s.log.Info("a recording of a sandbox that was not made goes", "recording", r.ID, "name", r.Name, "tenant", r.Tenant, "sandbox", r.Sandbox)
		return s.store.DeleteRecording(ctx, r.ID)
	}
	if err != nil {
		return err
	}
	s.log.Error("a recording is on record and not on the node; its record is kept", "recording", r.ID, "name", r.Name, "tenant", r.Tenant, "sandbox", r.Sandbox)
	r.State, r.FinishedAt = sandbox.RecordingInterrupted, s.cfg.Clock().UTC()
	return s.store.FinishRecording(ctx, r)
}

// adoptRecording records a recording from when nodes kept the records.
func (s *Server) adoptRecording(ctx context.Context, r sandbox.Recording) error {
	if r.Tenant == "" {
		s.log.Error("the node has a recording that is not on record; it is kept, and nobody can use it", "recording", r.ID, "bytes", r.Bytes)
		return nil
	}
	r.Node = s.about.Name
	err := s.store.CreateRecording(ctx, r)
	if errors.Is(err, sandbox.ErrAlreadyExists) { // its name was given to another since
		s.log.Warn("a recording keeps its id for a name", "recording", r.ID, "name", r.Name, "tenant", r.Tenant)
		r.Name = ""
		err = s.store.CreateRecording(ctx, r)
	}
	if errors.Is(err, sandbox.ErrNotFound) {
		s.log.Error("the node has a recording of a tenant that is not there; it is kept, and nobody can use it", "recording", r.ID, "name", r.Name, "tenant", r.Tenant)
		return nil
	}
	if err == nil {
		s.log.Info("a recording of an older version is on record now", "recording", r.ID, "name", r.Name, "tenant", r.Tenant)
	}
	return err
}
