package e2b

import (
	"context"
	"crypto/sha256"
	"encoding/base64"
	"encoding/hex"
	"encoding/json"
	"fmt"
	"net/http"
	"net/http/httptest"
	"slices"
	"strings"
	"testing"
	"time"

	"google.golang.org/protobuf/reflect/protoreflect"

	"github.com/cove-sandbox/cove/sandbox"
	"github.com/cove-sandbox/cove/server"
	"github.com/cove-sandbox/cove/server/e2b/envd/filesystem"
	"github.com/cove-sandbox/cove/server/e2b/envd/process"
)

// Every route and every method of the agent's services is an operation.
func TestEveryCallIsAnOperation(t *testing.T) {
	routes := Routes()
	for path, op := range routes {
		if _, known := server.OperationNamed(string(op)); !known {
			t.Errorf("%s is %q, which is no operation", path, op)
		}
	}
	for _, f := range []protoreflect.FileDescriptor{process.File_process_process_proto, filesystem.File_filesystem_filesystem_proto} {
		svc := f.Services().Get(0)
		for i := range svc.Methods().Len() {
			path := "/" + string(svc.FullName()) + "/" + string(svc.Methods().Get(i).Name())
			if _, ok := routes[path]; !ok {
				t.Errorf("%s has no operation", path)
			}
		}
	}
	if len(routes) != len((&dialect{}).controlPlane())+len((&dialect{}).agent())+len((&dialect{}).interpreterRoutes())+len((&dialect{}).volumeContent())+18 {
		t.Errorf("there are %d routes: two have the same pattern", len(routes))
	}
}

func TestKeysAreTheSameInBothSpellings(t *testing.T) {
	native := nativePrefix + base64.RawURLEncoding.EncodeToString([]byte("0123456789abcdef0123456789abcdef"))
	key := "e2b_" + hex.EncodeToString([]byte("0123456789abcdef0123456789abcdef"))
	if back := nativeSecret(key); back != native {
		t.Errorf("%q became %q", native, back)
	}
	if nativeSecret("e2b_xyz") != "e2b_xyz" || nativeSecret("") != "" || nativeSecret(native) != native {
		t.Error("what is no key became one")
	}
}

func TestTokensNameTheirSandboxAndKey(t *testing.T) {
	tok := newTokens([]byte("secret"), "access")
	g := grant{"sandboxa", "key1"}
	s := tok.mint(g)
	if got, ok := tok.check(s); !ok || got != g {
		t.Errorf("its own token is %v, %v", got, ok)
	}
	if again := newTokens([]byte("secret"), "access").mint(g); again != s {
		t.Error("the same two give another token")
	}
	for _, bad := range []string{"", ".", "..", s + "0", strings.Replace(s, "sandboxa", "sandboxb", 1), strings.Replace(s, "key1", "key2", 1), newTokens([]byte("other"), "access").mint(g), newTokens([]byte("secret"), "traffic").mint(g)} {
		if _, ok := tok.check(bad); ok {
			t.Errorf("%q opens", bad)
		}
	}
}

// signedBy signs as the SDKs do.
func signedBy(path, operation, user, token, expires string) signature {
	raw := path + ":" + operation + ":" + user + ":" + token
	if expires != "" {
		raw += ":" + expires
	}
	sum := sha256.Sum256([]byte(raw))
	return signature{"v1_" + base64.RawStdEncoding.EncodeToString(sum[:]), path, operation, user, expires}
}

