package native

import (
	"context"
	"io"
	"net/http"
	"strconv"
	"strings"

	"connectrpc.com/connect"

	covev1 "github.com/cove-sandbox/cove/api/cove/v1"
	"github.com/cove-sandbox/cove/sandbox"
	"github.com/cove-sandbox/cove/server"
)

type callbacks struct{ *server.Server }

func (s callbacks) Serve(ctx context.Context, r *connect.Request[covev1.ServeCallbacksRequest], out *connect.ServerStream[covev1.CallbackEvent]) error {
	m := r.Msg
	return s.ServeCallbacks(ctx, server.ServeRequest{Sandbox: m.SandboxId, Name: m.Name, Owner: m.Owner, Port: int(m.Port), Replace: m.Replace}, func(ev server.CallbackEvent) error {
		return out.Send(callbackEvent(ev))
	})
}

func callbackEvent(ev server.CallbackEvent) *covev1.CallbackEvent {
	switch {
	case ev.Serving != "":
		return &covev1.CallbackEvent{Event: &covev1.CallbackEvent_Serving{Serving: &covev1.CallbackServing{Url: ev.Serving}}}
	case ev.Gone != "":
		return &covev1.CallbackEvent{Event: &covev1.CallbackEvent_Gone{Gone: &covev1.CallbackGone{Id: ev.Gone}}}
	case ev.Request != nil:
		r := ev.Request
		return &covev1.CallbackEvent{Event: &covev1.CallbackEvent_Request{Request: &covev1.CallbackRequest{Id: r.ID, Method: r.Method, Path: r.Path, Query: r.Query,
			Headers: each(r.Headers, func(h server.CallbackHeader) *covev1.CallbackHeader {
				return &covev1.CallbackHeader{Name: h.Name, Value: h.Value}
			}), Body: r.Body, BodyFollows: r.BodyFollows}}}
	}
	return &covev1.CallbackEvent{}
}

func (s callbacks) Close(ctx context.Context, r *connect.Request[covev1.CloseCallbacksRequest]) (*connect.Response[covev1.CloseCallbacksResponse], error) {
	return answer(&covev1.CloseCallbacksResponse{}, s.CloseCallbacks(ctx, r.Msg.SandboxId, r.Msg.Name, r.Msg.Owner))
}

// getCallbackBody is GET /v1/sandboxes/{id}/callbacks/{request}/body, once.
func (d *dialect) getCallbackBody(w http.ResponseWriter, r *http.Request) error {
	whole := true
	err := d.server.ReadCallbackBody(r.Context(), r.PathValue("id"), r.PathValue("request"), func(body io.Reader) error {
		w.Header().Set("Content-Type", "application/octet-stream")
		flush := http.NewResponseController(w).Flush
		if flush() != nil {
			return nil
		}
		buf := make([]byte, 64<<10)
		for {
			n, rerr := body.Read(buf)
			if n > 0 {
				if _, err := w.Write(buf[:n]); err != nil || flush() != nil {
					return nil // the client left
				}
			}
			if rerr != nil {
				whole = rerr == io.EOF
				return nil
			}
		}
	})
	if !whole {
		panic(http.ErrAbortHandler)
	}
	return err
}

// answerPrefix marks the headers of a PUT that are the answer's own.
const answerPrefix = "Cove-Answer-"

// putCallback is PUT /v1/sandboxes/{id}/callbacks/{request}?status=200.
func (d *dialect) putCallback(w http.ResponseWriter, r *http.Request) error {
	// What is wrong is said at once: net/http would first take 256 KiB more of
	// an answer that may come in words.
	_ = http.NewResponseController(w).EnableFullDuplex()
	a := server.CallbackAnswer{Header: http.Header{}, Content: content(w, r)}
	if q := r.URL.Query().Get("status"); q != "" {
		status, err := strconv.Atoi(q)
		if err != nil || status == 0 {
			return sandbox.InvalidField("status", "%.10q is not accepted; 200 to 599 are", q)
		}
		a.Status = status
	}
	for k, vs := range r.Header {
		if name, ok := strings.CutPrefix(k, answerPrefix); ok {
			a.Header[name] = vs
		}
	}
	if err := d.server.AnswerCallback(r.Context(), r.PathValue("id"), r.PathValue("request"), a); err != nil {
		return err
	}
	w.WriteHeader(http.StatusNoContent)
	return nil
}
