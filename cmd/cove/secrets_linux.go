package main

import (
	"crypto/x509"
	"encoding/hex"
	"errors"
	"io/fs"
	"os"
	"path/filepath"

	"github.com/cove-sandbox/cove/cas"
	"github.com/cove-sandbox/cove/cli"
	"github.com/cove-sandbox/cove/sandbox"
)

func (p places) secretKey() string { return filepath.Join(p.dir, "secrets.key") }
func (p places) egressKey() string { return filepath.Join(p.dir, "egress.key") }

// secretKeys seal the values of secrets: the keys of state where there are some,
// else one of the data directory, which is made. One that was made stays good
// for what it sealed when keys of state come later.
func secretKeys(c cli.ServeConfig, at places) (*cas.Keyring, error) {
	state, err := stateKeys(c, at)
	if err != nil {
		return nil, err
	}
	own, err := cas.LoadKeyring(at.secretKey())
	if errors.Is(err, fs.ErrNotExist) {
		if state != nil {
			return state, nil
		}
		key := cas.NewKey()
		if err = writeWhole(at.secretKey(), hex.EncodeToString(key[:])+"\n", 0o600); err == nil {
			own, err = cas.LoadKeyring(at.secretKey())
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

// egressRoots are what servers are checked against whose TLS is looked into: the
// host's, and those of a file.
func egressRoots(path string) (*x509.CertPool, error) {
	if path == "" {
		return nil, nil
	}
	b, err := os.ReadFile(path)
	if err != nil {
		return nil, sandbox.InvalidField("egress-roots", "%v", err)
	}
	pool, err := x509.SystemCertPool()
	if err != nil {
		pool = x509.NewCertPool()
	}
	if !pool.AppendCertsFromPEM(b) {
		return nil, sandbox.InvalidField("egress-roots", "%s has no certificate in PEM form", path)
	}
	return pool, nil
}