func TestSignedURLs(t *testing.T) {
	ctx, now := t.Context(), time.Unix(1000, 0)
	all := []server.Holder{{Sandbox: "sandboxa", Keys: []string{"key0", "key1"}}, {Sandbox: "sandboxb", Keys: []string{"key0", "key1"}}}
	holders := func(_ context.Context, id string) (out []server.Holder, err error) {
		for _, h := range all {
			if id == "" || h.Sandbox == id {
				out = append(out, h)
			}
		}
		return out, nil
	}
	fresh := func() *tokens {
		tok := newTokens([]byte("secret"), "access")
		tok.holders = holders
		return tok
	}
	g := grant{"sandboxa", "key1"}
	token := fresh().mint(g)
	for _, c := range []struct {
		id string
		s  signature
	}{
		{"", signedBy("/f", "read", "user", token, "")},
		{"", signedBy("/f", "read", "", token, "1000")},
		{"sandboxa", signedBy("/f", "read", "", token, "")},
	} {
		// By a process that was not asked for the token, too.
		if got, err := fresh().signed(ctx, c.id, c.s, now); err != nil || got != g {
			t.Errorf("%+v is of %v, %v", c, got, err)
		}
	}
	tok := fresh()
	if _, err := tok.signed(ctx, "sandboxb", signedBy("/f", "read", "", token, ""), now); err == nil {
		t.Error("it opens another sandbox")
	}
	other := signedBy("/f", "read", "", token, "")
	other.operation = "write"
	for what, s := range map[string]signature{"signature is already expired": signedBy("/f", "read", "", token, "999"), "invalid signature": other} {
		if _, err := tok.signed(ctx, "", s, now); err == nil || sandbox.ClassOf(err) != sandbox.Unauthenticated || err.Error() != what {
			t.Errorf("%v, want %s", err, what)
		}
	}
}

// However many sandboxes come and go, the URLs of one that lives open, and what is kept is
// about as much as lives.
func TestSignedURLsOutliveOtherSandboxes(t *testing.T) {
	tok := newTokens([]byte("secret"), "access")
	tok.holders = func(_ context.Context, id string) ([]server.Holder, error) {
		if id != "" && id != "lives" {
			return nil, nil
		}
		return []server.Holder{{Sandbox: "lives", Keys: []string{"mine"}}}, nil
	}
	mine := tok.mint(grant{"lives", "mine"})
	for i := range 3 * leastSweep {
		tok.mint(grant{fmt.Sprintf("gone%d", i), "theirs"})
	}
	if g, err := tok.signed(t.Context(), "", signedBy("/f", "read", "", mine, ""), time.Now()); err != nil || g.sandbox != "lives" {
		t.Errorf("it is of %v, %v", g, err)
	}
	for begin := time.Now(); tok.given.count.Load() > leastSweep; time.Sleep(time.Millisecond) {
		if time.Since(begin) > time.Minute {
			t.Fatalf("%d tokens are kept", tok.given.count.Load())
		}
		tok.mint(grant{"one more", "theirs"})
	}
}

func TestTagsAreInExecIDs(t *testing.T) {
	for _, tag := range []string{"", "a", "with-dash", "Ünï ☺", strings.Repeat("x", maxTag)} {
		id, err := newExecID(tag)
		if err != nil || sandbox.ValidateExecID("exec_id", id) != nil || tagOf(id) != tag {
			t.Errorf("%q: %q, %v gives %q", tag, id, err, tagOf(id))
		}
	}
	if _, err := newExecID(strings.Repeat("x", maxTag+1)); err == nil {
		t.Error("a tag too long is taken")
	}
	if tagOf("mine-YQ") != "" {
		t.Error("a native exec_id has a tag")
	}
}

func TestNetworkPolicies(t *testing.T) {
	no, yes := false, true
	for _, c := range []struct {
		what     string
		cfg      *networkConfig
		internet *bool
		mode     sandbox.NetworkMode
		rules    string
		err      string
	}{
		{"nothing", nil, nil, "", "", ""},
		{"the SDK's default", nil, &yes, "", "", ""},
		{"no internet", nil, &no, sandbox.NetworkRules, "", ""},
		{"some domains", &networkConfig{AllowOut: []string{"*.x.org", "1.1.1.1"}, DenyOut: []string{"0.0.0.0/0"}}, nil, sandbox.NetworkRules, "allow *.x.org allow 1.1.1.1/32", ""},
		{"allowed goes before denied", &networkConfig{AllowOut: []string{"8.8.0.0/16"}, DenyOut: []string{"8.8.8.8", "9.9.9.9"}}, nil, sandbox.NetworkPublic, "allow 8.8.0.0/16 deny 9.9.9.9/32", ""},
		{"domains among everything", &networkConfig{AllowOut: []string{"x.org"}}, nil, "", "", "denyOut"},
		{"a denied domain", &networkConfig{DenyOut: []string{"x.org"}}, nil, "", "", "denyOut"},
		{"a proxy", &networkConfig{EgressProxy: map[string]any{"address": "x:1"}}, nil, "", "", "proxy"},
	} {
		n, err := c.cfg.policy(c.internet)
		if c.err != "" {
			if err == nil || !strings.Contains(err.Error(), c.err) {
				t.Errorf("%s: %v, want %s", c.what, err, c.err)
			}
			continue
		}
		var rules []string
		for _, r := range n.Rules {
			rules = append(rules, string(r.Action)+" "+r.Domain+r.CIDR)
		}
		if got := strings.Join(rules, " "); err != nil || n.Mode != c.mode || got != c.rules {
			t.Errorf("%s: %s %q, %v; want %s %q", c.what, n.Mode, got, err, c.mode, c.rules)
		}
	}
}

