package gateway_test

import (
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"strconv"
	"testing"

	"github.com/cove-sandbox/cove/sandbox"
)

// hostEcho answers with the Host that it was asked by.
var hostEcho = http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) { _, _ = io.WriteString(w, r.Host) })

func (w *world) shown(door sandbox.Door) {
	w.backend.mu.Lock()
	defer w.backend.mu.Unlock()
	w.door = door
}

// look asks for a port without any token.
func (w *world) look(port int) (int, string) {
	w.t.Helper()
	req, err := http.NewRequestWithContext(w.t.Context(), "GET", "http://"+w.addr+"/", nil)
	if err != nil {
		w.t.Fatal(err)
	}
	req.Host = strconv.Itoa(port) + "-" + box + ".cove.test"
	res, err := http.DefaultTransport.RoundTrip(req)
	if err != nil {
		w.t.Fatal(err)
	}
	defer res.Body.Close()
	b, _ := io.ReadAll(res.Body)
	return res.StatusCode, string(b)
}

func TestADoorIsShownAsItsSandboxSays(t *testing.T) {
	w := newWorld(t, hostEcho)
	t.Cleanup(http.DefaultTransport.(*http.Transport).CloseIdleConnections)
	if status, _ := w.look(w.port); status != http.StatusUnauthorized {
		t.Errorf("a private port: %d", status)
	}
	w.shown(sandbox.Door{Public: true})
	if status, body := w.look(w.port); status != 200 || body != strconv.Itoa(w.port)+"-"+box+".cove.test" {
		t.Errorf("a public one: %d %q", status, body)
	}
	w.shown(sandbox.Door{Public: true, Host: "masked.test:80"})
	if status, body := w.look(w.port); status != 200 || body != "masked.test:80" {
		t.Errorf("with a mask: %d %q", status, body)
	}

	secure := httptest.NewTLSServer(hostEcho)
	t.Cleanup(secure.Close)
	port := secure.Listener.Addr().(*net.TCPAddr).Port
	w.shown(sandbox.Door{Public: true, TLS: true, Host: "inside.test"})
	if status, body := w.look(port); status != 200 || body != "inside.test" {
		t.Errorf("TLS inside: %d %q", status, body)
	}

	w.shown(sandbox.Door{Public: true, NoWake: true})
	w.backend.mu.Lock()
	w.asleep = true
	w.backend.mu.Unlock()
	if status, _ := w.look(w.port); status != http.StatusServiceUnavailable || w.wakes != 0 {
		t.Errorf("asleep, not to be woken: %d, woken %d times", status, w.wakes)
	}
}
