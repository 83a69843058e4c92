package server

import (
	"io"
	"net/http"
	"strings"
	"testing"

	"connectrpc.com/connect"
	"google.golang.org/protobuf/reflect/protoreflect"

	covev1 "github.com/cove-sandbox/cove/api/cove/v1"
	"github.com/cove-sandbox/cove/sandbox"
	"github.com/cove-sandbox/cove/store"
	"github.com/cove-sandbox/cove/wire"
)

// procedures is every RPC of the protos.
func procedures() (out []string) { // TestProceduresAreAll holds it to the registry
	for _, f := range []protoreflect.FileDescriptor{covev1.File_cove_v1_admin_proto, covev1.File_cove_v1_callback_proto, covev1.File_cove_v1_file_proto, covev1.File_cove_v1_grade_proto, covev1.File_cove_v1_image_proto, covev1.File_cove_v1_lease_proto,
		covev1.File_cove_v1_port_proto, covev1.File_cove_v1_process_proto, covev1.File_cove_v1_recording_proto, covev1.File_cove_v1_run_proto, covev1.File_cove_v1_sandbox_proto, covev1.File_cove_v1_secret_proto, covev1.File_cove_v1_shipment_proto, covev1.File_cove_v1_snapshot_proto,
		covev1.File_cove_v1_template_proto, covev1.File_cove_v1_volume_proto} {
		for i := range f.Services().Len() {
			s := f.Services().Get(i)
			for j := range s.Methods().Len() {
				out = append(out, "/"+string(s.FullName())+"/"+string(s.Methods().Get(j).Name()))
			}
		}
	}
	return out
}

// Nothing but /healthz answers without a good key, and the refusal says how to
// get one.
func TestEveryRouteAuthenticates(t *testing.T) {
	w := newWorld(t)
	var routes [][2]string
	for _, p := range procedures() {
		routes = append(routes, [2]string{"POST", p})
	}
	for pattern := range nativeRoutes(w.server) {
		method, path, _ := strings.Cut(pattern, " ")
		routes = append(routes, [2]string{method, strings.ReplaceAll(path, "{id}", "abc")})
	}
	routes = append(routes, [2]string{"HEAD", "/v1/sandboxes/abc/files"}, [2]string{"GET", "/nowhere"}, [2]string{"GET", covev1.SandboxesGetProcedure})
	if len(routes) < 35 {
		t.Fatalf("only %d routes found", len(routes))
	}

	other := "cove_" + strings.Repeat("A", 43)
	for name, header := range map[string]string{"no key": "", "wrong key": "Bearer " + other, "malformed": "Bearer x", "other scheme": "Basic " + w.secret,
		"hash instead of secret": "Bearer " + strings.Repeat("0", 64)} {
		for _, route := range routes {
			req, _ := http.NewRequest(route[0], w.url+route[1], strings.NewReader("{}"))
			req.Header.Set("Content-Type", "application/json")
			if header != "" {
				req.Header.Set("Authorization", header)
			}
			resp, err := plainHTTP.Do(req)
			if err != nil {
				t.Fatal(err)
			}
			b, _ := io.ReadAll(resp.Body)
			resp.Body.Close()
			if resp.StatusCode != http.StatusUnauthorized {
				t.Errorf("%s: %s answers %d %s", name, route, resp.StatusCode, b)
			}
			if route[0] != "HEAD" && !strings.Contains(string(b), `"unauthenticated"`) {
				t.Errorf("%s: %s says %s", name, route, b)
			}
		}
	}
	if resp, body := w.http("GET", "/healthz", nil, "Authorization", ""); resp.StatusCode != 200 || body != "ok\n" {
		t.Errorf("healthz: %d %q", resp.StatusCode, body)
	}
	if w.node.saw().created != 0 {
		t.Error("a create got through")
	}
}

func TestStreamsRefuseInTheirProtocol(t *testing.T) {
	w := newWorld(t)
	c := wire.NewClient(w.url, "", wire.Options{})
	defer c.Close()
	s, err := c.Processes.Start(t.Context(), connect.NewRequest(&covev1.StartProcessRequest{}))
	if err == nil {
		s.Receive()
		err = s.Err()
		_ = s.Close()
	}
	wantError(t, err, sandbox.ErrUnauthenticated, "cove env")
}

func TestKeyLife(t *testing.T) {
	w := newWorld(t)
	ctx := t.Context()
	r, err := w.client.Keys.Create(ctx, connect.NewRequest(&covev1.CreateKeyRequest{Name: "ci"}))
	if err != nil {
		t.Fatal(err)
	}
	ci := wire.NewClient(w.url, r.Msg.Secret, wire.Options{})
	defer ci.Close()
	info := func(c *wire.Client) error {
		_, err := c.System.Info(ctx, connect.NewRequest(&covev1.InfoRequest{}))
		return err
	}
	if err := info(ci); err != nil {
		t.Fatal(err)
	}

	// The second call asks nobody.
	before := w.store.keys.Load()
	if err := info(ci); err != nil || w.store.keys.Load() != before {
		t.Errorf("a known key was looked up again (%v)", err)
	}

	// Only hashes are stored, and the use is seen at once and written down later.
	for _, k := range all(t, w.store.ListKeys) {
		if strings.Contains(string(k.Hash), "cove_") || len(k.Hash) != 32 {
			t.Errorf("stored %q", k.Hash)
		}
	}
	l, err := w.client.Keys.List(ctx, connect.NewRequest(&covev1.ListKeysRequest{}))
	if err != nil || len(l.Msg.Keys) != 2 {
		t.Fatal(l, err)
	}
	for _, k := range l.Msg.Keys {
		if k.LastUsedAt == nil {
			t.Errorf("key %s was used and does not say so", k.Name)
		}
	}
	w.server.keys.flush(ctx, w.server.log)
	for _, k := range all(t, w.store.ListKeys) {
		if k.LastUsedAt.IsZero() {
			t.Errorf("the use of %s was not written down", k.Name)
		}
	}

	// Revoked, it is dead for the very next call.
	if _, err := w.client.Keys.Revoke(ctx, connect.NewRequest(&covev1.RevokeKeyRequest{Id: r.Msg.Key.Id})); err != nil {
		t.Fatal(err)
	}
	wantError(t, info(ci), sandbox.ErrUnauthenticated, "revoked")
	if err := info(w.client); err != nil {
		t.Error("the other key must go on:", err)
	}
	_, err = w.client.Keys.Revoke(ctx, connect.NewRequest(&covev1.RevokeKeyRequest{Id: r.Msg.Key.Id}))
	wantError(t, err, sandbox.ErrNotFound)

	if _, created, err := w.server.EnsureFirstKey(ctx); created || err != nil {
		t.Error("a first key is made once:", created, err)
	}
	if strings.Contains(w.log.String(), "cove_") {
		t.Error("a secret is in the log")
	}
}

// A look-up that began before a revocation must not bring the key back.
func TestRevokeDuringLookup(t *testing.T) {
	w := newWorld(t)
	w.store.mu.Lock()
	w.store.read = func(k store.Key) {
		if err := w.store.RevokeKey(w.all(), k.ID); err != nil {
			t.Error(err)
		}
		w.server.keys.forget(k.ID)
	}
	w.store.mu.Unlock()
	if _, err := w.server.keys.find(t.Context(), w.secret); err != nil {
		t.Fatal(err) // this one call was first
	}
	if _, err := w.server.keys.find(t.Context(), w.secret); err == nil {
		t.Error("a revoked key is still known")
	}
}
