package gateway_test

import (
	"fmt"
	"net/http"
	"strings"
	"testing"
)

// A visitor holds the cookie of a port. What other pages have their browser send
// there does not go in by it: not from a neighbour's host, which is the same
// site, nor from a neighbour's path, which is the same origin.
func TestCookieIsForOwnPages(t *testing.T) {
	w := newWorld(t, http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) { fmt.Fprint(w, "inside") }))
	path := fmt.Sprintf("http://api.test/p/%s/%d/", box, w.port)
	cookie := "Cookie: cove_token=" + w.token()
	own, neighbour := "Origin: http://"+w.host(), "Origin: http://8080-0123456789abcdef.cove.test"
	fetch := func(site, mode, dest string) []string {
		return []string{"Sec-Fetch-Site: " + site, "Sec-Fetch-Mode: " + mode, "Sec-Fetch-Dest: " + dest}
	}
	socket := []string{"Connection: Upgrade", "Upgrade: websocket"}
	for _, c := range []struct {
		what       string
		method     string
		header     []string
		host, path int
	}{
		{"a program", "POST", nil, 200, 200},
		{"a program's WebSocket", "GET", socket, 200, 200},
		{"typed", "GET", fetch("none", "navigate", "document"), 200, 200},
		{"a link from elsewhere", "GET", fetch("cross-site", "navigate", "document"), 200, 200},
		{"a link from a neighbour", "GET", fetch("same-site", "navigate", "document"), 200, 200},
		{"its own script", "POST", append(fetch("same-origin", "cors", "empty"), own), 200, 403},
		{"its own picture", "GET", fetch("same-origin", "no-cors", "image"), 200, 403},
		{"its own WebSocket", "GET", append(fetch("same-origin", "websocket", "websocket"), socket...), 200, 403},
		{"a neighbour's form", "POST", append(fetch("same-site", "navigate", "document"), neighbour), 403, 403},
		{"a neighbour's fetch", "GET", append(fetch("same-site", "cors", "empty"), neighbour), 403, 403},
		{"a neighbour's script tag", "GET", fetch("same-site", "no-cors", "script"), 403, 403},
		{"a neighbour's frame", "GET", fetch("same-site", "navigate", "iframe"), 403, 403},
		{"a neighbour's WebSocket", "GET", append(append(fetch("same-site", "websocket", "websocket"), neighbour), socket...), 403, 403},
		{"a stranger's form", "POST", append(fetch("cross-site", "navigate", "document"), "Origin: https://evil.test"), 403, 403},
		{"without Sec-Fetch: its own form", "POST", []string{own}, 200, 403},
		{"without Sec-Fetch: a neighbour's form", "POST", []string{neighbour}, 403, 403},
		{"without Sec-Fetch: a neighbour's WebSocket", "GET", append([]string{neighbour}, socket...), 403, 403},
		{"without Sec-Fetch: a page with no origin", "POST", []string{"Origin: null"}, 403, 403},
		{"two origins", "POST", []string{own, neighbour}, 403, 403},
	} {
		for url, want := range map[string]int{"/": c.host, path: c.path} {
			res, body := w.do(c.method, url, append([]string{cookie}, c.header...)...)
			if res.StatusCode != want || (body == "inside") != (want == 200) {
				t.Errorf("%s, %s %s: %d %q, want %d", c.what, c.method, url, res.StatusCode, body, want)
			}
			// A token in a header is no browser's doing.
			if res, _ := w.do(c.method, url, append([]string{cookie, "X-Cove-Token: " + w.token()}, c.header...)...); res.StatusCode != 200 {
				t.Errorf("%s, with a token of its own: %d", c.what, res.StatusCode)
			}
		}
	}
}

// Pages of the path form share an origin with all others, so they get none.
func TestPathPagesHaveNoOrigin(t *testing.T) {
	w := newWorld(t, http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		w.Header().Set("Content-Security-Policy", "default-src 'self'")
	}))
	w.public[w.port] = true
	res, _ := w.get(fmt.Sprintf("http://api.test/p/%s/%d/", box, w.port))
	if got := res.Header.Values("Content-Security-Policy"); len(got) != 2 || !strings.HasPrefix(got[1], "sandbox ") || strings.Contains(got[1], "same-origin") {
		t.Errorf("path form: %q", got)
	}
	if res, _ = w.get("/"); len(res.Header.Values("Content-Security-Policy")) != 1 {
		t.Errorf("host form: %q", res.Header.Values("Content-Security-Policy"))
	}
}

// Under TLS the cookie has a name that no other host can set, and no other name
// opens anything. None of the names reaches the inside or comes out of it.
func TestCookiesAreNotTossed(t *testing.T) {
	w := newWorldOn(t, http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		for _, c := range []string{"__Host-cove_token=x; Path=/; Secure", "__HOST-cove_token=x", "__Secure-cove_token=x", "=cove_token=x", "cove_token=x", "own=1"} {
			w.Header().Add("Set-Cookie", c)
		}
		fmt.Fprint(w, r.Header["Cookie"])
	}), withDomain("https://cove.test"))
	res, _ := w.get("/?cove_token="+w.token(), "Accept: text/html")
	if c := res.Cookies(); len(c) != 1 || c[0].Name != "__Host-cove_token" || !c[0].Secure || c[0].Path != "/" || c[0].Domain != "" {
		t.Fatalf("%v", res.Header)
	}
	res, body := w.get("/", "Cookie: a=b; cove_token=tossed; __Host-cove_token="+w.token())
	if res.StatusCode != 200 || body != "[a=b]" {
		t.Errorf("%d %q", res.StatusCode, body)
	}
	if got := fmt.Sprint(res.Header["Set-Cookie"]); got != "[own=1]" {
		t.Errorf("cookies that came out: %s", got)
	}
	if res, _ := w.get("/", "Cookie: cove_token="+w.token()); res.StatusCode != 401 {
		t.Errorf("a cookie that any host may have set opens the port: %d", res.StatusCode)
	}
}

// What comes before an answer is cleaned like it.
func TestInformationIsCleaned(t *testing.T) {
	w := newWorld(t, http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		h := w.Header()
		h.Set("Link", "</style.css>; rel=preload")
		h.Set("X-Cove-Error", "forged")
		h.Add("Set-Cookie", "cove_token=stolen")
		h.Add("Set-Cookie", "a=1; Domain=cove.test")
		h.Set("Clear-Site-Data", `"*"`)
		w.WriteHeader(http.StatusEarlyHints)
		clear(h)
		fmt.Fprint(w, "inside")
	}))
	out := w.raw(fmt.Sprintf("GET /p/%s/%d/?cove_token=%s HTTP/1.1\r\nHost: api.test\r\nConnection: close\r\n\r\n", box, w.port, w.token()))
	early, answer, _ := strings.Cut(out, "\r\n\r\n")
	if !strings.HasPrefix(early, "HTTP/1.1 103 ") || !strings.Contains(early, "Link: ") {
		t.Fatalf("%q", out)
	}
	for _, bad := range []string{"X-Cove", "Cookie", "Clear-Site-Data"} {
		if strings.Contains(early, bad) {
			t.Errorf("%s in %q", bad, early)
		}
	}
	if !strings.Contains(answer, "Set-Cookie: cove_token=") || !strings.HasSuffix(answer, "inside") {
		t.Errorf("the answer: %q", answer)
	}
}
