package gateway_test

import (
	"fmt"
	"io"
	"net/http"
	"strings"
	"sync"
	"testing"

	"github.com/cove-sandbox/cove/gateway"
)

// Requests that two parsers could read differently are refused, or go in as the
// one request that the gateway has read.
func TestNoRequestIsSmuggled(t *testing.T) {
	var mu sync.Mutex
	var seen []string
	w := newWorld(t, http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		b, _ := io.ReadAll(r.Body)
		mu.Lock()
		seen = append(seen, fmt.Sprintf("%s %s %q", r.Method, r.URL.Path, b))
		mu.Unlock()
	}))
	head := "Host: " + w.host() + "\r\nX-Cove-Token: " + w.token() + "\r\nConnection: close\r\n"
	n := 0
	for name, c := range map[string]struct {
		raw  string
		most int // requests that may reach the server, none of them for /evil
	}{
		"two lengths":           {"POST / HTTP/1.1\r\n" + head + "Content-Length: 0\r\nContent-Length: 40\r\n\r\nGET /evil HTTP/1.1\r\nHost: x\r\n\r\n", 0},
		"length and chunked":    {"POST / HTTP/1.1\r\n" + head + "Content-Length: 4\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\nGET /evil HTTP/1.1\r\nHost: x\r\n\r\n", 1},
		"strange encoding":      {"POST / HTTP/1.1\r\n" + head + "Transfer-Encoding: xchunked\r\n\r\n0\r\n\r\n", 0},
		"two encodings":         {"POST / HTTP/1.1\r\n" + head + "Transfer-Encoding: chunked\r\nTransfer-Encoding: identity\r\n\r\n0\r\n\r\n", 0},
		"space before colon":    {"POST / HTTP/1.1\r\n" + head + "Content-Length : 40\r\n\r\nGET /evil HTTP/1.1\r\n\r\n", 0},
		"folded header":         {"GET / HTTP/1.1\r\n" + head + "X-A: b\r\n\tGET /evil HTTP/1.1\r\n\r\n", 1},
		"bare CR in a header":   {"GET / HTTP/1.1\r\n" + head + "X-A: b\rGET /evil HTTP/1.1\r\n\r\n", 0},
		"NUL in a header":       {"GET / HTTP/1.1\r\n" + head + "X-A: b\x00c\r\n\r\n", 0},
		"negative length":       {"POST / HTTP/1.1\r\n" + head + "Content-Length: -1\r\n\r\n", 0},
		"chunk size too large":  {"POST / HTTP/1.1\r\n" + head + "Transfer-Encoding: chunked\r\n\r\nfffffffffffffffff\r\n", 1},
		"CRLF in the path":      {"GET /%0d%0aX-Evil:%201 HTTP/1.1\r\n" + head + "\r\n", 1},
		"two hosts":             {"GET / HTTP/1.1\r\n" + head + "Host: other.test\r\n\r\n", 0},
		"absolute form":         {"GET http://" + w.host() + "/evil HTTP/1.1\r\n" + head + "\r\n", 0},
		"absolute, other host":  {"GET http://" + w.host() + "/evil HTTP/1.1\r\n" + strings.Replace(head, w.host(), "api.test", 1) + "\r\n", 0},
		"connect":               {"CONNECT " + w.host() + ":80 HTTP/1.1\r\n" + head + "\r\n", 0},
		"upgrade that is no h2": {"GET / HTTP/1.1\r\n" + head + "Upgrade: h2c\r\nHTTP2-Settings: AAMAAABkAAQAAP__\r\n\r\n", 1},
	} {
		n++ // a path of its own: a handler may end after its answer
		path := fmt.Sprintf(" /case%d ", n)
		answer := w.raw(strings.Replace(c.raw, " / ", path, 1))
		mu.Lock()
		count := 0
		for _, s := range seen {
			if strings.Contains(s, path) {
				count++
			}
		}
		if count > c.most || strings.Contains(strings.Join(seen, "\n"), " /evil") {
			t.Errorf("%s: inside saw %v; answer %.60q", name, seen, answer)
		}
		if c.most == 0 && !strings.HasPrefix(answer, "HTTP/1.1 4") && !strings.HasPrefix(answer, "HTTP/1.1 5") {
			t.Errorf("%s: %.80q", name, answer)
		}
		mu.Unlock()
	}
}

func TestHostsThatAreNoAddress(t *testing.T) {
	w := newWorld(t, http.HandlerFunc(echoHeaders))
	for host, want := range map[string]int{
		w.host():                       200,
		strings.ToUpper(w.host()):      200,
		w.host() + ":7777":             200,
		w.host() + ".":                 404, // another origin to a browser
		w.host() + ":http":             404,
		"0" + w.host():                 404, // a second spelling
		"+" + w.host():                 400,
		"x." + w.host():                404,
		"cove.test":                    http.StatusTeapot, // the API's own
		"80.cove.test":                 404,
		"80-.cove.test":                404,
		"80-../etc.cove.test":          400,
		"99999-" + box + ".cove.test":  404,
		"evil.test":                    http.StatusTeapot,
		w.host() + ".evil.test":        http.StatusTeapot,
		w.host() + "@evil.test":        400,
		"80-" + box + "\xff.cove.test": 400,
		"evilcove.test":                http.StatusTeapot,
		"80-" + box + "%2e.cove.test":  404,
		"[::1]:80":                     http.StatusTeapot,
	} {
		got := w.raw("GET / HTTP/1.1\r\nHost: " + host + "\r\nX-Cove-Token: " + w.token() + "\r\nConnection: close\r\n\r\n")
		var status int
		_, _ = fmt.Sscanf(got, "HTTP/1.1 %d", &status)
		if status != want && !(want == 400 && status == 404) {
			t.Errorf("%q: %d, want %d", host, status, want)
		}
	}
}

func TestDomains(t *testing.T) {
	for in, want := range map[string]string{
		"cove.test":              "http://80-b.cove.test:7777/",
		"Cove.Test":              "http://80-b.cove.test:7777/",
		"https://cove.test":      "https://80-b.cove.test/",
		"https://cove.test:8443": "https://80-b.cove.test:8443/",
		"https://cove.test:443/": "https://80-b.cove.test/",
		"":                       "!", "a..b": "!", "-a.b": "!", "10.0.0.1": "!", "http://u@a.b": "!", "ftp://a.b": "!", "a.b/c": "!", "a_b.c": "!", "http://a.b/x": "!",
	} {
		d, err := gateway.ParseDomain(in, "http", "7777")
		got := "!"
		if err == nil {
			got = d.URL(gateway.Target{Sandbox: "b", Port: 80})
		}
		if got != want {
			t.Errorf("%q: %s, want %s (%v)", in, got, want, err)
		}
	}
	if got := (gateway.Domain{}).URL(gateway.Target{Sandbox: "b", Port: 80}); got != "/p/b/80/" {
		t.Error(got)
	}
}
