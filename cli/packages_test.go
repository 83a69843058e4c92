package cli

import (
	"io"
	"net/http"
	"net/http/httptest"
	"net/url"
	"strings"
	"testing"
)

// The proxy leads to the index and its files, rewrites their addresses, and leads
// nowhere else.
func TestPackageProxy(t *testing.T) {
	var asked []string
	index := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		asked = append(asked, r.Method+" "+r.URL.Path+" "+r.Header.Get("Accept-Encoding"))
		if strings.HasPrefix(r.URL.Path, "/root/simple/") {
			io.WriteString(w, `{"url":"https://files.pythonhosted.org/packages/a.whl","other":"http://`+r.Host+`/dl/b.whl","far":"https://example.com/c"}`)
			return
		}
		io.WriteString(w, "https://files.pythonhosted.org/ stays in what is no page")
	}))
	defer index.Close()
	u, _ := url.Parse(index.URL + "/root/simple/")
	p := newPackageProxy(u)
	get := func(method, path string) (int, string) {
		req, _ := http.NewRequest(method, index.URL+path, nil)
		req.Header.Set("Accept-Encoding", "gzip")
		resp, err := p.RoundTrip(req)
		if err != nil {
			t.Fatal(err)
		}
		defer resp.Body.Close()
		b, _ := io.ReadAll(resp.Body)
		return resp.StatusCode, string(b)
	}
	here := "http://cove.internal/" + packageName
	if code, body := get("GET", "/root/simple/numpy/"); code != 200 || body != `{"url":"`+here+`/-files/packages/a.whl","other":"`+here+`/dl/b.whl","far":"https://example.com/c"}` {
		t.Error(code, body)
	}
	if code, body := get("GET", "/dl/b.whl"); code != 200 || !strings.HasPrefix(body, "https://files") || p.bytes.Load() != int64(len(body)) {
		t.Error(code, body, p.bytes.Load())
	}
	if code, _ := get("POST", "/root/simple/numpy/"); code != http.StatusMethodNotAllowed {
		t.Error("POST:", code)
	}
	if strings.Join(asked, "|") != "GET /root/simple/numpy/ identity|GET /dl/b.whl identity" {
		t.Error(asked)
	}
}
