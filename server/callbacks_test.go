package server

import (
	"bytes"
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"io"
	"net/http"
	"strings"
	"sync"
	"testing"
	"time"

	"connectrpc.com/connect"

	covev1 "github.com/cove-sandbox/cove/api/cove/v1"
	"github.com/cove-sandbox/cove/sandbox"
)

// served is a name that a test serves.
type served struct {
	*world
	id     string
	stream *connect.ServerStreamForClient[covev1.CallbackEvent]
	leave  context.CancelFunc
	events chan *covev1.CallbackEvent
	ended  chan error // once
}

func (w *world) serve(m *covev1.ServeCallbacksRequest) *served {
	w.Helper()
	ctx, cancel := context.WithCancel(w.Context())
	st, err := w.client.Callbacks.Serve(ctx, connect.NewRequest(m))
	if err != nil {
		w.Fatal(err)
	}
	if !st.Receive() || st.Msg().GetServing() == nil {
		w.Fatalf("no confirmation: %v %v", st.Msg(), st.Err())
	}
	s := &served{world: w, id: m.SandboxId, stream: st, leave: cancel, events: make(chan *covev1.CallbackEvent, 1000), ended: make(chan error, 1)}
	done := make(chan struct{})
	go func() {
		defer close(done)
		for st.Receive() {
			if st.Msg().Event != nil {
				s.events <- st.Msg()
			}
		}
		s.ended <- st.Err()
	}()
	w.Cleanup(func() { cancel(); <-done; _ = st.Close() })
	return s
}

func (s *served) event() *covev1.CallbackEvent {
	s.Helper()
	select {
	case ev := <-s.events:
		return ev
	case <-time.After(time.Minute):
		s.Fatal("no event")
		return nil
	}
}

func (s *served) request() *covev1.CallbackRequest {
	s.Helper()
	r := s.event().GetRequest()
	if r == nil {
		s.Fatal("another event")
	}
	return r
}

func (s *served) answer(id string, status int, body string) error {
	return s.client.AnswerCallback(s.Context(), s.id, id, status, http.Header{"X-From": {"handler"}}, strings.NewReader(body), int64(len(body)))
}

// inside makes a request as code inside does.
func (w *world) inside(id, method, path string, body io.Reader) <-chan reply {
	w.Helper()
	req, err := http.NewRequestWithContext(w.Context(), method, w.node.callbackURL(id)+path, body)
	if err != nil {
		w.Fatal(err)
	}
	got := make(chan reply, 1)
	go func() {
		resp, err := plainHTTP.Do(req)
		if err != nil {
			got <- reply{err: err}
			return
		}
		defer resp.Body.Close()
		b, err := io.ReadAll(resp.Body)
		got <- reply{resp, string(b), err}
	}()
	return got
}

type reply struct {
	*http.Response
	body string
	err  error
}

func (w *world) wantReply(got <-chan reply, status int, code, body string) reply {
	w.Helper()
	select {
	case r := <-got:
		if r.err != nil || r.StatusCode != status || r.Header.Get("X-Cove-Error") != code || !strings.Contains(r.body, body) {
			w.Fatalf("got %+v, want %d %q %q", r, status, code, body)
		}
		return r
	case <-time.After(time.Minute):
		w.Fatal("no reply")
		return reply{}
	}
}

