package image_test

import (
	"fmt"
	"net/http"
	"net/http/httptest"
	"strings"
	"sync/atomic"
	"testing"

	"github.com/cove-sandbox/cove/image"
	"github.com/cove-sandbox/cove/sandbox"
	v1 "github.com/google/go-containerregistry/pkg/v1"
)

// Whoever may pull could otherwise have this machine ask servers of its own
// network, and read the answers: by the registry's own address, by a name that
// leads there, by a redirect of a blob or by the place where tokens come from.
func TestPullReachesNothingInward(t *testing.T) {
	var reached atomic.Int32
	inside := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		reached.Add(1)
		fmt.Fprint(w, "the secret of a server inside")
	}))
	t.Cleanup(inside.Close)
	at := strings.TrimPrefix(inside.URL, "http://")
	port := at[strings.LastIndex(at, ":"):]

	r := startRegistry(t)
	r.push(t, "app", ociImage(t, "linux/amd64", v1.Config{}, layer(t, pack(t, reg("a", "x")))))
	// The operator allows this registry, by name and port, and nothing else.
	lib := library(t, image.Options{Registries: []string{r.host}})
	pull := func(what, ref string, want sandbox.Class) {
		t.Helper()
		_, err := lib.Pull(t.Context(), ref, "linux/amd64", nil)
		if want == "" && err != nil || want != "" && sandbox.ClassOf(err) != want {
			t.Errorf("%s: %v", what, err)
		}
		if n := reached.Load(); n > 0 {
			t.Errorf("%s: the server inside was asked", what)
			reached.Store(0)
		}
		if err != nil && strings.Contains(err.Error(), "secret") {
			t.Errorf("%s: the error tells what was answered: %v", what, err)
		}
	}
	pull("what is allowed", r.host+"/app", "")
	pull("an address", at+"/app", sandbox.Denied)
	pull("a name for it", "localhost"+port+"/app", sandbox.Denied)
	pull("IPv4 as IPv6", "[::ffff:127.0.0.1]"+port+"/app", sandbox.Denied)
	pull("metadata", "169.254.169.254/latest/meta-data", sandbox.Denied)
	pull("a private network", "10.255.255.254:5000/app", sandbox.Denied)

	other := "localhost" + port
	for what, answer := range map[string]func(w http.ResponseWriter, req *http.Request) bool{
		"a redirect of a blob": func(w http.ResponseWriter, req *http.Request) bool {
			if isBlob(req) {
				http.Redirect(w, req, "http://"+other+"/secret", http.StatusTemporaryRedirect)
			}
			return isBlob(req)
		},
		"a redirect of a manifest": func(w http.ResponseWriter, req *http.Request) bool {
			http.Redirect(w, req, "http://"+other+"/secret", http.StatusTemporaryRedirect)
			return true
		},
		"a place for tokens": func(w http.ResponseWriter, req *http.Request) bool {
			w.Header().Set("WWW-Authenticate", `Bearer realm="http://`+other+`/token",service="x"`)
			w.WriteHeader(http.StatusUnauthorized)
			return true
		},
	} {
		r.behind(func(next http.Handler) http.Handler {
			return http.HandlerFunc(func(w http.ResponseWriter, req *http.Request) {
				if !answer(w, req) {
					next.ServeHTTP(w, req)
				}
			})
		})
		pull(what, r.host+"/app", sandbox.Denied)
	}
}

// An answer that is none of a registry's stays in the log.
func TestPullErrorsTellNothingOfAnswers(t *testing.T) {
	const secret = "hunter2"
	for what, h := range map[string]http.HandlerFunc{
		"an error's body": func(w http.ResponseWriter, _ *http.Request) {
			w.WriteHeader(http.StatusTeapot)
			fmt.Fprintf(w, `{"errors":[{"code":"%s","message":"%s"}]}`, secret, secret)
		},
		"a forbidden body": func(w http.ResponseWriter, _ *http.Request) { http.Error(w, secret, http.StatusForbidden) },
		"a page": func(w http.ResponseWriter, r *http.Request) {
			w.Header().Set("Content-Type", "text/"+secret)
			fmt.Fprint(w, secret)
		},
		"no HTTP": func(w http.ResponseWriter, r *http.Request) {
			if r.URL.Path == "/v2/" {
				return
			}
			c, _, err := w.(http.Hijacker).Hijack()
			if err == nil {
				fmt.Fprintf(c, "%s\r\n", secret)
				c.Close()
			}
		},
		"a redirect with a secret": func(w http.ResponseWriter, r *http.Request) {
			http.Redirect(w, r, "http://"+r.Host+"/"+secret, http.StatusFound)
		},
	} {
		srv := httptest.NewServer(h)
		t.Cleanup(srv.Close)
		_, err := library(t, image.Options{Registries: []string{"127.0.0.0/8"}}).Pull(t.Context(), strings.TrimPrefix(srv.URL, "http://")+"/app", "linux/amd64", nil)
		if err == nil || strings.Contains(err.Error(), secret) {
			t.Errorf("%s: %v", what, err)
		}
	}
}

func TestRegistriesAreChecked(t *testing.T) {
	for _, bad := range []string{"https://registry.lan", "registry lan", "10.0.0.0/99", ""} {
		if _, err := image.Open(t.TempDir(), image.Options{Registries: []string{bad}}); sandbox.ClassOf(err) != sandbox.Invalid {
			t.Errorf("%q: %v", bad, err)
		}
	}
}
