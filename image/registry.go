package image

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"net"
	"net/http"
	"net/url"
	"os"
	"time"

	"github.com/cove-sandbox/cove/egress/inward"
	"github.com/cove-sandbox/cove/sandbox"
	"github.com/google/go-containerregistry/pkg/authn"
	"github.com/google/go-containerregistry/pkg/name"
	"github.com/google/go-containerregistry/pkg/v1/remote/transport"
	"golang.org/x/sys/unix"
)

// login does a registry's handshake with somebody's credentials. The
// result adds them to every request to that registry, and to no other host.
// Registries on the loopback and on private addresses, if the operator allows
// them, may speak plain HTTP (go-containerregistry's rule).
func (l *Library) login(ctx context.Context, who sandbox.RegistryAccess, repo name.Repository, scope string) (http.RoundTripper, error) {
	auth, err := authn.Anonymous, error(nil)
	switch {
	case who.Username != "":
		auth = &authn.Basic{Username: who.Username, Password: who.Password}
	case who.Operator:
		auth, err = authn.Resolve(ctx, l.opts.Keychain, repo)
	}
	if err != nil {
		return nil, (&sandbox.Error{Class: sandbox.Unauthenticated, Msg: "reading registry credentials", Err: err}).
			WithHint("check ~/.docker/config.json, or log in again with docker login %s", repo.RegistryStr())
	}
	base := transport.NewRetry(l.transport, transport.WithRetryBackoff(transport.Backoff{
		Duration: 200 * time.Millisecond, Factor: 3, Jitter: 0.1, Steps: 3}))
	rt, err := transport.NewWithContext(ctx, repo.Registry, auth, base, []string{repo.Scope(scope)})
	if err != nil {
		return nil, l.registryError(repo.Registry, err)
	}
	return rt, nil
}

// knows asks a registry whether it takes the credentials of a login. Where that is
// done with tokens, login itself has asked.
func (l *Library) knows(ctx context.Context, rt http.RoundTripper, reg name.Registry) error {
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, reg.Scheme()+"://"+reg.RegistryStr()+"/v2/", nil)
	if err != nil {
		return err
	}
	resp, err := rt.RoundTrip(req)
	if err != nil {
		return l.registryError(reg, err)
	}
	defer resp.Body.Close()
	if resp.StatusCode == http.StatusUnauthorized {
		return l.registryError(reg, transport.CheckError(resp, http.StatusOK))
	}
	return nil
}

// registryError gives a registry's answer its class and a way out. What it said
// goes to the log and not to the caller: whoever chose the registry must not
// learn what some server answers to this machine.
func (l *Library) registryError(reg name.Registry, err error) error {
	var se *sandbox.Error
	if errors.As(err, &se) {
		return err
	}
	l.log.Info("registry", "name", reg.Name(), "err", err)
	if errors.Is(err, inward.ErrInward) {
		return (&sandbox.Error{Class: sandbox.Denied, Msg: "registry " + reg.Name() + " leads into this server's own network"}).
			WithHint("if that is meant, the operator allows it: cove serve --registry-allow %s", reg.Name())
	}
	var te *transport.Error
	if errors.As(err, &te) {
		switch te.StatusCode {
		case http.StatusUnauthorized, http.StatusForbidden:
			// Registries also answer so for repositories that do not exist.
			return (&sandbox.Error{Class: sandbox.Unauthenticated, Msg: "no access to this image on " + reg.Name()}).
				WithHint("check the name; if it is private, log in: cove registry login %s --username U --password-stdin", reg.Name())
		case http.StatusNotFound:
			return (&sandbox.Error{Class: sandbox.ImageNotFound, Msg: "no such image on " + reg.Name()}).
				WithHint("check the name and the tag")
		case http.StatusTooManyRequests:
			e := (&sandbox.Error{Class: sandbox.Unavailable, Msg: reg.Name() + " limits the rate of pulls"}).
				WithHint("wait, or pull as a user of it, who may have a higher limit")
			e.RetryAfter = time.Minute
			return e
		}
		if te.StatusCode >= 500 {
			return unavailable(reg, fmt.Errorf("it answered %d", te.StatusCode))
		}
		return &sandbox.Error{Class: sandbox.Unavailable, Msg: fmt.Sprintf("%s answered %d", reg.Name(), te.StatusCode)}
	}
	var op *net.OpError
	var dns *net.DNSError
	var cert *tls.CertificateVerificationError
	var ue *url.Error
	var ne net.Error
	switch {
	case errors.As(err, &cert):
		return unavailable(reg, errors.New("its certificate is not trusted"))
	case errors.As(err, &dns):
		return unavailable(reg, errors.New("its name leads nowhere"))
	case errors.As(err, &op) && op.Op == "dial":
		return unavailable(reg, errors.New("nobody answers there")) // where is not said, nor by whose word
	case errors.As(err, &ue), errors.As(err, &ne):
		return unavailable(reg, errors.New("it did not answer as registries do"))
	}
	// Neither the network nor a status: the registry's answer itself was
	// wrong, such as a manifest that is not what its digest says.
	return corrupt("what %s sent is not what was asked for", reg.Name())
}

func unavailable(reg name.Registry, err error) error {
	return (&sandbox.Error{Class: sandbox.Unavailable, Msg: "registry " + reg.Name() + " cannot be used now", Err: err}).
		WithHint("check that this machine reaches %s; without a registry, images come from tarballs and directories too", reg.Name())
}

func corrupt(format string, args ...any) error {
	return sandbox.Errorf(sandbox.Corrupt, "", format, args...).
		WithHint("the content is not what its digest says; pull again, and suspect the registry or a proxy before it")
}

func retryable(err error) bool { return errors.Is(err, sandbox.ErrUnavailable) }

// unlock gives a partial file's lock up while the descriptor stays open.
func unlock(f *os.File) error { return unix.Flock(int(f.Fd()), unix.LOCK_UN) }
