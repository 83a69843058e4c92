package cli

import (
	"context"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"

	"connectrpc.com/connect"

	covev1 "github.com/cove-sandbox/cove/api/cove/v1"
	"github.com/cove-sandbox/cove/sandbox"
	"github.com/cove-sandbox/cove/wire"
)

type fakeCallbacks struct {
	covev1.UnimplementedCallbacksHandler
	f *fakeAPI
}

// Serve breaks off once in the middle, sends what is not answered again, and
// ends with the sandbox when all is.
func (s fakeCallbacks) Serve(ctx context.Context, r *connect.Request[covev1.ServeCallbacksRequest], out *connect.ServerStream[covev1.CallbackEvent]) error {
	f := s.f
	f.mu.Lock()
	f.serves++
	n := f.serves
	f.mu.Unlock()
	if r.Msg.Owner == "" || r.Msg.Replace != (n == 1) || r.Msg.Port != 81 {
		return wire.ToConnect(sandbox.InvalidField("message", "%v", r.Msg))
	}
	if err := out.Send(&covev1.CallbackEvent{Event: &covev1.CallbackEvent_Serving{Serving: &covev1.CallbackServing{Url: "http://cove.internal:81/llm"}}}); err != nil {
		return err
	}
	for _, c := range f.callbacks {
		f.mu.Lock()
		_, done := f.answers[c.Id]
		f.mu.Unlock()
		if done {
			continue
		}
		if err := out.Send(&covev1.CallbackEvent{Event: &covev1.CallbackEvent_Request{Request: c}}); err != nil {
			return err
		}
	}
	if n == 1 {
		return wire.ToConnect(&sandbox.Error{Class: sandbox.Unavailable, Msg: "the server is stopping"})
	}
	select {
	case <-f.all:
		return wire.ToConnect(&sandbox.Error{Class: sandbox.Ended, Msg: "it has ended"})
	case <-ctx.Done():
		return ctx.Err()
	}
}

func (f *fakeAPI) answered(w http.ResponseWriter, r *http.Request) {
	b, _ := io.ReadAll(r.Body)
	f.mu.Lock()
	defer f.mu.Unlock()
	f.answers[r.PathValue("request")] += fmt.Sprint(r.URL.Query().Get("status"), " ", r.Header.Get("Cove-Answer-X-From"), " ", string(b))
	if len(f.answers) == len(f.callbacks) {
		close(f.all)
	}
	w.WriteHeader(http.StatusNoContent)
}

func TestCallbackForwards(t *testing.T) {
	local := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		b, _ := io.ReadAll(r.Body)
		w.Header().Set("X-From", "local")
		w.WriteHeader(201)
		fmt.Fprint(w, r.Method, " ", r.URL.RequestURI(), " ", r.Header.Get("X-Mine"), " ", string(b))
	}))
	defer local.Close()
	f := newFakeAPI(t)
	f.addSandbox("sb1", nil)
	f.answers, f.all = map[string]string{}, make(chan struct{})
	f.callbacks = []*covev1.CallbackRequest{
		{Id: "plain", Method: "POST", Path: "/chat", Query: "a=b", Body: []byte("hi"), Headers: []*covev1.CallbackHeader{{Name: "X-Mine", Value: "m"}, {Name: "Content-Length", Value: "2"}}},
		{Id: "long", Method: "PUT", Path: "/", BodyFollows: true},
		{Id: "evil", Method: "GET", Path: "/../admin"},
		{Id: "evil2", Method: "GET", Path: "/x/%2e%2e/%2e%2e/admin"},
		{Id: "evil3", Method: "GET", Path: `/..%5cadmin`},
	}
	run := f.cove(t, settings{}, "callback", "sb1", "llm", "--to", local.URL+"/v1", "--port", "81", "--replace", "--json")
	for id, want := range map[string]string{
		"plain": "201 local POST /v1/chat?a=b m hi", "long": "201 local PUT /v1  a body that follows",
		"evil": "400  {\"code\":\"bad_path\"", "evil2": "400  {\"code\":\"bad_path\"", "evil3": "400  {\"code\":\"bad_path\"",
	} {
		if got := f.answers[id]; !strings.HasPrefix(got, want) {
			t.Errorf("%s: %q, want %q", id, got, want)
		}
	}
	if run.code == 0 || !strings.Contains(run.stderr, "it has ended") || !strings.Contains(run.stderr, "http://cove.internal:81/llm in sb1 -> "+local.URL+"/v1") {
		t.Errorf("%d %q", run.code, run.stderr)
	}
	if strings.Count(run.stdout, "\n") != 5 || !strings.Contains(run.stdout, `{"request":"plain","method":"POST","path":"/chat","status":201}`) {
		t.Errorf("stdout %q", run.stdout)
	}
	if f.serves != 2 {
		t.Errorf("served %d times", f.serves)
	}
	for _, to := range []string{"127.0.0.1:8000", "ftp://x", "http://x/?q=1"} {
		f.cove(t, settings{}, "callback", "sb1", "llm", "--to", to).want(t, 2, "", "--to must be")
	}
}

// A server that is not there is the caller's news, and no end.
func TestCallbackWithoutServer(t *testing.T) {
	f := newFakeAPI(t)
	f.addSandbox("sb1", nil)
	f.answers, f.all = map[string]string{}, make(chan struct{})
	f.callbacks = []*covev1.CallbackRequest{{Id: "one", Method: "GET", Path: "/"}}
	f.cove(t, settings{}, "callback", "sb1", "llm", "--to", "http://127.0.0.1:1", "--port", "81", "--replace")
	if got := f.answers["one"]; !strings.Contains(got, "502") || !strings.Contains(got, "bad_gateway") || strings.Contains(got, "127.0.0.1") {
		t.Errorf("%q", got)
	}
}
