package cli

import (
	"context"
	"encoding/json"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"connectrpc.com/connect"
	"google.golang.org/protobuf/types/known/timestamppb"

	covev1 "github.com/cove-sandbox/cove/api/cove/v1"
	"github.com/cove-sandbox/cove/sandbox"
	"github.com/cove-sandbox/cove/wire"
)

// fakeShipments has one, "feed", and keeps what it was asked.
type fakeShipments struct {
	covev1.UnimplementedShipmentsHandler
	made  *covev1.CreateShipmentRequest
	acked []string
}

func (f *fakeShipments) one(state string) *covev1.Shipment {
	return &covev1.Shipment{Id: "s1", Name: "feed", State: state, MaxLag: 1 << 30, Lag: 2048, Records: 7, CreatedAt: timestamppb.New(time.Now().Add(-time.Hour)),
		Sink: &covev1.ShipmentSink{Kind: "http", Format: "jsonl", Url: "https://x.example"}, Error: &covev1.ErrorDetail{Code: "no_capacity", Hint: "wait"}, ErrorMessage: "x answered 503"}
}
func (f *fakeShipments) Create(_ context.Context, r *connect.Request[covev1.CreateShipmentRequest]) (*connect.Response[covev1.CreateShipmentResponse], error) {
	f.made = r.Msg
	return connect.NewResponse(&covev1.CreateShipmentResponse{Shipment: f.one("active")}), nil
}
func (f *fakeShipments) Get(_ context.Context, r *connect.Request[covev1.GetShipmentRequest]) (*connect.Response[covev1.GetShipmentResponse], error) {
	if r.Msg.Shipment != "feed" {
		return nil, wire.ToConnect(sandbox.NoSuchShipment(r.Msg.Shipment))
	}
	return connect.NewResponse(&covev1.GetShipmentResponse{Shipment: f.one("failing")}), nil
}
func (f *fakeShipments) List(context.Context, *connect.Request[covev1.ListShipmentsRequest]) (*connect.Response[covev1.ListShipmentsResponse], error) {
	return connect.NewResponse(&covev1.ListShipmentsResponse{Shipments: []*covev1.Shipment{f.one("active")}}), nil
}
func (f *fakeShipments) Pause(context.Context, *connect.Request[covev1.PauseShipmentRequest]) (*connect.Response[covev1.PauseShipmentResponse], error) {
	return connect.NewResponse(&covev1.PauseShipmentResponse{Shipment: f.one("paused")}), nil
}
func (f *fakeShipments) Resume(context.Context, *connect.Request[covev1.ResumeShipmentRequest]) (*connect.Response[covev1.ResumeShipmentResponse], error) {
	return connect.NewResponse(&covev1.ResumeShipmentResponse{Shipment: f.one("active")}), nil
}
func (f *fakeShipments) Delete(context.Context, *connect.Request[covev1.DeleteShipmentRequest]) (*connect.Response[covev1.DeleteShipmentResponse], error) {
	return connect.NewResponse(&covev1.DeleteShipmentResponse{}), nil
}
func (f *fakeShipments) Ack(_ context.Context, r *connect.Request[covev1.AckShipmentRequest]) (*connect.Response[covev1.AckShipmentResponse], error) {
	f.acked = append(f.acked, r.Msg.Cursor)
	return connect.NewResponse(&covev1.AckShipmentResponse{Shipment: f.one("active")}), nil
}

const (
	recordOne = `{"schema":1,"id":"step:r1-1","run":"r1","cursor":"r1.5"}` + "\n"
	recordTwo = `{"schema":1,"id":"step:r1-2","run":"r1","cursor":"r1.9"}` + "\n"
)

// handle adds what reads and ships records.
func (s *fakeShipments) handle(mux *http.ServeMux, opt connect.HandlerOption) {
	mux.Handle(covev1.NewShipmentsHandler(s, opt))
	mux.HandleFunc("GET /v1/shipments/feed/records", func(w http.ResponseWriter, r *http.Request) {
		_, _ = w.Write([]byte(recordOne + "\n" + recordTwo))
	})
	mux.HandleFunc("GET /v1/runs/r/export", func(w http.ResponseWriter, r *http.Request) {
		switch r.URL.Query().Get("format") {
		case "parquet":
			_, _ = w.Write([]byte("PAR1"))
		case "atif":
			_, _ = w.Write([]byte(`{"trajectory_id":"sb.1"}` + "\n" + `{"trajectory_id":"sb.2"}` + "\n"))
		default:
			_, _ = w.Write([]byte(recordOne + recordTwo))
		}
	})
	mux.HandleFunc("GET /v1/runs/broken/export", func(w http.ResponseWriter, r *http.Request) {
		if r.URL.Query().Get("format") == "atif" {
			_, _ = w.Write([]byte(`{"trajectory_id":"../evil"}` + "\n"))
			return
		}
		_, _ = w.Write([]byte(recordOne + `{"code":"data_loss","message":"damaged"}` + "\n"))
	})
}

