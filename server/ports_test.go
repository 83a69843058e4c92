package server

import (
	"errors"
	"fmt"
	"io"
	"net"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"connectrpc.com/connect"
	"google.golang.org/protobuf/types/known/durationpb"

	covev1 "github.com/cove-sandbox/cove/api/cove/v1"
	"github.com/cove-sandbox/cove/sandbox"
)

type testGate struct{}

func (testGate) URL(id string, port int) string { return fmt.Sprintf("/p/%s/%d/", id, port) }
func (testGate) Domain() string                 { return "https://cove.test" }
func (testGate) Token(id string, port int, key string, until time.Time) string {
	return fmt.Sprintf("covep_%s-%d of %s", id, port, key)
}

func TestPortURLAndPublic(t *testing.T) {
	w := newWorld(t, func(c *Config) { c.Ports = testGate{} })
	sb := w.create(nil)
	ports := w.client.Ports
	url := func() *covev1.PortUrlResponse {
		t.Helper()
		r, err := ports.Url(t.Context(), connect.NewRequest(&covev1.PortUrlRequest{SandboxId: sb.Id, Port: 80}))
		if err != nil {
			t.Fatal(err)
		}
		return r.Msg
	}
	if u := url(); u.Public || !strings.HasPrefix(w.client.PortURL(u), w.url+"/p/"+sb.Id+"/80/?cove_token=covep_"+sb.Id+"-80+of+") {
		t.Errorf("%v", u)
	}
	for _, step := range []struct {
		port   int32
		public bool
		want   []int32
	}{{90, true, []int32{90}}, {80, true, []int32{80, 90}}, {80, true, []int32{80, 90}}, {90, false, []int32{80}}, {7, false, []int32{80}}} {
		r, err := ports.Set(t.Context(), connect.NewRequest(&covev1.SetPortRequest{SandboxId: sb.Id, Port: step.port, Public: step.public}))
		if err != nil || !slices.Equal(r.Msg.Sandbox.PublicPorts, step.want) || !slices.Equal(w.get(sb.Id).PublicPorts, step.want) {
			t.Errorf("%+v: %v %v", step, r, err)
		}
	}
	if u := url(); !u.Public || w.client.PortURL(u) != w.url+"/p/"+sb.Id+"/80/" {
		t.Errorf("%v", u)
	}
	reach := w.server.Reach()
	for port, want := range map[int]bool{80: true, 90: false} {
		if got, err := reach.Door(t.Context(), sb.Id, port); got.Public != want || err != nil {
			t.Errorf("port %d: %v %v", port, got, err)
		}
	}
	if got, err := reach.Door(t.Context(), "nosuch", 80); got != (sandbox.Door{}) || err != nil {
		t.Errorf("no sandbox: %v %v", got, err)
	}
	if key, err := reach.AllowKey(t.Context(), w.secret, sb.Id); err != nil || reach.KeyLives(t.Context(), key) != nil {
		t.Error(key, err)
	}
	if _, err := reach.AllowKey(t.Context(), w.secret[:len(w.secret)-1]+"_", sb.Id); !errors.Is(err, sandbox.ErrUnauthenticated) {
		t.Error(err)
	}
	for _, port := range []int32{0, -1, 65536} {
		if _, err := ports.Set(t.Context(), connect.NewRequest(&covev1.SetPortRequest{SandboxId: sb.Id, Port: port})); !errors.Is(err, sandbox.ErrInvalid) {
			t.Errorf("port %d: %v", port, err)
		}
	}
	if _, err := ports.Url(t.Context(), connect.NewRequest(&covev1.PortUrlRequest{SandboxId: sb.Id, Port: 80, Ttl: durationpb.New(48 * time.Hour)})); !errors.Is(err, sandbox.ErrInvalid) {
		t.Errorf("two days: %v", err)
	}
	if _, err := ports.SignSsh(t.Context(), connect.NewRequest(&covev1.SignSshRequest{SandboxId: sb.Id})); !errors.Is(err, sandbox.ErrUnsupported) {
		t.Errorf("no SSH here: %v", err)
	}
	w.kill(sb.Id)
	if _, err := ports.Url(t.Context(), connect.NewRequest(&covev1.PortUrlRequest{SandboxId: sb.Id, Port: 80})); !errors.Is(err, sandbox.ErrEnded) {
		t.Errorf("ended: %v", err)
	}
}

