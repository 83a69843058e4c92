package server

import (
	"context"
	"io"
	"net/http"
	"slices"

	"connectrpc.com/connect"
	"google.golang.org/protobuf/encoding/protojson"

	covev1 "github.com/cove-sandbox/cove/api/cove/v1"
	"github.com/cove-sandbox/cove/sandbox"
	"github.com/cove-sandbox/cove/store"
	"github.com/cove-sandbox/cove/wire"
)

// RecordingSet keeps recordings on a node; it persists them itself, and knows
// them by id.
type RecordingSet interface {
	Get(ctx context.Context, id string) (sandbox.Recording, error)
	// List lists all, newest first.
	List(ctx context.Context) ([]sandbox.Recording, error)
	// Delete is sandbox.ErrPrecondition while a sandbox records or replays it.
	Delete(ctx context.Context, id string) error
	// Exchanges lists what is on one, after a number, at most so many.
	Exchanges(ctx context.Context, id string, after int64, limit int) ([]sandbox.RecordedExchange, error)
	// Export writes the archive, or with har a HAR 1.2.
	Export(ctx context.Context, id string, har bool, w io.Writer) error
	// Import takes in an archive with the id, name and tenant of want.
	Import(ctx context.Context, want sandbox.Recording, archive io.Reader) (sandbox.Recording, error)
}

// tenantRecordings is a node's recordings as one tenant sees them: by name or
// id, and no others.
type tenantRecordings struct{ set RecordingSet }

// Get is the way to all others: they go on with the id.
func (t tenantRecordings) Get(ctx context.Context, ref string) (sandbox.Recording, error) {
	all, err := t.List(ctx)
	if err != nil {
		return sandbox.Recording{}, err
	}
	var names []string
	for _, by := range []func(sandbox.Recording) string{
		func(r sandbox.Recording) string { return r.ID },
		func(r sandbox.Recording) string { return r.Name },
	} {
		for _, r := range all {
			if by(r) == ref {
				return r, nil
			}
			if r.Name != "" {
				names = append(names, r.Name)
			}
		}
	}
	e := &sandbox.Error{Class: sandbox.NotFound, Msg: "no recording '" + ref + "'", Hint: `"cove recording ls" lists them`}
	if did := sandbox.DidYouMean(ref, names); did != "" {
		e.Msg += "; " + did
	}
	return sandbox.Recording{}, e
}

func (t tenantRecordings) List(ctx context.Context) ([]sandbox.Recording, error) {
	scope := store.ScopeOf(ctx)
	if err := scope.Check(); err != nil {
		return nil, err
	}
	all, err := t.set.List(ctx)
	return slices.DeleteFunc(all, func(r sandbox.Recording) bool { return !scope.Sees(r.Tenant) }), err
}

func (t tenantRecordings) Delete(ctx context.Context, ref string) error {
	r, err := t.Get(ctx, ref)
	if err != nil {
		return err
	}
	return t.set.Delete(ctx, r.ID)
}

func (t tenantRecordings) Exchanges(ctx context.Context, ref string, after int64, limit int) ([]sandbox.RecordedExchange, error) {
	r, err := t.Get(ctx, ref)
	if err != nil {
		return nil, err
	}
	return t.set.Exchanges(ctx, r.ID, after, limit)
}

func (t tenantRecordings) Export(ctx context.Context, ref string, har bool, w io.Writer) error {
	r, err := t.Get(ctx, ref)
	if err != nil {
		return err
	}
	return t.set.Export(ctx, r.ID, har, w)
}

func (t tenantRecordings) Import(ctx context.Context, want sandbox.Recording, archive io.Reader) (sandbox.Recording, error) {
	scope := store.ScopeOf(ctx)
	if err := scope.Check(); err != nil {
		return want, err
	}
	want.Tenant = scope.Owner("")
	return t.set.Import(ctx, want, archive)
}

func noRecordings(n Node) error {
	return &sandbox.Error{Class: sandbox.Unsupported, Msg: "node " + n.Name() + " keeps no recordings"}
}

func (s *Server) recordings() (RecordingSet, error) {
	if r := s.node.Recordings(); r != nil {
		return r, nil
	}
	return nil, noRecordings(s.node)
}

// recordingBytes is what the recordings in scope take. They count as snapshots
// do: state that outlives its sandbox.
func (s *Server) recordingBytes(ctx context.Context) (n int64, err error) {
	set := s.node.Recordings()
	if set == nil {
		return 0, nil
	}
	all, err := set.List(ctx)
	for _, r := range all {
		n += r.Bytes
	}
	return n, err
}

// tapeOf completes what a new sandbox's network says of recordings: an id for
// the one to be made, that of the one to be replayed.
func (s *Server) tapeOf(ctx context.Context, field string, n sandbox.Network) (sandbox.Network, error) {
	if r := n.Record; r != nil {
		if r.ID != "" {
			return n, sandbox.InvalidField(field+".record.id", "is the server's to choose")
		}
		if err := s.admitSnapshot(ctx); err != nil {
			return n, err
		}
		n.Record = &sandbox.NetworkRecord{ID: sandbox.NewID(s.cfg.Rand), Name: r.Name}
	}
	if r := n.Replay; r != nil {
		set, err := s.recordings()
		if err != nil {
			return n, err
		}
		is, err := set.Get(ctx, r.Recording)
		if err != nil {
			return n, err
		}
		c := *r
		c.Recording = is.ID
		n.Replay = &c
	}
	return n, nil
}

