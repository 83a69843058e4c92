package native

import (
	"context"
	"encoding/json"
	"net/http"

	"connectrpc.com/connect"

	covev1 "github.com/cove-sandbox/cove/api/cove/v1"
	"github.com/cove-sandbox/cove/sandbox"
	"github.com/cove-sandbox/cove/server"
	"github.com/cove-sandbox/cove/store"
	"github.com/cove-sandbox/cove/wire"
)

type grades struct{ *server.Server }

func (s grades) Create(ctx context.Context, r *connect.Request[covev1.CreateGradeRequest]) (*connect.Response[covev1.CreateGradeResponse], error) {
	spec, err := wire.GradeSpecFrom(r.Msg)
	if err != nil {
		return nil, err
	}
	g, err := s.CreateGrade(ctx, server.GradeRequest{Spec: spec, Key: r.Msg.IdempotencyKey})
	return answer(&covev1.CreateGradeResponse{Grade: wire.Grade(g)}, err)
}

func (s grades) Get(ctx context.Context, r *connect.Request[covev1.GetGradeRequest]) (*connect.Response[covev1.GetGradeResponse], error) {
	g, err := s.GetGrade(ctx, r.Msg.Id)
	return answer(&covev1.GetGradeResponse{Grade: wire.Grade(g)}, err)
}

func (s grades) Cancel(ctx context.Context, r *connect.Request[covev1.CancelGradeRequest]) (*connect.Response[covev1.CancelGradeResponse], error) {
	g, err := s.CancelGrade(ctx, r.Msg.Id)
	return answer(&covev1.CancelGradeResponse{Grade: wire.Grade(g)}, err)
}

func (s grades) Wait(ctx context.Context, r *connect.Request[covev1.WaitGradeRequest]) (*connect.Response[covev1.WaitGradeResponse], error) {
	most, err := wire.DurationFrom("max_wait", r.Msg.MaxWait)
	if err != nil {
		return nil, err
	}
	g, err := s.WaitGrade(ctx, r.Msg.Id, most)
	return answer(&covev1.WaitGradeResponse{Grade: wire.Grade(g)}, err)
}

func (s grades) List(ctx context.Context, r *connect.Request[covev1.ListGradesRequest]) (*connect.Response[covev1.ListGradesResponse], error) {
	m := r.Msg
	page, next, err := s.ListGrades(ctx, store.GradeFilter{Sandbox: m.Sandbox, State: sandbox.GradeState(m.State), PageSize: int(m.PageSize), PageToken: m.PageToken})
	return answer(&covev1.ListGradesResponse{NextPageToken: next, Grades: each(page, wire.GradeInBrief)}, err)
}

// putTests is PUT /v1/grades/tests?digest=SHA256. It answers with the snapshot to
// name as tests.
func (d *dialect) putTests(w http.ResponseWriter, r *http.Request) error {
	snap, err := d.server.PutTests(r.Context(), r.URL.Query().Get("digest"), content(w, r))
	if err != nil {
		return err
	}
	w.Header().Set("Content-Type", "application/json")
	return json.NewEncoder(w).Encode(map[string]any{"snapshot": snap.ID, "size": snap.Content.Size})
}
