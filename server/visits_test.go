package server

import (
	"encoding/json"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"

	"github.com/cove-sandbox/cove/sandbox"
)

// A visit with a token of E2B's is the operation port.reach of the key that the token
// is of, whichever way the port is spelled.
func TestVisitsAreAnOperation(t *testing.T) {
	w := newWorld(t)
	root, err := w.server.Authenticate(t.Context(), w.secret, "")
	if err != nil {
		t.Fatal(err)
	}
	var visitor struct {
		key    string
		port   int
		header http.Header
	}
	front := e2bHandler(w.server, func(rw http.ResponseWriter, r *http.Request, id string, port int, key string) {
		visitor.key, visitor.port, visitor.header = key, port, r.Header
		if key == "" { // as the gateway says of all that is private
			rw.Header().Set("X-Cove-Error", "unauthenticated")
			rw.WriteHeader(http.StatusUnauthorized)
		}
	})
	ask := func(method, path string, header ...string) *httptest.ResponseRecorder {
		r := httptest.NewRequestWithContext(t.Context(), method, path, strings.NewReader("{}"))
		for _, h := range header {
			name, value, _ := strings.Cut(h, ": ")
			r.Header.Set(name, value)
		}
		rec := httptest.NewRecorder()
		front.ServeHTTP(rec, r)
		return rec
	}
	made := ask("POST", "/sandboxes", "X-API-KEY: "+w.secret)
	var sb struct {
		ID string `json:"sandboxID"`
	}
	if err := json.Unmarshal(made.Body.Bytes(), &sb); err != nil || sb.ID == "" {
		t.Fatalf("%d %s", made.Code, made.Body)
	}
	for _, c := range []struct {
		name   string
		role   sandbox.Role
		scopes []string
		token  bool
		want   int
	}{
		{"developer", sandbox.DeveloperRole, nil, true, http.StatusOK},
		{"ports", sandbox.DeveloperRole, []string{"sandboxes", "ports"}, true, http.StatusOK},
		{"processes", sandbox.DeveloperRole, []string{"sandboxes", "processes"}, true, http.StatusForbidden}, // of the code interpreter alone
		{"files", sandbox.DeveloperRole, []string{"sandboxes", "files"}, false, 0},
		{"readonly", sandbox.ReadonlyRole, nil, false, 0},
	} {
		k, secret, err := w.server.CreateKey(root, KeyRequest{Name: c.name, Role: c.role, Scopes: c.scopes})
		if err != nil {
			t.Fatal(err)
		}
		var got struct {
			Token string `json:"trafficAccessToken"`
		}
		if r := ask("GET", "/sandboxes/"+sb.ID, "X-API-KEY: "+secret); json.Unmarshal(r.Body.Bytes(), &got) != nil || got.Token != "" != c.token {
			t.Errorf("%s is given the token %q: %d", c.name, got.Token, r.Code)
		}
		if got.Token == "" {
			continue
		}
		visitor.key = ""
		r := ask("GET", "/", "E2b-Sandbox-Id: "+sb.ID, "E2b-Sandbox-Port: 8080", "E2b-Traffic-Access-Token: "+got.Token, "X-Api-Key: "+secret)
		if r.Code != c.want {
			t.Errorf("%s: %d %s, want %d", c.name, r.Code, r.Body, c.want)
		}
		if c.want != http.StatusOK {
			continue
		}
		if visitor.key != k.ID || visitor.port != 8080 || visitor.header.Get("X-Api-Key")+visitor.header.Get("E2b-Traffic-Access-Token") != "" {
			t.Errorf("%s came in as %+v, want key %s", c.name, visitor, k.ID)
		}
		for _, port := range []string{"08080", "+8080", "049999", "0", "65536", "8080 "} {
			visitor.port = 0
			if r := ask("POST", "/execute", "E2b-Sandbox-Id: "+sb.ID, "E2b-Sandbox-Port: "+port, "E2b-Traffic-Access-Token: "+got.Token); r.Code != http.StatusBadRequest || visitor.port != 0 {
				t.Errorf("port %q is %d", port, r.Code)
			}
		}
		if ask("GET", "/", "E2b-Sandbox-Id: "+sb.ID, "E2b-Sandbox-Port: 8080", "E2b-Traffic-Access-Token: "+got.Token, "X-Api-Key: its own"); visitor.header.Get("X-Api-Key") != "its own" {
			t.Error("an application's own key does not reach it")
		}
	}

	// Who shows nothing is told nothing.
	native := w.create(nil)
	said := map[string]bool{}
	for _, id := range []string{sb.ID, native.Id, "nosuchsandbox000"} {
		r := ask("GET", "/", "E2b-Sandbox-Id: "+id, "E2b-Sandbox-Port: 8080")
		said[strings.ReplaceAll(r.Body.String(), id, "ID")] = true
		if r.Code != http.StatusForbidden || len(said) != 1 {
			t.Errorf("%s: %d %s", id, r.Code, r.Body)
		}
	}
}
