package gateway_test

import (
	"context"
	"crypto/hmac"
	"crypto/sha256"
	"encoding/base64"
	"encoding/binary"
	"encoding/json"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/url"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/coder/websocket"

	"github.com/cove-sandbox/cove/gateway"
	"github.com/cove-sandbox/cove/internal/testport"
	"github.com/cove-sandbox/cove/sandbox"
)

func TestTokens(t *testing.T) {
	w := newWorld(t, http.HandlerFunc(echoHeaders))
	other := gateway.NewTokens([]byte(strings.Repeat("x", 32)), nil)
	hour := time.Now().Add(time.Hour)
	good := w.token()
	last := "A"
	if strings.HasSuffix(good[:len(good)-1], "A") {
		last = "B"
	}
	flip := good[:len(good)-2] + last + good[len(good)-1:]
	for _, c := range []struct {
		name, header string
		status       int
		says         string
	}{
		{"none", "", 401, "private"},
		{"token", "X-Cove-Token: " + good, 200, ""},
		{"as bearer", "Authorization: Bearer " + good, 200, ""},
		{"in a cookie", "Cookie: a=b; cove_token=" + good, 200, ""},
		{"second of two cookies", "Cookie: cove_token=evil; cove_token=" + good, 200, ""},
		{"API key", "Authorization: Bearer " + apiKey, 200, ""},
		{"API key as token", "X-Cove-Token: " + apiKey, 200, ""},
		{"wrong API key", "Authorization: Bearer " + apiKey[:len(apiKey)-1] + "9", 401, "not for this port"},
		{"API key in a cookie", "Cookie: cove_token=" + apiKey, 401, "not for this port"},
		{"of another port", "X-Cove-Token: " + w.mint(box, w.port+1, hour), 401, "not for this port"},
		{"of another sandbox", "X-Cove-Token: " + w.mint(ghost, w.port, hour), 401, "not for this port"},
		{"of another key", "X-Cove-Token: " + other.Mint(gateway.Target{Sandbox: box, Port: w.port}, keyID, hour), 401, "not for this port"},
		{"expired", "X-Cove-Token: " + w.mint(box, w.port, time.Now().Add(-time.Second)), 401, "expired"},
		{"changed", "X-Cove-Token: " + flip, 401, "not for this port"},
		{"cut", "X-Cove-Token: " + good[:20], 401, "not for this port"},
		{"empty", "X-Cove-Token: covep_", 401, "not for this port"},
	} {
		var header []string
		if c.header != "" {
			header = append(header, c.header)
		}
		res, body := w.get("/", header...)
		if res.StatusCode != c.status || !strings.Contains(body, c.says) {
			t.Errorf("%s: %d %q", c.name, res.StatusCode, body)
		}
		if c.status == 401 && (res.Header.Get("WWW-Authenticate") == "" || res.Header.Get("X-Cove-Error") != "unauthenticated") {
			t.Errorf("%s: %v", c.name, res.Header)
		}
	}
	w.mu.Lock()
	w.public[w.port] = true
	w.mu.Unlock()
	if res, _ := w.get("/"); res.StatusCode != 200 {
		t.Errorf("public: %d", res.StatusCode)
	}
}

// A token ends with the API key it was made with, wherever it stands.
func TestTokenEndsWithItsKey(t *testing.T) {
	w := newWorld(t, http.HandlerFunc(echoHeaders))
	good := w.token()
	ways := []string{"X-Cove-Token: " + good, "Authorization: Bearer " + good, "Cookie: cove_token=" + good}
	look := func(status int, says string) {
		t.Helper()
		for _, header := range ways {
			if res, body := w.get("/", header); res.StatusCode != status || !strings.Contains(body, says) {
				t.Errorf("%.20s: %d %q, want %d", header, res.StatusCode, body, status)
			}
		}
		if res, body := w.get("/?cove_token=" + good); res.StatusCode != status || !strings.Contains(body, says) || len(res.Cookies()) > 0 && status != 200 {
			t.Errorf("query: %d %q, want %d", res.StatusCode, body, status)
		}
	}
	lives := func(err error) {
		w.mu.Lock()
		defer w.mu.Unlock()
		w.gone = map[string]error{keyID: err}
	}
	look(200, "")
	lives(&sandbox.Error{Class: sandbox.Unauthenticated, Msg: "revoked"})
	look(401, "revoked or has expired")
	if res, _ := w.get("/", ways[0], "Authorization: Bearer "+apiKey); res.StatusCode != 200 {
		t.Errorf("with a good key beside it: %d", res.StatusCode)
	}
	lives(&sandbox.Error{Class: sandbox.Unavailable, Msg: "the disk is on fire"})
	look(502, "on fire") // not said to be the token's fault
	lives(nil)
	look(200, "")

	// One that names no key could not end with it.
	p := append([]byte{1}, binary.BigEndian.AppendUint64(nil, uint64(time.Now().Add(time.Hour).Unix()))...)
	p = append(binary.BigEndian.AppendUint16(p, uint16(w.port)), box...)
	mac := hmac.New(sha256.New, []byte(strings.Repeat("k", 32)))
	mac.Write(append([]byte("cove gateway token "), p...))
	if res, _ := w.get("/", "X-Cove-Token: covep_"+base64.RawURLEncoding.EncodeToString(mac.Sum(p))); res.StatusCode != 401 {
		t.Errorf("of the old form: %d", res.StatusCode)
	}
}

