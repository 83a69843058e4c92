package secret

import (
	"bufio"
	"bytes"
	"compress/gzip"
	"encoding/base64"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/url"
	"strings"
	"testing"

	"github.com/cove-sandbox/cove/sandbox"
)

// server answers requests as they arrive upstream.
type server func(r *http.Request) *http.Response

func (s server) RoundTrip(r *http.Request) (*http.Response, error) {
	res := s(r)
	if res == nil {
		return nil, fmt.Errorf("malformed HTTP response %q", "X "+testValue)
	}
	res.Request = r
	return res, nil
}

func answer(body string, header ...string) *http.Response {
	h := http.Header{}
	for i := 0; i < len(header); i += 2 {
		h.Add(header[i], header[i+1])
	}
	return &http.Response{StatusCode: 200, Status: "200 OK", Header: h, Body: io.NopCloser(strings.NewReader(body)), ContentLength: int64(len(body)), ProtoMajor: 1, ProtoMinor: 1}
}

func compiled(t *testing.T, change func(*sandbox.Secret)) *Set {
	t.Helper()
	s := good()
	change(&s)
	set, err := Compile([]sandbox.Secret{s})
	if err != nil {
		t.Fatal(err)
	}
	return set
}

func request(method, target, body string, header ...string) *http.Request {
	var b io.Reader
	if body != "" {
		b = strings.NewReader(body)
	}
	r, err := http.NewRequest(method, target, b)
	if err != nil {
		panic(err)
	}
	for i := 0; i < len(header); i += 2 {
		r.Header.Add(header[i], header[i+1])
	}
	return r
}

