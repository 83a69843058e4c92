package world

import (
	"context"
	"encoding/json"
	"hash/crc32"
	"os"
	"testing"

	"connectrpc.com/connect"

	covev1 "github.com/cove-sandbox/cove/api/cove/v1"
	"github.com/cove-sandbox/cove/sandbox"
	"github.com/cove-sandbox/cove/wire"
)

// Origin is what the sandboxes of a world are made of. A suite that holds for
// one must hold for all: COVE_ORIGIN has any test run over another.
type Origin string

const (
	// Fresh ones have a kernel of their own from the pool.
	Fresh Origin = ""
	// Child ones are restored from a checkpoint that all of the same spec share
	// the memory of.
	Child Origin = "child"
	// Reused ones have the kernel of a sandbox of their group that has ended.
	Reused Origin = "reused"
	// Mixed ones are of all these, each by its key.
	Mixed Origin = "mixed"
)

// trustGroup is the one of all reused sandboxes of a world.
const trustGroup = "e2e"

func (o Options) origin(t testing.TB) Origin {
	t.Helper()
	if said := Origin(os.Getenv("COVE_ORIGIN")); said != Fresh && (o.Origin == Fresh || o.Origin == Mixed) {
		o.Origin = said
	}
	switch o.Origin {
	case Fresh, Child, Reused, Mixed:
	default:
		t.Fatalf("COVE_ORIGIN=%s: want %s, %s or %s", o.Origin, Child, Reused, Mixed)
	}
	return o.Origin
}

// originate is spec as the world's origin has it. What an origin cannot be of (state that
// was there before, networks and volumes of reused kernels) is as it is.
//
// A test that kills the server asks again with the same key, and calls Prepare before.
func (w *World) originate(ctx context.Context, spec sandbox.Spec, key string) (sandbox.Spec, error) {
	if spec.Snapshot != "" || spec.Template != "" || spec.Reuse != "" || len(spec.Volumes) > 0 {
		return spec, nil
	}
	origin := w.opts.Origin
	if origin == Mixed { // the same when it is asked for again
		origin = []Origin{Fresh, Child, Reused}[crc32.ChecksumIEEE([]byte(key))%3]
	}
	switch origin {
	case Child:
		id, err := w.checkpointOf(ctx, spec)
		if err != nil {
			return spec, err
		}
		spec.Snapshot, spec.Image = id, ""
	case Reused:
		if spec.Network.Mode != sandbox.NetworkNone && spec.Network.Mode != "" {
			return spec, nil
		}
		spec.Network.Mode, spec.Reuse = sandbox.NetworkNone, trustGroup
		// One that has ended rests for this, unless another takes it first.
		if key != "" {
			key = "before-" + key
		}
		before, err := w.make(ctx, spec, key)
		if err != nil {
			return spec, err
		}
		if _, err := before.TryExec(ctx, litter); err != nil && sandbox.ClassOf(err) != sandbox.Ended { // killed, and nobody was told
			return spec, err
		}
		if _, err := before.TryKill(ctx); err != nil {
			return spec, err
		}
	}
	return spec, nil
}

// litter is what was there before the sandbox of a test.
var litter = sandbox.ProcessSpec{User: "root", Command: "echo before > /tmp/before; cp /tmp/before /dev/shm/; (setsid sleep 1000 &)"}

// Prepare makes what sandboxes of spec come from, for tests that kill the server: nobody
// would know of a sandbox without a key that was made while it died.
func (w *World) Prepare(t testing.TB, spec sandbox.Spec) {
	t.Helper()
	if w.opts.Origin != Child && w.opts.Origin != Mixed {
		return
	}
	if _, err := w.checkpointOf(t.Context(), spec); err != nil {
		t.Fatal(err)
	}
}

// IsOrigin says whether a snapshot is one that sandboxes of this world come from.
func (w *World) IsOrigin(snapshot string) bool {
	w.checkpoints.Lock()
	defer w.checkpoints.Unlock()
	for _, id := range w.checkpoints.of {
		if id == snapshot {
			return true
		}
	}
	return false
}

// checkpointOf is a memory snapshot of a sandbox of spec, one for all that ask.
func (w *World) checkpointOf(ctx context.Context, spec sandbox.Spec) (string, error) {
	spec.Labels = nil // each sandbox's own
	b, err := json.Marshal(spec)
	if err != nil {
		return "", err
	}
	w.checkpoints.Lock()
	defer w.checkpoints.Unlock()
	if id := w.checkpoints.of[string(b)]; id != "" {
		return id, nil
	}
	parent, err := w.make(ctx, spec, "")
	if err != nil {
		return "", err
	}
	s, err := parent.TrySnapshot(ctx, Take{Kind: sandbox.MemorySnapshot, Stop: true})
	if err != nil {
		return "", err
	}
	if w.checkpoints.of == nil {
		w.checkpoints.of = map[string]string{}
	}
	w.checkpoints.of[string(b)] = s.ID
	return s.ID, nil
}

// make creates a sandbox of exactly this spec.
func (w *World) make(ctx context.Context, spec sandbox.Spec, key string) (*Box, error) {
	r, err := w.Client().Sandboxes.Create(ctx, connect.NewRequest(&covev1.CreateSandboxRequest{Spec: wire.Spec(spec), IdempotencyKey: key}))
	if err != nil {
		return nil, err
	}
	return &Box{w, r.Msg.Sandbox.Id}, nil
}
