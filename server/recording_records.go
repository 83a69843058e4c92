package server

import (
	"context"
	"errors"
	"io"
	"slices"

	"github.com/cove-sandbox/cove/node"
	"github.com/cove-sandbox/cove/sandbox"
	"github.com/cove-sandbox/cove/store"
)

// A recording is a record of the store and content on a node, under one id, as a
// volume is. One that a sandbox makes is on record before the sandbox runs; how
// much is on it is the node's to say until it has ended, and on record from the
// first look after that.

func (s *Server) recordings() (node.Recordings, error) {
	if s.about.Recordings {
		return s.node.Recordings(), nil
	}
	return nil, &sandbox.Error{Class: sandbox.Unsupported, Msg: "node " + s.about.Name + " keeps no recordings"}
}

// listRecordings are those in scope that are there for users, as they are now.
func (s *Server) listRecordings(ctx context.Context) ([]sandbox.Recording, error) {
	all, err := s.store.ListRecordings(ctx)
	if err != nil {
		return nil, err
	}
	all = slices.DeleteFunc(all, func(r sandbox.Recording) bool {
		return r.State == sandbox.RecordingMaking || r.State == sandbox.RecordingDeleting
	})
	return all, s.refresh(ctx, all)
}

// refresh asks the node about recordings that are open on record.
func (s *Server) refresh(ctx context.Context, recs []sandbox.Recording) error {
	var open []string
	for _, r := range recs {
		if r.State == sandbox.RecordingOpen {
			open = append(open, r.ID)
		}
	}
	if len(open) == 0 || !s.about.Recordings {
		return nil
	}
	now, err := s.node.Recordings().Status(ctx, open)
	if err != nil {
		return err
	}
	for i, r := range recs {
		is, there := now[r.ID]
		if !there || r.State != sandbox.RecordingOpen {
			continue
		}
		recs[i].State, recs[i].FinishedAt, recs[i].Exchanges = is.State, is.FinishedAt, is.Exchanges
		recs[i].Bytes, recs[i].Truncated, recs[i].Dropped = is.Bytes, is.Truncated, is.Dropped
		if is.State != sandbox.RecordingOpen {
			if err := s.store.FinishRecording(ctx, recs[i]); err != nil {
				return err
			}
		}
	}
	return nil
}

// findRecording is a recording in scope by name or id, as it is now. A miss says
// what was probably meant.
func (s *Server) findRecording(ctx context.Context, ref string) (sandbox.Recording, error) {
	r, err := s.store.GetRecording(ctx, ref)
	switch {
	case err == nil && r.State != sandbox.RecordingMaking && r.State != sandbox.RecordingDeleting:
		one := []sandbox.Recording{r}
		err = s.refresh(ctx, one)
		return one[0], err
	case err != nil && !errors.Is(err, sandbox.ErrNotFound):
		return r, err
	}
	all, err := s.listRecordings(ctx)
	if err != nil {
		return sandbox.Recording{}, err
	}
	var names []string
	for _, r := range all {
		if r.Name != "" {
			names = append(names, r.Name)
		}
	}
	slices.Sort(names)
	e := &sandbox.Error{Class: sandbox.NotFound, Msg: "no recording '" + ref + "'", Hint: `"cove recording ls" lists them`}
	if did := sandbox.DidYouMean(ref, names); did != "" {
		e.Msg += "; " + did
	}
	return sandbox.Recording{}, e
}

// withRecording runs f for a recording given by name or id.
func (s *Server) withRecording(ctx context.Context, ref string, f func(node.Recordings, sandbox.Recording) error) error {
	if err := sandbox.ValidateRecordingName("name", ref); err != nil {
		return err
	}
	set, err := s.recordings()
	if err != nil {
		return err
	}
	r, err := s.findRecording(ctx, ref)
	if err != nil {
		return err
	}
	if err = f(set, r); !errors.Is(err, sandbox.ErrNotFound) {
		return err
	}
	if _, gone := s.findRecording(ctx, r.ID); gone != nil {
		return gone // deleted meanwhile
	}
	return &sandbox.Error{Class: sandbox.Corrupt, Msg: "the content of recording '" + ref + "' is not on node " + r.Node,
		Hint: "bring back the node's directory of recordings, or give the recording up: cove recording rm " + ref}
}

// recordingBytes is what the recordings in scope take. They count as snapshots
// do: state that outlives its sandbox.
func (s *Server) recordingBytes(ctx context.Context) (n int64, err error) {
	all, err := s.listRecordings(ctx)
	for _, r := range all {
		n += r.Bytes
	}
	return n, err
}