func TestWhereValuesGo(t *testing.T) {
	basic := func(s string) string { return "Basic " + base64.StdEncoding.EncodeToString([]byte(s)) }
	header := func(s *sandbox.Secret) { s.Header, s.Format = "Authorization", "Bearer {}" }
	none := func(*sandbox.Secret) {}
	all := func(s *sandbox.Secret) { s.URL, s.Body = true, true }
	const ph = testPlaceholder
	for _, c := range []struct {
		name   string
		change func(*sandbox.Secret)
		r      *http.Request
		want   string // "METHOD URI header: value body length"
	}{
		{"header", header, request("GET", "https://good.test/", ""), "/ Authorization: Bearer " + testValue},
		{"header over the client's", header, request("GET", "https://good.test:8443/", "", "Authorization", "Bearer "+ph), "/ Authorization: Bearer " + testValue},
		{"with a header, not in others", header, request("GET", "https://good.test/", "", "X", ph), "/ Authorization: Bearer " + testValue + " X: " + ph},
		{"header to another host", header, request("GET", "https://evil.test/", ""), "/"},
		{"header to a name below", header, request("GET", "https://x.good.test/", ""), "/"},
		{"header to a name that ends alike", header, request("GET", "https://notgood.test/", ""), "/"},
		{"header over plain HTTP", header, request("GET", "http://good.test/", ""), "/"},
		{"header over plain HTTP that is allowed", func(s *sandbox.Secret) { header(s); s.AllowHTTP = true }, request("GET", "http://good.test/", ""), "/ Authorization: Bearer " + testValue},
		{"wildcard", func(s *sandbox.Secret) { header(s); s.Hosts = []string{"*.good.test"} }, request("GET", "https://x.good.test/", ""), "/ Authorization: Bearer " + testValue},
		{"not a wildcard's own name", func(s *sandbox.Secret) { header(s); s.Hosts = []string{"*.good.test"} }, request("GET", "https://good.test/", ""), "/"},
		{"placeholder", none, request("GET", "https://good.test/", "", "X", "a "+ph+" b"), "/ X: a " + testValue + " b"},
		{"placeholder to another host", none, request("GET", "https://evil.test/", "", "X", ph), "/ X: " + ph},
		{"placeholder over plain HTTP", none, request("GET", "http://good.test/", "", "X", ph), "/ X: " + ph},
		{"basic", none, request("GET", "https://good.test/", "", "Authorization", basic("me:"+ph)), "/ Authorization: " + basic("me:"+testValue)},
		{"basic of something else", none, request("GET", "https://good.test/", "", "Authorization", "Basic !!!"), "/ Authorization: Basic !!!"},
		{"query and path not unless asked for", none, request("GET", "https://good.test/bot"+ph+"?k="+ph, ""), "/bot" + ph + "?k=" + ph},
		{"query and path", all, request("GET", "https://good.test/bot"+ph+"/a%2Fb?k="+ph+"&x=;", ""),
			"/bot" + url.PathEscape(testValue) + "/a%2Fb?k=" + url.QueryEscape(testValue) + "&x=;"},
		{"body not unless asked for", none, request("POST", "https://good.test/", "k="+ph), fmt.Sprintf("/ body k=%s %d", ph, len(ph)+2)},
		{"body", all, request("POST", "https://good.test/", "k="+ph), fmt.Sprintf("/ body k=%s %d", testValue, len(testValue)+2)},
		{"body without it", all, request("POST", "https://good.test/", "nothing"), "/ body nothing 7"},
		{"long body", all, request("POST", "https://good.test/", strings.Repeat("x", buffered)+ph), fmt.Sprintf("/ body %s%s -1", strings.Repeat("x", buffered), testValue)},
		{"body that is packed", all, request("POST", "https://good.test/", ph, "Content-Encoding", "gzip"), fmt.Sprintf("/ Content-Encoding: gzip body %s %d", ph, len(ph))},
	} {
		t.Run(c.name, func(t *testing.T) {
			var got string
			before := fmt.Sprint(c.r.URL, c.r.Header)
			_, err := compiled(t, c.change).Wrap(server(func(r *http.Request) *http.Response {
				got = r.URL.RequestURI()
				for _, h := range []string{"Authorization", "Content-Encoding", "X"} {
					if v := r.Header.Get(h); v != "" {
						got += " " + h + ": " + v
					}
				}
				if r.Body != nil {
					b, err := io.ReadAll(r.Body)
					if err != nil {
						t.Error(err)
					}
					got += fmt.Sprintf(" body %s %d", b, r.ContentLength)
				}
				return answer("")
			})).RoundTrip(c.r)
			if err != nil {
				t.Fatal(err)
			}
			if got != c.want {
				t.Errorf("got  %.300q\nwant %.300q", got, c.want)
			}
			if after := fmt.Sprint(c.r.URL, c.r.Header); after != before {
				t.Errorf("the request of the caller became %s", after)
			}
		})
	}
}

