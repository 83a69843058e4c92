package server

import (
	"encoding/json"
	"errors"
	"io"
	"net/http"
	"net/http/httptest"
	"net/url"
	"strconv"
	"strings"
	"testing"
	"time"

	covev1 "github.com/cove-sandbox/cove/api/cove/v1"
	"github.com/cove-sandbox/cove/interpreter"
	"github.com/cove-sandbox/cove/sandbox"
	"github.com/cove-sandbox/cove/wire"
)

// interpreted is a world whose sandboxes have what h says for an interpreter.
func interpreted(t *testing.T, h http.HandlerFunc) (*world, *covev1.Sandbox) {
	w := newWorld(t)
	inside := httptest.NewServer(h)
	t.Cleanup(inside.Close)
	u, _ := url.Parse(inside.URL)
	at, _ := strconv.Atoi(u.Port())
	w.node.onDial = func(port int) int {
		if port != interpreter.Port {
			t.Errorf("port %d was dialled", port)
		}
		return at
	}
	return w, w.create(&covev1.SandboxSpec{Env: map[string]string{"OF": "sandbox"}})
}

func TestRunCode(t *testing.T) {
	var asked map[string]any
	w, sb := interpreted(t, func(rw http.ResponseWriter, r *http.Request) {
		_ = json.NewDecoder(r.Body).Decode(&asked)
		io.WriteString(rw, `{"type":"stdout","text":"a\n"}`+"\n")
		io.WriteString(rw, `{"type":"end_of_execution"}`+"\n")
	})
	var got []string
	err := w.client.RunCode(t.Context(), sb.Id, wire.CodeRequest{Code: "print('a')", Language: "py", Env: map[string]string{"A": "1"}}, func(ev wire.CodeEvent) error {
		got = append(got, ev.Type+" "+ev.Text)
		return nil
	})
	if err != nil || strings.Join(got, "|") != "stdout a\n|end_of_execution " {
		t.Errorf("%q, %v", got, err)
	}
	want := map[string]any{"code": "print('a')", "context_id": "", "language": "py", "env_vars": map[string]any{"A": "1"}, "sandbox_env": map[string]any{"OF": "sandbox"}}
	if a, b := mustJSON(asked), mustJSON(want); a != b {
		t.Errorf("asked %s, want %s", a, b)
	}
	if ops, _ := w.noted(); ops["code.run ok"] != 1 {
		t.Errorf("the audit log has %v", ops)
	}
	for what, r := range map[string]wire.CodeRequest{
		"both":    {Code: "1", Context: "c", Language: "py"},
		"env":     {Code: "1", Env: map[string]string{"A=B": "1"}},
		"timeout": {Code: "1", Timeout: 1e-6},
	} {
		if err := w.client.RunCode(t.Context(), sb.Id, r, nil); !errors.Is(err, sandbox.ErrInvalid) {
			t.Errorf("%s: %v", what, err)
		}
	}
	if err := w.client.RunCode(t.Context(), sb.Id, wire.CodeRequest{Code: strings.Repeat("x", MaxCode+1)}, nil); !errors.Is(err, sandbox.ErrTooLarge) {
		t.Errorf("too much code: %v", err)
	}
	if err := w.client.RunCode(t.Context(), "nosuch", wire.CodeRequest{Code: "1"}, nil); !errors.Is(err, sandbox.ErrNotFound) {
		t.Errorf("no sandbox: %v", err)
	}
}

func mustJSON(v any) string {
	b, _ := json.Marshal(v)
	return string(b)
}

// What fails in the middle is the last line, and the interpreter sees its caller go.
func TestRunCodeTimeout(t *testing.T) {
	left := make(chan struct{})
	w, sb := interpreted(t, func(rw http.ResponseWriter, r *http.Request) {
		io.Copy(io.Discard, r.Body)
		io.WriteString(rw, `{"type":"stdout","te`) // half a line
		rw.(http.Flusher).Flush()
		<-r.Context().Done()
		close(left)
	})
	resp, body := w.http("POST", "/v1/sandboxes/"+sb.Id+"/code", strings.NewReader(`{"code":"while True: pass","timeout":0.2}`), "Content-Type", "application/json")
	lines := strings.Split(strings.TrimSpace(body), "\n")
	var last struct {
		Type  string
		Error struct{ Code, Message string }
	}
	if err := json.Unmarshal([]byte(lines[len(lines)-1]), &last); err != nil || resp.StatusCode != 200 || len(lines) != 2 {
		t.Fatalf("%d %q %v", resp.StatusCode, body, err)
	}
	if last.Type != "failure" || last.Error.Code != "deadline_exceeded" || !strings.Contains(last.Error.Message, "interrupted") {
		t.Errorf("%+v", last)
	}
	select {
	case <-left:
	case <-time.After(10 * time.Second):
		t.Error("the interpreter still has its caller")
	}
}