func TestShip(t *testing.T) {
	f := newFakeAPI(t)
	s := &f.shipments
	f.cove(t, settings{}, "ship", "create", "feed", "--pull", "--run", "r", "--max-lag", "2MiB", "--linger", "5s").want(t, 0, "s1\n")
	if m := s.made; m.Name != "feed" || m.Run != "r" || m.Sink.Kind != "pull" || m.MaxLag != 2<<20 || m.Linger.AsDuration() != 5*time.Second {
		t.Errorf("%v", m)
	}
	f.cove(t, settings{}, "ship", "create", "b", "--bucket", "b/p", "--endpoint", "https://s3.example", "--access-key", "id", "--secret", "k", "--format", "parquet").want(t, 0, "s1\n")
	if k := s.made.Sink; k.Kind != "s3" || k.Url != "https://s3.example" || k.Path != "b/p" || k.AccessKey != "id" || k.Secret != "k" || k.Format != "parquet" {
		t.Errorf("%v", k)
	}
	f.cove(t, settings{}, "ship", "create", "x").want(t, 1, "", "one of --pull")
	f.cove(t, settings{}, "ship", "create", "x", "--pull", "--http", "https://x").want(t, 1, "", "one of --pull")
	f.cove(t, settings{}, "ship", "ls").want(t, 0, "NAME  STATE   RUN  TO                 RECORDS  WAITS  AGE\nfeed  active  all  https://x.example  7        2KiB   1h\n")
	if r := f.cove(t, settings{}, "ship", "show", "feed"); r.code != 0 || !strings.Contains(r.stdout, "x answered 503") || !strings.Contains(r.stdout, "2KiB of at most 1GiB") {
		t.Error(r)
	}
	f.cove(t, settings{}, "ship", "show", "fed").want(t, 1, "", "no shipment 'fed'")
	f.cove(t, settings{}, "ship", "rm", "fed").want(t, 1, "", "no shipment 'fed'")
	f.cove(t, settings{}, "ship", "pause", "feed").want(t, 0, "paused\n")
	f.cove(t, settings{}, "ship", "resume", "feed").want(t, 0, "active\n")
	f.cove(t, settings{}, "ship", "rm", "feed").want(t, 0, "feed\n")
	f.cove(t, settings{}, "ship", "tail", "feed").want(t, 0, recordOne+recordTwo)
	if len(s.acked) != 0 {
		t.Errorf("acknowledged without --ack: %q", s.acked)
	}
	f.cove(t, settings{}, "ship", "tail", "feed", "--ack").want(t, 0, recordOne+recordTwo)
	if len(s.acked) != 2 || s.acked[1] != "r1.9" {
		t.Errorf("%q", s.acked)
	}
	f.cove(t, settings{}, "ship", "tail", "--run", "r").want(t, 0, recordOne+recordTwo)
	f.cove(t, settings{}, "ship", "tail", "--run", "broken").want(t, 1, recordOne, "damaged")
	f.cove(t, settings{}, "ship", "tail").want(t, 1, "", "--run RUN")
}

func TestRunsExport(t *testing.T) {
	f := newFakeAPI(t)
	dir := filepath.Join(t.TempDir(), "out")
	f.cove(t, settings{}, "runs", "export", "r", "-o", dir).want(t, 0, dir+"/records.jsonl\n")
	if b, err := os.ReadFile(dir + "/records.jsonl"); err != nil || string(b) != recordOne+recordTwo {
		t.Error(string(b), err)
	}
	f.cove(t, settings{}, "runs", "export", "r", "-o", "-", "--format", "parquet").want(t, 0, "PAR1")
	r := f.cove(t, settings{}, "runs", "export", "r", "--format", "atif", "-o", dir, "--json")
	var files []string
	if err := json.Unmarshal([]byte(r.stdout), &files); err != nil || len(files) != 2 || files[1] != dir+"/sb.2.json" {
		t.Error(r, err)
	}
	f.cove(t, settings{}, "runs", "export", "r", "--format", "csv").want(t, 1, "", "jsonl, parquet and atif")
	// What breaks off leaves no file, and an id is no path.
	f.cove(t, settings{}, "runs", "export", "broken", "-o", dir+"/b").want(t, 1, "", "damaged")
	f.cove(t, settings{}, "runs", "export", "broken", "--format", "atif", "-o", dir+"/b").want(t, 1, "", "evil")
	if left, err := os.ReadDir(dir + "/b"); err != nil || len(left) != 0 {
		t.Error(left, err)
	}
}