func TestAnswersAreSearched(t *testing.T) {
	set := compiled(t, func(s *sandbox.Secret) { s.Header = "X-Key" })
	packed := func(s string) string {
		var b bytes.Buffer
		z := gzip.NewWriter(&b)
		io.WriteString(z, s)
		z.Close()
		return b.String()
	}
	long := strings.Repeat("x", buffered)
	encoded := base64.StdEncoding.EncodeToString([]byte(testValue))
	for _, c := range []struct {
		name   string
		answer *http.Response
		want   string // of the body
		length int64
	}{
		{"body", answer("it is " + testValue + "."), "it is " + testPlaceholder + ".", int64(len(testPlaceholder)) + 7},
		{"long body", answer(long + testValue), long + testPlaceholder, -1},
		{"no length", func() *http.Response { r := answer("a " + testValue); r.ContentLength = -1; return r }(), "a " + testPlaceholder, -1},
		{"JSON", answer(`{"k":"sk-live-0123/456+789\"abc"}`), `{"k":"` + testPlaceholder + `"}`, -2},
		{"query", answer("k=" + url.QueryEscape(testValue)), "k=" + testPlaceholder, -2},
		{"base64", answer(encoded), base64.StdEncoding.EncodeToString([]byte(testPlaceholder[:len(testValue)])), int64(len(encoded))},
		{"gzip", answer(packed("z "+testValue), "Content-Encoding", "gzip"), "z " + testPlaceholder, -1},
		{"empty gzip", answer("", "Content-Encoding", "gzip"), "", -1},
	} {
		res, err := set.Wrap(server(func(*http.Request) *http.Response { return c.answer })).RoundTrip(request("GET", "https://good.test/", ""))
		if err != nil {
			t.Errorf("%s: %v", c.name, err)
			continue
		}
		b, err := io.ReadAll(res.Body)
		if err != nil || !strings.HasPrefix(string(b), c.want) || c.length != -2 && res.ContentLength != c.length {
			t.Errorf("%s: %.200q, length %d, %v", c.name, b, res.ContentLength, err)
		}
		if strings.Contains(string(b), testValue) || strings.Contains(string(b), encoded) {
			t.Errorf("%s: the value is in the body", c.name)
		}
	}
	t.Run("headers, status and trailers", func(t *testing.T) {
		a := answer("", "Location", "https://evil.test/?"+url.QueryEscape(testValue), "X-"+testPlaceholder[:3], "a"+testValue)
		a.Status, a.ContentLength, a.Trailer = "200 "+testValue, -1, http.Header{"T": {testValue}}
		res, err := set.Wrap(server(func(*http.Request) *http.Response { return a })).RoundTrip(request("GET", "https://good.test/", ""))
		if err != nil {
			t.Fatal(err)
		}
		io.ReadAll(res.Body)
		if got := fmt.Sprint(res.Header, res.Status, res.Trailer); strings.Contains(got, "live-0123") || strings.Count(got, testPlaceholder) != 4 {
			t.Error(got)
		}
	})
	t.Run("credentials for Basic", func(t *testing.T) {
		set := compiled(t, func(*sandbox.Secret) {})
		sent := "Basic " + base64.StdEncoding.EncodeToString([]byte("someone:"+testPlaceholder))
		res, err := set.Wrap(server(func(r *http.Request) *http.Response { return answer("you sent " + r.Header.Get("Authorization")) })).
			RoundTrip(request("GET", "https://good.test/", "", "Authorization", sent))
		if err != nil {
			t.Fatal(err)
		}
		b, _ := io.ReadAll(res.Body)
		cred, _ := strings.CutPrefix(string(b), "you sent Basic ")
		if plain, err := base64.StdEncoding.DecodeString(cred); err != nil || !strings.HasPrefix(string(plain), "someone:") || strings.Contains(string(plain), testValue[1:10]) || !strings.Contains(string(plain), testPlaceholder[1:10]) {
			t.Errorf("%q %v", plain, err)
		}
	})
	t.Run("over plain HTTP, which values are not sent by", func(t *testing.T) {
		res, err := set.Wrap(server(func(r *http.Request) *http.Response {
			if r.Header.Get("X-Key") != "" {
				t.Error("sent in the clear")
			}
			return answer("kept since: "+testValue, "X-Kept", testValue)
		})).RoundTrip(request("GET", "http://good.test/load", ""))
		if err != nil {
			t.Fatal(err)
		}
		if b, _ := io.ReadAll(res.Body); string(b) != "kept since: "+testPlaceholder || res.Header.Get("X-Kept") != testPlaceholder {
			t.Errorf("%q %v", b, res.Header)
		}
	})
	t.Run("a secret of another host", func(t *testing.T) {
		other := good()
		other.Name, other.Hosts, other.Placeholder, other.Value = "other", []string{"other.test"}, "cove-secret-other-0123456789", sandbox.NewSecretValue("another-value")
		set, err := Compile([]sandbox.Secret{good(), other})
		if err != nil {
			t.Fatal(err)
		}
		res, err := set.Wrap(server(func(r *http.Request) *http.Response { return answer("another-value") })).RoundTrip(request("GET", "https://good.test/", ""))
		if err != nil {
			t.Fatal(err)
		}
		if b, _ := io.ReadAll(res.Body); string(b) != other.Placeholder {
			t.Errorf("%q", b)
		}
	})
	t.Run("parts", func(t *testing.T) {
		for _, scheme := range []string{"https", "http"} {
			ask := func(status int) error {
				_, err := set.Wrap(server(func(r *http.Request) *http.Response {
					if r.Header.Get("Range") != "" || r.Header.Get("If-Range") != "" {
						t.Errorf("%s: a part is asked for: %v", scheme, r.Header)
					}
					a := answer(testValue[:6])
					a.StatusCode = status
					return a
				})).RoundTrip(request("GET", scheme+"://good.test/", "", "Range", "bytes=0-5", "If-Range", `"x"`))
				return err
			}
			if err := ask(200); err != nil {
				t.Error(err)
			}
			if err := ask(206); !errors.Is(err, sandbox.ErrUnsupported) {
				t.Errorf("%s: an answer that is a part: %v", scheme, err)
			}
		}
		_, err := set.Wrap(server(func(r *http.Request) *http.Response {
			if r.Header.Get("Range") == "" {
				t.Error("another host is not asked for a part")
			}
			a := answer("x")
			a.StatusCode = 206
			return a
		})).RoundTrip(request("GET", "https://elsewhere.test/", "", "Range", "bytes=0-5"))
		if err != nil {
			t.Error(err)
		}
	})
	t.Run("a coding that cannot be undone", func(t *testing.T) {
		for _, coding := range []string{"br", "zstd", "gzip, br"} {
			_, err := set.Wrap(server(func(*http.Request) *http.Response { return answer("x", "Content-Encoding", coding) })).RoundTrip(request("GET", "https://good.test/", ""))
			if !errors.Is(err, sandbox.ErrUnsupported) {
				t.Errorf("%s: %v", coding, err)
			}
		}
	})
	t.Run("no coding is asked for", func(t *testing.T) {
		set.Wrap(server(func(r *http.Request) *http.Response {
			if got := r.Header.Get("Accept-Encoding"); got != "identity" {
				t.Errorf("asks for %q", got)
			}
			return answer("")
		})).RoundTrip(request("GET", "https://good.test/", "", "Accept-Encoding", "br"))
	})
	t.Run("errors", func(t *testing.T) {
		_, err := set.Wrap(server(func(*http.Request) *http.Response { return nil })).RoundTrip(request("GET", "https://good.test/", ""))
		if err == nil || strings.Contains(err.Error(), "live-0123") {
			t.Error(err)
		}
	})
	t.Run("an upgrade keeps lengths", func(t *testing.T) {
		in, out := io.Pipe()
		a := answer("")
		a.StatusCode, a.Body = 101, struct {
			io.Reader
			io.WriteCloser
		}{in, out}
		res, err := set.Wrap(server(func(r *http.Request) *http.Response { return a })).RoundTrip(request("GET", "https://good.test/", ""))
		if err != nil {
			t.Fatal(err)
		}
		go io.WriteString(res.Body.(io.Writer), "frame "+testValue+"\n")
		line, err := bufio.NewReader(res.Body).ReadString('\n')
		if want := "frame " + strings.Repeat("*", len(testValue)) + "\n"; line != want || err != nil {
			t.Errorf("%q %v", line, err)
		}
	})
}

// A placeholder written many times does not become a request of any length.
func TestHeadersStayBounded(t *testing.T) {
	set := compiled(t, func(s *sandbox.Secret) { s.Value = sandbox.NewSecretValue(strings.Repeat("v", maxValue)) })
	_, err := set.Wrap(server(func(*http.Request) *http.Response { t.Error("sent"); return answer("") })).
		RoundTrip(request("GET", "https://good.test/", "", "X", strings.Repeat(testPlaceholder, 1000)))
	if !errors.Is(err, sandbox.ErrDenied) {
		t.Error(err)
	}
}