func TestCallback(t *testing.T) {
	w := newWorld(t)
	sb := w.create(nil)
	s := w.serve(&covev1.ServeCallbacksRequest{SandboxId: sb.Id, Name: "llm"})

	req, _ := http.NewRequestWithContext(t.Context(), "POST", w.node.callbackURL(sb.Id)+"/llm/v1/../chat%2Fx?a=b&c=%C3", strings.NewReader("hello"))
	req.Header = http.Header{"X-Mine": {"one", "two"}, "Connection": {"X-Hop"}, "X-Hop": {"1"}, "Keep-Alive": {"5"}, "X-Latin": {"caf\xe9"}}
	got := make(chan reply, 1)
	go func() {
		resp, err := plainHTTP.Do(req)
		if err != nil {
			got <- reply{err: err}
			return
		}
		defer resp.Body.Close()
		b, _ := io.ReadAll(resp.Body)
		got <- reply{resp, string(b), nil}
	}()
	r := s.request()
	if r.Method != "POST" || r.Path != "/v1/../chat%2Fx" || r.Query != "a=b&c=%C3" || string(r.Body) != "hello" || r.BodyFollows {
		t.Errorf("%v", r)
	}
	have := map[string][]string{}
	for _, h := range r.Headers {
		have[h.Name] = append(have[h.Name], h.Value)
	}
	if fmt.Sprint(have["X-Mine"]) != "[one two]" || have["X-Latin"][0] != "café" || have["X-Hop"] != nil || have["Connection"] != nil || have["Keep-Alive"] != nil {
		t.Errorf("headers %v", have)
	}
	if err := w.client.AnswerCallback(t.Context(), sb.Id, r.Id, 201, http.Header{"X-From": {"handler"}, "Connection": {"close"}, "X-Cove-Error": {"forged"}, "Content-Length": {"1"}},
		strings.NewReader("world"), 5); err != nil {
		t.Fatal(err)
	}
	a := w.wantReply(got, 201, "", "world")
	if a.Header.Get("X-From") != "handler" || a.ContentLength != 5 || a.Header.Get("Content-Type") != "" {
		t.Errorf("%v", a.Header)
	}
	wantError(t, s.answer(r.Id, 200, "again"), sandbox.ErrNotFound)

	// The path's edges.
	for path, want := range map[string]string{"/llm": "/", "/llm/": "/", "/llm//x": "//x"} {
		got := w.inside(sb.Id, "GET", path, nil)
		r := s.request()
		if r.Path != want {
			t.Errorf("%s: path %q, want %q", path, r.Path, want)
		}
		if err := s.answer(r.Id, 204, ""); err != nil {
			t.Error(err)
		}
		w.wantReply(got, 204, "", "")
	}
	w.wantReply(w.inside(sb.Id, "GET", "/", nil), 404, "no_such_name", "")
	w.wantReply(w.inside(sb.Id, "GET", "/UP/x", nil), 404, "no_such_name", "")
	w.wantReply(w.inside(sb.Id, "GET", "/other", nil), 404, "no_such_name", "serve")

	// A HEAD has a header only.
	head := w.inside(sb.Id, "HEAD", "/llm", nil)
	if err := s.answer(s.request().Id, 200, "not sent"); err != nil {
		t.Error(err)
	}
	if r := w.wantReply(head, 200, "", ""); r.ContentLength != 8 {
		t.Errorf("length %d", r.ContentLength)
	}
	for _, status := range []int{0, 101, 199, 600} {
		resp, _ := w.http("PUT", fmt.Sprintf("/v1/sandboxes/%s/callbacks/x?status=%d", sb.Id, status), nil)
		if resp.StatusCode == 204 {
			t.Errorf("status %d was taken", status)
		}
	}
	w.kill(sb.Id)
	wantError(t, <-s.ended, sandbox.ErrEnded)
}

