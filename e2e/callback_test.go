package e2e

import (
	"bufio"
	"context"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"os"
	"os/exec"
	"strings"
	"testing"
	"time"

	"github.com/cove-sandbox/cove/e2e/world"
	"github.com/cove-sandbox/cove/internal/testbin"
	"github.com/cove-sandbox/cove/sandbox"
)

// callback runs "cove callback" and returns once the name can be called.
func callback(t *testing.T, w *world.World, id, name, to string) *exec.Cmd {
	t.Helper()
	ctx, cancel := context.WithCancel(context.Background())
	c := exec.CommandContext(ctx, testbin.Cove(t), "callback", id, name, "--to", to)
	c.Env = append(os.Environ(), "COVE_URL="+w.URL(), "COVE_KEY="+w.Key())
	errs, err := c.StderrPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := c.Start(); err != nil {
		t.Fatal(err)
	}
	lines := bufio.NewScanner(errs)
	if !lines.Scan() || !strings.HasPrefix(lines.Text(), "http://cove.internal/"+name+" in "+id) {
		t.Fatalf("cove callback said %q", lines.Text())
	}
	done := make(chan struct{})
	go func() {
		defer close(done)
		for lines.Scan() {
			t.Log("cove callback:", lines.Text())
		}
	}()
	t.Cleanup(func() { cancel(); <-done; _ = c.Wait() })
	return c
}

const askInside = `import sys, urllib.request, urllib.error
try: print(urllib.request.urlopen("http://cove.internal/" + sys.argv[1], timeout=60).read().decode())
except urllib.error.HTTPError as e: print(e.code, e.headers.get("x-cove-error"))
except Exception as e: print("failed:", e)
`

// A model server of this machine, called from inside without a network, while
// the server of Cove dies and comes back.
func TestCallbackOutlivesTheServer(t *testing.T) {
	w := world.New(t, world.Options{})
	b := w.Create(t, world.Small())
	b.Write(t, "/tmp/ask.py", []byte(askInside))
	ask := func(path string) string { return b.Must(t, "python3 /tmp/ask.py '"+path+"'") }
	asked := make(chan struct{}, 10)
	hold := make(chan struct{})
	model := httptest.NewServer(http.HandlerFunc(func(rw http.ResponseWriter, r *http.Request) {
		if r.URL.Path == "/v1/slow" {
			asked <- struct{}{}
			select {
			case <-hold:
			case <-r.Context().Done():
			}
		}
		body, _ := io.ReadAll(r.Body)
		fmt.Fprintf(rw, "%s %d", r.URL.RequestURI(), len(body))
	}))
	defer model.Close()
	defer close(hold)
	cmd := callback(t, w, b.ID, "llm", model.URL+"/v1")
	if got := ask("llm/models?x=1"); got != "/v1/models?x=1 0" {
		t.Fatalf("got %q", got)
	}

	// One that is under way when the server dies is told so: the answer would
	// come to nobody.
	b.Must(t, "nohup python3 /tmp/ask.py llm/slow >/tmp/slow 2>&1 &")
	select {
	case <-asked:
	case <-time.After(time.Minute):
		t.Fatal("the model was not asked")
	}
	w.Kill(t)
	w.Start(t)
	world.Eventually(t, time.Minute, "the call to end", func() bool { return b.Must(t, "cat /tmp/slow") != "" })
	if got := b.Must(t, "cat /tmp/slow"); got != "502 handler_gone" {
		t.Errorf("a call under way when the server died got %q", got)
	}
	world.Eventually(t, time.Minute, "the name to be served again", func() bool {
		return ask("llm/again") == "/v1/again 0"
	})

	// A flood of connections stops nothing but itself.
	r := b.Python(t, `
import socket, time
held = []
for i in range(600):
    s = socket.socket(); s.setblocking(False)
    try: s.connect(("cove.internal", 80))
    except BlockingIOError: pass
    held.append(s)
time.sleep(1)
print("held")
`, time.Minute)
	r.WantExit(t, 0)
	if got := ask("llm/after"); got != "/v1/after 0" {
		t.Errorf("after a flood: %q", got)
	}

	// Ctrl-C frees the port.
	if err := cmd.Process.Signal(os.Interrupt); err != nil {
		t.Fatal(err)
	}
	world.Eventually(t, time.Minute, "the port to be free", func() bool {
		return strings.Contains(ask("llm/x"), "refused")
	})
	if sb := b.Get(t); sb.State != sandbox.Running {
		t.Errorf("%v", sb.State)
	}
	w.AssertReconciled(t)
}
