package native

import (
	"context"
	"net/http"

	"connectrpc.com/connect"

	covev1 "github.com/cove-sandbox/cove/api/cove/v1"
	"github.com/cove-sandbox/cove/sandbox"
	"github.com/cove-sandbox/cove/server"
	"github.com/cove-sandbox/cove/server/edge"
	"github.com/cove-sandbox/cove/ship"
	"github.com/cove-sandbox/cove/wire"
)

type shipments struct{ *server.Server }

func (s shipments) Create(ctx context.Context, r *connect.Request[covev1.CreateShipmentRequest]) (*connect.Response[covev1.CreateShipmentResponse], error) {
	m := r.Msg
	linger, err := wire.DurationFrom("linger", m.Linger)
	if err != nil {
		return nil, err
	}
	sh, err := s.CreateShipment(ctx, sandbox.Shipment{Name: m.Name, Run: m.Run, Sink: wire.ShipmentSinkFrom(m.Sink), MaxLag: m.MaxLag, Linger: linger, Key: m.IdempotencyKey})
	return answer(&covev1.CreateShipmentResponse{Shipment: protoShipment(sh)}, err)
}

func (s shipments) Get(ctx context.Context, r *connect.Request[covev1.GetShipmentRequest]) (*connect.Response[covev1.GetShipmentResponse], error) {
	sh, err := s.GetShipment(ctx, r.Msg.Shipment)
	return answer(&covev1.GetShipmentResponse{Shipment: protoShipment(sh)}, err)
}

func (s shipments) List(ctx context.Context, r *connect.Request[covev1.ListShipmentsRequest]) (*connect.Response[covev1.ListShipmentsResponse], error) {
	list, err := s.ListShipments(ctx)
	return answer(&covev1.ListShipmentsResponse{Shipments: each(list, protoShipment)}, err)
}

func (s shipments) Pause(ctx context.Context, r *connect.Request[covev1.PauseShipmentRequest]) (*connect.Response[covev1.PauseShipmentResponse], error) {
	sh, err := s.PauseShipment(ctx, r.Msg.Shipment)
	return answer(&covev1.PauseShipmentResponse{Shipment: protoShipment(sh)}, err)
}

func (s shipments) Resume(ctx context.Context, r *connect.Request[covev1.ResumeShipmentRequest]) (*connect.Response[covev1.ResumeShipmentResponse], error) {
	sh, err := s.ResumeShipment(ctx, r.Msg.Shipment)
	return answer(&covev1.ResumeShipmentResponse{Shipment: protoShipment(sh)}, err)
}

func (s shipments) Delete(ctx context.Context, r *connect.Request[covev1.DeleteShipmentRequest]) (*connect.Response[covev1.DeleteShipmentResponse], error) {
	return answer(&covev1.DeleteShipmentResponse{}, s.DeleteShipment(ctx, r.Msg.Shipment))
}

func (s shipments) Ack(ctx context.Context, r *connect.Request[covev1.AckShipmentRequest]) (*connect.Response[covev1.AckShipmentResponse], error) {
	sh, err := s.AckShipment(ctx, r.Msg.Shipment, r.Msg.Cursor)
	return answer(&covev1.AckShipmentResponse{Shipment: protoShipment(sh)}, err)
}

func protoShipment(s server.ShipmentStatus) *covev1.Shipment {
	p := wire.Shipment(s.Shipment)
	p.Lag, p.Records, p.DeliveredAt, p.FailedAt = s.Lag, s.Records, wire.Time(s.LastAt), wire.Time(s.FailedAt)
	if s.Failed != nil {
		p.Error, p.ErrorMessage = wire.ErrorDetail(s.Failed)
		if !s.Paused {
			p.State = "failing"
		}
	}
	for _, at := range s.Positions {
		p.Positions = append(p.Positions, &covev1.ShipmentPosition{Run: at.Run, Cursor: server.RunCursor(at.Run, at.At), Records: at.Records})
	}
	return p
}

// exportRun is GET /v1/runs/{id}/export?format=F, and HEAD.
func (d *dialect) exportRun(w http.ResponseWriter, r *http.Request) error {
	q, run := r.URL.Query(), r.PathValue("id")
	format := q.Get("format")
	if format == "" || format == "jsonl" {
		return d.records(w, r, func(tell server.RecordSink, follow bool) error {
			return d.server.ExportRun(r.Context(), server.ExportRequest{Run: run, Cursor: q.Get("cursor"), Follow: follow}, tell, nil)
		})
	}
	return edge.Sending(w, func(begun server.Sending) error {
		return d.server.ExportRun(r.Context(), server.ExportRequest{Run: run, Format: format, HeadOnly: r.Method == http.MethodHead}, nil, begun)
	}, func(server.FileContent) {
		w.Header().Set("Content-Type", "application/x-ndjson")
		if format == "parquet" {
			w.Header().Set("Content-Type", "application/vnd.apache.parquet")
		}
	})
}

// getShipmentRecords is GET /v1/shipments/{id}/records.
func (d *dialect) getShipmentRecords(w http.ResponseWriter, r *http.Request) error {
	return d.records(w, r, func(tell server.RecordSink, follow bool) error {
		return d.server.ReadShipment(r.Context(), r.PathValue("id"), r.URL.Query().Get("cursor"), follow, tell)
	})
}

// records answers with one record a line. A follower is sent each at once, and an empty
// line when nothing happens.
func (d *dialect) records(w http.ResponseWriter, r *http.Request, read func(server.RecordSink, bool) error) error {
	v := r.URL.Query().Get("follow")
	follow := v == "true" || v == "1"
	lines := jsonLines{w: w, r: r, together: !follow}
	err := read(func(rec *ship.Record, cursor string) error {
		if rec == nil {
			lines.line(nil)
			return nil
		}
		rec.Cursor = cursor
		b, err := rec.AppendJSON(nil)
		if err == nil {
			lines.line(b[:len(b)-1])
		}
		return err
	}, follow)
	if err == nil {
		lines.begin()
	}
	return lines.fail(err)
}
