package server

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sync/atomic"

	"github.com/cove-sandbox/cove/sandbox"
	"github.com/cove-sandbox/cove/store"
)

// Reconcile makes the store say what the node really runs. It is the normal
// way to start, not a repair: after it, and before anything is served, every
// live record has a live sandbox and the other way round.
//
//	record          node            then
//	live            live            kept; episode from the node, expiry from the store
//	live            in Ends         ended with the node's cause
//	live            knows nothing   ended with node_lost
//	ended or none   live            killed
//	ended or none   in Ends         acknowledged
//
// Volumes and recordings: see reconcileVolumes and reconcileRecordings.
//
// What a build of a template or a grade left behind is killed: neither outlives the
// server that runs it. Grades that were under way end with infra. Content that no record refers to is removed.
func (s *Server) Reconcile(ctx context.Context) error {
	if err := s.reconcile(ctx); err != nil {
		return sandbox.WithOp("server.reconcile", err)
	}
	return nil
}

func (s *Server) reconcile(ctx context.Context) error {
	ctx = asServer(ctx)
	list, err := s.node.Live(ctx)
	if err != nil {
		return err
	}
	live := make(map[string]sandbox.Sandbox, len(list))
	for _, sb := range list {
		live[sb.ID] = sb
	}
	if err := s.handOverAll(ctx, list); err != nil {
		return err
	}
	ends, err := s.node.Ends(ctx)
	if err != nil {
		return err
	}

	// The whole list first: ending records while paging through them would move the pages.
	records, err := s.liveRecords(ctx)
	if err != nil {
		return err
	}
	volumes, err := s.reconcileVolumes(ctx)
	if err != nil {
		return err
	}
	s.reservations.load(records, volumes)
	if err := s.loadLeases(ctx, records); err != nil {
		return err
	}
	var kept, ended, lost atomic.Int64
	// Together, because the store commits in groups: after a reboot thousands may have ended.
	err = inParallel(ctx, reconcileWidth, records, func(rec sandbox.Sandbox) error {
		if rec.Node != s.about.Name {
			return nil // another node's
		}
		on, isLive := live[rec.ID]
		end, hasEnded := ends[rec.ID]
		switch {
		case isLive && isBuild(rec):
			end = sandbox.End{Cause: sandbox.Infra, At: s.cfg.Clock().UTC(), Detail: "the server stopped while it was building a template in it, or grading"}
			if err := s.killOnNode(ctx, rec.ID, end.Detail); err != nil {
				return err
			}
		case isLive:
			kept.Add(1)
			if rec.Unclaimed {
				s.endUnclaimed(rec.ID)
			}
			return s.keep(ctx, rec, on)
		case hasEnded:
			ended.Add(1)
		default:
			lost.Add(1)
			end = sandbox.End{Cause: sandbox.NodeLost, At: s.cfg.Clock().UTC(),
				Detail: fmt.Sprintf("node %s does not know it: it was lost with the machine, or the server stopped while creating it", s.about.Name)}
		}
		_, err := s.recordEnd(ctx, rec.ID, end)
		return err
	})
	if err != nil {
		return err
	}
	for _, rec := range records {
		delete(live, rec.ID)
	}
	for id := range live {
		s.log.Warn("the node runs a sandbox that nobody owns; it is killed", "sandbox", id)
		if err := s.killOnNode(ctx, id, "no live record of it in the store"); err != nil {
			return err
		}
	}
	// Whatever the node still reports as ended is on record now or owned by nobody.
	if ends, err = s.node.Ends(ctx); err != nil {
		return err
	}
	for id, end := range ends {
		if err := s.settleEnd(ctx, id, end); err != nil {
			return err
		}
	}
	if err := s.endGrades(ctx); err != nil {
		return err
	}
	if err := s.reconcileRecordings(ctx); err != nil {
		return err
	}
	if err := s.ships.load(ctx); err != nil {
		return err
	}
	if err := s.resumeSteps(ctx); err != nil {
		return err
	}
	if _, err := s.collect(ctx, atStart); err != nil {
		s.log.Warn("cannot remove content that nothing refers to; it will be tried again", "err", err)
		s.content.want()
	}
	s.log.Info("reconciled with the node", "kept", kept.Load(), "ended", ended.Load(), "lost", lost.Load(), "killed", len(live))
	return nil
}

// reconcileWidth is how many records are brought in line at once.
const reconcileWidth = 32

// keep brings the record of a live sandbox and the node's idea of it together.
// The node knows the episode, the image, the disk, the network and the secrets, because a
// reset, a restore or another policy happens there first. The store knows the expiry, because SetTimeout writes there first.
func (s *Server) keep(ctx context.Context, rec, on sandbox.Sandbox) error {
	otherImage := on.ImageID != "" && on.ImageID != rec.ImageID
	otherNetwork := on.NetworkGeneration != rec.NetworkGeneration
	otherSecrets := !slices.Equal(on.Spec.Secrets, rec.Spec.Secrets) || on.Spec.Authority != rec.Spec.Authority
	otherDisk := on.Spec.Resources.Disk != 0 && on.Spec.Resources.Disk != rec.Spec.Resources.Disk
	if rec.State != sandbox.Running || rec.Episode != on.Episode || otherImage || otherDisk || otherNetwork || otherSecrets {
		_, err := s.store.UpdateSandbox(ctx, rec.ID, func(sb *sandbox.Sandbox) error {
			// An ending that the old server never finished: whoever asked for it asks again.
			sb.State, sb.Episode = sandbox.Running, on.Episode
			if otherImage {
				sb.ImageID = on.ImageID
			}
			if otherDisk {
				sb.Spec.Resources.Disk = on.Spec.Resources.Disk
			}
			if otherNetwork {
				sb.Spec.Network, sb.NetworkGeneration = on.Spec.Network, on.NetworkGeneration
			}
			sb.Spec.Secrets, sb.Spec.Authority = on.Spec.Secrets, on.Spec.Authority
			return nil
		})
		if err == nil && otherDisk {
			var settle func(bool)
			if settle, err = s.reservations.resize(rec.ID, sandbox.Quota{}, on.Spec.Resources.Disk); err == nil {
				settle(true)
			}
		}
		if err != nil {
			return err
		}
	}
	if rec.ExpiresAt.Equal(on.ExpiresAt) {
		return nil
	}
	err := s.node.SetExpiry(ctx, rec.ID, rec.ExpiresAt)
	if errors.Is(err, sandbox.ErrNotFound) || errors.Is(err, sandbox.ErrEnded) {
		return nil // it ended just now; its end comes with the others
	}
	return err
}

// liveRecords is every sandbox that has not ended, however many.
func (s *Server) liveRecords(ctx context.Context) ([]sandbox.Sandbox, error) {
	var all []sandbox.Sandbox
	f := store.Filter{PageSize: 1000}
	for {
		page, next, err := s.store.ListSandboxes(ctx, f)
		if err != nil {
			return nil, err
		}
		all = append(all, page...)
		if next == "" {
			return all, nil
		}
		f.PageToken = next
	}
}
