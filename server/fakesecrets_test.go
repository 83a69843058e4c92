package server

import (
	"context"

	"github.com/cove-sandbox/cove/sandbox"
)

// fakeSecrets remembers what was handed over.
type fakeSecrets struct {
	secrets map[string][]sandbox.Secret // by tenant; guarded by the node's mu
	putErr  error                       // of the next PutSecrets
}

func (n *fakeNode) PutSecrets(_ context.Context, tenant string, secrets []sandbox.Secret) error {
	n.mu.Lock()
	defer n.mu.Unlock()
	if err := n.putErr; err != nil {
		n.putErr = nil
		return err
	}
	if n.secrets == nil {
		n.secrets = map[string][]sandbox.Secret{}
	}
	n.secrets[tenant] = secrets
	return nil
}

func (n *fakeNode) UseSecrets(_ context.Context, id string, names []string) (string, error) {
	g, err := n.find(id)
	if err != nil {
		return "", err
	}
	g.mu.Lock()
	defer g.mu.Unlock()
	g.sb.Spec.Secrets = names
	if g.sb.Spec.Authority == "" {
		g.sb.Spec.Authority = id
	}
	return g.sb.Spec.Authority, nil
}
