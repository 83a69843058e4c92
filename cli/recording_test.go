package cli

import (
	"context"
	"fmt"
	"io"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"connectrpc.com/connect"
	"google.golang.org/protobuf/encoding/protojson"
	"google.golang.org/protobuf/types/known/durationpb"
	"google.golang.org/protobuf/types/known/timestamppb"

	covev1 "github.com/cove-sandbox/cove/api/cove/v1"
	"github.com/cove-sandbox/cove/sandbox"
)

func (f *fakeAPI) handleRecordings(mux *http.ServeMux, opt connect.HandlerOption) {
	mux.Handle(covev1.NewRecordingsHandler(fakeRecordings{f}, opt))
	mux.HandleFunc("GET /v1/recordings/{name}/archive", func(w http.ResponseWriter, r *http.Request) {
		fmt.Fprintf(w, "archive of %s %s", r.PathValue("name"), r.URL.Query().Get("format"))
	})
	mux.HandleFunc("PUT /v1/recordings", func(w http.ResponseWriter, r *http.Request) {
		b, err := io.ReadAll(r.Body)
		if err != nil {
			return
		}
		f.mu.Lock()
		f.content["recording "+r.URL.Query().Get("name")] = string(b)
		f.mu.Unlock()
		out, _ := protojson.Marshal(&covev1.Recording{Id: "rec9", Name: r.URL.Query().Get("name")})
		_, _ = w.Write(out)
	})
}

type fakeRecordings struct{ *fakeAPI }

var fakeRecording = &covev1.Recording{Id: "rec1", Name: "ep1", State: "finished", Exchanges: 1001, Bytes: 4096, Sandbox: "sb1", Truncated: 1,
	CreatedAt: timestamppb.New(time.Date(2026, 3, 1, 10, 0, 0, 0, time.UTC))}

func (f fakeRecordings) List(context.Context, *connect.Request[covev1.ListRecordingsRequest]) (*connect.Response[covev1.ListRecordingsResponse], error) {
	return connect.NewResponse(&covev1.ListRecordingsResponse{Recordings: []*covev1.Recording{fakeRecording, {Id: "rec2"}}}), nil
}

func (f fakeRecordings) Get(_ context.Context, r *connect.Request[covev1.GetRecordingRequest]) (*connect.Response[covev1.GetRecordingResponse], error) {
	if r.Msg.GetName() != "ep1" {
		return nil, &sandbox.Error{Class: sandbox.NotFound, Msg: "no recording"}
	}
	out := &covev1.GetRecordingResponse{Recording: fakeRecording}
	for n := r.Msg.GetAfter() + 1; n <= 1001 && len(out.Exchanges) < int(r.Msg.GetExchanges()); n++ {
		out.Exchanges = append(out.Exchanges, &covev1.RecordedExchange{Number: n, Method: "GET", Url: fmt.Sprintf("https://a.test/%d\x1b[2J", n), Status: 200, Received: 2048, Took: durationpb.New(3 * time.Millisecond)})
	}
	return connect.NewResponse(out), nil
}

func (f fakeRecordings) Delete(_ context.Context, r *connect.Request[covev1.DeleteRecordingRequest]) (*connect.Response[covev1.DeleteRecordingResponse], error) {
	if r.Msg.GetName() == "used" {
		return nil, &sandbox.Error{Class: sandbox.Precondition, Msg: "a sandbox replays it"}
	}
	return connect.NewResponse(&covev1.DeleteRecordingResponse{}), nil
}

func TestRecording(t *testing.T) {
	f := newFakeAPI(t)
	f.addSandbox("sb1", nil)
	out := f.cove(t, settings{}, "recording", "ls").stdout
	if !strings.Contains(out, "ep1") || !strings.Contains(out, "1001") || !strings.Contains(out, "rec2") {
		t.Errorf("ls:\n%s", out)
	}
	out = f.cove(t, settings{}, "recording", "show", "ep1").stdout
	if !strings.Contains(out, "1 cannot be replayed") || !strings.Contains(out, "https://a.test/1001") || strings.Contains(out, "\x1b") || !strings.Contains(out, "2.0 KiB") && !strings.Contains(out, "2KiB") {
		t.Errorf("show:\n%.600s", out)
	}
	if out := f.cove(t, settings{}, "recording", "show", "ep1", "--json").stdout; strings.Count(out, `"number"`) != 1001 || !strings.Contains(out, `"took_s": 0.003`) {
		t.Errorf("show --json:\n%.600s", out)
	}
	f.cove(t, settings{}, "recording", "export", "ep1").want(t, 0, "archive of ep1 ")
	f.cove(t, settings{}, "recording", "export", "ep1", "--har").want(t, 0, "archive of ep1 har")
	file := filepath.Join(t.TempDir(), "ep1.tape")
	f.cove(t, settings{}, "recording", "export", "ep1", "-o", file).want(t, 0, "")
	if b, err := os.ReadFile(file); err != nil || string(b) != "archive of ep1 " {
		t.Errorf("%q %v", b, err)
	}
	f.cove(t, settings{}, "recording", "import", file, "--name", "copy").want(t, 0, "rec9\n")
	if got := f.content["recording copy"]; got != "archive of ep1 " {
		t.Errorf("imported %q", got)
	}
	f.cove(t, settings{}, "recording", "rm", "ep1", "used").want(t, 1, "ep1\n", "replays it")

	f.cove(t, settings{}, "create", "--network", "public", "--record", "ep2").want(t, 0, "sb1\n")
	f.cove(t, settings{}, "create", "--replay", "ep1", "--replay-ignore-query", "ts,sig", "--replay-ignore-body", "--replay-repeat-last", "--replay-match-header", "Accept").want(t, 0, "sb2\n")
	n := f.created[0].GetSpec().GetNetwork()
	if n.GetRecord().GetName() != "ep2" || n.GetReplay() != nil {
		t.Errorf("created with %v", n)
	}
	r := f.created[1].GetSpec().GetNetwork().GetReplay()
	if r.GetRecording() != "ep1" || len(r.GetIgnoreQuery()) != 2 || !r.GetIgnoreBody() || !r.GetRepeatLast() || r.GetMatchHeaders()[0] != "Accept" {
		t.Errorf("created with %v", r)
	}
	f.cove(t, settings{}, "net", "set", "sb1", "--replay", "ep1").want(t, 0, "2\n")
	if f.network.GetReplay().GetRecording() != "ep1" {
		t.Errorf("sent %v", f.network)
	}
}
