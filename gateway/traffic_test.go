package gateway_test

import (
	"bufio"
	"bytes"
	"context"
	"crypto/sha256"
	"fmt"
	"io"
	"math/rand/v2"
	"net"
	"net/http"
	"os"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/coder/websocket"
)

func echoHeaders(w http.ResponseWriter, r *http.Request) {
	fmt.Fprintf(w, "%s %s host=%s\n", r.Method, r.RequestURI, r.Host)
	_ = r.Header.Write(w)
}

func TestBothAddressesReachThePort(t *testing.T) {
	w := newWorld(t, http.HandlerFunc(echoHeaders))
	res, body := w.get("/a%2Fb/c?x=1&y=%20", "X-Cove-Token: "+w.token())
	if res.StatusCode != 200 || !strings.HasPrefix(body, "GET /a%2Fb/c?x=1&y=%20 host="+w.host()+"\n") {
		t.Fatalf("%d\n%s", res.StatusCode, body)
	}
	for _, want := range []string{"X-Forwarded-For: 127.0.0.1\r\n", "X-Forwarded-Proto: http\r\n", "X-Forwarded-Host: " + w.host() + "\r\n"} {
		if !strings.Contains(body, want) {
			t.Errorf("no %q in\n%s", want, body)
		}
	}
	prefix := "/p/" + box + "/" + strconv.Itoa(w.port)
	res, body = w.get("http://api.test"+prefix+"/a%2Fb/c?x=1", "X-Cove-Token: "+w.token())
	if res.StatusCode != 200 || !strings.HasPrefix(body, "GET /a%2Fb/c?x=1 host=api.test\n") || !strings.Contains(body, "X-Forwarded-Prefix: "+prefix+"\r\n") {
		t.Fatalf("%d\n%s", res.StatusCode, body)
	}
	// Slashes and dots are the server's inside: to some they mean something.
	res, body = w.get("http://api.test"+prefix+"//a//../b", "X-Cove-Token: "+w.token())
	if res.StatusCode != 200 || !strings.HasPrefix(body, "GET //a//../b host=") {
		t.Fatalf("%d\n%s", res.StatusCode, body)
	}
	if res, _ := w.get("http://api.test/healthz"); res.StatusCode != http.StatusTeapot {
		t.Fatalf("the API's own path: %d", res.StatusCode)
	}
	res, _ = w.get("http://api.test"+prefix+"?q=1", "X-Cove-Token: "+w.token())
	if res.StatusCode != http.StatusTemporaryRedirect || res.Header.Get("Location") != prefix+"/?q=1" {
		t.Fatalf("without its slash: %d %s", res.StatusCode, res.Header.Get("Location"))
	}
	for _, m := range []string{"HEAD", "OPTIONS", "DELETE"} {
		if res, _ := w.do(m, "/", "X-Cove-Token: "+w.token()); res.StatusCode != 200 {
			t.Errorf("%s: %d", m, res.StatusCode)
		}
	}
}

func TestWhatAClientSaysAboutItselfStaysOutside(t *testing.T) {
	w := newWorld(t, http.HandlerFunc(echoHeaders))
	tok := w.token()
	_, body := w.get("/?a=1&cove_token="+tok+"&b=2", "X-Cove-Token: "+tok, "Authorization: Bearer "+apiKey,
		"Cookie: mine=1; cove_token="+tok+"; also=2", "X-Forwarded-For: 6.6.6.6", "X-Forwarded-Port: 1", "X-Real-IP: 6.6.6.6", "Forwarded: for=6.6.6.6",
		"Connection: X-Secret, keep-alive", "X-Secret: hop", "Proxy-Authorization: Basic eA==")
	for _, leak := range []string{tok, apiKey, "6.6.6.6", "X-Forwarded-Port", "hop", "Proxy-Auth", "X-Cove"} {
		if strings.Contains(body, leak) {
			t.Errorf("%q went in:\n%s", leak, body)
		}
	}
	if !strings.HasPrefix(body, "GET /?a=1&b=2 ") || !strings.Contains(body, "Cookie: mine=1; also=2\r\n") {
		t.Errorf("what is the application's is gone:\n%s", body)
	}
	_, body = w.get("/", "X-Cove-Token: "+tok, "Authorization: Bearer the-app's-own")
	if !strings.Contains(body, "Authorization: Bearer the-app's-own\r\n") {
		t.Errorf("the application's Authorization is gone:\n%s", body)
	}
}