// What is under way ends with the API key that opened it, by a token or itself; what a
// public port opened has none.
func TestWebSocketEndsWithItsKey(t *testing.T) {
	w := newWorldOn(t, http.HandlerFunc(wsEcho), gateway.Config{KeyLook: time.Millisecond})
	w.public[w.port] = true
	open := func(header string) *websocket.Conn {
		t.Helper()
		name, value, _ := strings.Cut(header, ": ")
		ws, _, err := websocket.Dial(t.Context(), "ws://"+w.host()+"/", &websocket.DialOptions{HTTPClient: w.client(false), HTTPHeader: http.Header{name: {value}}})
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { _ = ws.CloseNow() })
		return ws
	}
	echoes := func(ws *websocket.Conn) error {
		if err := ws.Write(t.Context(), websocket.MessageText, []byte("x")); err != nil {
			return err
		}
		_, _, err := ws.Read(t.Context())
		return err
	}
	keyed := []*websocket.Conn{open("X-Cove-Token: " + w.token()), open("Authorization: Bearer " + apiKey), open("Admitted: yes")}
	public := open("X-Nothing: at all")
	for _, ws := range append(keyed, public) {
		if err := echoes(ws); err != nil {
			t.Fatal(err)
		}
	}
	w.mu.Lock()
	w.gone = map[string]error{keyID: &sandbox.Error{Class: sandbox.Unauthenticated, Msg: "revoked"}}
	w.mu.Unlock()
	for _, ws := range keyed {
		ctx, cancel := context.WithTimeout(t.Context(), 10*time.Second)
		if _, _, err := ws.Read(ctx); err == nil || ctx.Err() != nil {
			t.Errorf("it outlives its key: %v", err)
		}
		cancel()
	}
	if err := echoes(public); err != nil {
		t.Errorf("a public port's ended too: %v", err)
	}
}

// The address of the page before has the token that opened it.
func TestNoTokenInReferer(t *testing.T) {
	w := newWorld(t, http.HandlerFunc(echoHeaders))
	for sent, want := range map[string]string{
		"http://x.test/a?cove_token=T":             "http://x.test/a",
		"http://x.test/a?q=1&cove_token=T&r=%2f":   "http://x.test/a?q=1&r=%2f",
		"http://x.test/a?c%6fve_token=T&b":         "http://x.test/a?b",
		"http://x.test/a?cove_token=T#here":        "http://x.test/a#here",
		"http://x.test/a?":                         "http://x.test/a?",
		"http://x.test/cove_token=1?other=2&other": "http://x.test/cove_token=1?other=2&other",
	} {
		var got string
		_, body := w.get("/", "X-Cove-Token: "+w.token(), "Referer: "+strings.ReplaceAll(sent, "=T", "="+w.token()))
		for line := range strings.Lines(body) {
			if v, ok := strings.CutPrefix(strings.TrimSpace(line), "Referer: "); ok {
				got = v
			}
		}
		if got != want {
			t.Errorf("%s reaches the inside as %q", sent, got)
		}
	}
}

// Who has no credential learns nothing about what exists.
func TestPrivateAndMissingLookTheSame(t *testing.T) {
	w := newWorld(t, http.HandlerFunc(echoHeaders))
	_, a := w.get("/")
	_, b := w.get("http://" + strconv.Itoa(w.port) + "-" + ghost + ".cove.test/")
	w.mu.Lock()
	w.ended = true
	w.mu.Unlock()
	_, c := w.get("/")
	if a != b || b != c {
		t.Fatalf("%q\n%q\n%q", a, b, c)
	}
}