// changeTape is tapeOf for a sandbox that runs: a recording under way goes on if
// the new network names it.
func (s *Server) changeTape(ctx context.Context, id string, n sandbox.Network) (sandbox.Network, error) {
	if n.Record != nil {
		sb, err := s.live(ctx, id)
		if err != nil {
			return n, err
		}
		now := sb.Spec.Network.Record
		if now != nil && (n.Record.ID == now.ID || n.Record.ID == "" && n.Record.Name != "" && n.Record.Name == now.Name) {
			n.Record = now
			return n, nil
		}
	}
	return s.tapeOf(ctx, "network", n)
}

type recordingService struct{ *Server }

// maxExchanges is how many one Get lists.
const maxExchanges = 1000

func (s recordingService) Get(ctx context.Context, r *connect.Request[covev1.GetRecordingRequest]) (*connect.Response[covev1.GetRecordingResponse], error) {
	m := r.Msg
	if err := sandbox.ValidateRecordingName("name", m.Name); err != nil {
		return nil, err
	}
	if m.Exchanges < 0 || m.Exchanges > maxExchanges {
		return nil, sandbox.InvalidField("exchanges", "%d; 0 to %d are accepted", m.Exchanges, maxExchanges)
	}
	if m.After < 0 {
		return nil, sandbox.InvalidField("after", "%d; the number of an exchange is accepted", m.After)
	}
	set, err := s.recordings()
	if err != nil {
		return nil, err
	}
	is, err := set.Get(ctx, m.Name)
	if err != nil {
		return nil, err
	}
	out := &covev1.GetRecordingResponse{Recording: wire.Recording(is)}
	if m.Exchanges > 0 {
		list, err := set.Exchanges(ctx, is.ID, m.After, int(m.Exchanges))
		if err != nil {
			return nil, err
		}
		for _, e := range list {
			out.Exchanges = append(out.Exchanges, wire.RecordedExchange(e))
		}
	}
	return connect.NewResponse(out), nil
}

func (s recordingService) List(ctx context.Context, r *connect.Request[covev1.ListRecordingsRequest]) (*connect.Response[covev1.ListRecordingsResponse], error) {
	set, err := s.recordings()
	if err != nil {
		return nil, err
	}
	all, err := set.List(ctx)
	out := &covev1.ListRecordingsResponse{}
	for _, is := range all {
		out.Recordings = append(out.Recordings, wire.Recording(is))
	}
	return answer(out, err)
}

func (s recordingService) Delete(ctx context.Context, r *connect.Request[covev1.DeleteRecordingRequest]) (*connect.Response[covev1.DeleteRecordingResponse], error) {
	if err := sandbox.ValidateRecordingName("name", r.Msg.Name); err != nil {
		return nil, err
	}
	set, err := s.recordings()
	if err == nil {
		err = set.Delete(ctx, r.Msg.Name)
	}
	return answer(&covev1.DeleteRecordingResponse{}, err)
}

// getRecording is GET /v1/recordings/{id}/archive?format=F, and HEAD.
func (s *Server) getRecording(w http.ResponseWriter, r *http.Request) error {
	name, format := r.PathValue("id"), r.URL.Query().Get("format")
	if err := sandbox.ValidateRecordingName("name", name); err != nil {
		return err
	}
	if format != "" && format != "tape" && format != "har" {
		return sandbox.InvalidField("format", "%.40q; tape and har are accepted", format)
	}
	set, err := s.recordings()
	if err != nil {
		return err
	}
	is, err := set.Get(r.Context(), name)
	if err != nil {
		return err
	}
	w.Header().Set("Content-Type", "application/octet-stream")
	if format == "har" {
		w.Header().Set("Content-Type", "application/json")
	}
	if r.Method == http.MethodHead {
		return nil
	}
	body := &firstByte{ResponseWriter: w}
	if err := set.Export(r.Context(), is.ID, format == "har", body); err != nil {
		if !body.sent {
			w.Header().Del("Content-Type")
			return err
		}
		s.log.Warn("the archive of a recording broke off", "recording", is.ID, "err", err)
		panic(http.ErrAbortHandler) // no client takes a broken body for a whole one
	}
	return nil
}

// putRecording is PUT /v1/recordings?name=N.
func (s *Server) putRecording(w http.ResponseWriter, r *http.Request) error {
	if s.calls.isDraining() {
		return stopping()
	}
	name := r.URL.Query().Get("name")
	if name != "" {
		if err := sandbox.ValidateRecordingName("name", name); err != nil {
			return err
		}
	}
	set, err := s.recordings()
	if err == nil {
		err = s.admitSnapshot(r.Context())
	}
	if err != nil {
		return err
	}
	body, err := s.body(w, r, s.cfg.MaxUpload)
	if err != nil {
		return err
	}
	is, err := set.Import(r.Context(), sandbox.Recording{ID: sandbox.NewID(s.cfg.Rand), Name: name, CreatedAt: s.cfg.Clock().UTC()}, body)
	if body.err != nil {
		err = body.err // the reader saw only that it broke off
	}
	if err != nil {
		return err
	}
	b, err := protojson.Marshal(wire.Recording(is))
	if err != nil {
		return err
	}
	w.Header().Set("Content-Type", "application/json")
	_, _ = w.Write(append(b, '\n'))
	return nil
}
