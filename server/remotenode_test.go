package server

import (
	"bytes"
	"io"
	"log/slog"
	"net"
	"testing"
	"time"

	"google.golang.org/protobuf/types/known/durationpb"

	covev1 "github.com/cove-sandbox/cove/api/cove/v1"
	"github.com/cove-sandbox/cove/node"
	"github.com/cove-sandbox/cove/node/agent/agenttest"
	"github.com/cove-sandbox/cove/node/remote"
	"github.com/cove-sandbox/cove/pki"
	"github.com/cove-sandbox/cove/sandbox"
)

// remoteNode is an agent over the fake driver that is reached by mutual TLS.
func remoteNode(t testing.TB) node.Node {
	t.Helper()
	m, err := agenttest.Open(t.Context(), t.TempDir(), agenttest.Options{})
	if err != nil {
		t.Fatal(err)
	}
	ca, err := pki.Open(t.TempDir(), nil)
	if err != nil {
		t.Fatal(err)
	}
	its, err := ca.Renewing(pki.Node, "n1")
	if err != nil {
		t.Fatal(err)
	}
	ours, err := ca.Renewing(pki.Server, "s1")
	if err != nil {
		t.Fatal(err)
	}
	ln, err := net.Listen("tcp4", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	srv := remote.Server(m.Node, ca.MutualTLS(its, pki.Server), slog.New(slog.DiscardHandler))
	done := make(chan struct{})
	go func() { _ = srv.ServeTLS(ln, "", ""); close(done) }()
	c := remote.Dial(remote.Config{Name: "n1", Address: ln.Addr().String(), TLS: ca.MutualTLS(ours, pki.Node)})
	t.Cleanup(func() {
		_ = c.Close()
		_ = srv.Close()
		<-done
		if err := m.Close(); err != nil {
			t.Error(err)
		}
	})
	return c
}

// The same server serves a node that is elsewhere: nothing of it needs to be here.
func TestANodeElsewhere(t *testing.T) {
	w := newWorld(t, func(c *Config) { c.Node = remoteNode(t) })
	if err := w.server.Reconcile(t.Context()); err != nil {
		t.Fatal(err)
	}
	sb := w.create(nil)
	if out, end, err := rest(w.start(sb.Id, "", "echo hello; exit 3")); err != nil || out != "hello\n" || end.End.ExitCode != 3 {
		t.Fatalf("%q, %+v, %v", out, end, err)
	}
	data := randomBytes(3<<20 + 1)
	if err := w.client.Upload(t.Context(), sb.Id, "f", io.MultiReader(bytes.NewReader(data)), -1, sandbox.WriteOptions{Atomic: true}); err != nil {
		t.Fatal(err)
	}
	body, _, err := w.client.Download(t.Context(), sb.Id, "f", 0, 0)
	if err != nil {
		t.Fatal(err)
	}
	if got, err := io.ReadAll(body); err != nil || !bytes.Equal(got, data) {
		t.Errorf("%d bytes of %d come back, %v", len(got), len(data), err)
	}
	body.Close()

	snap := w.mustSnapshot(&covev1.CreateSnapshotRequest{Sandbox: sb.Id})
	forked, err := w.fork(&covev1.ForkRequest{Id: sb.Id, Count: 2})
	if err != nil || len(forked.Results) != 2 {
		t.Fatalf("%+v, %v", forked, err)
	}
	child := w.create(&covev1.SandboxSpec{Snapshot: snap.Id})
	if out, _, err := rest(w.start(child.Id, "", "wc -c < f")); err != nil || out != "3145729\n" {
		t.Errorf("the child has %q, %v", out, err)
	}
	w.mustSnapshot(&covev1.CreateSnapshotRequest{Sandbox: child.Id, Stop: true})
	if end := w.ended(child.Id); end.Cause != sandbox.KilledByUser {
		t.Errorf("stopped: %+v", end)
	}
	short := w.create(&covev1.SandboxSpec{Timeout: durationpb.New(time.Second)})
	if end := w.ended(short.Id); end.Cause != sandbox.TTL {
		t.Errorf("by itself: %+v", end)
	}
	w.kill(sb.Id)
}