func TestTokenInTheQuery(t *testing.T) {
	w := newWorld(t, http.HandlerFunc(echoHeaders))
	const html = "Accept: text/html,*/*"
	res, _ := w.get("/a%20b/?x=1&cove_token="+w.token()+"&y=2", html)
	c := res.Cookies()
	if res.StatusCode != 302 || res.Header.Get("Location") != "/a%20b/?x=1&y=2" || len(c) != 1 {
		t.Fatalf("%d %v", res.StatusCode, res.Header)
	}
	if c := c[0]; !c.HttpOnly || c.SameSite != http.SameSiteLaxMode || c.Path != "/" || c.Domain != "" || time.Until(c.Expires) > time.Hour {
		t.Fatalf("%v", c)
	}
	if res, _ := w.get("/", html, "Cookie: "+c[0].Name+"="+c[0].Value); res.StatusCode != 200 {
		t.Fatalf("the cookie does not open it: %d", res.StatusCode)
	}
	prefix := fmt.Sprintf("/p/%s/%d/", box, w.port)
	res, _ = w.get("http://api.test"+prefix+"x?cove_token="+w.token(), html)
	if c := res.Cookies(); res.StatusCode != 302 || len(c) != 1 || c[0].Path != prefix || res.Header.Get("Location") != prefix+"x" {
		t.Fatalf("%d %v", res.StatusCode, res.Header)
	}
	// Nobody is sent to another host.
	for _, path := range []string{"//evil.test/", `/\evil.test/`, "/%2f/evil.test", "///evil.test"} {
		res := w.raw("GET " + path + "?cove_token=" + w.token() + " HTTP/1.1\r\nHost: " + w.host() + "\r\nAccept: text/html\r\nConnection: close\r\n\r\n")
		_, loc, _ := strings.Cut(res, "Location: ")
		loc, _, _ = strings.Cut(loc, "\r\n")
		if strings.HasPrefix(loc, "//") || strings.HasPrefix(loc, `/\`) || strings.Contains(loc, "://") {
			t.Errorf("%s leads to %q", path, loc)
		}
	}
	// A program gets its answer at once.
	if res, body := w.get("/?cove_token=" + w.token()); res.StatusCode != 200 || strings.Contains(body, "cove_token") {
		t.Fatalf("%d %s", res.StatusCode, body)
	}
}

func TestPages(t *testing.T) {
	broken, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer broken.Close()
	go func() {
		for {
			c, err := broken.Accept()
			if err != nil {
				return
			}
			_, _ = io.WriteString(c, "220 smtp\r\n")
			c.Close()
		}
	}()
	w := newWorld(t, http.HandlerFunc(echoHeaders))
	key := "Authorization: Bearer " + apiKey
	at := func(port int, id string) string { return fmt.Sprintf("http://%d-%s.cove.test/", port, id) }
	for _, c := range []struct {
		name   string
		before func()
		url    string
		header string
		status int
		code   string
		says   string
	}{
		{"no such sandbox", nil, at(80, ghost), "", 404, "not_found", "no sandbox"},
		{"port not open", nil, at(testport.Free(t, "127.0.0.1"), box), "", 502, "port_closed", "a server must listen on 127.0.0.1 or 0.0.0.0"},
		{"no HTTP", nil, at(broken.Addr().(*net.TCPAddr).Port, box), "", 502, "bad_gateway", "did not answer"},
		{"asleep", func() { w.asleep = true }, at(w.port, box), "X-Cove-Wake: no", 503, "asleep", "asleep"},
		{"woken", nil, at(w.port, box), "", 200, "", "GET /"},
		{"ended", func() { w.ended = true }, at(w.port, box), "", 410, "sandbox_ended", "oom"},
		{"no address", nil, "http://x-" + box + ".cove.test/", "", 404, "no_such_address", "names no port"},
		{"no address in path form", nil, "http://api.test/p/" + box + "/http/", "", 404, "no_such_address", "names no port"},
	} {
		if c.before != nil {
			w.mu.Lock()
			c.before()
			w.mu.Unlock()
		}
		for _, accept := range []string{"application/json", "text/html"} {
			headers := []string{key, "Accept: " + accept}
			if c.header != "" {
				headers = append(headers, c.header)
			}
			res, body := w.get(c.url, headers...)
			if res.StatusCode != c.status || res.Header.Get("X-Cove-Error") != c.code || !strings.Contains(body, c.says) {
				t.Errorf("%s as %s: %d %s\n%s", c.name, accept, res.StatusCode, res.Header.Get("X-Cove-Error"), body)
			}
			if c.status == 200 {
				continue
			}
			if ct := res.Header.Get("Content-Type"); !strings.HasPrefix(ct, accept) {
				t.Errorf("%s: %s instead of %s", c.name, ct, accept)
			}
			var p struct{ Code, Message string }
			if accept == "application/json" && (json.Unmarshal([]byte(body), &p) != nil || p.Code != c.code) {
				t.Errorf("%s: %s", c.name, body)
			}
		}
		if res, body := w.do("HEAD", c.url, key, "X-Cove-Wake: no"); res.StatusCode != c.status && c.name != "asleep" || body != "" {
			t.Errorf("HEAD %s: %d %q", c.name, res.StatusCode, body)
		}
	}
	if w.wakes != 1 {
		t.Errorf("woken %d times", w.wakes)
	}
}

func TestNoMoreThanOneSandboxMayHave(t *testing.T) {
	release := make(chan struct{})
	w := newWorldOn(t, http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) { <-release }), gateway.Config{MaxRequests: 1})
	first := make(chan struct{})
	go func() { defer close(first); w.get("/", "X-Cove-Token: "+w.token()) }()
	for { // until the first one is inside
		w.mu.Lock()
		in := w.held
		w.mu.Unlock()
		if in == 1 {
			break
		}
		time.Sleep(time.Millisecond)
	}
	res, _ := w.get("/", "X-Cove-Token: "+w.token())
	if res.StatusCode != 503 || res.Header.Get("Retry-After") != "1" {
		t.Errorf("%d %v", res.StatusCode, res.Header)
	}
	close(release)
	<-first
}

// What a hostile server inside answers must not act beyond its own address.
func TestAnswersAreKeptToTheirAddress(t *testing.T) {
	w := newWorld(t, http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		h := w.Header()
		h.Add("Set-Cookie", "a=1; Domain=cove.test; Path=/; HttpOnly")
		h.Add("Set-Cookie", "cove_token=stolen; Path=/")
		h.Add("Set-Cookie", "b=2")
		h.Set("Alt-Svc", `h2="evil.test:443"`)
		h.Set("Clear-Site-Data", `"*"`)
		h.Set("Service-Worker-Allowed", "/")
		h.Set("Strict-Transport-Security", "max-age=1")
		h.Set("X-Cove-Error", "not_found")
		h.Set("Location", r.URL.Query().Get("to"))
		w.WriteHeader(302)
	}))
	tok := "X-Cove-Token: " + w.token()
	res, _ := w.get("/?to=/login", tok)
	if got := fmt.Sprint(res.Header["Set-Cookie"]); got != "[a=1; Path=/; HttpOnly b=2]" {
		t.Errorf("cookies in the host form: %s", got)
	}
	if res.Header.Get("X-Cove-Error") != "" || res.Header.Get("Location") != "/login" || res.Header.Get("Clear-Site-Data") == "" {
		t.Errorf("host form: %v", res.Header)
	}
	prefix := fmt.Sprintf("/p/%s/%d", box, w.port)
	for to, want := range map[string]string{
		"/login":                       prefix + "/login",
		"login":                        "login",
		"http://api.test/x%2Fy":        "http://api.test" + prefix + "/x%2Fy",
		"https://elsewhere.test/":      "https://elsewhere.test/",
		prefix + "/there":              prefix + "/there",
		"/p/" + box + "/1/../../other": prefix + "/p/" + box + "/1/../../other",
	} {
		res, _ := w.get("http://api.test"+prefix+"/?to="+url.QueryEscape(to), tok)
		if got := res.Header.Get("Location"); got != want {
			t.Errorf("%s leads to %s, want %s", to, got, want)
		}
		if got, want := fmt.Sprint(res.Header["Set-Cookie"]), fmt.Sprintf("[a=1; HttpOnly; Path=%s/ b=2; Path=%s/]", prefix, prefix); got != want {
			t.Errorf("cookies in the path form: %s, want %s", got, want)
		}
		for _, h := range []string{"Alt-Svc", "Clear-Site-Data", "Service-Worker-Allowed", "Strict-Transport-Security", "X-Cove-Error"} {
			if res.Header.Get(h) != "" {
				t.Errorf("%s passed", h)
			}
		}
	}
}
