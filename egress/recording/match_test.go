package recording

import (
	"net/http"
	"net/url"
	"strings"
	"testing"

	"github.com/cove-sandbox/cove/sandbox"
)

func ask(t *testing.T, method, rawURL, body string, headers ...string) Asked {
	t.Helper()
	u, err := url.Parse(rawURL)
	if err != nil {
		t.Fatal(err)
	}
	h := http.Header{}
	for i := 0; i < len(headers); i += 2 {
		h.Add(headers[i], headers[i+1])
	}
	a := askedFor(method, u, h)
	a.Body = body
	return a
}

func TestWhatIsTheSameRequest(t *testing.T) {
	exact := sandbox.NetworkReplay{}
	for _, c := range []struct {
		name  string
		rules sandbox.NetworkReplay
		a, b  Asked
		same  bool
	}{
		{"itself", exact, ask(t, "GET", "http://a.test/x?q=1", "h"), ask(t, "GET", "http://a.test/x?q=1", "h"), true},
		{"case of the host, its dot, the port of the scheme", exact, ask(t, "GET", "https://A.test.:443/", "h"), ask(t, "GET", "https://a.test", "h"), true},
		{"another port", exact, ask(t, "GET", "http://a.test:8080/", "h"), ask(t, "GET", "http://a.test/", "h"), false},
		{"another scheme at the same port", exact, ask(t, "GET", "http://a.test:443/", "h"), ask(t, "GET", "https://a.test:443/", "h"), false},
		{"another method", exact, ask(t, "GET", "http://a.test/", "h"), ask(t, "HEAD", "http://a.test/", "h"), false},
		{"case of the path", exact, ask(t, "GET", "http://a.test/X", "h"), ask(t, "GET", "http://a.test/x", "h"), false},
		{"the path escaped otherwise", exact, ask(t, "GET", "http://a.test/%2f", "h"), ask(t, "GET", "http://a.test//", "h"), false},
		{"parameters in another order", exact, ask(t, "GET", "http://a.test/?b=2&a=1", "h"), ask(t, "GET", "http://a.test/?a=1&b=2", "h"), true},
		{"values of one parameter in another order", exact, ask(t, "GET", "http://a.test/?a=1&a=2", "h"), ask(t, "GET", "http://a.test/?a=2&a=1", "h"), false},
		{"a part that looks like two", exact, ask(t, "GET", "http://a.test/?a=1&b=2", "h"), ask(t, "GET", "http://a.test/?a=1%26b=2", "h"), false},
		{"another body", exact, ask(t, "POST", "http://a.test/", "h"), ask(t, "POST", "http://a.test/", "i"), false},
		{"other headers", exact, ask(t, "GET", "http://a.test/", "h", "Date", "1"), ask(t, "GET", "http://a.test/", "h", "Date", "2"), true},
		{"another Range", exact, ask(t, "GET", "http://a.test/", "h", "Range", "bytes=0-1"), ask(t, "GET", "http://a.test/", "h", "Range", "bytes=2-3"), false},
		{"body ignored", sandbox.NetworkReplay{IgnoreBody: true}, ask(t, "POST", "http://a.test/", "h"), ask(t, "POST", "http://a.test/", "i"), true},
		{"a parameter ignored", sandbox.NetworkReplay{IgnoreQuery: []string{"t s"}}, ask(t, "GET", "http://a.test/?t%20s=1&a=1", "h"), ask(t, "GET", "http://a.test/?a=1&t+s=2", "h"), true},
		{"another is not", sandbox.NetworkReplay{IgnoreQuery: []string{"ts"}}, ask(t, "GET", "http://a.test/?ts=1&a=1", "h"), ask(t, "GET", "http://a.test/?a=2", "h"), false},
		{"all parameters ignored", sandbox.NetworkReplay{IgnoreQuery: []string{"*"}}, ask(t, "GET", "http://a.test/?ts=1&a=1", "h"), ask(t, "GET", "http://a.test/", "h"), true},
		{"a header matched", sandbox.NetworkReplay{MatchHeaders: []string{"accept"}}, ask(t, "GET", "http://a.test/", "h", "Accept", "a"), ask(t, "GET", "http://a.test/", "h", "Accept", "b"), false},
	} {
		r := RulesOf(c.rules)
		if same := r.key(c.a) == r.key(c.b); same != c.same {
			t.Errorf("%s: same %v, want %v", c.name, same, c.same)
		}
	}
}

func TestTheHintNamesTheNearest(t *testing.T) {
	recorded := []Exchange{
		{Number: 1, Request: ask(t, "GET", "https://a.test/users?page=1", "")},
		{Number: 2, Request: ask(t, "POST", "https://a.test/users", "x")},
		{Number: 3, Request: ask(t, "GET", "https://b.test/", "")},
	}
	for _, c := range []struct {
		asked Asked
		want  []string
	}{
		{ask(t, "GET", "https://a.test/users?page=2", ""), []string{"number 1", "the query differs"}},
		{ask(t, "POST", "https://a.test/users", "y"), []string{"number 2", "the body differs"}},
		{ask(t, "PUT", "https://b.test/z", ""), []string{"number 3", "the method and the path differ"}},
		{ask(t, "GET", "https://b.test/", ""), []string{"number 3", "not as often"}},
	} {
		got := nearest(c.asked, recorded)
		for _, w := range c.want {
			if !strings.Contains(got, w) {
				t.Errorf("%s: %q lacks %q", c.asked.URL(), got, w)
			}
		}
	}
	if got := nearest(ask(t, "GET", "https://c.test/", ""), recorded); got != "" {
		t.Errorf("of another host: %q", got)
	}
}