// Bodies of any size stream both ways, at the same time.
func TestCallbackStreams(t *testing.T) {
	w := newWorld(t)
	sb := w.create(nil)
	s := w.serve(&covev1.ServeCallbacksRequest{SandboxId: sb.Id, Name: "echo"})
	want := make([]byte, 10<<20)
	rand.Read(want)
	got := w.inside(sb.Id, "POST", "/echo", bytes.NewReader(want))
	r := s.request()
	if !r.BodyFollows || len(r.Body) != 0 {
		t.Fatalf("a large body in the event: %d", len(r.Body))
	}
	body, err := w.client.CallbackBody(t.Context(), sb.Id, r.Id)
	if err != nil {
		t.Fatal(err)
	}
	if err := w.client.AnswerCallback(t.Context(), sb.Id, r.Id, 200, nil, body, -1); err != nil {
		t.Fatal(err)
	}
	body.Close()
	if a := w.wantReply(got, 200, "", ""); a.body != string(want) {
		t.Error("another body came back")
	}

	// Each part arrives when it is sent.
	in, partsIn := io.Pipe()
	req, _ := http.NewRequestWithContext(t.Context(), "POST", w.node.callbackURL(sb.Id)+"/echo", in)
	resps := make(chan *http.Response, 1)
	go func() {
		resp, err := plainHTTP.Do(req)
		if err != nil {
			t.Error(err)
		}
		resps <- resp
	}()
	r = s.request()
	body, err = w.client.CallbackBody(t.Context(), sb.Id, r.Id)
	if err != nil {
		t.Fatal(err)
	}
	defer body.Close()
	answered := make(chan error, 1)
	go func() { answered <- w.client.AnswerCallback(t.Context(), sb.Id, r.Id, 200, nil, body, -1) }()
	var resp *http.Response
	for i := range 5 {
		part := fmt.Sprintf("part %d;", i)
		go io.WriteString(partsIn, part)
		if resp == nil {
			resp = <-resps
		}
		p := make([]byte, len(part))
		if _, err := io.ReadFull(resp.Body, p); err != nil || string(p) != part {
			t.Fatalf("%q %v", p, err)
		}
	}
	partsIn.Close()
	if rest, err := io.ReadAll(resp.Body); err != nil || len(rest) > 0 {
		t.Errorf("%q %v", rest, err)
	}
	resp.Body.Close()
	if err := <-answered; err != nil {
		t.Error(err)
	}
	// Of a body there is one reader.
	got = w.inside(sb.Id, "POST", "/echo", bytes.NewReader(want[:100<<10]))
	r = s.request()
	b1, err := w.client.CallbackBody(t.Context(), sb.Id, r.Id)
	if err != nil {
		t.Fatal(err)
	}
	defer b1.Close()
	_, err = w.client.CallbackBody(t.Context(), sb.Id, r.Id)
	wantError(t, err, sandbox.ErrPrecondition)
	// An answer need not wait for it.
	if err := s.answer(r.Id, 413, "no"); err != nil {
		t.Error(err)
	}
	w.wantReply(got, 413, "", "no")
}

func TestCallbacksAreConcurrentAndBounded(t *testing.T) {
	w := newWorld(t)
	sb := w.create(nil)
	s := w.serve(&covev1.ServeCallbacksRequest{SandboxId: sb.Id, Name: "llm"})
	var replies []<-chan reply
	var ids []string
	for range maxCallbacks {
		replies = append(replies, w.inside(sb.Id, "GET", "/llm", nil))
	}
	for range maxCallbacks {
		ids = append(ids, s.request().Id)
	}
	if r := w.wantReply(w.inside(sb.Id, "GET", "/llm", nil), 503, "no_capacity", ""); r.Header.Get("Retry-After") != "1" {
		t.Errorf("%v", r.Header)
	}
	var wg sync.WaitGroup
	for _, id := range ids {
		wg.Go(func() {
			if err := s.answer(id, 200, id); err != nil {
				t.Error(err)
			}
		})
	}
	wg.Wait()
	for _, got := range replies {
		w.wantReply(got, 200, "", "")
	}
}

// Who leaves inside is told to the server of the name, and its answer is not
// taken.
func TestCallbackCallerLeaves(t *testing.T) {
	w := newWorld(t)
	sb := w.create(nil)
	s := w.serve(&covev1.ServeCallbacksRequest{SandboxId: sb.Id, Name: "llm"})
	ctx, leave := context.WithCancel(t.Context())
	call := func() string {
		req, _ := http.NewRequestWithContext(ctx, "GET", w.node.callbackURL(sb.Id)+"/llm", nil)
		go func() {
			if resp, err := plainHTTP.Do(req); err == nil {
				_, _ = io.Copy(io.Discard, resp.Body)
				resp.Body.Close()
			}
		}()
		return s.request().Id
	}
	id := call()
	leave()
	if ev := s.event(); ev.GetGone().GetId() != id {
		t.Errorf("%v", ev)
	}
	wantError(t, s.answer(id, 200, "too late"), sandbox.ErrNotFound)

	ctx, leave = context.WithCancel(t.Context())
	id = call()
	r, body := io.Pipe()
	answered := make(chan error, 1)
	go func() { answered <- w.client.AnswerCallback(t.Context(), sb.Id, id, 200, nil, r, -1) }()
	io.WriteString(body, "begun")
	for taken := false; !taken; <-tick() {
		w.server.callbacks.mu.Lock()
		taken = w.server.callbacks.mu.routes[sb.Id].calls[id].taken
		w.server.callbacks.mu.Unlock()
	}
	leave()
	for { // until the server notices
		if _, err := io.WriteString(body, "more"); err != nil {
			break
		}
		select {
		case err := <-answered:
			body.CloseWithError(io.ErrClosedPipe)
			wantError(t, err, sandbox.ErrCanceled)
			return
		case <-tick():
		}
	}
	if err := <-answered; !errors.Is(err, sandbox.ErrCanceled) && !errors.Is(err, sandbox.ErrUnavailable) {
		t.Error(err)
	}
}