func TestServerSentEventsComeAtOnce(t *testing.T) {
	next := make(chan struct{})
	w := newWorld(t, http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		w.Header().Set("Content-Type", "text/event-stream")
		for i := range 3 {
			fmt.Fprintf(w, "data: %d\n\n", i)
			w.(http.Flusher).Flush()
			select {
			case <-next:
			case <-r.Context().Done():
				return
			}
		}
	}))
	for _, h2 := range []bool{false, true} {
		req, _ := http.NewRequestWithContext(t.Context(), "GET", "http://"+w.host()+"/", nil)
		req.Header.Set("X-Cove-Token", w.token())
		res, err := w.client(h2).Do(req)
		if err != nil {
			t.Fatal(err)
		}
		lines := bufio.NewReader(res.Body)
		for i := range 3 { // each is read before the next is allowed: nothing may be held back
			line, err := lines.ReadString('\n')
			if err != nil || line != fmt.Sprintf("data: %d\n", i) {
				t.Fatalf("h2 %v: %q, %v", h2, line, err)
			}
			_, _ = lines.ReadString('\n')
			next <- struct{}{}
		}
		res.Body.Close()
	}
}

func TestTrailersBothWays(t *testing.T) {
	w := newWorld(t, http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		b, _ := io.ReadAll(r.Body)
		w.Header().Set("Trailer", "X-Sum")
		_, _ = w.Write(b)
		w.Header().Set("X-Sum", r.Trailer.Get("X-Up")+"!")
	}))
	for name, ct := range map[string]string{"http": "text/plain", "grpc": "application/grpc+proto"} {
		for _, h2 := range []bool{false, true} {
			req, _ := http.NewRequestWithContext(t.Context(), "POST", "http://"+w.host()+"/", io.MultiReader(strings.NewReader("body")))
			req.Header.Set("X-Cove-Token", w.token())
			req.Header.Set("Content-Type", ct)
			req.Trailer = http.Header{"X-Up": {"up"}}
			res, err := w.client(h2).Do(req)
			if err != nil {
				t.Fatal(err)
			}
			b, err := io.ReadAll(res.Body)
			res.Body.Close()
			if err != nil || string(b) != "body" || res.Trailer.Get("X-Sum") != "up!" {
				t.Errorf("%s h2 %v: %q %v %v", name, h2, b, res.Trailer, err)
			}
		}
	}
}

func TestLargeBodiesBothWays(t *testing.T) {
	size := 100 << 20
	if testing.Short() {
		size = 8 << 20
	}
	body := make([]byte, size)
	_, _ = rand.NewChaCha8([32]byte{7}).Read(body)
	w := newWorld(t, http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		h := sha256.New()
		n, err := io.Copy(h, r.Body)
		if err != nil || n != int64(size) {
			http.Error(w, fmt.Sprint(n, err), 500)
			return
		}
		w.Header().Set("X-Sum", fmt.Sprintf("%x", h.Sum(nil)))
		_, _ = w.Write(body)
	}))
	for _, h2 := range []bool{false, true} {
		for _, length := range []int64{int64(size), -1} {
			req, _ := http.NewRequestWithContext(t.Context(), "PUT", "http://"+w.host()+"/", io.MultiReader(bytes.NewReader(body)))
			req.ContentLength = length
			req.Header.Set("X-Cove-Token", w.token())
			res, err := w.client(h2).Do(req)
			if err != nil {
				t.Fatal(err)
			}
			h := sha256.New()
			n, err := io.Copy(h, res.Body)
			res.Body.Close()
			want := fmt.Sprintf("%x", sum(body))
			if err != nil || n != int64(size) || fmt.Sprintf("%x", h.Sum(nil)) != want || res.Header.Get("X-Sum") != want {
				t.Fatalf("h2 %v, length %d: %d bytes, %v, status %d", h2, length, n, err, res.StatusCode)
			}
		}
	}
}

// dialWS opens a WebSocket to the echo below.
func (w *world) dialWS(ctx context.Context, c *http.Client, url string) (*websocket.Conn, error) {
	ws, _, err := websocket.Dial(ctx, url, &websocket.DialOptions{HTTPClient: c, HTTPHeader: http.Header{"X-Cove-Token": {w.token()}}})
	return ws, err
}