// What was given out with a key ends with it, and a look at the key asks the
// store once.
func TestWhatAKeyGaveOutEndsWithIt(t *testing.T) {
	now := time.Now()
	var mu sync.Mutex
	s := newShared(t, func(c *Config) {
		c.Ports, c.Clock = testGate{}, func() time.Time { mu.Lock(); defer mu.Unlock(); return now }
	})
	ctx, reach := t.Context(), s.server.Reach()
	login := func(key string) error {
		_, err := reach.Login(ctx, s.box, key, "192.0.2.1")
		return err
	}
	made := func(m *covev1.CreateKeyRequest) (id string) {
		t.Helper()
		c := s.dial(s.key(s.red, m))
		r, err := c.Ports.Url(ctx, connect.NewRequest(&covev1.PortUrlRequest{SandboxId: s.box, Port: 80, Ttl: durationpb.New(24 * time.Hour)}))
		if err != nil {
			t.Fatal(err)
		}
		_, id, _ = strings.Cut(r.Msg.Token, " of ")
		if end := r.Msg.ExpiresAt.AsTime(); m.Expires != nil && end.After(now.Add(m.Expires.AsDuration())) {
			t.Errorf("a token until %s of a key that ends before", end)
		}
		if err := errors.Join(reach.KeyLives(ctx, id), login(id)); err != nil || id != s.keyID {
			t.Errorf("key %q of %q: %v", id, s.keyID, err)
		}
		return id
	}
	over := func(id string) {
		t.Helper()
		for range 2 { // what was remembered is no other
			wantError(t, reach.KeyLives(ctx, id), sandbox.ErrUnauthenticated)
			wantError(t, login(id), sandbox.ErrUnauthenticated)
		}
	}
	revoked := made(&covev1.CreateKeyRequest{Name: "revoked"})
	before := s.store.lists.Load()
	for range 100 {
		if err := reach.KeyLives(ctx, revoked); err != nil {
			t.Fatal(err)
		}
	}
	if n := s.store.lists.Load() - before; n != 0 {
		t.Errorf("the store was asked %d times for a key that is known", n)
	}
	if _, err := s.red.Keys.Revoke(ctx, connect.NewRequest(&covev1.RevokeKeyRequest{Id: revoked})); err != nil {
		t.Fatal(err)
	}
	before = s.store.lists.Load()
	over(revoked)
	if n := s.store.lists.Load() - before; n != 1 {
		t.Errorf("the store was asked %d times for a key that is gone", n)
	}

	rotated := made(&covev1.CreateKeyRequest{Name: "rotated"})
	if _, err := s.red.Keys.Rotate(ctx, connect.NewRequest(&covev1.RotateKeyRequest{Id: rotated, Grace: durationpb.New(0)})); err != nil {
		t.Fatal(err)
	}
	if err := reach.KeyLives(ctx, rotated); err != nil {
		t.Error("a rotation is no end:", err)
	}

	short := made(&covev1.CreateKeyRequest{Name: "short", Expires: durationpb.New(time.Hour)})
	mu.Lock()
	now = now.Add(time.Hour)
	mu.Unlock()
	over(short)

	s.tenant("gone")
	gone := s.keyID
	if err := reach.KeyLives(ctx, gone); err != nil {
		t.Fatal(err)
	}
	if _, err := s.client.Tenants.Delete(ctx, connect.NewRequest(&covev1.DeleteTenantRequest{Name: "gone"})); err != nil {
		t.Fatal(err)
	}
	over(gone)
}

func TestConnectPort(t *testing.T) {
	w := newWorld(t)
	sb := w.create(nil)
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer ln.Close()
	served := make(chan struct{})
	go func() {
		defer close(served)
		c, err := ln.Accept()
		if err != nil {
			return
		}
		defer c.Close()
		b, _ := io.ReadAll(c) // to the end of the client's half
		_, _ = c.Write(append([]byte("got "), b...))
	}()
	port := ln.Addr().(*net.TCPAddr).Port
	if err := w.client.CheckPort(t.Context(), sb.Id, port); err != nil { // the one that is accepted below is another
		t.Error(err)
	}
	s, err := w.client.ConnectPort(t.Context(), sb.Id, port)
	if err != nil {
		t.Fatal(err)
	}
	defer s.Close()
	if _, err := io.WriteString(s, "this"); err != nil {
		t.Fatal(err)
	}
	if err := s.CloseWrite(); err != nil {
		t.Fatal(err)
	}
	if b, err := io.ReadAll(s); err != nil || string(b) != "got this" {
		t.Errorf("%q %v", b, err)
	}
	<-served
	ln.Close()
	if _, err := w.client.ConnectPort(t.Context(), sb.Id, port); !errors.Is(err, sandbox.ErrPortClosed) {
		t.Errorf("nothing listens: %v", err)
	}
	if _, err := w.client.ConnectPort(t.Context(), "nosuch", port); !errors.Is(err, sandbox.ErrNotFound) || errors.Is(err, sandbox.ErrPortClosed) {
		t.Errorf("no sandbox: %v", err)
	}
	if err := w.client.CheckPort(t.Context(), sb.Id, port); err != nil {
		t.Errorf("nothing listens yet: %v", err)
	}
	if err := w.client.CheckPort(t.Context(), "nosuch", port); !errors.Is(err, sandbox.ErrNotFound) {
		t.Errorf("no sandbox: %v", err)
	}
	k, err := w.client.Keys.Create(t.Context(), connect.NewRequest(&covev1.CreateKeyRequest{Name: "reader", Role: "readonly"}))
	if err != nil {
		t.Fatal(err)
	}
	if err := (&shared{world: w}).dial(k.Msg.Secret).CheckPort(t.Context(), sb.Id, port); !errors.Is(err, sandbox.ErrDenied) {
		t.Errorf("a readonly key: %v", err)
	}
	if _, err := w.client.ConnectPort(t.Context(), sb.Id, 0); !errors.Is(err, sandbox.ErrInvalid) {
		t.Errorf("port 0: %v", err)
	}
}