func TestCallbackServerLeaves(t *testing.T) {
	w := newWorld(t, func(c *Config) { c.CallbackGrace, c.CallbackLinger = time.Nanosecond, time.Hour })
	sb := w.create(nil)
	s := w.serve(&covev1.ServeCallbacksRequest{SandboxId: sb.Id, Name: "llm"})
	got := w.inside(sb.Id, "GET", "/llm", nil)
	id := s.request().Id
	s.leave()
	w.wantReply(got, 502, "handler_gone", "")
	wantError(t, s.answer(id, 200, "too late"), sandbox.ErrNotFound)
	if r := w.wantReply(w.inside(sb.Id, "GET", "/llm", nil), 503, "no_handler", ""); r.Header.Get("Retry-After") == "" {
		t.Error("no Retry-After")
	}
	// An answer that breaks off is no answer.
	s = w.serve(&covev1.ServeCallbacksRequest{SandboxId: sb.Id, Name: "llm"})
	for _, begun := range []bool{false, true} {
		req, _ := http.NewRequestWithContext(t.Context(), "GET", w.node.callbackURL(sb.Id)+"/llm", nil)
		resps := make(chan *http.Response, 1)
		go func() {
			resp, err := plainHTTP.Do(req)
			if err != nil {
				t.Error(err)
			}
			resps <- resp
		}()
		id := s.request().Id
		ctx, cancel := context.WithCancel(t.Context())
		r, body := io.Pipe()
		answered := make(chan error, 1)
		go func() { answered <- w.client.AnswerCallback(ctx, sb.Id, id, 200, nil, r, -1) }()
		var resp *http.Response
		if begun {
			io.WriteString(body, "start")
			resp = <-resps
		}
		for taken := false; !taken; <-tick() {
			w.server.callbacks.mu.Lock()
			c := w.server.callbacks.mu.routes[sb.Id].calls[id]
			taken = c != nil && c.taken
			w.server.callbacks.mu.Unlock()
		}
		cancel()
		body.CloseWithError(io.ErrUnexpectedEOF)
		<-answered
		if !begun {
			resp = <-resps
		}
		got, err := io.ReadAll(resp.Body)
		resp.Body.Close()
		if begun && err == nil {
			t.Errorf("half an answer looks whole: %q", got)
		}
		if !begun && (resp.StatusCode != 502 || !strings.Contains(string(got), "broke off")) {
			t.Errorf("%d %q", resp.StatusCode, got)
		}
	}
}

// A server of a name that comes back in time is sent what is under way again.
func TestCallbackServerComesBack(t *testing.T) {
	w := newWorld(t, func(c *Config) { c.CallbackGrace = time.Hour })
	sb := w.create(nil)
	m := &covev1.ServeCallbacksRequest{SandboxId: sb.Id, Name: "llm", Owner: "me"}
	s := w.serve(m)
	got := w.inside(sb.Id, "GET", "/llm/first", nil)
	first := s.request().Id
	s.leave()
	<-s.ended
	meanwhile := w.inside(sb.Id, "GET", "/llm/second", nil)
	s = w.serve(m)
	if again := s.request(); again.Id != first || again.Path != "/first" {
		t.Errorf("%v", again)
	}
	second := s.request().Id
	for _, id := range []string{second, first} {
		if err := s.answer(id, 200, id); err != nil {
			t.Error(err)
		}
	}
	w.wantReply(got, 200, "", first)
	w.wantReply(meanwhile, 200, "", second)

	// While the old stream still looks alive, too.
	s2 := w.serve(m)
	wantError(t, <-s.ended, sandbox.ErrConflict)
	// Another owner is refused, or takes it over, and is not told of the first's requests.
	got = w.inside(sb.Id, "GET", "/llm", nil)
	s2.request()
	other := &covev1.ServeCallbacksRequest{SandboxId: sb.Id, Name: "llm", Owner: "other"}
	st, err := w.client.Callbacks.Serve(t.Context(), connect.NewRequest(other))
	if err == nil {
		st.Receive()
		err = st.Err()
		st.Close()
	}
	wantError(t, err, sandbox.ErrAlreadyExists, "replace")
	other.Replace = true
	s3 := w.serve(other)
	wantError(t, <-s2.ended, sandbox.ErrConflict)
	w.wantReply(got, 502, "handler_gone", "")
	got = w.inside(sb.Id, "GET", "/llm", nil)
	if err := s3.answer(s3.request().Id, 200, "third"); err != nil {
		t.Error(err)
	}
	w.wantReply(got, 200, "", "third")
}