func TestReadyCommandsOfTheSDKs(t *testing.T) {
	for command, port := range map[string]int{`[ -n "$(ss -Htuln sport = :8000)" ]`: 8000, "ss -tuln | grep :80": 80, "sleep 10": 0, `[ -n "$(ss -Htuln sport = :99999)" ]`: 0} {
		if got := readinessOf(command); got.Port != port || (got.Command == "") != (port != 0) {
			t.Errorf("%s: %+v", command, got)
		}
	}
}

// Headers of rules are the policy's, and told again as they were.
func TestNetworkHeaders(t *testing.T) {
	var c networkConfig
	if err := json.Unmarshal([]byte(`{"rules":{"Api.test:7443":[{"transform":{"headers":{"X-B":"2","X-A":"1"}}}]}}`), &c); err != nil {
		t.Fatal(err)
	}
	n, err := c.policy(nil)
	want := []sandbox.NetworkHeader{{Domain: "api.test", Name: "X-A", Value: "1"}, {Domain: "api.test", Name: "X-B", Value: "2"}}
	if err != nil || n.Mode != sandbox.NetworkPublic || !slices.Equal(n.Headers, want) {
		t.Errorf("%+v, %v", n, err)
	}
	if back := configOf(sandbox.Spec{Network: n, Ingress: sandbox.Ingress{Public: true}}); back == nil || back.Rules["api.test"][0].Transform.Headers["X-A"] != "1" {
		t.Errorf("%+v", back)
	}
}

// What is no call of E2B's is the next handler's, and a call that there is not yet
// says so.
func TestWrapLeavesTheNativeAPIAlone(t *testing.T) {
	h := Wrap(Config{Key: []byte("k")}, http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) { w.WriteHeader(http.StatusTeapot) }))
	for _, c := range []struct {
		method, path, key string
		want              int
	}{
		{"POST", "/cove.v1.Sandboxes/Create", "", http.StatusTeapot},
		{"GET", "/v1/sandboxes/x/files", "", http.StatusTeapot},
		{"GET", "/healthz", "", http.StatusTeapot},
		{"GET", "/openapi.json", "", http.StatusTeapot},
		{"GET", "/p/x/8080//a//../b", "", http.StatusTeapot},
		{"GET", "/p/x/8080/a", "the-port's-own", http.StatusTeapot},
		{"GET", "/health", "", http.StatusNoContent},
		{"POST", "/v9/things", "e2b_00", http.StatusBadRequest},
		{"GET", "/files?path=/x", "", http.StatusUnauthorized},
		{"POST", "/process.Process/Nothing", "", http.StatusNotFound},
	} {
		r := httptest.NewRequest(c.method, c.path, nil)
		if c.key != "" {
			r.Header.Set("X-API-KEY", c.key)
		}
		w := httptest.NewRecorder()
		h.ServeHTTP(w, r)
		if w.Code != c.want {
			t.Errorf("%s %s is %d, want %d", c.method, c.path, w.Code, c.want)
		}
	}
}

