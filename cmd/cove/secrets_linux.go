package main

import (
	"crypto/x509"
	"encoding/hex"
	"errors"
	"io/fs"
	"os"
	"path/filepath"

	"github.com/cove-sandbox/cove/cli"
	"github.com/cove-sandbox/cove/internal/durable"
	"github.com/cove-sandbox/cove/internal/seal"
	"github.com/cove-sandbox/cove/pki"
	"github.com/cove-sandbox/cove/sandbox"
)

func (p places) secretKey() string { return filepath.Join(p.dir, "secrets.key") }
func (p places) egressKey() string { return filepath.Join(p.dir, "egress.key") }

// secretKeys seal the values of secrets: the keys of state where there are some,
// else one of the data directory, which is made. One that was made stays good
// for what it sealed when keys of state come later.
func secretKeys(c cli.ServeConfig, at places) (*seal.Keyring, error) {
	state, err := stateKeys(c, at)
	if err != nil {
		return nil, err
	}
	own, err := seal.LoadKeyring(at.secretKey())
	if errors.Is(err, fs.ErrNotExist) {
		if state != nil {
			return state, nil
		}
		key := seal.NewKey()
		if err = durable.Write(at.secretKey(), []byte(hex.EncodeToString(key[:])+"\n"), 0o600); err == nil {
			own, err = seal.LoadKeyring(at.secretKey())
		}
	}
	if err != nil {
		return nil, err
	}
	if state == nil {
		return own, nil
	}
	return state.With(own), nil
}

// sandboxCA are the authorities that the operator has sandboxes trust; nil = none.
func sandboxCA(c cli.ServeConfig) ([]byte, error) {
	if c.SandboxCA == "" {
		return nil, nil
	}
	b, err := os.ReadFile(c.SandboxCA)
	if err != nil {
		return nil, sandbox.InvalidField("sandbox-ca", "%v", err)
	}
	out, err := pki.Certificates(b)
	if err != nil {
		return nil, sandbox.InvalidField("sandbox-ca", "%s: %v", c.SandboxCA, err)
	}
	if len(out) == 0 || len(out) > maxSandboxCA {
		return nil, sandbox.InvalidField("sandbox-ca", "%s has %d bytes of certificates in PEM form; 1 to %d are taken", c.SandboxCA, len(out), maxSandboxCA)
	}
	return out, nil
}

// maxSandboxCA is some hundred certificates: they are written with every create.
const maxSandboxCA = 256 << 10

// roots are what servers are checked against: the host's, those for sandboxes,
// and those of a file; nil = the host's alone.
func roots(ca []byte, path string) (*x509.CertPool, error) {
	if path == "" && len(ca) == 0 {
		return nil, nil
	}
	pool, err := x509.SystemCertPool()
	if err != nil {
		pool = x509.NewCertPool()
	}
	pool.AppendCertsFromPEM(ca)
	if path == "" {
		return pool, nil
	}
	b, err := os.ReadFile(path)
	if err != nil {
		return nil, sandbox.InvalidField("egress-roots", "%v", err)
	}
	if !pool.AppendCertsFromPEM(b) {
		return nil, sandbox.InvalidField("egress-roots", "%s has no certificate in PEM form", path)
	}
	return pool, nil
}
