package transform

import (
	"errors"
	"net/http"
	"strings"
	"testing"

	"github.com/cove-sandbox/cove/sandbox"
)

type seen struct{ header http.Header }

func (s *seen) RoundTrip(r *http.Request) (*http.Response, error) {
	s.header = r.Header
	return &http.Response{StatusCode: 200, Body: http.NoBody}, nil
}

func TestHeadersGoToTheirDomain(t *testing.T) {
	set, err := Compile([]sandbox.NetworkHeader{{Domain: "api.test", Name: "x-token", Value: "one"}, {Domain: "*.wild.test", Name: "X-Token", Value: "two"}})
	if err != nil {
		t.Fatal(err)
	}
	for host, want := range map[string]string{"api.test": "one", "API.test": "one", "a.wild.test": "two", "wild.test": "own", "xapi.test": "own", "api.test.evil": "own"} {
		last := &seen{}
		req, _ := http.NewRequestWithContext(t.Context(), "GET", "https://"+host+":8443/", nil)
		req.Header.Set("X-Token", "own")
		res, err := set.Wrap(last).RoundTrip(req)
		if err != nil {
			t.Fatal(err)
		}
		res.Body.Close()
		if got := last.header.Get("X-Token"); got != want {
			t.Errorf("%s: %q, not %q", host, got, want)
		}
		if req.Header.Get("X-Token") != "own" {
			t.Error("the request that was given has changed")
		}
	}
}

func TestWhatIsNoHeaderIsRefused(t *testing.T) {
	for field, h := range map[string]sandbox.NetworkHeader{
		"network.headers[0].domain": {Domain: "a.*.test", Name: "X", Value: "v"},
		"network.headers[0].name":   {Domain: "a.test", Name: "Transfer-Encoding", Value: "chunked"},
		"network.headers[0].value":  {Domain: "a.test", Name: "X", Value: "v\r\nHost: evil"},
	} {
		_, err := Compile([]sandbox.NetworkHeader{h})
		var e *sandbox.Error
		if !errors.As(err, &e) || e.Class != sandbox.Invalid || e.Field != field {
			t.Errorf("%v: %v", h, err)
		}
	}
	if _, err := Compile([]sandbox.NetworkHeader{{Domain: "a.test", Name: "bad name", Value: "v"}}); err == nil || !strings.Contains(err.Error(), "name of a header") {
		t.Error(err)
	}
}