func wsEcho(w http.ResponseWriter, r *http.Request) {
	c, err := websocket.Accept(w, r, &websocket.AcceptOptions{InsecureSkipVerify: true})
	if err != nil {
		return
	}
	defer c.CloseNow()
	c.SetReadLimit(8 << 20)
	for {
		typ, b, err := c.Read(r.Context())
		if err != nil {
			return
		}
		if c.Write(r.Context(), typ, b) != nil {
			return
		}
	}
}

func TestWebSocketsIdleAndBusy(t *testing.T) {
	n := 200
	if s := os.Getenv("COVE_TEST_WEBSOCKETS"); s != "" {
		n, _ = strconv.Atoi(s)
	}
	w := newWorld(t, http.HandlerFunc(wsEcho))
	c := w.client(false)
	conns := make([]*websocket.Conn, n)
	for i := range conns {
		url := "ws://" + w.host() + "/"
		if i%2 == 1 {
			url = fmt.Sprintf("ws://api.test/p/%s/%d/", box, w.port)
		}
		ws, err := w.dialWS(t.Context(), c, url)
		if err != nil {
			t.Fatalf("WebSocket %d: %v", i, err)
		}
		ws.SetReadLimit(8 << 20)
		conns[i] = ws
	}
	big := bytes.Repeat([]byte("x"), 4<<20)
	for i, ws := range conns {
		msg := []byte(strconv.Itoa(i))
		if i == 0 {
			msg = big
		}
		if err := ws.Write(t.Context(), websocket.MessageBinary, msg); err != nil {
			t.Fatal(err)
		}
		_, got, err := ws.Read(t.Context())
		if err != nil || !bytes.Equal(got, msg) {
			t.Fatalf("WebSocket %d: %d bytes, %v", i, len(got), err)
		}
	}
	w.mu.Lock()
	held := w.held
	w.mu.Unlock()
	if held != n {
		t.Errorf("%d of %d open WebSockets keep the sandbox awake", held, n)
	}
	for _, ws := range conns {
		ws.CloseNow()
	}
}

// Clients that do not read must not keep others from being answered.
func TestSlowClientsDoNotSlowOthers(t *testing.T) {
	big := make([]byte, 16<<20)
	w := newWorld(t, http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if r.URL.Path == "/big" {
			_, _ = w.Write(big)
			return
		}
		_, _ = io.Copy(io.Discard, r.Body)
		_, _ = io.WriteString(w, "quick")
	}))
	for i := range 150 { // more than there are kept connections
		c, err := net.Dial("tcp", w.addr)
		if err != nil {
			t.Fatal(err)
		}
		defer c.Close()
		req := "GET /big HTTP/1.1\r\nHost: " + w.host() + "\r\nX-Cove-Token: " + w.token() + "\r\n\r\n"
		if i%2 == 1 { // and uploads that never go on
			req = "PUT / HTTP/1.1\r\nHost: " + w.host() + "\r\nX-Cove-Token: " + w.token() + "\r\nContent-Length: 1000\r\n\r\nx"
		}
		if _, err := io.WriteString(c, req); err != nil {
			t.Fatal(err)
		}
	}
	var wg sync.WaitGroup
	for range 8 {
		wg.Go(func() {
			for range 25 {
				if res, body := w.get("/", "X-Cove-Token: "+w.token()); res.StatusCode != 200 || body != "quick" {
					t.Errorf("%d %q", res.StatusCode, body)
				}
			}
		})
	}
	done := make(chan struct{})
	go func() { wg.Wait(); close(done) }()
	select {
	case <-done:
	case <-time.After(time.Minute):
		t.Fatal("fast clients wait for slow ones")
	}
}

// Requests share streams, and a request that was answered leaves none behind.
func TestStreamsAreReused(t *testing.T) {
	w := newWorld(t, http.HandlerFunc(echoHeaders))
	for range 20 {
		w.get("/", "X-Cove-Token: "+w.token())
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.dials > 3 || w.held != 0 {
		t.Fatalf("%d dials for 20 requests, %d still held", w.dials, w.held)
	}
}
