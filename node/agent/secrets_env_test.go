package agent

import (
	"context"
	"testing"

	"github.com/cove-sandbox/cove/runtime/fake"
	"github.com/cove-sandbox/cove/sandbox"
)

// Secrets that change while a sandbox is being restored are those of the
// containers it has afterwards.
func TestSecretsChangeAmidARestore(t *testing.T) {
	inStateWorld(t, func(t *testing.T, w *world, _ *faultyStore) {
		put := func(placeholder string) {
			t.Helper()
			err := w.PutSecrets(context.Background(), "", []sandbox.Secret{{Name: "api", Hosts: []string{"api.example.com"}, Header: "Authorization",
				Env: "API_KEY", Placeholder: placeholder, Value: sandbox.NewSecretValue("a-value-long-enough")}})
			if err != nil {
				t.Fatal(err)
			}
		}
		put("cove-secret-first-0000000000000000")
		w.create("a", func(s *sandbox.Spec) { s.Secrets = []string{"api"} })
		const second = "cove-secret-second-000000000000000"
		w.drv.Hook(fake.Attach, func(context.Context, string) error { put(second); return nil })
		if _, _, err := w.Restore(t.Context(), "a", baseImage, sandbox.Snapshot{Kind: sandbox.FilesystemSnapshot}); err != nil {
			t.Fatal(err)
		}
		w.drv.Hook(fake.Attach, nil)
		w.Node.mu.Lock()
		defer w.Node.mu.Unlock()
		if got := w.Node.mu.live["a"].container.Env["API_KEY"]; got != second {
			t.Errorf("the next container has %q, want %q", got, second)
		}
	})
}