// The listener inside is there while a name is served, and not after.
func TestCallbackRouteEnds(t *testing.T) {
	w := newWorld(t, func(c *Config) { c.CallbackGrace, c.CallbackLinger = time.Nanosecond, time.Nanosecond })
	sb := w.create(nil)
	gone := func() {
		t.Helper()
		for {
			w.server.callbacks.mu.Lock()
			n := len(w.server.callbacks.mu.routes)
			w.server.callbacks.mu.Unlock()
			if n == 0 {
				return
			}
			<-tick()
		}
	}
	s := w.serve(&covev1.ServeCallbacksRequest{SandboxId: sb.Id, Name: "llm"})
	s.leave()
	gone()
	// Until its listener is closed the guest says that nobody is there.
	for r := range 1000 {
		got := <-w.inside(sb.Id, "GET", "/llm", nil)
		if got.err != nil {
			break
		}
		if got.Header.Get("X-Cove-Error") != "handler_gone" || r == 999 {
			t.Fatalf("still answers: %v", got)
		}
	}

	a := w.serve(&covev1.ServeCallbacksRequest{SandboxId: sb.Id, Name: "a", Owner: "me"})
	b := w.serve(&covev1.ServeCallbacksRequest{SandboxId: sb.Id, Name: "b"})
	closing := func(name, owner string) error {
		_, err := w.client.Callbacks.Close(t.Context(), connect.NewRequest(&covev1.CloseCallbacksRequest{SandboxId: sb.Id, Name: name, Owner: owner}))
		return err
	}
	wantError(t, closing("a", "not me"), sandbox.ErrNotFound)
	if err := closing("a", "me"); err != nil {
		t.Fatal(err)
	}
	wantError(t, <-a.ended, sandbox.ErrCanceled)
	wantError(t, closing("a", ""), sandbox.ErrNotFound)
	w.wantReply(w.inside(sb.Id, "GET", "/a", nil), 404, "no_such_name", "")
	if err := closing("b", ""); err != nil {
		t.Fatal(err)
	}
	wantError(t, <-b.ended, sandbox.ErrCanceled)
	gone()

	// One port for all names; a taken one is typed.
	s = w.serve(&covev1.ServeCallbacksRequest{SandboxId: sb.Id, Name: "a", Port: 8080})
	st, err := w.client.Callbacks.Serve(t.Context(), connect.NewRequest(&covev1.ServeCallbacksRequest{SandboxId: sb.Id, Name: "b"}))
	if err == nil {
		st.Receive()
		err = st.Err()
		st.Close()
	}
	wantError(t, err, sandbox.ErrConflict, "8080")
	s.leave()
	gone()
	w.node.onListen = func(port int) error {
		return &sandbox.Error{Class: sandbox.Precondition, Reason: sandbox.PortTaken, Msg: fmt.Sprint(port, " is taken")}
	}
	st, err = w.client.Callbacks.Serve(t.Context(), connect.NewRequest(&covev1.ServeCallbacksRequest{SandboxId: sb.Id, Name: "b"}))
	if err == nil {
		st.Receive()
		err = st.Err()
		st.Close()
	}
	wantError(t, err, sandbox.ErrPortTaken, "80")
}