// Code inside may be the one that answers: nothing it says is more than an error.
func TestAHostileInterpreter(t *testing.T) {
	for what, c := range map[string]struct {
		answer http.HandlerFunc
		want   error
	}{
		"refuses":   {func(w http.ResponseWriter, r *http.Request) { http.Error(w, "no \x1b[31mcolour", 400) }, sandbox.ErrInvalid},
		"not found": {func(w http.ResponseWriter, r *http.Request) { http.Error(w, "gone", 404) }, sandbox.ErrNotFound},
		"breaks":    {func(w http.ResponseWriter, r *http.Request) { panic(http.ErrAbortHandler) }, sandbox.ErrUnavailable},
		"redirects": {func(w http.ResponseWriter, r *http.Request) {
			http.Redirect(w, r, "http://169.254.169.254/", http.StatusFound)
		}, sandbox.ErrUnavailable},
		"is no JSON":  {func(w http.ResponseWriter, r *http.Request) { io.WriteString(w, "<script>") }, sandbox.ErrUnavailable},
		"is no list":  {func(w http.ResponseWriter, r *http.Request) { io.WriteString(w, `{"id":1}`) }, sandbox.ErrUnavailable},
		"never stops": {func(w http.ResponseWriter, r *http.Request) { io.CopyN(w, endless{}, 1<<30) }, sandbox.ErrUnavailable},
		"its header":  {func(w http.ResponseWriter, r *http.Request) { w.Header().Set("X", strings.Repeat("x", 1<<20)) }, sandbox.ErrUnavailable},
	} {
		t.Run(what, func(t *testing.T) {
			w, sb := interpreted(t, c.answer)
			_, err := w.client.CodeContexts(t.Context(), sb.Id)
			if !errors.Is(err, c.want) || strings.Contains(err.Error(), "\x1b") {
				t.Errorf("%q", err)
			}
		})
	}
}

type endless struct{}

func (endless) Read(p []byte) (int, error) { return len(p), nil }

func TestCodeContexts(t *testing.T) {
	var asked []string
	w, sb := interpreted(t, func(rw http.ResponseWriter, r *http.Request) {
		asked = append(asked, r.Method+" "+r.URL.EscapedPath())
		if r.Method == http.MethodGet {
			io.WriteString(rw, `[{"id":"a","language":"python","cwd":"/"}]`)
			return
		}
		io.WriteString(rw, `{"id":"b","language":"bash","cwd":"/tmp"}`)
	})
	list, err := w.client.CodeContexts(t.Context(), sb.Id)
	if err != nil || len(list) != 1 || list[0] != (wire.CodeContext{ID: "a", Language: "python", Cwd: "/"}) {
		t.Errorf("%v, %v", list, err)
	}
	if c, err := w.client.CreateCodeContext(t.Context(), sb.Id, "bash", "/tmp"); err != nil || c.ID != "b" {
		t.Errorf("%v, %v", c, err)
	}
	if err := errors.Join(w.client.RestartCodeContext(t.Context(), sb.Id, "a/../../health"), w.client.RemoveCodeContext(t.Context(), sb.Id, "b")); err != nil {
		t.Error(err)
	}
	if got := strings.Join(asked, "|"); got != "GET /contexts|POST /contexts|POST /contexts/a%2F..%2F..%2Fhealth/restart|DELETE /contexts/b" {
		t.Error(got)
	}
}

// A sandbox without an interpreter is told from one that does not run.
func TestNoInterpreter(t *testing.T) {
	w := newWorld(t)
	w.node.onDial = func(int) int { return 1 } // nothing listens there
	sb := w.create(nil)
	err := w.client.RunCode(t.Context(), sb.Id, wire.CodeRequest{Code: "1"}, nil)
	var e *sandbox.Error
	if !errors.As(err, &e) || e.Reason != sandbox.PortClosed || !strings.Contains(e.Hint, "cove code setup") {
		t.Errorf("%v", err)
	}
}

// Who may not run processes runs no code either, and only looks at nothing of it.
func TestCodeNeedsTheScopeOfProcesses(t *testing.T) {
	s := newShared(t)
	sb := s.create(nil)
	for _, scopes := range [][]string{{"sandboxes", "ports", "files"}, {"processes:read", "ports"}} {
		key := s.key(s.red, &covev1.CreateKeyRequest{Name: "short", Role: "developer", Scopes: scopes})
		c := wire.NewClient(s.url, key, wire.Options{})
		defer c.Close()
		if err := c.RunCode(t.Context(), sb.Id, wire.CodeRequest{Code: "1"}, nil); !errors.Is(err, sandbox.ErrDenied) {
			t.Errorf("%v: %v", scopes, err)
		}
	}
}