// What is remembered of builds and watchers has bounds: what is built and code inside
// choose how much there is to remember.
func TestWhatIsRememberedIsBounded(t *testing.T) {
	now := time.Unix(1e9, 0)
	bs := newBuilds()
	ask := func(tenant string) (*templateBuild, error) {
		b := &templateBuild{id: newBuildID(), tenant: tenant, name: "n"}
		return b, bs.add(b, now)
	}
	for i := range 3 * keptBuilds {
		b, err := ask("a")
		if err != nil {
			t.Fatalf("build %d: %v", i, err)
		}
		now = now.Add(time.Second)
		b.stop()
	}
	if len(bs.mu.byID) > keptBuilds+1 {
		t.Errorf("%d builds that are over are remembered", len(bs.mu.byID))
	}
	for range maxBuilds {
		if _, err := ask("b"); err != nil {
			t.Fatal(err)
		}
	}
	if _, err := ask("b"); sandbox.ClassOf(err) != sandbox.QuotaExceeded {
		t.Errorf("one more than may wait: %v", err)
	}
	if _, err := ask("c"); err != nil {
		t.Errorf("another tenant's: %v", err)
	}
	now = now.Add(unstarted + time.Second)
	if _, err := ask("b"); err != nil {
		t.Errorf("after those that nobody started: %v", err)
	}
	b := &templateBuild{}
	b.note("info", "1", strings.Repeat("x", 3*maxLine))
	if n := len(b.mu.log[0].Message); n > maxLine+10 {
		t.Errorf("a line of %d bytes", n)
	}
	for range 2 * maxLog / 1000 {
		b.note("info", "1", strings.Repeat("x", 1000))
	}
	if last := b.mu.log[len(b.mu.log)-1]; len(b.mu.log) > maxLog/1000 || last.Level != "warn" {
		t.Errorf("%d entries, the last %+v", len(b.mu.log), last)
	}
	w, one := newWatchers(func() time.Time { return now }), &watcher{sandbox: "s", end: func() {}, came: make(chan struct{}, 1)}
	id, err := w.add(one)
	if err != nil {
		t.Fatal(err)
	}
	for i := range 1000 {
		w.put(one, &filesystem.FilesystemEvent{Name: fmt.Sprint(i, strings.Repeat("n", 4000))})
	}
	evs, ok := w.take(t.Context(), id, "s")
	if n := len(evs); !ok || n == 0 || n > maxHeld/4000 || !strings.HasPrefix(evs[n-1].Name, "999n") {
		t.Errorf("%d events are held", len(evs))
	}
	if _, ok := w.take(t.Context(), id, "other"); ok {
		t.Error("another sandbox's watcher is told")
	}
}

// Names of templates have small letters, as with E2B.
func TestTemplateNames(t *testing.T) {
	for in, want := range map[string]string{" AUD-One ": "aud-one ", "Team/Site:V1": "site v1"} {
		if name, tag, err := templateName(in); err != nil || name+" "+tag != want {
			t.Errorf("%q is %q, %q, %v", in, name, tag, err)
		}
	}
	if tags, err := tagNames("site", []string{"Site:V2", " Stable"}); err != nil || !slices.Equal(tags, []string{"v2", "stable"}) {
		t.Errorf("%q, %v", tags, err)
	}
}

// A build that fails names the step as its caller counts them, and one that was canceled says so.
func TestReasonsOfBuilds(t *testing.T) {
	var req buildRequest
	if err := json.Unmarshal([]byte(`{"steps":[{"type":"RUN","args":["exit 3"]}]}`), &req); err != nil {
		t.Fatal(err)
	}
	r := reasonOf(&sandbox.Error{Class: sandbox.Precondition, Field: "steps[4]", Msg: "the command exited with 3"}, 4, req)
	if r.Step != "1" || r.Message != "failed to run command 'exit 3': the command exited with 3" {
		t.Errorf("%+v", r)
	}
	if r := reasonOf(context.Canceled, 4, req); r.Message != canceledBuild {
		t.Errorf("%+v", r)
	}
}

func TestAClosedNetworkIsTold(t *testing.T) {
	c := networkConfig{DenyOut: []string{"0.0.0.0/0"}}
	n, err := c.policy(nil)
	if err != nil {
		t.Fatal(err)
	}
	if back := configOf(sandbox.Spec{Network: n, Ingress: sandbox.Ingress{Public: true}}); back == nil || !slices.Equal(back.DenyOut, c.DenyOut) {
		t.Errorf("it is told as %+v", back)
	}
}
