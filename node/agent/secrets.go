package agent

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"sync"

	"github.com/cove-sandbox/cove/egress/proxy"
	"github.com/cove-sandbox/cove/egress/secret"
	"github.com/cove-sandbox/cove/egress/transform"
	"github.com/cove-sandbox/cove/runtime"
	"github.com/cove-sandbox/cove/sandbox"
)

// Values of secrets are in the node's memory and nowhere else of it: the server
// hands them over when it starts and when they change. Records and the journal
// have names. After a restart a sandbox that has secrets reaches nothing until
// the server has spoken (proxy.Interception.Pending).

// tenantSecrets are the values the server has handed over, by tenant. A tenant that is not in it has not been
// spoken of; one that has none is in it.
type tenantSecrets struct {
	applying sync.Mutex // what is put in force is of the book as it is then

	mu struct {
		sync.Mutex
		of map[string]map[string]sandbox.Secret // by tenant and name
	}
}

func (b *tenantSecrets) put(tenant string, secrets []sandbox.Secret) {
	named := make(map[string]sandbox.Secret, len(secrets))
	for _, s := range secrets {
		named[s.Name] = s
	}
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.mu.of == nil {
		b.mu.of = map[string]map[string]sandbox.Secret{}
	}
	b.mu.of[tenant] = named
}

// find returns those of names that there are. known is false for a tenant that
// has not been spoken of.
func (b *tenantSecrets) find(tenant string, names []string) (found []sandbox.Secret, known bool) {
	b.mu.Lock()
	defer b.mu.Unlock()
	named, known := b.mu.of[tenant]
	for _, n := range names {
		if s, ok := named[n]; ok {
			found = append(found, s)
		}
	}
	return found, known
}

// interception is what is to be done with a sandbox's requests; nil = nothing.
func (n *Node) interception(sb sandbox.Sandbox) (*proxy.Interception, error) {
	if !sb.Spec.Intercepted() {
		return nil, nil
	}
	a, err := n.cfg.Networks.Authority(authorityOf(sb))
	if err != nil {
		return nil, err
	}
	i := &proxy.Interception{Authority: a}
	n.recordings.get(sb.ID).through(i)
	if sb.Spec.Network.Replay != nil { // of a replay nothing leaves, with values or without
		return i, nil
	}
	if h := sb.Spec.Network.Headers; len(h) > 0 {
		set, err := transform.Compile(h)
		if err != nil {
			return nil, err
		}
		i.Names, i.Headers = set.Covers, set.Wrap
	}
	if len(sb.Spec.Secrets) == 0 {
		return i, nil
	}
	found, known := n.secrets.find(sb.Tenant, sb.Spec.Secrets)
	if !known {
		return &proxy.Interception{Pending: true}, nil
	}
	set, err := secret.Compile(found, sb.Spec.Network.Headers...)
	if err != nil {
		return nil, err
	}
	i.Secrets = set.Wrap
	headed := i.Names
	i.Names = func(name string) bool { return set.Covers(name) || headed != nil && headed(name) }
	return i, nil
}

func authorityOf(sb sandbox.Sandbox) string { return cmp.Or(sb.Spec.Authority, sb.ID) }

// environment is what processes of a sandbox start with, over the image's.
// What the user set stays as it is, and so does what the image says about
// certificates.
func (n *Node) environment(sb sandbox.Sandbox, img sandbox.ImageConfig) map[string]string {
	if !n.trusts(sb.Spec, img) {
		return sb.Spec.Env
	}
	env := n.trustEnv(img)
	found, _ := n.secrets.find(sb.Tenant, sb.Spec.Secrets)
	maps.Copy(env, secret.Env(found))
	maps.Copy(env, sb.Spec.Env)
	return env
}

// setEnvLocked makes the environment of b's next container that of its spec and
// of the secrets as they are now. It is computed here and not handed over: what
// was computed before the lock was taken may be older than the last PutSecrets.
func (n *Node) setEnvLocked(b *box) { b.container.Env = n.environment(b.sb, b.image) }

