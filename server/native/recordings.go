package native

import (
	"context"
	"net/http"

	"connectrpc.com/connect"

	covev1 "github.com/cove-sandbox/cove/api/cove/v1"
	"github.com/cove-sandbox/cove/server"
	"github.com/cove-sandbox/cove/server/edge"
	"github.com/cove-sandbox/cove/wire"
)

type recordings struct{ *server.Server }

func (s recordings) Get(ctx context.Context, r *connect.Request[covev1.GetRecordingRequest]) (*connect.Response[covev1.GetRecordingResponse], error) {
	rec, list, err := s.GetRecording(ctx, r.Msg.Name, r.Msg.After, int(r.Msg.Exchanges))
	return answer(&covev1.GetRecordingResponse{Recording: wire.Recording(rec), Exchanges: each(list, wire.RecordedExchange)}, err)
}

func (s recordings) List(ctx context.Context, r *connect.Request[covev1.ListRecordingsRequest]) (*connect.Response[covev1.ListRecordingsResponse], error) {
	list, err := s.ListRecordings(ctx)
	return answer(&covev1.ListRecordingsResponse{Recordings: each(list, wire.Recording)}, err)
}

func (s recordings) Delete(ctx context.Context, r *connect.Request[covev1.DeleteRecordingRequest]) (*connect.Response[covev1.DeleteRecordingResponse], error) {
	return answer(&covev1.DeleteRecordingResponse{}, s.DeleteRecording(ctx, r.Msg.Name))
}

// getRecording is GET /v1/recordings/{id}/archive?format=F, and HEAD.
func (d *dialect) getRecording(w http.ResponseWriter, r *http.Request) error {
	format := r.URL.Query().Get("format")
	return edge.Sending(w, func(begun server.Sending) error {
		return d.server.ExportRecording(r.Context(), r.PathValue("id"), format, r.Method == http.MethodHead, begun)
	}, func(server.FileContent) {
		w.Header().Set("Content-Type", "application/octet-stream")
		if format == "har" {
			w.Header().Set("Content-Type", "application/json")
		}
	})
}

// putRecording is PUT /v1/recordings?name=N.
func (d *dialect) putRecording(w http.ResponseWriter, r *http.Request) error {
	rec, err := d.server.ImportRecording(r.Context(), r.URL.Query().Get("name"), content(w, r))
	return writeMessage(w, wire.Recording(rec), err)
}