// An answer wakes a sandbox that was put on standby meanwhile; news that there
// is none does not.
func TestCallbackAnswerWakes(t *testing.T) {
	w := newWorld(t, func(c *Config) { c.CallbackGrace = time.Nanosecond })
	sb := w.create(nil)
	s := w.serve(&covev1.ServeCallbacksRequest{SandboxId: sb.Id, Name: "llm"})
	pause := func() {
		t.Helper()
		if _, err := w.client.Sandboxes.Pause(t.Context(), connect.NewRequest(&covev1.PauseRequest{Id: sb.Id})); err != nil {
			t.Fatal(err)
		}
	}
	got := w.inside(sb.Id, "GET", "/llm", nil)
	id := s.request().Id
	if w.node.saw().holds != 1 {
		t.Errorf("a sandbox that waits for an answer counts as idle")
	}
	pause()
	if err := s.answer(id, 200, "ok"); err != nil {
		t.Fatal(err)
	}
	w.wantReply(got, 200, "", "ok")
	if st := w.server.standby(t.Context())[sb.Id]; st != sandbox.Awake {
		t.Errorf("an answer left it %s", st)
	}
	got = w.inside(sb.Id, "GET", "/llm", nil)
	s.request()
	pause()
	s.leave()
	<-s.ended
	w.until("nobody waits for an answer", func() bool { return w.node.saw().holds == 0 })
	if st := w.server.standby(t.Context())[sb.Id]; st != sandbox.Hot {
		t.Errorf("the end of its handler left it %q", st)
	}
	if _, err := w.client.Sandboxes.Resume(t.Context(), connect.NewRequest(&covev1.ResumeRequest{Id: sb.Id})); err != nil {
		t.Fatal(err)
	}
	w.wantReply(got, 502, "handler_gone", "") // it hears when it wakes
}

// A server that stops lets go of names that are not being used, waits for
// requests under way, and takes no new ones.
func TestCallbackDrain(t *testing.T) {
	w := newWorld(t)
	sb := w.create(nil)
	idle := w.serve(&covev1.ServeCallbacksRequest{SandboxId: sb.Id, Name: "idle"})
	s := w.serve(&covev1.ServeCallbacksRequest{SandboxId: sb.Id, Name: "llm"})
	got := w.inside(sb.Id, "GET", "/llm", nil)
	id := s.request().Id
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	drained := make(chan int, 1)
	go func() { drained <- w.server.Drain(ctx) }()
	wantError(t, <-idle.ended, sandbox.ErrUnavailable, "stopping")
	w.wantReply(w.inside(sb.Id, "GET", "/llm", nil), 503, "unavailable", "")
	if err := s.answer(id, 200, "in time"); err != nil {
		t.Error(err)
	}
	w.wantReply(got, 200, "", "in time")
	wantError(t, <-s.ended, sandbox.ErrUnavailable, "stopping")
	if left := <-drained; left != 0 || ctx.Err() != nil {
		t.Errorf("%d calls left, %v", left, ctx.Err())
	}
}

// Another tenant's sandbox has neither names nor requests for a stranger.
func TestCallbackOfAnotherTenant(t *testing.T) {
	s := newShared(t)
	red := &world{TB: t, node: s.node, server: s.server, client: s.red, url: s.url}
	sv := red.serve(&covev1.ServeCallbacksRequest{SandboxId: s.box, Name: "llm"})
	got := red.inside(s.box, "POST", "/llm", bytes.NewReader(make([]byte, 100<<10)))
	id := sv.request().Id
	own, err := s.blue.Sandboxes.Create(t.Context(), connect.NewRequest(&covev1.CreateSandboxRequest{}))
	if err != nil {
		t.Fatal(err)
	}
	for _, box := range []string{s.box, own.Msg.Sandbox.Id} {
		_, err := s.blue.CallbackBody(t.Context(), box, id)
		wantError(t, err, sandbox.ErrNotFound)
		wantError(t, s.blue.AnswerCallback(t.Context(), box, id, 200, nil, strings.NewReader("evil"), 4), sandbox.ErrNotFound)
	}
	_, err = s.blue.Callbacks.Close(t.Context(), connect.NewRequest(&covev1.CloseCallbacksRequest{SandboxId: s.box, Name: "llm"}))
	wantError(t, err, sandbox.ErrNotFound)
	if err := sv.answer(id, 200, "red's"); err != nil {
		t.Error(err)
	}
	red.wantReply(got, 200, "", "red's")
}