// PutSecrets makes these the secrets of a tenant. Requests that sandboxes make
// from now on go by them. See node.Network.
func (n *Node) PutSecrets(ctx context.Context, tenant string, secrets []sandbox.Secret) error {
	if err := n.call(); err != nil {
		return err
	}
	defer n.calls.Done()
	if _, err := secret.Compile(secrets); err != nil {
		return sandbox.WithOp("node.put_secrets", err)
	}
	n.secrets.put(tenant, secrets)
	n.mu.Lock()
	var boxes []*box
	for _, b := range n.mu.live {
		if b.sb.Tenant == tenant && b.sb.Spec.Intercepted() {
			boxes = append(boxes, b)
		}
	}
	n.mu.Unlock()
	var errs []error
	for _, b := range boxes {
		n.mu.Lock()
		sb, k := b.sb, b.kernel
		n.setEnvLocked(b) // of the next container
		n.mu.Unlock()
		if err := n.intercept(sb, k); err != nil {
			errs = append(errs, fmt.Errorf("sandbox %s: %w", b.id, err))
		}
	}
	if err := errors.Join(errs...); err != nil {
		return sandbox.Errorf(sandbox.Unavailable, "node.put_secrets", "%w", err)
	}
	return nil
}

// intercept puts in force what is to be done with a sandbox's requests.
func (n *Node) intercept(sb sandbox.Sandbox, k runtime.Kernel) error {
	if k == nil || n.cfg.Networks == nil {
		return nil
	}
	n.secrets.applying.Lock()
	defer n.secrets.applying.Unlock()
	box := n.cfg.Networks.Box(k.ID())
	if box == nil {
		return nil
	}
	i, err := n.interception(sb)
	if err != nil {
		return err
	}
	box.Intercept(i)
	return nil
}

// interceptAgain is for a kernel that has just become a sandbox's: a PutSecrets
// since its network was made did not find it.
func (n *Node) interceptAgain(sb sandbox.Sandbox, k runtime.Kernel) {
	if !sb.Spec.Intercepted() {
		return
	}
	if err := n.intercept(sb, k); err != nil {
		n.log.Error("a sandbox goes on with the secrets it began with", "sandbox", sb.ID, "err", err)
	}
}

// UseSecrets says which secrets a sandbox's requests leave with, and returns the
// authority it then has. It is woken: what it is to trust is among its files.
func (n *Node) UseSecrets(ctx context.Context, id string, names []string) (authority string, err error) {
	const op = "node.use_secrets"
	if err := n.call(); err != nil {
		return "", err
	}
	defer n.calls.Done()
	b, release, err := n.hold(ctx, id)
	if err != nil {
		return "", err
	}
	defer release()
	giveBack, err := n.own(ctx, b)
	if err != nil {
		return "", err
	}
	defer giveBack()
	n.mu.Lock()
	sb, container, image := b.sb, b.container, b.image
	n.mu.Unlock()
	if found, _ := n.secrets.find(sb.Tenant, names); len(found) != len(names) {
		return "", sandbox.Errorf(sandbox.NotFound, op, "node %s has %d of %d secrets", n.cfg.Name, len(found), len(names))
	}
	sb.Spec.Secrets = slices.Clone(names)
	if sb.Spec.Intercepted() {
		sb.Spec.Authority = authorityOf(sb)
	}
	if _, err := n.interception(sb); err != nil {
		return "", sandbox.WithOp(op, err)
	}
	container.Env = n.environment(sb, image)
	k := n.inside(b)
	// What it trusts and what its processes are told does nothing by itself.
	if err = n.trust(ctx, sb, b.image, k); err == nil {
		err = k.Guest().SetEnv(ctx, runtime.Environ(container))
	}
	if err == nil {
		err = n.journal.append(record{Kind: recSecrets, ID: id, Secrets: sb.Spec.Secrets, Authority: sb.Spec.Authority})
	}
	if err != nil {
		return "", sandbox.WithOp(op, n.explain(b, k, err))
	}
	n.mu.Lock()
	b.sb.Spec.Secrets, b.sb.Spec.Authority = sb.Spec.Secrets, sb.Spec.Authority
	n.setEnvLocked(b)
	sb = b.sb
	n.mu.Unlock()
	if err := n.intercept(sb, k); err != nil {
		return "", sandbox.WithOp(op, err)
	}
	return sb.Spec.Authority, nil
}