// resolveRecordings completes what a new network of a sandbox says of recordings: the one to
// be made has an id and a record from here on, which giveUpRecording takes back;
// the one to be replayed is named by its id.
func (s *Server) resolveRecordings(ctx context.Context, field, box string, n sandbox.Network) (sandbox.Network, error) {
	if r := n.Replay; r != nil {
		if _, err := s.recordings(); err != nil {
			return n, err
		}
		is, err := s.findRecording(ctx, r.Recording)
		if err != nil {
			return n, err
		}
		c := *r
		c.Recording = is.ID
		n.Replay = &c
	}
	if r := n.Record; r != nil {
		if r.ID != "" {
			return n, sandbox.InvalidField(field+".record.id", "is the server's to choose")
		}
		if err := s.admitSnapshot(ctx); err != nil {
			return n, err
		}
		is := sandbox.Recording{ID: sandbox.NewID(s.cfg.Rand), Name: r.Name, Sandbox: box, Node: s.about.Name,
			State: sandbox.RecordingOpen, CreatedAt: s.cfg.Clock().UTC()}
		if err := s.store.CreateRecording(ctx, is); err != nil {
			return n, err
		}
		n.Record = &sandbox.NetworkRecord{ID: is.ID, Name: is.Name}
	}
	return n, nil
}

// changeRecording is resolveRecordings for a sandbox that runs: a recording under way goes on if
// the new network names it. begun says that another one was.
func (s *Server) changeRecording(ctx context.Context, id string, n sandbox.Network) (_ sandbox.Network, begun bool, err error) {
	if n.Record != nil {
		sb, err := s.live(ctx, id)
		if err != nil {
			return n, false, err
		}
		now := sb.Spec.Network.Record
		if now != nil && (n.Record.ID == now.ID || n.Record.ID == "" && n.Record.Name != "" && n.Record.Name == now.Name) {
			n.Record = now
			return n, false, nil
		}
	}
	n, err = s.resolveRecordings(ctx, "network", id, n)
	return n, err == nil && n.Record != nil, err
}

// giveUpRecording takes back one that came to nothing.
func (s *Server) giveUpRecording(id string) {
	s.untilDone("take back recording "+id, func(ctx context.Context) error { return s.dropRecording(ctx, id) })
}

// dropRecording removes the content and then the record of a recording.
func (s *Server) dropRecording(ctx context.Context, id string) error {
	if s.about.Recordings {
		if err := s.node.Recordings().Delete(ctx, id); err != nil && !errors.Is(err, sandbox.ErrNotFound) {
			return err
		}
	}
	return s.store.DeleteRecording(ctx, id)
}

// deleteRecording is finished once begun. One that somebody uses is as it was.
func (s *Server) deleteRecording(ctx context.Context, r sandbox.Recording) error {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), createTimeout)
	defer cancel()
	if err := s.store.MoveRecording(ctx, r.ID, r.State, sandbox.RecordingDeleting); err != nil {
		return err
	}
	err := s.dropRecording(ctx, r.ID)
	if err != nil {
		s.untilDone("keep recording "+r.ID, func(ctx context.Context) error {
			err := s.store.MoveRecording(ctx, r.ID, sandbox.RecordingDeleting, r.State)
			if errors.Is(err, sandbox.ErrNotFound) {
				return nil
			}
			return err
		})
	}
	return err
}

// importRecording records an archive and takes it in, or nothing is left of it.
func (s *Server) importRecording(ctx context.Context, name string, archive io.Reader) (sandbox.Recording, error) {
	set, err := s.recordings()
	if err != nil {
		return sandbox.Recording{}, err
	}
	r := sandbox.Recording{ID: sandbox.NewID(s.cfg.Rand), Tenant: store.ScopeOf(ctx).Tenant(), Name: name, Node: s.about.Name,
		State: sandbox.RecordingMaking, CreatedAt: s.cfg.Clock().UTC()}
	if err := s.store.CreateRecording(ctx, r); err != nil {
		return r, err
	}
	is, err := set.Import(ctx, r.ID, archive)
	if err == nil {
		r.State, r.FinishedAt, r.Exchanges = is.State, is.FinishedAt, is.Exchanges
		r.Bytes, r.Truncated, r.Dropped = is.Bytes, is.Truncated, is.Dropped
		work, cancel := context.WithTimeout(context.WithoutCancel(ctx), undoTimeout)
		defer cancel()
		err = s.store.FinishRecording(work, r)
	}
	if err != nil {
		s.giveUpRecording(r.ID)
	}
	return r, err
}
